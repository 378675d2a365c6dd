from __future__ import annotations

from collections.abc import Mapping

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState, suspects
from rankscope.v1.identity_pb2 import ParallelCoordinates, RankIdentity
from rankscope.v1.window_pb2 import RankWindow, StepStatistics


def state(
    verdict: Verdict, self_seconds: Mapping[int, float | None], stages: Mapping[int, int] | None = None
) -> JobState:
    windows = []
    for rank, seconds in self_seconds.items():
        window = RankWindow(identity=RankIdentity(rank=rank))
        if stages:
            window.identity.coordinates.CopyFrom(ParallelCoordinates(pipeline=stages[rank]))
        if seconds is not None:
            window.self_seconds.CopyFrom(StepStatistics(mean=seconds))
        windows.append(window)
    return JobState("job", len(windows), verdict, 0, 0, len(windows), None, None, None, tuple(windows))


def slow(*culprits: int, stage: int | None = None) -> Verdict:
    kind = Kind.SLOW_RANK if stage is None else Kind.SLOW_STAGE
    return Verdict(kind, "why", Severity.ALARM, Confidence.HIGH, culprits, stage=stage)


def test_the_most_typical_healthy_rank_comes_first() -> None:
    found = suspects(state(slow(2), {0: 0.04, 1: 0.05, 2: 0.09, 3: 0.06}))
    assert (found.culprits, found.peers[0], set(found.peers)) == ((2,), 1, {0, 1, 3})


def test_a_peer_has_the_same_stage() -> None:
    found = suspects(state(slow(2), {0: 0.02, 1: 0.02, 2: 0.09, 3: 0.05}, {0: 0, 1: 0, 2: 1, 3: 1}))
    assert found.peers == (3,)


def test_a_slow_stage_is_held_against_the_others() -> None:
    found = suspects(state(slow(2, 3, stage=1), {0: 0.02, 1: 0.02, 2: 0.09, 3: 0.09}, {0: 0, 1: 0, 2: 1, 3: 1}))
    assert (found.culprits, set(found.peers)) == ((2, 3), {0, 1})


def test_a_healthy_job_has_no_culprit() -> None:
    found = suspects(state(Verdict(Kind.HEALTHY, "all is well"), {0: 0.04, 1: None}))
    assert (found.culprits, found.reason) == ((), "all is well")


def test_ranks_with_unmeasured_work_are_still_peers() -> None:
    assert set(suspects(state(slow(0), {0: None, 1: None, 2: None})).peers) == {1, 2}
