"""The table of rules: each looks at the evidence of a job and tells what one way of losing time costs at best.

A rule's saving is an upper bound: the time that would come back if that loss vanished and nothing else changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rankscope.analysis.drawing.quantities import count, quantity
from rankscope.analysis.traces.diagnosis.advice import NEXT, communication_next
from rankscope.analysis.traces.diagnosis.evidence import Evidence, Finding
from rankscope.analysis.traces.summaries.records import ComputeSummary

# Matrix cores do at least eight times what the plain units do in FP32 (A100: 156 against 19.5 TFLOP/s with TF32).
_PLAIN_MATRIX_SAVING = 7 / 8
# A chain of elementwise kernels reads and writes everything each time; fused, it does so once. Half is a modest guess.
_FUSING_SAVING = 1 / 2
# Kernels shorter than this cannot be launched one by one fast enough.
_SHORT_KERNEL_US = 10.0


def _communication(evidence: Evidence) -> Iterator[Finding]:
    saving, ratio = evidence.lost("communication")
    words = f"{quantity(saving, 'us')} a step of communication runs while nothing computes"
    numbers = {"exposed_communication_us": saving}
    overlap = evidence.typical(lambda rank: rank.overlap_ratio)
    if overlap is not None:
        words += f"; {quantity(overlap, 'ratio')} of all communication is hidden under computation"
        numbers["overlap_ratio"] = overlap
    if evidence.wait_ratio:
        words += "; waiting for other ranks is not counted here"
    yield Finding(
        kind="exposed_communication",
        bound="communication",
        title="communication that nothing hides",
        saving_us=saving,
        saving_ratio=ratio,
        evidence=words,
        suggestion=communication_next(evidence.ranks),
        numbers=numbers,
    )


def _bubble(evidence: Evidence) -> Iterator[Finding]:
    """A part of the exposed communication that has a reason, and a remedy, of its own."""
    ratio = evidence.typical(lambda rank: rank.bubble.measured_ratio if rank.bubble else None)
    if ratio is None:
        return
    expected = evidence.typical(lambda rank: rank.bubble.theoretical_ratio if rank.bubble else None)
    words = f"stages wait {quantity(ratio * evidence.step_us, 'us')} a step for their neighbours"
    numbers = {"bubble_ratio": ratio}
    if expected is not None:
        words += f", {quantity(ratio, 'ratio')} of it; the schedule alone costs {quantity(expected, 'ratio')}"
        numbers["theoretical_bubble_ratio"] = expected
    yield Finding(
        kind="pipeline_bubble",
        bound="communication",
        title="pipeline stages waiting for each other",
        saving_us=ratio * evidence.step_us,
        saving_ratio=ratio,
        evidence=words,
        suggestion=NEXT["pipeline_bubble"],
        numbers=numbers,
    )


def _input(evidence: Evidence) -> Iterator[Finding]:
    saving, ratio = evidence.lost("input")
    yield Finding(
        kind="input_wait",
        bound="input",
        title="waiting for the next batch",
        saving_us=saving,
        saving_ratio=ratio,
        evidence=f"nothing runs for {quantity(saving, 'us')} a step while the host waits in the data loader",
        suggestion=NEXT["input_wait"],
        numbers={"input_wait_us": saving},
    )


def _launches(evidence: Evidence) -> Iterator[Finding]:
    saving, ratio = evidence.lost("host")
    launches = evidence.per_step(lambda rank: rank.launch.count if rank.launch else None)
    kernel_us = evidence.typical(lambda rank: rank.compute_mix.kernel_median_us if rank.compute_mix else None)
    words = f"nothing runs for {quantity(saving, 'us')} a step while the host has not launched what comes next"
    numbers = {"host_bound_us": saving}
    if launches is not None:
        words += f"; {launches:,.0f} launches a step"
        numbers["launches_per_step"] = launches
    if kernel_us is not None:
        words += f", median kernel {quantity(kernel_us, 'us')}"
        numbers["kernel_median_us"] = kernel_us
    short = kernel_us is not None and kernel_us < _SHORT_KERNEL_US
    yield Finding(
        kind="launch_gaps",
        bound="host",
        title="the host launching work too late",
        saving_us=saving,
        saving_ratio=ratio,
        evidence=words,
        suggestion=NEXT["short_kernels" if short else "launch_gaps"],
        numbers=numbers,
    )


def _synchronisation(evidence: Evidence) -> Iterator[Finding]:
    saving, ratio = evidence.lost("synchronisation")
    yield Finding(
        kind="synchronisation",
        bound="host",
        title="the host waiting for the device",
        saving_us=saving,
        saving_ratio=ratio,
        evidence=f"the device runs dry for {quantity(saving, 'us')} a step: the host had waited for it and launched "
        "nothing meanwhile",
        suggestion=NEXT["synchronisation"],
        numbers={"synchronisation_us": saving},
    )


def _copies(evidence: Evidence) -> Iterator[Finding]:
    saving, ratio = evidence.lost("memory_copies")
    total = evidence.per_step(lambda rank: rank.memory_copy_us) or 0.0
    yield Finding(
        kind="memory_copies",
        bound="memory",
        title="memory copies that nothing hides",
        saving_us=saving,
        saving_ratio=ratio,
        evidence=f"copies take {quantity(total, 'us')} a step, {quantity(saving, 'us')} of it while no kernel runs",
        suggestion=NEXT["memory_copies"],
        numbers={"memory_copy_us": total, "exposed_memory_copy_us": saving},
    )


def _plain_matrices(evidence: Evidence) -> Iterator[Finding]:
    share = _of_compute(evidence, lambda compute: compute.plain_matrix_ratio)
    spent = share * evidence.step_us
    yield Finding(
        kind="no_tensor_cores",
        bound="compute",
        title="matrix products without tensor cores",
        saving_us=spent * _PLAIN_MATRIX_SAVING,
        saving_ratio=share * _PLAIN_MATRIX_SAVING,
        evidence=f"{quantity(spent, 'us')} a step of matrix products run on the plain FP32 units",
        suggestion=NEXT["no_tensor_cores"],
        numbers={"plain_matrix_us": spent},
    )


def _fusing(evidence: Evidence) -> Iterator[Finding]:
    share = _of_compute(evidence, lambda compute: compute.unfused_ratio)
    spent = share * evidence.step_us
    yield Finding(
        kind="unfused_kernels",
        bound="memory",
        title="kernels that only move data",
        saving_us=spent * _FUSING_SAVING,
        saving_ratio=share * _FUSING_SAVING,
        evidence=f"elementwise, copying, normalising and reducing kernels take {quantity(spent, 'us')} a step; memory "
        "bandwidth bounds them, not arithmetic. Half of it is counted as the saving",
        suggestion=NEXT["unfused_kernels"],
        numbers={"unfused_us": spent},
    )


def _allocations(evidence: Evidence) -> Iterator[Finding]:
    calls = evidence.per_step(lambda rank: rank.memory.allocator_calls) or 0.0
    spent = evidence.per_step(lambda rank: rank.memory.allocator_us) or 0.0
    yield Finding(
        kind="allocator",
        bound="memory",
        title="allocating device memory during the step",
        saving_us=spent,
        saving_ratio=spent / evidence.step_us,
        evidence=f"{count(round(calls), 'call')} a step to allocate or free device memory take the host "
        f"{quantity(spent, 'us')}, and each waits for the device",
        suggestion=NEXT["allocator"],
        numbers={"allocator_calls_per_step": calls, "allocator_us": spent},
    )


def _of_compute(evidence: Evidence, ratio: Callable[[ComputeSummary], float]) -> float:
    """A share of computation as a share of the span."""
    return evidence.typical(lambda r: ratio(r.compute_mix) * r.compute_us / r.span_us if r.compute_mix else None) or 0.0


# Every way of losing time that is looked for. What each costs decides the order of the findings, not the order here.
RULES: tuple[Callable[[Evidence], Iterator[Finding]], ...] = (
    _communication,
    _bubble,
    _input,
    _launches,
    _synchronisation,
    _copies,
    _plain_matrices,
    _fusing,
    _allocations,
)
