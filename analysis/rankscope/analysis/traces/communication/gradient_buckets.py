"""DDP's gradient buckets: the all-reduces that the backward pass starts as gradients become ready, and what another
`bucket_cap_mb` would change.

The prediction puts the same gradients, ready at the same times, into other buckets and sends them one after the
other over a link with the latency and bandwidth fitted to the trace. It ignores that communication slows concurrent
kernels and that other ranks may be late. Therefore it is used only if it reproduces the current buckets."""

from __future__ import annotations

import heapq
import re
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import Fit, Observations, fit_collectives
from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.traces.communication.collectives import (
    Collectives,
    calls_of_reductions,
    compute_intervals,
    gradient_hooks,
)
from rankscope.analysis.traces.intervals import Intervals, clip, covered_until, total, union
from rankscope.analysis.traces.kernels import Kind, classify, names_like
from rankscope.analysis.traces.steps import BACKWARD, NO_STEP, Steps, find_steps, launch_rows
from rankscope.analysis.traces.trace import ABSENT, Category, Trace, take_or_absent
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY

# DDP starts a bucket from the hook of the gradient that completes it; an all-reduce of tensor parallelism is started
# from the backward of its own function.
_ACCUMULATES = re.compile(r"torch::autograd::AccumulateGrad")
MEBIBYTE = 1 << 20
CAPS_MB = (1, 5, 10, 25, 50, 100, 200, 400)
DEFAULT_CAP_MB = 25
# The maximum error of the model, as a share of the exposed time or (if little is exposed) of the communication time.
TOLERANCE_EXPOSED = 0.15
TOLERANCE_COMMUNICATION = 0.05
# The minimum gain for a recommendation.
SURE_ERRORS = 2.0
WORTHWHILE_EXPOSED = 0.05


@dataclass(frozen=True)
class Buckets:
    """One row per bucket, in the order in which the backward pass started them."""

    collective: Ints  # row of Collectives
    step: Ints  # position in steps
    order: Ints  # 0, 1, … within its step
    bytes: Ints  # -1 if unknown
    started_ns: Ints
    duration_ns: Ints
    exposed_ns: Ints
    called_ns: Ints  # when the host called the all-reduce
    ready_ns: Ints  # when its last gradient was computed
    measured: Bools
    gradient_bucket: Ints  # one row per gradient, in order: the bucket that holds it
    gradient_called_ns: Ints  # when the host ran its hook
    gradient_bytes: Ints  # -1 if the shapes were not recorded
    gradient_ready_ns: Ints
    steps: Steps
    backward_began_ns: Ints  # per step: when its forward pass was computed

    def __len__(self) -> int:
        return len(self.collective)

    @property
    def hidden_ratio(self) -> Floats:
        """The share of the bucket's time covered by computation; NaN if not measured."""
        known = self.measured & (self.duration_ns > 0)
        return np.where(known, 1 - self.exposed_ns / np.where(known, self.duration_ns, 1), np.nan)


@dataclass(frozen=True)
class CapPrediction:
    cap_mb: int
    buckets: int  # per step
    exposed_ns: float  # per step


@dataclass(frozen=True)
class Rebucketing:
    """Medians over steps. Without predictions, `reason` explains why."""

    buckets: int
    cap_mb: int | None  # inferred from bucket sizes; None if they are inconclusive
    exposed_ns: float
    communication_ns: float
    step_ns: float
    modelled_exposed_ns: float | None = None  # of the current buckets
    error_ns: float | None = None
    predictions: tuple[CapPrediction, ...] = ()
    recommended_cap_mb: int | None = None
    gain_ns: float | None = None
    reason: str = ""
    advice: str = ""


