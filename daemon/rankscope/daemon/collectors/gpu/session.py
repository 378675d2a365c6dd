"""The driver's library while it works: its GPUs, each with a thread, and the listener for XIDs."""

from __future__ import annotations

import queue
import time
from collections.abc import Container, MutableMapping
from dataclasses import replace

from rankscope.daemon.collectors.gpu.asking import Asker, CallWatch
from rankscope.daemon.collectors.gpu.device_reading import Cadence, DeviceReader
from rankscope.daemon.collectors.gpu.library import Device, NvmlLibrary, NvmlUnavailableError
from rankscope.daemon.collectors.gpu.metering import EnergyMeter
from rankscope.daemon.collectors.gpu.polling import Poller
from rankscope.daemon.collectors.gpu.readings import GpuReading, GpuState
from rankscope.daemon.collectors.gpu.throttling import ThrottleClock
from rankscope.daemon.collectors.gpu.xids import XidCounts, XidListener


class Memory:
    """What outlives a session: counters, and which GPUs there have been."""

    def __init__(self) -> None:
        self.xids = XidCounts()
        self.throttle: MutableMapping[str, ThrottleClock] = {}
        self.energy: MutableMapping[str, EnergyMeter] = {}
        self.known: MutableMapping[str, GpuReading] = {}

    def absent_gpus(self, state: GpuState, present: Container[str] = ()) -> tuple[GpuReading, ...]:
        """Those that were there once and are not now, with their counters."""
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
        # One that was late in an earlier round may report in this one: only who is busy counts.
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
        """Leaves behind what is inside a call that does not return: it can be neither ended nor waited for."""
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
