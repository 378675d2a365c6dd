from __future__ import annotations

import re
from itertools import pairwise
from typing import Any

import pytest

from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.diagnosis import Diagnosis, diagnose
from rankscope.analysis.traces.joins.join import Join, join_traces, keep_essentials
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.traces.trace import Category, Trace
from tests.shared_data import H200
from tests.unit.analysis.traces.planted_jobs import PlantedJob
from tests.unit.analysis.traces.trace_builder import Event, make_trace

KERNEL, RUNTIME, ANNOTATION = Category.KERNEL, Category.RUNTIME, Category.USER_ANNOTATION
GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64"


def _work(
    name: str,
    start: float,
    duration: float,
    *,
    launched: float | None = None,
    stream: int = 7,
    number: int | None = None,
) -> list[Event]:
    """Something on the device and the call that launched it, by default well ahead of time."""
    correlation = int(start * 10) + stream if number is None else number
    at = max(0.0, start - 500) if launched is None else launched
    category = Category.MEMCPY if name.startswith("Memcpy") else KERNEL
    return [
        (name, category, start, duration, {"stream": stream, "correlation": correlation}),
        ("cudaLaunchKernel", RUNTIME, at, 4, {"correlation": correlation}),
    ]


def _steps(*bounds: float) -> list[Event]:
    return [(f"ProfilerStep#{n}", ANNOTATION, start, end - start) for n, (start, end) in enumerate(pairwise(bounds))]


def _summary(trace: Trace, rank: int = 0) -> RankSummary:
    breakdown = break_down(trace)
    assert breakdown is not None
    return summarize(trace, breakdown, find_collectives(trace), rank=rank, file=f"{rank}.json")


def _diagnose(*events: Event) -> Diagnosis:
    summary = _summary(make_trace(events))
    assert sum(summary.parts_us.values()) == pytest.approx(summary.span_us), "parts neither overlap nor leave gaps"
    return diagnose([summary])


def _kinds(diagnosis: Diagnosis) -> list[str]:
    return [finding.kind for finding in diagnosis.findings]


def _busy(start: float, end: float, name: str = GEMM, each: float = 1000.0) -> list[Event]:
    count = round((end - start) / each)
    return [event for turn in range(count) for event in _work(name, start + turn * each, each)]


def test_a_healthy_trace_is_compute_bound_without_findings() -> None:
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 21_000))
    assert (found.bound, found.findings) == ("compute", ())
    assert found.sentence == "compute-bound: kernels compute 100 % of the time; little to gain elsewhere"


def test_communication_that_nothing_hides_bounds_the_job() -> None:
    reduce = _work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 11_000, 15_000, stream=20)
    found = _diagnose(*_steps(0, 10_600), *_busy(1000, 11_000), *reduce)
    assert (found.bound, _kinds(found)) == ("communication", ["exposed_communication"])
    assert found.findings[0].saving_us == pytest.approx(15_000)
    assert found.findings[0].saving_ratio == pytest.approx(0.6)


def test_a_collective_or_large_copy_under_computation_is_no_finding() -> None:
    reduce = _work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 2000, 18_000, stream=20)
    copy = _work("Memcpy HtoD (Pinned -> Device)", 1000, 19_000, stream=30)
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 21_000), *reduce, *copy)
    assert (found.bound, found.findings) == ("compute", ())


def test_a_copy_that_nothing_hides_is_one() -> None:
    copy = _work("Memcpy HtoD (Pageable -> Device)", 21_000, 5000, stream=30)
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 21_000), *copy)
    assert (found.bound, _kinds(found)) == ("compute", ["memory_copies"])
    assert found.findings[0].saving_ratio == pytest.approx(0.2)


def test_waiting_for_the_data_loader_bounds_the_job() -> None:
    loader = ("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__", ANNOTATION, 4000.0, 9000.0)
    late = _work(GEMM, 14_000, 4000, launched=13_990)
    found = _diagnose(*_steps(0, 14_000), *_busy(1000, 4000), loader, *late)
    assert (found.bound, found.findings[0].kind) == ("input", "input_wait")
    assert found.findings[0].saving_us == pytest.approx(9000)
    assert "num_workers" in found.findings[0].suggestion


def test_short_kernels_launched_singly_make_a_job_host_bound() -> None:
    small = [event for n in range(100) for event in _work(GEMM, 1000 + 20 * n, 4, launched=992 + 20 * n, number=n)]
    found = _diagnose(*_steps(0, 4000), *small)
    assert (found.bound, _kinds(found)) == ("host", ["launch_gaps"])
    assert "CUDA graphs" in found.findings[0].suggestion
    assert found.findings[0].numbers["kernel_median_us"] == 4


