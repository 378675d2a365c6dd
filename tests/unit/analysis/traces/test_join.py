from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.join import join_traces
from rankscope.analysis.traces.joins.step_verdict import judge_steps
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Category, ProcessGroup, Trace
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import Confidence, Kind
from tests.shared_data import H200, shared
from tests.unit.analysis.traces.planted_jobs import PlantedJob
from tests.unit.analysis.traces.trace_builder import Event, make_trace

HOUR_US = 3.6e9


@settings(max_examples=15)
@given(
    ranks=st.integers(3, 8),
    slow=st.integers(0, 7),
    factor=st.floats(1.3, 3.0),
    offsets=st.lists(st.floats(-5 * HOUR_US, 5 * HOUR_US), min_size=8, max_size=8),
    jitter_us=st.floats(0.0, 50.0),
    numbered=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_names_exactly_the_planted_slow_rank_whatever_the_clocks(
    ranks: int, slow: int, factor: float, offsets: list[float], jitter_us: float, numbered: bool, seed: int
) -> None:
    job = PlantedJob(ranks, jitter_us=jitter_us, offsets_us=dict(enumerate(offsets)), numbered=numbered, seed=seed)
    found = job.but(slow={slow % ranks: factor}).join()
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (slow % ranks,)), found.reason
    assert found.collectives_matched == 5 * 4
    assert found.last_arrivals[slow % ranks] == 5 * 4
    assert found.clock_residual_us is not None and found.clock_residual_us <= 1 + jitter_us
    healthy = job.join()
    assert (healthy.verdict, healthy.culprits) == (Kind.HEALTHY, ()), healthy.reason


def test_self_time_and_impact_are_what_was_planted() -> None:
    found = PlantedJob(noise=0.0, slow={2: 1.5}).join()
    assert found.waits[2].self_us_per_step == pytest.approx(1.5 * found.waits[0].self_us_per_step, rel=0.05)
    step = 1.5 * 20_000 * 1.025 + 4 * 500
    assert found.impact_ratio == pytest.approx(0.5 * 20_000 * 1.025 / step, rel=0.05)
    assert found.waits[0].wait_us == pytest.approx(5 * 0.5 * 20_000 * 1.025, rel=0.05)
    assert found.waits[2].wait_us < 500


def test_a_rank_late_in_one_step_only_is_not_named() -> None:
    found = PlantedJob(slow_steps={(1, 2): 2.0}).join()
    assert (found.verdict, found.culprits) == (Kind.HEALTHY, ())


def test_a_different_late_rank_each_step_is_uneven_data() -> None:
    job = PlantedJob(steps=8, slow_steps={(step % 4, step): 1.8 for step in range(8)})
    found = job.join()
    assert (found.verdict, found.culprits) == (Kind.DATA_IMBALANCE, ()), found.reason
    # On a CPU the same may be ranks that take turns on it; a hundred times longer it is not.
    for stretch, expected in ((1.0, Kind.HEALTHY), (100.0, Kind.DATA_IMBALANCE)):
        steps = replace(found.steps, on_host=True)
        times = {name: stretch * getattr(steps, name) for name in ("step_ns", "wait_ns", "transfer_ns")}
        steps = replace(steps, **times)
        assert judge_steps(steps, 4, range(4), 32, 1.0, None, DEFAULT_POLICY).kind is expected


def test_a_long_stage_is_a_stage_and_not_its_ranks() -> None:
    stages = {rank: rank // 4 for rank in range(8)}
    job = PlantedJob(8, slow=dict.fromkeys(range(4, 8), 1.5))
    found = job.join(stage_of=stages)
    assert (found.verdict, found.stage, found.culprits) == (Kind.SLOW_STAGE, 1, (4, 5, 6, 7)), found.reason
    worker = job.but(slow=dict.fromkeys(range(4, 8), 1.5) | {1: 1.5}).join(stage_of=stages)
    assert (worker.verdict, worker.culprits) == (Kind.SLOW_RANK, (1,)), worker.reason


def test_waiting_in_every_group_is_waiting() -> None:
    """Rank 5 is late to its own pair; the others of that row wait for the pair, not for rank 5 directly."""
    pairs = tuple((rank, rank + 1) for rank in range(0, 8, 2))
    rows = ((0, 2, 4, 6), (1, 3, 5, 7))
    found = PlantedJob(8, groups=(("tp", pairs), ("dp", rows)), slow={5: 1.6}).join()
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (5,)), found.reason
    assert len(found.groups) == 6
    assert found.collectives_matched == 5 * 4 * 6


def test_few_steps_give_low_confidence_and_two_name_nobody() -> None:
    job = PlantedJob(slow={3: 1.6})
    assert job.join().confidence is Confidence.HIGH
    few = job.but(steps=4).join()
    assert (few.culprits, few.confidence) == ((3,), Confidence.LOW)
    two = job.but(steps=2).join()
    assert (two.verdict, two.culprits) == (Kind.INSUFFICIENT_DATA, ())
    assert "complete steps in common: 2, needed: 3" in two.reason


