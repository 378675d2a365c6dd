"""Fits latency (α) and bandwidth (β) of collectives to their durations, one fit per group and kind: T = α·steps +
bytes/β, with the steps and the bytes over the busiest link that a ring or a tree needs. β is the bus bandwidth that
large messages approach.

The fit is robust against outliers and uses relative errors, the logarithm of actual over predicted, because sizes
span six orders of magnitude."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind, bus_factor
from rankscope.analysis.stats.robust import MAD_TO_SIGMA, Floats, Ints, number_groups, take_rows

# Number of points on each side whose pairs give starting lines: many pairs join two good points even if a third of all
# points are outliers.
_STARTS = 16
_EVALUATION_POINTS = 500
_ITERATIONS = 60
# Points beyond this many deviations have no weight (Tukey's biweight).
_TUKEY = 4.685
# Minimum spread: real links are not so straight that a point 10 % off is an outlier.
_MIN_SPREAD = 0.03
# Maximum deviation that counts: beyond a factor of 2.7 a point is just wrong.
_CAP = 1.0
# Standard errors from zero. A slope from noise would be a meaningless bandwidth.
_ALPHA_ERRORS = 2.0
_BETA_ERRORS = 4.0
_TINY = 1e-15
# Steps of a tree in units of its depth: an all-reduce goes up and down, the others one way.
_TREES = {
    CollectiveKind.ALL_REDUCE: 2.0,
    CollectiveKind.REDUCE: 1.0,
    CollectiveKind.BROADCAST: 1.0,
}
_RINGS = (
    *(CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL, CollectiveKind.GATHER),
    *(CollectiveKind.SCATTER, CollectiveKind.BROADCAST, CollectiveKind.REDUCE),
)
# Two unknowns need more than two sizes, over a sufficient span.
SIZES_NEEDED = 3
SIZE_SPAN_NEEDED = 4.0
OBSERVATIONS_NEEDED = 5


class Algorithm(str, Enum):
    RING = "ring"
    TREE = "tree"


@dataclass(frozen=True)
class Observations:
    """Timed collectives, one row each. -1: unknown ranks or bytes."""

    group: Ints  # index into groups
    kind: Ints  # a CollectiveKind
    ranks: Ints
    bytes: Ints  # size of the whole array, as in nccl-tests
    seconds: Floats
    time_seconds: Floats  # when it ran; NaN if unknown
    groups: tuple[str, ...]
    in_order: bool = True  # rows are ordered in time; False for a benchmark that iterates over sizes

    def __len__(self) -> int:
        return len(self.kind)


@dataclass(frozen=True)
class Fit:
    """The fit of one group's collectives of one kind. Without a fit, `reason` explains why and the numbers are None."""

    group: str
    kind: int
    ranks: int  # the most common number; -1 if unknown
    count: int
    distinct_sizes: int
    algorithm: Algorithm = Algorithm.RING
    algorithm_observed: bool = False  # several rank counts distinguished ring and tree; otherwise a ring is assumed
    alpha_seconds: float | None = None  # None if it is too small for these sizes to show
    beta_bytes_per_second: float | None = None
    residual_p50: float | None = None  # actual over predicted
    residual_p95: float | None = None
    bus_bytes_per_second_p50: float | None = None  # achieved over all sizes; known without a fit too
    reason: str = ""

    @property
    def is_fitted(self) -> bool:
        return self.beta_bytes_per_second is not None

    @property
    def label(self) -> str:
        return (
            f"{CollectiveKind(self.kind).label} in group {self.group}"
            if self.group
            else CollectiveKind(self.kind).label
        )

    def predict(
        self, size: Ints | Floats, ranks: Ints | Floats | None = None, algorithm: Algorithm | None = None
    ) -> Floats:
        """Predicted seconds for arrays of these sizes, by default with the fit's own ranks and algorithm."""
        if self.beta_bytes_per_second is None:
            raise ValueError(f"no fit of {self.label}: {self.reason}")
        count = np.full(np.shape(size), self.ranks) if ranks is None else ranks
        alpha = self.alpha_seconds or 0.0
        return predicted_seconds(self.kind, count, size, alpha, self.beta_bytes_per_second, algorithm or self.algorithm)


