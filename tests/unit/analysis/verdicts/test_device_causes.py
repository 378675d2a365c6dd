"""A slow rank whose steps are timed on a device: a late host, a slow device, late input, or no CPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Cause, Kind, Severity
from rankscope.analysis.verdicts.windows import FrameSeen, GpuEvidence, RankEvidence, StackProfile
from tests.unit.analysis.device_jobs import DeviceJob, profile, told
from tests.unit.analysis.synthetic import watch, watch_each

HEALTHY = DeviceJob()
LOOPS = pytest.mark.parametrize("synchronises", [True, False], ids=["synchronised", "asynchronous"])
SLEEP = FrameSeen("sleeps", "train.py", 12, 0.55, 0.55, "forward")
HOOK = FrameSeen("hook", "train.py", 40, 0.55, 0.55, "backward")
USUAL = profile(30, forward=0.1, backward=0.1, device_sync=0.8)
SLEEPS = profile(30, SLEEP, forward=0.65, backward=0.1, device_sync=0.25)
MHZ = 1e6
GPU = GpuEvidence(1755 * MHZ, 1980 * MHZ, 1.0)


def seen(
    stacks: Mapping[int, StackProfile] | None = None, gpus: Mapping[int, GpuEvidence] | None = None
) -> dict[int, RankEvidence]:
    """Of four ranks; rank 2's own, and what is usual for the others."""
    return {
        rank: RankEvidence(
            stacks=stacks.get(rank, USUAL) if stacks is not None else None,
            gpu=gpus.get(rank, GPU) if gpus is not None else None,
        )
        for rank in range(4)
    }


def cause_of(job: DeviceJob, evidence: Mapping[int, RankEvidence] | None = None) -> Cause:
    verdict = watch((HEALTHY.but(synchronises=job.synchronises), 4), (job, 5), evidence=evidence)[-1]
    assert (verdict.kind, verdict.culprits, verdict.severity) == (Kind.SLOW_RANK, (2,), Severity.ALARM)
    return verdict.cause


def lines(cause: Cause) -> list[int]:
    return [frame.line for frame in cause.frames]


@LOOPS
def test_a_healthy_device_job_raises_nothing(synchronises: bool) -> None:
    for verdicts in watch_each((HEALTHY.but(synchronises=synchronises, noise=0.01), 60), seeds=range(4)):
        assert told(verdicts) == ["insufficient_data", "healthy"]


WAITS = FrameSeen("validate", "train.py", 599, 0.70, 0.70, "device_sync")
WAITS_LESS = FrameSeen("validate", "train.py", 599, 0.15, 0.15, "device_sync")
WAITS_AT_END = FrameSeen("log", "train.py", 640, 0.60, 0.60, "device_sync")


def test_a_host_that_waits_for_its_device_is_not_late() -> None:
    """The loop reads a value between forward and backward, so operations are issued when the device is done."""
    stacks = dict.fromkeys(range(4), profile(30, WAITS_LESS, WAITS_AT_END, forward=0.25, device_sync=0.75))
    stacks[2] = profile(30, WAITS, forward=0.25, device_sync=0.75)
    cause = cause_of(HEALTHY.but(synchronises=True, late={2: 0.060}), seen(stacks))
    assert (cause.bound, cause.phase) == (DEVICE, "device")


def test_a_late_host_waits_less_than_its_peers() -> None:
    stacks = dict.fromkeys(range(4), profile(30, WAITS_LESS, WAITS_AT_END, forward=0.25, device_sync=0.75))
    stacks[2] = profile(30, SLEEP, WAITS_LESS, forward=0.75, device_sync=0.25)
    cause = cause_of(HEALTHY.but(synchronises=True, late={2: 0.060}), seen(stacks))
    assert (cause.bound, lines(cause)) == (HOST, [12])


def test_ranges_of_a_healthy_job_raise_nothing() -> None:
    ranges = {rank: RankEvidence(ranges={"forward": 0.010 * rank, "loss": 0.030}) for rank in range(4)}
    assert told(watch((HEALTHY, 60), evidence=ranges)) == ["insufficient_data", "healthy"]


