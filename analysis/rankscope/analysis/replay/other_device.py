"""The step on another GPU, by roofline: FLOP/s or memory bandwidth limit a kernel, and it takes longer or shorter as
those of the other GPU are. The host, communication and copies from and to the host stay as they are."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

from rankscope.analysis.models.device_peaks import DTYPES, DeviceSpec, PeakError, find_peak
from rankscope.analysis.models.mfu import step_mfu_ratio
from rankscope.analysis.quantities import number
from rankscope.analysis.replay.changes import Change
from rankscope.analysis.replay.edits import Ranks, Traced
from rankscope.analysis.replay.graph import WITHIN_DEVICE, Graph
from rankscope.analysis.replay.kernel_work import KernelWork, kernel_work
from rankscope.analysis.replay.prediction import Forecast, Job, predict, replay_as_is
from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.traces.kernels import KernelClasses, Kind, classify, classify_kernels, names_like
from rankscope.analysis.traces.summary import device_name
from rankscope.analysis.traces.trace import Category, Trace

# Of every kernel, what does not depend on rates: its start, and its last block. On an H200 the shortest take 1 to 2 µs.
LATENCY_NS = 2_000
# A kernel that reaches less of both peaks is limited by neither: too little work for the device, or waiting for memory.
SMALL_RATIO = 0.2
# By how much the share of a peak that a kernel reaches may differ on another GPU. An assumption, not a measurement.
EFFICIENCY_RATIO = 0.15
_GB = 10**9
# The next format that a job would use on a device without the one that it uses.
_INSTEAD = {"fp4": "fp8", "fp8": "bf16", "bf16": "fp16", "fp16": "fp32", "tf32": "fp32", "int8": "fp16"}
# What lies in caches moves faster than memory, and devices clock higher than their sheets say.
_EXCESS_RATIO = 1.2


class Bound(IntEnum):
    COMPUTE = 0
    MEMORY = 1
    SMALL = 2  # by neither
    UNKNOWN = 3
    FIXED = 4  # communication, copies from and to the host


@dataclass(frozen=True)
class Rooflines:
    """One entry a piece of work of the graph. Factors are of its time on the other GPU."""

    bound: Ints
    factor: Floats
    low: Floats
    high: Floats
    work: KernelWork


@dataclass(frozen=True)
class MovedStep:
    """A step with changes, on both GPUs. None where a change does not apply."""

    changes: tuple[Change, ...]
    now_ns: float | None
    other_ns: float | None
    low_ns: float | None
    high_ns: float | None
    reason: str = ""

    @property
    def name(self) -> str:
        return "+".join(change.name for change in self.changes)


@dataclass(frozen=True)
class OtherDevice:
    as_is: Forecast
    now: tuple[DeviceSpec, ...]  # of the ranks, each once
    other: DeviceSpec
    gpus: int
    steps: tuple[MovedStep, ...]  # without changes first; none if the replay is too far off
    time_ratios: Mapping[Bound, float]  # of the time on the device
    number_format: str | None  # in which most FLOPs are done
    flops_per_step: float | None  # of one GPU; None if no shapes were recorded
    achieved_tflops: float | None  # of kernels whose FLOPs are known, in that format
    achieved_gb_per_second: float | None  # of kernels limited by memory whose bytes are known
    peak_memory_bytes: int | None  # allocated, of the rank with most; None if the traces have no memory events
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool | None:
        return None if self.peak_memory_bytes is None else self.peak_memory_bytes <= self.other.memory_gb * _GB

    def mfu_ratio(self, step_ns: float | None, device: DeviceSpec) -> float | None:
        """FLOPs of the step as a share of what the device could do in it."""
        tflops = None if self.number_format is None else _peak(device, self.number_format)[1]
        return step_mfu_ratio(self.flops_per_step, step_ns and step_ns * 1e-9, tflops and tflops * 1e12)


def predict_on(
    traces: Mapping[int, Trace],
    now: Mapping[int, DeviceSpec],
    other: DeviceSpec,
    changes: Sequence[Sequence[Change]] = (),
    true_step_ns: float | None = None,
) -> OtherDevice:
    """Traces, and the GPU of each, by rank. Each combination of changes is made first, then the job is moved. Raises
    ReplayError."""
    as_is, jobs = replay_as_is(traces, true_step_ns)
    # Host time as recorded where it is not known.
    jobs = jobs[:1]
    ranks = jobs[0].ranks if jobs else {}
    used = tuple({spec.name: spec for spec in now.values()}.values())
    gpus = max(len(traces), max((trace.world_size or 0 for trace in traces.values()), default=0))
    memory = _peak_memory(traces)
    rooflines = {rank: rooflines_of(one, now[rank], other) for rank, one in ranks.items()}
    ratios, flops, number_format = _time_ratios(ranks, rooflines), None, None
    tflops, gb_per_second = _achieved(ranks, rooflines)
    per_format = flops_per_step(ranks, {rank: one.work for rank, one in rooflines.items()})
    if per_format is not None:
        number_format = DTYPES[int(per_format.argmax())]
        flops = float(per_format.sum())
    achieved = None if number_format is None else tflops.get(number_format)
    moves = [_move(ranks, rooflines, side) for side in ("factor", "low", "high")]
    steps = [_moved(jobs, tuple(one), moves) for one in ((), *changes)] if jobs else []
    return OtherDevice(
        as_is=as_is,
        now=used,
        other=other,
        gpus=gpus,
        steps=tuple(steps),
        time_ratios=ratios,
        number_format=number_format,
        flops_per_step=flops,
        achieved_tflops=achieved,
        achieved_gb_per_second=gb_per_second,
        peak_memory_bytes=memory,
        notes=_notes(used, other, (tflops, gb_per_second), rooflines),
    )


def _moved(jobs: Sequence[Job], changes: tuple[Change, ...], moves: Sequence[Change]) -> MovedStep:
    here = predict(jobs, changes)
    if here.step_ns is None:
        return MovedStep(changes, None, None, None, None, here.reason)
    there = [predict(jobs, (*changes, move)).step_ns or 0.0 for move in moves]
    # Where the host sets the pace, slower kernels may move the ends of steps a little towards each other.
    return MovedStep(changes, here.step_ns, there[0], min(there), max(there))


def _move(ranks: Ranks, rooflines: Mapping[int, Rooflines], side: str) -> Change:
    """Changes before it may drop work, make it shorter, or let one rank work like another: factors belong to rows of a
    trace."""
    factors: dict[int, Floats] = {id(one.trace): getattr(rooflines[rank], side) for rank, one in ranks.items()}

    def apply(changed: Ranks) -> Ranks:
        return {rank: replace(one, graph=_scaled(one, factors[id(one.trace)])) for rank, one in changed.items()}

    return Change("on", "the job runs on another GPU", "", "", apply)


def _scaled(rank: Traced, factor: Floats) -> Graph:
    graph = rank.graph
    by_row = np.ones(len(rank.trace))
    by_row[_work_rows(rank.trace)] = factor
    return replace(graph, duration_ns=moved_ns(graph.duration_ns, by_row[graph.work_row]))


def moved_ns(duration_ns: Ints, factor: Floats) -> Ints:
    latency = np.minimum(duration_ns, LATENCY_NS)
    moved: Ints = (latency + (duration_ns - latency) * factor).astype(np.int64)
    return moved


def _work_rows(trace: Trace) -> Ints:
    return np.flatnonzero(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET))


def rooflines_of(rank: Traced, now: DeviceSpec, other: DeviceSpec) -> Rooflines:
    """Of all device work of the trace, in the order of its rows."""
    trace = rank.trace
    rows = _work_rows(trace)
    classes = classify_kernels(trace, rows)
    work = kernel_work(trace, rows, classes)
    compute_share, compute_ratio = _compute(trace.duration_ns[rows], work, now, other)
    # GB/s are bytes per nanosecond.
    memory_share = np.maximum(work.size_bytes, 0) / (np.maximum(trace.duration_ns[rows], 1) * now.gb_per_second)
    memory_ratio = np.full(len(rows), now.gb_per_second / other.gb_per_second)
    bound = _bounds(classes, compute_share, memory_share)
    bound[_stays(trace, rows)] = Bound.FIXED
    best = np.maximum(np.maximum(compute_share, memory_share), 1e-12)
    # What limits a kernel here may not be what limits it there.
    by_work = np.maximum(compute_share * compute_ratio, memory_share * memory_ratio) / best
    limit = np.where(classes.dense, compute_ratio, memory_ratio)
    limit = np.where(compute_share > 0, by_work, limit)
    is_small, is_unknown = bound == Bound.SMALL, bound == Bound.UNKNOWN
    first = np.where(is_unknown, compute_ratio, limit)
    second = np.where(is_unknown, memory_ratio, np.where(is_small, 1.0, limit))
    is_same = now.name == other.name
    spread = 0.0 if is_same else EFFICIENCY_RATIO
    fixed = bound == Bound.FIXED
    return Rooflines(
        bound=bound,
        factor=np.where(fixed, 1.0, np.sqrt(first * second)),
        low=np.where(fixed, 1.0, np.minimum(first, second) * (1 - spread)),
        high=np.where(fixed, 1.0, np.maximum(first, second) * (1 + spread)),
        work=work,
    )


def _bounds(classes: KernelClasses, compute_share: Floats, memory_share: Floats) -> Ints:
    best = np.maximum(compute_share, memory_share)
    bound = np.full(len(best), int(Bound.UNKNOWN))
    bound[best >= SMALL_RATIO] = Bound.MEMORY
    bound[classes.moving] = Bound.MEMORY
    bound[classes.dense] = Bound.COMPUTE
    has_flops = compute_share > 0
    bound[has_flops & (memory_share > compute_share)] = Bound.MEMORY
    bound[(has_flops | (classes.moving & (memory_share > 0))) & (best < SMALL_RATIO)] = Bound.SMALL
    return bound


def _compute(duration_ns: Ints, work: KernelWork, now: DeviceSpec, other: DeviceSpec) -> tuple[Floats, Floats]:
    """The share of the peak that each kernel reaches, 0 if its FLOPs are not known, and the ratio of both peaks."""
    here = np.array([_peak(now, one)[1] or math.nan for one in DTYPES])
    there = np.array([_peak(other, one)[1] or math.nan for one in DTYPES])
    ratio = here / there
    # Without a peak on either, as for double precision on devices for inference: by bandwidth.
    ratio[np.isnan(ratio)] = now.gb_per_second / other.gb_per_second
    per_ns = here[work.number_format] * 1000
    share = np.maximum(work.flops, 0) / (np.maximum(duration_ns, 1) * per_ns)
    return np.nan_to_num(share), ratio[work.number_format]


def _peak(device: DeviceSpec, number_format: str) -> tuple[str, float | None]:
    """The format that the device would compute in, and its TFLOP/s."""
    chosen: str | None = number_format
    while chosen is not None:
        tflops = device.tflops.get(chosen)
        if tflops is not None:
            return chosen, tflops
        chosen = _INSTEAD.get(chosen)
    return number_format, None


def _stays(trace: Trace, rows: Ints) -> Bools:
    kind = classify(trace)[rows]
    on_device = names_like(trace, WITHIN_DEVICE)[trace.name[rows]]
    stays: Bools = (kind == Kind.COMMUNICATION) | ((kind == Kind.MEMORY) & ~on_device)
    return stays


def _in_steps(rank: Traced) -> tuple[Bools, int]:
    """Per device work of the trace, whether a step that is replayed launched it; and the number of these steps."""
    first, last = rank.graph.step_range
    inside = np.zeros(len(rank.trace), dtype=bool)
    graph = rank.graph
    inside[graph.work_row[(graph.work_step >= first) & (graph.work_step <= last)]] = True
    return inside[_work_rows(rank.trace)], last - first + 1


def _time_ratios(ranks: Ranks, rooflines: Mapping[int, Rooflines]) -> dict[Bound, float]:
    totals = np.zeros(len(Bound))
    for rank, one in ranks.items():
        inside, _ = _in_steps(one)
        duration = one.trace.duration_ns[_work_rows(one.trace)][inside]
        totals += np.bincount(rooflines[rank].bound[inside], duration.astype(np.float64), len(Bound))
    whole = float(totals.sum())
    return {bound: float(totals[bound]) / whole if whole > 0 else 0.0 for bound in Bound}


def flops_per_step(ranks: Ranks, works: Mapping[int, KernelWork]) -> Floats | None:
    """By number format, the mean of the ranks. An operator counts once, however many kernels it launches."""
    totals = np.zeros(len(DTYPES))
    for rank, one in ranks.items():
        inside, steps = _in_steps(one)
        work = works[rank]
        owned = np.flatnonzero(inside & (work.operator >= 0))
        operator, first = np.unique(work.operator[owned], return_index=True)
        flops = np.maximum(one.trace.operators.flops[operator], 0).astype(np.float64) if len(operator) else np.zeros(0)
        totals += np.bincount(work.number_format[owned[first]], flops, len(DTYPES)) / steps
    return totals / len(ranks) if totals.any() else None


def mfu_of(ranks: Ranks, step_ns: float) -> float | None:
    """FLOPs of a step as a share of the device's peak in 16 bits, whatever the job computes in; None if the shapes were
    not recorded, or the device is not known."""
    try:
        peaks = [find_peak(device_name(one.trace)).flops_per_second for one in ranks.values()]
    except PeakError:
        return None
    works = {}
    for rank, one in ranks.items():
        rows = _work_rows(one.trace)
        works[rank] = kernel_work(one.trace, rows, classify_kernels(one.trace, rows))
    flops = flops_per_step(ranks, works)
    return None if flops is None or step_ns <= 0 else float(flops.sum()) / (step_ns / 1e9 * float(np.mean(peaks)))


def _achieved(ranks: Ranks, rooflines: Mapping[int, Rooflines]) -> tuple[dict[str, float], float | None]:
    """TFLOP/s by number format; and GB/s of what memory limits."""
    flops, flops_ns = np.zeros(len(DTYPES)), np.zeros(len(DTYPES))
    moved, moved_time = 0.0, 0.0
    for rank, one in ranks.items():
        inside, _ = _in_steps(one)
        duration = one.trace.duration_ns[_work_rows(one.trace)].astype(np.float64)
        work, bound = rooflines[rank].work, rooflines[rank].bound
        dense = inside & (work.flops > 0)
        flops += np.bincount(work.number_format[dense], work.flops[dense].astype(np.float64), len(DTYPES))
        flops_ns += np.bincount(work.number_format[dense], duration[dense], len(DTYPES))
        moving = inside & (bound == Bound.MEMORY) & (work.size_bytes > 0)
        moved += float(work.size_bytes[moving].astype(np.float64).sum())
        moved_time += float(duration[moving].sum())
    tflops = {
        name: float(flops[number] / flops_ns[number] / 1000)
        for number, name in enumerate(DTYPES)
        if flops_ns[number] > 0
    }
    return tflops, moved / moved_time if moved_time > 0 else None


def _peak_memory(traces: Mapping[int, Trace]) -> int | None:
    peaks = [
        int(allocated.max())
        for trace in traces.values()
        if len(allocated := trace.memory.allocated_bytes[trace.memory.on_device]) and int(allocated.max()) > 0
    ]
    return max(peaks, default=None)


def _notes(
    now: Sequence[DeviceSpec],
    other: DeviceSpec,
    achieved: tuple[dict[str, float], float | None],
    rooflines: Mapping[int, Rooflines],
) -> tuple[str, ...]:
    notes = [spec.note for spec in (*now, other) if spec.note]
    works = [each.work for each in rooflines.values()]
    used = {DTYPES[one] for work in works for one in np.unique(work.number_format[work.flops > 0]).tolist()}
    for one in sorted(used):
        instead, tflops = _peak(other, one)
        if tflops is None:
            notes.append(f"{other.name} has no published {one} peak; kernels in {one} are scaled by bandwidth")
        elif instead != one:
            notes.append(f"{other.name} has no {one}; its {instead} peak is used")
    per_format, gb_per_second = achieved
    rates = [
        (f"{one} TFLOP/s", rate, max(_peak(spec, one)[1] or 0.0 for spec in now)) for one, rate in per_format.items()
    ]
    rates.append(("GB/s", gb_per_second or 0.0, max(spec.gb_per_second for spec in now)))
    for unit, rate, most in rates:
        if rate > _EXCESS_RATIO * most > 0:
            doubt = "is that the GPU of the traces (--from)?"
            notes.append(f"kernels reach {number(rate)} {unit}, above the {number(most)} of {now[0].name}: {doubt}")
    return tuple(dict.fromkeys(notes))
