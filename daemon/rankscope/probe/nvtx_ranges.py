"""NVTX ranges of the program as annotations of torch's profiler, which does not record NVTX.

torch.cuda.nvtx calls a module of C functions by the name `_nvtx`. An object takes its place. The functions of
torch.cuda.nvtx stay as they are: torch.compile knows them by identity and puts them into its graphs."""

from __future__ import annotations

import threading
from typing import Any, Callable, List, Optional

from .failure import disable, switch
from .torch_timers import hide_from_dynamo

# Of a thread. Ranges that are never closed must not fill the memory.
MAX_OPEN = 256


class _Thread(threading.local):
    ranges: Optional[List[Any]] = None  # of the class: asking for an attribute that is missing takes 1 µs


class NvtxRanges:
    """In place of torch._C._nvtx."""

    def __init__(self, original: Any, is_recording: Callable[[], bool], annotation: Callable[[str], Any]) -> None:
        self._original = original
        self._is_recording = is_recording
        self._annotation = annotation
        self._thread = _Thread()
        # The names that torch calls.
        vars(self).update(rangePushA=self._push, rangePop=self._pop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _push(self, message: str) -> Any:
        depth = self._original.rangePushA(message)
        if switch.on and self._is_recording():
            self._open(message)
        return depth

    def _pop(self) -> Any:
        depth = self._original.rangePop()
        ranges = self._thread.ranges
        if ranges:
            self._close(ranges)
        return depth

    def _open(self, message: str) -> None:
        try:
            ranges = self._thread.ranges
            if ranges is None:
                ranges = self._thread.ranges = []
            if len(ranges) < MAX_OPEN:
                annotation = self._annotation(message)
                annotation.__enter__()
                ranges.append(annotation)
        except Exception as error:
            disable(error)

    def _close(self, ranges: List[Any]) -> None:
        """The one opened last. One of an earlier recording does no harm: nothing is recorded of it."""
        try:
            ranges.pop().__exit__(None, None, None)
        except Exception as error:
            disable(error)


def annotate_ranges(torch: Any) -> None:
    nvtx = torch.cuda.nvtx
    if hasattr(nvtx, "_nvtx"):
        nvtx._nvtx = NvtxRanges(nvtx._nvtx, torch.autograd._profiler_enabled, torch.autograd.profiler.record_function)


for _method in (NvtxRanges._push, NvtxRanges._pop):
    hide_from_dynamo(_method)
