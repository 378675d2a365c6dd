"""What to change about a job: predictions in order of their gain, each with its evidence and the lines of the program,
what is in use already, and the answers to the usual questions about slow training."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.quantities import quantity
from rankscope.analysis.replay.changes import Change
from rankscope.analysis.replay.edits import Ranks, host_ns
from rankscope.analysis.replay.graph import Graph, ReplayError
from rankscope.analysis.replay.kernel_work import in_formats
from rankscope.analysis.replay.other_device import mfu_of
from rankscope.analysis.replay.prediction import MIN_GAIN_RATIO, Forecast, Prediction, StepCosts, forecast
from rankscope.analysis.replay.replay import Times
from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.traces.diagnosis import Diagnosis
from rankscope.analysis.traces.diagnosis_rules import Finding
from rankscope.analysis.traces.kernels import Kind, classify, classify_kernels
from rankscope.analysis.traces.source_lines import heaviest_lines
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.traces.trace import Category, Trace
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY

# Findings of a diagnosis that a change removes. The others are listed with what they cost at most.
_REMOVES = {
    "input": ("input_wait",),
    "graph": ("launch_gaps",),
    "bf16": ("no_tensor_cores",),
    "tf32": ("no_tensor_cores",),
    "compile": ("unfused_kernels",),
    "overlap": ("exposed_communication",),
    "link": ("exposed_communication",),
    "even": ("slow_rank", "waiting_for_ranks", "data_imbalance"),
}
MAX_LINES = 3
# Of the peak in 16 bits. Well-tuned training of large models reaches 0.4 to 0.6.
LOW_MFU_RATIO = 0.3
_MOSTLY_RATIO = 0.5
# Memory that is used to this share of the device leaves no room for a larger batch.
_FULL_RATIO = 0.9
_HALF = ("bf16", "fp16", "fp8", "fp4", "int8")
_GRAPH_LAUNCH = re.compile(r"(cuda|hip)GraphLaunch")
_COMPILED = re.compile(r"triton_|Torch-Compiled Region|CompiledFunction")
_FUSED_OPTIMIZER = re.compile(r"Fused(Adam|SGD|Adagrad)|fused_(adam|sgd|lamb)|multi_tensor_(adam|lamb)", re.IGNORECASE)
_FLASH_ATTENTION = re.compile(r"flash|fmha|sdpa", re.IGNORECASE)
_PINNED = re.compile(r"Memcpy HtoD \(Pinned")


@dataclass(frozen=True)
class Advised:
    prediction: Prediction
    evidence: tuple[str, ...]
    lines: tuple[Frame, ...]  # of the program, most affected first; empty without Python stacks


@dataclass(frozen=True)
class Check:
    question: str
    answer: bool | None  # None: not recorded
    evidence: str


@dataclass(frozen=True)
class Advice:
    forecast: Forecast | None  # None if the traces cannot be replayed
    reason: str  # why nothing is predicted; empty if something is
    advised: tuple[Advised, ...]  # largest gain first
    others: tuple[Prediction, ...]  # that would change the training
    losses: tuple[Finding, ...]  # that no predicted change is about; their savings are upper bounds
    in_use: tuple[str, ...]
    checks: tuple[Check, ...]


def advise(
    traces: Mapping[int, Trace],
    ranks: Sequence[RankSummary],
    diagnosis: Diagnosis,
    true_step_ns: float | None = None,
) -> Advice:
    """Traces by rank; their summaries and diagnosis. `true_step_ns` as for `forecast`."""
    lines = _Lines()
    found, reason = None, ""
    try:
        found = forecast(traces, None, true_step_ns, lines)
        if not found.is_usable:
            reason = f"the replay differs from the recording by {abs(found.error_ratio) * 100:.1f} %"
    except ReplayError as error:
        reason = str(error)
    chosen = found.worthwhile if found is not None else ()
    predicted = [one for one in found.predictions if one.gain_ratio is not None] if found is not None else []
    kinds = {kind for one in predicted for change in one.changes for kind in _REMOVES.get(change.name, ())}
    return Advice(
        forecast=found,
        reason=reason,
        advised=tuple(
            Advised(_fitting(one, diagnosis), _evidence(one, found.costs, diagnosis), lines.of(one))
            for one in chosen
            if found is not None
        ),
        others=tuple(one for one in predicted if one.alters_training and one.gain >= MIN_GAIN_RATIO),
        losses=tuple(finding for finding in diagnosis.findings if finding.kind not in kinds),
        in_use=_in_use(traces[min(traces)]),
        checks=_checks(ranks, diagnosis, mfu_of(lines.ranks, found.step_ns) if found else None),
    )


def _fitting(prediction: Prediction, diagnosis: Diagnosis) -> Prediction:
    """Remedies for communication are about gradients. If it is of another kind, those of the diagnosis replace them."""
    finding = next((one for one in diagnosis.findings if one.kind == "exposed_communication"), None)
    if finding is None or finding.largest_kind in ("data", "unknown"):
        return prediction
    changes = tuple(
        replace(change, remedy=finding.suggestion, costs="another layout or schedule of the job")
        if finding.kind in _REMOVES.get(change.name, ())
        else change
        for change in prediction.changes
    )
    return replace(prediction, changes=changes)


class _Lines:
    """Called with each replay. Finds the lines of the program whose work a change shortens, on the first rank."""

    def __init__(self) -> None:
        self.ranks: Ranks = {}  # of the job as it is
        self._found: dict[str, tuple[Frame, ...]] = {}

    def of(self, prediction: Prediction) -> tuple[Frame, ...]:
        return self._found.get(prediction.name, ())

    def __call__(self, changes: tuple[Change, ...], ranks: Ranks, times: Mapping[int, Times]) -> None:
        first = ranks[min(ranks)]
        if not changes:
            self.ranks = ranks
            return
        if len(changes) != 1 or not first.trace.of(Category.PYTHON).any():
            return
        rows, saved = _saved(self.ranks[min(self.ranks)].graph, first.graph)
        frames = heaviest_lines(first.trace, rows, saved, MAX_LINES)
        self._found[changes[0].name] = tuple(frames)


def _saved(before: Graph, after: Graph) -> tuple[Ints, Floats]:
    """Rows of work, or of calls if the host saves more, and the time that each saves."""
    size = int(max(before.work_row.max(initial=0), before.call_row.max(initial=0))) + 1
    sums = [
        np.bincount(rows[rows >= 0], np.maximum(time_ns, 0)[rows >= 0], size)
        for rows, time_ns in (
            (before.work_row, before.duration_ns),
            (after.work_row, after.duration_ns),
            (before.call_row, host_ns(before)),
            (after.call_row, host_ns(after)),
        )
    ]
    device, host = np.maximum(sums[0] - sums[1], 0), np.maximum(sums[2] - sums[3], 0)
    most = device if device.sum() >= host.sum() else host
    rows = np.flatnonzero(most)
    return rows, most[rows]


def _evidence(prediction: Prediction, before: StepCosts, diagnosis: Diagnosis) -> tuple[str, ...]:
    kinds = {kind for change in prediction.changes for kind in _REMOVES.get(change.name, ())}
    # What follows the first sentence is about how a diagnosis counts.
    said = [finding.evidence.partition(". ")[0] for finding in diagnosis.findings if finding.kind in kinds]
    after = prediction.costs
    if after is not None:
        parts = [("kernels", f"{before.kernels:,.0f}", f"{after.kernels:,.0f}")]
        parts += [
            (what, quantity(old / 1000, "us"), quantity(new / 1000, "us"))
            for what, old, new in (
                ("the host", before.host_ns, after.host_ns),
                ("computation", before.device_ns, after.device_ns),
                ("communication", before.communication_ns, after.communication_ns),
                ("input", before.input_ns, after.input_ns),
            )
        ]
        changed = [f"{what} {old} → {new}" for what, old, new in parts if old != new]
        if changed:
            said.append("in a step: " + ", ".join(changed))
    return tuple(said)


def _in_use(trace: Trace) -> tuple[str, ...]:
    """Of the remedies that there are, those that the trace shows."""
    rows = np.flatnonzero(classify(trace) == Kind.COMPUTE)
    classes = classify_kernels(trace, rows)
    kernels = {trace.names[name] for name in np.unique(trace.name[rows]).tolist()}
    copies = {trace.names[name] for name in np.unique(trace.name[trace.of(Category.MEMCPY)]).tolist()}
    on_host = trace.of(Category.RUNTIME, Category.DRIVER, Category.CPU_OP, Category.USER_ANNOTATION)
    calls = {trace.names[name] for name in np.unique(trace.name[on_host]).tolist()}

    def any_like(names: set[str], pattern: re.Pattern[str]) -> bool:
        return any(pattern.search(name) for name in names)

    def mostly(which: Bools) -> bool:
        dense = float(trace.duration_ns[rows[classes.dense]].sum())
        return dense > 0 and float(trace.duration_ns[rows[which]].sum()) > dense / 2

    found = {
        "matrix products in 16 bits or fewer": mostly(in_formats(trace, rows, classes, *_HALF)),
        "TF32": mostly(in_formats(trace, rows, classes, "tf32")),
        "fused attention": any_like(kernels, _FLASH_ATTENTION),
        "a fused optimizer": any_like(kernels, _FUSED_OPTIMIZER),
        "torch.compile": any_like(kernels | calls, _COMPILED),
        "CUDA graphs": any_like(calls, _GRAPH_LAUNCH),
        "pinned memory": any_like(copies, _PINNED),
    }
    return tuple(what for what, is_used in found.items() if is_used)


def _checks(ranks: Sequence[RankSummary], diagnosis: Diagnosis, mfu_ratio: float | None) -> tuple[Check, ...]:
    shares = diagnosis.shares
    if not shares:
        return ()
    times = (
        _share("exposed communication", shares["communication"], "no computation hides it"),
        _share("slow input", shares["input"], "nothing runs until the next batch"),
    )
    if all(one.on_host for one in ranks):
        return times
    return (_utilisation(ranks, shares["compute"] + shares["memory_kernels"], mfu_ratio), *times, _memory(ranks))


def _utilisation(ranks: Sequence[RankSummary], busy: float, mfu_ratio: float | None) -> Check:
    known = [one.tensor_core_ratio for one in ranks if one.tensor_core_ratio is not None]
    tensor = float(np.median(known)) if known else None
    said = f"kernels compute {quantity(busy, 'ratio')} of the time"
    if tensor is not None:
        said += f", {quantity(tensor, 'ratio')} of it on tensor cores"
    if mfu_ratio is None:
        is_low = busy * (1.0 if tensor is None else tensor) < _MOSTLY_RATIO
        return Check("low MFU", is_low, f"{said}; FLOPs were not recorded (record_shapes=True)")
    return Check("low MFU", mfu_ratio < LOW_MFU_RATIO, f"{quantity(mfu_ratio, 'ratio')} of the peak in 16 bits; {said}")


def _share(question: str, ratio: float, what: str) -> Check:
    return Check(question, ratio >= DEFAULT_POLICY.impact_ratio, f"{quantity(ratio, 'ratio')} of the time, {what}")


def _memory(ranks: Sequence[RankSummary]) -> Check:
    question = "memory pressure"
    calls = max(one.memory.allocator_calls / max(len(one.steps), 1) for one in ranks)
    used = [
        one.memory.peak_reserved_bytes / one.memory.device_bytes
        for one in ranks
        if one.memory.peak_reserved_bytes is not None and one.memory.device_bytes
    ]
    said = f"{calls:,.0f} calls a step to allocate or free device memory"
    if not used:
        hint = "how much is used was not recorded (profile_memory=True)"
        return Check(question, True if calls >= 1 else None, f"{said}; {hint}")
    full = max(used)
    return Check(
        question, calls >= 1 or full >= _FULL_RATIO, f"{said}; at most {quantity(full, 'ratio')} of the device is used"
    )