def test_a_slow_device_has_no_range() -> None:
    """Its host waits for it in some range, and that range is not the reason."""
    ranges = {rank: RankEvidence(ranges={"forward": 0.002}) for rank in range(4)}
    ranges[2] = RankEvidence(ranges={"forward": 0.1})
    cause = cause_of(HEALTHY.but(slow_device={2: 0.060}), ranges)
    assert cause.bound == DEVICE and "NVTX" not in cause.evidence


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_small_spread_that_changes_by_window_raises_nothing(ranks: int) -> None:
    for verdicts in watch_each((HEALTHY.but(ranks=ranks, noise=0.015), 100), seeds=range(4)):
        assert not any(verdict.kind.is_finding for verdict in verdicts)


@pytest.mark.parametrize("ranks", [2, 4, 16])
def test_a_device_slower_by_a_tenth_is_found_despite_transfers(ranks: int) -> None:
    slow = HEALTHY.but(ranks=ranks, slow_device={1: 0.005}, transfer_seconds=0.010)  # 50 ms of self time, not 40
    verdict = watch((HEALTHY.but(ranks=ranks), 4), (slow, 5))[-1]
    assert (verdict.kind, verdict.culprits, verdict.is_alarm) == (Kind.SLOW_RANK, (1,), True)
    assert verdict.impact_ratio == pytest.approx(5 / 57, abs=0.02)


def test_two_ranks_need_a_larger_difference_than_more_ranks() -> None:
    slow = HEALTHY.but(slow_device={1: 0.0030})
    assert watch((slow, 8))[-1].culprits == (1,)
    assert watch((slow.but(ranks=2), 8))[-1].kind is Kind.HEALTHY


def test_host_timed_ranks_must_differ_by_a_tenth() -> None:
    by_host = {rank: {"host_seconds": np.nan, "run_ahead_seconds": np.nan} for rank in range(4)}
    slow = HEALTHY.but(slow_device={1: 0.0035})
    assert watch((slow, 8))[-1].culprits == (1,)
    assert watch((slow.but(extra=by_host), 8))[-1].kind is Kind.HEALTHY
    # Nor where one of the ranks is timed by it.
    assert watch((slow.but(extra={0: by_host[0]}), 8))[-1].kind is Kind.HEALTHY


def test_a_policy_may_ask_for_more_on_devices_too() -> None:
    slow = HEALTHY.but(slow_device={1: 0.0035})
    assert watch((slow, 8), policy=Policy(device_rank_ratio=1.2))[-1].kind is Kind.HEALTHY


@pytest.mark.parametrize(("further_ahead", "bound"), [(0.0, HOST), (0.050, DEVICE)])
def test_the_stalls_themselves_tell_a_late_host(further_ahead: float, bound: str) -> None:
    """Between stalls all hosts get ahead by several steps, so that means over steps say nothing."""
    rare = {
        "long_seconds": 0.050,
        "long_ratio": 0.1,
        "late_seconds": 0.0,
        "run_ahead_seconds": 0.5,
        "step_seconds": 0.1,
    }
    late = {"late_seconds": 0.050, "late_ratio": 0.1, "late_ahead_seconds": further_ahead}
    job = HEALTHY.but(extra={**dict.fromkeys(range(4), rare), 2: {**rare, **late}})
    verdict = watch((HEALTHY, 4), (job, 8))[-1]
    assert (verdict.culprits, verdict.cause.bound) == ((2,), bound)
    assert verdict.cause.stalls == "in every 10th step for 500 ms"


