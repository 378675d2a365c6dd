"""GPU counters from the driver itself, through NVML.

    NvmlSource  a thread that opens the library, polls, and opens it again after a failure
      Session   the library while it works: its GPUs, each with a Poller, and the listener for XID errors
        Poller  a thread for each GPU: a call that never returns holds up that GPU alone

A caller never blocks. A call that does not return is reported and left alone: it waits inside the kernel, and could not
be killed in a process of its own either."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections import deque
from collections.abc import Container, MutableMapping, Sequence
from dataclasses import replace
from typing import Final

from rankscope.daemon.gpu.nvml_calls import Asker, CallWatch, Device, DriverGoneError, NvmlLibrary, NvmlUnavailableError
from rankscope.daemon.gpu.nvml_counters import EnergyMeter, ThrottleClock
from rankscope.daemon.gpu.nvml_device import Cadence, DeviceReader
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, GpuState, SourceState
from rankscope.daemon.gpu.xid import XidCounts, XidListener

KEPT_SECONDS: Final = 60.0
CLOSING_SECONDS: Final = 2.0
NAME: Final = "nvml"
DEFAULT_CADENCE: Final = Cadence()


class Poller:
    """Reads its GPU after each `begin`, and then puts itself into `done`."""

    def __init__(self, reader: DeviceReader, watch: CallWatch, done: queue.SimpleQueue[Poller]) -> None:
        self.identity = reader.identity
        self.driver_gone: str | None = None
        self.busy = False
        self.read_seconds_total = 0.0
        self.problems: tuple[str, ...] = ()
        self._readings: tuple[GpuReading, ...] = (reader.identity,)
        self._reader = reader
        self._watch = watch
        self._done = done
        self._orders: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"gpu-{reader.identity.index}", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        self.busy = True
        self._orders.put(True)

    def stop(self) -> None:
        self._orders.put(False)

    def join(self, seconds: float) -> bool:
        """Returns whether it ended in that time."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def stuck(self, seconds: float) -> str | None:
        return self._watch.stuck(seconds) if self.busy else None

    def readings(self, hang_seconds: float) -> tuple[GpuReading, ...]:
        """Of the round that ended. While a call is under way nothing is measured, and after so long it hangs."""
        if not self.busy:
            return self._readings
        state = GpuState.HANGING if self.stuck(hang_seconds) else self._readings[0].state
        return (replace(self.identity, state=state, throttled_seconds=self._readings[0].throttled_seconds),)

    def _work(self) -> None:
        while self._orders.get():
            started = time.monotonic()
            try:
                self._readings = self._reader.read()
                self.problems = self._reader.problems
            except DriverGoneError as error:
                self.driver_gone = str(error)
            except Exception as error:  # noqa: BLE001 - pynvml may raise anything; one GPU fails
                self._readings = (replace(self.identity, state=GpuState.FAILED),)
                text = f"GPU {self.identity.index} ({self.identity.uuid}): {type(error).__name__}: {error}"
                self.problems = (text,)
            self.read_seconds_total += time.monotonic() - started
            self.busy = False
            self._done.put(self)
        with contextlib.suppress(Exception):  # the thread ends in any case
            self._reader.close()


class Memory:
    """What is kept between sessions: counters, and which GPUs there have been."""

    def __init__(self) -> None:
        self.xids = XidCounts()
        self.throttle: MutableMapping[str, ThrottleClock] = {}
        self.energy: MutableMapping[str, EnergyMeter] = {}
        self.known: MutableMapping[str, GpuReading] = {}

    def absent_gpus(self, state: GpuState, present: Container[str] = ()) -> tuple[GpuReading, ...]:
        """GPUs that were there once and are not now, with their counters."""
        return tuple(
            replace(
                reading,
                state=state,
                throttled_seconds=self.throttle[uuid].seconds,
                xid_errors=self.xids.of(uuid),
            )
            for uuid, reading in self.known.items()
            if uuid not in present
        )


