"""Do changes of what the device computes edit the graph as they say?"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankscope.analysis.replay.changes import CHANGES, Change, bucket, faster
from rankscope.analysis.replay.prediction import Prediction, forecast
from rankscope.analysis.traces.trace import Trace
from tests.unit.analysis.replay.made_steps import BETWEEN_US, Machine, device_bound
from tests.unit.analysis.traces.test_gradient_buckets import ddp_trace

BY_NAME = {change.name: change for change in CHANGES}
PRODUCT = "cutlass_80_simt_sgemm_256x128_8x4_nn_align1"
MOVING = "vectorized_elementwise_kernel"
BACKWARD = "autograd::engine::evaluate_function: AddmmBackward0"


def predicted(trace: Trace, change: str | Change) -> Prediction:
    wanted = BY_NAME[change] if isinstance(change, str) else change
    return forecast({0: trace}, [[wanted]]).predictions[0]


def stepping(body: Callable[[Machine], None], device: str = "NVIDIA H200") -> Trace:
    machine = Machine(device=device)
    for step in range(4):
        began = machine.now
        body(machine)
        machine.annotate(f"ProfilerStep#{step}", began)
    return machine.trace()


def products(machine: Machine) -> None:
    for _ in range(10):
        machine.launch(PRODUCT, 1000.0)


def test_tf32_reaches_the_same_share_of_a_higher_peak() -> None:
    found = predicted(stepping(products), "tf32")
    assert found.step_ns == pytest.approx(10 * (1000 * 67.0 / 494.5 + BETWEEN_US) * 1e3, rel=0.001)


def test_bf16_adds_the_time_of_its_casts() -> None:
    def body(machine: Machine) -> None:
        products(machine)
        machine.launch(MOVING, 50.0)

    found = predicted(stepping(body), "bf16")
    casts = 3 * 10 * (50 + BETWEEN_US)
    whole = 10 * (1000 * 67.0 / 989.0 + BETWEEN_US) + 50 + BETWEEN_US + casts
    assert found.step_ns == pytest.approx(whole * 1e3, rel=0.01)


def test_casts_make_a_launch_bound_step_longer() -> None:
    def body(machine: Machine) -> None:
        for name in (PRODUCT, MOVING) * 10:
            machine.work(46.0)
            machine.launch(name, 5.0)

    assert predicted(stepping(body), "bf16").gain == pytest.approx(-30 / 20, abs=0.05)


@pytest.mark.parametrize(("kernel", "change"), [("ampere_bf16_s16816gemm_bf16_128x128", "bf16"), (MOVING, "tf32")])
def test_products_in_16_bits_are_left_alone(kernel: str, change: str) -> None:
    trace = stepping(lambda machine: [machine.launch(kernel, 100.0) for _ in range(10)] and None)
    assert "no matrix product runs in FP32" in predicted(trace, change).reason


def test_the_arithmetic_of_an_unknown_device_is_not_guessed() -> None:
    found = predicted(stepping(products, device="Quadro 9000"), "tf32")
    assert found.gain_ratio is None and "'Quadro 9000' is not a known device" in found.reason


def test_neighbouring_kernels_that_move_data_become_one() -> None:
    def body(machine: Machine) -> None:
        for name, long in (
            (MOVING, 100.0),
            ("reduce_kernel", 300.0),
            (MOVING, 200.0),
            (PRODUCT, 500.0),
            (MOVING, 50.0),
        ):
            machine.launch(name, long)

    found = predicted(stepping(body), "compile")
    # The last kernel of a step is in another step than the next one's first.
    assert found.step_ns == pytest.approx((300 + 500 + 50 + 3 * BETWEEN_US) * 1e3, rel=0.001)
    assert "no two kernels" in predicted(stepping(products), "compile").reason


def test_waits_for_merged_work_are_kept() -> None:
    machine = Machine()
    for step in range(4):
        began = machine.now
        machine.launch(MOVING, 1000.0)
        computed = machine.launch(MOVING, 1000.0)
        machine.let_stream_wait()
        reduced = machine.launch("ncclDevKernel_AllReduce_Sum", 3000.0, stream=20, after=computed)
        machine.let_stream_wait()
        machine.launch(PRODUCT, 1000.0, after=reduced)
        machine.annotate(f"ProfilerStep#{step}", began)
    assert predicted(machine.trace(), "compile").step_ns == pytest.approx(5000e3, rel=0.01)


def optimizing(machine: Machine) -> None:
    machine.launch(PRODUCT, 1000.0)
    since = machine.now
    machine.launch(MOVING, 400.0)
    machine.annotate("Optimizer.step#AdamW.step", since)


def test_a_quarter_of_the_optimizer_remains_for_each_batch() -> None:
    found = predicted(stepping(optimizing), "accumulate4")
    assert found.step_ns == pytest.approx((1000 + 100 + 2 * BETWEEN_US) * 1e3, rel=0.001)
    assert found.alters_training


def test_a_larger_batch_shares_the_optimizer() -> None:
    found = predicted(stepping(optimizing), "batch2")
    assert found.step_ns == pytest.approx((2000 + 400) * 1e3, rel=0.01)
    assert found.gain == pytest.approx(1 - 2400 / 2 / 1400, abs=0.01)


def test_reading_a_larger_batch_takes_longer() -> None:
    def body(machine: Machine) -> None:
        machine.wait_for_input(3000.0)
        machine.launch(PRODUCT, 1000.0)

    assert predicted(stepping(body), "batch2").gain == pytest.approx(0.0, abs=0.01)


def layered(machine: Machine, layers: int = 6) -> None:
    """A layer is a norm, two products and an addition, of 100, 1000, 2000 and 50 µs; its backward takes 6000 µs."""
    machine.launch("embedding_kernel", 70.0)
    for _ in range(layers):
        for name, long in (("layer_norm", 100.0), (PRODUCT, 1000.0), ("other_sgemm", 2000.0), (MOVING, 50.0)):
            machine.launch(name, long)
    since = machine.now
    for _ in range(layers):
        machine.launch("backward_sgemm", 6000.0)
    machine.operator(BACKWARD, since)


def test_recomputation_stops_before_the_last_product_of_a_layer() -> None:
    before = 70 + 6 * (3150 + 6000)
    found = predicted(stepping(layered), "recompute")
    assert found.gain == pytest.approx(-(70 + 6 * 1100) / before, abs=0.005)


def test_a_forward_pass_without_layers_is_recomputed_whole() -> None:
    def body(machine: Machine) -> None:
        machine.launch(PRODUCT, 1000.0)
        since = machine.now
        machine.launch("backward_sgemm", 1000.0)
        machine.operator(BACKWARD, since)

    assert predicted(stepping(body), "recompute").gain == pytest.approx(-0.5, abs=0.01)
    assert "no forward pass" in predicted(device_bound(), "recompute").reason


def test_chosen_kernels_are_faster() -> None:
    assert predicted(device_bound(), faster("GEMM", 2)).gain == pytest.approx(0.5, abs=0.01)
    assert predicted(device_bound(), faster("softmax", 2)).reason == "no kernel has that name"


def test_other_buckets_take_as_long_as_recorded_ones() -> None:
    job = {"gradients": 200, "gradient_mb": 1, "kernel_us": 20, "latency_us": 400, "mb_per_us": 0.5}
    before = ddp_trace(per_bucket=5, **job)
    after = forecast({0: ddp_trace(per_bucket=50, has_cap=True, **job)}, [])
    found = predicted(before, bucket(50))
    assert found.step_ns == pytest.approx(after.step_ns, rel=0.05)
    assert found.gain > 0.3