class TestHostIsLate:
    @LOOPS
    def test_the_line_and_the_hosts_delay_are_named(self, synchronises: bool) -> None:
        job = HEALTHY.but(late={2: 0.060}, synchronises=synchronises)
        cause = cause_of(job, seen({2: SLEEPS}))
        assert (cause.bound, cause.phase) == (HOST, "forward")
        assert lines(cause) == [SLEEP.line]
        assert cause.evidence.startswith("its host is late by ")

    @LOOPS
    def test_the_range_that_holds_the_delay_is_named(self, synchronises: bool) -> None:
        usual = {"forward": 0.002, "backward": 0.040}
        ranges = {rank: RankEvidence(ranges=usual) for rank in range(4)}
        ranges[2] = RankEvidence(ranges={"forward": 0.061, "backward": 0.002})
        cause = cause_of(HEALTHY.but(late={2: 0.060}, synchronises=synchronises), ranges)
        assert cause.evidence.endswith("; 59.0 ms a step more in its NVTX range 'forward'")

    def test_a_range_with_little_of_the_delay_is_not_named(self) -> None:
        ranges = {rank: RankEvidence(ranges={"forward": 0.002}) for rank in range(4)}
        ranges[2] = RankEvidence(ranges={"forward": 0.012, "loss": 0.010})
        assert "NVTX" not in cause_of(HEALTHY.but(late={2: 0.060}), ranges).evidence

    def test_a_slight_delay_is_host_bound_in_a_synchronising_loop(self) -> None:
        """Its host is ahead by nine tenths of the step, as all hosts are."""
        assert cause_of(HEALTHY.but(late={2: 0.005})).bound == HOST

    def test_waiting_hosts_are_further_ahead_than_the_late_one(self) -> None:
        columns = HEALTHY.but(late={2: 0.060}).window(np.random.default_rng(0)).columns
        assert columns.run_ahead_seconds[2] == columns.run_ahead_seconds.min()

    def test_a_stalled_host_is_behind_those_that_wait_for_it(self) -> None:
        """Measured on an H200: rank 2 sleeps for 600 ms in every tenth step of a hand-written loop, and gets a step and
        a third ahead between two of them."""
        usual = {"step_seconds": 0.0643, "host_seconds": 0.0636, "transfer_seconds": 0.014, "run_ahead_seconds": 0.625}
        waits = usual | {"self_seconds": 0.003, "wait_seconds": 0.0613}
        stalls = usual | {"self_seconds": 0.0497, "wait_seconds": 0.0146, "run_ahead_seconds": 0.087}
        job = HEALTHY.but(extra={rank: stalls if rank == 2 else waits for rank in range(4)})
        cause = cause_of(job, seen({2: SLEEPS}))
        assert (cause.bound, lines(cause)) == (HOST, [SLEEP.line])

    def test_a_backward_delay_names_a_line_in_backward(self) -> None:
        """And not a line of forward that it is seen in a little more."""
        line = FrameSeen("forward", "model.py", 7, 0.3, 0.2, "forward")
        stacks = profile(30, line, HOOK, forward=0.3, backward=0.6, device_sync=0.1)
        cause = cause_of(HEALTHY.but(late={2: 0.060}), seen({2: stacks}))
        assert (cause.phase, lines(cause)) == ("backward", [HOOK.line])

    def test_the_phase_follows_the_line_where_waiting_hosts_are_blocked(self) -> None:
        blocked = profile(30, FrameSeen("linear", "torch/linear.py", 9, 0.8, 0.8, "forward"), forward=0.9, backward=0.1)
        job = HEALTHY.but(late={2: 0.060}, synchronises=False)
        stacks = {rank: SLEEPS if rank == 2 else blocked for rank in range(4)}
        cause = cause_of(job, seen(stacks))
        assert (cause.phase, lines(cause)) == ("forward", [SLEEP.line])

    def test_without_stacks_it_is_said_that_there_are_none(self) -> None:
        cause = cause_of(HEALTHY.but(late={2: 0.060}))
        assert (cause.bound, cause.phase, cause.frames) == (HOST, "unknown", ())
        assert cause.evidence == "its host is late by 60.0 ms a step; its stacks were not sampled"

    def test_stacks_that_show_nothing_name_no_phase(self) -> None:
        cause = cause_of(HEALTHY.but(late={2: 0.060}), seen({}))
        assert (cause.bound, cause.phase) == (HOST, "unknown")