def test_host_work_before_and_after_all_kernels_is_no_finding() -> None:
    python = [("aten::embedding", Category.CPU_OP, 0.0, 40_000.0), ("aten::add", Category.CPU_OP, 70_000.0, 50_000.0)]
    found = _diagnose(*_steps(0, 120_000), *python, *_busy(50_000, 60_000))
    assert (found.bound, found.findings) == ("compute", ())


def test_running_dry_after_a_synchronisation_is_told_from_slow_launching() -> None:
    wait = ("cudaStreamSynchronize", RUNTIME, 3000.0, 3010.0)
    late = _work(GEMM, 8000, 2000, launched=7990)
    found = _diagnose(*_steps(0, 9000), *_busy(1000, 6000), wait, *late)
    assert _kinds(found) == ["synchronisation"]
    assert ".item()" in found.findings[0].suggestion


def test_mostly_elementwise_kernels_make_a_job_memory_bound() -> None:
    moving = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 15_000, moving), *_busy(15_000, 21_000))
    assert (found.bound, _kinds(found)) == ("memory", ["unfused_kernels"])
    assert found.findings[0].saving_ratio == pytest.approx(0.35)
    fused = _diagnose(*_steps(0, 10_000), *_busy(1000, 15_000, "triton_poi_fused_add_0"), *_busy(15_000, 21_000))
    assert (fused.bound, fused.findings) == ("memory", ())


def test_only_matrix_products_without_tensor_cores_are_a_finding() -> None:
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 11_000, "ampere_sgemm_128x64_tn"), *_busy(11_000, 21_000))
    assert _kinds(found) == ["no_tensor_cores"]
    assert found.findings[0].saving_ratio == pytest.approx(0.5 * 7 / 8)


def test_findings_stand_in_order_of_what_they_would_save() -> None:
    reduce = _work("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 11_000, 2000, stream=20)
    copy = _work("Memcpy HtoD (Pageable -> Device)", 13_000, 5000, stream=30)
    tiny = _work("Memset (Device)", 18_000, 50, stream=30)
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 11_000), *reduce, *copy, *tiny)
    assert _kinds(found) == ["memory_copies", "exposed_communication"]


def _grouped(kernel: str, start: float, duration: float, description: str, **note: Any) -> list[Event]:
    """A collective of 2 ranks, of 64 MiB, in a group that the framework describes."""
    (name, category, begun, lasted, place), call = _work(
        f"ncclDevKernel_{kernel}(x)", start, duration, stream=20, launched=9000 + start / 1000
    )
    noted = {"group": description, "group_description": description, "group_size": 2, "element_type": "float"}
    noted |= {"in_elements": 1 << 24, "out_elements": 1 << 24, "collective": kernel.lower()}
    return [(name, category, begun, lasted, {**place, **noted, **note}), call]


def _in_groups(*groups: tuple[str, float]) -> Diagnosis:
    """A step of 20 ms of work, then collectives that nothing hides, with their duration. None of them says what it is
    for."""
    events, now = [], 21_000.0
    for description, lasted in groups:
        events += _grouped("AllGather", now, lasted, description)
        now += lasted
    return _diagnose(*_steps(0, 10_000), *_busy(1000, 21_000), *events)


@pytest.mark.parametrize(
    ("description", "advice", "not_advised"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "sequence parallelism", "bf16_compress_hook"),
        ("mesh_dp", "--overlap-grad-reduce", "bf16_compress_hook"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "capacity factor", "gradients"),
        ("mystery", "async_op=True", "gradients"),
    ],
)
def test_advice_fits_the_kind_of_group(description: str, advice: str, not_advised: str) -> None:
    (finding,) = _in_groups((description, 10_000)).findings
    assert advice in finding.suggestion and not_advised not in finding.suggestion


def test_exposed_time_is_split_by_kind_of_group() -> None:
    (finding,) = _in_groups(("mesh_dp", 2000), ("mesh_tp", 6000), ("mystery", 1000)).findings
    assert re.search(r"\(tensor \S+ ms, data \S+ ms, other \S+ ms\)", finding.evidence)
    numbers = [finding.numbers[f"exposed_{kind}_us"] for kind in ("tensor", "data", "unknown")]
    assert [round(9 * number / finding.saving_us, 3) for number in numbers] == [6, 2, 1]
    assert finding.largest_kind == "tensor"


def test_a_group_of_unknown_kind_leaves_the_text_neutral() -> None:
    (finding,) = _in_groups(("mystery", 9000)).findings
    assert "(" not in finding.evidence


