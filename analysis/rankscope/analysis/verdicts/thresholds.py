"""Every threshold, once: name, default, unit and meaning.

`Policy` is what the detector judges a job by, `FixedThresholds` what it uses for all jobs alike. `AlertThresholds` is
what only the Prometheus rules compare with. `FleetThresholds` is what `rankscope report fleet` compares with. The rules
and docs/thresholds.md take their numbers from here: `make rules`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple


def threshold(default: float | None, meaning: str, unit: str = "ratio") -> Any:
    """A field of the table. Returns Any, as `dataclasses.field` does in effect: the annotation gives the type."""
    return field(default=default, metadata={"unit": unit, "meaning": meaning})


@dataclass(frozen=True)
class Policy:
    # A rank against its cohort.
    rank_ratio: float = threshold(1.10, "A rank is slow from this ratio of its own work to its cohort's.")
    # Devices have far less noise than hosts. Self time still holds the communication that a framework overlaps with its
    # work, so that a slowdown by a tenth gives a ratio of little more than this.
    device_rank_ratio: float = threshold(1.05, "The same, where steps are timed on a device.")
    rank_score: float = threshold(
        4.0, "A rank is slow from this distance to its cohort, in spreads of the cohort.", "spreads"
    )
    spread_floor_ratio: float = threshold(
        0.01, "A cohort's spread is at least this share of its median; of two ranks, twice as much."
    )
    # Noise of neighbouring steps is alike, so it is larger than a standard error says, but much of it is queueing that
    # the comparison has taken out.
    step_noise_weight: float = threshold(0.7, "Share of the steps' own noise that counts as spread of a cohort.")
    # Ranks that share a busy CPU take turns in being last: queueing names a rank only when it dominates.
    starved_rank_ratio: float = threshold(1.5, "A rank that queues for a CPU is slow from this ratio.")
    starved_share: float = threshold(0.5, "Share of an excess from which queueing for a CPU explains it.")
    impact_ratio: float = threshold(0.02, "Nothing is raised below this share of the job's time.")
    hysteresis: float = threshold(0.5, "An alarm ends below this part of the way to its threshold.")
    # The job as a whole.
    stage_ratio: float = threshold(1.15, "A stage is slow from this ratio to the median of the other stages.")
    contended_ratio: float = threshold(
        0.05, "A machine is contended when ranks queue for a CPU for this share of the step."
    )
    imbalance_wait_ratio: float = threshold(0.15, "Data is uneven when ranks wait this share of the step in turn.")
    imbalance_spread: float = threshold(1.25, "Data is uneven from this ratio of a rank's slow steps to its fast ones.")
    imbalance_one_rank_share: float = threshold(
        0.5, "A rank that holds this share of the waiting over a window is late; the data is not uneven."
    )
    # Stalls: losses that sit in few steps.
    stall_share: float = threshold(0.5, "A rank stalls when it holds this share of what long steps lost.")
    stalls_needed: int = threshold(3, "A rank stalls after this many; in turn, ranks do after twice as many.", "stalls")
    jitter_impact_ratio: float = threshold(
        0.05, "Stalls that move from rank to rank are raised from this share of the job's time."
    )
    stall_note_ratio: float = threshold(
        0.05, "Long steps of all ranks together are mentioned from this share of the job's time."
    )
    communication_ratio: float = threshold(1.5, "Communication is slow from this ratio to the job's own past.")
    communication_impact_ratio: float = threshold(0.10, "Communication is slow when it grew by this share of the step.")
    input_bound_ratio: float = threshold(0.30, "A job is input-bound when it waits this share of the step for data.")
    mfu_target_ratio: float | None = threshold(None, "MFU is low below this. Each job has its own target, or none.")
    # Asynchronous runs.
    asynchronous_steps: float = threshold(
        10.0, "A run without collectives is asynchronous when its ranks are apart by this many steps.", "steps"
    )
    asynchronous_ratio: float = threshold(
        0.05, "The same, as a share of the steps of the rank that is ahead; both must hold, and grow."
    )
    server_wait_ratio: float = threshold(
        0.30, "A server is the bottleneck when its workers wait for it for this share of their time."
    )
    server_busy_ratio: float = threshold(0.80, "And when it works this share of its own time.")
    unmeasured_server_wait_ratio: float = threshold(
        0.50, "A server of which no waiting is measured is the bottleneck when workers wait for this share."
    )
    # Persistence.
    windows_kept: int = threshold(5, "Findings are counted over this many windows.", "windows")
    windows_for_alarm: int = threshold(3, "A finding in this many of them is an alarm.", "windows")
    windows_for_warning: int = threshold(2, "A finding in this many of them is a warning.", "windows")
    windows_damped: int = threshold(
        30, "A finding that returns within this many windows stays until it is absent for as many.", "windows"
    )
    # Abstention.
    ranks_seen_ratio: float = threshold(0.80, "Ranks are compared when this share of them reports.")
    steps_needed: int = threshold(20, "A job is judged after this many steps.", "steps")
    baseline_windows: int = threshold(4, "A job's own past is known after this many windows.", "windows")
    # Hangs: both must hold.
    hang_seconds: float = threshold(6.0, "A job hangs when no rank ends a step for this long.", "seconds")
    hang_steps: float = threshold(
        10.0, "A job hangs when no rank ends a step for this many of its usual steps.", "steps"
    )
    hang_checkpoint_seconds: float = threshold(
        60.0, "A job hangs in a checkpoint that makes no progress when no rank ends a step for this long.", "seconds"
    )
    # NCCL gives up after 600 s by default.
    hang_working_seconds: float = threshold(
        480.0, "A job hangs when ranks wait this long in one collective for a rank that is at work.", "seconds"
    )
    # Stacks alone, where no step is known.
    stack_windows: int = threshold(5, "Two stretches of this many windows must agree.", "windows")
    stack_samples_needed: int = threshold(30, "Each rank needs this many stack samples in each stretch.", "samples")
    stack_excess_share: float = threshold(
        0.12, "A rank is slow when it works this share of the time more than any peer."
    )
    stack_starved_share: float = threshold(
        0.3, "A rank is starved when it queues this share of the time more than any peer."
    )
    stack_score: float = threshold(4.0, "An excess in stacks counts from this distance to none.", "standard errors")
    # Causes.
    cause_share: float = threshold(0.80, "A phase is the cause when it holds this share of the excess.")
    stack_cause_share: float = threshold(0.5, "The same for a phase that is known from stacks only.")
    throttle_clock_ratio: float = threshold(1.05, "A GPU is throttled from this ratio of its peers' clock to its own.")
    throttle_busy_ratio: float = threshold(
        0.9, "A GPU is not throttled when it is less busy than this share of its peers."
    )
    throttle_share: float = threshold(
        0.3,
        "A GPU whose clock is not known is throttled when the driver reports it for this share of the time.",
    )
    device_bound_ratio: float = threshold(
        0.8, "A device is the bottleneck when its host is this share of a step ahead."
    )
    device_bound_share: float = threshold(
        0.5, "The same for a host that is ahead of its peers' hosts by this share of the excess."
    )
    host_behind_ratio: float = threshold(
        0.5, "A host is not ahead when it is so by less than this share of what its peers' hosts are."
    )
    # The network, where communication is slow. A link that was lost counts once.
    network_errors_per_minute: float = threshold(
        10.0, "Errors or retransmits of a port may be a cause from this many in a minute.", "events"
    )
    # A fabric that is not lossless works with some at all times.
    network_congestion_per_minute: float = threshold(1000.0, "The same for congestion notices.", "events")
    network_error_ratio: float = threshold(
        5.0, "They are a cause from this ratio to the port's own past in the job, or to the other nodes."
    )
    network_rate_ratio: float = threshold(
        0.5, "A link is slow at or below this share of the rate of the same link on other nodes."
    )
    network_retransmit_ratio: float = threshold(0.01, "TCP that sends this share of its segments again may be a cause.")
    network_segments_needed: int = threshold(
        1000, "TCP's retransmits are judged when this many segments were sent in a minute.", "segments"
    )
    network_used_ratio: float = threshold(
        0.05, "A port that carries less than this share of a node's traffic is not used by the job."
    )


@dataclass(frozen=True)
class FixedThresholds:
    """What turns figures into estimates: the same for all jobs."""

    queue_noise_ratio: float = threshold(
        0.1, "On the host's clock, a cohort's spread is at least this share of what its ranks queue for a CPU."
    )
    host_noise_seconds: float = threshold(
        0.00025, "On the host's clock, a cohort's spread is at least this in a step.", "seconds"
    )
    variation_score: float = threshold(
        3.0,
        "On the host's clock, a rank is slow from this ratio of its excess to what excesses vary by between windows.",
    )
    own_past_ratio: float = threshold(
        1.25, "A rank that trains alone is slow from this ratio of its own work to that earlier in the run."
    )
    path_impact_ratio: float = threshold(
        0.05,
        "On the critical path, a rank is slow when this share of a window would come back if it worked as its peers.",
    )
    path_alone_impact_ratio: float = threshold(
        0.1, "The same for the only rank of its pipeline stage, which is compared with its own past."
    )
    path_clear_impact_ratio: float = threshold(
        0.2, "From this share on, a window of the path that takes as long as several windows counts as two."
    )
    path_score: float = threshold(
        4.0, "Its loss must be this far from the usual loss of its peers over the steps.", "standard errors"
    )
    path_peers_ratio: float = threshold(
        3.0, "And this ratio to it: where data is uneven, every rank costs something, and one of them most."
    )
    path_compared_share: float = threshold(
        0.5, "The critical path is judged when peers do the same as this share of the work on it."
    )
    # Of 160 windows of healthy jobs on a shared GPU, none had more than 0.04 with such a growth.
    path_stage_impact_ratio: float = threshold(
        0.1, "A stage is slow on the critical path when this share would come back if it worked as usual."
    )
    path_stage_growth_ratio: float = threshold(
        1.15, "And when its own work is this ratio of what it was, beyond what the other stages' grew."
    )
    path_stage_ranks_share: float = threshold(
        0.5, "And when each of its ranks grew by this share of what the stage grew."
    )
    path_others_ratio: float = threshold(
        3.0, "A stage or a group without a past is slow on the path from this ratio to the others of its kind."
    )
    path_slowdown_share: float = threshold(
        0.5, "A loss against the past counts when steps became longer by this share of it."
    )
    # Healthy jobs on a shared GPU had none.
    path_uneven_impact_ratio: float = threshold(
        0.05, "Data is uneven on the critical path when even work of each stage's ranks would bring back this share."
    )
    path_stalled_share: float = threshold(
        0.1, "This share of steps, with the largest losses, does not show whether data is uneven: stalls are in few."
    )
    path_uneven_rest_ratio: float = threshold(
        0.02, "Data is uneven on the critical path when the other steps lose this share too."
    )
    window_filled_ratio: float = threshold(
        0.5, "Ranks are not compared in a window that steps fill by less than this share of the job's fullest window."
    )
    # Some of the queueing happens while a rank waits, and a checkpoint may be hidden from the device.
    least_work_ratio: float = threshold(
        0.1, "Queueing and checkpoints leave at least this share of a rank's self time."
    )
    # Of 153 windows of healthy jobs, NCCL over sockets, two had more.
    transfer_noise_ratio: float = threshold(
        0.08, "Members of a group do not wait when they differ by less than this share of the transfer."
    )
    unmarked_steps_ratio: float = threshold(
        1.8, "Ranks of a loop without an optimizer do not see the same steps from this ratio of their lengths on."
    )
    wait_of_step_ratio: float = threshold(
        1.02, "A wait is not used from this ratio to its step: clocks and rounding explain less."
    )
    clock_difference_seconds: float = threshold(
        0.25, "Clocks of nodes are apart from a step and this much on.", "seconds"
    )
    impact_alike_ratio: float = threshold(
        0.7, "An impact and the slowdown of the job are alike from this ratio of one to the other."
    )
    token_excess_ratio: float = threshold(
        0.15, "Tokens explain a rank's excess up to this share beyond their own excess."
    )
    hotter_celsius: float = threshold(10.0, "A GPU is hotter than its peers from this difference on.", "°C")
    throttle_named_share: float = threshold(0.05, "A reason of throttling is named from this share of the time.")
    # Hosts that enqueue ahead of their devices. One that waits in every step, in a full queue or because its loop
    # synchronises, gets ahead by one step at most.
    host_gained_steps: float = threshold(
        3.0, "A host that got further ahead by this many steps did not wait in as many: its quickest.", "steps"
    )
    host_quick_ratio: float = threshold(
        0.9, "The quickest steps of a host are its own below this share of the mean step."
    )
    host_not_ahead_steps: float = threshold(1.1, "A host that is ahead by less does not wait for its device.", "steps")
    # 1.2 to 1.35 of hosts that never wait (H200, DDP and local SGD). A fault in some of the steps gives more.
    host_usual_ratio: float = threshold(
        1.25, "The mean of a host's steps to its quickest, where the job does not show it."
    )
    host_varied_ratio: float = threshold(1.5, "The largest such ratio that is taken from the job.")
    # All are far ahead where their loop enqueues a step at once and then waits for it: the excess is somewhere else.
    device_not_further_share: float = threshold(
        0.2, "A host far ahead shows no slow device if it is further than its peers by less of the excess."
    )
    device_whole_step_ratio: float = threshold(
        1.1, "A loop that synchronises every step is never ahead by this ratio of a step."
    )
    # Stalls.
    late_share: float = threshold(0.05, "A rank is late in a window from this share of what it lost.")
    late_unknown_ratio: float = threshold(
        0.2, "The late rank is unknown if this share of ranks with long steps measured no waiting."
    )
    late_known_share: float = threshold(
        0.5, "It is known nevertheless when the other ranks hold this share of the loss."
    )
    late_named_share: float = threshold(
        0.25, "Long steps of all ranks together are judged when this share of the loss is known."
    )
    stall_divided_share: float = threshold(
        0.5, "A rank with less of another's long steps has the rest in the next window."
    )
    stall_gaps: float = threshold(3.0, "Stalls have ended when none came for this many of their usual gaps.", "gaps")
    stall_chance_of_one: float = threshold(
        0.005, "One rank stalls when chance would give it its share less often.", "probability"
    )
    stall_chance_of_all: float = threshold(
        0.1, "Ranks stall in turn when chance would give one its share at least as often.", "probability"
    )
    stall_quiet_ratio: float = threshold(
        0.1, "Stacks of a window show the usual when long steps take at most this share of it."
    )
    stall_line_share: float = threshold(0.4, "A line must explain this share of a stall.")
    stall_line_score: float = threshold(4.0, "A line must be this far from chance.", "standard errors")
    stall_line_samples: int = threshold(6, "A line must be in this many samples.", "samples")
    # Synchronous ranks differ by fewer steps, wherever the borders of windows fall.
    stretch_steps: int = threshold(8, "Ranks are compared over stretches in which the slowest makes these.", "steps")
    growth_steps: int = threshold(
        3, "Ranks do not meet when they drift apart by this many steps from stretch to stretch.", "steps"
    )
    server_steps_ratio: float = threshold(
        0.1, "A server makes as many steps as its workers together, up to this share."
    )
    server_frame_share: float = threshold(0.2, "A line is why a server is slow from this share of its stacks.")
    nccl_unchanged_seconds: float = threshold(
        3.0, "A rank is stuck when its GPU has not started or finished an operation for this long.", "seconds"
    )
    # NCCL's teardown may hang, too.
    hang_leaving_seconds: float = threshold(
        60.0, "Ranks that tear down their process groups or exit hang after this long.", "seconds"
    )
    # Stacks were dumped several times by then. What changes later is a process that is being ended.
    hang_refined_seconds: float = threshold(
        30.0, "A hang that is older names no other ranks, whatever is seen of them.", "seconds"
    )
    # Stacks alone, where no step is known.
    stack_excused_share: float = threshold(
        0.2, "Ranks are not compared while one spends more of its time in a checkpoint or a compilation."
    )
    stack_training_share: float = threshold(
        0.1, "Ranks are compared when one spends this share of its time in training."
    )
    stack_second_share: float = threshold(
        0.5, "No rank is slow when a second one has more than this share of its excess."
    )
    stack_waiting_share: float = threshold(
        0.4, "A slow rank waits less than its peers by at least this share of its excess."
    )


@dataclass(frozen=True)
class AlertThresholds:
    paging_impact_ratio: float = threshold(0.10, "A slow rank pages from this share of the job's time.")
    mfu_of_best_hour_ratio: float = threshold(
        0.85, "MFU is low below this share of the job's best hour, where no target is declared."
    )
    exposed_communication_ratio: float = threshold(
        0.30, "Communication is exposed when every rank waits this share of the step."
    )
    gpu_throttled_ratio: float = threshold(
        0.10, "A GPU is throttled when heat or a hardware fault lowers its clock for this share of the time."
    )
    gpu_power_capped_ratio: float = threshold(
        0.5, "A GPU is power-capped when it is at its cap for this share of the time."
    )
    # The power cap holds a busy GPU a little below its top clock as a rule.
    gpu_power_capped_clock_ratio: float = threshold(
        0.75, "A power cap is too low when it holds the clock below this share of its top."
    )
    gpu_idle_utilization_ratio: float = threshold(0.05, "A rank's GPU is idle below this utilization.")
    memory_limit_ratio: float = threshold(
        0.95, "Memory is near its limit when torch's peak is this share of the device."
    )
    memory_fragmented_ratio: float = threshold(
        0.25, "Memory is fragmented when this share of what torch reserved was never used on a full device."
    )
    memory_full_ratio: float = threshold(0.9, "A device is full when torch reserved this share of it.")
    capture_failed_ratio: float = threshold(0.5, "Captures fail when this share of their ranks does.")
    capture_slowdown_ratio: float = threshold(
        1.05, "A capture slowed a job from this ratio of the step after it to the one before."
    )
    # A daemon corrects itself above 1.
    daemon_budget_ratio: float = threshold(1.5, "A daemon is over budget from this ratio of its CPU use to its budget.")
    # Of 60 days they are renewed when 20 are left.
    certificate_left_seconds: float = threshold(604800, "A certificate expires soon below this.", "seconds")


@dataclass(frozen=True)
class FleetThresholds:
    run_gpu_hours: float = threshold(1.0, "Runs with fewer are not listed.", "GPU-hours")
    # Bad hardware.
    culprit_hours: float = threshold(
        0.5, "A node is the culprit of a run when verdicts name its devices for this long.", "hours"
    )
    culprit_runs: int = threshold(3, "A node is listed from this many runs of which it is the culprit.", "runs")
    culprit_excess: float = threshold(
        3.0, "A node is listed from this ratio of its share of culprit runs to the other nodes' share."
    )
    culprit_chance: float = threshold(
        0.01, "A node is listed if chance would list any node of the fleet with a lower probability."
    )
    culprit_gpu_share: float = threshold(
        0.8, "One GPU of a node is named when it has this share of the time in which the node's are named."
    )
    # Efficiency.
    mfu_of_target_ratio: float = threshold(
        0.98, "A run or team is below its MFU target when its mean is below this share of the target."
    )
    # Packing.
    packed_runs: int = threshold(5, "Runs of one image, command and user are repetitive from this many.", "runs")
    packed_gpu_hours: float = threshold(10.0, "Groups of repetitive runs with fewer are not listed.", "GPU-hours")
    packed_utilization_ratio: float = threshold(
        0.4, "Repetitive runs use their GPU little when their median utilization is below this."
    )
    shared_utilization_ratio: float = threshold(
        0.8, "Runs fit together when their utilization adds up to at most this."
    )
    shared_memory_ratio: float = threshold(
        0.9, "Runs fit together when their memory adds up to at most this share of the device's."
    )


DEFAULT_POLICY = Policy()
FIXED = FixedThresholds()
ALERT_THRESHOLDS = AlertThresholds()
FLEET_THRESHOLDS = FleetThresholds()


class Threshold(NamedTuple):
    name: str
    default: float | None
    unit: str
    meaning: str


def table(of: type[Policy | FixedThresholds | AlertThresholds | FleetThresholds]) -> Iterator[Threshold]:
    for one in fields(of):
        default: Any = one.default
        yield Threshold(one.name, default, **one.metadata)
