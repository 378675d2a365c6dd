"""Captures by libkineto (level 1): the process polls, receives a configuration and writes a trace in its own file
system, from where the daemon fetches it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.fetch import NotThereError, remove_file, take_file
from rankscope.daemon.captures.kineto.clients import DEFAULT_POLL_SECONDS
from rankscope.daemon.captures.kineto.config import (
    LEAD_SECONDS,
    Pasts,
    common_start,
    configuration,
    log_file,
    safe_start,
    written_file,
)
from rankscope.daemon.captures.kineto.endpoint import Endpoint, Offer
from rankscope.daemon.captures.kineto.sockets import network_namespace
from rankscope.daemon.captures.orders import (
    MAX_RECORDING_SECONDS,
    CancelledError,
    CaptureError,
    Order,
    Recording,
    Reserve,
    Stage,
    Workspace,
)
from rankscope.daemon.captures.request import slowdown_objection
from rankscope.daemon.procfs import is_alive
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

PATIENCE_SECONDS: Final = 600.0
# Captures requested longer ago than this have written their file.
LOST_SECONDS: Final = 3600.0
INTERVAL_SECONDS: Final = 1.0
TICK_SECONDS: Final = 0.1
# A poll may be late by this much without requiring a new start.
POLL_ALLOWANCE_SECONDS: Final = 0.3
# A process that is still writing is not ready. Complete after 0.3 to 1.1 s when measured.
SILENT_WRITE_SECONDS: Final = 60.0
BUSY_WRITE_SECONDS: Final = 300.0
ATTEMPTS: Final = 3
# For a job whose steps have not been seen yet.
UNKNOWN_STEPS_SECONDS: Final = 3.0
# The recording may cut a step at either end, and steps vary.
EXTRA_STEPS: Final = 2
STEP_ALLOWANCE: Final = 1.25
# A process that has not polled by then will not poll.
SILENCE_SECONDS: Final = 4 * DEFAULT_POLL_SECONDS


# Removes traces that are no longer wanted: libkineto cannot be stopped, so the file of a cancelled capture appears
# later in the container's file system and would stay there.


@dataclass(frozen=True)
class _Leftover:
    pid: int
    start_ticks: int
    path: str
    give_up_at: float


def left_behind(
    captures: Iterable[pb.Capture], ranks: Iterable[RankProcess], unix_seconds: float
) -> list[tuple[RankProcess, str]]:
    """Files that an earlier daemon may have left in these ranks' containers, by its records: captures that it did
    not fetch. The name belongs to that capture only."""
    here = {(rank.job, rank.rank, rank.pid): rank for rank in ranks}
    found = []
    for capture in captures:
        if unix_seconds - capture.requested_unix_millis / 1000 > LOST_SECONDS:
            continue
        for entry in capture.ranks:
            rank = here.get((capture.job, entry.rank, entry.pid))
            if rank is None or entry.backend != "kineto" or entry.state == pb.CAPTURE_STATE_ANALYSED:
                continue
            with contextlib.suppress(CaptureError):  # a directory that was not used
                asked = log_file(capture.id, rank.rank, rank.environment.get("KINETO_ONDEMAND_TRACE_DIR", ""))
                found.append((rank, written_file(asked, rank.namespace_pids[-1])))
    return found


class Leftovers:
    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._proc_root = proc_root
        self._expected: list[_Leftover] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._expected)

    def expect(self, pid: int, start_ticks: int, path: str) -> None:
        """Remove the file as soon as it exists."""
        with self._lock:
            self._expected.append(_Leftover(pid, start_ticks, path, time.monotonic() + PATIENCE_SECONDS))
            if len(self._expected) == 1:
                threading.Thread(target=self._run, name="rankscope-leftovers", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                expected = list(self._expected)
            done = {leftover for leftover in expected if self._is_done(leftover)}
            with self._lock:
                self._expected = [leftover for leftover in self._expected if leftover not in done]
                if not self._expected:
                    return
            time.sleep(INTERVAL_SECONDS)

    def _is_done(self, leftover: _Leftover) -> bool:
        if time.monotonic() > leftover.give_up_at:
            return True
        if not is_alive(f"{self._proc_root}/{leftover.pid}", leftover.start_ticks):
            return True
        return remove_file(leftover.pid, leftover.path, self._proc_root)


# One rank's recording by libkineto, from the offer to the written file.


@dataclass(frozen=True)
class _Window:
    start: float  # unix seconds
    end: float


class Attempt:
    def __init__(
        self,
        endpoint: Endpoint,
        pasts: Pasts,
        leftovers: Leftovers,
        proc_root: Path,
        order: Order,
        report: Callable[[Stage], None],
        cancelled: threading.Event,
    ) -> None:
        self._endpoint = endpoint
        self._pasts = pasts
        self._leftovers = leftovers
        self._proc_root = proc_root
        self._order = order
        self._report = report
        self._cancelled = cancelled
        self._rank = order.rank
        self._process = (order.rank.pid, order.rank.start_ticks)
        self._who = str(order.rank)
        folder = order.rank.environment.get("KINETO_ONDEMAND_TRACE_DIR", "")
        self._path = log_file(order.capture_id, order.rank.rank, folder)
        self._written = written_file(self._path, order.rank.namespace_pids[-1])
        self._seconds = seconds_to_record(order)

    def run(self, workspace: Workspace) -> Recording:
        target = workspace.folder / f"rank{self._rank.rank}.json"
        target.unlink(missing_ok=True)  # left by an earlier attempt
        asked = start = self._order.start_unix_millis / 1000
        notes: list[str] = []
        for _ in range(ATTEMPTS):
            window = self._hand_over(start)
            try:
                self._report(Stage.ARMED)
                self._wait_until(window.start)
                self._report(Stage.RUNNING)
                self._wait_until(window.end)
                was_recorded = self._fetch(window, target, workspace.reserve)
            except BaseException:
                # The process continues recording; a cancelled capture leaves nothing in the container.
                self._leftovers.expect(self._rank.pid, self._rank.start_ticks, self._written)
                raise
            if was_recorded:
                self._pasts.recorded(self._process, window.end)
                if window.start - asked > 1:
                    notes.append(f"started {window.start - asked:.1f} s after the others: it could not be had before")
                return Recording(
                    target, is_trace=True, start_unix_millis=round(window.start * 1000), notes=tuple(notes)
                )
            self._pasts.refused(self._process)
            self._endpoint.skip_next_poll(self._rank.pid)  # the configuration may have reached it a poll late
            if time.time() >= self._order.give_up_unix_seconds:
                break
            notes.append("took a configuration and recorded nothing, so it was asked again")
            start = self._next_start()
        raise CaptureError(
            f"{self._who}: took the configuration but recorded nothing; a profiler of the user's own took over, "
            f"{self._path.rpartition('/')[0]} cannot be written, or libkineto refused: its stderr with "
            "KINETO_LOG_LEVEL=0 tells"
        )

    def _hand_over(self, start: float) -> _Window:
        """Offer the configuration until the process polls. Wait for a process whose own profiler runs."""
        while True:
            if self._pasts.busy_until(self._process) > self._order.give_up_unix_seconds:
                raise CaptureError(self._why_not())
            handed: list[_Window] = []
            self._endpoint.offer(self._rank.pid, self._offer(start, handed))
            while not handed and time.time() < start - LEAD_SECONDS and not self._is_over():
                self._cancelled.wait(TICK_SECONDS)
            if not self._endpoint.withdraw(self._rank.pid):
                return handed[0]
            self._check()
            if time.time() >= self._order.give_up_unix_seconds:
                raise CaptureError(self._why_not())
            start = self._next_start()

    def _offer(self, start: float, handed: list[_Window]) -> Offer:
        composed: list[tuple[_Window, float | None]] = []

        def compose() -> str | None:
            now = time.time()
            if now > start - LEAD_SECONDS or now < self._pasts.busy_until(self._process):
                return None
            look = self._pasts.look(self._process, now)
            begin = start if look is None else safe_start(start, look)
            composed[:] = [(_Window(begin, start + self._seconds), look)]
            return configuration(self._path, round(begin * 1000), start + self._seconds - begin, self._order.options)

        def hand() -> None:
            window, look = composed[0]
            self._pasts.handed(self._process, look, window.end)
            handed.append(window)

        return Offer(self._rank.start_ticks, compose, hand)

    def _next_start(self) -> float:
        """The next poll is certain to be in time for it."""
        client, now = self._endpoint.client(self._rank.pid), time.time()
        polls_in = DEFAULT_POLL_SECONDS if client is None else client.polls_in_seconds(time.monotonic())
        if self._endpoint.skips_next_poll_of(self._rank.pid):
            polls_in += DEFAULT_POLL_SECONDS if client is None else client.poll_seconds
        earliest = max(now + polls_in, self._pasts.busy_until(self._process) + DEFAULT_POLL_SECONDS)
        return earliest + LEAD_SECONDS + POLL_ALLOWANCE_SECONDS

    def _why_not(self) -> str:
        client = self._endpoint.client(self._rank.pid)
        busy_seconds = self._pasts.busy_until(self._process) - time.time()
        if busy_seconds > 0:
            return (
                f"{self._who}: still records for an earlier capture that was given up, for {busy_seconds:.0f} s more: "
                "libkineto cannot be told to stop; ask again then, or now with more patience"
            )
        if client is not None and not client.is_ready:
            return f"{self._who}: a profiler of the user's own is active; stop it, or ask again with more patience"
        if client is not None:
            return f"{self._who}: polls, but not in time to take a configuration; is its machine overloaded?"
        try:
            failure = self._endpoint.failure(network_namespace(self._rank.pid, self._proc_root))
        except OSError:
            failure = "its network namespace cannot be read"
        if failure is not None:
            return f"{self._who}: {failure}"
        return (
            f"{self._who}: libkineto has not called, although KINETO_USE_DAEMON is set; is the process stopped? Has it "
            "imported torch? Is its torch built with Kineto?"
        )

    def _wait_until(self, unix_seconds: float) -> None:
        while (left := unix_seconds - time.time()) > 0:
            self._check()
            self._cancelled.wait(min(TICK_SECONDS, left))

    def _fetch(self, window: _Window, target: Path, reserve: Reserve) -> bool:
        """Whether there was a file. A process that recorded is not ready again before its file exists."""
        while True:
            client = self._endpoint.client(self._rank.pid)  # read before looking for the file
            polled = time.time() - (time.monotonic() - client.polled_at) if client is not None else 0.0
            try:
                take_file(self._rank.pid, self._written, target, reserve, self._proc_root)
                break
            except NotThereError:
                pass
            except CaptureError:
                self._check()
                remove_file(self._rank.pid, self._written, self._proc_root)
                raise
            if client is not None and client.is_ready and polled > window.start + TICK_SECONDS:
                return False
            is_busy = client is not None and not client.is_ready and polled > window.end
            if time.time() > window.end + (BUSY_WRITE_SECONDS if is_busy else SILENT_WRITE_SECONDS):
                raise CaptureError(
                    f"{self._who}: wrote no {self._written} within {time.time() - window.end:.0f} s of recording; "
                    "record less, or see its stderr with KINETO_LOG_LEVEL=0"
                )
            self._check()
            self._cancelled.wait(TICK_SECONDS)
        remove_file(self._rank.pid, self._written, self._proc_root)
        return True

    def _is_over(self) -> bool:
        return self._cancelled.is_set() or not self._is_alive()

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"{self._who}: cancelled")
        if not self._is_alive():
            raise CaptureError(f"{self._who}: the process ended during the capture")

    def _is_alive(self) -> bool:
        return is_alive(f"{self._proc_root}/{self._rank.pid}", self._rank.start_ticks)


def seconds_to_record(order: Order) -> float:
    if order.seconds is not None:
        return order.seconds
    assert order.steps is not None  # an order has one of the two
    if order.step_seconds is None:
        return UNKNOWN_STEPS_SECONDS
    return min(MAX_RECORDING_SECONDS, STEP_ALLOWANCE * (order.steps + EXTRA_STEPS) * order.step_seconds + 0.05)


class KinetoBackend:
    name = "kineto"
    needs_steps = True
    keeps_schedules = False  # libkineto's configuration is for one window

    def __init__(self, endpoint: Endpoint, proc_root: Path = Path("/proc")) -> None:
        self._endpoint = endpoint
        self._proc_root = proc_root
        self._pasts = Pasts()
        self._leftovers = Leftovers(proc_root)

    def objection(self, rank: RankProcess) -> str | None:
        if self._endpoint.client(rank.pid) is not None:
            return None
        if rank.environment.get("KINETO_USE_DAEMON", "0") in ("", "0"):
            return "the process was started without KINETO_USE_DAEMON=1"
        try:
            namespace = network_namespace(rank.pid, self._proc_root)
        except OSError as error:
            return f"its network namespace cannot be read: {error.strerror}"
        failure = self._endpoint.failure(namespace)
        if failure is not None:
            return failure
        served_seconds = self._endpoint.served_seconds(namespace)
        if served_seconds is not None and served_seconds > SILENCE_SECONDS:
            return "libkineto has not called; has the process imported a torch that is built with Kineto?"
        return None

    def remove_leftovers(self, captures: Iterable[pb.Capture], ranks: Collection[RankProcess]) -> None:
        """Remove files of captures by an earlier daemon that did not fetch them."""
        for rank, path in left_behind(captures, ranks, time.time()):
            self._leftovers.expect(rank.pid, rank.start_ticks, path)

    def poll_seconds(self, rank: RankProcess) -> float:
        """Seconds until the next poll of a process."""
        client = self._endpoint.client(rank.pid)
        return DEFAULT_POLL_SECONDS if client is None else client.polls_in_seconds(time.monotonic())

    def common_start(self, ranks: Collection[RankProcess], earliest_unix_seconds: float) -> float:
        """A start for all these ranks, at or shortly after the earliest, that libkineto is certain to keep."""
        now = time.time()
        looks = [self._pasts.look((rank.pid, rank.start_ticks), now + self.poll_seconds(rank)) for rank in ranks]
        return common_start(earliest_unix_seconds, [look for look in looks if look is not None])

    def record(
        self, order: Order, workspace: Workspace, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        objection = slowdown_objection(order.rank, order.options, self._proc_root)
        if objection is not None:
            raise CaptureError(objection)
        attempt = Attempt(self._endpoint, self._pasts, self._leftovers, self._proc_root, order, report, cancelled)
        return attempt.run(workspace)
