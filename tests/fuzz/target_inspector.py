"""The file of NCCL Inspector, which the training process may forge."""

from __future__ import annotations

import tempfile
import warnings
from pathlib import Path

import numpy as np

from rankscope.daemon.steps.nccl_inspector import MAX_LINES, InspectorLog, parse_lines
from rankscope.daemon.steps.ring_reader import RECORD_DTYPE
from rankscope.probe import nccl_layout, ring_layout
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.target_nccl import check_times
from tests.unit.daemon.inspector_writer import PID, US, InspectorWriter, make_process, operation, text_of

CLOCK_NS = 1_790_000_000_000_000_000
STEP_US = 50_000
STEPS = 8
_FIRST_US = CLOCK_NS // US + 3_600_000_000
_NOW_US = _FIRST_US + STEPS * STEP_US


def _seed(*, is_verbose: bool, lag_us: int = 80) -> bytes:
    functions = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Invalid")
    lines = [
        operation(
            _FIRST_US + n * 30_000,
            4_000,
            n // len(functions),
            function=functions[n % len(functions)],
            communicator=("0xaaaa00000001", "0xbbbb00000002")[n % len(functions) % 2],
            is_verbose=is_verbose,
            lag_us=lag_us,
        )
        for n in range(12)
    ]
    message = operation(_FIRST_US + 42_000, 900, 1, function="Send", kind="p2p", is_verbose=is_verbose)
    # Its pid is that of the process that runs the target.
    return b"".join(map(text_of, [*lines, message])).replace(b'"pid":%d' % PID, b'"pid":77')


SEEDS = [_seed(is_verbose=True), _seed(is_verbose=False), _seed(is_verbose=True, lag_us=90_000)]
TOKENS = [
    *(b'"coll_perf":{', b'"p2p_perf":{', b'"kernel_events":[', b'"coll_sn":', b'"id":"0x', b"AllReduce", b"SendRecv"),
    *(b"-1", b"18446744073709551615", b"9007199254740992", b"1e308", b"NaN", b"null", b"[[[[", b"}}\n", b"\n\n", b"\0"),
]


class _LineMutator:
    """Changes some lines as documents, or the whole as bytes."""

    def __init__(self, plain: Mutator) -> None:
        self._plain, self._lines = plain, JsonMutator(plain, nccl_layout.FUNCTIONS)

    def mutate(self, data: bytes, other: bytes) -> bytes:
        random = self._plain.random
        if random.random() < 0.2:
            return self._plain.mutate(data, other)
        lines, donors = data.split(b"\n"), other.split(b"\n")
        for _ in range(random.choice((1, 2, 5))):
            place = random.randrange(len(lines))
            lines[place] = self._lines.mutate(lines[place], random.choice(donors))
        return b"\n".join(lines)


def mutator(plain: Mutator) -> _LineMutator:
    return _LineMutator(plain)


def run(data: bytes) -> None:
    steps = np.zeros(STEPS, RECORD_DTYPE)
    steps["end_ns"] = (_FIRST_US + STEP_US * np.arange(1, STEPS + 1)) * US - CLOCK_NS
    steps["span_ns"], steps["steps"] = STEP_US * US, 1
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as scratch:
        warnings.simplefilter("error")  # numpy's: an overflow, a NaN made an integer
        lines = parse_lines(data, 1000, 77, CLOCK_NS, _NOW_US * US - CLOCK_NS)
        assert len(lines.table) <= MAX_LINES and len(lines.communicators) <= nccl_layout.COMMUNICATORS
        assert 1000 <= lines.end <= 1000 + len(data) and lines.skipped >= 0
        assert (lines.table["start_ns"] <= lines.table["stop_ns"]).all()
        assert (lines.table["stop_ns"] <= _NOW_US * US - CLOCK_NS).all()
        writer = InspectorWriter(Path(scratch))
        log = InspectorLog(make_process(Path(scratch, "proc")), PID, lambda: _NOW_US * US)
        try:
            assert log.read(CLOCK_NS, steps).seconds is None and log.is_found
            log._since_ns = 0
            for part in (data, data[::2], data):
                writer.file.write(part.replace(b'"pid":77', b'"pid":%d' % PID))
                check_times(log.read(CLOCK_NS, steps), STEPS)
        finally:
            writer.file.close()
        assert all(flags & ring_layout.FLAG_NCCL == 0 for flags in steps["flags"])  # they are the caller's
