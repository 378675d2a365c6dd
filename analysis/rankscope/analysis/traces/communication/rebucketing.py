"""What another `bucket_cap_mb` would do: the same gradients, ready at the same times, put into other buckets and sent
one after the other over a link whose latency and bandwidth the trace itself shows.

Left out: that communication slows the kernels beside it, and that other ranks may be late. Therefore the model has to
reproduce the buckets as they are before it is believed about others."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.alphabeta import Fit, Observations, fit_collectives
from rankscope.analysis.policy import DEFAULT_POLICY, Policy
from rankscope.analysis.robust import Floats, Ints
from rankscope.analysis.traces.columns import Trace
from rankscope.analysis.traces.communication.buckets import Buckets
from rankscope.analysis.traces.communication.collectives import hiding_intervals
from rankscope.analysis.traces.communication.kinds import CollectiveKind
from rankscope.analysis.traces.intervals import Intervals, clip, covered_until, total, union

MEBIBYTE = 1 << 20
CAPS_MB = (1, 5, 10, 25, 50, 100, 200, 400)
# DDP closes its first bucket early, so that communication starts soon.
FIRST_BUCKET_BYTES = MEBIBYTE
DEFAULT_CAP_MB = 25
# How far the model may be from what was seen, of the exposed time or (where little is exposed) of all of it.
TOLERANCE_EXPOSED = 0.15
TOLERANCE_COMMUNICATION = 0.05
# A change is worth proposing from here on.
SURE_ERRORS = 2.0
WORTHWHILE_EXPOSED = 0.05


@dataclass(frozen=True)
class CapPrediction:
    cap_mb: int
    buckets: int  # per step
    exposed_ns: float  # per step


@dataclass(frozen=True)
class Rebucketing:
    """Per step, the median of the steps. Without a prediction `reason` says why."""

    buckets: int
    bytes: int
    cap_mb: int | None  # as the sizes of the buckets suggest; None where they do not
    exposed_ns: float
    communication_ns: float
    step_ns: float
    modelled_exposed_ns: float | None = None  # of the buckets as they are
    error_ns: float | None = None
    predictions: tuple[CapPrediction, ...] = ()
    recommended_cap_mb: int | None = None
    gain_ns: float | None = None
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True)
class _Step:
    """One step's buckets as they are, and its gradients: the pieces that no cap can split."""

    rows: Ints  # of Buckets
    ready_ns: Floats
    bytes: Floats
    piece_ready_ns: Floats
    piece_bytes: Floats
    piece_bucket: Ints  # position in rows
    hiding: Intervals


def try_other_caps(trace: Trace, buckets: Buckets, policy: Policy = DEFAULT_POLICY) -> Rebucketing | None:
    """None where there are no buckets."""
    if not len(buckets):
        return None
    chosen = [np.flatnonzero(buckets.step == step) for step in np.unique(buckets.step)]
    most = max(len(rows) for rows in chosen)
    chosen = [rows for rows in chosen if len(rows) == most]  # a step that the trace cut has fewer
    hiding = hiding_intervals(trace)
    steps = [_step(buckets, rows, hiding) for rows in chosen]
    everything = np.concatenate(chosen)
    now = _as_they_are(buckets, steps)
    if not buckets.measured[everything].all():
        return replace(now, reason="the trace holds the calls but not the transfers")
    if np.any(buckets.bytes[everything] <= 0):
        return replace(now, reason="the trace does not tell the sizes of the buckets")
    fit = _fit(buckets)
    if not fit.is_fitted:
        return replace(now, reason=f"latency and bandwidth cannot be told: {fit.reason}")
    lanes = max(_lanes(buckets, rows) for rows in chosen)
    seen = np.array([_seen(buckets, step) for step in steps])
    modelled = np.array([_exposed(step.ready_ns, step.bytes, fit, lanes, step.hiding) for step in steps])
    error = float(np.median(np.abs(modelled - seen)))
    now = replace(now, modelled_exposed_ns=float(np.median(modelled)), error_ns=error)
    allowed = max(TOLERANCE_EXPOSED * now.exposed_ns, TOLERANCE_COMMUNICATION * now.communication_ns)
    if error > allowed:
        return replace(
            now,
            reason=f"the model misses what was seen by {error / 1e6:.2f} ms of {now.exposed_ns / 1e6:.2f} ms exposed, "
            f"more than the {allowed / 1e6:.2f} ms it may",
        )
    predictions = tuple(_predict(cap, steps, fit, lanes) for cap in CAPS_MB)
    return _recommend(replace(now, predictions=predictions), policy)


