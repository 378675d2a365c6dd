"""The detector on synthetic jobs, one behaviour after the other."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import PurePath

import numpy as np
import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.stack_verdict import judge_stacks
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity
from rankscope.analysis.verdicts.windows import (
    FrameSeen,
    JobWindow,
    RankColumns,
    RankEvidence,
    StackProfile,
    Stall,
    columns_of,
)
from tests.unit.analysis.synthetic import SyntheticJob, watch, watch_each

Judged = tuple[str, tuple[int, ...], str, Cause]  # kind, culprits, confidence, cause

HEALTHY = SyntheticJob()


def test_a_healthy_job_raises_nothing() -> None:
    for verdicts in watch_each((HEALTHY, 30), seeds=range(20)):
        assert {verdict.kind for verdict in verdicts[2:]} == {Kind.HEALTHY}


def test_a_slow_rank_is_named_despite_equal_step_times() -> None:
    job = HEALTHY.but(slow_ranks={2: 1.6})
    columns = job.window(np.random.default_rng(0)).columns
    assert np.ptp(columns.step_seconds) == 0
    verdict = watch((HEALTHY, 5), (job, 5))[-1]
    assert (verdict.kind, verdict.culprits, verdict.severity) == (Kind.SLOW_RANK, (2,), Severity.ALARM)
    assert verdict.cause.phase == "forward"
    # 50 ms became 80: without it the step of 85 would be 55 again.
    assert verdict.impact_ratio == pytest.approx(30 / 85, abs=0.03)


def test_the_rank_that_waits_most_is_never_the_culprit() -> None:
    verdict = watch((HEALTHY.but(slow_ranks={2: 0.5}), 10))[-1]  # rank 2 is early, and waits for all others
    assert verdict.culprits == ()


@pytest.mark.parametrize("phase", ["input", "forward", "backward", "optimizer", "other"])
def test_the_phase_that_holds_the_excess_is_the_cause(phase: str) -> None:
    assert watch((HEALTHY.but(slow_ranks={1: 1.5}, excess_phase=phase), 6))[-1].cause.phase == phase


def test_a_named_cause_is_kept_when_noise_hides_it() -> None:
    clear = HEALTHY.but(slow_ranks={1: 1.6})
    hidden = {"forward_seconds": 0.025, "backward_seconds": 0.045, "optimizer_seconds": 0.010}
    verdicts = watch((clear, 5), (clear.but(extra={1: hidden}), 3))
    assert [v.cause.phase for v in verdicts[-4:]] == ["forward"] * 4


def test_a_long_backward_names_a_line_in_backward() -> None:
    hook = FrameSeen("hook", "train.py", 40, 0.4, 0.4, "backward_code")
    line = FrameSeen("forward", "model.py", 7, 0.3, 0.2, "forward")
    stacks = {
        rank: RankEvidence(StackProfile(40, {"forward": 0.3, "backward": 0.6}, (line, hook) if rank == 1 else ()))
        for rank in range(4)
    }
    job = HEALTHY.but(slow_ranks={1: 1.6}, excess_phase="backward")
    fleet, random = FleetDetector(), np.random.default_rng(0)
    for number in range(6):
        verdict = fleet.evaluate({"job": job.window(random, number, stacks)})["job"]
    assert (verdict.cause.phase, [frame.line for frame in verdict.cause.frames]) == ("backward", [hook.line])


def test_an_excess_spread_over_phases_has_no_named_cause() -> None:
    spread = {"forward_seconds": 0.030, "backward_seconds": 0.045, "optimizer_seconds": 0.012}
    job = HEALTHY.but(slow_ranks={1: 1.6}, excess_phase="forward", extra={1: spread})
    assert watch((job, 6))[-1].cause.phase == "unknown"


def test_a_warning_needs_two_windows_and_an_alarm_three() -> None:
    verdicts = watch((HEALTHY, 6), (HEALTHY.but(slow_ranks={3: 1.5}), 3))
    assert [v.severity for v in verdicts[-4:]] == [Severity.NONE, Severity.NONE, Severity.WARNING, Severity.ALARM]


def test_one_bad_window_is_not_a_straggler() -> None:
    assert not any(v.is_alarm for v in watch((HEALTHY, 6), (HEALTHY.but(slow_ranks={3: 3.0}), 1), (HEALTHY, 6)))


def test_an_alarm_goes_only_when_the_rank_is_clearly_back() -> None:
    slow, lingering = HEALTHY.but(slow_ranks={3: 1.3}), HEALTHY.but(slow_ranks={3: 1.07}, noise=0.002)
    verdicts = watch((HEALTHY, 5), (slow, 5), (lingering, 10), (HEALTHY, 6))
    assert all(v.is_alarm for v in verdicts[9:19])
    assert verdicts[-1].kind is Kind.HEALTHY


def test_an_impact_below_two_percent_raises_nothing() -> None:
    # 12 % slower than its peers, but steps are long because of communication.
    job = HEALTHY.but(slow_ranks={1: 1.12}, transfer_seconds=0.6, noise=0.001)
    assert watch((job, 8))[-1].kind is Kind.HEALTHY


def test_the_loss_grows_with_the_ranks_that_wait() -> None:
    verdict = watch((HEALTHY, 5), (HEALTHY.but(slow_ranks={2: 2.0}), 10))[-1]
    assert verdict.lost_gpu_seconds == pytest.approx(verdict.impact_ratio * 2.0 * 4 * 9, rel=0.1)  # type: ignore[operator]


def test_a_cohort_of_two_compares_a_rank_with_the_other() -> None:
    verdict = watch((SyntheticJob(data=2, slow_ranks={0: 1.3}), 6))[-1]
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (0,))


def test_ranks_are_compared_only_within_their_stage() -> None:
    job = SyntheticJob(pipeline=4, data=4, slow_stages={3: 1.6}, slow_ranks={1: 1.5})
    verdict = watch((job, 6))[-1]
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (1,))


def test_a_long_stage_condemns_the_stage_and_no_rank() -> None:
    verdict = watch((SyntheticJob(pipeline=4, data=2), 5), (SyntheticJob(pipeline=4, data=2, slow_stages={3: 1.6}), 5))[
        -1
    ]
    assert (verdict.kind, verdict.stage, verdict.culprits) == (Kind.SLOW_STAGE, 3, (6, 7))


@pytest.mark.parametrize("seed", range(5))
def test_a_contended_pipeline_is_not_a_slow_stage(seed: int) -> None:
    """Queueing is known for the training thread only. The threads that it waits for queue too, and its work takes
    longer: measured at a load of 14 to 22 on two cores, stages that do the same work are 1.16 to 1.53 times apart."""
    random = np.random.default_rng(seed)
    queued = {rank: {"starved_seconds": 0.03} for rank in range(4)}

    def under_load(stage: int, factor: float) -> SyntheticJob:
        slow = {stage: factor}
        return SyntheticJob(pipeline=2, data=2, self_seconds=0.08, noise=0.1, slow_stages=slow, extra=queued)

    healthy = [(under_load(int(random.integers(2)), random.uniform(1.0, 1.25)), 1) for _ in range(60)]
    assert not any(verdict.kind is Kind.SLOW_STAGE for verdict in watch(*healthy, seed=seed))
    verdict = watch((under_load(0, 1.0), 5), (under_load(1, 2.5), 6), seed=seed)[-1]
    assert (verdict.kind, verdict.stage, verdict.severity) == (Kind.SLOW_STAGE, 1, Severity.ALARM)


def test_a_hot_nodes_ranks_are_reported_once_as_that_node() -> None:
    job = SyntheticJob(data=16, nodes=4, slow_ranks=dict.fromkeys(range(4, 8), 1.4))
    verdict = watch((job, 6))[-1]
    assert (verdict.kind, verdict.culprits, verdict.group) == (Kind.SLOW_RANK, (4, 5, 6, 7), "node node-1")


def test_one_hot_node_of_two_is_found() -> None:
    job = SyntheticJob(data=8, nodes=2, slow_ranks=dict.fromkeys(range(4), 1.4))
    verdict = watch((job, 6))[-1]
    assert (verdict.kind, verdict.group) == (Kind.SLOW_RANK, "node node-0")


def test_a_split_that_follows_no_node_is_uneven_data() -> None:
    job = SyntheticJob(data=8, nodes=2, slow_ranks=dict.fromkeys((0, 2, 5, 7), 1.4))
    assert watch((job, 6))[-1].kind is Kind.DATA_IMBALANCE


def test_uneven_data_blames_nobody() -> None:
    verdict = watch((SyntheticJob(data=32, uneven=0.3), 8))[-1]
    assert (verdict.kind, verdict.culprits) == (Kind.DATA_IMBALANCE, ())


def test_a_slow_network_is_found_from_history_and_blames_nobody() -> None:
    verdict = watch((HEALTHY, 8), (HEALTHY.but(transfer_seconds=0.060), 5))[-1]
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_COMMUNICATION, ())
    assert verdict.impact_ratio == pytest.approx(55 / 110, abs=0.05)


@pytest.mark.parametrize(("transfer_seconds", "is_slow"), [(0.018, False), (0.060, True)])
def test_a_transfer_varies_by_what_ranks_queue(transfer_seconds: float, is_slow: bool) -> None:
    """Seen with four ranks on two cores: they queue for a quarter of each step, at all times."""
    queued = HEALTHY.but(extra={rank: {"starved_seconds": 0.02} for rank in range(8)})
    verdict = watch((queued, 8), (queued.but(transfer_seconds=transfer_seconds), 5))[-1]
    assert verdict.kind is (Kind.SLOW_COMMUNICATION if is_slow else Kind.HEALTHY)


def test_a_generally_busy_machine_is_not_a_slow_network() -> None:
    busy = HEALTHY.but(transfer_seconds=0.015, self_seconds=0.110)
    assert not any(v.is_alarm for v in watch((HEALTHY, 8), (busy, 8)))


def test_run_queue_time_names_a_rank_only_when_dominant() -> None:
    def queued(factor: float) -> SyntheticJob:
        return HEALTHY.but(slow_ranks={1: factor}, extra={1: {"starved_seconds": 0.05 * (factor - 1)}})

    assert not any(v.is_alarm for v in watch((HEALTHY, 5), (queued(1.3), 8)))
    verdict = watch((HEALTHY, 5), (queued(3.0), 5))[-1]
    assert (verdict.kind, verdict.culprits, verdict.cause.phase) == (Kind.SLOW_RANK, (1,), "starved")
    # A rank that lacks a CPU while it waits, too, lacks it for longer than its own work takes longer.
    job = HEALTHY.but(slow_ranks={1: 2.0}, extra={1: {"starved_seconds": 0.4}})
    starved = watch((HEALTHY, 5), (job, 5))[-1].cause
    assert starved.phase == "starved"
    assert re.fullmatch(
        r"400\.0 ms a step more without a CPU than its peers; its own work takes \d\d\.\d ms longer", starved.evidence
    ), starved.evidence


def test_a_checkpoint_is_not_a_straggler() -> None:
    saving = HEALTHY.but(slow_ranks={0: 5.0}, excess_phase="checkpoint")
    assert not any(v.is_alarm for v in watch((HEALTHY, 5), (saving, 6)))


@pytest.mark.parametrize(("ranks", "who"), [(4, "all ranks wait"), (1, "the rank waits")])
def test_a_job_that_waits_for_data_everywhere_is_input_bound(ranks: int, who: str) -> None:
    waiting = {rank: {"input_seconds": 0.030} for rank in range(ranks)}
    verdict = watch((HEALTHY.but(data=ranks, extra=waiting), 6))[-1]
    assert verdict.kind is Kind.INPUT_BOUND and verdict.reason.startswith(f"{who} for data, ")


def test_low_mfu_needs_a_target() -> None:
    job = HEALTHY.but(extra={rank: {"mfu_ratio": 0.2} for rank in range(4)})
    assert watch((job, 6))[-1].kind is Kind.HEALTHY
    assert watch((job, 6), policy=Policy(mfu_target_ratio=0.4))[-1].kind is Kind.LOW_MFU


class TestAbstention:
    def test_fewer_than_twenty_steps(self) -> None:
        verdict = watch((HEALTHY.but(steps=6, slow_ranks={1: 3.0}), 3))[-1]
        assert (verdict.kind, verdict.reason) == (Kind.INSUFFICIENT_DATA, "18 steps seen, 20 needed")

    def test_fewer_than_four_fifths_of_the_ranks(self) -> None:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        job = SyntheticJob(data=10, slow_ranks={1: 3.0})
        for number in range(6):
            verdict = fleet.evaluate({"job": job.window(random, number, missing=(7, 8, 9))})["job"]
        assert (verdict.kind, verdict.reason) == (Kind.INSUFFICIENT_DATA, "7 of 10 ranks report")

    def test_clocks_apart_by_more_than_a_step(self) -> None:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        for number in range(6):
            window = SyntheticJob(slow_ranks={1: 3.0}).window(random, number)
            verdict = fleet.evaluate({"job": replace(window, clock_skew_seconds=3.0)})["job"]
        assert verdict.kind is Kind.INSUFFICIENT_DATA and "clocks" in verdict.reason


def test_steps_longer_than_a_window_are_gathered_before_comparison() -> None:
    job = HEALTHY.but(self_seconds=1.5, transfer_seconds=0.1, steps=1, slow_ranks={2: 1.5})
    verdicts = watch((job, 60))
    assert (verdicts[-1].kind, verdicts[-1].culprits) == (Kind.SLOW_RANK, (2,))
    assert not any(v.culprits not in ((), (2,)) for v in verdicts)


def test_a_window_without_a_sample_of_the_wait_changes_nothing() -> None:
    slow = HEALTHY.but(slow_ranks={2: 1.6})
    blind = slow.but(extra={rank: {"self_seconds": np.nan} for rank in range(4)})
    verdicts = watch((HEALTHY, 4), (slow, 5), (blind, 2), (slow, 2), (blind, 20))
    assert all(v.culprits == (2,) for v in verdicts[8:13])
    assert verdicts[-1].kind is Kind.INSUFFICIENT_DATA  # but not forever


def test_steps_without_a_length_are_not_measured_and_break_nothing() -> None:
    broken = SyntheticJob(extra={rank: {"step_seconds": 0.0} for rank in range(4)})
    verdicts = watch((SyntheticJob(), 8), (broken, 6), (SyntheticJob(), 4))
    assert {verdict.kind for verdict in verdicts[2:]} == {Kind.HEALTHY}


class TestHang:
    def judge(
        self, stalls: dict[int, Stall | None], departed: tuple[int, ...] = ()
    ) -> tuple[Kind, tuple[int, ...], str]:
        random, fleet = np.random.default_rng(0), FleetDetector()
        for number in range(5):
            fleet.evaluate({"job": HEALTHY.window(random, number)})
        window = HEALTHY.but(steps=20).window(random, 6, missing=departed)
        steps = np.array([0.0 if stalls.get(rank) else 5.0 for rank in window.columns.rank.tolist()])
        nothing = np.full(len(steps), np.nan)
        still = replace(window.columns, steps=steps, self_seconds=nothing, step_seconds=nothing)
        window = replace(window, columns=still, departed=departed, stalls=lambda: stalls)
        for _ in range(8):  # for longer than the peers of a rank that ended are given to end as well
            verdict = fleet.evaluate({"job": window})["job"]
        return verdict.kind, verdict.culprits, verdict.cause.phase

    def waiting(self, ranks: int = 4, **changes: object) -> dict[int, Stall | None]:
        stall = Stall(9.0, "communication", ("all_reduce (distributed_c10d.py:2)",), same_stack_looks=2)
        return dict.fromkeys(range(ranks), replace(stall, **changes))

    def test_the_rank_that_entered_fewer_collectives_never_entered(self) -> None:
        stalls = self.waiting(phase="backward", collectives_enqueued=101, collectives_completed=100)
        stalls[1] = Stall(9.0, "forward", ("wait_for_shard (model.py:7)",), 100, 100, 2)
        assert self.judge(stalls) == (Kind.HANG, (1,), "forward")

    def test_without_counters_the_rank_that_does_not_wait_is_named(self) -> None:
        stalls = self.waiting()
        stalls[3] = Stall(9.0, "input", ("read (dataset.py:3)",), same_stack_looks=2)
        assert self.judge(stalls) == (Kind.HANG, (3,), "input")

    def test_a_rank_in_a_backward_hook_is_not_waiting(self) -> None:
        stalls = self.waiting(phase="backward")
        stalls[3] = Stall(9.0, "backward_code", ("compress (model.py:88)",), same_stack_looks=2)
        assert self.judge(stalls) == (Kind.HANG, (3,), "backward")

    def test_without_stacks_the_counters_alone_tell(self) -> None:
        stalls = self.waiting(
            phase=None, stack=(), same_stack_looks=None, collectives_enqueued=7, collectives_completed=6
        )
        stalls[2] = Stall(9.0, None, (), 6, 6)
        assert self.judge(stalls)[:2] == (Kind.HANG, (2,))

    def test_when_all_stand_in_the_same_place_nobody_is_named(self) -> None:
        assert self.judge(self.waiting())[:2] == (Kind.HANG, ())

    def test_a_long_evaluation_is_not_a_hang(self) -> None:
        assert self.judge(self.waiting(phase="forward"))[0] is not Kind.HANG  # at work, in one long function
        assert self.judge(self.waiting(same_stack_looks=1))[0] is not Kind.HANG  # seen to move on
        assert self.judge(self.waiting(phase=None, stack=(), same_stack_looks=None))[0] is not Kind.HANG  # not seen

    def test_a_long_checkpoint_is_not_a_hang(self) -> None:
        stalls = self.waiting(seconds_since_step=60.0)
        stalls[0] = Stall(60.0, "checkpoint", same_stack_looks=2)
        assert self.judge(stalls)[0] is not Kind.HANG

    def test_an_ended_rank_is_named_while_the_others_wait(self) -> None:
        assert self.judge(self.waiting(ranks=3), departed=(3,))[:2] == (Kind.HANG, (3,))

    def test_one_rank_that_moves_is_no_hang(self) -> None:
        stalls = self.waiting()
        stalls[2] = None
        assert self.judge(stalls)[0] is not Kind.HANG


def _profile(forward: float, slow_line: float, waiting: float, samples: int = 20) -> StackProfile:
    frames = (
        FrameSeen("train", "train.py", 40, 1.0, 0.0, "other"),
        FrameSeen("forward", "model.py", 30, forward + slow_line, forward, "forward"),
        FrameSeen("normalize", "model.py", 88, slow_line, slow_line, "forward"),
        FrameSeen("backward", "torch/_tensor.py", 600, waiting, waiting, "backward"),
    )
    return StackProfile(samples, {"forward": forward + slow_line, "backward": waiting}, frames)


def _profile_of_backward(forward: float, hook: float, waiting: float) -> StackProfile:
    """Four lines of forward, one of a hook that autograd calls, and the engine, where a rank may wait."""
    frames = (
        FrameSeen("train", "train.py", 41, hook + waiting, 0.0, "backward"),
        *(FrameSeen("forward", "model.py", 30 + line, forward / 4, forward / 4, "forward") for line in range(4)),
        FrameSeen("compress", "model.py", 88, hook, hook, "backward_code"),
        FrameSeen("_engine_run_backward", "torch/autograd/graph.py", 979, hook + waiting, waiting, "backward"),
    )
    return StackProfile(20, {"forward": forward, "backward_code": hook, "backward": waiting}, frames)


class TestDelayInsideBackward:
    def cause(self, slow: StackProfile, usual: StackProfile, phase: str) -> Cause:
        job, random, fleet = (
            HEALTHY.but(slow_ranks={1: 1.6}, excess_phase=phase),
            np.random.default_rng(0),
            FleetDetector(),
        )
        evidence = {rank: RankEvidence(stacks=slow if rank == 1 else usual) for rank in range(4)}
        verdicts = [fleet.evaluate({"job": job.window(random, number, evidence)})["job"] for number in range(6)]
        assert (verdicts[-1].kind, verdicts[-1].culprits) == (Kind.SLOW_RANK, (1,))
        return verdicts[-1].cause

    def test_the_backward_line_is_named_despite_excess_forward_lines(self) -> None:
        cause = self.cause(_profile_of_backward(0.5, 0.3, 0.2), _profile_of_backward(0.1, 0.05, 0.85), "backward")
        assert (cause.phase, [frame.line for frame in cause.frames]) == ("backward", [88])

    def test_a_slow_engine_names_no_line_of_forward(self) -> None:
        cause = self.cause(_profile_of_backward(0.5, 0.0, 0.5), _profile_of_backward(0.1, 0.0, 0.9), "backward")
        assert (cause.phase, cause.frames) == ("backward", ())

    def test_a_loop_line_before_backward_can_be_named_for_forward(self) -> None:
        loop = FrameSeen("train", "train.py", 20, 0.4, 0.4, "other")
        slow = StackProfile(20, {"other": 0.4, "backward": 0.6}, (loop,))
        usual = StackProfile(20, {"backward": 1.0}, ())
        cause = self.cause(slow, usual, "forward")
        assert (cause.phase, [frame.line for frame in cause.frames]) == ("forward", [20])

    def test_without_step_phases_stacks_show_the_backward_phase(self) -> None:
        nothing = {f"{phase}_seconds": np.nan for phase in ("input", "forward", "backward", "optimizer", "other")}
        job = HEALTHY.but(slow_ranks={1: 1.6}, extra=dict.fromkeys(range(4), nothing))
        slow, usual = _profile_of_backward(0.1, 0.5, 0.4), _profile_of_backward(0.1, 0.0, 0.9)
        evidence = {rank: RankEvidence(stacks=slow if rank == 1 else usual) for rank in range(4)}
        random, fleet = np.random.default_rng(0), FleetDetector()
        verdict = [fleet.evaluate({"job": job.window(random, number, evidence)})["job"] for number in range(6)][-1]
        assert (verdict.cause.phase, verdict.cause.frames[0].line) == ("backward", 88)


@pytest.mark.parametrize(
    ("samples", "in_user_line", "named"),
    [(10, 0.0, []), (10, 0.2, [("parts.py", 90)]), (1000, 0.0, [("_ops.py", 1095)])],
)
def test_a_library_line_is_named_only_if_proven(
    samples: int, in_user_line: float, named: list[tuple[str, int]]
) -> None:
    """FSDP2 leaves record_function many times a step: one of ten samples may be there, and none in the slow line."""
    library = "/venv/lib/python3.11/site-packages/torch/"
    step = FrameSeen("train", "/job/parts.py", 185, 0.9, 0.9, "communication")
    op = FrameSeen("TorchBindOpOverload.__call__", f"{library}_ops.py", 1095, 0.3, 0.3, "forward")
    line = FrameSeen("normalize_features", "/job/parts.py", 90, in_user_line, in_user_line, "forward")
    slow = StackProfile(samples, {"forward": 0.3 + in_user_line, "communication": 0.6}, (step, op, line))
    usual = StackProfile(samples, {"communication": 0.9}, (step,))
    job, random, fleet = HEALTHY.but(slow_ranks={1: 1.6}), np.random.default_rng(0), FleetDetector()
    evidence = {rank: RankEvidence(stacks=slow if rank == 1 else usual) for rank in range(4)}
    for number in range(6):
        cause = fleet.evaluate({"job": job.window(random, number, evidence)})["job"].cause
    assert cause.phase == "forward"
    assert [(PurePath(frame.file).name, frame.line) for frame in cause.frames] == named


def test_a_line_is_named_only_where_it_explains_the_excess() -> None:
    """Stacks may be from before the rank became slow: then some line is seen a little more by chance."""
    job = HEALTHY.but(slow_ranks={1: 4.0}, excess_phase="forward")
    usual, before, since = _profile(0.2, 0.0, 0.7), _profile(0.3, 0.0, 0.6), _profile(0.2, 0.6, 0.1)
    fleet, random = FleetDetector(), np.random.default_rng(0)
    lines = []
    for number in range(12):
        slow = before if number < 6 else since
        evidence = {rank: RankEvidence(stacks=slow if rank == 1 else usual) for rank in range(4)}
        cause = fleet.evaluate({"job": job.window(random, number, evidence)})["job"].cause
        lines.append((cause.phase, cause.frames[0].line if cause.frames else None))
    assert lines[5] == ("forward", None) and lines[-1] == ("forward", 88)


def without_steps(window: JobWindow) -> JobWindow:
    identity = ("job", "rank", "stage", "place")
    unknown = {f.name: np.full(4, np.nan) for f in fields(RankColumns) if f.name not in identity}
    return replace(window, columns=replace(window.columns, **unknown))


class TestStacksAlone:
    def judge(self, profiles: dict[int, StackProfile], windows: int = 12) -> list[Judged]:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        found: list[Judged] = []
        for number in range(windows):
            window = HEALTHY.window(random, number, {r: RankEvidence(stacks=p) for r, p in profiles.items()})
            verdict = fleet.evaluate({"job": without_steps(window)})["job"]
            found.append((verdict.kind.value, verdict.culprits, verdict.confidence.value, verdict.cause))
        return found

    def test_excess_frames_and_missing_wait_name_ranks_with_low_confidence(self) -> None:
        profiles = {r: _profile(0.4, 0.02, 0.58) for r in range(4)}
        profiles[2] = _profile(0.3, 0.5, 0.2)
        kind, culprits, confidence, cause = self.judge(profiles)[-1]
        assert (kind, culprits, confidence) == ("slow_rank", (2,), "low")
        assert (cause.frames[0].file, cause.frames[0].line) == ("model.py", 88)

    def test_python_code_inside_backward_is_work_and_not_waiting(self) -> None:
        profiles = {r: _profile_of_backward(0.2, 0.0, 0.8) for r in range(4)}
        profiles[2] = _profile_of_backward(0.2, 0.5, 0.3)
        kind, culprits, _, cause = self.judge(profiles)[-1]
        assert (kind, culprits, cause.phase) == ("slow_rank", (2,), "backward")
        assert cause.frames[0].function == "compress"

    def test_equal_stacks_accuse_nobody_and_call_nothing_healthy(self) -> None:
        verdicts = self.judge({r: _profile(0.4, 0.02, 0.58) for r in range(4)}, windows=30)
        assert {kind for kind, *_ in verdicts} == {"insufficient_data"}

    def test_without_steps_the_reason_has_the_next_step(self) -> None:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        evidence = {rank: RankEvidence(stacks=_profile(0.4, 0.02, 0.58)) for rank in range(4)}
        reasons = [
            fleet.evaluate({"job": without_steps(HEALTHY.window(random, n, evidence))})["job"].reason for n in range(12)
        ]
        assert reasons[0] == "no steps are known; 1 of 10 windows of stacks gathered"
        assert reasons[-1].startswith("no steps are known; no rank stands out in its stacks")
        assert "call rankscope.probe.step() after each step" in reasons[-1]

    def test_a_job_whose_steps_end_is_not_healthy_for_long(self) -> None:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        windows = [HEALTHY.window(random, number) for number in range(30)]
        kinds = [
            fleet.evaluate({"job": window if number < 8 else without_steps(window)})["job"].kind
            for number, window in enumerate(windows)
        ]
        assert {*kinds[5:16]} == {Kind.HEALTHY}, "a few windows without steps change nothing"
        assert {*kinds[-10:]} == {Kind.INSUFFICIENT_DATA}

    def test_a_finding_of_stacks_gives_way_to_not_knowing(self) -> None:
        fleet, random = FleetDetector(), np.random.default_rng(0)
        usual = {rank: RankEvidence(stacks=_profile(0.4, 0.02, 0.58)) for rank in range(4)}
        slow = {**usual, 2: RankEvidence(stacks=_profile(0.3, 0.5, 0.2))}
        kinds = [
            fleet.evaluate({"job": without_steps(HEALTHY.window(random, number, evidence))})["job"].kind
            for number, evidence in enumerate([slow] * 15 + [usual] * 15)
        ]
        assert kinds[14] is Kind.SLOW_RANK
        assert kinds[-1] is Kind.INSUFFICIENT_DATA

    def test_an_excess_without_missing_wait_is_not_enough(self) -> None:
        profiles = {r: _profile(0.4, 0.02, 0.58) for r in range(4)}
        profiles[2] = _profile(0.1, 0.32, 0.58)  # other lines, same waiting
        assert self.judge(profiles)[-1][0] == "insufficient_data"

    def test_too_few_samples_accuse_nobody(self) -> None:
        profiles = {r: _profile(0.4, 0.02, 0.58, samples=3) for r in range(4)}
        profiles[2] = _profile(0.3, 0.5, 0.2, samples=3)
        assert self.judge(profiles)[-1][0] == "insufficient_data"

    def test_samples_too_few_to_exclude_slow_ranks_are_not_healthy(self) -> None:
        profiles = {r: _profile(0.4, 0.02, 0.58, samples=8) for r in range(4)}  # 80 in ten windows
        assert self.judge(profiles)[-1][0] == "insufficient_data"


def test_stacks_of_ranks_that_only_import_say_nothing() -> None:
    importing = {rank: StackProfile(60, {"other": 1.0}, ()) for rank in range(4)}
    assert judge_stacks(importing, {}, DEFAULT_POLICY).reason == "no training is seen in the stacks yet"
    training = {rank: StackProfile(60, {"other": 0.8, "forward": 0.2}, ()) for rank in range(4)}
    assert judge_stacks(training, {}, DEFAULT_POLICY).reason == ""


@pytest.mark.parametrize("samples", [None, 5])
def test_a_difference_between_a_few_sampled_steps_is_noise(samples: int | None) -> None:
    """Windows of a healthy HF Trainer job on a GPU: waiting was known of 5 to 10 of its 80 steps. By all 80 the
    difference would count."""
    own = [[8.78, 11.39, 8.87, 8.46], [8.66, 9.51, 8.48, 8.57]]
    spread = [[1.24, 1.79, 1.14, 1.2], [1.39, 1.59, 1.29, 1.29]]
    fleet = FleetDetector()
    for number, seconds in enumerate([[8.7, 8.8, 8.6, 8.7], *own]):
        rows = [
            {
                "rank": rank,
                "steps": 80,
                "step_seconds": 0.025,
                "self_seconds": one / 1e3,
                "wait_seconds": 0.025 - one / 1e3,
                "self_spread_ratio": spread[max(0, number - 1)][rank],
                "host_seconds": 0.025,
                "run_ahead_seconds": 0.012,
            }
            | ({} if samples is None else {"self_steps": samples})
            for rank, one in enumerate(seconds)
        ]
        verdict = fleet.evaluate({"job": JobWindow(1000.0 + 2 * number, 2.0, 4, columns_of(rows))})["job"]
    assert verdict.kind is (Kind.SLOW_RANK if samples is None else Kind.HEALTHY), verdict.reason
