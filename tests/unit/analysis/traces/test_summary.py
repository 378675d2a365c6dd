from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.communication.collectives import compute_intervals, find_collectives
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.summary import summarize, summarize_collectives
from rankscope.analysis.traces.trace import ABSENT, Category
from tests.shared_data import H200, shared
from tests.unit.analysis.traces.trace_builder import make_trace


def test_collectives_that_run_at_the_same_time_are_exposed_once() -> None:
    trace = make_trace(
        [
            ("gemm", Category.KERNEL, 0, 10, {"stream": 7, "correlation": 1}),
            ("gloo:all_reduce", Category.USER_ANNOTATION, 5, 15),
            ("gloo:all_reduce", Category.USER_ANNOTATION, 12, 18),
        ]
    )
    (summary,) = summarize_collectives(find_collectives(trace), compute_intervals(trace))
    assert (summary.count, summary.total_us, summary.exposed_us) == (2, 33, 20)


def test_a_kinds_exposed_time_never_exceeds_a_real_traces_length() -> None:
    trace = read_trace((H200 / "gloo_2ranks_rank0.json.gz").read_bytes())
    (summary,) = summarize_collectives(find_collectives(trace), compute_intervals(trace))
    breakdown = break_down(trace)
    assert breakdown is not None
    assert 0 < 1000 * summary.exposed_us <= breakdown.span_ns
    assert summary.total_us > summary.exposed_us


@pytest.mark.parametrize("is_described", [True, False])
def test_groups_of_a_real_capture_are_named_by_kind(is_described: bool) -> None:
    """Megatron-LM, tensor 2 and pipeline 2: its descriptions of the groups and what the rank does say the same."""
    trace = read_trace((shared("h200/megatron_tp2_pp2") / "rank0.json.gz").read_bytes())
    if not is_described:
        nothing = replace(trace.collectives, group_description=np.full(len(trace.collectives.row), ABSENT))
        groups = tuple(replace(group, description="") for group in trace.groups)
        trace = replace(trace, groups=groups, collectives=nothing)
    breakdown = break_down(trace)
    assert breakdown is not None
    summary = summarize(trace, breakdown, find_collectives(trace), rank=0, file="rank0.json.gz")
    titles = {one.title for one in summary.collectives if one.measured_count}
    assert titles == {
        *("tensor all_reduce of 2", "tensor broadcast of 2", "pipeline messages of 2", "embedding all_reduce of 2"),
        "global all_reduce of 4",
    }
    assert sum(summary.exposed_by_group_kind_us.values()) == pytest.approx(summary.exposed_communication_us)
    bubble = summary.bubble
    assert bubble is not None and (bubble.microbatches, bubble.chunks) == (4, 1)
    assert bubble.waiting_us == pytest.approx(summary.exposed_by_group_kind_us["pipeline"] / 2)
