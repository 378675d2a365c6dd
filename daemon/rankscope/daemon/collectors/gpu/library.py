"""The driver's library, loaded and unloaded, with the GPUs it lists."""

from __future__ import annotations

import _ctypes
import contextlib
import ctypes
from dataclasses import dataclass
from typing import Any, Final

from rankscope.daemon.collectors.gpu import failing
from rankscope.daemon.collectors.gpu.readings import SourceState

# By name as the loader finds it, then where driver containers and managed clusters leave it.
PLACES: Final = (
    "libnvidia-ml.so.1",
    "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
    "/run/nvidia/driver/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1",
    "/run/nvidia/driver/usr/lib/aarch64-linux-gnu/libnvidia-ml.so.1",
)


class NvmlUnavailableError(Exception):
    """The library cannot be used now; the text says why and what to do."""

    def __init__(self, state: SourceState, text: str) -> None:
        super().__init__(text)
        self.state = state


@dataclass(frozen=True)
class Device:
    index: int
    handle: Any  # None: the driver knows that it is there, and no more
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
        # pynvml would go on with the library of the driver that was there before.
        _forget_functions(pynvml)
        vars(pynvml)["nvmlLib"] = self._loaded
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            code, text = int(error.value), str(error)
            self._unload()
            state = SourceState.NO_DRIVER if code in failing.NO_DRIVER else SourceState.FAILED
            raise NvmlUnavailableError(state, failing.explain_opening(code, text)) from error

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
            raise NvmlUnavailableError(
                SourceState.FAILED, failing.explain_opening(int(error.value), str(error))
            ) from error
        if count == 0:
            raise NvmlUnavailableError(
                SourceState.NO_GPU, "NVML lists no GPU; is one handed to this machine or container?"
            )
        return tuple(self._device(index) for index in range(count))

    def close(self, unload: bool) -> None:
        """Unloads only when no thread is inside a call any more: the code would vanish under it."""
        # Not initialized any more: the driver went first.
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