@dataclass(frozen=True)
class Line:
    alpha_seconds: float  # never negative
    beta_bytes_per_second: float | None  # None if the time does not clearly grow with the size
    alpha_resolved: bool  # False: indistinguishable from zero
    loss: float  # mean of the capped squared deviations, for comparing lines through the same points


def fit_collectives(observed: Observations) -> tuple[Fit, ...]:
    """A fit, or the reason for its absence, per group and kind, in this order."""
    which, count = number_groups(observed.group, observed.kind)
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(count + 1))
    return tuple(_fit(take_rows(observed, order[bounds[n] : bounds[n + 1]])) for n in range(count))


def residual_ratios(observed: Observations, fit: Fit) -> Floats:
    """Actual over predicted seconds of observations of one group and kind."""
    return observed.seconds / fit.predict(observed.bytes, observed.ranks)


def predicted_seconds(
    kind: int,
    ranks: Ints | Floats,
    size: Ints | Floats,
    alpha_seconds: float,
    beta_bytes_per_second: float,
    algorithm: Algorithm = Algorithm.RING,
) -> Floats:
    latency = alpha_seconds * steps(kind, ranks, algorithm)
    return latency + moved_bytes(kind, ranks, size, algorithm) / beta_bytes_per_second


def crossover_bytes(kind: int, ranks: int, alpha_seconds: float, beta_bytes_per_second: float) -> float | None:
    """The size below which a tree is faster than a ring; None if one of them is always faster."""
    if kind not in _TREES or ranks < 2:
        return None
    count, one = np.array([ranks]), np.ones(1)
    saved_steps = float((steps(kind, count, Algorithm.RING) - steps(kind, count, Algorithm.TREE))[0])
    more_bytes = float(
        (moved_bytes(kind, count, one, Algorithm.TREE) - moved_bytes(kind, count, one, Algorithm.RING))[0]
    )
    if saved_steps <= 0 or more_bytes <= 0 or alpha_seconds <= 0:
        return None
    return alpha_seconds * saved_steps * beta_bytes_per_second / more_bytes


def steps(kind: int, ranks: Ints | Floats, algorithm: Algorithm) -> Floats:
    """The number of consecutive messages. Kinds without a tree use a ring."""
    count = np.asarray(ranks, dtype=np.float64)
    if algorithm is Algorithm.TREE and kind in _TREES:
        return _TREES[CollectiveKind(kind)] * np.log2(np.maximum(count, 1))
    if kind == CollectiveKind.ALL_REDUCE:
        return 2 * (count - 1)
    if kind in _RINGS:
        return count - 1
    return np.ones_like(count)


def moved_bytes(kind: int, ranks: Ints | Floats, size: Ints | Floats, algorithm: Algorithm) -> Floats:
    """Bytes over the busiest link. In a tree a rank sends the whole array each way (two binary trees share the
    work); in a ring it does not send its own part."""
    count = np.asarray(ranks, dtype=np.float64)
    array = np.asarray(size, dtype=np.float64)
    if algorithm is Algorithm.TREE and kind in _TREES:
        return _TREES[CollectiveKind(kind)] * array
    factor = bus_factor(np.full(count.shape, int(kind)), count.astype(np.int64))
    return np.where(np.isnan(factor), 1.0, factor) * array


def has_tree(kind: int) -> bool:
    return kind in _TREES


def has_model(kind: int) -> bool:
    return kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND, CollectiveKind.RECV, *_RINGS)


