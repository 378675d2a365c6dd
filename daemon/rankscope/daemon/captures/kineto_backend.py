"""Captures by libkineto itself (level 1): the process polls, gets a configuration, and writes a trace in its own file
system, from where it is fetched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.clients import DEFAULT_POLL_SECONDS
from rankscope.daemon.captures.cuda_care import slowdown_objection
from rankscope.daemon.captures.endpoint import Endpoint, Offer
from rankscope.daemon.captures.fetching import NotThereError, remove_file, take_file
from rankscope.daemon.captures.kineto_config import WARMUP_SECONDS, configuration, log_file, written_file
from rankscope.daemon.captures.namespaces import network_namespace
from rankscope.daemon.captures.orders import SECONDS_LIMIT, CancelledError, CaptureError, Order, Recording, Stage
from rankscope.daemon.procfs import is_alive
from rankscope.daemon.samples import RankProcess

TICK_SECONDS: Final = 0.1
# What libkineto needs between getting a configuration and beginning its warm-up.
LEAD_SECONDS: Final = 0.3
# Complete 0.3 to 1.1 s after the window when measured; shapes and stacks on a busy machine take much longer.
WRITE_SECONDS: Final = 60.0
# Of a job whose steps nobody has seen yet.
UNKNOWN_STEPS_SECONDS: Final = 3.0
# A whole step at either end may be cut by the window, and steps vary.
EXTRA_STEPS: Final = 2
STEP_ALLOWANCE: Final = 1.25


class KinetoBackend:
    name = "kineto"

    def __init__(self, endpoint: Endpoint, proc_root: Path = Path("/proc")) -> None:
        self._endpoint = endpoint
        self._proc_root = proc_root

    def objection(self, rank: RankProcess) -> str | None:
        if rank.environment.get("KINETO_USE_DAEMON", "").lower() not in ("1", "true", "yes", "y", "on"):
            return "the process was started without KINETO_USE_DAEMON=1"
        return None

    def poll_seconds(self, rank: RankProcess) -> float:
        client = self._endpoint.client(rank.pid)
        return DEFAULT_POLL_SECONDS if client is None else client.poll_seconds

    def record(
        self, order: Order, workspace: Path, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        objection = slowdown_objection(order.rank, order.options, self._proc_root)
        if objection is not None:
            raise CaptureError(objection)
        return _Attempt(self._endpoint, self._proc_root, order, workspace, report, cancelled).run()


class _Attempt:
    def __init__(
        self,
        endpoint: Endpoint,
        proc_root: Path,
        order: Order,
        workspace: Path,
        report: Callable[[Stage], None],
        cancelled: threading.Event,
    ) -> None:
        self._endpoint = endpoint
        self._proc_root = proc_root
        self._order = order
        self._workspace = workspace
        self._report = report
        self._cancelled = cancelled
        self._who = f"rank {order.rank.rank} (pid {order.rank.pid})"
        folder = order.rank.environment.get("KINETO_ONDEMAND_TRACE_DIR", "")
        self._path = log_file(order.capture_id, order.rank.rank, folder)
        self._written = written_file(self._path, order.rank.namespace_pids[-1])
        self._seconds = _seconds_to_record(order)

    def run(self) -> Recording:
        notes: list[str] = []
        start = self._hand_over(notes)
        try:
            self._report(Stage.ARMED)
            self._wait_until(start)
            self._report(Stage.RUNNING)
            return self._fetch(start, notes)
        except BaseException:
            # Whatever libkineto writes later is nobody's; a cancelled capture leaves nothing in the container.
            remove_file(self._order.rank.pid, self._written, self._proc_root)
            raise

    def _hand_over(self, notes: list[str]) -> float:
        """Leave the configuration until the process polls; returns the start in unix seconds. A target whose own
        profiler runs is waited for."""
        asked = self._order.start_unix_millis / 1000
        start = asked
        while True:
            handed = threading.Event()
            latest = start - WARMUP_SECONDS - LEAD_SECONDS
            text = configuration(self._path, round(start * 1000), self._seconds, self._order.options)
            hand_before = time.monotonic() + (latest - time.time())
            self._endpoint.offer(self._order.rank.pid, Offer(text, hand_before, handed.set))
            while not handed.wait(TICK_SECONDS) and time.time() < latest:
                if self._cancelled.is_set() or not self._is_alive():
                    break
            if handed.is_set() or not self._endpoint.withdraw(self._order.rank.pid):
                if start > asked:
                    notes.append(f"started {start - asked:.1f} s after the others: it could not be reached before")
                return start
            self._check()
            if time.time() >= self._order.give_up_unix_seconds:
                raise CaptureError(self._why_not())
            # Missed, or held: the next poll but one is sure to be in time.
            start = time.time() + self._poll_seconds() + WARMUP_SECONDS + 2 * LEAD_SECONDS

    def _poll_seconds(self) -> float:
        client = self._endpoint.client(self._order.rank.pid)
        return DEFAULT_POLL_SECONDS if client is None else client.poll_seconds

    def _why_not(self) -> str:
        client = self._endpoint.client(self._order.rank.pid)
        if client is not None and not client.is_ready:
            return f"{self._who}: a profiler of the user's own is active; stop it, or ask again with more patience"
        if client is not None:
            return f"{self._who}: polls, but not in time to take a configuration; is its machine overloaded?"
        try:
            failure = self._endpoint.failure(network_namespace(self._order.rank.pid, self._proc_root))
        except OSError:
            failure = "its network namespace cannot be read"
        if failure is not None:
            return f"{self._who}: {failure}"
        return (
            f"{self._who}: libkineto has not called, although KINETO_USE_DAEMON is set; has the process imported "
            "torch? Is its torch built with Kineto?"
        )

    def _wait_until(self, unix_seconds: float) -> None:
        while time.time() < unix_seconds:
            self._check()
            self._cancelled.wait(min(TICK_SECONDS, max(0.0, unix_seconds - time.time())))

    def _fetch(self, start: float, notes: list[str]) -> Recording:
        end = start + self._seconds
        self._wait_until(end)
        target = self._workspace / f"rank{self._order.rank.rank}.json"
        while True:
            try:
                take_file(self._order.rank.pid, self._written, target, self._proc_root)
                break
            except NotThereError:
                if time.time() > end + WRITE_SECONDS:
                    raise CaptureError(
                        f"{self._who}: took the configuration but wrote no {self._written} within {WRITE_SECONDS:g} s; "
                        "its stderr with KINETO_LOG_LEVEL=0 tells why"
                    ) from None
                self._check()
                self._cancelled.wait(TICK_SECONDS)
        remove_file(self._order.rank.pid, self._written, self._proc_root)
        return Recording(target, is_trace=True, start_unix_millis=round(start * 1000), notes=tuple(notes))

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError(f"{self._who}: cancelled")
        if not self._is_alive():
            raise CaptureError(f"{self._who}: the process ended during the capture")

    def _is_alive(self) -> bool:
        return is_alive(str(self._proc_root / str(self._order.rank.pid)), self._order.rank.start_ticks)


def _seconds_to_record(order: Order) -> float:
    if order.seconds is not None:
        return order.seconds
    assert order.steps is not None  # an order has one of the two
    if order.step_seconds is None:
        return UNKNOWN_STEPS_SECONDS
    return min(SECONDS_LIMIT, STEP_ALLOWANCE * (order.steps + EXTRA_STEPS) * order.step_seconds + 0.05)
