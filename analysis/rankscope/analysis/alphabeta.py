"""Latency and bandwidth of collectives, learnt from how long they took: one fit per group and kind."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.alphabeta_fitting import Line, fit_line
from rankscope.analysis.alphabeta_predicting import (
    Algorithm,
    has_model,
    has_tree,
    moved_bytes,
    predicted_seconds,
    steps,
)
from rankscope.analysis.robust import Bools, Floats, Ints, number_groups
from rankscope.analysis.traces.communication.bandwidth import bus_factor
from rankscope.analysis.traces.communication.kinds import CollectiveKind

# Two unknowns need more than two sizes, and a line through neighbours says nothing about either end.
SIZES_NEEDED = 3
SIZE_SPAN_NEEDED = 4.0
OBSERVATIONS_NEEDED = 5


@dataclass(frozen=True)
class Observations:
    """Collectives that were timed, a row each. -1 ranks or bytes: not known."""

    group: Ints  # index into groups
    kind: Ints  # a CollectiveKind
    ranks: Ints
    bytes: Ints  # of the whole array, as nccl-tests counts
    seconds: Floats
    time_seconds: Floats  # when it was; NaN where not told
    groups: tuple[str, ...]
    in_order: bool = True  # rows follow one another in time; False for a benchmark that walks through sizes

    def __len__(self) -> int:
        return len(self.kind)

    def where(self, chosen: Bools | Ints) -> Observations:
        columns = [field.name for field in fields(self) if field.name not in ("groups", "in_order")]
        return replace(self, **{name: getattr(self, name)[chosen] for name in columns})


@dataclass(frozen=True)
class Fit:
    """One group's collectives of one kind. Without a fit `reason` says why, and every number of it is None."""

    group: str
    kind: int
    ranks: int  # the most common count; -1 where not known
    count: int
    distinct_sizes: int
    algorithm: Algorithm = Algorithm.RING
    algorithm_observed: bool = False  # several counts of ranks told ring and tree apart; else a ring is assumed
    alpha_seconds: float | None = None  # None where these sizes do not show it: it is below what they resolve
    beta_bytes_per_second: float | None = None
    residual_p50: float | None = None  # actual over predicted
    residual_p95: float | None = None
    bus_bytes_per_second_p50: float | None = None  # what was reached, whatever the size; known without a fit too
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
        """Seconds for arrays of these sizes, by this fit (of the same ranks and algorithm, unless told otherwise)."""
        if self.beta_bytes_per_second is None:
            raise ValueError(f"no fit of {self.label}: {self.reason}")
        count = np.full(np.shape(size), self.ranks) if ranks is None else ranks
        alpha = self.alpha_seconds or 0.0
        return predicted_seconds(self.kind, count, size, alpha, self.beta_bytes_per_second, algorithm or self.algorithm)


def fit_collectives(observed: Observations) -> tuple[Fit, ...]:
    """A fit, or the reason why there is none, per group and kind, ordered by them."""
    which, count = number_groups(observed.group, observed.kind)
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(count + 1))
    return tuple(_fit(observed.where(order[bounds[n] : bounds[n + 1]])) for n in range(count))


def residual_ratios(observed: Observations, fit: Fit) -> Floats:
    """Actual over predicted of one group's and kind's observations."""
    return observed.seconds / fit.predict(observed.bytes, observed.ranks)


def _fit(mine: Observations) -> Fit:
    kind = int(mine.kind[0])
    told = mine.ranks[mine.ranks > 0]
    # Not bincount: a trace may name any number, and it would make a table as long.
    sizes_told, counts = np.unique(told, return_counts=True)
    ranks = int(sizes_told[counts.argmax()]) if len(told) else -1
    usable = mine.where((mine.bytes > 0) & (mine.seconds > 0) & np.isfinite(mine.seconds) & (mine.ranks > 0))
    sizes = np.unique(usable.bytes)
    empty = Fit(mine.groups[mine.group[0]], kind, ranks, len(usable), len(sizes))
    empty = replace(empty, bus_bytes_per_second_p50=_bus_rate(usable) if len(usable) else None)
    reason = _reason_against(mine, usable, sizes, kind, ranks)
    if reason:
        return replace(empty, reason=reason)
    chosen, line = Algorithm.RING, _line(usable, kind, Algorithm.RING)
    told_apart = has_tree(kind) and len(np.unique(usable.ranks)) > 1
    if told_apart:
        tree = _line(usable, kind, Algorithm.TREE)
        if tree is not None and (line is None or tree.loss < line.loss):
            chosen, line = Algorithm.TREE, tree
    if line is None or line.beta_bytes_per_second is None:
        return replace(empty, reason="the time does not grow with the size, so that these sizes show latency only")
    fit = replace(
        empty,
        algorithm=chosen,
        algorithm_observed=told_apart,
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
        return f"there is no model of {CollectiveKind(kind).label}"
    if not np.any(mine.bytes > 0):
        return "no size is known"
    if ranks < 0:
        return "the number of ranks is not known"
    if ranks == 1:
        return "a group of one rank moves nothing"
    if len(usable) < OBSERVATIONS_NEEDED:
        return f"{len(usable)} timed with a known size, {OBSERVATIONS_NEEDED} are needed"
    if len(sizes) < SIZES_NEEDED:
        word = "sizes" if len(sizes) > 1 else "size"
        return f"{len(sizes)} distinct {word}, {SIZES_NEEDED} are needed to tell latency from bandwidth"
    span = float(sizes[-1]) / float(sizes[0])
    if span < SIZE_SPAN_NEEDED:
        return f"sizes span a factor of {span:.1f}, {SIZE_SPAN_NEEDED:.0f} are needed to tell latency from bandwidth"
    return ""
