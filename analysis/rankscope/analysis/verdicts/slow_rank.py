"""The slow-rank comparison: which ranks stand out of their cohort in one window. Works on all jobs of a fleet at once.

A rank is compared by its own work with the ranks of the same job and pipeline stage. Ratio and score must both exceed
their thresholds (thresholds.py), and the step must get shorter by enough without the excess."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np

from rankscope.analysis.stats.robust import (
    MAD_TO_SIGMA,
    Bools,
    Floats,
    Ints,
    grouped_max,
    grouped_median,
    grouped_min,
    median_or_nan,
    number_groups,
)
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
from rankscope.analysis.verdicts.windows import RankColumns

# Of a normal distribution.
P10_TO_P90_SIGMAS = 2.563


def is_timed_on_device(columns: RankColumns) -> Bools:
    return ~np.isnan(columns.host_seconds)


def busy_seconds(columns: RankColumns) -> Floats:
    """Self time without checkpoints, which are excused."""
    own = columns.self_seconds
    return np.maximum(own - np.nan_to_num(columns.checkpoint_seconds), FIXED.least_work_ratio * own)


def queued_seconds(columns: RankColumns) -> Floats:
    """For a CPU, in usual steps. A rank that was late in long steps may have queued in them: what it queued more than
    its cohort is taken for that."""
    late = np.nan_to_num(columns.late_seconds)
    if not late.any():
        return columns.starved_seconds
    cohort, cohort_count = number_groups(columns.job, columns.stage)
    usual = grouped_median(columns.starved_seconds, cohort, cohort_count)[cohort]
    return columns.starved_seconds - np.minimum(late, np.maximum(columns.starved_seconds - usual, 0.0))


def work_seconds(columns: RankColumns) -> Floats:
    """Self time without checkpoints and without queueing for a CPU: that is the machine's doing, spreads by chance over
    the ranks that share it, and hides what a rank itself does. A device does not queue: what its host does is hidden
    while the host is ahead."""
    busy = busy_seconds(columns)
    queued = np.where(is_timed_on_device(columns), 0.0, np.nan_to_num(queued_seconds(columns)))
    return np.maximum(busy - queued, FIXED.least_work_ratio * busy)


@dataclass(frozen=True)
class Screen:
    """Per rank, against its cohort (same job, same pipeline stage)."""

    compared_seconds: Floats  # self time without checkpoints and, unless the rank is starved, without queueing
    reference_seconds: Floats
    impact_ratio: Floats  # share of the step that comes back if this rank ran like the rest; NaN if not an outlier
    starved: Bools  # it stands out by what it queued for a CPU, not by its work
    outlier: Bools
    lingering: Bools  # not an outlier, but not clearly back either (hysteresis)
    cohort_spread: Floats  # slowest ÷ fastest of the cohort, the same for all its ranks
    rank_ratio: Floats  # the ratio from which a rank of this cohort is slow
    ahead_seconds: Floats  # its host of its device; 0 where it is far behind the hosts of its cohort
    further_ahead_seconds: Floats  # its host than the hosts of its cohort, waiting left aside
    issued_late_share: Floats  # of the excess on the critical path: before the host issued operations; NaN: not known

    def slowest(self, among: Bools) -> int:
        """Its row; at least one is among them."""
        return int(np.flatnonzero(among)[np.argmax(np.nan_to_num(self.compared_seconds[among]))])

    def take(self, rows: Ints | Bools | slice) -> Screen:
        return Screen(**{f.name: getattr(self, f.name)[rows] for f in fields(self)})


@dataclass(frozen=True)
class _Comparison:
    """One measure of every rank against its cohort."""

    values: Floats
    reference: Floats
    ratio: Floats
    score: Floats
    impact: Floats

    def exceeds(self, ratio: float | Floats, score: float) -> Bools:
        return (self.ratio >= ratio) & (self.score >= score)


@np.errstate(all="ignore")
def screen(columns: RankColumns, policy: Policy) -> Screen:
    cohort, cohort_count = number_groups(columns.job, columns.stage)
    on_device = is_timed_on_device(columns)
    # A cohort is compared as one: what holds for the host's clock holds for all of it where one rank has no better.
    strictest = np.where(on_device | np.isnan(columns.self_seconds), policy.device_rank_ratio, policy.rank_ratio)
    rank_ratio = grouped_max(strictest, cohort, cohort_count)[cohort]
    noise = grouped_median(step_noise(columns), cohort, cohort_count)[cohort]
    queued = queued_seconds(columns)
    noise = np.maximum(policy.step_noise_weight * noise, _host_noise(queued, on_device, cohort, cohort_count))
    work = _compare(work_seconds(columns), columns, cohort, cohort_count, noise, rank_ratio, policy)
    busy = _compare(busy_seconds(columns), columns, cohort, cohort_count, noise, rank_ratio, policy)
    queued = np.nan_to_num(queued - grouped_median(queued, cohort, cohort_count)[cohort])
    excess = busy.values - busy.reference
    ahead = ahead_seconds(columns, cohort, cohort_count, policy)
    further_ahead = further_ahead_seconds(ahead, columns, cohort, cohort_count)
    # Where the device is to blame, its host may queue as long as it likes.
    host_counts = device_bound(ahead, further_ahead, columns.step_seconds, excess, policy) != 1.0
    mostly_queued = host_counts & (queued > 0) & (queued >= policy.starved_share * excess)
    slow = work.exceeds(rank_ratio, policy.rank_score) & (work.impact >= policy.impact_ratio)
    slow &= ~(on_device & mostly_queued)  # of a device's time the queueing was not taken out
    starved = ~slow & mostly_queued & busy.exceeds(policy.starved_rank_ratio, policy.rank_score)
    starved &= busy.impact >= policy.impact_ratio
    outlier = slow | starved
    half = policy.hysteresis
    lingering = work.exceeds(1 + half * (rank_ratio - 1), half * policy.rank_score)
    lingering |= mostly_queued & busy.exceeds(1 + half * (policy.starved_rank_ratio - 1), half * policy.rank_score)
    widest = grouped_max(work.values, cohort, cohort_count) / grouped_min(work.values, cohort, cohort_count)
    # A starved rank need not stand out by its work.
    widest = np.fmax(widest, grouped_max(np.where(starved, busy.ratio, np.nan), cohort, cohort_count))
    return Screen(
        compared_seconds=np.where(starved, busy.values, work.values),
        reference_seconds=np.where(starved, busy.reference, work.reference),
        impact_ratio=np.where(outlier, np.where(starved, busy.impact, work.impact), np.nan),
        starved=starved,
        outlier=outlier,
        lingering=lingering & ~outlier,
        cohort_spread=widest[cohort],
        rank_ratio=rank_ratio,
        ahead_seconds=ahead,
        further_ahead_seconds=further_ahead,
        issued_late_share=np.full(len(ahead), np.nan),
    )


def with_stalls(screened: Screen, columns: RankColumns, policy: Policy) -> Screen:
    """The comparison with what ranks lost in long steps, which a cause has to explain too."""
    # The critical path has the long steps already.
    late = np.where(np.isnan(screened.issued_late_share), np.nan_to_num(columns.late_seconds), 0.0)
    compared = screened.compared_seconds + late
    reference = screened.reference_seconds + median_or_nan(late)
    # Where ranks share CPUs, all of them queue: that explains no difference.
    queued_more = np.nan_to_num(columns.starved_seconds - median_or_nan(columns.starved_seconds))
    queued = queued_more >= policy.starved_share * (compared - reference)
    return replace(
        screened,
        compared_seconds=compared,
        reference_seconds=reference,
        starved=screened.starved | (queued & (late > 0) & ~is_timed_on_device(columns)),
    )


def step_noise(columns: RankColumns) -> Floats:
    """Standard error of a rank's mean over the steps of the window, from its own p10 and p90."""
    sigma = columns.self_seconds * (columns.self_spread_ratio - 1) / P10_TO_P90_SIGMAS
    return np.nan_to_num(sigma / np.sqrt(np.maximum(np.fmin(columns.steps, columns.self_steps), 1.0)))


