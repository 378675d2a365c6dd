"""GPU counters from the driver itself. Nothing here can hold up who asks: every call into the driver is made by threads
of this package, and one that does not return is reported and left alone (it could not be killed in a process of its own
either, for it waits inside the kernel)."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from rankscope.daemon.collectors.gpu.asking import CallWatch
from rankscope.daemon.collectors.gpu.device_reading import Cadence
from rankscope.daemon.collectors.gpu.library import NvmlUnavailableError
from rankscope.daemon.collectors.gpu.readings import GpuSnapshot, GpuState, SourceState
from rankscope.daemon.collectors.gpu.session import Memory, Session

KEPT_SECONDS: Final = 60.0
CLOSING_SECONDS: Final = 2.0
NAME: Final = "nvml"


DEFAULT_CADENCE = Cadence()


class NvmlSource:
    """`hang_seconds`: how long a call may take before it counts as hanging; `opening_seconds`: the same for opening the
    library, which wakes every GPU. `retry_seconds`: the first and the longest wait before it is opened again where
    there is none, or the driver went away; `lost_retry_seconds`: the same where a GPU is lost and the others work."""

    def __init__(
        self,
        interval_seconds: float = 1.0,
        *,
        hang_seconds: float = 10.0,
        opening_seconds: float = 60.0,
        retry_seconds: tuple[float, float] = (1.0, 60.0),
        lost_retry_seconds: tuple[float, float] = (30.0, 600.0),
        cadence: Cadence = DEFAULT_CADENCE,
    ) -> None:
        self._interval_seconds = interval_seconds
        self._hang_seconds = hang_seconds
        self._opening_seconds = opening_seconds
        self._retry_seconds = retry_seconds
        self._lost_retry_seconds = lost_retry_seconds
        self._cadence = cadence
        self._memory = Memory()
        self._watch = CallWatch()
        self._stopping = threading.Event()
        self._latest = GpuSnapshot(NAME, SourceState.STARTING)
        self._kept: deque[GpuSnapshot] = deque(maxlen=max(2, round(KEPT_SECONDS / interval_seconds)))
        self._polls_total = 0
        self._ended_sessions_seconds = 0.0
        self._thread = threading.Thread(target=self._supervise, name="gpu-nvml", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(CLOSING_SECONDS)

    def latest(self) -> GpuSnapshot:
        snapshot = self._latest
        stuck = self._watch.stuck(self._opening_seconds)
        if stuck is None:
            return snapshot
        gpus = tuple(replace(gpu, state=GpuState.HANGING) for gpu in snapshot.gpus)
        return replace(snapshot, state=SourceState.HANGING, reason=_explain_hanging(stuck), gpus=gpus)

    def since(self, unix_nanos: int) -> Sequence[GpuSnapshot]:
        return [snapshot for snapshot in tuple(self._kept) if snapshot.taken_unix_nanos > unix_nanos]

    def _supervise(self) -> None:
        wait_seconds = self._retry_seconds[0]
        lost_wait_seconds = self._lost_retry_seconds[0]
        while not self._stopping.is_set():
            polls_before = self._polls_total
            try:
                was_lost = self._open_and_poll(lost_wait_seconds)
                lost_wait_seconds = self._longer(lost_wait_seconds, self._lost_retry_seconds) if was_lost else 0.0
                lost_wait_seconds = max(lost_wait_seconds, self._lost_retry_seconds[0])
            except NvmlUnavailableError as error:
                self._publish_nothing(error.state, str(error))
            except Exception as error:  # noqa: BLE001 - whatever the driver does, it is tried again later
                text = f"NVML could not be read: {type(error).__name__}: {error}; trying again"
                self._publish_nothing(SourceState.FAILED, text)
            finally:
                self._watch.leave()
            if self._polls_total > polls_before + 1:
                wait_seconds = self._retry_seconds[0]  # it worked for a while
            self._stopping.wait(wait_seconds)
            wait_seconds = self._longer(wait_seconds, self._retry_seconds)

    def _open_and_poll(self, lost_wait_seconds: float) -> bool:
        """Until the library has to be opened again; whether that is because of a lost GPU."""
        self._watch.enter("opening NVML")
        session = Session(self._memory, self._cadence)
        self._watch.leave()
        try:
            return self._poll(session, lost_wait_seconds)
        finally:
            self._ended_sessions_seconds += session.read_seconds_total
            self._watch.enter("closing NVML")
            session.close(CLOSING_SECONDS)
            self._watch.leave()

    def _poll(self, session: Session, lost_wait_seconds: float) -> bool:
        next_at = time.monotonic()
        healthy_at = next_at
        while not self._stopping.is_set():
            session.poll(0.9 * self._interval_seconds)
            self._polls_total += 1
            snapshot = self._publish(session)
            gone = session.driver_gone()
            if gone and not session.is_busy():
                self._publish_nothing(SourceState.FAILED, f"the driver went away: {gone}; trying again")
                return False
            if all(gpu.state in (GpuState.OK, GpuState.HANGING) for gpu in snapshot.gpus):
                healthy_at = time.monotonic()
            elif time.monotonic() - healthy_at > lost_wait_seconds and not session.is_busy():
                return True
            # Polls that were missed are not made up for.
            next_at = max(next_at + self._interval_seconds, time.monotonic())
            self._stopping.wait(max(0.0, next_at - time.monotonic()))
        return False

    def _publish(self, session: Session) -> GpuSnapshot:
        gpus = session.readings(self._hang_seconds)
        hanging = session.hanging(self._hang_seconds)
        problems = session.problems(self._hang_seconds)
        state, reason = SourceState.OK, ""
        if hanging:
            state, reason = SourceState.HANGING, _explain_hanging(hanging[0])
        elif not any(gpu.state is GpuState.OK for gpu in gpus):
            state = SourceState.FAILED
            reason = problems[0] if problems else "no GPU answers"
        snapshot = GpuSnapshot(
            source=NAME,
            state=state,
            reason=reason,
            driver_version=session.driver_version,
            taken_unix_nanos=time.time_ns(),
            gpus=gpus,
            polls_total=self._polls_total,
            poll_seconds_total=self._ended_sessions_seconds + session.read_seconds_total,
            problems=(*hanging, *problems),
        )
        self._latest = snapshot
        self._kept.append(snapshot)
        return snapshot

    def _publish_nothing(self, state: SourceState, reason: str) -> None:
        self._latest = GpuSnapshot(
            source=NAME,
            state=state,
            reason=reason,
            taken_unix_nanos=time.time_ns(),
            gpus=self._memory.absent_gpus(state=GpuState.FAILED),
            polls_total=self._polls_total,
            poll_seconds_total=self._ended_sessions_seconds,
            problems=(reason,),
        )
        self._kept.append(self._latest)

    @staticmethod
    def _longer(seconds: float, limits: tuple[float, float]) -> float:
        return min(limits[1], seconds * 2)


def _explain_hanging(text: str) -> str:
    return f"{text}; the driver hangs: look into dmesg for NVRM and Xid (see docs/gpu.md)"