def find_buckets(trace: Trace, collectives: Collectives) -> Buckets:
    """Empty if the trace shows no DDP. Buckets outside of all steps (a trace may begin inside one) are ignored."""
    steps = find_steps(trace)
    reductions = np.flatnonzero(collectives.kind == CollectiveKind.ALL_REDUCE)
    call_row = calls_of_reductions(trace, collectives, reductions)
    hooks = gradient_hooks(trace)
    called = trace.start_ns[call_row]
    found = (hooks.around(call_row, called) >= 0) & (call_row >= 0)
    step = np.where(found, steps.at(called), NO_STEP)
    chosen = np.flatnonzero(step != NO_STEP)
    chosen = chosen[np.argsort(called[chosen], kind="stable")]
    rows, called, step = reductions[chosen], called[chosen], step[chosen]
    first = np.searchsorted(step, step, side="left")
    hooked = np.sort(hooks.start_ns)
    # A gradient belongs to the next bucket of its step.
    bucket = np.searchsorted(called, hooked, side="left")
    held = (bucket < len(called)) & (
        steps.at(hooked) == take_or_absent(step, np.where(bucket < len(called), bucket, ABSENT))
    )
    held &= steps.at(hooked) != NO_STEP
    return Buckets(
        collective=rows,
        step=step,
        order=np.arange(len(step)) - first,
        bytes=collectives.bytes[rows],
        started_ns=collectives.start_ns[rows],
        duration_ns=collectives.duration_ns[rows],
        exposed_ns=collectives.exposed_ns[rows],
        called_ns=called,
        ready_ns=computed_until(trace, called),
        measured=collectives.measured[rows],
        gradient_bucket=bucket[held],
        gradient_called_ns=hooked[held],
        gradient_bytes=_gradient_bytes(trace, hooked)[held],
        gradient_ready_ns=computed_until(trace, hooked[held]),
        steps=steps,
        backward_began_ns=_backward_began(trace, steps),
    )


def predict_other_caps(trace: Trace, buckets: Buckets) -> Rebucketing | None:
    """None if there are no buckets."""
    if not len(buckets):
        return None
    everywhere = compute_intervals(trace)
    steps = gradients_of_steps(buckets)
    computing = [_computing(buckets, step, everywhere) for step in steps]
    everything = np.concatenate([step.buckets for step in steps])
    measured = np.array(
        [_uncovered(_transfers(buckets, step), part) for step, part in zip(steps, computing, strict=True)], dtype=float
    )
    now = _current_buckets(buckets, steps, float(np.median(measured)))
    if not buckets.measured[everything].all():
        return replace(now, reason="the trace has the calls but not the transfers")
    if np.any(buckets.bytes[everything] <= 0):
        return replace(now, reason="the trace has no bucket sizes")
    fit = _fit(buckets)
    if not fit.is_fitted:
        return replace(now, reason=f"latency and bandwidth are unknown: {fit.reason}")
    lanes = max(_lanes(buckets, step.buckets) for step in steps)
    modelled = np.array(
        [
            _exposed(step.bucket_ready_ns, step.bucket_bytes, fit, lanes, part)
            for step, part in zip(steps, computing, strict=True)
        ]
    )
    error = float(np.median(np.abs(modelled - measured)))
    now = replace(now, modelled_exposed_ns=float(np.median(modelled)), error_ns=error)
    allowed = max(TOLERANCE_EXPOSED * now.exposed_ns, TOLERANCE_COMMUNICATION * now.communication_ns)
    if error > allowed:
        return replace(
            now,
            reason=f"the model is off by {error / 1e6:.2f} ms of {now.exposed_ns / 1e6:.2f} ms exposed; "
            f"the limit is {allowed / 1e6:.2f} ms",
        )
    predictions = tuple(_predict(cap, steps, computing, fit, lanes) for cap in CAPS_MB)
    return _recommend(replace(now, predictions=predictions))


def computed_until(trace: Trace, moments_ns: Ints) -> Ints:
    """When everything that the host had launched by each moment was computed: an event recorded then would complete
    there. In a trace without kernels, the moment itself."""
    launches = launch_rows(trace)
    kernels = np.flatnonzero((classify(trace) == Kind.COMPUTE) & (launches != ABSENT))
    if not len(kernels):
        return moments_ns
    order = np.argsort(trace.start_ns[launches[kernels]], kind="stable")
    launched = trace.start_ns[launches[kernels[order]]]
    finished = np.maximum.accumulate(trace.end_ns[kernels[order]])
    last = np.searchsorted(launched, moments_ns, side="right") - 1
    done: Ints = np.where(last >= 0, finished[np.maximum(last, 0)], moments_ns)
    return np.maximum(moments_ns, done)


def _gradient_bytes(trace: Trace, hooked_ns: Ints) -> Ints:
    """Of the gradient that each hook accumulates: an operator within it has its shape."""
    work = trace.operators
    rows = np.flatnonzero(names_like(trace, _ACCUMULATES)[trace.name[work.row]]) if len(work.row) else work.row
    started = trace.start_ns[work.row[rows]]
    first = np.searchsorted(started, hooked_ns, side="left")
    inside = first < len(rows)
    found = np.where(inside, rows[np.minimum(first, len(rows) - 1)] if len(rows) else ABSENT, ABSENT)
    # Another hook may have begun before.
    following = np.append(hooked_ns[1:], np.iinfo(np.int64).max)
    found[inside] = np.where(started[first[inside]] < following[inside], found[inside], ABSENT)
    return take_or_absent(work.size_bytes, found)