class TestDeviceIsSlow:
    @LOOPS
    def test_no_line_is_named_and_the_clock_is_compared(self, synchronises: bool) -> None:
        job = HEALTHY.but(slow_device={2: 0.050}, synchronises=synchronises)
        cause = cause_of(job, seen({2: SLEEPS}, {}))
        assert (cause.bound, cause.phase, cause.frames) == (DEVICE, "device", ())
        assert cause.evidence.endswith("same clock as its peers (1,755 MHz), longer kernels")

    def test_a_little_slow_in_a_loop_that_synchronises_every_step(self) -> None:
        """At the border of a step its host is not ahead at all; at the furthest point it is, by more than its peers."""
        assert cause_of(HEALTHY.but(slow_device={2: 0.005})).bound == DEVICE

    def test_a_lower_clock_that_explains_it_is_the_cause(self) -> None:
        hot = GpuEvidence(900 * MHZ, 1980 * MHZ, 1.0, {"hw_thermal": 0.5})
        cause = cause_of(HEALTHY.but(slow_device={2: 0.020}), seen(gpus={2: hot}))
        assert (cause.bound, cause.phase, cause.frames) == (DEVICE, "throttled", ())
        assert "GPU at 900 of 1,980 MHz, hw_thermal 50% of the time" in cause.evidence

    def test_a_lower_clock_explaining_only_part_is_reported_as_part(self) -> None:
        cause = cause_of(HEALTHY.but(slow_device={2: 0.050}), seen(gpus={2: GpuEvidence(1600 * MHZ)}))
        assert cause.phase == "device"
        assert cause.evidence.endswith("GPU at 1,600 MHz; peers at 1,755 MHz: part of it")

    def test_a_lower_clock_behind_a_late_host_explains_nothing(self) -> None:
        """A GPU that waits for its host may clock down."""
        idle = GpuEvidence(600 * MHZ, 1980 * MHZ, 1.0)
        assert cause_of(HEALTHY.but(late={2: 0.060}), seen(gpus={2: idle})).phase == "unknown"

    def test_heat_and_other_ranks_on_the_same_gpu_are_told(self) -> None:
        gpus = {rank: GpuEvidence(1755 * MHZ, temperature_celsius=60, shared=True) for rank in range(4)}
        gpus[2] = GpuEvidence(1755 * MHZ, temperature_celsius=84, shared=True)
        evidence = cause_of(HEALTHY.but(slow_device={2: 0.050}), seen(gpus=gpus)).evidence
        assert evidence.endswith("longer kernels, 84 °C against 60 °C; other ranks use the same GPU")

    def test_ecc_errors_that_peers_lack_are_told_before_the_clock(self) -> None:
        gpus = {rank: replace(GPU, seconds=2.0, ecc_corrected_errors=0) for rank in range(4)}
        gpus[2] = replace(gpus[2], ecc_corrected_errors=4)
        evidence = cause_of(HEALTHY.but(slow_device={2: 0.050}), seen(gpus=gpus)).evidence
        clock = "same clock as its peers (1,755 MHz), longer kernels"
        # Summed over the windows in which the rank was slow.
        assert evidence.endswith(f"; 20 ECC errors on its GPU in 10 s, its peers none; {clock}")

    def test_a_pending_row_remap_is_told_beside_a_lower_clock(self) -> None:
        gpus = {rank: replace(GPU, ecc_corrected_errors=0, row_remap_pending=False) for rank in range(4)}
        gpus[2] = replace(gpus[2], sm_clock_hertz=900 * MHZ, row_remap_pending=True)
        cause = cause_of(HEALTHY.but(slow_device={2: 0.020}), seen(gpus=gpus))
        assert cause.phase == "throttled"
        assert cause.evidence.endswith("peers at 1,755 MHz; a pending row remap on its GPU, its peers none")

    def test_errors_of_a_gpu_whose_host_is_late_explain_nothing(self) -> None:
        gpus = {rank: replace(GPU, ecc_corrected_errors=4 if rank == 2 else 0) for rank in range(4)}
        assert "ECC" not in cause_of(HEALTHY.but(late={2: 0.060}), seen(gpus=gpus)).evidence

    def test_unknown_clocks_are_told_to_be_unknown(self) -> None:
        assert "clocks of the GPUs are not known" in cause_of(HEALTHY.but(slow_device={2: 0.050})).evidence

    def test_the_phase_that_ddps_timers_measured_is_told(self) -> None:
        forward = {rank: {"forward_seconds": 0.055 if rank == 2 else 0.005} for rank in range(4)}
        cause = cause_of(HEALTHY.but(slow_device={2: 0.050}, extra=forward))
        assert "more on its device, in forward;" in cause.evidence

    def test_a_host_that_meanwhile_queues_for_cpu_is_not_blamed(self) -> None:
        job = HEALTHY.but(slow_device={2: 0.010}, extra={2: {"starved_seconds": 0.008}})
        assert cause_of(job).phase == "device"


