"""The memory of the NCCL plugin, every byte of which the training process may forge.

An input is its header and the first records. The checksum is mended after most mutations."""

from __future__ import annotations

import math
import os
import warnings
import zlib
from dataclasses import replace
from random import Random

import numpy as np

from rankscope.analysis.step_graph.window_operations import MAX_ROWS, join
from rankscope.analysis.verdicts.figures import MAX_STEP_SECONDS
from rankscope.analysis.verdicts.windows import MAX_COMMUNICATORS
from rankscope.daemon.samples import StepSample
from rankscope.daemon.steps import nccl_bandwidth
from rankscope.daemon.steps.nccl_reader import COMMUNICATOR_DTYPE, OTHER_FUNCTION, RECORD_DTYPE
from rankscope.daemon.steps.nccl_times import NcclProgress, NcclTimes, read_nccl
from rankscope.daemon.steps.ring_reader import RECORD_DTYPE as STEP_DTYPE
from rankscope.daemon.steps.ring_reader import RingError
from rankscope.daemon.steps.step_operations import Role
from rankscope.daemon.steps.unmarked_steps import PeriodProgress, read_unmarked_steps
from rankscope.probe import nccl_layout, ring_layout
from rankscope.probe.ring import sealed_memory
from tests.fuzz.checking import check_text
from tests.fuzz.mutating import Mutator

RECORDS = 64
SIZE_LIMIT = nccl_layout.HEADER_BYTES + RECORDS * nccl_layout.RECORD.size
STEP_NS = 50_000_000
# The shape of the loop's steps.
LOOP = (1, 1, 1 << 20, 1)
FUNCTIONS = {*nccl_layout.FUNCTIONS, OTHER_FUNCTION}
_OWNER = 77
_FIXED = nccl_layout.FIXED.size


def _seed(written: int, interface: int = 5, is_loop: bool = False) -> bytes:
    """Two communicators, in steps of 50 ms; the timer of the GPU is an hour ahead of the host's clock. A loop has one
    operation, again and again."""
    head = bytearray(nccl_layout.HEADER_BYTES)
    head[: _FIXED + 4] = nccl_layout.fixed_part(_OWNER)
    nccl_layout.COUNTERS.pack_into(head, nccl_layout.COUNTERS_OFFSET, written, 0)
    nccl_layout.WANTED.pack_into(head, nccl_layout.INTERFACE_OFFSET, interface)
    rows = np.zeros(2, COMMUNICATOR_DTYPE)
    rows["hash"], rows["ranks"], rows["rank"] = (0xAAAA_0000_0001, 0xBBBB_0000_0002), 4, 2
    rows["issued"], rows["started"], rows["finished"] = RECORDS, RECORDS, (RECORDS, RECORDS - 1)
    rows["last_issued"] = rows["last_started"] = RECORDS << 8 | 1
    head[nccl_layout.COMMUNICATORS_OFFSET : nccl_layout.COMMUNICATORS_OFFSET + rows.nbytes] = rows.tobytes()
    made = np.zeros(RECORDS, RECORD_DTYPE)
    numbers = np.arange(1, RECORDS + 1)
    made["number"] = written - (written - numbers) % nccl_layout.CAPACITY if written > RECORDS else numbers
    made["seen_ns"] = numbers * STEP_NS // 2
    made["stop_ns"] = made["seen_ns"] + 3_600_000_000_000 - 5_000
    made["start_ns"] = made["stop_ns"] - 4_000_000
    made["communicator"], made["function"], made["bytes"] = 1 + numbers % 2, 1 + numbers % 11, 1 << 20
    if is_loop:
        made["communicator"], made["function"], made["sequence"], made["issued_ns"] = 1, 1, numbers, made["seen_ns"]
    return bytes(head) + made.tobytes()


SEEDS = [
    _seed(RECORDS),
    _seed(nccl_layout.CAPACITY * 3 + RECORDS),
    _seed(RECORDS, interface=0),
    _seed(RECORDS, is_loop=True),
]
TOKENS = [nccl_layout.MAGIC, b"\xff" * 8, b"\0" * 8, (1 << 62).to_bytes(8, "little"), (1 << 63).to_bytes(8, "little")]


