from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.operator.captures.status import findings_of, joint_finding, phase_of, updated_ranks
from rankscope.operator.kube.resources import CapturedRank
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.job_service_pb2 import VERDICT_KIND_SLOW_RANK


def captured(rank: int, step: float, wait: float, state: pb.CaptureState.ValueType = 5) -> pb.RankCapture:
    made = pb.RankCapture(rank=rank, state=state)
    made.summary.each_step_seconds.extend([step] * 3)
    made.summary.each_exposed_communication_seconds.extend([wait] * 3)
    return made


def test_joint_finding_names_the_rank_that_works_while_others_wait() -> None:
    ranks = [captured(0, 0.1, 0.052), captured(2, 0.1, 0.01), captured(3, 0.1, 0.05)]
    finding = joint_finding(ranks, DEFAULT_POLICY) or ""
    assert finding.startswith("rank 2: 100.0 ms of own work a step against 60.0 ms of its peers")


def test_joint_finding_names_no_rank_among_equals() -> None:
    for waits in ((0.05, 0.052), (0.06, 0.01, 0.04)):  # too noisy for three ranks
        ranks = [captured(rank, 0.1, wait) for rank, wait in enumerate(waits)]
        assert joint_finding(ranks, DEFAULT_POLICY) == "no rank, stage or link stands out"


@pytest.mark.parametrize("step", [None, math.nan, math.inf, 1.7e308, -1.0, 5e-324])
def test_joint_finding_needs_two_ranks_with_plausible_steps(step: float | None) -> None:
    ranks = [captured(0, 0.1, 0.05)] + ([] if step is None else [captured(1, step, 0.01)])
    assert joint_finding(ranks, DEFAULT_POLICY) is None
    failed = captured(1, 0.1, 0.01, pb.CAPTURE_STATE_FAILED)
    assert joint_finding([ranks[0], failed], DEFAULT_POLICY) is None


def test_joint_finding_obeys_the_policy_of_the_run() -> None:
    ranks = [captured(0, 0.1, 0.05), captured(1, 0.1, 0.035)]
    assert (joint_finding(ranks, DEFAULT_POLICY) or "").startswith("rank 1: ")
    lenient = replace(DEFAULT_POLICY, rank_ratio=1.3)
    assert joint_finding(ranks, lenient) == "no rank, stage or link stands out"


@pytest.mark.parametrize("kind", ["send", "recv", "send_recv"])
def test_joint_finding_names_nobody_where_ranks_send_messages(kind: str) -> None:
    """The stages of a pipeline differ, and a wait is passed on."""
    ranks = [captured(0, 0.1, 0.052), captured(2, 0.1, 0.01), captured(3, 0.1, 0.05)]
    ranks[1].summary.collectives[kind] = 8
    finding = joint_finding(ranks, DEFAULT_POLICY) or ""
    assert "rank 2" not in finding and "rankscope analyze trace" in finding


def test_a_pair_on_one_node_is_judged_by_the_verdict() -> None:
    capture = pb.Capture(ranks=[captured(0, 0.1, 0.06), captured(2, 0.1, 0.01)])
    capture.join.reason = "traces of 2 of 4 ranks"
    capture.verdict.kind, capture.verdict.impact_ratio = VERDICT_KIND_SLOW_RANK, 0.5
    capture.verdict.culprits.append(2)
    capture.join.excesses.add(rank=0, steps=9, excess_seconds=math.nan)  # of a daemon that lies
    capture.join.excesses.add(rank=2, steps=9, excess_seconds=0.05, low_seconds=0.04, high_seconds=0.06)
    assert findings_of({"a": capture}, DEFAULT_POLICY)[0].startswith("the recording confirms it: rank 2 works 50 ms")


def test_several_nodes_share_a_finding_and_one_has_its_own() -> None:
    here, there = pb.Capture(ranks=[captured(0, 0.1, 0.06)]), pb.Capture(ranks=[captured(2, 0.1, 0.01)])
    here.join.reason = there.join.reason = "of one node"
    assert findings_of({"a": here, "b": there}, DEFAULT_POLICY)[0].startswith("rank 2: ")
    assert findings_of({"a": here}, DEFAULT_POLICY) == ["of one node"]


def test_any_daemon_answer_makes_a_status_the_api_server_accepts() -> None:
    heard = pb.RankCapture(rank=0, state=99, bytes=(1 << 64) - 1, error="x" * 9000, backend="y" * 9000)  # type: ignore[arg-type]
    (rank,) = updated_ranks([CapturedRank(rank=0, node="a", state="accepted")], {"a": pb.Capture(ranks=[heard])})
    assert rank.state == "unspecified"
    assert rank.bytes == (1 << 53) - 1
    assert len(str(rank.error)) == 1000 and len(str(rank.backend)) <= 1024
    assert phase_of([rank]) == "Running"
