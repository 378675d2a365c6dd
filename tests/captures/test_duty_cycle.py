"""The duty cycle on real jobs without a probe: one with a slow rank, and its healthy twin beside it. No stacks are
taken, so that whatever is said of a rank was said by captures."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from rankscope.v1 import rank_service_pb2, rank_service_pb2_grpc, window_pb2
from tests.integration.capture_jobs import RANKS, capture_job
from tests.integration.daemon_process import MAIN, Serving, run_of, serving
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.timeout(900),
    pytest.mark.skipif(os.geteuid() != 0, reason="entering another network namespace takes CAP_SYS_ADMIN: run as root"),
]
STEPS = 10
SLOW, TWIN = f"duty-slow-{os.getpid()}", f"duty-twin-{os.getpid()}"
FLAGS = ("--duty-cycle-steps", str(STEPS), "--duty-cycle-seconds", "30", "--duty-cycle-budget-ratio", "0.5")
PATIENCE_SECONDS = 600.0


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rankscope-", dir="/var/tmp") as made:
        yield Path(made)


class Watched:
    """All windows that the daemon tells, by job and rank."""

    def __init__(self, target: str) -> None:
        self._channel = grpc.insecure_channel(target)
        self._stream = rank_service_pb2_grpc.RankServiceStub(self._channel).WatchRanks(
            rank_service_pb2.WatchRanksRequest()
        )
        self._windows: dict[tuple[str, int], list[window_pb2.RankWindow]] = defaultdict(list)
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        try:
            for message in self._stream:
                with self._lock:
                    for window in message.windows:
                        self._windows[window.identity.job, window.identity.rank].append(window)
        except grpc.RpcError:
            pass

    def close(self) -> None:
        self._stream.cancel()
        self._channel.close()

    def of(self, run: str) -> dict[int, list[window_pb2.RankWindow]]:
        with self._lock:
            return {rank: list(windows) for (job, rank), windows in self._windows.items() if run in job}

    def captured(self, run: str) -> dict[int, list[window_pb2.RankWindow]]:
        return {rank: [w for w in windows if is_captured(w)] for rank, windows in self.of(run).items()}

    def counts(self, run: str) -> int:
        """Recordings that all ranks have ended."""
        return min(map(len, self.captured(run).values()), default=0)


def is_captured(window: window_pb2.RankWindow) -> bool:
    return window.sources.get("communication_seconds") == window_pb2.SOURCE_CAPTURE


def is_ours(job: str) -> bool:
    """Others may be running on this machine."""
    return SLOW in job or TWIN in job


def said_of(run: str, up: Serving) -> str:
    return "\n".join(line for line in up.output.splitlines() if run in line)


def self_seconds(windows: list[window_pb2.RankWindow]) -> float:
    """A step's own work, typically."""
    return statistics.median(window.self_seconds.mean for window in windows)


def test_without_the_probe_captures_alone_find_only_the_slow_rank(
    folder: Path,
) -> None:
    with (
        serving(folder / "up", "up", "--stack-rate-hertz", "0", *FLAGS) as up,
        capture_job(folder / "slow", SLOW, slow_rank=2, probe=False) as slow,
        capture_job(folder / "twin", TWIN, probe=False) as twin,
    ):
        watched = Watched(up.grpc_target)

        def told() -> str:
            counts = {run: [len(w) for w in watched.captured(run).values()] for run in (SLOW, TWIN)}
            duty = [sample for sample in up.scrape() if "duty" in sample[0]]
            return f"{counts}\n{duty}\n{up.output[-3000:]}\n{up.log[-4000:]}"

        wait_until(lambda: "rank 2 is slow" in said_of(SLOW, up), told, PATIENCE_SECONDS)
        shown = {(run_of(who), who["rank"]) for name, who, _ in up.scrape() if name == "rankscope_rank_self_seconds"}
        assert len([job for job, _ in shown if SLOW in job]) == RANKS, (shown, told())
        wait_until(lambda: all(map(len, watched.captured(TWIN).values())), told, PATIENCE_SECONDS)
        for run in (SLOW, TWIN):
            by_rank = watched.captured(run)
            assert sorted(by_rank) == list(range(RANKS)), told()
            for rank, windows in by_rank.items():
                for window in windows:
                    assert (
                        window.steps == STEPS and window.HasField("self_seconds") and window.HasField("wait_seconds")
                    ), told()
                    assert window.figures["communication_seconds"] > 0, told()
                    assert window.self_seconds.mean + window.wait_seconds.mean == pytest.approx(
                        window.step_seconds.mean
                    )
                # A capture is in one window: the next one knows of no step.
                numbers = {window.sequence for window in windows}
                later = [w for w in watched.of(run)[rank] if w.sequence - 1 in numbers]
                assert not any(window.HasField("steps") for window in later), told()
        own = {rank: self_seconds(windows) for rank, windows in watched.captured(SLOW).items()}
        assert max(own, key=lambda rank: own[rank]) == 2, (own, told())
        assert own[2] > 0.06, (own, told())  # it sleeps so long in every step
        assert "slow" not in said_of(TWIN, up), told()
        _records_tell_the_same(up, folder)
        for run, job in ((SLOW, slow), (TWIN, twin)):
            # Right after a recording: libkineto may abort a process that ends during one.
            before = watched.counts(run)
            wait_until(lambda run=run, before=before: watched.counts(run) > before, told, PATIENCE_SECONDS)
            assert job.stop() == 0, job.log
        watched.close()


def _records_tell_the_same(up: Serving, folder: Path) -> None:
    assert (up.value("rankscope_duty_cycle_captures_total", result="done") or 0) >= 1
    command = [*MAIN, "captures", "ls", "--connect", up.grpc_target, "--json"]
    listed = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)["captures"]
    assert {capture["requested_by"] for capture in listed if is_ours(capture["job"])} == {"duty cycle"}, listed
    ended = [capture["job"] for capture in listed if capture["state"] in ("analysed", "failed")]
    assert len(ended) == len(set(ended)), listed  # the newest of each job
    assert not list((folder / "up" / "captures").glob("*/*.gz"))