def _backward_began(trace: Trace, steps: Steps) -> Ints:
    """When each step's forward pass was computed; the step's start if there is no backward pass."""
    started = trace.start_ns[trace.of(Category.CPU_OP) & names_like(trace, BACKWARD)[trace.name]]
    first = np.searchsorted(started, steps.start_ns, side="left")
    moment = take_or_absent(started, np.where(first < len(started), first, ABSENT))
    within = (moment >= 0) & (moment < steps.end_ns)
    return computed_until(trace, np.where(within, moment, steps.start_ns))


@dataclass(frozen=True)
class Gradients:
    """One step's buckets, and its gradients: the pieces that a cap cannot split. A bucket without known gradients is
    one piece."""

    number: int  # of the step
    buckets: Ints  # rows of Buckets
    bucket_ready_ns: Floats
    bucket_bytes: Floats
    called_ns: Ints  # one entry a gradient, in order
    ready_ns: Floats
    bytes: Floats  # of its shape; if shapes were not recorded, by the time that it took to compute
    bucket: Ints  # position in `buckets`


def gradients_of_steps(buckets: Buckets) -> list[Gradients]:
    """Without steps that the trace cut, which have fewer buckets."""
    chosen = [np.flatnonzero(buckets.step == step) for step in np.unique(buckets.step)]
    most = max((len(rows) for rows in chosen), default=0)
    return [_gradients(buckets, rows) for rows in chosen if len(rows) == most]


def _gradients(buckets: Buckets, rows: Ints) -> Gradients:
    ready = np.maximum.accumulate(buckets.ready_ns[rows])
    mine = np.isin(buckets.gradient_bucket, rows)
    holder = np.searchsorted(rows, buckets.gradient_bucket[mine])
    piece_ready = np.minimum(buckets.gradient_ready_ns[mine], ready[holder])
    unseen = np.setdiff1d(np.arange(len(rows)), holder)
    holder = np.concatenate([holder, unseen])
    piece_ready = np.concatenate([piece_ready, ready[unseen]])
    called = np.concatenate([buckets.gradient_called_ns[mine], buckets.called_ns[rows[unseen]]])
    order = np.lexsort((piece_ready, holder))
    holder, piece_ready = holder[order], np.maximum.accumulate(piece_ready[order])
    position = buckets.step[rows[0]]
    took = np.diff(piece_ready, prepend=min(int(buckets.backward_began_ns[position]), int(piece_ready[0]))).astype(
        float
    )
    size = np.concatenate([buckets.gradient_bytes[mine], np.full(len(unseen), ABSENT)])[order].astype(float)
    weight = np.maximum(took if (size <= 0).any() else size, 1.0)
    share = weight / np.bincount(holder, weight)[holder]
    return Gradients(
        number=int(buckets.steps.number[position]),
        buckets=rows,
        bucket_ready_ns=ready.astype(float),
        bucket_bytes=buckets.bytes[rows].astype(float),
        called_ns=np.maximum.accumulate(called[order]),
        ready_ns=piece_ready.astype(float),
        bytes=buckets.bytes[rows][holder] * share,
        bucket=holder,
    )


def last_gradients(step: Gradients, cap_bytes: float) -> Ints:
    """With this cap, the gradient that closes each bucket: the one that reaches the cap, and the last."""
    # DDP closes its first bucket at 1 MiB only if no cap is given.
    ends, filled = [], 0.0
    for position, size in enumerate(step.bytes.tolist()):
        filled += size
        if filled >= cap_bytes:
            ends.append(position)
            filled = 0.0
    if not ends or ends[-1] != len(step.bytes) - 1:
        ends.append(len(step.bytes) - 1)
    return np.array(ends)


def _current_buckets(buckets: Buckets, steps: list[Gradients], exposed_ns: float) -> Rebucketing:
    ends, starts = buckets.steps.end_ns, buckets.steps.start_ns
    numbers = [int(buckets.step[step.buckets[0]]) for step in steps]
    return Rebucketing(
        buckets=len(steps[0].buckets),
        cap_mb=_likely_cap(steps[0]),
        exposed_ns=exposed_ns,
        communication_ns=float(np.median([total(*_transfers(buckets, step)) for step in steps])),
        step_ns=float(np.median([ends[number] - starts[number] for number in numbers])),
    )


def _transfers(buckets: Buckets, step: Gradients) -> Intervals:
    start = buckets.started_ns[step.buckets]
    return union(start, start + buckets.duration_ns[step.buckets])


