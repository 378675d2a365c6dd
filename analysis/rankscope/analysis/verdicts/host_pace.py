"""The host's own time for a step, of ranks that are timed on a device.

A rank's step takes as long as its device works or as its host needs to enqueue it, whichever is longer. The second does
not show while the host is ahead: its device does the work at once, and then waits for the rank whose host is last. That
rank looks slow, but where all hosts need as long, the job would not be faster without it. A host may also be ahead and
have caught up with nothing to wait for: where ranks do not meet in every step, as in local SGD, hosts drift apart."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints, grouped_max, number_groups
from rankscope.analysis.verdicts.figures import WindowFigures
from rankscope.analysis.verdicts.thresholds import FIXED


@np.errstate(all="ignore")
def own_pace(hosts: WindowFigures, job: Ints) -> Floats:
    """Seconds that the host needs for a step, at most those of the step; NaN where it is not known.

    Only the quickest steps of a host that is ahead are its own. By how much the others differ shows the slowest rank of
    the job, whose host is not ahead."""
    number, count = number_groups(job)
    is_slowest = hosts.self_seconds == grouped_max(hosts.self_seconds, number, count)[number]
    shows = is_slowest & (hosts.run_ahead_seconds < FIXED.host_not_ahead_steps * hosts.step_seconds)
    ratio = np.clip(hosts.host_seconds / hosts.host_quick_seconds, 1.0, FIXED.host_varied_ratio)
    ratio = grouped_max(np.where(shows, ratio, np.nan), number, count)[number]
    ratio = np.where(np.isnan(ratio), FIXED.host_usual_ratio, ratio)
    pace = np.minimum(hosts.host_quick_seconds * ratio, hosts.step_seconds)
    is_quick = hosts.host_quick_seconds < FIXED.host_quick_ratio * hosts.step_seconds
    is_own = is_quick & (hosts.host_gained_steps >= FIXED.host_gained_steps)
    return np.where(is_own, pace, np.nan)