def _step(buckets: Buckets, rows: Ints, hiding: Intervals) -> _Step:
    ready = np.maximum.accumulate(buckets.ready_ns[rows])
    mine = np.isin(buckets.gradient_bucket, rows)
    holder = np.searchsorted(rows, buckets.gradient_bucket[mine])
    piece_ready = np.minimum(buckets.gradient_ready_ns[mine], ready[holder])
    # A bucket in which no gradient was seen is one piece.
    unseen = np.setdiff1d(np.arange(len(rows)), holder)
    holder = np.concatenate([holder, unseen])
    piece_ready = np.concatenate([piece_ready, ready[unseen]])
    order = np.lexsort((piece_ready, holder))
    holder, piece_ready = holder[order], np.maximum.accumulate(piece_ready[order])
    # The longer a gradient took to compute, the more of its bucket it is.
    number = buckets.step[rows[0]]
    took = np.diff(piece_ready, prepend=min(int(buckets.backward_began_ns[number]), int(piece_ready[0]))).astype(float)
    took = np.maximum(took, 1.0)
    share = took / np.bincount(holder, took)[holder]
    start = int(buckets.steps.start_ns[number])
    ended = buckets.started_ns[rows] + buckets.duration_ns[rows]
    return _Step(
        rows=rows,
        ready_ns=ready.astype(float),
        bytes=buckets.bytes[rows].astype(float),
        piece_ready_ns=piece_ready.astype(float),
        piece_bytes=buckets.bytes[rows][holder] * share,
        piece_bucket=holder,
        # What comes after the buckets waits for them, whatever their size, and hides nothing.
        hiding=clip(hiding, start, max(int(ready[-1]), int(ended.max()))),
    )


def _as_they_are(buckets: Buckets, steps: list[_Step]) -> Rebucketing:
    ends, starts = buckets.steps.end_ns, buckets.steps.start_ns
    numbers = [int(buckets.step[step.rows[0]]) for step in steps]
    return Rebucketing(
        buckets=len(steps[0].rows),
        bytes=int(np.maximum(buckets.bytes[steps[0].rows], 0).sum()),
        cap_mb=_likely_cap(steps[0]),
        exposed_ns=float(np.median([_seen(buckets, step) for step in steps])),
        communication_ns=float(np.median([_lasted(buckets, step) for step in steps])),
        step_ns=float(np.median([ends[number] - starts[number] for number in numbers])),
    )


def _transfers(buckets: Buckets, step: _Step) -> Intervals:
    start = buckets.started_ns[step.rows]
    return union(start, start + buckets.duration_ns[step.rows])


def _lasted(buckets: Buckets, step: _Step) -> int:
    return total(*_transfers(buckets, step))


def _seen(buckets: Buckets, step: _Step) -> float:
    """Exposed in fact, counted as the model counts: two transfers at once are exposed once."""
    return float(_uncovered(_transfers(buckets, step), step.hiding))


def _uncovered(transfers: Intervals, hiding: Intervals) -> int:
    moments = np.concatenate(transfers)
    before, after = covered_until(hiding, moments).reshape(2, -1)
    return total(*transfers) - int((after - before).sum())


def _likely_cap(step: _Step) -> int | None:
    """A bucket is closed by the gradient that reaches the cap; the first one is closed early and the last one late."""
    if len(step.rows) < 3 or np.any(step.bytes <= 0):
        return None
    last_piece = np.zeros(len(step.rows))
    last_piece[step.piece_bucket] = step.piece_bytes  # the last one written stays
    reached = float(step.bytes[1:-1].min()) / MEBIBYTE
    not_yet = float((step.bytes - last_piece)[1:-1].max()) / MEBIBYTE
    if not_yet < DEFAULT_CAP_MB <= reached:
        return DEFAULT_CAP_MB
    return int(reached) if not_yet < int(reached) else None


