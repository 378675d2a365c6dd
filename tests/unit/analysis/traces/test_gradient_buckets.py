from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.communication.gradient_buckets import (
    Rebucketing,
    find_buckets,
    gradients_of_steps,
    last_gradients,
    predict_other_caps,
)
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Category, Trace
from tests.shared_data import H200
from tests.unit.analysis.traces.trace_builder import Event, make_trace

OP, RUN, KERNEL, NOTE = Category.CPU_OP, Category.RUNTIME, Category.KERNEL, Category.USER_ANNOTATION
MEGA = 1 << 20


def ddp_trace(
    *, gradients: int, gradient_mb: float, per_bucket: int, kernel_us: float, latency_us: float, mb_per_us: float,
    steps: int = 3, slower: float = 1.0, has_cap: bool = False,
) -> Trace:  # fmt: skip
    """Backward computes one gradient per kernel; a bucket is sent when its last gradient is computed and the one
    before it has been sent. `slower` stretches every second transfer, which no model of size can know. `has_cap`: the
    user gave one, so that the first bucket is as large as the others."""
    events: list[Event] = []
    correlation, clock = 0, 0.0
    for step in range(steps):
        begun, host, device, link, filled, bucket = clock, clock, clock + 50, clock, 0, 0
        for gradient in range(gradients):
            correlation += 1
            events += [
                ("autograd::engine::evaluate_function: MmBackward0", OP, host, 2),
                ("cudaLaunchKernel", RUN, host + 0.5, 1, {"correlation": correlation}),
                ("gemm", KERNEL, device, kernel_us, {"correlation": correlation}),
            ]
            device += kernel_us
            hook: Event = ("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", OP, host + 3, 6)
            events.append(hook)
            filled += 1
            if filled == per_bucket or gradient == gradients - 1 or (bucket == 0 and not has_cap):
                correlation += 1
                size = int(filled * gradient_mb * MEGA)
                takes = latency_us + size / MEGA / mb_per_us
                takes *= slower if bucket % 2 else 1.0
                start = max(device, link)
                note = {"collective": "allreduce", "group": "0", "group_size": 8, "in_elements": size // 2}
                note |= {"out_elements": size // 2, "element_type": "BFloat16"}
                kernel = {"correlation": correlation, "stream": 20}
                events += [
                    ("record_param_comms", OP, host + 4, 4, note),
                    ("cudaLaunchKernelExC", RUN, host + 5, 1, {"correlation": correlation}),
                    ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(args)", KERNEL, start, takes, kernel),
                ]
                link, filled, bucket = start + takes, 0, bucket + 1
            host += 10
        clock = max(device, link, host) + 20
        events.append(("cudaDeviceSynchronize", RUN, host, clock - 16 - host))
        events.append(("Optimizer.step#AdamW.step", NOTE, clock - 15, 10))
        events.append((f"ProfilerStep#{step}", NOTE, begun, clock - begun))
    return make_trace(events, world_size=8)


def advise(trace: Trace) -> Rebucketing:
    advice = predict_other_caps(trace, find_buckets(trace, find_collectives(trace)))
    assert advice is not None
    return advice


def test_lists_each_steps_buckets_with_size_and_hidden_fraction() -> None:
    trace = ddp_trace(gradients=12, gradient_mb=8, per_bucket=4, kernel_us=100, latency_us=10, mb_per_us=0.2)
    buckets = find_buckets(trace, find_collectives(trace))
    # The first bucket of a step is closed by its first gradient, as DDP does it.
    assert list(buckets.order) == [0, 1, 2, 3] * 3
    assert np.bincount(buckets.gradient_bucket).tolist() == [1, 4, 4, 3] * 3
    assert list(buckets.bytes[:4]) == [8 * MEGA, 32 * MEGA, 32 * MEGA, 24 * MEGA]
    # 100 µs a gradient: the first transfer (50 µs) runs beside the second gradient, the last one beside nothing.
    assert buckets.hidden_ratio[0] == pytest.approx(1.0)
    assert buckets.hidden_ratio[3] == pytest.approx(0.0)


def test_leaves_out_an_all_reduce_without_a_gradient_hook() -> None:
    trace = make_trace(
        [
            ("ProfilerStep#1", NOTE, 0, 100),
            ("autograd::engine::evaluate_function: ReduceFromTensorParallel", OP, 0, 50),
            ("nccl:all_reduce", NOTE, 10, 5),
        ]
    )
    assert len(find_buckets(trace, find_collectives(trace))) == 0
    assert predict_other_caps(trace, find_buckets(trace, find_collectives(trace))) is None


def test_proposes_larger_buckets_where_latency_dominates() -> None:
    advice = advise(ddp_trace(gradients=200, gradient_mb=1, per_bucket=5, kernel_us=20, latency_us=400, mb_per_us=0.5))
    assert advice.reason == ""
    assert advice.modelled_exposed_ns == pytest.approx(advice.exposed_ns, rel=0.05)
    assert advice.cap_mb == 5
    assert advice.recommended_cap_mb is not None and advice.recommended_cap_mb > 5
    assert "bucket_cap_mb" in advice.advice


def test_proposes_smaller_buckets_where_one_waits_for_all_gradients() -> None:
    advice = advise(
        ddp_trace(gradients=100, gradient_mb=8, per_bucket=50, kernel_us=300, latency_us=20, mb_per_us=0.06)
    )
    assert advice.recommended_cap_mb is not None and advice.recommended_cap_mb < 400
    assert advice.gain_ns is not None and advice.gain_ns > 0


def test_what_it_predicts_is_what_the_other_cap_then_does() -> None:
    job = {"gradients": 200, "gradient_mb": 1, "kernel_us": 20, "latency_us": 400, "mb_per_us": 0.5}
    before = advise(ddp_trace(per_bucket=5, **job))
    after = advise(ddp_trace(per_bucket=50, has_cap=True, **job))
    predicted = {one.cap_mb: one for one in before.predictions}[50]
    assert predicted.buckets == after.buckets
    assert predicted.exposed_ns == pytest.approx(after.exposed_ns, rel=0.1)


def test_leaves_well_hidden_buckets_alone() -> None:
    advice = advise(ddp_trace(gradients=100, gradient_mb=5, per_bucket=5, kernel_us=200, latency_us=20, mb_per_us=0.5))
    assert advice.reason == "" and advice.predictions
    assert advice.recommended_cap_mb is None and advice.advice == ""


def test_does_not_believe_a_model_that_misses_what_was_seen() -> None:
    advice = advise(
        ddp_trace(gradients=100, gradient_mb=2, per_bucket=10, kernel_us=50, latency_us=20, mb_per_us=0.1, slower=4.0)
    )
    assert "the model is off by" in advice.reason
    assert advice.predictions == () and advice.recommended_cap_mb is None


def test_says_that_buckets_of_one_size_show_no_latency() -> None:
    advice = advise(ddp_trace(gradients=8, gradient_mb=8, per_bucket=1, kernel_us=50, latency_us=20, mb_per_us=0.1))
    assert "1 distinct size" in advice.reason and advice.predictions == ()


def test_reproduces_a_real_gloo_jobs_exposed_time_and_proposes_nothing() -> None:
    trace = read_trace((H200 / "gloo_2ranks_rank0.json.gz").read_bytes())
    buckets = find_buckets(trace, find_collectives(trace))
    assert len(buckets) == 25 and int(buckets.bytes.sum()) == 805732352
    assert np.all(buckets.hidden_ratio[:2] > 0.9) and np.all(buckets.hidden_ratio[5:] == 0)
    advice = predict_other_caps(trace, buckets)
    assert advice is not None and advice.modelled_exposed_ns == pytest.approx(advice.exposed_ns, rel=0.03)
    assert advice.recommended_cap_mb is None


def test_says_that_a_group_of_one_transfers_nothing() -> None:
    trace = read_trace((H200 / "nccl_world1_3steps.json.gz").read_bytes())
    buckets = find_buckets(trace, find_collectives(trace))
    assert len(buckets) == 75 and np.isnan(buckets.hidden_ratio).all()
    assert advise(trace).reason == "the trace has the calls but not the transfers"


def test_sizes_of_gradients_are_those_of_their_shapes() -> None:
    trace = read_trace((H200 / "ddp_straggler_rank0.json.gz").read_bytes())
    step = gradients_of_steps(find_buckets(trace, find_collectives(trace)))[0]
    weight, bias = 1024 * 1024 * 4, 1024 * 4
    assert set(step.bytes.tolist()) == {weight, bias}
    assert step.bytes.sum() == step.bucket_bytes.sum() == 33619968
    # Each weight closes a bucket; biases and norms are added to the next.
    assert len(last_gradients(step, MEGA)) == 9
