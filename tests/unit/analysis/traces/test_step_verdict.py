"""Verdicts on captures of ranks with different roles, by the critical path of their steps."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.step_graph.step_breakdown import BUBBLE, COMMUNICATION, EXCESS, OWN
from rankscope.analysis.traces.joins.comparison import judgement
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Verdict
from tests.shared_data import H200, shared
from tests.unit.analysis.traces.planted_captures import Traces, join_all, repeated, slowed
from tests.unit.analysis.traces.planted_jobs import PlantedJob

PAIRS = tuple((rank, rank + 1) for rank in range(0, 8, 2))
ROWS = ((0, 2, 4, 6), (1, 3, 5, 7))
MESH = PlantedJob(8, groups=(("tp", PAIRS), ("dp", ROWS)), steps=8)


@pytest.fixture(scope="module")
def megatron() -> Traces:
    """Two steps of four healthy ranks, tensor 2 × pipeline 2."""
    folder = shared("h200/megatron_tp2_pp2")
    return {rank: read_trace((folder / f"rank{rank}.json.gz").read_bytes()) for rank in range(4)}


@pytest.fixture(scope="module")
def longer(megatron: Traces) -> Traces:
    return repeated(megatron, 4)


def test_two_steps_of_a_pipeline_accuse_nobody(megatron: Traces) -> None:
    found = join_all(megatron)
    assert (found.verdict, found.culprits, found.confidence) == (Kind.INSUFFICIENT_DATA, (), Confidence.LOW)
    # Of two pairs of stages, each sends eight messages in both directions, six of them in the kernel of another one.
    messages = [group for group in found.groups if group.kind == "send_recv"]
    assert [group.collectives for group in messages] == [8] * 4 and found.collectives_matched == 360 + 32
    assert found.breakdown is not None and found.breakdown.steps == 1
    assert found.breakdown.step_seconds == pytest.approx(0.169, abs=0.002)
    parts = {(part.part, part.stage, part.group_kind): part.seconds for part in found.breakdown.parts}
    assert {key[2] for key in parts if key[0] == COMMUNICATION} == {"tensor", "pipeline", "embedding", "global"}
    assert {key[1] for key in parts if key[0] == OWN} == {0, 1}
    assert parts[BUBBLE, None, ""] > 0 and (EXCESS, None, "") not in parts


def test_healthy_stages_of_different_length_accuse_nobody(longer: Traces) -> None:
    found = join_all(longer)
    assert (found.verdict, found.culprits) == (Kind.HEALTHY, ()), found.reason
    assert [excess.steps for excess in found.excesses] == [7] * 4
    assert not any(excess.is_clear for excess in found.excesses)


@pytest.mark.parametrize("rank", range(4))
def test_a_slow_rank_of_a_stage_is_named_alone(longer: Traces, rank: int) -> None:
    found = join_all(slowed(longer, rank, 3.0))
    assert (found.verdict, found.culprits, found.confidence) == (Kind.SLOW_RANK, (rank,), Confidence.HIGH), found.reason
    first = found.excesses[0]
    assert found.impact_ratio is not None and found.breakdown is not None
    lost = found.impact_ratio * found.breakdown.step_seconds
    assert (first.rank, first.excess_seconds) == (rank, pytest.approx(lost, rel=0.05))
    assert [part.part for part in found.breakdown.parts].count(EXCESS) == 1
    standing = Verdict(Kind.SLOW_RANK, "", culprits=(rank,), impact_ratio=0.3)
    assert judgement(standing, found.excesses, 0.17).startswith(f"the recording confirms it: rank {rank} works")
    neighbour = replace(standing, culprits=(rank ^ 1,))
    assert judgement(neighbour, found.excesses, 0.17).startswith("the recording contradicts it")


def test_a_loss_that_is_not_clear_asks_for_more_steps(longer: Traces) -> None:
    found = join_all(slowed(longer, 2, 1.5))
    assert (found.verdict, found.culprits) == (Kind.INSUFFICIENT_DATA, ())
    assert found.reason.startswith("rank 2 works") and found.reason.endswith("record more steps to be sure")


def test_turns_in_being_last_are_no_uneven_data_in_groups() -> None:
    """Sums of a rank's work differ from step to step, and wait for its pair is passed on to its row."""
    turns = {(step % 8, step): 1.8 for step in range(8)}
    found = MESH.but(slow_steps=turns).join()
    assert found.verdict in (Kind.HEALTHY, Kind.INSUFFICIENT_DATA) and found.culprits == (), found.reason


def test_a_rank_late_in_few_steps_is_not_named() -> None:
    found = MESH.but(slow_steps={(3, 2): 3.0, (3, 5): 3.0}).join()
    assert found.culprits == (), found.reason


def test_a_stage_of_one_rank_has_nobody_to_compare_with() -> None:
    job = PlantedJob(3, groups=(("tp", ((0, 1),)), ("0", ((0, 1, 2),))), steps=3)
    found = job.join()
    assert found.verdict is Kind.INSUFFICIENT_DATA
    assert "complete steps in common after the first: 2, needed: 3" in found.reason


def test_equal_ranks_keep_the_comparison_of_sums_and_agree() -> None:
    traces = {rank: read_trace((H200 / f"ddp_straggler_rank{rank}.json.gz").read_bytes()) for rank in range(4)}
    found = join_all(traces)
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (2,))
    assert found.excesses[0].steps == 5 and "of its peers" in found.reason
    assert found.breakdown is not None and found.impact_ratio is not None
    # Work that was launched before the recording began is of no step of it.
    assert found.breakdown.step_seconds == pytest.approx(0.031, rel=0.03)
    excess = sum(part.seconds for part in found.breakdown.parts if part.part == EXCESS)
    assert excess / found.breakdown.step_seconds == pytest.approx(found.impact_ratio, abs=0.06)


def test_few_ranks_of_a_job_show_no_path_of_it() -> None:
    assert MESH.join(only=[2, 3]).breakdown is None
    assert MESH.join().breakdown is not None
