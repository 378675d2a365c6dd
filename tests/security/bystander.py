"""A job that must not notice an attack: a real daemon and a real 2-rank job with a slow rank 1, on a node of their own.

The node is a pid namespace. Only processes that are started in it are seen by the daemon:

    with bystander.under_attack() as watch:
        with bystander.node():              # no threads can be started inside, processes only
            attacker = subprocess.Popen([...])
        ...wait until the attack is in force...
        watch.observe()

`under_attack` fails if windows, stack samples or the verdict of the job suffer, or if the daemon takes too much memory
or CPU. Processes that are left in the node are killed at the end of the session. A program that needs the node's
/proc is started with `*bystander.enter` before its command. `with_flags` starts a second daemon beside the first.

Times that the daemon reports are compared without their whole hours: a test may set its clock by an hour."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import pytest

from rankscope.operator.correlation.correlator import Correlator, JobState
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.runs.daemon_streams import DaemonStreams
from rankscope.operator.runs.rank_binding import Binding
from rankscope.v1.rank_service_pb2 import WatchRanksRequest, WatchRanksResponse
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from tests.free_ports import free_port
from tests.integration.daemon_process import Serving
from tests.integration.probe_running import PROBE_PATH
from tests.integration.small_job import SCRIPT
from tests.machine_pauses import MachinePauses
from tests.namespaces import missing_for_nodes
from tests.support.processes import children, family_cpu_seconds
from tests.support.waiting import wait_until

RANKS = (0, 1)
SLOW_RANK = 1
RUN_ID = "bystander"

WINDOW_SECONDS = 1.0
# One percent of a core per rank is for windows of two seconds; these are half as long.
BUDGET_RATIO = 0.02
OBSERVED_SECONDS = 12.0
OBSERVATIONS = 5
# That the machine may lose meanwhile: a fifth of the budget.
MOST_LOST_SECONDS = 0.1
# py-spy's samples of a recording arrive when it ends.
RECORDING_SECONDS = 5.0

LEAST_RECORDED_RATIO = 0.6  # before an attack; of a plan without pauses, attaching takes some of the time
LEAST_WINDOWS_RATIO = 0.95
LEAST_SAMPLES_RATIO = 0.5
LEAST_VERDICTS_RATIO = 0.8
MOST_RESIDENT_BYTES = 150_000_000
MOST_BUDGET_RATIO = 1.5

PATIENCE_SECONDS = 240.0
NODE = "bystander"
_ANNOUNCED = re.compile(
    r"^rankscope daemon: metrics (http://\S+/metrics), grpc unix:([^\s,]+), grpc 127\.0\.0\.1:(\d+)", re.M
)
# Its first process reaps what is left behind in it. The priority is for a busy machine: others' load is no attack.
_NAMESPACE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
_NAMESPACE += ("--propagation", "slave", "sh", "-c", "while :; do sleep 1000 & wait; done")
_PRIORITY = ("nice", "-n", "-10")
# Temporary files of the daemon: an attack may fill its disk and nobody else's.
_ON_SMALL_DISK = 'mount -t tmpfs -o size=16m none "$TMPDIR" && exec "$@"'
_HOUR = 3600.0
_AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
_CLONE_NEWPID = 0x20000000


# CPU seconds that callers have asked for between two times, which come on top of the budget (docs/security.md).
OnTop = Callable[[float, float], float]


class Node:
    """The namespace and the job in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._unshared = subprocess.Popen(_NAMESPACE)
        self.ranks: list[subprocess.Popen[bytes]] = []
        self.older: list[subprocess.Popen[bytes]] = []
        wait_until(lambda: children(self._unshared.pid), lambda: "no namespace")
        (self._init,) = children(self._unshared.pid)
        wait_until(lambda: _namespace(self._init) != _namespace(os.getpid()), lambda: "no namespace")
        self.enter = ("nsenter", "--mount", "--target", str(self._init), "--")
        wait_until(self._has_own_proc, lambda: "the namespace has no /proc")

    def _has_own_proc(self) -> bool:
        read = subprocess.run([*self.enter, "cat", "/proc/1/cmdline"], capture_output=True)
        return read.stdout.startswith(b"sh\0")

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Processes that the calling thread starts are in the namespace. Their pids are ours to signal and wait for."""
        _set_pid_namespace(self._init)
        try:
            yield
        finally:
            _set_pid_namespace(os.getpid())

    def start_job(self) -> None:
        base = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "KINETO"))}
        base |= {"PYTHONPATH": PROBE_PATH, "OMP_NUM_THREADS": "1", "WORLD_SIZE": str(len(RANKS))}
        base |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": RUN_ID}
        base |= {"JOB_FOLDER": str(self.folder), "SLOW_RANK": str(SLOW_RANK)}
        with (self.folder / "job-log").open("wb") as log, self.entered():
            self.older = [subprocess.Popen([*_AS_NOBODY, "sh"], stdin=subprocess.PIPE) for _ in RANKS]
            self.ranks = [
                subprocess.Popen(
                    [*_PRIORITY, *self.enter, sys.executable, str(SCRIPT)],
                    env=base | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=log,
                )
                for rank in RANKS
            ]

    def close(self) -> None:
        self._unshared.kill()  # and with it all of its namespace
        for process in (*self.older, *self.ranks, self._unshared):
            process.communicate()


@dataclass(frozen=True)
class _Seen:
    """A window, or a verdict, and when it arrived."""

    at: float
    rank: int
    start: float
    end: float


@dataclass(frozen=True)
class _Recording:
    rank: int
    start: float
    end: float
    samples: int


@dataclass
class _Watched:
    """What the daemon has sent, by threads that outlive an attack."""

    pids: frozenset[int]  # of the job, as the daemon knows them: others may claim its name
    job: str = ""
    windows: list[_Seen] = field(default_factory=list)
    recordings: list[_Recording] = field(default_factory=list)
    granted: list[tuple[float, float]] = field(default_factory=list)  # arrival, CPU seconds of budget
    verdicts: list[tuple[float, JobState]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, message: WatchRanksResponse) -> None:
        now = time.time()
        self.granted.append((now, BUDGET_RATIO * WINDOW_SECONDS * len(message.windows)))
        for window in message.windows:
            if window.identity.pid not in self.pids:
                continue
            self.job = window.identity.job
            rank, start, end = window.identity.rank, *_near(now, window.start_unix_nanos, window.end_unix_nanos)
            self.problems = [*self.problems[-20:], *window.problems]
            if window.HasField("steps"):  # without them it is of no use
                self.windows.append(_Seen(now, rank, start, end))
            if window.HasField("stacks") and window.stacks.samples:
                stacks = window.stacks
                recorded = _near(now, stacks.start_unix_nanos, stacks.end_unix_nanos)
                self.recordings.append(_Recording(rank, *recorded, stacks.samples))

    def judge(self, states: tuple[JobState, ...]) -> None:
        self.verdicts += [(time.time(), state) for state in states if state.job == self.job]

    def windows_in(self, rank: int, start: float, end: float) -> int:
        return len({seen.start for seen in self.windows if seen.rank == rank and start <= seen.start < end})

    def are_watched_until(self, end: float) -> bool:
        ends = {seen.rank: seen.end for seen in self.windows}
        return all(ends.get(rank, 0.0) >= end for rank in RANKS)

    def are_recorded_until(self, end: float) -> bool:
        ends = {recording.rank: recording.end for recording in self.recordings}
        return all(ends.get(rank, 0.0) >= end for rank in RANKS)

    def recorded_ratio(self, start: float, end: float) -> float:
        """Share of the time in which the rank that is recorded least was recorded."""
        seconds = dict.fromkeys(RANKS, 0.0)
        for recording in self.recordings:
            seconds[recording.rank] += max(0.0, min(end, recording.end) - max(start, recording.start))
        return min(seconds.values()) / (end - start)

    def rate(self) -> float:
        """Stack samples per second in the last recordings."""
        end = max(recording.end for recording in self.recordings)
        return self.samples_in(end - 2 * RECORDING_SECONDS, end) / (2 * RECORDING_SECONDS)

    def samples_in(self, start: float, end: float) -> float:
        """Stack samples of both ranks, each recording by the share of it that is in the time."""
        total = 0.0
        for recording in self.recordings:
            within = min(end, recording.end) - max(start, recording.start)
            total += recording.samples * max(0.0, within) / max(1e-3, recording.end - recording.start)
        return total


def wrong(figures: Mapping[str, float]) -> list[str]:
    limits = {
        "windows were lost": figures["windows"] < LEAST_WINDOWS_RATIO,
        "too few stack samples": figures["samples"] < LEAST_SAMPLES_RATIO,
        "the verdict is wrong": figures["verdicts"] < LEAST_VERDICTS_RATIO,
        "too much memory": figures["resident_bytes"] > MOST_RESIDENT_BYTES,
        "over the CPU budget": figures["budget"] > MOST_BUDGET_RATIO,
    }
    return [words for words, is_broken in limits.items() if is_broken]


class Watch:
    """An attack, observed."""

    def __init__(self, bystander: Bystander) -> None:
        self._bystander = bystander
        self.figures: Mapping[str, float] | None = None

    def observe(self, seconds: float = OBSERVED_SECONDS, on_top: OnTop = lambda start, end: 0.0) -> None:
        """Waits while windows pass under the attack; again if something is wrong and the machine lost time
        meanwhile."""
        for _ in range(OBSERVATIONS):
            began = time.monotonic()
            figures = self._bystander.measure(seconds, on_top)
            lost_seconds = self._bystander.pauses.lost_since(began)
            self.figures = {**figures, "lost_seconds": lost_seconds}
            if not wrong(figures) or lost_seconds < MOST_LOST_SECONDS:
                break

    def check(self) -> None:
        assert self.figures is not None, "the attack was not observed: call observe()"
        self._bystander.check(self.figures)


class Bystander:
    """A daemon and the job that it watches. `start` before use; `stop` leaves nothing behind."""

    def __init__(self, folder: Path, node: Node, *flags: str, launcher: Sequence[str] = ()) -> None:
        self.folder = folder
        self._node = node
        self._flags = flags
        self._launcher = launcher
        self._watched = _Watched(frozenset(_pid_within(process.pid) for process in node.ranks))
        self._correlator = Correlator()
        self._correlator.listen(self._watched.judge)
        self._binding = Binding()
        self._streams = DaemonStreams(self._accept)
        self._ends: list[Callable[[], object]] = []
        self.pauses = MachinePauses()
        self.samples_per_second = 0.0  # before the attack

    def start(self) -> None:
        self.folder.mkdir(exist_ok=True)
        disk = self.folder / "tmp"
        disk.mkdir()
        settings = {
            "metrics-listen": "127.0.0.1:0",
            "grpc-listen": "127.0.0.1:0",
            "socket": str(self.folder / "run" / "d.sock"),
            "capture-dir": str(self.folder / "captures"),
            "profile-dir": str(self.folder / "profiles"),
            "window-seconds": str(WINDOW_SECONDS),
            "budget-ratio": str(BUDGET_RATIO),
            "kubelet-socket": "none",
            "node": NODE,
        }
        command = [sys.executable, "-m", "rankscope.cli.main", "daemon"]
        command += [word for name, value in settings.items() for word in (f"--{name}", value)]
        enter = (*_PRIORITY, *self._node.enter, "unshare", "--mount", "sh", "-c", _ON_SMALL_DISK, "sh", *self._launcher)
        environment = {**os.environ, "TMPDIR": str(disk)}
        with (self.folder / "log").open("wb") as log, self.node():
            command = [*enter, *command, *self._flags]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        self.pauses.start()
        self._ends = [self.pauses.stop, self.process.kill, self.process.wait]
        wait_until(lambda: _ANNOUNCED.search(self.log) or self.process.poll() is not None, lambda: self.log)
        announced = _ANNOUNCED.search(self.log)
        assert announced is not None, self.log
        self.metrics_url, self.socket, self.grpc_port = announced[1], Path(announced[2]), int(announced[3])
        self._channel = grpc.insecure_channel(f"unix:{self.socket}")
        threading.Thread(target=self._follow, daemon=True).start()
        self._correlator.start()
        self._streams.start()
        self._streams.follow({NODE: f"unix:{self.socket}"})
        self._ends = [self._streams.stop, self._correlator.stop, self._channel.close, *self._ends]
        self.settle()

    def _follow(self) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError):  # closed
            for message in RankServiceStub(self._channel).WatchRanks(WatchRanksRequest()):
                self._watched.take(message)

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        accepted = self._binding.bind(messages)
        self._correlator.take(accepted.windows, accepted.departed)

    def settle(self) -> None:
        """Waits until the slow rank is known and stacks are recorded all the time, and notes their rate. After another
        attack, pauses between recordings end one after the other."""

        def is_settled() -> bool:
            assert self.process.poll() is None, self.log
            assert all(rank.poll() is None for rank in self._node.ranks), self._job_log
            verdicts, now = self._watched.verdicts, time.time()
            is_judged = bool(verdicts) and now - verdicts[-1][0] < 3 * WINDOW_SECONDS and is_right(verdicts[-1][1])
            latest = (now - 4 * RECORDING_SECONDS, now - 2 * RECORDING_SECONDS)
            return is_judged and self._watched.recorded_ratio(*latest) >= LEAST_RECORDED_RATIO

        wait_until(is_settled, lambda: f"{self.describe()}\n{self.log}\n{self._job_log}", PATIENCE_SECONDS)
        self.samples_per_second = self._watched.rate()

    def stop(self) -> None:
        for step in self._ends:
            step()

    def node(self) -> contextlib.AbstractContextManager[None]:
        """Processes that are started inside are on the daemon's node. Threads cannot be started inside."""
        return self._node.entered()

    @property
    def enter(self) -> tuple[str, ...]:
        """Put before a command that needs the node's /proc."""
        return self._node.enter

    @property
    def ranks(self) -> list[int]:
        """Pids of the job."""
        return [process.pid for process in self._node.ranks]

    @property
    def older(self) -> list[subprocess.Popen[bytes]]:
        """Shells of another user, started before the job, that run what is written to them."""
        return self._node.older

    @property
    def serving(self) -> Serving:
        log = self.folder / "log"
        return Serving(self.process, self.metrics_url, f"unix:{self.socket}", log, log)

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    @property
    def _job_log(self) -> str:
        return (self._node.folder / "job-log").read_text(errors="replace")

    @property
    def temporary(self) -> Path:
        """The daemon's TMPDIR, a small disk of its own."""
        return Path(f"/proc/{self.process.pid}/root{self.folder}/tmp")

    @property
    def resident_bytes(self) -> int:
        return int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    @contextlib.contextmanager
    def with_flags(self, *flags: str, launcher: Sequence[str] = ()) -> Iterator[Bystander]:
        """A second daemon with these flags, on the same node and with the same job. `launcher` precedes its command."""
        folder = Path(tempfile.mkdtemp(prefix="other-", dir=self._node.folder))
        other = Bystander(folder, self._node, *flags, launcher=launcher)
        try:
            other.start()
            yield other
        finally:
            other.stop()

    @contextlib.contextmanager
    def under_attack(self) -> Iterator[Watch]:
        self.settle()
        watch = Watch(self)
        yield watch
        watch.check()

    def wait_for_windows(self, count: int) -> None:
        """For attacks that are noticed only at the end of a window."""
        before = len(self._watched.granted)
        wait_until(lambda: len(self._watched.granted) >= before + count, self.describe)

    def cpu_seconds_of(self, act: Callable[[], object]) -> float:
        """What the daemon uses for it beyond its budget."""
        began, before = time.monotonic(), family_cpu_seconds(self.process.pid)
        act()
        used = family_cpu_seconds(self.process.pid) - before
        return max(0.0, used - BUDGET_RATIO * len(RANKS) * (time.monotonic() - began))

    def measure(self, seconds: float = OBSERVED_SECONDS, on_top: OnTop = lambda start, end: 0.0) -> dict[str, float]:
        watched, start = self._watched, time.time()
        cpu_before, most_resident = family_cpu_seconds(self.process.pid), 0
        while time.time() < start + seconds:
            most_resident = max(most_resident, self.resident_bytes)
            time.sleep(0.2)
        end, recorded = time.time(), start + seconds - RECORDING_SECONDS
        used = max(0.0, family_cpu_seconds(self.process.pid) - cpu_before - on_top(start, end))
        granted = sum(seconds for at, seconds in watched.granted if start <= at <= end)
        # Of the borders between: windows begin at whole multiples of their length.
        first, last = -(-start // WINDOW_SECONDS), end // WINDOW_SECONDS - 1
        expected = last - first
        borders = (first * WINDOW_SECONDS, last * WINDOW_SECONDS)
        # A recording that began under the attack may end a little later on a busy machine, and a window come later.
        while time.time() < end + RECORDING_SECONDS:
            if watched.are_recorded_until(recorded) and watched.are_watched_until(borders[1]):
                break
            time.sleep(0.2)
        verdicts = [is_right(state) for at, state in watched.verdicts if start <= at <= end]
        return {
            "windows": min(watched.windows_in(rank, *borders) for rank in RANKS) / expected,
            "samples": watched.samples_in(start, recorded) / (recorded - start) / self.samples_per_second,
            "verdicts": sum(verdicts) / len(verdicts) if verdicts else 0.0,
            "resident_bytes": most_resident,
            "budget": used / max(granted, BUDGET_RATIO * len(RANKS) * (end - start) * LEAST_WINDOWS_RATIO),
        }

    def check(self, figures: Mapping[str, float]) -> None:
        shown = f"{ {name: round(value, 3) for name, value in figures.items()} }\n{self.describe()}\n{self.log[-3000:]}"
        assert all(process.poll() is None for process in self._node.ranks), f"the job ended\n{self._job_log}"
        assert not wrong(figures), f"{', '.join(wrong(figures))}: {shown}"

    def describe(self) -> str:
        verdict = self._watched.verdicts[-1][1].verdict if self._watched.verdicts else None
        problems = "\n".join(dict.fromkeys(self._watched.problems))
        rate = f"{self.samples_per_second:.1f} stack samples per second before"
        return f"{rate}; {len(self._watched.windows)} windows; {verdict}\n{problems}"


@contextlib.contextmanager
def bystander_on_a_node() -> Iterator[Bystander]:
    if (missing := missing_for_nodes()) is not None:
        pytest.fail(missing)
    # Not in pytest's folder: its path may be too long for a socket.
    folder = Path(tempfile.mkdtemp(prefix="bystander-"))
    folder.chmod(0o755)
    node = Node(folder)
    try:
        node.start_job()
        wait_until((folder / "READY").exists, (folder / "job-log").read_text, PATIENCE_SECONDS)
        bystander = Bystander(folder / "daemon", node)
        try:
            bystander.start()
            yield bystander
        finally:
            bystander.stop()
    finally:
        node.close()
        shutil.rmtree(folder, ignore_errors=True)


def is_right(state: JobState) -> bool:
    verdict = state.verdict
    return verdict.kind.value == "slow_rank" and tuple(verdict.culprits) == (SLOW_RANK,)


def _near(now: float, *unix_nanos: int) -> tuple[float, float]:
    """Unix seconds, in the hour around now: the daemon's clock may be set by whole hours."""
    start, end = (now + (nanos / 1e9 - now + _HOUR / 2) % _HOUR - _HOUR / 2 for nanos in unix_nanos)
    return start, end


def _pid_within(pid: int) -> int:
    """In its innermost namespace."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("NSpid:")[2].split("\n")[0].split()[-1])


def _namespace(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/pid").readlink())


def _set_pid_namespace(pid: int) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWPID):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "pid namespace")
    finally:
        os.close(descriptor)
