"""XID errors as the driver reports them: counted by number over the daemon's life."""

from __future__ import annotations

import contextlib
import ctypes
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from rankscope.daemon.gpu import nvml_calls
from rankscope.daemon.gpu.nvml_calls import CallWatch, Device

XID_EVENT: Final = 0x8
WAIT_MILLISECONDS: Final = 500
RETRY_SECONDS: Final = (1.0, 30.0)


class XidCounts:
    """By GPU and number, of the GPUs that report XID errors. Outlives a reload of the driver."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, Counter[int]] = {}

    def listen(self, uuid: str) -> None:
        """From now on a count of zero means that there was no error."""
        with self._lock:
            self._counts.setdefault(uuid, Counter())

    def add(self, uuid: str, xid: int) -> None:
        with self._lock:
            self._counts.setdefault(uuid, Counter())[xid] += 1

    def of(self, uuid: str) -> Mapping[int, int] | None:
        with self._lock:
            counts = self._counts.get(uuid)
            return None if counts is None else dict(counts)


class XidListener:
    """Waits for events in a thread of its own until `stop`."""

    def __init__(self, nvml: Any, devices: Sequence[Device], counts: XidCounts) -> None:
        self.watch = CallWatch()
        self.problem: str | None = None
        self._nvml = nvml
        self._devices = [device for device in devices if device.handle is not None]
        self._uuids = {_address(device.handle): device.uuid for device in self._devices}
        self._counts = counts
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="gpu-xids", daemon=True)
        self._thread.start()

    def stop(self, seconds: float) -> bool:
        """Returns whether it ended in that time."""
        self._stopping.set()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _listen(self) -> None:
        retry_seconds = RETRY_SECONDS[0]
        while not self._stopping.is_set():
            event_set = None
            try:
                event_set = self._called("nvmlEventSetCreate")
                listened = self._register(event_set)
                self.problem = None if listened else "no GPU reports XID errors"
                while not self._stopping.is_set():
                    self._wait(event_set)
                    retry_seconds = RETRY_SECONDS[0]
            except self._nvml.NVMLError as error:
                # A GPU that fell off the bus makes every wait fail at once: wait, then listen to those that are left.
                self.problem = f"not reported: {error} (error {int(error.value)}); trying again"
            finally:
                self._free(event_set)
            self._stopping.wait(retry_seconds)
            retry_seconds = min(RETRY_SECONDS[1], retry_seconds * 2)

    def _register(self, event_set: Any) -> int:
        listened = 0
        for device in self._devices:
            try:
                if self._called("nvmlDeviceGetSupportedEventTypes", device.handle) & XID_EVENT:
                    self._called("nvmlDeviceRegisterEvents", device.handle, XID_EVENT, event_set)
                    self._counts.listen(device.uuid)
                    listened += 1
            except self._nvml.NVMLError as error:
                if int(error.value) in nvml_calls.DRIVER_GONE:
                    raise
        return listened

    def _wait(self, event_set: Any) -> None:
        try:
            event = self._called("nvmlEventSetWait_v2", event_set, WAIT_MILLISECONDS)
        except self._nvml.NVMLError as error:
            if int(error.value) == nvml_calls.TIMEOUT:
                return
            raise
        if event.eventType & XID_EVENT:
            uuid = self._uuids.get(_address(event.device))
            if uuid is not None:
                self._counts.add(uuid, int(event.eventData))

    def _free(self, event_set: Any) -> None:
        if event_set is not None:
            # It may have gone with the driver.
            with contextlib.suppress(self._nvml.NVMLError):
                self._called("nvmlEventSetFree", event_set)

    def _called(self, name: str, *arguments: Any) -> Any:
        self.watch.enter(name)
        try:
            return getattr(self._nvml, name)(*arguments)
        finally:
            self.watch.leave()


def _address(handle: Any) -> int | None:
    return ctypes.cast(handle, ctypes.c_void_p).value
