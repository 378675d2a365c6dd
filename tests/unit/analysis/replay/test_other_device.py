"""Does a step on another GPU follow the peak that limits its kernels?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.models.device_peaks import DeviceSpec, find_device
from rankscope.analysis.replay.changes import CHANGES, Change
from rankscope.analysis.replay.kernel_work import kernel_work
from rankscope.analysis.replay.other_device import (
    EFFICIENCY_RATIO,
    LATENCY_NS,
    Bound,
    OtherDevice,
    moved_ns,
    predict_on,
)
from rankscope.analysis.traces.kernels import classify_kernels
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.summary import device_name
from rankscope.analysis.traces.trace import Category, Device, MemoryColumns, Trace
from tests.shared_data import H200
from tests.unit.analysis.replay.made_steps import Machine, launch_bound
from tests.unit.analysis.replay.test_kernel_work import with_work
from tests.unit.analysis.traces.trace_builder import Event, make_trace

HERE = DeviceSpec("here", {"fp32": 50.0, "bf16": 400.0}, 2000.0, 80.0, "")
SGEMM, ADD, OWN = "ampere_sgemm_128x64_tn", "vectorized_elementwise_kernel<add>", "my_kernel"
KERNEL_US, STEP_US = 98.5, 5000.0  # 50 kernels with 1.5 µs between them


def other(compute: float = 1.0, bandwidth: float = 1.0) -> DeviceSpec:
    """So many times as fast."""
    tflops = {name: compute * (peak or 0.0) for name, peak in HERE.tflops.items()}
    return replace(HERE, name="there", tflops=tflops, gb_per_second=bandwidth * HERE.gb_per_second)


def steps_of(
    kernel: str, *, host_us: float = 6.0, kernel_us: float = KERNEL_US, work: tuple[int, int] | None = None
) -> Trace:
    """Every kernel of its own operator, with its FLOPs and bytes."""
    machine = Machine()
    for step in range(5):
        began = machine.now
        for _ in range(50):
            machine.work(host_us)
            called = machine.now
            machine.launch(kernel, kernel_us)
            machine.events.append(("aten::mm", Category.CPU_OP, called - 0.5, 5.0))
        machine.annotate(f"ProfilerStep#{step}", began)
    trace = machine.trace()
    return trace if work is None else with_work(trace, {"aten::mm": work})


def moved(trace: Trace, there: DeviceSpec, changes: Sequence[Sequence[Change]] = ()) -> OtherDevice:
    return predict_on({0: trace}, {0: HERE}, there, changes)


def step_us(found: OtherDevice) -> float:
    return (found.steps[0].other_ns or 0.0) / 1000


def after(factor: float) -> float:
    """Of a step whose kernels take the factor of their time, without what does not scale."""
    return STEP_US + 50 * (KERNEL_US - LATENCY_NS / 1000) * (factor - 1)


BUSY = int(0.6 * 50e3 * KERNEL_US * 1000)  # FLOPs at 60 % of the fp32 peak
FULL = int(0.6 * 2000 * KERNEL_US * 1000)  # bytes at 60 % of the bandwidth


@pytest.mark.parametrize(
    ("kernel", "work", "bound", "compute", "bandwidth", "factor"),
    [
        (SGEMM, (BUSY, FULL // 10), Bound.COMPUTE, 2.0, 1.0, 0.5),
        (SGEMM, (BUSY, FULL // 10), Bound.COMPUTE, 0.5, 4.0, 2.0),
        (SGEMM, (BUSY // 10, FULL), Bound.MEMORY, 4.0, 0.5, 2.0),
        (ADD, (-1, FULL), Bound.MEMORY, 4.0, 0.5, 2.0),
        (OWN, (-1, FULL), Bound.MEMORY, 4.0, 0.5, 2.0),
        (SGEMM, None, Bound.COMPUTE, 2.0, 1.0, 0.5),
        (ADD, None, Bound.MEMORY, 1.0, 2.0, 0.5),
        # Half of both: bandwidth that does not grow limits what compute limited.
        (SGEMM, (BUSY, FULL // 2), Bound.COMPUTE, 4.0, 1.0, 0.5),
    ],
)
def test_kernels_follow_the_peak_that_limits_them(
    kernel: str, work: tuple[int, int] | None, bound: Bound, compute: float, bandwidth: float, factor: float
) -> None:
    found = moved(steps_of(kernel, work=work), other(compute, bandwidth))
    assert found.time_ratios[bound] == 1.0
    assert step_us(found) == pytest.approx(after(factor), rel=0.005)
    step = found.steps[0]
    assert (step.low_ns or 0) / 1000 == pytest.approx(after(factor * (1 - EFFICIENCY_RATIO)), rel=0.005)
    assert (step.high_ns or 0) / 1000 == pytest.approx(after(factor * (1 + EFFICIENCY_RATIO)), rel=0.005)


def test_a_kernel_limited_by_neither_may_stay_as_it_is() -> None:
    found = moved(steps_of(SGEMM, work=(BUSY // 20, FULL // 20)), other(0.25, 0.25))
    assert found.time_ratios[Bound.SMALL] == 1.0
    step = found.steps[0]
    assert step_us(found) == pytest.approx(after(2.0), rel=0.005)
    assert (step.low_ns or 0) / 1000 < STEP_US < after(4.0) < (step.high_ns or 0) / 1000


def test_a_kernel_of_unknown_kind_is_between_both_ratios() -> None:
    found = moved(steps_of(OWN), other(0.25, 1.0))
    assert found.time_ratios[Bound.UNKNOWN] == 1.0
    step = found.steps[0]
    assert (step.low_ns or 0) / 1000 < STEP_US < step_us(found) < after(4.0) < (step.high_ns or 0) / 1000


def test_a_part_of_every_kernel_does_not_scale() -> None:
    durations = np.array([500, LATENCY_NS, LATENCY_NS + 1000])
    assert moved_ns(durations, np.full(3, 4.0)).tolist() == [500, LATENCY_NS, LATENCY_NS + 4000]


def test_the_host_does_not_become_faster() -> None:
    trace = launch_bound()
    found = moved(trace, other(100.0, 100.0))
    assert step_us(found) == pytest.approx(2500, rel=0.01)


def test_communication_and_copies_from_the_host_stay() -> None:
    assert moved(steps_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL"), other(0.1, 0.1)).time_ratios[Bound.FIXED] == 1.0
    found = moved(steps_of("ncclDevKernel_AllReduce_Sum_f32_RING_LL"), other(0.1, 0.1)).steps[0]
    assert found.low_ns == found.other_ns == found.high_ns == pytest.approx(STEP_US * 1000, rel=0.005)


def test_copies_within_the_device_follow_its_bandwidth() -> None:
    trace = steps_of("Memcpy DtoD (Device -> Device)")
    is_copy = trace.of(Category.KERNEL)
    category = np.where(is_copy, Category.MEMCPY, trace.category).astype(np.int8)
    assert step_us(moved(replace(trace, category=category), other(1.0, 0.5))) == pytest.approx(after(2.0), rel=0.005)
    names = tuple(name.replace("DtoD (Device -> Device)", "HtoD (Pinned -> Device)") for name in trace.names)
    stays = replace(trace, category=category, names=names)
    assert step_us(moved(stays, other(1.0, 0.5))) == pytest.approx(STEP_US, rel=0.005)


def test_the_same_gpu_changes_nothing() -> None:
    found = moved(steps_of(SGEMM, work=(BUSY, FULL)), HERE).steps[0]
    assert found.now_ns == found.low_ns == found.other_ns == found.high_ns


def test_changes_are_made_before_the_job_moves() -> None:
    graph = next(one for one in CHANGES if one.name == "graph")
    even = next(one for one in CHANGES if one.name == "even")
    found = moved(launch_bound(), other(0.5, 0.5), changes=[[graph], [even]])
    assert [one.name for one in found.steps] == ["", "graph", "even"]
    _, with_graph, with_even = found.steps
    # 50 kernels of 10 µs, of which 8 µs scale, and 2 µs between them.
    assert (with_graph.other_ns or 0) / 1000 == pytest.approx(50 * (2 + 2 * 8 + 2), rel=0.1)
    assert with_even.other_ns is None and "several ranks" in with_even.reason


def test_mfu_is_flops_of_the_step_by_its_peak() -> None:
    found = moved(steps_of(SGEMM, work=(BUSY, FULL // 10)), other(2.0, 2.0))
    assert found.flops_per_step == 50 * BUSY and found.number_format == "fp32"
    assert found.achieved_tflops == pytest.approx(30.0)
    assert found.mfu_ratio(found.steps[0].now_ns, HERE) == pytest.approx(0.6 * KERNEL_US / 100, rel=0.005)
    without = moved(steps_of(SGEMM), other())
    assert without.flops_per_step is None and without.mfu_ratio(1e6, HERE) is None


def test_a_format_that_the_other_gpu_lacks_is_said() -> None:
    trace = with_work(steps_of("volta_bf16_s16816gemm"), {"aten::mm": (8 * BUSY, 1)}, "c10::BFloat16")
    there = replace(other(), tflops={"fp32": 50.0, "fp16": 200.0, "bf16": None})
    found = moved(trace, there)
    assert found.notes == ("there has no bf16; its fp16 peak is used",)
    assert step_us(found) == pytest.approx(after(2.0), rel=0.005)
    without = moved(trace, replace(other(1.0, 0.5), tflops={}))
    assert "no published bf16 peak" in without.notes[0] and step_us(without) == pytest.approx(after(2.0), rel=0.005)


def test_rates_above_the_peak_make_the_gpu_doubtful() -> None:
    assert "is that the GPU of the traces" in moved(steps_of(SGEMM, work=(3 * BUSY, 1)), other()).notes[0]


@pytest.mark.parametrize(("peak_gb", "fits"), [(79, True), (81, False)])
def test_memory_that_does_not_fit_is_seen(peak_gb: int, fits: bool) -> None:
    one = np.array([peak_gb * 10**9])
    memory = MemoryColumns(one, one, one, one, np.array([True]), *[np.array([0])] * 4)
    assert moved(replace(steps_of(SGEMM), memory=memory), other()).fits is fits
    assert moved(steps_of(SGEMM), other()).fits is None


def test_the_gpu_of_a_trace_is_the_one_that_worked() -> None:
    devices = (Device(0, "idle", None), Device(1, "busy", None))
    work: list[Event] = [(SGEMM, Category.KERNEL, 0, 1, {"device": 1})]
    assert device_name(make_trace(work, devices=devices)) == "busy"
    assert device_name(make_trace(work)) == "" == device_name(make_trace([]))


def test_no_kernel_of_a_real_trace_exceeds_its_peaks() -> None:
    trace = read_trace((H200 / "launch_bound.json.gz").read_bytes())
    spec = find_device(device_name(trace))
    rows = np.flatnonzero(trace.of(Category.KERNEL))
    work = kernel_work(trace, rows, classify_kernels(trace, rows))
    duration = trace.duration_ns[rows]
    assert (work.flops / duration).max() < 1000 * (spec.tflops["fp32"] or 0)
    assert (work.size_bytes / duration).max() < spec.gb_per_second
    found = predict_on({0: trace}, {0: spec}, find_device("A100"))
    assert found.time_ratios[Bound.UNKNOWN] < 0.01
    assert 0.4 < found.time_ratios[Bound.COMPUTE] < 0.6
