"""Opens and reads a probe's ring, which is hostile input: the process may forge every byte of it, exchange the file
behind the name, or die in the middle of a write.

Nothing is mapped and nothing stays open: a ring is opened, checked, read with pread and closed, every time."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.common.text import printable
from rankscope.daemon import procfs
from rankscope.daemon.procfs import RingSearch
from rankscope.daemon.samples import ProbeFacts
from rankscope.probe import ring_layout

SEALS_NEEDED = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW
TORN_READ_RETRIES = 3
# Limits of what the probe declares: a process we do not trust writes it.
TEXT_LENGTH = 128
STORE_LENGTH = 1024
MAX_RANKS = 10_000_000
MAX_FLOPS = 1e30


def dtype_of(layout: ring_layout.Layout, *more: tuple[str, str]) -> np.dtype[np.void]:
    """The rows of a layout, and what follows each."""
    formats = [(name, f"S{form[:-1]}" if form.endswith("s") else f"<{form}") for name, form in layout.formats.items()]
    return np.dtype([*formats, *more])


RECORD_DTYPE = dtype_of(ring_layout.RECORD, ("checksum", "<u4"))
GROUP_DTYPE = dtype_of(ring_layout.GROUP)
RANGE_DTYPE = dtype_of(ring_layout.RANGE)

Records: TypeAlias = npt.NDArray[np.void]


class RingError(Exception):
    """`kind` is a short word for a metric label."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass(frozen=True)
class Header:
    ring_id: int
    owner_pid: int
    records: int
    steps: int
    disabled: bool
    takes_captures: bool = False
    hands_over_recorder: bool = False


@contextlib.contextmanager
def opened(proc_root: Path, pid: int) -> Iterator[int | None]:
    """A descriptor of the process' ring, open for reading; None when it has none."""
    process = f"{proc_root}/{pid}"
    fd = procfs.BLOCKING.call(process, lambda: open_found(RingSearch(process), procfs.MAX_DESCRIPTORS))
    try:
        yield fd
    finally:
        if fd is not None:
            os.close(fd)


@dataclass(frozen=True)
class FoundRing:
    inode: int  # a fork shares its parent's ring, and so shows the same number
    facts: ProbeFacts


def find_ring(search: RingSearch, descriptors: int = procfs.DESCRIPTORS_PER_LOOK) -> FoundRing | None:
    """The ring of a process, once the probe has made all of it. Raises PermissionError if the process may not be
    read."""
    try:
        link = search.look(descriptors)
    except procfs.GONE:
        return None
    if link is None:
        return None
    try:
        fd = open_memfd(link)
    except (OSError, RingError):
        return None
    try:
        if os.pread(fd, len(ring_layout.MAGIC), 0) != ring_layout.MAGIC:
            return None
        with contextlib.suppress(RingError):
            return FoundRing(os.fstat(fd).st_ino, parse_facts(read_facts_text(fd) or b"{}"))
        return FoundRing(os.fstat(fd).st_ino, ProbeFacts())
    finally:
        os.close(fd)


def open_found(search: RingSearch, descriptors: int = procfs.DESCRIPTORS_PER_LOOK) -> int | None:
    """The same, of a search that remembers where the ring is. The caller closes it."""
    try:
        link = search.look(descriptors)
        return None if link is None else open_memfd(link)
    except procfs.GONE:
        return None  # the process has ended
    except PermissionError as error:
        text = f"may not look at {error.filename}: {error.strerror}; the daemon needs CAP_SYS_PTRACE or the same user"
        raise RingError("permission", text) from error


