"""Runs captures: starts a back end on every rank, follows all of them to the end and records what happened."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from rankscope.analysis.traces.joins.comparison import LiveSteps
from rankscope.daemon.captures.orders import (
    Backend,
    CancelledError,
    CaptureError,
    NoStepsError,
    Order,
    Recording,
    Stage,
    tenant_of,
)
from rankscope.daemon.captures.processing.delivery import LocalArchive
from rankscope.daemon.captures.records import (
    DUTY_CYCLE,
    CaptureAudit,
    Records,
    StepSecondsOf,
    enter_delivery,
    fail,
    forget_first_attempt,
    overall_state,
)
from rankscope.daemon.captures.request import (
    SuspectsOf,
    VerdictOf,
    choose_processes,
    choose_ranks,
    id_of,
    kept_text,
    kept_verdict,
    length_of,
    options_of,
    patience_of,
    start_of,
)
from rankscope.daemon.captures.reservations import NOT_BY, Reservations
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

# A job is a label: the job with the oldest capture is dropped.
MAX_JOBS = 64
RESULTS = {
    pb.CAPTURE_STATE_ANALYSED: "delivered",
    pb.CAPTURE_STATE_FAILED: "failed",
    pb.CAPTURE_STATE_CANCELLED: "cancelled",
}
MAX_PROCESSES: Final = 1024
log = logging.getLogger(__name__)
# Step time before and after a capture is averaged over this time.
STEP_TIME_SECONDS = 6.0
# From the request to the end of the recording: a start ahead, patience, the recording and its writing.
MAX_CAPTURE_SECONDS = 2400.0
# What a back end needs at most to notice that it is cancelled.
STUCK_SECONDS = 30.0
AWAIT_SECONDS = 0.2
STUCK = "its file system or its memory does not answer; it is left alone until it does"
_STATES = {Stage.ARMED: pb.CAPTURE_STATE_ARMED, Stage.RUNNING: pb.CAPTURE_STATE_RUNNING}


# Counters of captures, and how each job's last capture changed its step time: for /metrics.


class CaptureTally:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._results: Counter[str] = Counter(dict.fromkeys(RESULTS.values(), 0))
        self._slowdowns: OrderedDict[str, float] = OrderedDict()

    def count(self, capture: pb.Capture) -> None:
        """Count a finished capture. Counts ranks, not captures, so that one failure of eight is visible."""
        with self._lock:
            self._results.update(RESULTS.get(rank.state, "failed") for rank in capture.ranks)
            ratios = [
                times.after_seconds / times.before_seconds
                for rank in capture.ranks
                if (times := rank.step_times).HasField("after_seconds") and times.before_seconds > 0
            ]
            if ratios:
                self._slowdowns.pop(capture.job, None)
                self._slowdowns[capture.job] = max(ratios)
                while len(self._slowdowns) > MAX_JOBS:
                    self._slowdowns.popitem(last=False)

    @property
    def results(self) -> dict[str, int]:
        with self._lock:
            return dict(self._results)

    @property
    def slowdowns(self) -> dict[str, float]:
        """By job: step time after its last capture ÷ before it, of the rank that slowed most."""
        with self._lock:
            return dict(self._slowdowns)


# Step times learned from captures, for the next capture of the same processes.


class LearnedSteps:
    """Keyed by process, not by rank: a restarted process may train differently. Drops the least recently captured.
    Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds: OrderedDict[tuple[int, int], float] = OrderedDict()

    def learn(self, rank: RankProcess, step_seconds: float) -> None:
        with self._lock:
            self._seconds[_process(rank)] = step_seconds
            self._seconds.move_to_end(_process(rank))
            while len(self._seconds) > MAX_PROCESSES:
                self._seconds.popitem(last=False)

    def longest(self, ranks: Iterable[RankProcess]) -> float | None:
        """The longest step time known of these ranks, which train together. None if none is known."""
        with self._lock:
            found = [self._seconds.get(_process(rank)) for rank in ranks]
        return max((seconds for seconds in found if seconds is not None), default=None)


