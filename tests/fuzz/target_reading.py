"""Traces as text: read, mended, cut and merged. JSON that a container wrote, gzipped or not, whole or not."""

from __future__ import annotations

import gzip
import warnings
import zlib

import msgspec
import numpy as np

from rankscope.analysis.step_graph.clock_alignment import ClockShift
from rankscope.analysis.traces.cut import cut, outline
from rankscope.analysis.traces.joins.perfetto import merge_for_perfetto
from rankscope.analysis.traces.reader.events import DECODE_ERRORS
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Trace, TraceError
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = [*recorded("trace"), gzip.compress(recorded("trace")[2], mtime=0)]
TOKENS = [
    *(
        b'{"ph": "X", "cat": "cpu_op", "name": "a", "pid": 1, "tid": 1, "ts": 1, "dur": 1}',
        b'"traceEvents": [',
        b'"ts": ',
    ),
    *(
        b'"args": {',
        b'"correlation": ',
        b'"External id": ',
        b'"baseTimeNanoseconds": ',
        b"\\u0000",
        b"\\ud800",
        b"NaN",
        b"},{",
    ),
    *(
        b"\x1f\x8b\x08\x00",
        b"\xef\xbb\xbf",
        b'"ph": "B"',
        b'"ph": "E"',
        b'"ph": "i", "name": "[memory]"',
        b"ProfilerStep#5",
    ),
]
_WORDS = (
    *(
        "X",
        "B",
        "E",
        "M",
        "i",
        "s",
        "f",
        "cpu_op",
        "kernel",
        "gpu_memcpy",
        "gpu_memset",
        "cuda_runtime",
        "ac2g",
        "fwdbwd",
        "Trace",
    ),
    *(
        "user_annotation",
        "gpu_user_annotation",
        "python_function",
        "overhead",
        "ProfilerStep#5",
        "Optimizer.step#SGD.step",
    ),
    *(
        "record_param_comms",
        "nccl:all_reduce",
        "ncclDevKernel_AllReduce_Sum_f32_RING_LL",
        "gloo:all_reduce",
        "[memory]",
    ),
    *(
        "traceEvents",
        "ph",
        "cat",
        "name",
        "pid",
        "tid",
        "ts",
        "dur",
        "id",
        "args",
        "correlation",
        "External id",
        "stream",
    ),
    *(
        "device",
        "bytes",
        "Collective name",
        "Process Group Ranks",
        "Group size",
        "Seq",
        "dtype",
        "In msg nelems",
        "Src Rank",
    ),
    *(
        "Out msg nelems",
        "Process Group Name",
        "[0, 1]",
        "[0, ...",
        "baseTimeNanoseconds",
        "distributedInfo",
        "deviceProperties",
    ),
    *(
        "rank",
        "world_size",
        "pg_config",
        "ranks",
        "Input Dims",
        "Input type",
        "Device Id",
        "Device Type",
        "Bytes",
        "allreduce",
    ),
    *(
        "cudaLaunchKernel",
        "cudaDeviceSynchronize",
        "Total Allocated",
        "Total Reserved",
        "Global rank start",
        "send",
        "recv",
    ),
)
# A thousand events that cannot be read take three seconds, in a file of any length; then it is given up.
CPU_SECONDS = 12.0
_TEXT_LIMIT = 8 << 20


def run(data: bytes) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace = read(data, salvage=False)
        if trace is not None:
            _check_cut(data, trace)
            _check_merged(data)
        else:
            read(data, salvage=True)


def read(data: bytes, *, salvage: bool) -> Trace | None:
    try:
        trace = read_trace(data, salvage=salvage, text_limit_bytes=_TEXT_LIMIT)
    except TraceError as error:
        assert 0 < len(str(error)) < 2000, len(str(error))
        return None
    _check_trace(trace)
    return trace


def _check_trace(trace: Trace) -> None:
    rows = len(trace.start_ns)
    assert (trace.end_ns >= trace.start_ns).all(), "an event ends before it begins"
    assert (np.diff(trace.start_ns) >= 0).all()
    for name in ("duration_ns", "category", "name", "process", "thread", "device", "stream", "correlation"):
        assert len(getattr(trace, name)) == rows
    assert not rows or (trace.name.min() >= 0 and trace.name.max() < len(trace.names))
    assert all(isinstance(name, str) for name in trace.names)
    notes = trace.collectives
    assert not len(notes.row) or (notes.row.min() >= 0 and notes.row.max() < rows)
    assert trace.rank is None or 0 <= trace.rank < 1 << 40
    assert sum(map(len, trace.repairs)) < 1 << 20


def _check_cut(data: bytes, trace: Trace) -> None:
    """What was cut can be read again, and holds nothing that was not there."""
    middle = outline(trace)
    half = (int(trace.start_ns[0]), int(trace.start_ns[len(trace) // 2]) + 1) if len(trace) else (0, 1)
    for stretch in (None, middle.stretch(*half)):
        try:
            text = b"".join(cut([data], stretch, {"rankscope": {"steps": 1}}, distributed={"rank": 1}))
        except (TraceError, *DECODE_ERRORS):
            continue
        assert len(text) < 4 * _TEXT_LIMIT
        again = read_trace(text, salvage=False)
        assert again.rank in (None, 1) and len(again) <= len(trace) + 1


def _check_merged(data: bytes) -> None:
    """Of files that can be read, one trace for Perfetto."""
    try:
        text = b"".join(merge_for_perfetto([(0, SEEDS[2]), (1, data)], {1: ClockShift(5)}))
    except TraceError:
        return
    # A number that was in the file and that no float holds stays as it is written.
    assert msgspec.json.decode(text, type=dict[str, msgspec.Raw])["traceEvents"]


class _Compressing:
    """Of a gzipped trace the text inside is changed, and the gzip itself now and then."""

    def __init__(self, plain: Mutator) -> None:
        self._plain = plain
        self._inner = JsonMutator(plain, _WORDS)

    def mutate(self, data: bytes, other: bytes) -> bytes:
        if not data.startswith(b"\x1f\x8b") or self._plain.random.random() < 0.3:
            return self._inner.mutate(data, _inflated(other))
        changed = self._inner.mutate(_inflated(data), _inflated(other))
        return gzip.compress(changed, 1, mtime=0)


def _inflated(data: bytes) -> bytes:
    if not data.startswith(b"\x1f\x8b"):
        return data
    inflater = zlib.decompressobj(31)
    try:
        return inflater.decompress(data, 1 << 20)
    except zlib.error:
        return data


def mutator(plain: Mutator) -> _Compressing:
    return _Compressing(plain)
