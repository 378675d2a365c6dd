"""The thresholds of detection.md, in one place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Policy:
    # A rank is an outlier of its cohort when both hold.
    rank_ratio: float = 1.10
    # Where steps are timed on a device: far less noise than on a host. Self time still holds the communication that a
    # framework overlaps with its work, so that a slowdown by a tenth gives a ratio of little more than this.
    device_rank_ratio: float = 1.05
    rank_score: float = 4.0
    # The spread of a cohort is never taken as smaller than this share of its median, or a tight cohort condemns noise.
    # A pair has no spread to learn from, and both of its ranks are noisy: there it is twice as much.
    spread_floor_ratio: float = 0.01
    # How much of the steps' own noise (a standard error of the mean) counts as spread: noise of neighbouring steps is
    # alike, so it is larger than the error says, but much of it is queueing that the comparison has taken out.
    step_noise_weight: float = 0.7
    # Time on a run queue is the machine's doing before it is the rank's: ranks that share a busy CPU take turns in
    # being last. Only when it dominates does it name a rank.
    starved_rank_ratio: float = 1.5
    starved_share: float = 0.5  # of the excess, explained by run queue, quota or stop signal
    # Below half the way to the threshold a standing alarm may go.
    hysteresis: float = 0.5
    stage_ratio: float = 1.15
    imbalance_wait_ratio: float = 0.15  # of the step, waited for a rank that changes
    imbalance_spread: float = 1.25  # a rank's own slow steps against its own fast ones
    # Of what is waited, held by one rank over a whole window: such a rank is late, not unlucky.
    imbalance_one_rank_share: float = 0.5
    contended_ratio: float = 0.05  # of the step on run queues: spread means nothing on such a machine
    communication_ratio: float = 1.5
    communication_impact_ratio: float = 0.10
    input_bound_ratio: float = 0.30
    mfu_target_ratio: float | None = None
    impact_ratio: float = 0.02
    # k of the last n windows.
    windows_kept: int = 5
    windows_for_alarm: int = 3
    windows_for_warning: int = 2
    # A finding that comes back within so many windows (a minute of windows of 2 s) stays for as many.
    windows_damped: int = 30
    # Abstention.
    ranks_seen_ratio: float = 0.80
    steps_needed: int = 20
    baseline_windows: int = 4
    # A rank that has not stepped for so long, and longer than so many of its steps, stands still.
    hang_seconds: float = 6.0
    hang_steps: float = 10.0
    # Level 0: stacks alone. Two stretches of so many windows, one after the other, must tell the same story.
    stack_windows: int = 5
    stack_samples_needed: int = 30  # of each rank in each stretch
    stack_excess_share: float = 0.12
    stack_starved_share: float = 0.3
    stack_score: float = 4.0
    # A rank's GPU is the cause when its clock is so much lower than its peers', and it is not idler than theirs.
    throttle_clock_ratio: float = 1.05
    throttle_busy_ratio: float = 0.9
    throttle_share: float = 0.3  # of the time, where clocks are not known
    # A phase is named when it holds this share of the excess.
    cause_share: float = 0.80
    # The same from stacks, of which a window holds few.
    stack_cause_share: float = 0.5
    # A device is the bottleneck when its host is ahead of it by this share of a step, or further ahead than the hosts
    # of its peers by this share of the excess.
    device_bound_ratio: float = 0.8
    device_bound_share: float = 0.5


DEFAULT_POLICY = Policy()
