"""A real torch, captured from outside its network, mount and pid namespaces, without a line of code in it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from rankscope.daemon.captures.kineto.backend import KinetoBackend
from rankscope.daemon.captures.kineto.config import LEAD_SECONDS
from rankscope.daemon.captures.kineto.endpoint import Endpoint
from rankscope.daemon.captures.kineto.sockets import network_namespace
from rankscope.daemon.captures.orders import CancelledError, CaptureError, Order, Recording, Stage, Workspace
from rankscope.daemon.procfs import read_stat, read_status
from rankscope.daemon.samples import RankProcess
from tests.integration.private_tmp import PRIVATE_TMP
from tests.support.processes import children
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(os.getuid() != 0, reason="to enter namespaces needs root"),
    pytest.mark.acceptance,
]

SCRIPT = Path(__file__).parent.parent / "integration" / "jobs" / "kineto_trainer.py"
# A /tmp that nobody else sees, and polls every second.
ENTER = f"""
{PRIVATE_TMP} && echo ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1 >/tmp/kineto.conf && exec "$0" "$@"
"""
ENVIRONMENT = {"KINETO_USE_DAEMON": "1"}


@dataclass
class Trainer:
    process: subprocess.Popen[str]
    rank: RankProcess

    def tells(self, word: str, expected: str) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()
        assert self.process.stdout.readline() == expected + "\n"

    def files(self) -> list[str]:
        """That captures have left in it."""
        return sorted(entry.name for entry in Path("/proc", str(self.rank.pid), "root", "tmp").glob("rankscope*"))


@dataclass
class Capturing:
    """A recording under way, in a thread of its own."""

    stages: list[Stage] = field(default_factory=list)
    cancelled: threading.Event = field(default_factory=threading.Event)
    future: Future[Recording] = field(default_factory=Future)

    def wait_for_stage(self, stage: Stage) -> None:
        wait_until(lambda: stage in self.stages or self.future.done())
        assert stage in self.stages, self.future.exception()

    def result(self) -> Recording:
        return self.future.result(120)


@contextmanager
def trainer(number: int, *unshare: str, **more: str) -> Iterator[Trainer]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_"))}
    environment |= ENVIRONMENT | {"KINETO_CONFIG": "/tmp/kineto.conf", "OMP_NUM_THREADS": "1", **more}
    command = ["unshare", "--net", "--mount", *unshare, "sh", "-c", ENTER, sys.executable, str(SCRIPT)]
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "training\n"
        pid = process.pid
        if "--pid" in unshare:
            pid = children(pid)[0]
        status, stat = read_status(f"/proc/{pid}"), read_stat(f"/proc/{pid}")
        yield Trainer(
            process, RankProcess("j", number, number, 2, pid, stat.start_ticks, status.namespace_pids, ENVIRONMENT)
        )
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def trainers() -> Iterator[tuple[Trainer, Trainer]]:
    boxed = ("--pid", "--fork", "--kill-child", "--mount-proc")
    with trainer(0) as first, trainer(1, *boxed) as second:
        yield first, second


@pytest.fixture(scope="module")
def endpoint(trainers: tuple[Trainer, Trainer]) -> Iterator[Endpoint]:
    serving = Endpoint()
    serving.start()
    serving.watch({network_namespace(each.rank.pid): each.rank.pid for each in trainers})
    try:
        wait_until(lambda: all(serving.client(each.rank.pid) is not None for each in trainers))
        yield serving
    finally:
        serving.stop()


@pytest.fixture(scope="module")
def backend(endpoint: Endpoint) -> KinetoBackend:
    return KinetoBackend(endpoint)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


class Captures:
    def __init__(self, backend: KinetoBackend, threads: ThreadPoolExecutor, folder: Path) -> None:
        self._backend, self._threads, self._folder = backend, threads, folder
        self._count = 0

    def begin(
        self, *trainers: Trainer, seconds: float = 1.0, patience_seconds: float = 60.0, ahead_seconds: float = 0.0
    ) -> list[Capturing]:
        """All at one start, as the conductor would have it."""
        ranks = [each.rank for each in trainers]
        earliest = time.time() + max(map(self._backend.poll_seconds, ranks)) + LEAD_SECONDS + 0.3 + ahead_seconds
        start = self._backend.common_start(ranks, earliest)
        self._count += 1
        capture_id, millis = f"c-{self._folder.name}-{self._count}", round(start * 1000)
        begun = []
        for rank in ranks:
            order = Order(capture_id, rank, None, seconds, millis, start + patience_seconds)
            each = Capturing()
            each.future = self._threads.submit(
                self._backend.record, order, Workspace(self._folder), each.stages.append, each.cancelled
            )
            begun.append(each)
        return begun


@pytest.fixture
def captures(backend: KinetoBackend, threads: ThreadPoolExecutor, tmp_path: Path) -> Captures:
    return Captures(backend, threads, tmp_path)


def operators(recording: Recording) -> tuple[float, list[dict[str, object]]]:
    """When the first began, in unix seconds, and all of them."""
    trace = json.loads(recording.path.read_bytes())
    found = [event for event in trace["traceEvents"] if event.get("cat") == "cpu_op"]
    assert found, "the process trained, and nothing was recorded"
    return trace["baseTimeNanoseconds"] / 1e9 + min(event["ts"] for event in found) / 1e6, found


def test_two_processes_in_other_namespaces_are_recorded_at_once(
    trainers: tuple[Trainer, Trainer], backend: KinetoBackend, captures: Captures
) -> None:
    assert [backend.objection(each.rank) for each in trainers] == [None, None]
    begun = captures.begin(*trainers)
    recordings = [each.result() for each in begun]
    starts = []
    for each, recording, capturing in zip(trainers, recordings, begun, strict=True):
        start, found = operators(recording)
        starts.append(start)
        assert {event["pid"] for event in found} == {each.rank.namespace_pids[-1]}
        assert any("addmm" in str(event["name"]) for event in found)
        assert recording.is_trace
        assert recording.start_unix_millis is not None
        assert abs(start - recording.start_unix_millis / 1000) < 0.3
        assert capturing.stages == [Stage.ARMED, Stage.RUNNING]
        assert each.files() == [], "what was fetched is removed"
    print(f"skew {1000 * abs(starts[0] - starts[1]):.1f} ms")
    # Milliseconds on a quiet machine; a start by chance would be seconds apart.
    assert abs(starts[0] - starts[1]) < 0.3


def test_a_cancelled_capture_leaves_nothing_and_the_next_succeeds(
    trainers: tuple[Trainer, Trainer], captures: Captures
) -> None:
    first, _ = trainers
    (before,) = captures.begin(first, ahead_seconds=30)
    before.cancelled.set()
    with pytest.raises(CancelledError):
        before.result()
    (during,) = captures.begin(first, seconds=1.0)
    during.wait_for_stage(Stage.RUNNING)
    during.cancelled.set()
    with pytest.raises(CancelledError):
        during.result()
    (after,) = captures.begin(first)  # libkineto records for the cancelled one until it is done
    operators(after.result())
    wait_until(lambda: first.files() == [])


def test_a_start_that_libkineto_refuses_is_noticed_and_made_good(
    trainers: tuple[Trainer, Trainer], captures: Captures
) -> None:
    first, _ = trainers
    (capturing,) = captures.begin(first)
    capturing.wait_for_stage(Stage.ARMED)
    first.process.send_signal(signal.SIGSTOP)  # it sleeps through its start
    capturing.wait_for_stage(Stage.RUNNING)
    first.process.send_signal(signal.SIGCONT)
    recording = capturing.result()
    operators(recording)
    assert recording.notes[0] == "took a configuration and recorded nothing, so it was asked again"
    assert "after the others" in recording.notes[1]


def test_a_capture_waits_for_the_users_profiler_or_reports_it(
    trainers: tuple[Trainer, Trainer], endpoint: Endpoint, captures: Captures
) -> None:
    first, _ = trainers

    def is_held() -> bool:
        client = endpoint.client(first.rank.pid)
        return client is not None and not client.is_ready

    first.tells("profile", "profiling")
    wait_until(is_held)
    (impatient,) = captures.begin(first, patience_seconds=0.0)
    with pytest.raises(CaptureError, match="a profiler of the user's own is active; stop it, or"):
        impatient.result()
    (patient,) = captures.begin(first)
    first.tells("stop", "stopped")
    operators(patient.result())


def test_a_users_profiler_started_mid_capture_harms_neither(
    trainers: tuple[Trainer, Trainer], captures: Captures
) -> None:
    first, _ = trainers
    (capturing,) = captures.begin(first, seconds=2.0)
    capturing.wait_for_stage(Stage.RUNNING)
    first.tells("profile", "profiling")
    time.sleep(0.2)
    first.tells("stop", "stopped")
    operators(capturing.result())


def test_a_killed_process_fails_alone_and_the_other_succeeds(
    trainers: tuple[Trainer, Trainer], endpoint: Endpoint, captures: Captures
) -> None:
    first, second = trainers
    kept, lost = captures.begin(first, second, seconds=1.0)
    lost.wait_for_stage(Stage.RUNNING)
    os.kill(second.rank.pid, signal.SIGKILL)
    with pytest.raises(CaptureError, match=r"rank 1 \(pid \d+\): the process ended during the capture"):
        lost.result()
    operators(kept.result())
    assert first.files() == []
    _, errors = first.process.communicate(timeout=60)
    assert first.process.returncode == 0, errors


def test_a_shared_directory_allows_recording_through_a_file_socket(threads: ThreadPoolExecutor, tmp_path: Path) -> None:
    # Not in /tmp, which the trainer sees another one of.
    with tempfile.TemporaryDirectory(prefix="kineto-", dir="/var/tmp") as directory:
        endpoint = Endpoint(socket_directory=directory)
        endpoint.start()
        try:
            with trainer(0, KINETO_IPC_SOCKET_DIR=directory) as shared:
                wait_until(lambda: endpoint.client(shared.rank.pid) is not None)
                (capturing,) = Captures(KinetoBackend(endpoint), threads, tmp_path).begin(shared)
                operators(capturing.result())
                assert shared.files() == []
                _, errors = shared.process.communicate(timeout=60)
                assert shared.process.returncode == 0, errors
        finally:
            endpoint.stop()
        assert not Path(directory, "dynolog").exists()