def test_pipeline_waits_are_in_one_finding_only() -> None:
    """5 ms of the 30 ms are in messages, and 5 ms in an all-reduce."""
    messages = [
        event
        for place in range(4)
        for event in _grouped("SendRecv", 21_000 + 1250 * place, 1250, "mesh_pp", collective="send", peer=1)
    ]
    reduce = _grouped("AllReduce", 26_000, 5000, "mesh_tp")
    found = _diagnose(*_steps(0, 10_000), *_busy(1000, 21_000), *messages, *reduce)
    by_kind = {finding.kind: finding for finding in found.findings}
    assert by_kind.keys() == {"exposed_communication", "pipeline_bubble"}
    assert by_kind["exposed_communication"].saving_ratio == pytest.approx(5 / 30)
    bubble = by_kind["pipeline_bubble"]
    assert bubble.saving_ratio == pytest.approx(5 / 30)
    assert bubble.numbers["theoretical_bubble_ratio"] == pytest.approx(1 / 5), "2 stages, 4 micro-batches"
    assert "nothing exceeds it" in bubble.evidence and "Even out" not in bubble.suggestion


def test_waits_beyond_the_schedule_ask_for_even_stages() -> None:
    messages = [
        event
        for place in range(20)
        for event in _grouped("SendRecv", 21_000 + 1000 * place, 1000, "mesh_pp", collective="send", peer=1)
    ]
    (bubble,) = _diagnose(*_steps(0, 10_000), *_busy(1000, 21_000), *messages).findings
    assert bubble.numbers["excess_bubble_ratio"] == pytest.approx(0.5 - 1 / 21)
    assert bubble.suggestion.startswith("Even out the stages")


def _joined(job: PlantedJob) -> tuple[Diagnosis, Join]:
    join = job.join()
    return diagnose([_summary(trace, rank) for rank, trace in job.traces().items()], join), join


def test_waiting_for_a_slow_rank_is_not_slow_communication() -> None:
    found, join = _joined(PlantedJob(slow={2: 1.5}))
    assert (join.verdict.value, join.culprits) == ("slow_rank", (2,))
    assert found.bound == "compute", "what bounds the rank that sets the pace"
    assert found.sentence.startswith("rank 2: compute-bound")
    first = found.findings[0]
    assert (first.kind, first.ranks) == ("slow_rank", (2,))
    assert first.saving_ratio == pytest.approx(join.impact_ratio)
    assert "excess_compute_us" in first.numbers and "computation is" in first.evidence
    transfer = next((one.saving_ratio for one in found.findings if one.kind == "exposed_communication"), 0.0)
    assert transfer < 0.12, "only the transfers, 4 × 0.5 ms of each step"


def test_a_job_without_a_slow_rank_names_nobody() -> None:
    found, join = _joined(PlantedJob())
    assert (join.verdict.value, found.bound) == ("healthy", "compute")
    assert all(not finding.ranks for finding in found.findings)


def test_a_rank_that_is_always_last_is_explained_once() -> None:
    found, join = _joined(PlantedJob(2, steps=8, noise=0.001, slow={1: 1.05}))
    assert join.verdict.value == "healthy"
    assert join.reason.startswith("rank 1 is last in 32 of 32 collectives: rank 1 works")
    assert join.reason.endswith("less than a slow rank")
    waiting = next(finding for finding in found.findings if finding.kind == "waiting_for_ranks")
    assert "last in" not in waiting.evidence


def test_joining_trace_essentials_gives_the_result_of_whole_traces() -> None:
    files = {rank: H200 / f"gloo_2ranks_rank{rank}.json.gz" for rank in (0, 1)}
    for traces in ({r: read_trace(f.read_bytes()) for r, f in files.items()}, PlantedJob(slow={1: 1.4}).traces()):
        collectives = {rank: find_collectives(trace) for rank, trace in traces.items()}
        breakdowns = {rank: break_down(trace) for rank, trace in traces.items()}
        small = {rank: keep_essentials(trace, collectives[rank]) for rank, trace in traces.items()}
        whole = join_traces(traces, collectives, breakdowns=breakdowns)
        kept = join_traces(
            {r: s[0] for r, s in small.items()}, {r: s[1] for r, s in small.items()}, breakdowns=breakdowns
        )
        assert sum(len(trace) for trace, _ in small.values()) <= sum(map(len, traces.values()))
        for name in ("verdict", "culprits", "impact_ratio", "waits", "groups", "last_arrivals", "clock_residual_us"):
            assert getattr(kept, name) == getattr(whole, name), name
        assert whole.collectives_matched > 0
        for rank, (trace, found) in small.items():
            for kept_rows, rows in (
                (found.call_row, collectives[rank].call_row),
                (found.kernel_row, collectives[rank].kernel_row),
            ):
                there = rows >= 0
                assert (kept_rows >= 0).tolist() == there.tolist()
                names = [trace.named(name) for name in trace.name[kept_rows[there]].tolist()]
                assert names == [traces[rank].named(name) for name in traces[rank].name[rows[there]].tolist()]
                assert trace.start_ns[kept_rows[there]].tolist() == traces[rank].start_ns[rows[there]].tolist()
