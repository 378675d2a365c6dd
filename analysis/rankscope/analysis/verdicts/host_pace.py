"""The host's own time for a step, of ranks that are timed on a device.

A rank's step takes as long as its device works or as its host needs to enqueue it, whichever is longer. The second does
not show while the host is ahead: its device does the work at once, and then waits for the rank whose host is last. That
rank looks slow, but where all hosts need as long, the job would not be faster without it. A host may also be ahead and
have caught up with nothing to wait for: where ranks do not meet in every step, as in local SGD, hosts drift apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints, grouped_max, number_groups

# A host that got further ahead by so many steps did not wait for its device in as many, and these are its quickest. One
# that waits in every step, in a full queue or because its loop synchronises, gets ahead by one at most.
NEEDED_GAIN_STEPS = 3.0
# Hosts that are as slow as the job have steps below this share of the mean. Those that wait all the time may have none.
QUICK_SHARE = 0.9
# A host that is ahead by less than this does not wait for its device, unless its loop synchronises every step.
NOT_AHEAD_STEPS = 1.1
# Mean of a host's steps to its quickest ones: 1.2 to 1.35 of hosts that never wait (H200, DDP and local SGD). A rank
# with a fault in some of its steps has more.
USUAL_RATIO = 1.25
MAX_RATIO = 1.5


@dataclass(frozen=True)
class HostFigures:
    """A value per rank; seconds and what is gained are those of a step."""

    step_seconds: Floats
    host_seconds: Floats
    run_ahead_seconds: Floats
    quick_seconds: Floats
    gained_steps: Floats


@np.errstate(all="ignore")
def own_pace(hosts: HostFigures, self_seconds: Floats, job: Ints) -> Floats:
    """Seconds that the host needs for a step, at most those of the step; NaN where it is not known.

    Only the quickest steps of a host that is ahead are its own. By how much the others differ shows the slowest rank of
    the job, whose host is not ahead."""
    number, count = number_groups(job)
    is_slowest = self_seconds == grouped_max(self_seconds, number, count)[number]
    shows = is_slowest & (hosts.run_ahead_seconds < NOT_AHEAD_STEPS * hosts.step_seconds)
    ratio = np.clip(hosts.host_seconds / hosts.quick_seconds, 1.0, MAX_RATIO)
    ratio = grouped_max(np.where(shows, ratio, np.nan), number, count)[number]
    ratio = np.where(np.isnan(ratio), USUAL_RATIO, ratio)
    pace = np.minimum(hosts.quick_seconds * ratio, hosts.step_seconds)
    is_own = (hosts.gained_steps >= NEEDED_GAIN_STEPS) & (hosts.quick_seconds < QUICK_SHARE * hosts.step_seconds)
    return np.where(is_own, pace, np.nan)
