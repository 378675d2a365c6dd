"""What a rank spent waiting in its long steps (analysis/stats/long_steps.py).

All other figures of a window that are compared among ranks describe its usual steps: a median does not see a loss that
sits in few steps, and a mean mixes the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.long_steps import LATE_SHARE, RECENT_STEPS
from rankscope.daemon.samples import Column, LongSteps

Mask: TypeAlias = npt.NDArray[np.bool_]

# Who was late is known if waiting was measured in this share of the long steps' time.
MEASURED_SHARE = 0.5


@dataclass(frozen=True)
class RecentSteps:
    """The last steps of a rank before a window."""

    step_seconds: Column = field(default_factory=lambda: np.empty(0))
    wait_seconds: Column = field(default_factory=lambda: np.empty(0))
    bounding_seconds: Column = field(default_factory=lambda: np.empty(0))

    def followed_by(self, step_seconds: Column, wait_seconds: Column, bounding_seconds: Column) -> RecentSteps:
        added = (step_seconds, wait_seconds, bounding_seconds)
        columns = (np.append(*pair) for pair in zip(vars(self).values(), added, strict=True))
        return RecentSteps(*(column[-RECENT_STEPS:].copy() for column in columns))


def bound_waits(
    is_long: Mask, before: RecentSteps, step_seconds: Column, wait_seconds: Column, bounding_seconds: Column
) -> Column:
    """The waits, with a bound of those that were not measured: on a CPU, DDP waits in the backward pass, and measures
    some of the steps. A long step that spent about as long as usual where ranks wait is the rank's own. Else the wait
    stays unknown: the rank waited there, or was late there."""
    usual_step, usual_wait = _usual(is_long, before, step_seconds, wait_seconds)
    usual = np.append(before.bounding_seconds, bounding_seconds[~is_long])
    usual = usual[~np.isnan(usual)]
    if not len(usual):
        return wait_seconds
    longer = np.maximum(bounding_seconds - float(np.median(usual)), 0.0)
    is_own = is_long & (longer <= (1 - LATE_SHARE) * (step_seconds - usual_step))
    return np.where(is_own & np.isnan(wait_seconds), usual_wait + longer, wait_seconds)


def with_neighbours(steps: Mask) -> Mask:
    """A wait may end in the step before or after the one that it belongs to."""
    near: Mask = steps.copy()
    near[1:] |= steps[:-1]
    near[:-1] |= steps[1:]
    return near


def sum_up(
    is_long: Mask,
    before: RecentSteps,
    step_seconds: Column,
    wait_seconds: Column,
    checkpoint_seconds: Column,
    run_ahead_seconds: Column | None = None,
) -> LongSteps:
    is_known = is_long & ~np.isnan(wait_seconds)
    if not is_long.any():
        return LongSteps()
    usual_step, usual_wait = _usual(is_long, before, step_seconds, wait_seconds)
    near = np.nan_to_num(np.maximum(wait_seconds - usual_wait, 0.0))
    # That of a neighbour which is long itself belongs to it.
    of_neighbours = np.where(is_long, 0.0, near)
    near[1:] += of_neighbours[:-1]
    near[:-1] += of_neighbours[1:]
    excess = np.maximum(step_seconds - usual_step, 0.0)
    waited = np.minimum(near, excess)
    saved = np.minimum(np.nan_to_num(checkpoint_seconds), excess - waited)
    is_late = excess - waited - saved >= LATE_SHARE * excess
    total, known = float(excess[is_long].sum()), float(excess[is_known].sum())
    # Those in which waiting was not measured are as the others, if these are most of it.
    is_enough = known >= MEASURED_SHARE * total
    scale = total / known if is_enough else 0.0
    return LongSteps(
        steps=int(is_long.sum()),
        seconds=total,
        waited_seconds=float(waited[is_known].sum()) * scale if is_enough else None,
        checkpoint_seconds=float(saved[is_known].sum()) * scale,
        late_steps=min(round(int((is_late & is_known).sum()) * scale), int(is_long.sum())),
        late_ahead_seconds=_late_ahead(is_late & is_known, excess, run_ahead_seconds),
        usual_wait_seconds=_mean(wait_seconds[~is_long]),
        usual_self_seconds=_mean(np.maximum(step_seconds - wait_seconds, 0.0)[~is_long]),
        usual_checkpoint_seconds=_mean(checkpoint_seconds[~is_long]),
    )


def _late_ahead(is_late: Mask, excess: Column, run_ahead: Column | None) -> float | None:
    """A device that is late lets its host get ahead by as much, in that step or the next."""
    if run_ahead is None or np.isnan(run_ahead).all():
        return None
    further = np.nan_to_num(run_ahead - np.nanmedian(run_ahead))
    further[:-1] = np.maximum(further[:-1], further[1:])
    return float(np.clip(further, 0.0, excess)[is_late].sum())


def _mean(column: Column) -> float | None:
    known = column[~np.isnan(column)]
    return float(known.mean()) if len(known) else None


def _usual(is_long: Mask, before: RecentSteps, step_seconds: Column, wait_seconds: Column) -> tuple[float, float]:
    """Medians of the other steps."""
    far = ~with_neighbours(is_long)
    steps, waits = np.append(before.step_seconds, step_seconds[far]), np.append(before.wait_seconds, wait_seconds[far])
    waits = waits[~np.isnan(waits)]
    return float(np.median(steps)) if len(steps) else 0.0, float(np.median(waits)) if len(waits) else 0.0
