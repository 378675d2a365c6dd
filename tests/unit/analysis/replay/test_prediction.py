"""Are predicted gains those that were measured, and is nothing promised where there is nothing to gain?"""

from __future__ import annotations

from functools import cache

import pytest

from rankscope.analysis.replay.changes import CHANGES
from rankscope.analysis.replay.prediction import Forecast, Prediction, forecast
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Trace
from tests.shared_data import H200
from tests.unit.analysis.replay.made_steps import Machine, device_bound, launch_bound

BY_NAME = {change.name: change for change in CHANGES}
# Measured on an H200 without the profiler: benchmarks/gpu/remedies.py, docs/performance.md.
LAUNCH_BOUND_MS, MATRIX_BOUND_MS, STRAGGLER_MS = 14.75, 134.03, 27.26


@cache
def h200(name: str) -> Trace:
    return read_trace((H200 / name).read_bytes())


def named(found: Forecast, name: str) -> Prediction:
    return next(one for one in found.predictions if one.name == name)


def predicted(traces: dict[int, Trace], name: str, step_ms: float | None = None) -> Prediction:
    wanted = [[BY_NAME[word] for word in name.split("+")]]
    return forecast(traces, wanted, None if step_ms is None else step_ms * 1e6).predictions[0]


@pytest.mark.parametrize(("name", "measured"), [("fused", 0.139), ("graph", 0.537), ("fused+graph", 0.619)])
def test_gains_of_a_launch_bound_job_are_those_measured(name: str, measured: float) -> None:
    found = predicted({0: h200("launch_bound.json.gz")}, name, LAUNCH_BOUND_MS)
    assert found.gain_ratio == pytest.approx(measured, abs=0.10)


@pytest.mark.parametrize(
    ("name", "measured"),
    [
        ("bf16", 0.844),
        ("fused+bf16", 0.870),
        ("tf32", 0.726),
        ("fused", 0.024),
        ("compile", 0.025),
        ("graph", -0.017),
        ("batch2", 0.084),
        ("accumulate4", 0.023),
        ("recompute", -0.218),
    ],
)
def test_gains_of_a_matrix_bound_job_are_those_measured(name: str, measured: float) -> None:
    found = predicted({0: h200("matrix_bound.json.gz")}, name, MATRIX_BOUND_MS)
    assert found.gain_ratio is not None and found.most_gain_ratio is not None
    assert found.gain_ratio - 0.10 < measured < found.most_gain_ratio + 0.10


def test_a_host_of_unknown_speed_gives_a_range() -> None:
    known = predicted({0: launch_bound()}, "graph", 1.25)
    assert known.gain_ratio == known.most_gain_ratio
    unknown = predicted({0: launch_bound()}, "graph")
    assert unknown.gain < known.gain < (unknown.most_gain_ratio or 0.0)


def test_the_gain_without_a_straggler_is_that_measured() -> None:
    traces = {rank: h200(f"ddp_straggler_rank{rank}.json.gz") for rank in range(4)}
    assert predicted(traces, "even", STRAGGLER_MS).gain_ratio == pytest.approx(0.20, abs=0.05)


def test_host_time_is_scaled_to_the_step_without_the_profiler() -> None:
    found = forecast({0: launch_bound()}, true_step_ns=1.25e6)
    assert found.host_factor == pytest.approx(0.5, abs=0.01)
    assert found.step_ns == pytest.approx(1.25e6, rel=0.001)
    # The step of a busy device says nothing about its host.
    assert forecast({0: device_bound()}, true_step_ns=4.9e6).host_factor is None


def test_a_busy_device_with_a_fused_optimizer_needs_no_help() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        for _ in range(20):
            machine.work(6.0)
            machine.launch("gemm", 98.5)
        optimizer = machine.now
        machine.launch("FusedAdamMathFunctor", 50.0)
        machine.annotate("Optimizer.step#AdamW.step", optimizer)
        machine.annotate(f"ProfilerStep#{step}", began)
    found = forecast({0: machine.trace()})
    assert found.best is None
    assert max(one.gain for one in found.predictions if not one.alters_training) < 0.01
    assert named(found, "fused").reason == "the optimizer is fused"


def optimizing(kernels: int) -> Trace:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.launch("gemm", 1000.0)
        optimizer = machine.now
        for _ in range(kernels):
            machine.launch("multi_tensor_apply_kernel", 100.0)
        machine.annotate("Optimizer.step#AdamW.step", optimizer)
        machine.annotate(f"ProfilerStep#{step}", began)
    return machine.trace()


def test_a_fused_optimizer_moves_a_third_of_the_memory() -> None:
    found = predicted({0: optimizing(9)}, "fused")
    assert found.step_ns == pytest.approx((1000 + 300 + 2 * 1.5) * 1e3, rel=0.001)


def test_waiting_for_input_ends() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.wait_for_input(3000.0)
        machine.work(20.0)
        machine.launch("gemm", 1000.0)
        machine.annotate(f"ProfilerStep#{step}", began)
    found = predicted({0: machine.trace()}, "input")
    assert found.step_ns == pytest.approx(1001.5e3, rel=0.01)
    assert predicted({0: device_bound()}, "input").reason == "no step waits for its input"


def test_a_graph_keeps_what_python_does_apart_from_operators() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.work(5000.0)
        for _ in range(50):
            machine.work(46.0)
            machine.launch("elementwise_kernel", 10.0)
        machine.annotate(f"ProfilerStep#{step}", began)
    found = predicted({0: machine.trace()}, "graph")
    assert found.step_ns == pytest.approx(5000e3, rel=0.02)


def test_a_step_that_synchronises_is_no_graph() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.launch("gemm", 100.0)
        machine.synchronize()
        machine.annotate(f"ProfilerStep#{step}", began)
    assert "the host waits for the device" in predicted({0: machine.trace()}, "graph").reason


def test_the_best_two_are_predicted_together() -> None:
    found = forecast({0: h200("launch_bound.json.gz")}, true_step_ns=LAUNCH_BOUND_MS * 1e6)
    assert found.predictions[0].name == "graph+fused"
    assert found.predictions[0].gain > named(found, "graph").gain > named(found, "fused").gain


def test_an_unexplained_delay_is_not_predicted() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        for _ in range(3):
            machine.work(1000.0)
            machine.launch("gemm", 500.0)
        machine.launch("waits_for_another_process", 500.0, after=machine.now + 5000.0)
        machine.synchronize()
        machine.annotate(f"ProfilerStep#{step}", began)
    found = forecast({0: machine.trace()})
    assert not found.is_usable and not found.predictions
    assert found.diverges_at == "waits_for_another_process"