def _steps() -> np.ndarray:
    steps = np.zeros(RECORDS // 2, STEP_DTYPE)
    steps["end_ns"] = np.arange(1, len(steps) + 1) * STEP_NS
    steps["span_ns"], steps["steps"] = STEP_NS, 1
    steps["flags"][::2] = ring_layout.FLAG_NCCL
    return steps


def run(data: bytes) -> None:
    descriptor = sealed_memory(nccl_layout.MEMORY_NAME, nccl_layout.MEMORY_BYTES)
    try:
        os.pwrite(descriptor, data, 0)
        memory_id = int(nccl_layout.FIXED.unpack_from(data.ljust(_FIXED, b"\0"))[-1])
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # numpy's: an overflow, a NaN made an integer
            for before in (NcclProgress(), NcclProgress(memory_id, 0), NcclProgress(memory_id, 30)):
                _look(f"/proc/self/fd/{descriptor}", before)
            _look_without_ring(f"/proc/self/fd/{descriptor}", memory_id)
    finally:
        os.close(descriptor)


def _look(link: str, before: NcclProgress) -> None:
    steps = _steps()
    try:
        found, after = read_nccl(link, _OWNER, before, steps, None, _role(1))
        again, _ = read_nccl(link, _OWNER, after, steps, None, _role(1 + len(steps)))
    except RingError as error:
        assert error.kind in ("corrupt", "version", "owner", "unsealed"), error
        check_text(str(error), 200)
        return
    for times in (found, again):
        check_times(times, len(steps))


def _look_without_ring(link: str, memory_id: int) -> None:
    """The operations alone, of a rank whose loop marks no steps; a second time from where the first ended."""
    progress = PeriodProgress(memory_id, LOOP, since_ns=-1_000_000_000_000, looks=9)
    for _ in range(2):
        try:
            sample, progress = read_unmarked_steps(link, _OWNER, progress, replace(_role(1), world_size=4), 0)
        except RingError:
            return
        if sample is not None:
            check_sample(sample)


def check_sample(sample: StepSample) -> None:
    seconds = sample.step_seconds
    assert len(seconds) < RECORDS and (seconds > 0).all() and (seconds <= MAX_STEP_SECONDS).all()
    assert (sample.run_ahead_seconds >= 0).all() and (sample.host_seconds >= 0).all()
    assert 0 <= sample.steps_lost <= sample.steps_total <= 1 << 33
    assert len(sample.groups) <= ring_layout.MAX_GROUPS
    if sample.operations is not None:
        assert 0 < sample.operations.size <= MAX_ROWS


def _role(first_step: int) -> Role:
    return Role(2, 8, np.arange(first_step, first_step + RECORDS // 2), 1_700_000_000_000_000_000)


def check_times(times: NcclTimes, steps: int) -> None:
    if times.operations is not None:
        assert 0 < times.operations.size <= MAX_ROWS, times.operations.size
        joined = join([times.operations])
        assert (joined.stop_ns > joined.start_ns).all() and (joined.step > 0).all()
    if times.seconds is not None:
        known = times.seconds[~np.isnan(times.seconds)]
        assert len(times.seconds) == steps and (known >= 0).all() and np.isfinite(known).all()
    assert len(times.groups) <= ring_layout.MAX_GROUPS
    for group in times.groups:
        assert 0 <= group.number < 1 << 53 and 0 <= group.position < group.size, group
        assert 0 < group.samples <= steps and 0 <= group.seconds <= 86_400 * RECORDS, group
    assert len(times.collectives) <= ring_layout.MAX_GROUPS
    for rate in times.collectives:
        assert 0 <= rate.number < 1 << 53 and 2 <= rate.size <= nccl_bandwidth.MAX_RANKS, rate
        assert rate.function in nccl_bandwidth.FUNCTIONS and rate.protocol in nccl_bandwidth.PROTOCOLS, rate
        assert math.isfinite(rate.bytes_per_step) and rate.bytes_per_step > 0, rate
        assert rate.bus_bytes_per_second is None or 0 < rate.bus_bytes_per_second < 1e14, rate
    assert len(times.communicators) <= MAX_COMMUNICATORS
    for row in times.communicators:
        assert 0 <= row.number < 1 << 53 and 0 <= row.position < row.size and 2 <= row.size <= 10_000_000, row
        assert row.finished <= row.started <= 1 << 53 and row.issued <= 1 << 53, row
        for last in (row.last_issued, row.last_started, row.last_finished):
            assert last is None or (last.function in FUNCTIONS and 0 <= last.sequence < 1 << 32), row


class _Sealing:
    def __init__(self, plain: Mutator) -> None:
        self._plain = plain
        self._random: Random = plain.random

    def mutate(self, data: bytes, other: bytes) -> bytes:
        changed = bytearray(data.ljust(SIZE_LIMIT, b"\0"))
        size, first = nccl_layout.RECORD.size, nccl_layout.HEADER_BYTES
        records = [(first + place * size, first + (place + 1) * size) for place in range(RECORDS)]
        rows = nccl_layout.COMMUNICATORS_OFFSET, nccl_layout.COMMUNICATORS_OFFSET + 2 * nccl_layout.COMMUNICATOR.size
        parts = [(0, _FIXED), (nccl_layout.COUNTERS_OFFSET, nccl_layout.INTERFACE_OFFSET + 4), rows, *records]
        for _ in range(self._random.choice((1, 2, 5))):
            start, end = self._random.choice(parts)
            piece = self._plain.mutate(bytes(changed[start:end]), other[start:end])
            changed[start:end] = piece[: end - start].ljust(end - start, b"\0")
        if self._random.random() < 0.9:
            nccl_layout.CHECKSUM.pack_into(changed, _FIXED, zlib.crc32(changed[:_FIXED]))
        return bytes(changed)


def mutator(plain: Mutator) -> _Sealing:
    return _Sealing(plain)