def _fit(mine: Observations) -> Fit:
    kind = int(mine.kind[0])
    known = mine.ranks[mine.ranks > 0]
    # Not bincount: a trace may contain any number, and the table would be as long.
    group_sizes, counts = np.unique(known, return_counts=True)
    ranks = int(group_sizes[counts.argmax()]) if len(known) else -1
    usable = take_rows(mine, (mine.bytes > 0) & (mine.seconds > 0) & np.isfinite(mine.seconds) & (mine.ranks > 0))
    sizes = np.unique(usable.bytes)
    empty = Fit(mine.groups[mine.group[0]], kind, ranks, len(usable), len(sizes))
    empty = replace(empty, bus_bytes_per_second_p50=_bus_rate(usable) if len(usable) else None)
    reason = _reason_against(mine, usable, sizes, kind, ranks)
    if reason:
        return replace(empty, reason=reason)
    chosen, line = Algorithm.RING, _line(usable, kind, Algorithm.RING)
    distinguishable = has_tree(kind) and len(np.unique(usable.ranks)) > 1
    if distinguishable:
        tree = _line(usable, kind, Algorithm.TREE)
        if tree is not None and (line is None or tree.loss < line.loss):
            chosen, line = Algorithm.TREE, tree
    if line is None or line.beta_bytes_per_second is None:
        return replace(empty, reason="the time does not grow with the size: these sizes show only latency")
    fit = replace(
        empty,
        algorithm=chosen,
        algorithm_observed=distinguishable,
        alpha_seconds=line.alpha_seconds if line.alpha_resolved else None,
        beta_bytes_per_second=line.beta_bytes_per_second,
    )
    ratios = residual_ratios(usable, fit)
    return replace(
        fit, residual_p50=float(np.median(ratios)), residual_p95=float(np.quantile(ratios, 0.95, method="higher"))
    )


def _line(usable: Observations, kind: int, algorithm: Algorithm) -> Line | None:
    moved = moved_bytes(kind, usable.ranks, usable.bytes, algorithm)
    return fit_line(steps(kind, usable.ranks, algorithm), moved, usable.seconds)


def _bus_rate(usable: Observations) -> float | None:
    rates = usable.bytes / usable.seconds * bus_factor(usable.kind, usable.ranks)
    return float(np.median(rates)) if np.isfinite(rates).all() else None


def _reason_against(mine: Observations, usable: Observations, sizes: Ints, kind: int, ranks: int) -> str:
    if not has_model(kind):
        return f"there is no model for {CollectiveKind(kind).label}"
    if not np.any(mine.bytes > 0):
        return "all sizes are unknown"
    if ranks < 0:
        return "the number of ranks is unknown"
    if ranks == 1:
        return "a group of one rank transfers nothing"
    if len(usable) < OBSERVATIONS_NEEDED:
        return f"{len(usable)} timed with a known size, {OBSERVATIONS_NEEDED} are needed"
    if len(sizes) < SIZES_NEEDED:
        word = "sizes" if len(sizes) > 1 else "size"
        return f"{len(sizes)} distinct {word}, {SIZES_NEEDED} are needed to distinguish latency from bandwidth"
    span = float(sizes[-1]) / float(sizes[0])
    if span < SIZE_SPAN_NEEDED:
        needed = f"{SIZE_SPAN_NEEDED:.0f} are needed to distinguish latency from bandwidth"
        return f"sizes span a factor of {span:.1f}, {needed}"
    return ""


def fit_line(step_count: Floats, moved: Floats, seconds: Floats) -> Line | None:
    """None if the points do not determine a line. Starts from the line through two points with the smallest mean
    deviation, capped so that no single point dominates, and refines it with the points near it."""
    usable = np.isfinite(seconds) & (seconds > 0) & np.isfinite(moved) & np.isfinite(step_count)
    step_count, moved, seconds = step_count[usable], moved[usable], seconds[usable]
    if len(seconds) < 2 or moved.max(initial=0.0) <= 0:
        return None
    unit = float(np.median(moved[moved > 0]))
    columns = np.stack([step_count, moved / unit], axis=1)
    solution = _start(columns, seconds)
    covariance = np.zeros((2, 2))
    for _ in range(_ITERATIONS):
        expected = np.maximum(columns @ solution, _TINY)
        deviation = np.log(seconds / expected)
        spread = max(MAD_TO_SIGMA * float(np.median(np.abs(deviation))), _MIN_SPREAD)
        score = np.minimum(np.abs(deviation) / (_TUKEY * spread), 1.0)
        weights = (1 - score**2) ** 2 / expected**2
        before = solution
        # Linearised: a slow outlier pulls only by its logarithm.
        solution, covariance = _solve(columns, expected * (1 + deviation), weights)
        if np.allclose(before, solution, rtol=1e-10, atol=_TINY):
            break
    deviation = np.log(seconds / np.maximum(columns @ solution, _TINY))
    alpha, per_unit = solution.tolist()
    alpha_error, slope_error = np.sqrt(np.diag(covariance)).tolist()
    return Line(
        alpha_seconds=alpha,
        beta_bytes_per_second=unit / per_unit if per_unit > _BETA_ERRORS * slope_error else None,
        alpha_resolved=alpha > _ALPHA_ERRORS * alpha_error,
        loss=float(np.mean(np.minimum(np.abs(deviation), _CAP) ** 2)),
    )


