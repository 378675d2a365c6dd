"""Four real ranks profile themselves; their traces are read and joined."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.join import Join, join_traces
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.verdicts.verdict import Kind

SCRIPT = Path(__file__).parent / "jobs" / "profiled_ddp.py"
RANKS, STEPS = 4, 6

pytest.importorskip("torch")


def _run(folder: Path, slow: int, seconds: float) -> Join:
    arguments = [str(folder), str(slow), str(seconds)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(rank), str(RANKS), *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        for rank in range(RANKS)
    ]
    try:
        for process in ranks:
            _, errors = process.communicate(timeout=240)
            assert process.returncode == 0, errors.decode(errors="replace")[-2000:]
    finally:
        for process in ranks:
            process.kill()
    traces = {rank: read_trace((folder / f"rank{rank}.json").read_bytes()) for rank in range(RANKS)}
    return join_traces(traces, {rank: find_collectives(trace) for rank, trace in traces.items()})


def test_the_rank_that_sleeps_is_named(tmp_path: Path) -> None:
    found = _run(tmp_path, slow=2, seconds=0.2)
    assert found.collectives_matched == STEPS
    assert found.last_arrivals == {0: 0, 1: 0, 2: STEPS, 3: 0}
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (2,)), found.reason
    assert found.impact_ratio is not None and found.impact_ratio > 0.5
    # Two hundred milliseconds a step, of which a busy machine may take some.
    assert 100_000 < found.waits[0].wait_us / STEPS < 400_000


def test_its_healthy_twin_names_nobody(tmp_path: Path) -> None:
    found = _run(tmp_path, slow=-1, seconds=0.0)
    assert found.collectives_matched == STEPS
    assert found.culprits == (), found.reason
