"""The driver's library and calls into it: errors by what they mean for a call, a GPU or everything; calls that a device
does not support are made once; other threads can see which call is under way."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rankscope.daemon.gpu.readings import SourceState

# NVML's error numbers; as literals, since pynvml is imported only where there is a driver.
NOT_FOUND: Final = 6  # no failure: an empty place
TIMEOUT: Final = 10
UNSUPPORTED: Final = frozenset(
    {
        3,  # not supported
        4,  # no permission
        13,  # the driver is older than the function
        22,  # not on a vGPU
        25,  # the driver knows another version of the structure
        26,  # deprecated
    }
)
LOST: Final = frozenset({15, 16, 28})  # fell off the bus; needs a reset; not found
DRIVER_GONE: Final = frozenset({1, 9, 12, 18})  # not initialized; not loaded; no library; another version was loaded
NO_DRIVER: Final = frozenset({9, 12})
VERSION_MISMATCH: Final = 18
# The library by name, as the loader finds it, then where driver containers and managed clusters put it.
PLACES: Final = (
    "libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
)


class GpuLostError(Exception):
    """One GPU does not answer any more."""


class DriverGoneError(Exception):
    """No call will work until the library is opened again."""


def explain_opening(code: int, text: str) -> str:
    """Why the library could not be opened, and the next step."""
    if code in NO_DRIVER:
        return f"NVML: {text} (error {code}); load the NVIDIA driver, or set gpu = false on nodes without a GPU"
    if code == VERSION_MISMATCH:
        return (
            f"NVML: {text} (error {code}); the driver was updated under its library: load the new kernel module "
            "or reboot, and in a container restart the daemon so that it gets the new library"
        )
    return (
        f"NVML: {text} (error {code}); does nvidia-smi work where the daemon runs? A container may have lost its "
        "access to /dev/nvidia*: restart it (see docs/gpu.md)"
    )


class CallWatch:
    """The call that a thread is in. Written by that thread, read by others."""

    def __init__(self) -> None:
        self._current: tuple[str, float] | None = None

    def enter(self, name: str) -> None:
        self._current = (name, time.monotonic())

    def leave(self) -> None:
        self._current = None

    def stuck(self, seconds: float) -> str | None:
        """The call that has not returned for so long, as text."""
        current = self._current
        if current is None or (passed := time.monotonic() - current[1]) < seconds:
            return None
        return f"{current[0]} has not returned for {passed:.0f} s"


class Asker:
    """Calls for one device. Raises GpuLostError and DriverGoneError; any other error makes the answer None."""

    def __init__(self, nvml: Any, handle: Any, watch: CallWatch) -> None:
        self.nvml = nvml
        self.handle = handle
        self.watch = watch
        self._unsupported: set[tuple[Any, ...]] = set()
        self._answers = 0
        self._failures: dict[str, str] = {}

    def begin(self) -> None:
        self._answers = 0
        self._failures = {}

    @property
    def failures(self) -> Mapping[str, str]:
        """Since `begin`, by call: errors that may pass."""
        return self._failures

    @property
    def nothing_works(self) -> bool:
        return bool(self._failures) and self._answers == 0

    def ask(self, name: str, *arguments: Any) -> Any:
        """The answer of a function about this device; None where there is none."""
        return self.call(name, self.handle, *arguments, key=(name, *arguments))

    def call(self, name: str, *arguments: Any, key: tuple[Any, ...]) -> Any:
        if key in self._unsupported:
            return None
        self.watch.enter(name)
        try:
            answer = getattr(self.nvml, name)(*arguments)
        except self.nvml.NVMLError as error:
            self._note(name, key, error)
            return None
        finally:
            self.watch.leave()
        self._answers += 1
        return answer

    def _note(self, name: str, key: tuple[Any, ...], error: Any) -> None:
        code = int(error.value)
        text = f"{name}: {error} (error {code})"
        if code in DRIVER_GONE:
            raise DriverGoneError(text) from error
        if code in LOST:
            raise GpuLostError(text) from error
        if code in UNSUPPORTED:
            self._unsupported.add(key)
        elif code != NOT_FOUND:
            self._failures[name] = text


class NvmlUnavailableError(Exception):
    """The library cannot be used now: the reason and the next step."""

    def __init__(self, state: SourceState, text: str) -> None:
        super().__init__(text)
        self.state = state


@dataclass(frozen=True)
class Device:
    index: int
    handle: Any  # None: the driver lists the GPU, but cannot open it
    uuid: str
    name: str
    problem: str = ""


class NvmlLibrary:
    """pynvml on a library that was initialized. Made and closed by one thread; calls may come from many."""

    def __init__(self) -> None:
        """Raises NvmlUnavailableError."""
        self._loaded = _load()
        # Only now: it costs 5 MB and 0.1 s, which a node without a driver need not spend.
        import pynvml

        self.nvml: Any = pynvml
        # pynvml would go on using the library of the previous driver.
        _forget_functions(pynvml)
        vars(pynvml)["nvmlLib"] = self._loaded
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            code, text = int(error.value), str(error)
            self._unload()
            state = SourceState.NO_DRIVER if code in NO_DRIVER else SourceState.FAILED
            raise NvmlUnavailableError(state, explain_opening(code, text)) from error

    def driver_version(self) -> str | None:
        try:
            return str(self.nvml.nvmlSystemGetDriverVersion())
        except self.nvml.NVMLError:
            return None

    def devices(self) -> tuple[Device, ...]:
        """Raises NvmlUnavailableError when there is none."""
        try:
            count = self.nvml.nvmlDeviceGetCount()
        except self.nvml.NVMLError as error:
            raise NvmlUnavailableError(SourceState.FAILED, explain_opening(int(error.value), str(error))) from error
        if count == 0:
            raise NvmlUnavailableError(
                SourceState.NO_GPU, "NVML lists no GPU; is one handed to this machine or container?"
            )
        return tuple(self._device(index) for index in range(count))

    def close(self, unload: bool) -> None:
        """Unload only when no thread is inside a call any more: its code would vanish."""
        # It may not be initialized any more: the driver went first.
        with contextlib.suppress(self.nvml.NVMLError):
            self.nvml.nvmlShutdown()
        if unload:
            self._unload()

    def _device(self, index: int) -> Device:
        try:
            handle = self.nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = self.nvml.nvmlDeviceGetUUID(handle), self.nvml.nvmlDeviceGetName(handle)
        except self.nvml.NVMLError as error:
            return Device(index, None, "", "", f"{error} (error {int(error.value)})")
        return Device(index, handle, str(uuid), str(name))

    def _unload(self) -> None:
        vars(self.nvml)["nvmlLib"] = None
        _forget_functions(self.nvml)
        # The next load would otherwise get the same library again, even after the driver was updated on the disk.
        _ctypes.dlclose(self._loaded._handle)


def _load() -> ctypes.CDLL:
    problems = []
    for place in PLACES:
        try:
            return ctypes.CDLL(place)
        except OSError as error:
            problems.append(str(error))
    text = f"no NVIDIA driver library: {problems[0]}; nothing to do on a node without a GPU (or set gpu = false)"
    raise NvmlUnavailableError(SourceState.NO_DRIVER, text)


def _forget_functions(pynvml: Any) -> None:
    cache = vars(pynvml).get("_nvmlGetFunctionPointer_cache")
    if isinstance(cache, dict):
        cache.clear()