def _fit(buckets: Buckets) -> Fit:
    count = len(buckets)
    return fit_collectives(
        Observations(
            group=np.zeros(count, dtype=np.int64),
            kind=np.full(count, int(CollectiveKind.ALL_REDUCE)),
            ranks=np.full(count, 2),  # whatever it is, it stays: only the time by size is used
            bytes=buckets.bytes,
            seconds=buckets.duration_ns / 1e9,
            time_seconds=buckets.asked_ns / 1e9,
            groups=("",),
        )
    )[0]


def _lanes(buckets: Buckets, rows: Ints) -> int:
    """How many transfers ran at once: 1 on NCCL's stream, gloo has threads."""
    start = np.sort(buckets.started_ns[rows])
    end = np.sort(buckets.started_ns[rows] + buckets.duration_ns[rows])
    return int((np.arange(1, len(rows) + 1) - np.searchsorted(end, start, side="right")).max())


def _exposed(ready: Floats, size: Floats, fit: Fit, lanes: int, hiding: Intervals) -> float:
    needed = fit.predict(size) * 1e9
    free = [0.0] * lanes
    start = np.empty(len(ready))
    for turn, (when, takes) in enumerate(zip(ready.tolist(), needed.tolist(), strict=True)):
        lane = min(range(lanes), key=free.__getitem__)
        start[turn] = max(when, free[lane])
        free[lane] = start[turn] + takes
    return float(_uncovered(union(_whole(start), _whole(start + needed)), hiding))


def _whole(moments: Floats) -> Ints:
    rounded: Ints = moments.round().astype(np.int64)
    return rounded


def _regroup(step: _Step, cap_bytes: float) -> tuple[Floats, Floats]:
    """Sizes and ready times of DDP's buckets under that cap: each is closed by the gradient that reaches it."""
    sizes, ready, filled, limit = [], [], 0.0, min(float(FIRST_BUCKET_BYTES), cap_bytes)
    for size, when in zip(step.piece_bytes.tolist(), step.piece_ready_ns.tolist(), strict=True):
        filled += size
        if filled >= limit:
            sizes.append(filled)
            ready.append(when)
            filled, limit = 0.0, cap_bytes
    if filled:
        sizes.append(filled)
        ready.append(float(step.piece_ready_ns[-1]))
    return np.array(sizes), np.array(ready)


def _predict(cap_mb: int, steps: list[_Step], fit: Fit, lanes: int) -> CapPrediction:
    exposed, counts = [], []
    for step in steps:
        sizes, ready = _regroup(step, cap_mb * MEBIBYTE)
        exposed.append(_exposed(ready, sizes, fit, lanes, step.hiding))
        counts.append(len(sizes))
    return CapPrediction(cap_mb, int(np.median(counts)), float(np.median(exposed)))


def _recommend(now: Rebucketing, policy: Policy) -> Rebucketing:
    """Only what gains more than the model errs and enough of the step to be worth a change."""
    best = min(now.predictions, key=lambda prediction: prediction.exposed_ns)
    modelled = now.modelled_exposed_ns or 0.0
    gain = modelled - best.exposed_ns
    errors = SURE_ERRORS * (now.error_ns or 0.0)
    needed = max(errors, policy.impact_ratio * now.step_ns, WORTHWHILE_EXPOSED * now.exposed_ns)
    if gain <= needed or best.cap_mb == now.cap_mb:
        return now
    words = (
        f"bucket_cap_mb={best.cap_mb} in place of {now.cap_mb or 'the present'} would expose about "
        f"{best.exposed_ns / 1e6:.1f} ms of communication a step, not {modelled / 1e6:.1f} ms"
    )
    return replace(now, recommended_cap_mb=best.cap_mb, gain_ns=gain, advice=words)
