from __future__ import annotations

from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.communication.collectives import compute_intervals, find_collectives
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.summary import summarize_collectives
from rankscope.analysis.traces.trace import Category
from tests.shared_data import H200
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