def test_equal_ranks_of_noisy_steps_are_not_named() -> None:
    """Steps that differ by a quarter make one of two equal ranks look slow in three steps of eight seeds."""
    for seed in range(40):
        found = PlantedJob(2, steps=3, buckets=1, noise=0.25, seed=seed).join()
        assert found.culprits == (), f"seed {seed}: {found.reason}"


def test_a_rank_that_is_always_last_is_not_called_inconspicuous() -> None:
    found = PlantedJob(2, steps=4, buckets=1, noise=0.05, slow={1: 1.12}, seed=1).join()
    assert found.last_arrivals == {0: 0, 1: 4}
    assert found.verdict is Kind.INSUFFICIENT_DATA
    assert "rank 1 is last in 4 of 4 collectives" in found.reason


def test_a_pair_of_a_larger_job_is_compared() -> None:
    found = PlantedJob(8, slow={3: 1.5}, steps=12).join(only=[3, 5])
    slow, peer = found.excesses
    assert (slow.rank, peer.rank, slow.steps) == (3, 5, 12)
    assert slow.is_clear and not peer.is_clear
    assert slow.low_seconds < 0.01025 < slow.high_seconds < 0.011


def test_too_few_ranks_name_nobody_but_tell_last_arrivals() -> None:
    found = PlantedJob(8, slow={3: 2.0}).join(only=[0, 3, 5])
    assert (found.verdict, found.culprits) == (Kind.INSUFFICIENT_DATA, ())
    assert "3 of 8 ranks" in found.reason
    assert found.last_arrivals == {0: 0, 3: 20, 5: 0}


def test_one_missing_rank_does_not_hide_the_slow_one() -> None:
    found = PlantedJob(8, slow={3: 2.0}).join(only=[0, 1, 2, 3, 4, 5, 7])
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (3,))


def test_a_rank_without_collectives_is_reported_and_harms_nobody() -> None:
    found = PlantedJob(8, slow={3: 2.0}, silent=(6,)).join()
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (3,))
    assert any("rank 6: no collective in common" in note for note in found.notes)
    assert found.waits[6].self_us_per_step is None
    small = PlantedJob(4, slow={3: 2.0}, silent=(1,)).join()
    assert small.verdict is Kind.INSUFFICIENT_DATA and "rank 1" in small.reason


def test_unmatched_communication_gives_no_verdict() -> None:
    """Every node has a group "tp"; without their ranks nobody can tell how much of it was waiting."""
    nodes = (tuple(range(4)), tuple(range(4, 8)))
    job = PlantedJob(8, groups=(("tp", nodes), ("0", (tuple(range(8)),))), slow={3: 2.0}, listed=False)
    found = job.join()
    assert (found.verdict, found.culprits) == (Kind.INSUFFICIENT_DATA, ())
    assert "could not be matched" in found.reason
    assert any("stands for several groups" in note for note in found.notes)
    assert job.but(listed=True).join().culprits == (3,)


def test_a_rank_delayed_by_an_untraced_one_is_not_blamed() -> None:
    """Rank 6 is late to all the others because rank 10, whose trace is missing, is late to it."""
    groups = (("side", ((6, 10),)), ("0", (tuple(range(10)),)))
    found = PlantedJob(11, groups=groups, slow={10: 2.0}).join(only=range(10))
    assert found.last_arrivals[6] == found.collectives_matched == 20
    assert found.culprits == (), found.reason


def test_one_trace_alone_and_none_at_all_are_no_error() -> None:
    alone = PlantedJob(4).join(only=[2])
    assert (alone.verdict, alone.clock_residual_us, alone.last_arrivals) == (Kind.INSUFFICIENT_DATA, None, {2: 0})
    assert join_traces({}, {}).verdict is Kind.INSUFFICIENT_DATA


def test_two_ranks_over_gloo_match_all_their_buckets() -> None:
    traces = {rank: read_trace((H200 / f"gloo_2ranks_rank{rank}.json.gz").read_bytes()) for rank in (0, 1)}
    found = join_traces(traces, {rank: find_collectives(trace) for rank, trace in traces.items()})
    assert found.collectives_matched == 25
    # One machine, one clock: what is left is how far apart gloo lets two ranks go.
    assert abs(found.clocks.shifts[1].offset_ns) < 50_000
    assert found.clock_residual_us is not None and found.clock_residual_us < 200
    assert sum(found.last_arrivals.values()) == 25
    assert found.verdict is Kind.INSUFFICIENT_DATA