class Session:
    def __init__(self, memory: Memory, cadence: Cadence) -> None:
        """Raises NvmlUnavailableError."""
        self._memory = memory
        self._library = NvmlLibrary()
        try:
            devices = self._library.devices()
        except NvmlUnavailableError:
            self._library.close(unload=True)
            raise
        self.driver_version = self._library.driver_version()
        self._done: queue.SimpleQueue[Poller] = queue.SimpleQueue()
        self._pollers = [self._poller(device, cadence) for device in devices if device.handle is not None]
        self._silent = [device for device in devices if device.handle is None]
        self._listener = XidListener(self._library.nvml, devices, memory.xids)

    def poll(self, seconds: float) -> None:
        """One round: every GPU whose last one has ended, waiting at most so long."""
        free = [poller for poller in self._pollers if not poller.busy]
        for poller in free:
            poller.begin()
        give_up_at = time.monotonic() + seconds
        # A poller that was late in an earlier round may report in this one: only busy ones count.
        while any(poller.busy for poller in free) and (left := give_up_at - time.monotonic()) > 0:
            try:
                self._done.get(timeout=left)
            except queue.Empty:
                return

    @property
    def read_seconds_total(self) -> float:
        return sum(poller.read_seconds_total for poller in self._pollers)

    def driver_gone(self) -> str | None:
        return next((poller.driver_gone for poller in self._pollers if poller.driver_gone), None)

    def is_busy(self) -> bool:
        return any(poller.busy for poller in self._pollers)

    def hanging(self, hang_seconds: float) -> tuple[str, ...]:
        found = ((poller, poller.stuck(hang_seconds)) for poller in self._pollers)
        return tuple(f"GPU {poller.identity.index} ({poller.identity.uuid}): {text}" for poller, text in found if text)

    def problems(self, hang_seconds: float) -> tuple[str, ...]:
        found = [problem for poller in self._pollers for problem in poller.problems]
        found += [f"GPU {device.index}: {device.problem}; see docs/gpu.md, lost GPUs" for device in self._silent]
        listening = self._listener.watch.stuck(hang_seconds) or self._listener.problem
        return tuple(found + ([f"XID errors: {listening}"] if listening else []))

    def readings(self, hang_seconds: float) -> tuple[GpuReading, ...]:
        """Of the GPUs that are there, each followed by its MIG instances, and of those that were there once."""
        found = (reading for poller in self._pollers for reading in poller.readings(hang_seconds))
        counted = tuple(replace(reading, xid_errors=self._memory.xids.of(reading.uuid)) for reading in found)
        present = {poller.identity.uuid for poller in self._pollers}
        gone = self._memory.absent_gpus(GpuState.LOST, present)
        return tuple(sorted(counted + gone, key=lambda reading: reading.index))

    def close(self, seconds: float) -> None:
        """A thread inside a call that does not return is left behind: it can be neither ended nor waited for."""
        give_up_at = time.monotonic() + seconds
        for poller in self._pollers:
            poller.stop()
        ended = [poller.join(max(0.0, give_up_at - time.monotonic())) for poller in self._pollers]
        ended.append(self._listener.stop(max(0.0, give_up_at - time.monotonic())))
        if all(ended):
            self._library.close(unload=True)

    def _poller(self, device: Device, cadence: Cadence) -> Poller:
        identity = GpuReading(uuid=device.uuid, index=device.index, name=device.name)
        self._memory.known[device.uuid] = identity
        throttle = self._memory.throttle.setdefault(device.uuid, ThrottleClock())
        meter = self._memory.energy.setdefault(device.uuid, EnergyMeter())
        watch = CallWatch()
        asker = Asker(self._library.nvml, device.handle, watch)
        return Poller(DeviceReader(asker, identity, throttle, meter, cadence), watch, self._done)


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
                shortest, longest = self._lost_retry_seconds
                lost_wait_seconds = min(longest, lost_wait_seconds * 2) if was_lost else shortest
            except NvmlUnavailableError as error:
                self._publish_nothing(error.state, str(error))
            except Exception as error:  # noqa: BLE001 - pynvml may raise anything; it is retried
                text = f"NVML could not be read: {type(error).__name__}: {error}; trying again"
                self._publish_nothing(SourceState.FAILED, text)
            finally:
                self._watch.leave()
            if self._polls_total > polls_before + 1:
                wait_seconds = self._retry_seconds[0]  # it worked for a while
            self._stopping.wait(wait_seconds)
            wait_seconds = min(self._retry_seconds[1], wait_seconds * 2)

    def _open_and_poll(self, lost_wait_seconds: float) -> bool:
        """Poll until the library has to be opened again. Returns whether a lost GPU is the reason."""
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


def _explain_hanging(text: str) -> str:
    return f"{text}; the driver hangs: look into dmesg for NVRM and Xid (see docs/gpu.md)"
