from __future__ import annotations

import math
from dataclasses import replace

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.operator.captures.status import findings_of, joint_finding, phase_of, updated_ranks
from rankscope.operator.kube.resources import CapturedRank
from rankscope.v1 import capture_service_pb2 as pb


def captured(rank: int, step: float, wait: float, state: pb.CaptureState.ValueType = 5) -> pb.RankCapture:
    made = pb.RankCapture(rank=rank, state=state)
    made.summary.each_step_seconds.extend([step] * 3)
    made.summary.each_exposed_communication_seconds.extend([wait] * 3)
    return made


def test_the_rank_that_works_while_the_others_wait_is_named() -> None:
    ranks = [captured(0, 0.1, 0.06), captured(2, 0.1, 0.01), captured(3, 0.1, 0.05)]
    assert joint_finding(ranks, DEFAULT_POLICY) == (
        "rank 2 works 90 ms of each step by itself, the other 2 ranks 45 ms: it holds the others up by 45 ms a step"
    )


def test_no_rank_is_named_among_equals_or_without_comparison() -> None:
    assert (joint_finding([captured(0, 0.1, 0.05), captured(1, 0.1, 0.052)], DEFAULT_POLICY) or "").startswith(
        "no rank stands out"
    )
    assert joint_finding([captured(0, 0.1, 0.05)], DEFAULT_POLICY) is None
    assert (
        joint_finding([captured(0, 0.1, 0.05), captured(1, 0.1, 0.01, pb.CAPTURE_STATE_FAILED)], DEFAULT_POLICY) is None
    )
    assert joint_finding([captured(0, 0.1, 0.05), captured(1, math.nan, 0.01)], DEFAULT_POLICY) is None
    assert joint_finding([captured(0, 0.1, 0.05), captured(1, math.inf, 0.01)], DEFAULT_POLICY) is None
    assert joint_finding([captured(0, 0.1, 0.05), captured(1, 1.7e308, 0.01)], DEFAULT_POLICY) is None


def test_the_policy_of_the_run_sets_the_threshold() -> None:
    ranks = [captured(0, 0.1, 0.05), captured(1, 0.1, 0.045)]
    assert (joint_finding(ranks, DEFAULT_POLICY) or "").startswith("rank 1 works 55 ms")
    lenient = replace(DEFAULT_POLICY, rank_ratio=1.2)
    assert (joint_finding(ranks, lenient) or "").startswith("no rank stands out")


def test_several_nodes_share_a_finding_and_one_has_its_own() -> None:
    here, there = pb.Capture(ranks=[captured(0, 0.1, 0.06)]), pb.Capture(ranks=[captured(2, 0.1, 0.01)])
    here.join.reason = there.join.reason = "of one node"
    assert findings_of({"a": here, "b": there}, DEFAULT_POLICY)[0].startswith("rank 2 works")
    assert findings_of({"a": here}, DEFAULT_POLICY) == ["of one node"]


def test_any_daemon_answer_makes_a_status_the_api_server_accepts() -> None:
    heard = pb.RankCapture(rank=0, state=99, bytes=(1 << 64) - 1, error="x" * 9000, backend="y" * 9000)  # type: ignore[arg-type]
    (rank,) = updated_ranks([CapturedRank(rank=0, node="a", state="accepted")], {"a": pb.Capture(ranks=[heard])})
    assert rank.state == "unspecified"
    assert rank.bytes == (1 << 53) - 1
    assert len(str(rank.error)) == 1000 and len(str(rank.backend)) <= 1024
    assert phase_of([rank]) == "Running"