def _computing(buckets: Buckets, step: Gradients, computing: Intervals) -> Intervals:
    """Computation of the step that can hide its buckets. What follows them waits for them, whatever their size."""
    start = int(buckets.steps.start_ns[buckets.step[step.buckets[0]]])
    ended = buckets.started_ns[step.buckets] + buckets.duration_ns[step.buckets]
    return clip(computing, start, max(int(step.bucket_ready_ns[-1]), int(ended.max())))


def _uncovered(transfers: Intervals, computing: Intervals) -> int:
    """Concurrent transfers are exposed once."""
    moments = np.concatenate(transfers)
    before, after = covered_until(computing, moments).reshape(2, -1)
    return total(*transfers) - int((after - before).sum())


def _likely_cap(step: Gradients) -> int | None:
    """A bucket is closed by the gradient that reaches the cap; the first one is closed early and the last one late."""
    size = step.bucket_bytes
    if len(size) < 3 or np.any(size <= 0):
        return None
    last_piece = np.zeros(len(size))
    last_piece[step.bucket] = step.bytes  # the last write wins
    reached = float(size[1:-1].min()) / MEBIBYTE
    not_yet = float((size - last_piece)[1:-1].max()) / MEBIBYTE
    if not_yet < DEFAULT_CAP_MB <= reached:
        return DEFAULT_CAP_MB
    return int(reached) if not_yet < int(reached) else None


def _fit(buckets: Buckets) -> Fit:
    count = len(buckets)
    return fit_collectives(
        Observations(
            group=np.zeros(count, dtype=np.int64),
            kind=np.full(count, int(CollectiveKind.ALL_REDUCE)),
            ranks=np.full(count, 2),  # the value is irrelevant: only the time by size is used
            bytes=buckets.bytes,
            seconds=buckets.duration_ns / 1e9,
            time_seconds=buckets.called_ns / 1e9,
            groups=("",),
        )
    )[0]


def _lanes(buckets: Buckets, rows: Ints) -> int:
    """The number of concurrent transfers: 1 on NCCL's stream; gloo has several threads."""
    start = np.sort(buckets.started_ns[rows])
    end = np.sort(buckets.started_ns[rows] + buckets.duration_ns[rows])
    return int((np.arange(1, len(rows) + 1) - np.searchsorted(end, start, side="right")).max())


def _exposed(ready: Floats, size: Floats, fit: Fit, lanes: int, computing: Intervals) -> float:
    needed = fit.predict(size) * 1e9
    free = [0.0] * lanes  # a heap
    start = np.empty(len(ready))
    for turn, (when, takes) in enumerate(zip(ready.tolist(), needed.tolist(), strict=True)):
        start[turn] = max(when, free[0])
        heapq.heapreplace(free, start[turn] + takes)
    return float(_uncovered(union(_rounded(start), _rounded(start + needed)), computing))


def _rounded(moments: Floats) -> Ints:
    rounded: Ints = moments.round().astype(np.int64)
    return rounded


def _predict(cap_mb: int, steps: list[Gradients], computing: list[Intervals], fit: Fit, lanes: int) -> CapPrediction:
    exposed, counts = [], []
    for step, part in zip(steps, computing, strict=True):
        ends = last_gradients(step, cap_mb * MEBIBYTE)
        sizes = np.diff(np.cumsum(step.bytes)[ends], prepend=0.0)
        exposed.append(_exposed(step.ready_ns[ends], sizes, fit, lanes, part))
        counts.append(len(sizes))
    return CapPrediction(cap_mb, int(np.median(counts)), float(np.median(exposed)))


def _recommend(now: Rebucketing) -> Rebucketing:
    """Recommend a cap only if it gains more than the model's error and enough of the step to be worth a change."""
    best = min(now.predictions, key=lambda prediction: prediction.exposed_ns)
    modelled = now.modelled_exposed_ns or 0.0
    gain = modelled - best.exposed_ns
    errors = SURE_ERRORS * (now.error_ns or 0.0)
    needed = max(errors, DEFAULT_POLICY.impact_ratio * now.step_ns, WORTHWHILE_EXPOSED * now.exposed_ns)
    if gain <= needed or best.cap_mb == now.cap_mb:
        return now
    words = (
        f"bucket_cap_mb={best.cap_mb} instead of {now.cap_mb or 'the current value'} would expose about "
        f"{best.exposed_ns / 1e6:.1f} ms of communication per step instead of {modelled / 1e6:.1f} ms"
    )
    return replace(now, recommended_cap_mb=best.cap_mb, gain_ns=gain, advice=words)
