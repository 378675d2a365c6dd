"""NVTX ranges of the program: their host time, and annotations of torch's profiler, which does not record NVTX.

torch.cuda.nvtx calls a module of C functions by the name `_nvtx`. An object takes its place. The functions of
torch.cuda.nvtx stay as they are: torch.compile knows them by identity and puts them into its graphs."""

from __future__ import annotations

import re
import threading
import time
from typing import Any, Callable, Dict, List, Optional, Tuple

from . import ring_layout
from .failure import disable, switch
from .torch_timers import STEPS, Tally, hide_from_dynamo

# Of a thread. Ranges that are never closed must not fill the memory.
MAX_OPEN = 256
# Names as the program gives them, each with its place. Those of single steps come once, so they are not kept for long.
MAX_MESSAGES = 1024
MAX_MESSAGE_CHARACTERS = 256
# Names beyond those that fit into the ring.
OTHER = "other ranges"


def _text(message: Any) -> str:
    """The C functions take bytes too."""
    return message if isinstance(message, str) else message.decode("utf-8", "replace")


class RangeTimes:
    """Host time of the training thread by range. Time inside a nested range is that range's alone, so that the times
    of all ranges add up. Numbers in names become "#": names of single steps and ranks would never meet again."""

    __slots__ = ("_cells", "_first_step", "_known", "_last_ns", "_open", "_too_deep", "tally")

    def __init__(self, tally: Tally) -> None:
        self.tally = tally
        self._cells: Dict[str, List[int]] = {}  # one number each: nanoseconds since the first range
        self._known: Dict[str, List[int]] = {}  # the same, by message
        self._open: List[List[int]] = []
        self._too_deep = 0
        self._last_ns = 0  # until then, time is counted
        self._first_step = 0

    def push(self, message: str, now: Callable[[], int] = time.monotonic_ns) -> None:
        try:
            cell = self._known[message]
        except KeyError:
            cell = self._cell(message)
        opened = self._open
        now_ns = now()
        if opened:
            opened[-1][0] += now_ns - self._last_ns
        self._last_ns = now_ns
        if len(opened) < MAX_OPEN:
            opened.append(cell)
        else:
            self._too_deep += 1

    def pop(self, now: Callable[[], int] = time.monotonic_ns) -> None:
        opened = self._open
        if not opened:
            return  # of a range that began before the first step
        now_ns = now()
        opened[-1][0] += now_ns - self._last_ns
        self._last_ns = now_ns
        if self._too_deep:
            self._too_deep -= 1
        else:
            del opened[-1]

    def _cell(self, message: str) -> List[int]:
        start = _text(message[:MAX_MESSAGE_CHARACTERS])
        name = re.sub("[0-9]+", "#", start)[: ring_layout.RANGE_NAME_BYTES] or "#"
        if not self._cells:
            self._first_step = self.tally.ledger[STEPS]
        if name not in self._cells and len(self._cells) >= ring_layout.MAX_RANGES - 1:
            name = OTHER
        cell = self._cells.setdefault(name, [0])
        if len(self._known) >= MAX_MESSAGES:
            self._known.clear()
        if len(message) <= MAX_MESSAGE_CHARACTERS:
            self._known[message] = cell
        return cell

    def rows(self) -> List[Tuple[bytes, int, float]]:
        """As ring_layout.RANGE has them. Called between two steps."""
        if self._open:
            now_ns = time.monotonic_ns()
            self._open[-1][0] += now_ns - self._last_ns
            self._last_ns = now_ns
        steps = self.tally.ledger[STEPS] - self._first_step
        return [(name.encode("utf-8", "replace"), steps, cell[0] * 1e-9) for name, cell in list(self._cells.items())]


class _Thread(threading.local):
    ranges: Optional[List[Any]] = None  # of the class: asking for an attribute that is missing takes 1 µs


class NvtxRanges:
    """In place of torch._C._nvtx."""

    def __init__(
        self, original: Any, times: RangeTimes, is_recording: Callable[[], bool], annotation: Callable[[str], Any]
    ) -> None:
        self._original = original
        self._original_push, self._original_pop = original.rangePushA, original.rangePop
        self._times = times
        self._tally = times.tally
        self._is_recording = is_recording
        self._annotation = annotation
        self._thread = _Thread()
        # The names that torch calls.
        vars(self).update(rangePushA=self._push, rangePop=self._pop)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)

    def _push(self, message: str, get_ident: Callable[[], int] = threading.get_ident) -> Any:
        depth = self._original_push(message)
        if switch.on:
            try:
                if get_ident() == self._tally.thread_id:
                    self._times.push(message)
                if self._is_recording():
                    self._open(message)
            except Exception as error:
                disable(error)
        return depth

    def _pop(self, get_ident: Callable[[], int] = threading.get_ident) -> Any:
        depth = self._original_pop()
        try:
            if switch.on and get_ident() == self._tally.thread_id:
                self._times.pop()
            ranges = self._thread.ranges
            if ranges:
                # The one opened last. One of an earlier recording does no harm: nothing is recorded of it.
                ranges.pop().__exit__(None, None, None)
        except Exception as error:
            disable(error)
        return depth

    def _open(self, message: str) -> None:
        ranges = self._thread.ranges
        if ranges is None:
            ranges = self._thread.ranges = []
        if len(ranges) < MAX_OPEN:
            annotation = self._annotation(_text(message))
            annotation.__enter__()
            ranges.append(annotation)


def watch_ranges(torch: Any, times: RangeTimes) -> None:
    nvtx = torch.cuda.nvtx
    if hasattr(nvtx, "_nvtx"):
        is_recording, annotation = torch.autograd._profiler_enabled, torch.autograd.profiler.record_function
        nvtx._nvtx = NvtxRanges(nvtx._nvtx, times, is_recording, annotation)


for _method in (NvtxRanges._push, NvtxRanges._pop, RangeTimes.push, RangeTimes.pop):
    hide_from_dynamo(_method)