def _host_noise(queued: Floats, on_device: Bools, cohort: Ints, cohort_count: int) -> Floats:
    """Noise of ranks that are timed by the host's clock. Where ranks queue for CPUs, they also lose time that is not
    counted as queueing: to a shared core, to caches, to preemption of the ranks that they wait for."""
    usual = np.nan_to_num(grouped_median(queued, cohort, cohort_count)[cohort])
    return np.where(on_device, 0.0, np.maximum(FIXED.queue_noise_ratio * usual, FIXED.host_noise_seconds))


def _compare(
    values: Floats,
    columns: RankColumns,
    cohort: Ints,
    cohort_count: int,
    noise: Floats,
    rank_ratio: Floats,
    policy: Policy,
) -> _Comparison:
    size = np.bincount(cohort[~np.isnan(values)], minlength=cohort_count)[cohort]
    median = grouped_median(values, cohort, cohort_count)[cohort]
    # A cohort of two compares a rank with the other one; their median would be the mean of culprit and victim.
    pair = size == 2
    reference = np.where(size < 2, np.nan, np.where(pair, 2 * median - values, median))
    deviation = np.where(pair, 0.0, grouped_median(np.abs(values - median), cohort, cohort_count)[cohort])
    floor = np.where(pair, 2, 1) * policy.spread_floor_ratio
    spread = np.maximum(MAD_TO_SIGMA * deviation, floor * reference)
    spread = np.maximum(spread, noise)
    ratio = values / reference
    score = (values - reference) / spread
    # What would come back: down to the slowest of the others, who then set the pace.
    standing_out = (ratio >= rank_ratio) & (score >= policy.rank_score)
    rest = grouped_max(np.where(standing_out, np.nan, values), cohort, cohort_count)[cohort]
    # A step is never shorter than the work in it.
    impact = np.maximum(values - np.fmax(reference, rest), 0) / np.fmax(columns.step_seconds, values)
    return _Comparison(values, reference, ratio, score, np.nan_to_num(impact))


