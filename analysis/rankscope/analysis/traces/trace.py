"""One rank's trace as columns, one row per event with a duration. All trace analysis works on this representation."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Bools, Ints

# The value of an integer column where the trace has none.
ABSENT = -1


class Category(IntEnum):
    OTHER = 0
    CPU_OP = 1
    KERNEL = 2
    MEMCPY = 3
    MEMSET = 4
    RUNTIME = 5  # cuda_runtime, hip runtime: calls on the host
    DRIVER = 6
    SYNC = 7
    USER_ANNOTATION = 8  # on the host: ProfilerStep#, Optimizer.step#, nccl:all_reduce, gloo:…, DDP and FSDP markers
    GPU_ANNOTATION = 9
    PYTHON = 10
    OVERHEAD = 11
    DEVICE_EVENT = 12  # only while a file is read: a device event; its name gives the category


@dataclass(frozen=True)
class Device:
    index: int
    name: str
    memory_bytes: int | None


@dataclass(frozen=True)
class ProcessGroup:
    name: str
    description: str
    ranks: tuple[int, ...]  # empty if the trace does not list them


@dataclass(frozen=True)
class CollectiveColumns:
    """The profiler's metadata of communication, on host events and kernels: one row per event that has any. Texts
    are indices into `Trace.names`; -1 if absent."""

    row: Ints  # row of Trace
    collective: Ints  # name: allreduce, _allgather_base, …
    group: Ints  # process group name
    group_description: Ints
    group_size: Ints
    sequence: Ints  # position in its group; the same number on all ranks
    element_type: Ints
    in_elements: Ints
    out_elements: Ints
    peer: Ints  # only for point-to-point calls


@dataclass(frozen=True)
class MemoryColumns:
    """Allocator events ("[memory]" instants of profile_memory=True)."""

    time_ns: Ints
    change_bytes: Ints  # negative: freed
    allocated_bytes: Ints  # total after the event
    reserved_bytes: Ints
    on_device: Bools
    device: Ints
    process: Ints
    thread: Ints  # that called the allocator
    address: Ints  # of the block; -1 if the profiler gives none


@dataclass(frozen=True)
class FlowColumns:
    """Both ends of the arrows from a forward operator to the backward operator that autograd made of it. An end names
    the operator that starts on this thread at this time."""

    number: Ints  # the same at both ends
    time_ns: Ints
    process: Ints
    thread: Ints
    is_forward: Bools


@dataclass(frozen=True)
class OperatorColumns:
    """What operators compute and move, by their shapes: one row per operator whose shapes were recorded and say so. -1
    if they do not say one of them."""

    row: Ints  # row of Trace, ascending
    flops: Ints  # of dense operators: matrix products, attention, convolution
    size_bytes: Ints  # inputs, and the result where it follows from them
    element_type: Ints  # of the first tensor; index into Trace.names


NO_OPERATORS = OperatorColumns(*(np.zeros(0, np.int64) for _ in range(4)))


@dataclass(frozen=True)
class Trace:
    """Times are nanoseconds since `base_ns` (Unix time, if the trace has it), as exact as in the file. Each trace
    has its own base, the whole second of its first event: add it before comparing ranks. Rows are sorted by start;
    at equal starts the longer event comes first, so that parents precede children."""

    start_ns: Ints
    duration_ns: Ints
    category: npt.NDArray[np.int8]  # a Category
    name: Ints  # index into names
    process: Ints  # pid of host events, device of device events; -1 if it is not a number
    thread: Ints  # tid of host events, stream of device events
    device: Ints
    stream: Ints  # of device work; -1 for host events and for annotations on the device, which have it in `thread`
    correlation: Ints  # links a kernel to the runtime call that launched it
    external_id: Ints
    size_bytes: Ints  # only for memory copies and sets
    names: tuple[str, ...]

    base_ns: int
    rank: int | None
    world_size: int | None
    backend: str  # nccl, gloo, …; empty if unknown
    devices: tuple[Device, ...]
    groups: tuple[ProcessGroup, ...]
    collectives: CollectiveColumns
    memory: MemoryColumns
    flows: FlowColumns
    repairs: tuple[str, ...]  # messages: what was repaired while reading the file
    operators: OperatorColumns = NO_OPERATORS

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def end_ns(self) -> Ints:
        return self.start_ns + self.duration_ns

    def of(self, *categories: Category) -> Bools:
        # Comparing a byte column a few times is far cheaper than np.isin or a lookup table.
        wanted: Bools = self.category == categories[0]
        for category in categories[1:]:
            wanted |= self.category == category
        return wanted

    def named(self, index: int) -> str:
        return self.names[index] if index >= 0 else ""


def take_or_absent(column: Ints, index: Ints) -> Ints:
    """The column by index; -1 where the index is -1."""
    if not len(column):
        return np.full(len(index), ABSENT)
    return np.where(index >= 0, column[index], ABSENT)


def match(wanted: Ints, offered: Ints, result: Ints) -> Ints:
    """The first result with the wanted number; -1 if there is none or nothing is wanted."""
    order = np.argsort(offered, kind="stable")
    place = np.searchsorted(offered, wanted, sorter=order)
    inside = (place < len(offered)) & (wanted >= 0)
    found = np.full(len(wanted), ABSENT)
    candidate = order[place[inside]]
    found[inside] = np.where(offered[candidate] == wanted[inside], result[candidate], ABSENT)
    return found


class TraceError(ValueError):
    """The file is not a readable trace. `byte` is the position in the decompressed text, if known."""

    def __init__(self, reason: str, *, byte: int | None = None) -> None:
        super().__init__(reason if byte is None else f"{reason} (byte {byte})")


class Repairs:
    """Counts repairs by message, each with the position of the first."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, int | None] = {}

    def note(self, words: str, count: int = 1, *, byte: int | None = None) -> None:
        if count:
            self._counts[words] = self._counts.get(words, 0) + count
            self._first.setdefault(words, byte)

    def add(self, other: Repairs) -> None:
        for words, count in other._counts.items():
            self.note(words, count, byte=other._first[words])

    def total(self, prefix: str) -> int:
        """The number of repairs whose message starts with the prefix."""
        return sum(count for words, count in self._counts.items() if words.startswith(prefix))

    def messages(self) -> tuple[str, ...]:
        return tuple(self._sentence(words, count) for words, count in self._counts.items())

    def _sentence(self, words: str, count: int) -> str:
        first = self._first[words]
        place = "" if first is None else f" (byte {first})" if count == 1 else f" (first at byte {first})"
        return f"{words}{place}" if count == 1 else f"{words}: {count} times{place}"