class TestInputIsLate:
    @LOOPS
    def test_a_device_that_stands_still_for_its_input(self, synchronises: bool) -> None:
        line = FrameSeen("__getitem__", "dataset.py", 9, 0.5, 0.5, "input")
        stacks = profile(30, line, input=0.6, forward=0.1, device_sync=0.3)
        job = HEALTHY.but(input={2: 0.060}, synchronises=synchronises)
        cause = cause_of(job, seen({2: stacks}))
        assert (cause.phase, lines(cause)) == ("input", [line.line])

    def test_input_that_all_ranks_wait_for_is_nobodys_cause(self) -> None:
        waits = {rank: {"input_seconds": 0.010} for rank in range(4)}
        assert cause_of(HEALTHY.but(late={2: 0.010}, extra=waits)).phase == "unknown"


class TestStarved:
    def test_queueing_that_holds_up_the_host(self) -> None:
        cause = cause_of(HEALTHY.but(starved={2: 0.060}))
        assert (cause.phase, cause.bound) == ("starved", HOST)

    def test_queueing_behind_the_device_raises_nothing(self) -> None:
        queues = {2: {"starved_seconds": 0.030}}
        assert watch((HEALTHY.but(extra=queues), 10))[-1].kind is Kind.HEALTHY

    def test_queueing_that_differs_between_hosts_makes_no_device_slow(self) -> None:
        """The rank that queues least would stand out if queueing were taken off its device's time."""
        queues = {rank: {"starved_seconds": 0.015} for rank in (0, 1, 3)}
        assert watch((HEALTHY.but(extra=queues), 10))[-1].kind is Kind.HEALTHY

    def test_a_little_queueing_names_no_rank(self) -> None:
        assert watch((HEALTHY.but(starved={2: 0.006}), 10))[-1].kind is Kind.HEALTHY


class TestBoundNotKnown:
    def test_where_run_ahead_is_not_measured_stacks_name_the_phase(self) -> None:
        unknown = {rank: {"run_ahead_seconds": np.nan} for rank in range(4)}
        cause = cause_of(HEALTHY.but(late={2: 0.060}, extra=unknown), seen({2: SLEEPS}))
        assert (cause.bound, cause.phase, lines(cause)) == ("", "forward", [SLEEP.line])

    def test_peers_with_unknown_run_ahead_are_left_out(self) -> None:
        unknown = {rank: {"run_ahead_seconds": np.nan} for rank in (0, 1)}
        assert cause_of(HEALTHY.but(slow_device={2: 0.050}, extra=unknown)).bound == DEVICE
        assert cause_of(HEALTHY.but(late={2: 0.060}, extra=unknown)).bound == HOST


def test_a_cause_that_changes_for_a_window_is_not_told() -> None:
    slow = HEALTHY.but(slow_device={2: 0.050})
    odd = slow.but(extra={2: {"run_ahead_seconds": 0.0}})
    verdicts = watch((HEALTHY, 4), (slow, 5), (odd, 1), (slow, 1))
    assert {verdict.cause.bound for verdict in verdicts[5:]} == {DEVICE}
    assert watch((HEALTHY, 4), (slow, 3), (odd, 2))[-1].cause.bound == HOST


