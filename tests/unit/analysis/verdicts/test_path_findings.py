"""Findings of the critical path that are no rank's fault, in recorded steps with and without a planted fault."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from rankscope.analysis.step_graph import links
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.operations import Operations
from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.verdicts.critical_path import judge_path
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict, headline
from tests.support.step_programs import Layout, play
from tests.unit.analysis.step_graph.planted_steps import Plant, Recorded
from tests.unit.analysis.verdicts.test_live_path import verdicts

MEGATRON, DEEPSPEED, DATA_PARALLEL = "pp2_dp2_healthy", "deepspeed_pp2_dp2_healthy", "dp4_healthy"
# Faults begin once enough of the past is known.
FIRST_STEPS = {MEGATRON: 60, DATA_PARALLEL: 60, DEEPSPEED: 60}
ALSO_DEEPSPEED = pytest.param(DEEPSPEED, marks=pytest.mark.acceptance)  # another trainer, the same rules
SMALL = pytest.mark.parametrize("name", [MEGATRON, DATA_PARALLEL])


@cache
def recorded(name: str) -> Recorded:
    return Recorded.read(name, FIRST_STEPS[name], last_step=230)


def judged(operations: Operations) -> Verdict:
    return judge_path(list(PathFinder().find_all(operations)))


def mean_step_ns(operations: Operations, first_step: int) -> float:
    windows = [one for one in PathFinder().find_all(operations) if one.steps[0] > first_step]
    return sum(float(one.step_ns.sum()) for one in windows) / sum(len(one.steps) for one in windows)


@cache
def usual_step_ns(name: str) -> float:
    return mean_step_ns(recorded(name).replayed(), FIRST_STEPS[name])


def lost(name: str, operations: Operations) -> float:
    """What the steps with a fault lost against those without it."""
    return 1 - usual_step_ns(name) / mean_step_ns(operations, FIRST_STEPS[name])


HARMLESS: dict[str, Plant] = {
    "nothing": lambda job: job.replayed(),
    "little uneven data": lambda job: job.uneven(0.05),
    "little slower groups": lambda job: job.slow_group(GroupKind.DATA, 1.2),
    "bigger messages": lambda job: job.bigger_messages(GroupKind.DATA, 4),
    "checkpoints": lambda job: job.checkpoint(20, 1_000_000_000),
    "a slow group that always was": lambda job: Recorded(job.operations).slow_group(GroupKind.DATA, 3.0, (0, 1)),
}


@SMALL
@pytest.mark.parametrize("harmless", HARMLESS)
def test_what_is_no_fault_raises_nothing(name: str, harmless: str) -> None:
    operations = HARMLESS[harmless](recorded(name))
    assert judged(operations).kind is Kind.HEALTHY
    assert {one.kind for one in verdicts(operations)} <= {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}


@pytest.mark.parametrize("name", [MEGATRON])
def test_more_work_of_all_ranks_is_no_stage(name: str) -> None:
    """Longer sequences."""
    job = recorded(name)
    operations = job.slow_ranks(job.operations.ranks, 2.0)
    assert judged(operations).kind is Kind.HEALTHY
    assert {one.kind for one in verdicts(operations)} <= {Kind.INSUFFICIENT_DATA, Kind.HEALTHY}


@pytest.mark.parametrize(
    ("name", "stage"), [(MEGATRON, 0), (MEGATRON, 1), pytest.param(DEEPSPEED, 0, marks=pytest.mark.acceptance)]
)
def test_a_stage_slower_than_before_is_named(name: str, stage: int) -> None:
    job = recorded(name)
    operations = job.slow_stage(stage, 2.0)
    for verdict in (judged(operations), verdicts(operations)[-1]):
        assert (verdict.kind, verdict.severity) == (Kind.SLOW_STAGE, Severity.ALARM)
        assert (verdict.stage, verdict.culprits) == (stage, tuple(job.ranks_of(stage)))
        assert "as long as earlier in the run; no rank in it stands out" in verdict.reason
        assert verdict.impact_ratio == pytest.approx(lost(name, operations), abs=0.1)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_stage_far_beyond_the_others_is_named(ranks: int) -> None:
    layout = Layout(pipeline=3, data=ranks, layer_ns=3_000_000)
    slow = Recorded(play(layout)).slow_stage(1, 4.0)
    verdict = judged(slow)
    if ranks == 1:
        assert verdict.kind is Kind.INSUFFICIENT_DATA, "no past and no peers"
        verdict = verdicts(Recorded(play(Layout(pipeline=3, layer_ns=3_000_000, steps=150))).slow_stage(1, 4.0))[-1]
    assert (verdict.kind, verdict.stage) == (Kind.SLOW_STAGE, 1)
    assert verdict.culprits == tuple(range(ranks, 2 * ranks))
    assert "as long as the other stages" in verdict.reason
    assert ("no rank in it stands out" in verdict.reason) == (ranks > 1)


@SMALL
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_a_slow_rank_is_neither_a_stage_nor_uneven_data(name: str, share: float) -> None:
    operations = recorded(name).slow_ranks([1], 2.0, share)
    verdict = judged(operations)
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (1,))
    assert {one.kind for one in verdicts(operations)} <= {Kind.INSUFFICIENT_DATA, Kind.HEALTHY, Kind.SLOW_RANK}


SLOW_GROUPS = {
    "one data group": (GroupKind.DATA, 3.0, (0, 1), "the data group of ranks 0 and 1"),
    "a kind": (GroupKind.DATA, 3.0, (), "both data groups (ranks 0 and 1, ranks 2 and 3)"),
    "a link": (GroupKind.PIPELINE, 12.0, (0, 2), "the pipeline link of ranks 0 and 2"),
}


@pytest.mark.parametrize("name", [MEGATRON, ALSO_DEEPSPEED])
@pytest.mark.parametrize("slow", SLOW_GROUPS)
def test_a_group_slower_than_before_is_named(name: str, slow: str) -> None:
    kind, factor, ranks, said = SLOW_GROUPS[slow]
    operations = recorded(name).slow_group(kind, factor, ranks)
    live = verdicts(operations)
    assert {one.kind for one in live} == {Kind.INSUFFICIENT_DATA, Kind.HEALTHY, Kind.SLOW_COMMUNICATION}
    for verdict in (judged(operations), live[-1]):
        assert (verdict.kind, verdict.severity, verdict.culprits) == (Kind.SLOW_COMMUNICATION, Severity.ALARM, ())
        assert verdict.group == said
        assert verdict.links == ((ranks,) if ranks else ((0, 1), (2, 3)))
        assert headline(verdict) == f"communication is slow in {said}; no rank is to blame"
        assert "B/s instead of " in verdict.reason
        assert "of the job's time would come back" in verdict.reason
        assert verdict.impact_ratio == pytest.approx(lost(name, operations), abs=0.15)


def test_a_group_slower_than_others_of_its_kind_is_named() -> None:
    layout = Layout(tensor=2, pipeline=2, data=2, layer_ns=2_000_000)
    healthy = Recorded(play(layout))
    assert judged(healthy.replayed()).kind is Kind.HEALTHY
    verdict = judged(healthy.slow_group(GroupKind.TENSOR, 10.0, (2, 3)))
    assert (verdict.kind, verdict.links) == (Kind.SLOW_COMMUNICATION, ((2, 3),))
    assert verdict.cause.evidence.endswith("× the other groups")


def test_neighbours_in_a_pipeline_are_not_compared_with_others() -> None:
    """Some are on one node, others are not."""
    healthy = Recorded(play(Layout(pipeline=4, data=2, layer_ns=2_000_000)))
    assert judged(healthy.slow_group(GroupKind.PIPELINE, 20.0, (2, 4))).kind is Kind.HEALTHY


def test_a_new_communicator_of_the_same_ranks_keeps_its_past() -> None:
    job = recorded(MEGATRON)
    operations = job.slow_group(GroupKind.DATA, 3.0, (0, 1))
    again = tuple(replace(group, name=f"{group.name} again") for group in operations.groups)
    is_new = operations.step >= job.first_step
    renewed = np.where(is_new, operations.group + len(again), operations.group)
    verdict = judged(replace(operations, group=renewed, groups=operations.groups + again))
    assert (verdict.kind, verdict.links) == (Kind.SLOW_COMMUNICATION, ((0, 1),))


def test_more_links_than_are_compared_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = recorded(MEGATRON).slow_group(GroupKind.DATA, 3.0, (0, 1))
    for name in ("MAX_LINKS", "MAX_SIGHTS"):
        with monkeypatch.context() as patched:
            patched.setattr(links, name, 1)
            assert judged(operations).kind is Kind.HEALTHY


def test_a_busy_machine_is_no_slow_communication() -> None:
    """Own work takes longer as well."""
    job = recorded(MEGATRON)
    slow = Recorded(job.slow_group(GroupKind.DATA, 2.0), job.first_step)
    operations = slow.slow_ranks(job.operations.ranks, 2.0)
    assert judged(operations).kind is Kind.HEALTHY


@pytest.mark.parametrize(("name", "spread"), [(MEGATRON, 0.5), (DATA_PARALLEL, 0.5)])
def test_uneven_data_names_no_rank(name: str, spread: float) -> None:
    operations = recorded(name).uneven(spread)
    verdict = judged(operations)
    assert (verdict.kind, verdict.severity, verdict.culprits) == (Kind.DATA_IMBALANCE, Severity.ALARM, ())
    assert verdict.impact_ratio is not None
    assert 0.05 <= verdict.impact_ratio <= lost(name, operations)
    assert Kind.DATA_IMBALANCE in {one.kind for one in verdicts(operations)}


def test_too_few_steps_are_no_finding() -> None:
    operations = Recorded(play(Layout(pipeline=3, data=2, steps=20))).slow_stage(1, 4.0)
    assert judged(operations).kind is Kind.INSUFFICIENT_DATA
