"""Is advice given where it helps, with the lines, and not where nothing would?"""

from __future__ import annotations

from rankscope.analysis.replay.advice import Advice, advise
from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.diagnosis import diagnose
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.trace import Category, Trace
from tests.unit.analysis.replay.made_steps import Machine
from tests.unit.analysis.replay.test_host_replay import Host, stepping

HALF = "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_bias_TNT"


def advice_of(trace: Trace) -> Advice:
    breakdown = break_down(trace)
    assert breakdown is not None
    summary = summarize(trace, breakdown, find_collectives(trace), rank=0, file="")
    return advise({0: trace}, [summary], diagnose([summary]))


def training(product: str, optimizer: str, optimizer_us: float) -> Trace:
    """Forward in model.py:10, the optimizer in train.py:7."""
    machine = Machine()
    for step in range(4):
        began = machine.now
        for _ in range(20):
            machine.work(6.0)
            machine.launch(product, 400.0)
        machine.events.append(("model.py(10): forward", Category.PYTHON, began, machine.now - began))
        since = machine.now
        for _ in range(8):
            machine.launch(optimizer, optimizer_us / 8)
        machine.events.append(("torch/optim/adamw.py(90): step", Category.PYTHON, since, machine.now - since))
        machine.annotate("Optimizer.step#AdamW.step", since)
        machine.events.append(("train.py(7): main", Category.PYTHON, began, machine.now - began))
        machine.annotate(f"ProfilerStep#{step}", began)
    return machine.trace()


def test_a_step_that_needs_no_help_gets_no_advice() -> None:
    found = advice_of(training(HALF, "FusedAdamMathFunctor", 300.0))
    assert found.advised == () and found.losses == ()
    assert found.in_use == ("matrix products in 16 bits or fewer", "a fused optimizer")
    assert [check.answer for check in found.checks[:3]] == [False, False, False]


def test_the_line_to_change_is_named() -> None:
    found = advice_of(training(HALF, "multi_tensor_apply_kernel", 3000.0))
    (only,) = found.advised
    assert only.prediction.name == "fused"
    assert [str(line) for line in only.lines] == ["main (train.py:7)"]


def test_the_lines_of_products_are_named() -> None:
    found = advice_of(training("cutlass_80_simt_sgemm_128x64", "FusedAdamMathFunctor", 300.0))
    by_name = {one.prediction.name: one for one in found.advised}
    assert [str(line) for line in by_name["bf16"].lines] == ["forward (model.py:10)"]
    assert "run in FP32 without tensor cores" in by_name["bf16"].evidence[0]


def reducing(description: str) -> Trace:
    """After the products of a step, a large all-reduce that nothing hides."""
    machine = Machine()
    note = {"collective": "allreduce", "group": "5", "group_description": description, "group_size": 2}
    for step in range(4):
        began = machine.now
        for _ in range(10):
            machine.work(6.0)
            machine.launch(HALF, 400.0)
        machine.launch("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 3000.0, **note)
        machine.annotate(f"ProfilerStep#{step}", began)
    return machine.trace()


def test_remedies_for_communication_fit_its_kind_of_group() -> None:
    for description, is_gradients in (("mesh_dp", True), ("mesh_tp", False)):
        advised = {one.prediction.name: one.prediction for one in advice_of(reducing(description)).advised}
        (change,) = advised["link"].changes
        assert ("bf16_compress_hook" in change.remedy) == is_gradients
        assert ("sequence parallelism" in change.remedy) != is_gradients


def test_a_cpu_job_is_not_asked_about_devices() -> None:
    def step(host: Host) -> None:
        host.read(3000.0)
        host.compute(1000.0)

    found = advice_of(stepping(step))
    assert [one.prediction.name for one in found.advised] == ["input"]
    assert [(check.question, check.answer) for check in found.checks] == [
        ("exposed communication", False),
        ("slow input", True),
    ]
