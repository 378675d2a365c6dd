"""What becomes of a trace that a container wrote when it was asked for a capture: checked, cut, annotated, compressed,
summed up and joined with that of another rank. Also several windows packed into one."""

from __future__ import annotations

import gzip
import math
import re
import shutil
import warnings
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import msgspec

from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.probe_commands import take_apart
from rankscope.daemon.captures.processing import worker
from rankscope.daemon.captures.processing.messages import (
    MAX_ANSWER_BYTES,
    Job,
    Joined,
    RankJob,
    RankResult,
    find,
    job_file,
    join_file,
    result_file,
)
from rankscope.probe import ring_layout
from tests.fuzz.checking import check_number, check_text
from tests.fuzz.mutating import Mutator
from tests.fuzz.scratch import scratch_folder
from tests.fuzz.target_reading import TOKENS
from tests.fuzz.target_reading import mutator as trace_mutator
from tests.fuzz.targets import Mutates, recorded

__all__ = ["TOKENS"]
# A thousand events that cannot be read take three seconds, in a file of any length; then it is given up.
CPU_SECONDS = 12.0
_HEALTHY, *_ODD = recorded("trace")[2:]
_ENDING = ring_layout.WINDOW_BYTES.pack(len(_ODD[0])) + ring_layout.WINDOWS.pack(1, ring_layout.WINDOWS_MARK)
SEEDS = [*_ODD, recorded("trace")[1], _ODD[0] + _ENDING]
MAX_WINDOWS = 4


def _pid(trace: bytes) -> int:
    """Of most events: that of the process, unless the device has more."""
    found = Counter(number for number in re.findall(rb'"pid": ?(\d{1,9})\b', trace) if int(number))
    return int(found.most_common(1)[0][0]) if found else 1


_PLACE: list[Path] = []


def run(data: bytes) -> None:
    if not _PLACE:
        _PLACE.append(scratch_folder("capture"))
    folder = _PLACE[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for steps in (None, 1):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            _process(folder, data, steps)
        _take_apart(folder, data)


def _process(folder: Path, data: bytes, steps: int | None) -> None:
    healthy, odd = folder / "rank0.json", folder / "rank1.json"
    healthy.write_bytes(_HEALTHY)
    odd.write_bytes(data)
    notes = {"job": "j", "backend": "kineto"}
    ranks = [
        RankJob(rank, 2, process, str(recording), f"{recording}.gz", True, notes, flops_per_step=1e12)
        for rank, process, recording in ((0, _pid(_HEALTHY), healthy), (1, _pid(data), odd))
    ]
    job_file(folder).write_bytes(msgspec.json.encode(Job(steps, ranks)))
    # Limits of memory and CPU are for the child that a daemon starts, not for this process.
    with patch.object(worker, "confine"):
        worker.main(folder)
    for one in ranks:
        path = result_file(folder, one.rank)
        assert path.stat().st_size < MAX_ANSWER_BYTES
        result = find(path, RankResult)
        assert result is not None, path.read_bytes()[:200]
        _check_result(one, result)
    if join_file(folder).exists():
        joined = find(join_file(folder), Joined)
        assert joined is not None and math.isfinite(joined.clock_residual_micros)
        check_text(joined.reason, 500)
        check_number(joined.impact_ratio)


def _check_result(one: RankJob, result: RankResult) -> None:
    for text in (result.error, *result.notes):
        assert "please report" not in text, text
        assert len(text) < 2000
    assert one.rank == 1 or not result.error, result.error
    if result.error:
        return
    text = gzip.decompress(Path(one.artifact).read_bytes())
    # Numbers that no float holds stay in events as they were written.
    document = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
    told, ours = (msgspec.json.decode(document[key]) for key in ("distributedInfo", "rankscope"))
    assert told["rank"] == one.rank and ours["job"] == "j"
    check_number(result.step_seconds)
    if result.summary is not None:
        for value in msgspec.to_builtins(result.summary).values():
            for number in value if isinstance(value, list) else [value]:
                check_number(number if isinstance(number, float) else None)
        for name in (*result.summary.top_kernels, *result.summary.findings, *result.summary.collectives):
            check_text(name, 500)


def _take_apart(folder: Path, data: bytes) -> None:
    packed = folder / "packed.json"
    packed.write_bytes(data)
    try:
        paths = take_apart(packed, MAX_WINDOWS, "rank 1")
    except CaptureError:
        return
    assert 0 < len(paths) <= MAX_WINDOWS
    assert sum(path.stat().st_size for path in paths) < len(data)


class _Packing:
    """Traces, and now and then the table of windows behind them."""

    def __init__(self, plain: Mutator) -> None:
        self._plain = plain
        self._inner = trace_mutator(plain)

    def mutate(self, data: bytes, other: bytes) -> bytes:
        if not data.endswith(ring_layout.WINDOWS_MARK):
            return self._inner.mutate(data, other)
        return data[:-40] + self._plain.mutate(data[-40:], other[-40:])


def mutator(plain: Mutator) -> Mutates:
    return _Packing(plain)