def _start(columns: Floats, seconds: Floats) -> Floats:
    order = np.argsort(columns[:, 1] / np.maximum(columns[:, 0], _TINY), kind="stable")
    half = len(order) // 2
    low = order[np.unique(np.linspace(0, half - 1, min(half, _STARTS)).astype(int))]
    high = order[np.unique(np.linspace(half, len(order) - 1, min(len(order) - half, _STARTS)).astype(int))]
    one, other = (each.ravel() for each in np.meshgrid(low, high))
    (a, b), (c, d) = columns[one].T, columns[other].T
    size = a * d - b * c
    regular = np.abs(size) > 1e-12 * np.maximum(np.abs(a * d), _TINY)
    size = np.where(regular, size, 1.0)
    alpha = (seconds[one] * d - seconds[other] * b) / size
    slope = (seconds[other] * a - seconds[one] * c) / size
    candidates = np.stack([alpha, slope], axis=1)[regular]
    # If a pair gives a negative coefficient, the pure latency and the pure bandwidth of each point are used instead.
    candidates = candidates[(candidates >= 0).all(axis=1)]
    points = np.concatenate([low, high])
    ratio = np.divide(seconds, columns[:, 1], out=np.zeros_like(seconds), where=columns[:, 1] > 0)[points]
    wait = np.divide(seconds, columns[:, 0], out=np.zeros_like(seconds), where=columns[:, 0] > 0)[points]
    nothing = np.zeros(len(points))
    pure = [np.stack([nothing, ratio], axis=1), np.stack([wait, nothing], axis=1)]
    candidates = np.concatenate([candidates, *pure])
    points_used = order[np.unique(np.linspace(0, len(order) - 1, min(len(order), _EVALUATION_POINTS)).astype(int))]
    expected = np.maximum(candidates @ columns[points_used].T, _TINY)
    deviation = np.minimum(np.abs(np.log(seconds[points_used] / expected)), _CAP).mean(axis=1)
    best: Floats = candidates[int(np.argmin(deviation))]
    return best


def _solve(columns: Floats, seconds: Floats, weights: Floats) -> tuple[Floats, Floats]:
    """Weighted least squares with non-negative coefficients, and their covariance."""
    normal = columns.T @ (columns * weights[:, None])
    target = columns.T @ (seconds * weights)
    inverse = np.linalg.pinv(normal)
    solution = inverse @ target
    if solution[0] < 0 or solution[1] < 0:
        alone = np.divide(target, np.diag(normal), out=np.zeros(2), where=np.diag(normal) > 0)
        # Keep the coefficient that explains more of the times by itself.
        kept = int(np.argmax(alone * target))
        solution = np.zeros(2)
        solution[kept] = max(float(alone[kept]), 0.0)
        inverse = np.zeros((2, 2))
        inverse[kept, kept] = 1 / max(float(normal[kept, kept]), _TINY)
    left = seconds - columns @ solution
    freedom = max(float(np.count_nonzero(weights)) - 2, 1.0)
    return solution, inverse * (float(np.sum(weights * left**2)) / freedom)
