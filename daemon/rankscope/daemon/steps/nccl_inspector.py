"""Collectives from the file of NCCL Inspector, NVIDIA's own profiler plugin, of a rank that has it in place of ours.

Inspector appends a line of JSON per operation: communicator, function, bytes, and how long the GPU took. With
NCCL_INSPECTOR_DUMP_VERBOSE=1 a line says when the host found the operation to be over; without it, only when the line
was written. Both are of the wall clock. Algorithm, protocol and what is under way are not in the file, nor are replays
of a CUDA graph, nor messages before NCCL 2.30.

Some operations have no line: before NCCL 2.30 all but the last of a communicator since the last dump, later those under
8 KiB. Their sequence numbers are missing, and the steps in which they ran are not known. Lines that are written late
give the bus bandwidth only: they come after the window of their step.

The file is hostile input. It is opened by the descriptor through which the process writes it: no path is resolved."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Annotated, Final

import msgspec
import numpy as np

from rankscope.daemon import procfs
from rankscope.daemon.steps.long_steps import Mask
from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, MAX_RANKS, RECORD_DTYPE, NcclRecords, Table
from rankscope.daemon.steps.nccl_times import MAX_CLOCK_NS, Nanos, NcclProgress, NcclTimes, times
from rankscope.daemon.steps.ring_reader import Records
from rankscope.probe import nccl_layout, nccl_plugin, ring_layout

MAX_READ_BYTES: Final = 2 << 20
MAX_LINES: Final = 1 << 12
MAX_LINE_BYTES: Final = 64 << 10  # of 64 channels, 16 KiB
# Nine lines of ten are written so soon that their step is known.
MAX_LAG_US: Final = 2_000
LAG_QUANTILE: Final = 0.9
LOOKS_LEFT_OUT: Final = 8
FUNCTIONS: Final = {name: number for number, name in enumerate(nccl_layout.FUNCTIONS, start=1)}
_MESSAGES: Final = 0xFF  # all messages of a communicator have one sequence; collectives, one per function

Microseconds = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]


class _Header(msgspec.Struct):
    id: Annotated[str, msgspec.Meta(pattern="^0x[0-9a-f]{1,16}$")]
    rank: Count
    n_ranks: Annotated[int, msgspec.Meta(ge=1, le=MAX_RANKS)]


class _Metadata(msgspec.Struct):
    dump_timestamp_us: Microseconds
    pid: int


class _Kernel(msgspec.Struct):
    kernel_stop_ts: Microseconds


class _Trace(msgspec.Struct):
    kernel_events: list[_Kernel]


class _Collective(msgspec.Struct):
    function: str = msgspec.field(name="coll")
    sequence: Count = msgspec.field(name="coll_sn")
    # Of one rank, as in our plugin's records; absurd for data types that Inspector does not know.
    size_bytes: int = msgspec.field(name="coll_msg_size_bytes")
    lasted_us: Microseconds = msgspec.field(name="coll_exec_time_us")
    trace: _Trace | None = msgspec.field(name="event_trace_ts", default=None)


class _Message(msgspec.Struct):
    function: str = msgspec.field(name="p2p")
    sequence: Count = msgspec.field(name="p2p_sn")
    size_bytes: int = msgspec.field(name="p2p_msg_size_bytes")
    lasted_us: Microseconds = msgspec.field(name="p2p_exec_time_us")
    trace: _Trace | None = msgspec.field(name="event_trace_ts", default=None)


class _Line(msgspec.Struct):
    header: _Header
    metadata: _Metadata
    coll_perf: _Collective | None = None
    p2p_perf: _Message | None = None


_LINES: Final = msgspec.json.Decoder(_Line)  # on import: two threads that are the first to decode one would crash


@dataclass(frozen=True)
class Lines:
    """The operations of a part of the file, as from our plugin. A record's number is where its line ends."""

    table: Table
    communicators: Table
    counter: Nanos  # what the sequence counts: the operations of a function in a communicator
    sequence: Nanos
    lag_us: Nanos  # from the end of the operation to its line; -1: the end is not told
    end: int  # of the last line, good or not
    skipped: int  # older lines, about, that were left out