def _process(rank: RankProcess) -> tuple[int, int]:
    return rank.pid, rank.start_ticks


class CaptureRunner:
    """Thread-safe. The correlation sets `suspects_of` and `verdict_of` later."""

    def __init__(
        self,
        node: str,
        backends: Sequence[Backend],
        archive: LocalArchive,
        ranks: Callable[[], Sequence[RankProcess]],
        *,
        earliest_start: Callable[[Sequence[RankProcess], float], float] = lambda ranks, now: now,
        step_seconds: StepSecondsOf = lambda rank, start, end: None,
        stalled_seconds: Callable[[RankProcess], float | None] = lambda rank: None,
        live_steps: Callable[[RankProcess], LiveSteps | None] = lambda rank: None,
        unix_seconds: Callable[[], float] = time.time,
        audit: CaptureAudit | None = None,
        tenant_of: Callable[[RankProcess], str] = tenant_of,
    ) -> None:
        self._node = node
        self.audit = audit or CaptureAudit(node, has_tls=False)
        self._archive = archive
        self._ranks = ranks
        self._earliest_start = earliest_start
        self._step_seconds = step_seconds
        self._live_steps = live_steps
        self._unix_seconds = unix_seconds
        self._tenant_of = tenant_of
        self.suspects_of: SuspectsOf = lambda job: None
        self.verdict_of: VerdictOf = lambda job: None
        self.records = Records(archive.save, archive.load(), archive.tenant)
        self.tally = CaptureTally()
        self._reservations = Reservations(node, backends, stalled_seconds)
        self._learned = LearnedSteps()
        self._starting = threading.Lock()

    def start(
        self, request: pb.StartCaptureRequest, requested_by: str = "", usual_step_seconds: float | None = None
    ) -> str:
        """Start a capture and return its id. Raises CaptureError if it cannot start. `usual_step_seconds` is used
        for ranks whose steps are not seen."""
        with self._starting:
            if request.id and self.records.get(request.id) is not None:
                return request.id  # already requested
            return self._start(request, requested_by, usual_step_seconds)

    def _start(self, request: pb.StartCaptureRequest, requested_by: str, usual_step_seconds: float | None) -> str:
        ranks = self._ranks()
        is_elsewhere = requested_by.startswith(("ipv4:", "ipv6:"))
        here = choose_processes(request, ranks, names_others=not is_elsewhere)
        job = next(rank.job for rank in here.values())
        world_size = max(rank.world_size for rank in here.values())
        numbers = choose_ranks(request.ranks, job, here.keys(), world_size, self.suspects_of)
        verdict = request.verdict if request.HasField("verdict") else self.verdict_of(job)
        latest = {number: self._live_steps(here[number]) for number in numbers if number in here}
        live = {number: known for number, known in latest.items() if known is not None}
        steps, seconds = length_of(request, live, () if verdict is None else verdict.culprits)
        patience_seconds, options = patience_of(request), options_of(request)
        now = self._unix_seconds()
        capture = pb.Capture(
            id=id_of(request, now),
            job=job,
            state=pb.CAPTURE_STATE_ACCEPTED,
            reason=kept_text(request.reason),
            requested_unix_millis=round(now * 1000),
            requested_by=kept_text(requested_by),
        )
        if verdict is not None:
            capture.verdict.CopyFrom(kept_verdict(verdict))
        if request.ranks.strip() in ("", "all") and len(here) < world_size:
            capture.notes.append(f"{len(here)} of the job's {world_size} ranks run on {self._node}; these were asked")
        tenant = next((self._tenant_of(here[number]) for number in numbers if number in here), "")
        awaited_seconds = 0.0 if steps is None else patience_seconds  # a stall may end
        if requested_by == DUTY_CYCLE:
            awaited_seconds = math.inf  # stacks alone are of no use to it
        reserved = self._reservations.begin(capture, numbers, here, options, tenant, awaited_seconds)
        try:
            together = [rank for rank, _ in reserved]
            start_seconds = start_of(request, self._earliest_start(together, now))
            known = {
                rank.rank: self._step_seconds(rank, now - STEP_TIME_SECONDS, now) or usual_step_seconds
                for rank in together
            }
            learned = self._learned.longest(together)
            orders = [
                Order(
                    capture.id,
                    rank,
                    steps,
                    seconds,
                    round(start_seconds * 1000),
                    start_seconds + patience_seconds,
                    options,
                    known[rank.rank] or learned,
                )
                for rank, _ in reserved
            ]
            self._archive.assign(capture.id, tenant)
            self.audit.asked(capture, request)
            self.records.add(capture)
            work = [(order, backend) for order, (_, backend) in zip(orders, reserved, strict=True)]
            name = f"rankscope-{capture.id}"
            is_sure = all(known.values())
            threading.Thread(target=self._conduct, args=(capture.id, work, is_sure), name=name, daemon=True).start()
        except BaseException:
            self._reservations.end(capture.id)
            raise
        return capture.id

    def cancel(self, capture_id: str) -> pb.Capture | None:
        """Ask a capture to stop; delivered ranks stay delivered. None: there is no such capture."""
        self._reservations.cancel(capture_id)
        return self.records.get(capture_id)

    def is_busy(self, job: str) -> bool:
        """Whether a rank of the job is being captured."""
        return self._reservations.is_busy(job)

    def close(self) -> None:
        self._reservations.cancel_all()

    def _conduct(self, capture_id: str, work: Sequence[tuple[Order, Backend]], is_sure: bool) -> None:
        stuck: set[int] = set()
        idle: dict[int, str] = {}
        try:
            learned = self._attempt(capture_id, work, stuck, idle)
            if learned and not is_sure and not self._reservations.cancelled(capture_id).is_set():
                # The step time was unknown and too few steps were recorded. Now it is known.
                self.records.change(capture_id, forget_first_attempt)
                idle.clear()
                self._attempt(capture_id, self._with_step_time(work, learned), stuck, idle)
            self._attempt(capture_id, self._without_steps(capture_id, work, idle), stuck, {})
            self._measure_aftermath(capture_id, [order for order, _ in work])
            # Before the end is announced, because a waiting caller may request the same ranks at once.
            self._reservations.end(capture_id, stuck)
            self._conclude(capture_id)
        except Exception as error:  # any failure: followers must see the end
            log.exception("capture %s", capture_id)
            self._reservations.end(capture_id, stuck)
            self.records.change(capture_id, partial(fail, error=f"unexpected: {error}; please report this"))
        finally:
            self.audit.ended(self.records.get(capture_id))
            self._archive.clean(capture_id)

    def _attempt(
        self, capture_id: str, work: Sequence[tuple[Order, Backend]], stuck: set[int], idle: dict[int, str]
    ) -> dict[int, float]:
        """Record all ranks at once and deliver the results. Returns the step time of ranks that recorded too few
        steps because their step time was unknown or underestimated. Adds ranks that make no steps to `idle`, with what
        the back end says."""
        if not work:
            return {}  # no rank could be asked; each has its error
        recorded: dict[int, tuple[RankProcess, Recording]] = {}
        threads = [
            threading.Thread(
                target=self._record,
                args=(*each, recorded, stuck, idle),
                name=f"rankscope-rank-{each[0].rank.rank}",
                daemon=True,
            )
            for each in work
        ]
        for thread in threads:
            thread.start()
        self._await(capture_id, dict(zip([order.rank.rank for order, _ in work], threads, strict=True)), stuck)
        capture = self.records.get(capture_id)
        assert capture is not None  # it is active
        learned = {}
        orders = {order.rank.rank: order for order, _ in work}
        cancelled, steps = self._reservations.cancelled(capture_id), work[0][0].steps
        before = self._steps_before(capture, list(orders.values()))
        for rank, delivered in self._archive.deliver(capture, recorded, steps, before, cancelled) if recorded else ():
            if isinstance(delivered, NoStepsError):
                idle[rank] = str(delivered)
                continue
            if isinstance(delivered, CaptureError):
                is_cancelled = isinstance(delivered, CancelledError)
                state = pb.CAPTURE_STATE_CANCELLED if is_cancelled else pb.CAPTURE_STATE_FAILED
                self._enter(capture_id, rank, state, str(delivered))
                continue
            recording = recorded[rank][1]
            self.records.change_rank(
                capture_id, rank, partial(enter_delivery, recording=recording, delivered=delivered)
            )
            order = orders[rank]
            if delivered.step_seconds is None:
                continue
            self._learned.learn(order.rank, delivered.step_seconds)
            too_few = order.steps is not None and (delivered.whole_steps or 0) < order.steps
            if too_few and (order.step_seconds is None or delivered.step_seconds > order.step_seconds):
                learned[rank] = delivered.step_seconds
        return learned

    def _await(self, capture_id: str, threads: Mapping[int, threading.Thread], stuck: set[int]) -> None:
        """Until all ranks are recorded. A rank whose file system never answers is given up when the capture takes too
        long, or some time after it is cancelled; its thread ends when the file system does."""
        cancelled, give_up_at = self._reservations.cancelled(capture_id), time.monotonic() + MAX_CAPTURE_SECONDS
        while (alive := [number for number, thread in threads.items() if thread.is_alive()]) and (
            time.monotonic() < give_up_at
        ):
            threads[alive[0]].join(AWAIT_SECONDS)
            if cancelled.is_set():
                give_up_at = min(give_up_at, time.monotonic() + STUCK_SECONDS)
        stuck.update(alive)
        for number in alive:
            threads[number].join(AWAIT_SECONDS)  # it may just have ended, without having seen that it is stuck
            if not threads[number].is_alive():
                stuck.remove(number)
            log.warning("capture %s: rank %d: %s", capture_id, number, STUCK)
            self._enter(capture_id, number, pb.CAPTURE_STATE_FAILED, f"rank {number}: {STUCK}")

    def _with_step_time(
        self, work: Sequence[tuple[Order, Backend]], learned: Mapping[int, float]
    ) -> list[tuple[Order, Backend]]:
        """The same orders with a known step time and a new common start."""
        step_seconds = max(learned.values())
        start = self._earliest_start([order.rank for order, _ in work], self._unix_seconds())
        return [
            (replace(order, step_seconds=step_seconds, start_unix_millis=round(start * 1000)), backend)
            for order, backend in work
        ]

    def _without_steps(
        self, capture_id: str, work: Sequence[tuple[Order, Backend]], idle: Mapping[int, str]
    ) -> list[tuple[Order, Backend]]:
        """The orders of ranks that make no steps, for a back end that needs none."""
        capture = self.records.get(capture_id)
        again: list[tuple[Order, Backend]] = []
        for order, before in work:
            number = order.rank.rank
            if number not in idle:
                continue
            try:
                if capture is None or capture.requested_by == DUTY_CYCLE:
                    raise CaptureError("a capture of the duty cycle needs steps")
                backend = self._reservations.without_steps(order.rank)
            except CaptureError as error:
                self._enter(capture_id, number, pb.CAPTURE_STATE_FAILED, f"{idle[number]}; {error}")
                continue

            def edit(entry: pb.RankCapture, before: str = before.name, name: str = backend.name) -> None:
                entry.state, entry.backend = pb.CAPTURE_STATE_ACCEPTED, name
                entry.notes.append(f"{NOT_BY}{before}: {idle[entry.rank]}")

            self.records.change_rank(capture_id, number, edit)
            again.append((replace(order, start_unix_millis=round(self._unix_seconds() * 1000)), backend))
        return again

    def _enter(self, capture_id: str, rank: int, state: pb.CaptureState.ValueType, error: str = "") -> None:
        def edit(entry: pb.RankCapture) -> None:
            entry.state, entry.error = state, error

        self.records.change_rank(capture_id, rank, edit)

    def _record(
        self,
        order: Order,
        backend: Backend,
        recorded: dict[int, tuple[RankProcess, Recording]],
        stuck: Collection[int],
        idle: dict[int, str],
    ) -> None:
        number = order.rank.rank

        def enter(state: pb.CaptureState.ValueType, error: str = "") -> None:
            if number not in stuck:
                self._enter(order.capture_id, number, state, error)

        try:
            recording = backend.record(
                order,
                self._archive.workspace(order.capture_id),
                lambda stage: enter(_STATES[stage]),
                self._reservations.cancelled(order.capture_id),
            )
            recorded[number] = (order.rank, recording)
            enter(pb.CAPTURE_STATE_WRITTEN)
        except CancelledError as error:
            enter(pb.CAPTURE_STATE_CANCELLED, str(error))
        except NoStepsError as error:
            idle[number] = str(error)
        except CaptureError as error:
            enter(pb.CAPTURE_STATE_FAILED, str(error))
        except OSError as error:
            enter(pb.CAPTURE_STATE_FAILED, f"rank {number} (pid {order.rank.pid}): {error}")
        except Exception as error:  # a failure of one rank does not affect the others
            log.exception("capture %s of rank %d", order.capture_id, number)
            enter(pb.CAPTURE_STATE_FAILED, f"unexpected: {type(error).__name__}: {error}; please report this")
        finally:
            if number in stuck:
                self._reservations.release(order.rank)

    def _measure_aftermath(self, capture_id: str, orders: Sequence[Order]) -> None:
        """Step time before, during and after the capture: a capture may leave its process slower."""
        capture = self.records.get(capture_id)
        if capture is None or all(rank.state != pb.CAPTURE_STATE_ANALYSED for rank in capture.ranks):
            return
        before = self._steps_before(capture, orders)
        seen = [order for order in orders if before[order.rank.rank] is not None]
        if not seen:
            return
        ended = self._unix_seconds()
        self._reservations.cancelled(capture_id).wait(STEP_TIME_SECONDS)
        for order in seen:
            during = self._step_seconds(order.rank, order.start_unix_millis / 1000, ended)
            after = self._step_seconds(order.rank, ended, self._unix_seconds())
            times = pb.StepTimes(before_seconds=before[order.rank.rank], during_seconds=during, after_seconds=after)

            def edit(entry: pb.RankCapture, times: pb.StepTimes = times) -> None:
                entry.step_times.CopyFrom(times)

            self.records.change_rank(capture_id, order.rank.rank, edit)

    def _steps_before(self, capture: pb.Capture, orders: Sequence[Order]) -> dict[int, float | None]:
        asked = capture.requested_unix_millis / 1000
        return {order.rank.rank: self._step_seconds(order.rank, asked - STEP_TIME_SECONDS, asked) for order in orders}

    def _conclude(self, capture_id: str) -> None:
        capture = self.records.get(capture_id)
        assert capture is not None  # it is active
        note = ""
        try:
            join = self._archive.join(capture)
        except CaptureError as error:
            join, note = None, f"the ranks' traces could not be joined: {error}"
        starts = [rank.start_unix_millis for rank in capture.ranks if rank.HasField("start_unix_millis")]

        def edit(record: pb.Capture) -> None:
            if len(starts) > 1:
                record.start_skew_millis = max(starts) - min(starts)
            if join is not None:
                record.join.CopyFrom(join)
            if note:
                record.notes.append(note)
            record.state = overall_state(record)
            self.tally.count(record)

        self.records.change(capture_id, edit)
