"""The daemon on a stub of the driver's library with two GPUs, and two processes that look like ranks on them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from rankscope.common.run_names import run_labels
from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from rankscope.v1.window_pb2 import SOURCE_GPU, RankWindow
from tests.support.waiting import wait_until
from tools.nvml_stub import Script, build_stub

from .daemon_process import PATIENCE_SECONDS, Serving, run_of, serving

GOLDEN = Path(__file__).parents[1] / "data" / "gpu_metrics.txt"
RUN_ID = f"gpu-test-{os.getpid()}"
# Maps a file by torch's name, which is how a rank is told from other programs.
RANK = """
import mmap, sys
with open(sys.argv[1]) as file:
    torch = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
print("ready", flush=True)
sys.stdin.read()
"""
TRANSFORMER = {
    "gpu.gpm.2": 90.7,
    "gpu.gpm.3": 29.7,
    "gpu.gpm.5": 57.4,
    "gpu.gpm.7": 57.4,
    "gpu.gpm.10": 28.3,
    "gpu.0.utilization": 97,
    "gpu.1.sm_clock": 1200,
    "gpu.1.reasons": 0x40,
    "gpu.1.ecc.volatile.uncorrected": 3,
    "gpu.1.remapped.pending": 1,
}
# What depends on the moment.
PASSING = re.compile(
    r"^(rankscope_gpu_(?:throttled_seconds_total\{.*|polls_total\{.*|poll_seconds_total\{.*)) \S+$", re.M
)


@contextmanager
def ranks(folder: Path) -> Iterator[list[int]]:
    library = folder / "libtorch_fake.so"
    library.write_text("not torch")
    started: list[subprocess.Popen[str]] = []
    try:
        for number in range(2):
            identity = {"RANK": number, "LOCAL_RANK": number, "WORLD_SIZE": 2, "MASTER_ADDR": "10.0.0.9"}
            environment = {**os.environ, "TORCHELASTIC_RUN_ID": RUN_ID, **{k: str(v) for k, v in identity.items()}}
            command = [sys.executable, "-c", RANK, str(library)]
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.append(process)
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.communicate("")


@pytest.fixture(scope="module")
def stubbed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Serving, Script, list[int]]]:
    folder = tmp_path_factory.mktemp("gpu")
    script = Script(folder / "script", gpus=2, **TRANSFORMER)
    with ranks(folder) as pids:
        script.set({f"gpu.{number}.processes": f"{pid}:1073741824" for number, pid in enumerate(pids)})
        environment = script.environment(build_stub(folder))
        flags = ("--node", "node-a", "--gpu-interval-seconds", "0.3", "--stack-rate-hertz", "0")
        with serving(folder, "daemon", *flags, "--captures", "false", environment=environment) as daemon:
            yield daemon, script, pids


def job_of(daemon: Serving) -> str:
    return next(run_of(labels) for name, labels, _ in daemon.scrape() if RUN_ID in run_of(labels))


def test_metrics_of_two_gpus_are_as_in_the_golden_file(stubbed: tuple[Serving, Script, list[int]]) -> None:
    """REGENERATE_GOLDEN=1 rewrites the file; look at the difference before committing it."""
    daemon, _, _ = stubbed
    # Two readings make the first profile.
    daemon.wait_until(lambda: len(daemon.values("rankscope_gpu_estimated_hfu_ratio")) == 2)
    with urllib.request.urlopen(daemon.metrics_url, timeout=PATIENCE_SECONDS) as answer:
        lines = answer.read().decode().splitlines(keepends=True)
    text = PASSING.sub(r"\1 *", "".join(line for line in lines if "rankscope_gpu_" in line))
    if os.environ.get("REGENERATE_GOLDEN"):
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_each_rank_gets_the_figures_of_its_own_gpu(stubbed: tuple[Serving, Script, list[int]]) -> None:
    daemon, _, pids = stubbed
    daemon.wait_until(lambda: len(daemon.values("rankscope_gpu_info")) == 2)
    gpus = {labels["index"]: labels["gpu"] for name, labels, _ in daemon.scrape() if name == "rankscope_gpu_info"}
    expected = [(str(pid), gpus[str(number)]) for number, pid in enumerate(pids)]

    def joined() -> list[tuple[str, str]]:
        infos = [labels for name, labels, _ in daemon.scrape() if name == "rankscope_rank_info"]
        return [(labels["pid"], labels["gpu"]) for labels in infos if RUN_ID in run_of(labels)]

    daemon.wait_until(lambda: joined() == expected)
    peak = ("rankscope_rank_peak_flops_per_second", run_labels(job_of(daemon)))
    daemon.wait_until(lambda: daemon.values(peak[0], **peak[1]) == [989e12, 989e12])
    throttled = window_of(daemon, 1)
    assert throttled.sources["gpu"] == SOURCE_GPU and throttled.identity.gpu_model == "NVIDIA H200"
    assert throttled.gpu.sm_clock_ratio == pytest.approx(1200 / 1980)
    assert throttled.gpu.estimated_flops_per_second == pytest.approx(0.574 * 989e12 * 1200 / 1980)
    assert not throttled.gpu.shared


def is_measured(window: RankWindow) -> bool:
    """Two readings make the first profile."""
    return window.HasField("gpu") and window.gpu.HasField("estimated_flops_per_second")


def window_of(daemon: Serving, rank: int) -> RankWindow:
    with grpc.insecure_channel(daemon.grpc_target) as channel:
        for response in RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS):
            for window in response.windows:
                if RUN_ID in window.identity.job and window.identity.rank == rank and is_measured(window):
                    return RankWindow.FromString(window.SerializeToString())
    raise AssertionError(f"no window of rank {rank} has a GPU: {daemon.log}")


def test_a_hung_driver_delays_no_window_and_recovery_is_noticed(
    stubbed: tuple[Serving, Script, list[int]],
) -> None:
    daemon, script, _ = stubbed
    script.set({"hang.nvmlDeviceGetPowerUsage": 1, "hang.nvmlDeviceGetUtilizationRates": 1})
    daemon.wait_until(lambda: daemon.values("rankscope_gpu_up") == [0, 0])
    before = daemon.value("rankscope_daemon_windows_total") or 0
    daemon.wait_until(lambda: (daemon.value("rankscope_daemon_windows_total") or 0) >= before + 8)
    assert daemon.is_healthy() and daemon.value("rankscope_collector_success", collector="gpu") == 1
    assert daemon.values("rankscope_gpu_power_watts") == []
    script.set({"hang.nvmlDeviceGetPowerUsage": None, "hang.nvmlDeviceGetUtilizationRates": None})
    wait_until(lambda: daemon.values("rankscope_gpu_up") == [1, 1], lambda: daemon.log)


def test_a_missing_driver_is_reported_once_and_the_daemon_continues(tmp_path: Path) -> None:
    """A library that says there is no driver: as on a node without GPUs, whatever this machine has."""
    script = Script(tmp_path / "script", init_error=9)
    environment = script.environment(build_stub(tmp_path))
    with serving(tmp_path, "daemon", "--captures", "false", environment=environment) as daemon:
        daemon.wait_until(lambda: daemon.value("rankscope_gpu_source_state", source="nvml", state="no_driver") == 1)
        assert daemon.values("rankscope_gpu_info") == []
        assert daemon.value("rankscope_collector_success", collector="gpu") == 1
        daemon.wait_for_words("nvml: no_driver")
        assert daemon.log.count("info rankscope.daemon.gpu.collector: nvml: no_driver") == 1
