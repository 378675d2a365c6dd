"""The ring that a probe shares, every byte of which the training process may forge; and the answers in it.

An input is a ring's header and some records. Checksums are mended after most mutations, or nothing behind them would
ever be reached."""

from __future__ import annotations

import fcntl
import os
import warnings
import zlib
from collections.abc import Iterator
from random import Random

import numpy as np

from rankscope.analysis.models.device_peaks import peak_flops_per_second
from rankscope.daemon.captures import probe_commands as commands
from rankscope.daemon.export.rank_metrics import RankReport, RankTotals, add_window, rank_metrics
from rankscope.daemon.samples import Problem, RankProcess, Span, StepSample
from rankscope.daemon.steps import ring_reader
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.stalls import StallWatch
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe import ring_layout
from tests.fuzz.checking import check_message, check_metrics, check_text
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

_REAL = recorded("ring")
_ROUND = bytearray(_REAL[0])
ring_layout.COUNTERS.pack_into(_ROUND, ring_layout.COUNTERS_OFFSET, 20_000, 20_000)
_GROUPED = bytearray(_REAL[0])
_KINDS = range(ring_layout.GROUP_EXPOSED, ring_layout.GROUP_RECORDER + 1)
_TABLE = b"".join(ring_layout.GROUP.pack(kind << 32 | 7, 4, 2, kind, 12, 0.25, 1.2) for kind in _KINDS)
ring_layout.TABLE_HEAD.pack_into(_GROUPED, ring_layout.GROUPS_OFFSET, len(_KINDS), zlib.crc32(_TABLE))
_TABLE_START = ring_layout.GROUPS_OFFSET + ring_layout.TABLE_HEAD.size
_GROUPED[_TABLE_START : _TABLE_START + len(_TABLE)] = _TABLE
_RANGES = ring_layout.RANGE.pack(b"forward", 20, 1.5) + ring_layout.RANGE.pack("données".encode(), 20, 0.5)
_RANGES = ring_layout.TABLE_HEAD.pack(2, zlib.crc32(_RANGES)) + _RANGES
_GROUPED[ring_layout.RANGES_OFFSET : ring_layout.RANGES_OFFSET + len(_RANGES)] = _RANGES
SEEDS = [*_REAL, bytes(_ROUND), bytes(_GROUPED)]
TOKENS = [
    ring_layout.MAGIC,
    *(b'"rank": ', b'"world_size": ', b'"pipeline": ', b'"device_name": "NVIDIA H200"', b'"model_flops_per_step": '),
    *(b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff" * 8),
]
SIZE_LIMIT = ring_layout.HEADER_BYTES + 64 * ring_layout.RECORD_BYTES
CPU_SECONDS = 2.0
_FACTS = (
    *(
        "rank",
        "local_rank",
        "world_size",
        "pipeline",
        "tensor",
        "data",
        "model_flops_per_step",
        "peak_flops_per_second",
        "device_name",
    ),
    *("torch_version", "NVIDIA H200", "store", "localhost:29500"),
)
_COLUMNS = ("step", "wait", "communication", "input", "forward", "backward", "optimizer", "checkpoint")
_FIXED, _LIVE = ring_layout.FIXED.size, ring_layout.LIVE.size
_TABLES = (
    (ring_layout.GROUPS_OFFSET, ring_layout.GROUP, ring_layout.MAX_GROUPS),
    (ring_layout.RANGES_OFFSET, ring_layout.RANGE, ring_layout.MAX_RANGES),
)


def _owner(ring: bytes) -> int:
    return int(ring_layout.FIXED.unpack_from(ring)[5])


_RANK = RankProcess("j", 1, 1, 2, os.getpid(), 7, (os.getpid(), _owner(SEEDS[0])))


def made_collector() -> StepsCollector:
    """With the clocks of the machine that recorded the seed."""
    monotonic_ns, unix_ns = ring_layout.LIVE.unpack_from(SEEDS[0], ring_layout.LIVE_OFFSET)[:2]
    return StepsCollector(wall_minus_monotonic_ns=lambda: unix_ns - monotonic_ns)


def _span() -> Span:
    """As the seed's clock has it."""
    unix_ns = ring_layout.LIVE.unpack_from(SEEDS[0], ring_layout.LIVE_OFFSET)[1]
    return Span(unix_ns - 5_000_000_000, unix_ns + 1_000_000_000)


class _Shared:
    """A sealed memfd of this process, where the collector finds it. Every input overwrites it."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(ring_layout.RING_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, ring_layout.RING_BYTES)
        seals = ring_layout.F_SEAL_SHRINK | ring_layout.F_SEAL_GROW | ring_layout.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor, ring_layout.F_ADD_SEALS, seals)
        self.descriptor = self._descriptor

    def write(self, data: bytes) -> None:
        """Where the ring says that its latest records are."""
        header = data[: ring_layout.HEADER_BYTES].ljust(ring_layout.HEADER_BYTES, b"\0")
        records = data[ring_layout.HEADER_BYTES :]
        count = len(records) // ring_layout.RECORD_BYTES
        (written,) = ring_layout.COUNTERS.unpack_from(header, ring_layout.COUNTERS_OFFSET)[:1]
        os.pwrite(self._descriptor, header, 0)
        if count and ring_layout.CAPACITY <= written < 1 << 53:
            os.pwrite(
                self._descriptor, _full(records[: count * ring_layout.RECORD_BYTES], written), ring_layout.HEADER_BYTES
            )
            return
        for number in range(count):
            slot = (written - count + number) % ring_layout.CAPACITY
            record = records[number * ring_layout.RECORD_BYTES : (number + 1) * ring_layout.RECORD_BYTES]
            os.pwrite(self._descriptor, record, ring_layout.HEADER_BYTES + slot * ring_layout.RECORD_BYTES)

    def close(self) -> None:
        os.close(self._descriptor)


def _full(records: bytes, written: int) -> bytes:
    """A ring that has gone round: the same records again and again, each with its number and a right checksum."""
    few = np.frombuffer(records, dtype=ring_reader.RECORD_DTYPE)
    slots = np.arange(ring_layout.CAPACITY)
    many = few[slots % len(few)]
    many["sequence"] = written - (written - 1 - slots) % ring_layout.CAPACITY
    many["checksum"] = ring_reader._checksums(many.tobytes(), len(many))
    return many.tobytes()


def run(data: bytes) -> None:
    shared = _Shared()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy's: an overflow, a NaN made an integer
            fresh = made_collector()
            _look(shared, data, fresh)
            _look(shared, SEEDS[0], fresh)  # what follows a lie
            _look(shared, data, fresh)
        _check_answer(shared.descriptor)
    finally:
        shared.close()


def _look(shared: _Shared, data: bytes, collector: StepsCollector) -> None:
    shared.write(data)
    span = _span()
    found = collector.collect([_RANK], span)
    samples = RankSamples()
    for sample in found.values():
        if isinstance(sample, Problem):
            assert sample.kind in ("corrupt", "version", "owner", "disabled", "unsealed"), sample
            check_text(sample.text.replace("\n", " "), 1000)
            samples = RankSamples(problems=(sample,))
        else:
            _check_sample(sample)
            samples = RankSamples(steps=sample)
    stall = StallWatch(None).observe(_RANK, samples, span)
    window = assemble(_RANK, "node", span, 1, samples, peak_flops_per_second, stall)
    check_message(window)
    report = RankReport(window, add_window(RankTotals(), window), samples.problems)
    check_metrics(rank_metrics([report], full=True), series=80, data=data)


def _check_sample(sample: StepSample) -> None:
    assert sample.steps_lost >= 0 and 0 <= sample.steps_total < 2**63
    for name in (*_COLUMNS, "host", "run_ahead"):
        column = getattr(sample, f"{name}_seconds")
        assert len(column) == len(sample.step_seconds)
        known = column[~np.isnan(column)]
        assert np.isfinite(known).all() and (known >= 0).all(), name
    assert len(sample.groups) <= ring_layout.MAX_GROUPS
    for group in sample.groups:
        assert group.number < 1 << 53 and 0 <= group.position < group.size and group.kind in _KINDS, group
        assert group.samples > 0 and 0 <= group.seconds < 1e13 and 0 < group.step_seconds < 1e13, group


def _check_answer(descriptor: int) -> None:
    answer = commands.read_answer(descriptor)
    if answer is not None:
        check_text(answer.text, ring_layout.ANSWER_TEXT_BYTES)
        commands.plausible(answer)


class _Sealing:
    def __init__(self, plain: Mutator) -> None:
        self._plain = plain
        self._random: Random = plain.random
        self._facts = JsonMutator(plain, _FACTS)

    def mutate(self, data: bytes, other: bytes) -> bytes:
        changed = bytearray(data.ljust(ring_layout.HEADER_BYTES, b"\0"))
        if self._random.random() < 0.2:
            self._change_facts(changed)
            return sealed(bytes(changed))
        for start, end in self._parts(len(changed)):
            before = end - start
            piece = self._plain.mutate(bytes(changed[start:end]), other[start:end])
            changed[start:end] = piece[:before].ljust(before, b"\0")
        return sealed(bytes(changed)) if self._random.random() < 0.9 else bytes(changed)

    def _change_facts(self, ring: bytearray) -> None:
        start = ring_layout.FACTS_OFFSET + ring_layout.FACTS_HEAD.size
        length = min(ring_layout.FACTS_HEAD.unpack_from(ring, ring_layout.FACTS_OFFSET)[0], ring_layout.FACTS_BYTES)
        text = self._facts.mutate(bytes(ring[start : start + length]), b"")[: ring_layout.FACTS_BYTES]
        ring[start : start + len(text)] = text
        ring_layout.FACTS_HEAD.pack_into(ring, ring_layout.FACTS_OFFSET, len(text), 0)

    def _parts(self, size: int) -> Iterator[tuple[int, int]]:
        """Of a fixed size each: what moves everything behind it by a byte is soon tried through."""
        parts = [
            (0, _FIXED),
            (ring_layout.COUNTERS_OFFSET, ring_layout.ABILITIES_OFFSET + 4),
            (ring_layout.LIVE_OFFSET, ring_layout.LIVE_OFFSET + _LIVE),
            (ring_layout.FACTS_OFFSET, ring_layout.FACTS_OFFSET + 600),
            (ring_layout.ANSWER_OFFSET, ring_layout.ANSWER_OFFSET + 200),
            *((offset, offset + ring_layout.TABLE_HEAD.size + most * row.size) for offset, row, most in _TABLES),
            *((start, start + ring_layout.RECORD.size) for start in _record_starts(size)),
            (ring_layout.HEADER_BYTES, size),
        ]
        for _ in range(self._random.choice((1, 1, 2, 3))):
            yield self._random.choice(parts)


def sealed(data: bytes) -> bytes:
    """The same with all checksums right."""
    ring = bytearray(data)
    ring_layout.CHECKSUM.pack_into(ring, _FIXED, zlib.crc32(ring[:_FIXED]))
    live = ring[ring_layout.LIVE_OFFSET : ring_layout.LIVE_OFFSET + _LIVE]
    ring_layout.CHECKSUM.pack_into(ring, ring_layout.LIVE_OFFSET + _LIVE, zlib.crc32(live))
    facts = ring_layout.FACTS_OFFSET + ring_layout.FACTS_HEAD.size
    length = min(ring_layout.FACTS_HEAD.unpack_from(ring, ring_layout.FACTS_OFFSET)[0], ring_layout.FACTS_BYTES)
    ring_layout.FACTS_HEAD.pack_into(ring, ring_layout.FACTS_OFFSET, length, zlib.crc32(ring[facts : facts + length]))
    (text,) = ring_layout.ANSWER.unpack_from(ring, ring_layout.ANSWER_OFFSET)[-1:]
    end = ring_layout.ANSWER_OFFSET + ring_layout.ANSWER.size + min(text, ring_layout.ANSWER_TEXT_BYTES)
    ring_layout.CHECKSUM.pack_into(ring, end, zlib.crc32(ring[ring_layout.ANSWER_OFFSET : end]))
    for offset, row, most in _TABLES:
        (rows,) = ring_layout.TABLE_HEAD.unpack_from(ring, offset)[:1]
        start = offset + ring_layout.TABLE_HEAD.size
        table = ring[start : start + min(rows, most) * row.size]
        ring_layout.TABLE_HEAD.pack_into(ring, offset, rows, zlib.crc32(table))
    for start in _record_starts(len(ring)):
        body = ring[start : start + ring_layout.RECORD.size]
        ring_layout.CHECKSUM.pack_into(ring, start + ring_layout.RECORD.size, zlib.crc32(body))
    return bytes(ring)


def _record_starts(size: int) -> range:
    return range(ring_layout.HEADER_BYTES, size - ring_layout.RECORD_BYTES + 1, ring_layout.RECORD_BYTES)


def mutator(plain: Mutator) -> _Sealing:
    return _Sealing(plain)