# Whether a slow rank's device is to blame, or the host that gives it work.
#
# A host enqueues work ahead of its device. A slow device lets its host get ahead by about as much at some point of the
# step, even in a loop that synchronises every step; a host that is late is never further ahead than usual. The hosts of
# ranks that wait for a slow one are ahead as well, by what they wait, which is therefore taken off.


def waited_seconds(columns: RankColumns) -> Floats:
    """What a rank waited for others in a step, without what the transfer itself takes."""
    return np.maximum(columns.wait_seconds - columns.transfer_seconds, 0.0)


def ahead_seconds(columns: RankColumns, cohort: Ints, cohort_count: int, policy: Policy) -> Floats:
    """How far a rank's host was ahead. Where the other hosts are ahead by far more, they wait for this one: between two
    stalls a host gets ahead a little, and means over steps do not show how far the others were during a stall."""
    ahead = columns.run_ahead_seconds
    usual = grouped_median(ahead, cohort, cohort_count)[cohort]
    return np.where(ahead < policy.host_behind_ratio * usual, 0.0, ahead)


def further_ahead_seconds(ahead: Floats, columns: RankColumns, cohort: Ints, cohort_count: int) -> Floats:
    """How much further ahead a rank's host was than hosts of its cohort are without waiting; NaN where not known."""
    in_stalls = np.nan_to_num(columns.long_seconds - columns.late_seconds)
    usual = np.maximum(columns.run_ahead_seconds - waited_seconds(columns) - in_stalls, 0.0)
    known = np.bincount(cohort[~np.isnan(usual)], minlength=cohort_count)
    least = np.where(known >= 2, grouped_min(usual, cohort, cohort_count), np.nan)
    return ahead - least[cohort]


def device_bound(
    ahead_seconds: Floats, further_ahead_seconds: Floats, step_seconds: Floats, excess_seconds: Floats, policy: Policy
) -> Floats:
    """Of ranks that are slow by `excess_seconds`: 1 where the device is to blame, 0 where the host is, NaN where it is
    not known."""
    ahead, further = ahead_seconds, further_ahead_seconds
    is_alike = further < FIXED.device_not_further_share * excess_seconds
    is_far_ahead = (ahead >= policy.device_bound_ratio * step_seconds) & ~is_alike
    needed = policy.device_bound_share * excess_seconds
    is_device = (ahead >= FIXED.device_whole_step_ratio * step_seconds) | is_far_ahead | (further >= needed)
    is_host = (further < needed) | (ahead < needed)
    return np.where(is_device, 1.0, np.where(is_host, 0.0, np.nan))


# Cohorts in which the slow are too many for a median: one of two nodes is hot, or the data is uneven.


@dataclass(frozen=True)
class Split:
    slow: Bools  # per row
    fast_seconds: float  # median of the faster group
    slow_seconds: float
    follows_place: bool


def find_split(compared_seconds: Floats, place: Ints, rank_ratio: float) -> Split | None:
    """Two clear groups of at least two ranks each, or None.

    Clear: the gap between the groups is larger than either group is wide, and their medians are `rank_ratio` apart."""
    if len(compared_seconds) < 4 or bool(np.isnan(compared_seconds).any()):
        return None
    ordered = np.sort(compared_seconds)
    gaps = np.diff(ordered)[1:-1]  # leaves two on either side
    if len(gaps) == 0:
        return None
    cut = int(np.argmax(gaps)) + 2
    fast, slow = ordered[:cut], ordered[cut:]
    gap = slow[0] - fast[-1]
    fast_median, slow_median = float(np.median(fast)), float(np.median(slow))
    clear = slow_median >= rank_ratio * fast_median and gap > max(fast[-1] - fast[0], slow[-1] - slow[0])
    if not clear or len(slow) * 3 < len(ordered):
        return None  # a small slow group is the median's business
    is_slow = compared_seconds >= slow[0]
    follows = not np.intersect1d(place[is_slow], place[~is_slow]).size
    return Split(is_slow, fast_median, slow_median, follows)
