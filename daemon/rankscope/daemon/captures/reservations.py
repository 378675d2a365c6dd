"""Which ranks are being captured: a rank belongs to one capture at a time, recorded by the back end that suits it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence

from rankscope.daemon.captures.orders import Backend, CaptureError, Options
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

MAX_ACTIVE = 8
# Of these, for tenants that have no capture under way.
ACTIVE_SPARE = 4
# Prefix of the note on a back end that was passed over.
NOT_BY = "not by "
# Prefix of the note on a back end that was used although it does not support schedules.
ONCE = "recorded once, from the start on"
# Prefixes of notes that hold for every attempt.
LASTING = (NOT_BY, ONCE)
NO_SCHEDULES = "it knows no --wait, --warmup and --repeat"


NO_OPTIONS = Options()


class Reservations:
    """Thread-safe."""

    def __init__(
        self,
        node: str,
        backends: Sequence[Backend],
        stalled_seconds: Callable[[RankProcess], float | None] = lambda rank: None,
    ) -> None:
        """`stalled_seconds`: since the rank's last step, if it makes none."""
        self._node = node
        self._backends = backends
        self._stalled_seconds = stalled_seconds
        self._lock = threading.Lock()
        self._cancelled: dict[str, threading.Event] = {}
        self._tenants: dict[str, str] = {}  # by capture id
        # By process, because a run's name may change: rank, pid and start of the process to job and capture id.
        self._taken: dict[tuple[int, int, int], tuple[str, str]] = {}

    def begin(
        self,
        capture: pb.Capture,
        numbers: Sequence[int],
        here: Mapping[int, RankProcess],
        options: Options = NO_OPTIONS,
        tenant: str = "",
        patience_seconds: float = 0.0,
    ) -> list[tuple[RankProcess, Backend]]:
        """Reserve the ranks for a capture and add them to it; unavailable ranks are added as failed, with the
        reason. A rank that has made no step for longer than `patience_seconds` is recorded without steps."""
        reserved = []
        # Not under the lock, which the daemon's loop takes as well: a process may be slow to look at.
        suitable = {
            number: self._choose_backend(here[number], options, patience_seconds)
            for number in numbers
            if number in here
        }
        with self._lock:
            self._check_places(tenant)
            self._cancelled[capture.id] = threading.Event()
            self._tenants[capture.id] = tenant
            for number in numbers:
                entry = capture.ranks.add(rank=number, node=self._node, state=pb.CAPTURE_STATE_ACCEPTED)
                try:
                    rank = self._take(number, here)
                    backend, objections = suitable[number]
                    if backend is None:
                        raise CaptureError(f"{rank} cannot be captured: {'; '.join(objections)}")
                except CaptureError as error:
                    entry.state, entry.error = pb.CAPTURE_STATE_FAILED, str(error)
                    continue
                self._taken[rank.key[1:]] = (rank.job, capture.id)
                entry.backend, entry.pid = backend.name, rank.pid
                entry.notes.extend(f"{NOT_BY}{objection}" for objection in objections)
                if options.is_scheduled and not backend.keeps_schedules:
                    entry.notes.append(f"{ONCE}: by {backend.name}, and {NO_SCHEDULES}")
                reserved.append((rank, backend))
        return reserved

    def end(self, capture_id: str, stuck: Collection[int] = ()) -> None:
        """Ranks that are stuck stay reserved until they are released."""
        with self._lock:
            cancelled = self._cancelled.pop(capture_id, None)
            if stuck and cancelled is not None:
                cancelled.set()
            self._tenants.pop(capture_id, None)
            for process in [process for process, (_, holder) in self._taken.items() if holder == capture_id]:
                if process[0] not in stuck:
                    del self._taken[process]

    def release(self, rank: RankProcess) -> None:
        with self._lock:
            self._taken.pop(rank.key[1:], None)

    def is_busy(self, job: str) -> bool:
        with self._lock:
            return any(taken == job for taken, _ in self._taken.values())

    def cancelled(self, capture_id: str) -> threading.Event:
        """Set when the capture is to stop."""
        with self._lock:
            return self._cancelled[capture_id]

    def cancel(self, capture_id: str) -> None:
        with self._lock:
            if capture_id in self._cancelled:
                self._cancelled[capture_id].set()

    def cancel_all(self) -> None:
        with self._lock:
            for event in self._cancelled.values():
                event.set()

    def _check_places(self, tenant: str) -> None:
        own = [capture_id for capture_id, owner in self._tenants.items() if owner == tenant]
        if len(self._tenants) >= MAX_ACTIVE:
            raise CaptureError(f"{MAX_ACTIVE} captures are under way on {self._node}; wait for one or cancel it")
        if own and len(self._tenants) >= MAX_ACTIVE - ACTIVE_SPARE:
            raise CaptureError(
                f"{len(self._tenants)} captures are under way on {self._node}, of {tenant}: {', '.join(own)}; the last "
                f"{ACTIVE_SPARE} places are for others; wait for one or cancel it"
            )

    def _take(self, number: int, here: Mapping[int, RankProcess]) -> RankProcess:
        if number not in here:
            raise CaptureError(
                f"rank {number} does not run on {self._node}; ask the operator, or the daemon of its own node"
            )
        _, other = self._taken.get(here[number].key[1:], ("", ""))
        if other:
            raise CaptureError(f"rank {number} is being captured already, by {other}; wait for that or cancel it")
        return here[number]

    def without_steps(self, rank: RankProcess) -> Backend:
        """The back end that records a process which makes no steps. Raises CaptureError."""
        objections = ["no back end records stacks"]
        for backend in self._backends:
            if not backend.needs_steps:
                objection = backend.objection(rank)
                if objection is None:
                    return backend
                objections.append(f"{backend.name}: {objection}")
        raise CaptureError("; ".join(objections[1:] or objections))

    def _choose_backend(
        self, rank: RankProcess, options: Options, patience_seconds: float
    ) -> tuple[Backend | None, list[str]]:
        """The first suitable back end, if any, and why those before it are not. If a schedule is requested, one that
        supports schedules is preferred."""
        objections: list[str] = []
        unfit: list[Backend] = []
        stalled_seconds = self._stalled_seconds(rank)
        is_still = stalled_seconds is not None and stalled_seconds > patience_seconds
        for backend in self._backends:
            objection = backend.objection(rank)
            if objection is None and is_still and backend.needs_steps:
                objection = f"no step has ended for {stalled_seconds:.0f} s"
            if objection is not None:
                objections.append(f"{backend.name}: {objection}")
            elif options.is_scheduled and not backend.keeps_schedules:
                unfit.append(backend)
            else:
                objections.extend(f"{better.name}: {NO_SCHEDULES}" for better in unfit)
                return backend, objections
        return (unfit[0] if unfit else None), objections
