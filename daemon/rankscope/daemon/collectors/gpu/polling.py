"""A thread for each GPU: a call that never returns holds up that GPU alone."""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import replace

from rankscope.daemon.collectors.gpu.asking import CallWatch
from rankscope.daemon.collectors.gpu.device_reading import DeviceReader
from rankscope.daemon.collectors.gpu.failing import DriverGoneError
from rankscope.daemon.collectors.gpu.readings import GpuReading, GpuState


class Poller:
    """Reads its GPU each time it is told to, and then puts itself into `done`."""

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
        """Whether it ended in that time."""
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
            except Exception as error:  # noqa: BLE001 - whatever this GPU's driver does, the others go on
                self._readings = (replace(self.identity, state=GpuState.FAILED),)
                text = f"GPU {self.identity.index} ({self.identity.uuid}): {type(error).__name__}: {error}"
                self.problems = (text,)
            self.read_seconds_total += time.monotonic() - started
            self.busy = False
            self._done.put(self)
        try:
            self._reader.close()
        except Exception:  # noqa: BLE001 - nothing is left to be done about it
            return