def parse_lines(data: bytes, start: int, pid: int, clock_ns: int, now_ns: int, cut_bytes: int = 0) -> Lines:
    """The newest lines of `data`, which lies at `start` in the file, and begins within a line if bytes were cut off.
    Leaves out what is not a line of this process, or of the future. `clock_ns`: the wall clock less the process'
    monotonic clock, which shows `now_ns`."""
    texts = data.rsplit(b"\n", MAX_LINES + 1)
    texts.pop()  # not written to its end
    position = start
    if texts and (cut_bytes or len(texts) > MAX_LINES):
        position += len(texts.pop(0)) + 1
    cut_bytes += position - start
    mean_bytes = 1 + sum(map(len, texts)) // max(1, len(texts))
    rows, counters, sequences, lags = [], [], [], []
    communicators: dict[int, tuple[int, int]] = {}
    for text in texts:
        position += len(text) + 1
        line = _line(text)
        told = None if line is None else line.coll_perf or line.p2p_perf
        if line is None or told is None or line.metadata.pid != pid or line.header.rank >= line.header.n_ranks:
            continue
        number, written = int(line.header.id, 16), line.metadata.dump_timestamp_us
        # Inspector lists the first channels. Where others ran, the times are 0.
        events = told.trace.kernel_events if told.trace else ()
        ended = max((event.kernel_stop_ts for event in events), default=0)
        stop_ns = (ended or written) * 1000 - clock_ns
        start_ns = stop_ns - told.lasted_us * 1000
        is_past = ended <= written and written * 1000 - clock_ns <= min(now_ns, MAX_CLOCK_NS - 1)
        is_one_too_many = number not in communicators and len(communicators) >= nccl_layout.COMMUNICATORS
        if not is_past or start_ns <= 0 or not number or is_one_too_many:
            continue
        communicators[number] = (line.header.n_ranks, line.header.rank)
        function = FUNCTIONS.get(told.function, 0)
        low, size_bytes = number & 0xFFFFFFFF, told.size_bytes if 0 <= told.size_bytes < 1 << 63 else 0
        clocks = (start_ns, stop_ns, start_ns, stop_ns)
        rows.append((position, *clocks, size_bytes, low, told.sequence & 0xFFFFFFFF, -1, function, 0, 0, 0))
        counters.append(low << 8 | (function if line.coll_perf else _MESSAGES))
        sequences.append(told.sequence)
        lags.append(written - ended if ended else -1)
    made = np.zeros(len(communicators), COMMUNICATOR_DTYPE)
    made["hash"] = list(communicators)
    made["ranks"], made["rank"] = np.array(list(communicators.values()), np.uint32).reshape(-1, 2).T
    counter, sequence, lag_us = (np.array(column, np.int64) for column in (counters, sequences, lags))
    return Lines(np.array(rows, RECORD_DTYPE), made, counter, sequence, lag_us, position, cut_bytes // mean_bytes)


def _line(text: bytes) -> _Line | None:
    if not 0 < len(text) <= MAX_LINE_BYTES:
        return None
    try:
        return _LINES.decode(text)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        return None


class InspectorLog:
    """The file of one process. `pid` is what the process calls itself."""

    def __init__(self, process: str, pid: int, wall_clock_ns: Callable[[], int] = time.time_ns) -> None:
        self.is_found = False  # as of the last look
        self._pid = pid
        self._wall_clock_ns = wall_clock_ns
        endings = (f"-pid{pid}.log", f"-pid{pid}.log (deleted)")
        self._search = procfs.DescriptorSearch(
            process, lambda target: target.endswith(endings), stat.S_IWUSR, LOOKS_LEFT_OUT
        )
        self._is_chosen: bool | None = None
        self._interval_us: int | None = None  # between dumps
        self._progress = NcclProgress()
        self._since_ns = 0  # what was written before is not read
        self._last: dict[int, tuple[int, int]] = {}  # of each counter: sequence, and when it ended

    def look(self) -> bool:
        """Whether there is a file. Raises OSError if the process may not be read."""
        fd = self._open()
        if fd is not None:
            os.close(fd)
        return self.is_found

    def read(self, clock_ns: int, steps: Records, is_long: Mask | None = None) -> NcclTimes:
        """The times of these steps. Raises OSError if the file cannot be read."""
        fd = self._open()
        if fd is None:
            return NcclTimes()
        try:
            status = os.fstat(fd)
            before = self._progress
            if before.read is None or before.memory_id != status.st_ino or before.read > status.st_size:
                # What is there belongs to steps before these.
                self._progress, self._last = NcclProgress(status.st_ino, status.st_size), {}
                self._since_ns = self._wall_clock_ns() - clock_ns
                return NcclTimes()
            if not len(steps):
                return NcclTimes()
            first = max(before.read, status.st_size - MAX_READ_BYTES)
            data = os.pread(fd, status.st_size - first, first)
        finally:
            os.close(fd)
        now_ns = self._wall_clock_ns() - clock_ns
        lines = parse_lines(data, first, self._pid, clock_ns, now_ns, first - before.read)
        if not len(lines.table):
            self._progress = replace(before, read=lines.end)
            return NcclTimes()
        found, self._progress = self._times(lines, steps, is_long)
        is_read = lines.table["number"] <= (self._progress.read or 0)
        rows = zip(lines.counter[is_read], lines.sequence[is_read], lines.table["stop_ns"][is_read], strict=True)
        for counter, sequence, stop_ns in rows:
            self._last[int(counter)] = max(self._last.get(int(counter), (0, 0)), (int(sequence), int(stop_ns)))
        return found

    def _open(self) -> int | None:
        self.is_found = False
        if self._is_chosen is None:
            environment = procfs.Environment(self._search.process)
            name = (environment.get(nccl_plugin.CHOICE) or "").rpartition("/")[2]
            is_enabled = (environment.get("NCCL_INSPECTOR_ENABLE") or "0").strip() not in ("", "0")
            interval = environment.get("NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS") or ""
            self._is_chosen = is_enabled and "inspector" in name.lower()
            self._interval_us = procfs.whole_number(interval.strip().encode())
        link = self._search.look() if self._is_chosen else None
        if link is None:
            return None
        fd = procfs.open_own_file(link, self._search.process)
        self.is_found = fd is not None
        return fd

    def _times(self, lines: Lines, steps: Records, is_long: Mask | None) -> tuple[NcclTimes, NcclProgress]:
        is_told = lines.lag_us >= 0
        interval_us = MAX_CLOCK_NS if self._interval_us is None else self._interval_us
        is_prompt = np.quantile(np.where(is_told, lines.lag_us, interval_us), LAG_QUANTILE) <= MAX_LAG_US
        marked = steps.copy()
        marked["flags"] |= ring_layout.FLAG_NCCL
        rows = is_told | _alone(lines.table)
        some = NcclRecords(lines.table[rows], lines.skipped + int((~rows).sum()))
        collectives = times(some, lines.communicators, self._progress, marked)[0].collectives
        if not lines.skipped:
            unknown = _steps_with_gaps(lines, np.maximum.accumulate(steps["end_ns"]), self._last)
            unknown |= steps["end_ns"] - steps["span_ns"] < self._since_ns
            marked["flags"][unknown] &= ~ring_layout.FLAG_NCCL & 0xFFFF
        records = NcclRecords(lines.table, lines.skipped)
        found, progress = times(records, lines.communicators, self._progress, marked, is_long)
        return replace(found if is_prompt else NcclTimes(), collectives=collectives), progress


def _steps_with_gaps(lines: Lines, ends_ns: Nanos, last: dict[int, tuple[int, int]]) -> Mask:
    """The steps in which operations may have run that have no line."""
    gaps: Mask = np.zeros(len(ends_ns), dtype=np.bool_)
    for counter in np.unique(lines.counter).tolist():
        own = lines.counter == counter
        if not counter & 0xFF:
            continue  # functions that Inspector cannot name, each with a sequence
        told = sorted(zip(lines.sequence[own].tolist(), lines.table["stop_ns"][own].tolist(), strict=True))
        before = last.get(counter)
        told = [before, *told] if before is not None and before[0] < told[0][0] else told
        for (sequence, stop_ns), (following, following_ns) in pairwise(told):
            if following > sequence + 1:
                first, end = sorted(np.searchsorted(ends_ns, (stop_ns, following_ns)).tolist())
                gaps[first : end + 1] = True
    return gaps


def _alone(table: Table) -> Mask:
    """Those that seem to overlap with no other of their communicator. Without the ends, lines that were written
    together seem to overlap."""
    order = np.lexsort((table["start_ns"], table["communicator"]))
    sorted_table = table[order]
    is_first = np.ones(len(table), dtype=np.bool_)
    for communicator in np.unique(table["communicator"]):
        own = np.flatnonzero(sorted_table["communicator"] == communicator)
        is_first[own[1:]] = (
            sorted_table["start_ns"][own[1:]] >= np.maximum.accumulate(sorted_table["stop_ns"][own])[:-1]
        )
    run = np.cumsum(is_first) - 1
    alone: Mask = np.zeros(len(table), dtype=np.bool_)
    alone[order] = np.bincount(run)[run] == 1
    return alone
