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

from rankscope.analysis.mfu import peak_flops_per_second
from rankscope.daemon import rings
from rankscope.daemon.assembling import RankSamples, assemble
from rankscope.daemon.captures import probe_commands
from rankscope.daemon.collectors.steps import StepsCollector
from rankscope.daemon.rank_exporting import rank_metrics
from rankscope.daemon.samples import Problem, RankProcess, Span, StepSample
from rankscope.daemon.stalling import StallWatch
from rankscope.daemon.tallying import RankReport, RankTotals, add_window
from rankscope.probe import layout
from tests.fuzz.checking import check_message, check_metrics, check_text
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

_REAL = recorded("ring")
_ROUND = bytearray(_REAL[0])
layout.COUNTERS.pack_into(_ROUND, layout.COUNTERS_OFFSET, 20_000, 20_000)
_GROUPED = bytearray(_REAL[0])
_KINDS = range(layout.GROUP_EXPOSED, layout.GROUP_RECORDER + 1)
_TABLE = b"".join(layout.GROUP.pack(kind << 32 | 7, 4, 2, kind, 12, 0.25, 1.2) for kind in _KINDS)
layout.GROUPS_HEAD.pack_into(_GROUPED, layout.GROUPS_OFFSET, len(_KINDS), zlib.crc32(_TABLE))
_TABLE_START = layout.GROUPS_OFFSET + layout.GROUPS_HEAD.size
_GROUPED[_TABLE_START : _TABLE_START + len(_TABLE)] = _TABLE
SEEDS = [*_REAL, bytes(_ROUND), bytes(_GROUPED)]
TOKENS = [
    layout.MAGIC,
    *(b'"rank": ', b'"world_size": ', b'"pipeline": ', b'"device_name": "NVIDIA H200"', b'"model_flops_per_step": '),
    *(b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff" * 8),
]
SIZE_LIMIT = layout.HEADER_BYTES + 64 * layout.RECORD_BYTES
CPU_SECONDS = 2.0
_FACTS = (
    *(
        "rank",
        "world_size",
        "pipeline",
        "tensor",
        "data",
        "model_flops_per_step",
        "peak_flops_per_second",
        "device_name",
    ),
    *("torch_version", "NVIDIA H200"),
)
_COLUMNS = ("step", "wait", "communication", "input", "forward", "backward", "optimizer", "checkpoint")
_FIXED, _LIVE = layout.FIXED.size, layout.LIVE.size
_GROUPS_SIZE = layout.GROUPS_HEAD.size + layout.GROUPS_AT_MOST * layout.GROUP.size


def _owner(ring: bytes) -> int:
    return int(layout.FIXED.unpack_from(ring)[5])


_RANK = RankProcess("j", 1, 1, 2, os.getpid(), 7, (os.getpid(), _owner(SEEDS[0])))


def _span() -> Span:
    """As the seed's clock has it."""
    unix_ns = layout.LIVE.unpack_from(SEEDS[0], layout.LIVE_OFFSET)[1]
    return Span(unix_ns - 5_000_000_000, unix_ns + 1_000_000_000)


class _Shared:
    """A sealed memfd among our own descriptors, where the collector finds it. Written anew for every input."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create(layout.RING_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._descriptor, layout.RING_BYTES)
        seals = layout.F_SEAL_SHRINK | layout.F_SEAL_GROW | layout.F_SEAL_SEAL
        fcntl.fcntl(self._descriptor, layout.F_ADD_SEALS, seals)
        self.descriptor = self._descriptor

    def write(self, data: bytes) -> None:
        """Where the ring says that its latest records are."""
        header = data[: layout.HEADER_BYTES].ljust(layout.HEADER_BYTES, b"\0")
        records = data[layout.HEADER_BYTES :]
        count = len(records) // layout.RECORD_BYTES
        (written,) = layout.COUNTERS.unpack_from(header, layout.COUNTERS_OFFSET)[:1]
        os.pwrite(self._descriptor, header, 0)
        if count and layout.CAPACITY <= written < 1 << 53:
            os.pwrite(self._descriptor, _full(records[: count * layout.RECORD_BYTES], written), layout.HEADER_BYTES)
            return
        for number in range(count):
            slot = (written - count + number) % layout.CAPACITY
            record = records[number * layout.RECORD_BYTES : (number + 1) * layout.RECORD_BYTES]
            os.pwrite(self._descriptor, record, layout.HEADER_BYTES + slot * layout.RECORD_BYTES)

    def close(self) -> None:
        os.close(self._descriptor)


def _full(records: bytes, written: int) -> bytes:
    """A ring that has gone round: the same records again and again, each with its number and a right checksum."""
    few = np.frombuffer(records, dtype=rings.RECORD_DTYPE)
    slots = np.arange(layout.CAPACITY)
    many = few[slots % len(few)]
    many["sequence"] = written - (written - 1 - slots) % layout.CAPACITY
    many["checksum"] = rings._checksums(many.tobytes(), len(many))
    return many.tobytes()


def run(data: bytes) -> None:
    shared = _Shared()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy's: an overflow, a NaN made an integer
            fresh = StepsCollector()
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
    check_metrics(rank_metrics([report], "node", full=True), series=80, data=data)


def _check_sample(sample: StepSample) -> None:
    assert sample.steps_lost >= 0 and 0 <= sample.steps_total < 2**63
    for name in (*_COLUMNS, "host", "run_ahead"):
        column = getattr(sample, f"{name}_seconds")
        assert len(column) == len(sample.step_seconds)
        known = column[~np.isnan(column)]
        assert np.isfinite(known).all() and (known >= 0).all(), name
    assert len(sample.groups) <= layout.GROUPS_AT_MOST
    for group in sample.groups:
        assert group.number < 1 << 53 and 0 <= group.position < group.size and group.kind in _KINDS, group
        assert group.samples > 0 and 0 <= group.seconds < 1e13 and 0 < group.step_seconds < 1e13, group


def _check_answer(descriptor: int) -> None:
    answer = probe_commands.read_answer(descriptor)
    if answer is not None:
        check_text(answer.text, layout.ANSWER_TEXT_BYTES)
        probe_commands.plausible(answer)


class _Sealing:
    def __init__(self, plain: Mutator) -> None:
        self._plain = plain
        self._random: Random = plain.random
        self._facts = JsonMutator(plain, _FACTS)

    def mutate(self, data: bytes, other: bytes) -> bytes:
        changed = bytearray(data.ljust(layout.HEADER_BYTES, b"\0"))
        if self._random.random() < 0.2:
            self._change_facts(changed)
            return sealed(bytes(changed))
        for start, end in self._parts(len(changed)):
            before = end - start
            piece = self._plain.mutate(bytes(changed[start:end]), other[start:end])
            changed[start:end] = piece[:before].ljust(before, b"\0")
        return sealed(bytes(changed)) if self._random.random() < 0.9 else bytes(changed)

    def _change_facts(self, ring: bytearray) -> None:
        start = layout.FACTS_OFFSET + layout.FACTS_HEAD.size
        length = min(layout.FACTS_HEAD.unpack_from(ring, layout.FACTS_OFFSET)[0], layout.FACTS_BYTES)
        text = self._facts.mutate(bytes(ring[start : start + length]), b"")[: layout.FACTS_BYTES]
        ring[start : start + len(text)] = text
        layout.FACTS_HEAD.pack_into(ring, layout.FACTS_OFFSET, len(text), 0)

    def _parts(self, size: int) -> Iterator[tuple[int, int]]:
        """Of a fixed size each: what moves everything behind it by a byte is soon tried through."""
        parts = [
            (0, _FIXED),
            (layout.COUNTERS_OFFSET, layout.ABILITIES_OFFSET + 4),
            (layout.LIVE_OFFSET, layout.LIVE_OFFSET + _LIVE),
            (layout.FACTS_OFFSET, layout.FACTS_OFFSET + 600),
            (layout.ANSWER_OFFSET, layout.ANSWER_OFFSET + 200),
            (layout.GROUPS_OFFSET, layout.GROUPS_OFFSET + _GROUPS_SIZE),
            *((start, start + layout.RECORD.size) for start in _record_starts(size)),
            (layout.HEADER_BYTES, size),
        ]
        for _ in range(self._random.choice((1, 1, 2, 3))):
            yield self._random.choice(parts)


def sealed(data: bytes) -> bytes:
    """The same with all checksums right."""
    ring = bytearray(data)
    layout.CHECKSUM.pack_into(ring, _FIXED, zlib.crc32(ring[:_FIXED]))
    live = ring[layout.LIVE_OFFSET : layout.LIVE_OFFSET + _LIVE]
    layout.CHECKSUM.pack_into(ring, layout.LIVE_OFFSET + _LIVE, zlib.crc32(live))
    facts = layout.FACTS_OFFSET + layout.FACTS_HEAD.size
    length = min(layout.FACTS_HEAD.unpack_from(ring, layout.FACTS_OFFSET)[0], layout.FACTS_BYTES)
    layout.FACTS_HEAD.pack_into(ring, layout.FACTS_OFFSET, length, zlib.crc32(ring[facts : facts + length]))
    (text,) = layout.ANSWER.unpack_from(ring, layout.ANSWER_OFFSET)[-1:]
    end = layout.ANSWER_OFFSET + layout.ANSWER.size + min(text, layout.ANSWER_TEXT_BYTES)
    layout.CHECKSUM.pack_into(ring, end, zlib.crc32(ring[layout.ANSWER_OFFSET : end]))
    (rows,) = layout.GROUPS_HEAD.unpack_from(ring, layout.GROUPS_OFFSET)[:1]
    groups = layout.GROUPS_OFFSET + layout.GROUPS_HEAD.size
    table = ring[groups : groups + min(rows, layout.GROUPS_AT_MOST) * layout.GROUP.size]
    layout.GROUPS_HEAD.pack_into(ring, layout.GROUPS_OFFSET, rows, zlib.crc32(table))
    for start in _record_starts(len(ring)):
        body = ring[start : start + layout.RECORD.size]
        layout.CHECKSUM.pack_into(ring, start + layout.RECORD.size, zlib.crc32(body))
    return bytes(ring)


def _record_starts(size: int) -> range:
    return range(layout.HEADER_BYTES, size - layout.RECORD_BYTES + 1, layout.RECORD_BYTES)


def mutator(plain: Mutator) -> _Sealing:
    return _Sealing(plain)