def test_two_of_128_sampled_ranks_match_where_their_ends_coincide() -> None:
    folder = shared("hta_pair")
    traces = {rank: read_trace((folder / f"rank-{rank}.json.gz").read_bytes()) for rank in (0, 1)}
    found = join_traces(traces, {rank: find_collectives(trace) for rank, trace in traces.items()})
    assert found.collectives_matched == 5
    ends = np.sort(found.matched.calls.stop_ns.reshape(-1, 2) // 1000 % 100_000_000, axis=0)
    assert np.abs(np.diff(ends, axis=1)).max() < 500
    assert found.last_arrivals == {0: 0, 1: 5}
    assert (found.verdict, found.culprits) == (Kind.INSUFFICIENT_DATA, ())
    assert "2 of 128 ranks" in found.reason


def _pipeline(slow: int | None) -> dict[int, Trace]:
    """Two stages of two ranks: forward on 0 and 1, across to 2 and 3, backward, across again, then each stage's
    gradients. Everything waits for everything, so that a slow rank has three victims, one of which (its mate in the
    other stage) waits for nobody in its own stage's reduction."""
    now = dict.fromkeys(range(4), 0.0)
    events: dict[int, list[Event]] = {rank: [] for rank in range(4)}
    random = np.random.default_rng(1)

    def work(rank: int, lasted: float) -> None:
        lasted *= (1.5 if rank == slow else 1.0) * (1 + 0.01 * random.random())
        events[rank].append(("gemm", Category.KERNEL, now[rank], round(lasted, 3), {"stream": 7}))
        now[rank] = round(now[rank] + lasted, 3)

    def meet(members: tuple[int, ...], kernel: str, notes: dict[int, dict[str, Any]]) -> None:
        end = round(max(now[rank] for rank in members) + 100.0, 3)
        for rank in members:
            note = {"stream": 20, "group_size": len(members), **notes[rank]}
            events[rank].append((kernel, Category.KERNEL, now[rank], round(end - now[rank], 3), note))
            now[rank] = end

    for step in range(6):
        begun = dict(now)
        for first, second in (((0, 1), (2, 3)), ((2, 3), (0, 1))):
            for rank in first:
                work(rank, 9000.0)
            for sender, receiver in zip(first, second, strict=True):
                pair = {"group": f"pp{sender % 2}"}
                notes = {sender: {**pair, "collective": "send", "peer": receiver // 2}}
                notes[receiver] = {**pair, "collective": "recv", "peer": sender // 2}
                meet((sender, receiver), "ncclDevKernel_SendRecv(x)", notes)
        for rank in range(4):
            work(rank, 4000.0)
        for members, name in (((0, 1), "dp0"), ((2, 3), "dp1")):
            note = {"group": name, "collective": "allreduce", "sequence": step}
            meet(members, "ncclDevKernel_AllReduce_Sum(x)", dict.fromkeys(members, note))
        for rank in range(4):
            mark = (f"ProfilerStep#{step}", Category.USER_ANNOTATION, begun[rank], round(now[rank] - begun[rank], 3))
            events[rank].append(mark)
    groups = [ProcessGroup("pp0", "", (0, 2)), ProcessGroup("pp1", "", (1, 3))]
    groups += [ProcessGroup("dp0", "", (0, 1)), ProcessGroup("dp1", "", (2, 3))]
    return {
        rank: make_trace(
            events[rank],
            rank=rank,
            world_size=4,
            base_ns=(7 + rank) * 10**15,
            groups=tuple(group for group in groups if rank in group.ranks),
        )
        for rank in range(4)
    }


@pytest.mark.parametrize("slow", [0, 1, 2, 3, None])
def test_waiting_for_a_neighbour_in_the_pipeline_is_waiting_too(slow: int | None) -> None:
    traces = _pipeline(slow)
    collectives = {rank: find_collectives(trace) for rank, trace in traces.items()}
    found = join_traces(traces, collectives, stage_of={0: 0, 1: 0, 2: 1, 3: 1})
    assert found.culprits == (() if slow is None else (slow,)), found.reason
    assert found.collectives_matched == 6 * (4 + 2)
    assert found.clocks.components == ((0, 1, 2, 3),)


def test_a_wait_that_computation_hides_costs_nothing() -> None:
    """Rank 0 is there early, but computes meanwhile on another stream: nobody has to hurry for it."""

    def rank(number: int, arrives: float) -> Trace:
        events: list[Event] = []
        for step in range(4):
            at = 10_000.0 * step
            note = {"stream": 20, "group": "0", "collective": "allreduce", "group_size": 2, "sequence": step}
            events.append((f"ProfilerStep#{step}", Category.USER_ANNOTATION, at, 10_000.0))
            events.append(("gemm", Category.KERNEL, at, 9_999.0, {"stream": 7}))
            events.append(("ncclDevKernel_AllReduce", Category.KERNEL, at + arrives, 9_000.0 - arrives, note))
        return make_trace(events, rank=number, world_size=2)

    traces = {0: rank(0, 1000.0), 1: rank(1, 8000.0)}
    found = join_traces(traces, {rank: find_collectives(trace) for rank, trace in traces.items()})
    assert found.last_arrivals == {0: 0, 1: 4}
    assert (found.waits[0].wait_us, found.waits[0].exposed_wait_us) == (4 * 7000.0, 0.0)
    assert (found.verdict, found.culprits) == (Kind.HEALTHY, ())