def test_uneven_data_on_devices_blames_nobody() -> None:
    verdict = watch((HEALTHY.but(ranks=16, uneven=0.4), 10))[-1]
    assert (verdict.kind, verdict.culprits) == (Kind.DATA_IMBALANCE, ())
    assert verdict.impact_ratio is not None and 0.15 < verdict.impact_ratio < 0.7


def test_ranks_that_share_a_gpu_are_not_uneven_data() -> None:
    gpus = {rank: GpuEvidence(1755 * MHZ, shared=True) for rank in range(16)}
    verdict = watch((HEALTHY.but(ranks=16, uneven=0.4), 10), evidence=seen(gpus=gpus))[-1]
    assert verdict.kind is Kind.HEALTHY


# A step, and each rank's time in collectives, in ms: 4 NCCL ranks on an H200. A rank's wait is its own less the least.
MEASURED = {
    "fsdp2, healthy": (40.5, (32.6, 31.8, 33.4, 33.0), None),
    "fsdp2, slow device": (86.9, (79.7, 80.0, 31.0, 79.7), 0.53),
    "fsdp2, late host": (99.0, (93.9, 92.7, 34.1, 89.4), 0.58),
    "hand-written, slow device": (59.4, (57.4, 57.3, 6.1, 57.4), 0.86),
    "hand-written, host late by 3 ms of 11": (11.1, (7.8, 7.7, 5.3, 8.1), 0.22),
    "ddp, slow device": (58.2, (56.45, 56.4, 5.4, 56.4), 0.87),
    "fsdp2, slow device hidden by prefetch": (40.4, (32.2, 34.4, 31.2, 32.2), None),
}


@pytest.mark.parametrize(("step", "spans", "impact"), MEASURED.values(), ids=MEASURED)
def test_verdicts_on_what_was_measured(step: float, spans: tuple[float, ...], impact: float | None) -> None:
    own = [(step - (span - min(spans))) / 1e3 for span in spans]
    extra = {
        rank: {"step_seconds": step / 1e3, "self_seconds": seconds, "wait_seconds": step / 1e3 - seconds}
        for rank, seconds in enumerate(own)
    }
    verdicts = watch((HEALTHY.but(extra=extra), 8))
    if impact is None:
        assert told(verdicts) == ["insufficient_data", "healthy"]
        return
    assert told(verdicts) == ["insufficient_data", "slow_rank"]
    assert verdicts[-1].culprits == (2,)
    assert verdicts[-1].impact_ratio == pytest.approx(impact, abs=0.06)


# Windows of a healthy HF Trainer on the H200: a step, and each rank's own work, in ms; the ratio of its slow steps to
# its fast ones; how many were measured.
PAIRED_BY_CHANCE = (
    (21.4, (8.28, 8.53, 9.71, 9.23), (1.27, 1.36, 1.92, 3.27), 73),
    (23.6, (8.67, 9.49, 8.86, 9.18), (1.23, 1.30, 1.35, np.nan), 5),
    (23.0, (8.86, 7.76, 8.06, 7.74), (1.19, 1.13, 1.20, np.nan), 5),
    (23.9, (9.91, 9.75, 10.74, 10.98), (1.18, 1.26, 1.21, np.nan), 3),
    (22.0, (9.58, 11.27, 9.60, 10.98), (1.15, 1.55, 1.18, 5.28), 6),
    (24.9, (11.68, 11.31, 12.86, 11.81), (1.25, 1.03, 1.32, np.nan), 4),
)


def test_ranks_paired_by_step_noise_are_not_uneven_data() -> None:
    phases = []
    for step, own, spreads, samples in PAIRED_BY_CHANCE:
        extra = {
            rank: {
                "step_seconds": step / 1e3,
                "self_seconds": seconds / 1e3,
                "wait_seconds": (max(own) - seconds) / 1e3,
                "self_spread_ratio": spread,
                "self_steps": samples,
            }
            for rank, (seconds, spread) in enumerate(zip(own, spreads, strict=True))
        }
        phases.append((HEALTHY.but(extra=extra), 1))
    assert told(watch(*phases)) == ["insufficient_data", "healthy"]
