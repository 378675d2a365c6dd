"""Whether a slow rank's device is to blame, or the host that gives it work.

A host enqueues work ahead of its device. A slow device lets its host get ahead by about as much at some point of the
step, even in a loop that synchronises every step; a host that is late is never further ahead than usual. The hosts of
ranks that wait for a slow one are ahead as well, by what they wait, which is therefore taken off."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.policy import Policy
from rankscope.analysis.robust import Bools, Floats, Ints, grouped_min
from rankscope.analysis.windows import RankColumns

# Far ahead, but not by more than this share of the excess beyond the peers: all of them are far ahead, because their
# loop enqueues a step at once and then waits for it. The excess is somewhere else.
NOT_FURTHER_SHARE = 0.2
# A loop that synchronises every step is never ahead by a whole one.
WHOLE_STEP_RATIO = 1.1


def is_timed_on_device(columns: RankColumns) -> Bools:
    return ~np.isnan(columns.host_seconds)


def waited_seconds(columns: RankColumns) -> Floats:
    """What a rank waited for others in a step, without what the transfer itself takes."""
    return np.maximum(columns.wait_seconds - columns.transfer_seconds, 0.0)


def further_ahead_seconds(columns: RankColumns, cohort: Ints, cohort_count: int) -> Floats:
    """How much further ahead a rank's host was than hosts of its cohort are without waiting; NaN where not known."""
    ahead = columns.run_ahead_seconds
    usual = np.maximum(ahead - waited_seconds(columns), 0.0)
    known = np.bincount(cohort[~np.isnan(usual)], minlength=cohort_count)
    least = np.where(known >= 2, grouped_min(usual, cohort, cohort_count), np.nan)
    return ahead - least[cohort]


def device_bound(
    ahead_seconds: Floats, further_ahead_seconds: Floats, step_seconds: Floats, excess_seconds: Floats, policy: Policy
) -> Floats:
    """Of ranks that are slow by `excess_seconds`: 1 where the device is to blame, 0 where the host is, NaN where it is
    not known."""
    ahead, further = ahead_seconds, further_ahead_seconds
    is_far_ahead = (ahead >= policy.device_bound_ratio * step_seconds) & ~(further < NOT_FURTHER_SHARE * excess_seconds)
    needed = policy.device_bound_share * excess_seconds
    is_device = (ahead >= WHOLE_STEP_RATIO * step_seconds) | is_far_ahead | (further >= needed)
    is_host = (further < needed) | (ahead < needed)
    return np.where(is_device, 1.0, np.where(is_host, 0.0, np.nan))