def open_memfd(link: str, flags: int = os.O_RDONLY) -> int:
    """Open a memfd of another process by its link in /proc, and nothing else."""
    try:
        handle = procfs.memfd_handle(link)
    except procfs.NotMemfdError as error:
        raise RingError("corrupt", str(error)) from error
    try:
        return os.open(f"/proc/self/fd/{handle}", flags | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    finally:
        os.close(handle)


def read_header(fd: int) -> Header:
    """Check everything that holds for the whole ring; raises RingError."""
    seals = seals_of(fd)
    if seals & SEALS_NEEDED != SEALS_NEEDED:
        raise RingError("unsealed", "the ring is not sealed against resizing; it was not made by the probe; ignored")
    size = os.fstat(fd).st_size
    start = os.pread(fd, ring_layout.LIVE_OFFSET, 0)
    if len(start) < ring_layout.LIVE_OFFSET:
        raise RingError("corrupt", f"the ring is {size} bytes long; expected {ring_layout.RING_BYTES}")
    fixed = start[: ring_layout.FIXED.size]
    magic, version, header_bytes, record_bytes, capacity, owner_pid, ring_id = ring_layout.FIXED.unpack(fixed)
    if magic != ring_layout.MAGIC:
        raise RingError("corrupt", f"the ring begins with {magic!r}; expected {ring_layout.MAGIC!r}")
    if version != ring_layout.VERSION:
        newer = version > ring_layout.VERSION
        relation, what = ("newer", "daemon") if newer else ("older", "probe")
        text = f"ring version {version} is {relation} than this daemon's {ring_layout.VERSION}; upgrade the {what}"
        raise RingError("version", text)
    if ring_layout.CHECKSUM.unpack_from(start, ring_layout.FIXED.size)[0] != zlib.crc32(fixed):
        raise RingError("corrupt", "the checksum of the ring's header is wrong")
    expected = (ring_layout.HEADER_BYTES, ring_layout.RECORD_BYTES, ring_layout.CAPACITY, ring_layout.RING_BYTES)
    if (header_bytes, record_bytes, capacity, size) != expected:
        found = (header_bytes, record_bytes, capacity, size)
        raise RingError("corrupt", f"the ring's sizes are {found}; version {version} has {expected}")
    records, steps = ring_layout.COUNTERS.unpack_from(start, ring_layout.COUNTERS_OFFSET)
    (state,) = ring_layout.STATE.unpack_from(start, ring_layout.STATE_OFFSET)
    (abilities,) = ring_layout.ABILITIES.unpack_from(start, ring_layout.ABILITIES_OFFSET)
    return Header(
        ring_id,
        owner_pid,
        records,
        steps,
        disabled=state == ring_layout.STATE_DISABLED,
        takes_captures=bool(abilities & ring_layout.TAKES_CAPTURES),
        hands_over_recorder=bool(abilities & ring_layout.HANDS_OVER_RECORDER),
    )


def seals_of(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, ring_layout.F_GET_SEALS)
    except OSError:
        return 0


def read_live(fd: int) -> Mapping[str, int]:
    """Nothing if every attempt met a write in progress, or the writer is broken."""
    size = ring_layout.LIVE.size
    for _ in range(TORN_READ_RETRIES):
        raw = os.pread(fd, size + ring_layout.CHECKSUM.size, ring_layout.LIVE_OFFSET)
        is_whole = len(raw) == size + ring_layout.CHECKSUM.size
        if is_whole and ring_layout.CHECKSUM.unpack_from(raw, size)[0] == zlib.crc32(raw[:size]):
            return dict(zip(ring_layout.LIVE.formats, ring_layout.LIVE.unpack_from(raw), strict=True))
    return {}


def read_facts_text(fd: int) -> bytes | None:
    """None if the probe has not written any yet; raises RingError if it cannot be read."""
    for _ in range(TORN_READ_RETRIES):
        raw = os.pread(fd, ring_layout.COMMAND_OFFSET - ring_layout.FACTS_OFFSET, ring_layout.FACTS_OFFSET)
        if len(raw) < ring_layout.FACTS_HEAD.size:
            break
        length, checksum = ring_layout.FACTS_HEAD.unpack_from(raw)
        if length == 0:
            return None
        text = raw[ring_layout.FACTS_HEAD.size :][:length]
        if len(text) == length and zlib.crc32(text) == checksum:
            return text
    raise RingError("corrupt", "the ring's facts have a wrong length or checksum")


def read_groups(fd: int) -> Records | None:
    """The table of process groups."""
    return _read_table(fd, ring_layout.GROUPS_OFFSET, GROUP_DTYPE, ring_layout.MAX_GROUPS)


def read_ranges(fd: int) -> Records | None:
    """The table of NVTX ranges."""
    return _read_table(fd, ring_layout.RANGES_OFFSET, RANGE_DTYPE, ring_layout.MAX_RANGES)


def _read_table(fd: int, offset: int, dtype: np.dtype[np.void], most: int) -> Records | None:
    """None if every attempt met a write in progress, or the writer is broken."""
    for _ in range(TORN_READ_RETRIES):
        raw = os.pread(fd, ring_layout.TABLE_HEAD.size + most * dtype.itemsize, offset)
        if len(raw) < ring_layout.TABLE_HEAD.size:
            return None
        count, checksum = ring_layout.TABLE_HEAD.unpack_from(raw)
        body = raw[ring_layout.TABLE_HEAD.size :][: count * dtype.itemsize]
        if count <= most and zlib.crc32(body) == checksum:
            return np.frombuffer(body, dtype=dtype)
    return None


def read_records(fd: int, first: int, last: int) -> tuple[Records, npt.NDArray[np.bool_]]:
    """Records `first` to `last` (inclusive, at most a full ring), and which of them are complete and valid."""
    first_slot = (first - 1) % ring_layout.CAPACITY
    count = last - first + 1
    until_end = min(count, ring_layout.CAPACITY - first_slot)
    raw = _pread_slots(fd, first_slot, until_end) + _pread_slots(fd, 0, count - until_end)
    count = len(raw) // ring_layout.RECORD_BYTES
    records = np.frombuffer(raw, dtype=RECORD_DTYPE, count=count)
    expected = np.arange(first, first + count, dtype=np.uint64)
    whole = (records["sequence"] == expected) & (records["checksum"] == _checksums(raw, count))
    return records, whole


def seconds_since_last_step(fd: int, header: Header) -> float | None:
    """None if no step has ended, or its record cannot be right."""
    if not 0 < header.records < 1 << 53:
        return None
    records, whole = read_records(fd, header.records, header.records)
    if not len(records) or not whole.all():
        return None
    since = (time.monotonic_ns() - int(records["end_ns"][0])) / 1e9
    return since if since >= 0 else None


def _pread_slots(fd: int, slot: int, count: int) -> bytes:
    return (
        os.pread(fd, count * ring_layout.RECORD_BYTES, ring_layout.HEADER_BYTES + slot * ring_layout.RECORD_BYTES)
        if count
        else b""
    )


def _checksum_table() -> npt.NDArray[np.uint32]:
    """crc32 is linear: the checksum of a record is the exclusive or of one number per (position, byte) and of the
    checksum of all zeros."""
    size = ring_layout.RECORD.size
    of_zeros = zlib.crc32(bytes(size))
    table = np.zeros((size, 256), dtype=np.uint32)
    values = np.arange(256)
    for position in range(size):
        for bit in range(8):
            message = bytearray(size)
            message[position] = 1 << bit
            table[position, values >> bit & 1 == 1] ^= np.uint32(zlib.crc32(message) ^ of_zeros)
    return table


_TABLE = _checksum_table()
_OF_ZEROS = np.uint32(zlib.crc32(bytes(ring_layout.RECORD.size)))
_POSITIONS = np.arange(ring_layout.RECORD.size)


def _checksums(raw: bytes, count: int) -> npt.NDArray[np.uint32]:
    """Checksums of all records at once."""
    rows = np.frombuffer(raw, dtype=np.uint8, count=count * ring_layout.RECORD_BYTES).reshape(
        count, ring_layout.RECORD_BYTES
    )
    parts = _TABLE[_POSITIONS, rows[:, : ring_layout.RECORD.size]]
    checksums: npt.NDArray[np.uint32] = np.bitwise_xor.reduce(parts, axis=1) ^ _OF_ZEROS
    return checksums


def parse_facts(text: bytes) -> ProbeFacts:
    """A field of the wrong type or range is left out; text that is not a JSON object raises RingError."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RingError("corrupt", f"the ring's facts are not JSON: {str(error)[:80]}") from error
    if not isinstance(found, dict):
        raise RingError("corrupt", "the ring's facts are not a JSON object")
    return ProbeFacts(**{name: read(found.get(name)) for name, read in _FACTS.items()})


def _index(value: object) -> int | None:
    return value if type(value) is int and 0 <= value <= MAX_RANKS else None


def _positive(value: object) -> float | None:
    return _amount(value) or None


def _amount(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Compared before conversion: an integer of thousands of digits is valid JSON but not a float.
    return float(value) if 0 <= value < MAX_FLOPS and math.isfinite(value) else None


def _ratio(value: object) -> float | None:
    return float(value) if isinstance(value, float) and -1 <= value <= 1 else None


def _text(value: object, length: int = TEXT_LENGTH) -> str | None:
    return printable(value, length).strip(" �") or None if isinstance(value, str) else None


_FACTS: Mapping[str, Callable[[object], Any]] = {
    **dict.fromkeys(("rank", "local_rank", "world_size", "pipeline", "tensor", "data", "nccl_descriptor"), _index),
    **dict.fromkeys(("model_flops_per_step", "peak_flops_per_second"), _positive),
    **dict.fromkeys(("device_name", "torch_version", "nccl_reason"), _text),
    "store": lambda value: _text(value, STORE_LENGTH),
    "nccl_cost_ratio": _ratio,
    "tokens_per_step": _amount,
}
