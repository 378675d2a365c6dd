"""Jobs that are too large to look at all ranks: what is chosen, and what is concluded from it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.step_graph import pending_operations
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.replicas import NEVER_NS, ReplicaSampler, Sample, last_following
from rankscope.analysis.step_graph.window_operations import RankOperations, join
from rankscope.analysis.verdicts.critical_path import LivePath
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Kind, Severity, Verdict
from tools.made_layouts import (
    DATA,
    PIPELINE,
    TENSOR,
    MadeJob,
    MadeLayout,
    SlowLink,
    SlowRank,
    SlowStage,
    job_window,
    rank_columns,
)

JOB = MadeLayout(tensor=2, pipeline=4, data=8, micro_batches=4, layers=2)
STEPS = 5  # of a window
REPLICA_ROWS = 400 * STEPS  # or fewer
SLOW_NS = 10_000_000
LATE_HOST, SLOW_GPU = SlowRank(45, SLOW_NS), SlowRank(13, SLOW_NS, on_device=True)
BEGINS = 8 * STEPS + 1  # once the past of stages and links is known
# No rank is slow: what is said of the job, and by which words.
COMMON: dict[str, tuple[MadeLayout, Kind, str]] = {
    "healthy": (JOB, Kind.HEALTHY, ""),
    "no operation of all ranks": (replace(JOB, meets_world=False), Kind.HEALTHY, ""),
    "a longer stage": (replace(JOB, faults=(SlowStage(2, 1.5),)), Kind.HEALTHY, ""),
    "uneven data": (replace(JOB, uneven=0.4), Kind.DATA_IMBALANCE, "in turn"),
    "a slow stage": (replace(JOB, faults=(SlowStage(2, 1.5, BEGINS),)), Kind.SLOW_STAGE, "stage 2"),
    "a slow pipeline pair": (
        replace(JOB, faults=(SlowLink(PIPELINE, 19, 150.0, BEGINS),)),
        Kind.SLOW_COMMUNICATION,
        "the pipeline link of ranks 19 and 35",
    ),
    "a slow tensor group": (
        replace(JOB, faults=(SlowLink(TENSOR, 19, 20.0, BEGINS),)),
        Kind.SLOW_COMMUNICATION,
        "the tensor group of ranks 18 and 19",
    ),
    "a slow data group": (
        replace(JOB, faults=(SlowLink(DATA, 19, 10.0, BEGINS),)),
        Kind.SLOW_COMMUNICATION,
        "the data group of ranks 17, 19,",
    ),
}


def windows(layout: MadeLayout, count: int) -> Iterator[list[RankOperations]]:
    job = MadeJob(layout)
    for _ in range(count):
        yield job.packed([(job.step, played) for played in (job.play() for _ in range(STEPS))])


@pytest.fixture
def few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three replicas of the eight are looked at."""
    monkeypatch.setattr(pending_operations, "MAX_GRAPH_ROWS", 3 * REPLICA_ROWS)


def verdicts(layout: MadeLayout, count: int) -> list[Verdict]:
    detector, columns = FleetDetector(), rank_columns(layout.world, STEPS, 0.5)
    given = []
    for number, parts in enumerate(windows(layout, count)):
        given.append(detector.evaluate({"job": job_window(number, columns, parts, window_seconds=10.0)})["job"])
    assert detector.breakdown("job") is not None, "it is judged by the path"
    return given


def step_seconds(layout: MadeLayout) -> float:
    job = MadeJob(layout)
    for _ in range(10):
        job.play()
    return job.now_ns / 1e10


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(("fault", "bound"), [(LATE_HOST, HOST), (SLOW_GPU, DEVICE)], ids=["host", "device"])
def test_the_slow_rank_is_found_in_any_replica(fault: SlowRank, bound: str) -> None:
    slow = replace(JOB, faults=(fault,))
    given = verdicts(slow, 8)
    assert {verdict.culprits for verdict in given} == {(), (fault.rank,)}, "no other rank is ever named"
    last = given[-1]
    assert (last.kind, last.severity, last.cause.bound) == (Kind.SLOW_RANK, Severity.ALARM, bound)
    assert last.impact_ratio == pytest.approx(1 - step_seconds(JOB) / step_seconds(slow), abs=0.05)


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize(("layout", "kind", "words"), COMMON.values(), ids=list(COMMON))
def test_no_rank_is_accused_where_none_is_slow(layout: MadeLayout, kind: Kind, words: str) -> None:
    given = verdicts(layout, 16 if any(fault.first_step > 1 for fault in layout.faults) else 10)
    assert Kind.SLOW_RANK not in {verdict.kind for verdict in given}
    assert given[-1].kind is kind
    assert words in given[-1].reason
    of_stage = tuple(rank for rank in range(JOB.world) if JOB.place(rank)[0] == 2)
    assert given[-1].culprits == (of_stage if kind is Kind.SLOW_STAGE else ())


@pytest.mark.usefixtures("few_rows")
def test_two_slow_ranks_of_different_replicas_are_named() -> None:
    given = verdicts(replace(JOB, faults=(LATE_HOST, SLOW_GPU)), 12)
    assert set().union(*(verdict.culprits for verdict in given)) == {LATE_HOST.rank, SLOW_GPU.rank}


@pytest.mark.usefixtures("few_rows")
def test_a_rank_that_recovers_is_no_longer_named() -> None:
    detector, columns = FleetDetector(), rank_columns(JOB.world, STEPS, 0.5)
    slow, well = (MadeJob(replace(JOB, faults=faults)) for faults in ((LATE_HOST,), ()))
    given = []
    for number in range(24):
        job = slow if number < 8 else well
        job.step = STEPS * number
        parts = job.packed([(job.step, played) for played in (job.play() for _ in range(STEPS))])
        given.append(detector.evaluate({"job": job_window(number, columns, parts, window_seconds=10.0)})["job"])
    assert given[7].culprits == (LATE_HOST.rank,)
    assert given[-1].kind is Kind.HEALTHY


def samples(
    layout: MadeLayout, count: int, max_rows: int = 3 * REPLICA_ROWS
) -> Iterator[tuple[Sample | None, set[int]]]:
    """With the replicas that were chosen."""
    sampler, ranks = ReplicaSampler(max_rows), list(range(layout.world))
    for parts in windows(layout, count):
        sample = sampler.sample(ranks, parts, 0, STEPS - 1, ())
        chosen = set() if sample is None else {layout.replica(rank) for rank in sample.operations.ranks}
        yield sample, chosen


def test_whole_replicas_are_chosen_and_each_comes_in_turn() -> None:
    chosen = []
    for sample, replicas in samples(JOB, 8):
        assert sample is not None
        assert len(sample.operations.ranks) == 8 * len(replicas)
        assert len(sample.operations) <= 3 * REPLICA_ROWS
        chosen.append(replicas)
    assert {len(replicas) for replicas in chosen} == {3}
    assert set.union(*chosen) == set(range(8))


def test_the_replica_that_arrives_last_is_chosen_always() -> None:
    for sample, replicas in samples(replace(JOB, faults=(LATE_HOST,)), 4):
        assert sample is not None and sample.late_ns is not None
        late = JOB.replica(LATE_HOST.rank)
        assert late in replicas
        assert JOB.replica(int(np.argmax(sample.late_ns))) == late


def test_a_suspect_stays_chosen() -> None:
    sampler = ReplicaSampler(3 * REPLICA_ROWS)
    for parts in windows(replace(JOB, faults=(LATE_HOST,)), 4):
        sample = sampler.sample(range(JOB.world), parts, 0, STEPS - 1, {6})
        assert sample is not None
        assert {6, LATE_HOST.rank} <= set(sample.operations.ranks)


def test_who_is_not_looked_at_still_ends_the_waiting() -> None:
    """The transfer of a data group begins when its last member arrives, in whichever replica."""
    parts = next(windows(replace(JOB, faults=(LATE_HOST,)), 1))
    sampler = ReplicaSampler(REPLICA_ROWS)
    first = sampler.sample(range(JOB.world), parts, 0, STEPS - 1, ())
    assert first is not None and JOB.replica(first.operations.ranks[0]) == JOB.replica(LATE_HOST.rank)
    well = sampler.sample(range(JOB.world), parts, 0, STEPS - 1, {0})
    assert well is not None and well.outside_ns is not None and well.operations.ranks[0] == 0
    operations = well.operations
    scatters = operations.kind == CollectiveKind.REDUCE_SCATTER
    waited = operations.stop_ns - operations.start_ns - well.outside_ns
    assert (well.outside_ns[scatters] < 100_000_000).all() and (waited[scatters] > 50_000_000).all()
    assert (well.outside_ns[operations.kind == CollectiveKind.SEND] == NEVER_NS).all()


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ([1, 2, 3, 4], []),
        ([1, 2, 3, 4, 5, 6], [2, 3, 4, 5, 6]),
        ([1, 2, 3, 4, 5, 9, 10], [1, 2, 3, 4, 5]),
        ([1, 2, 3, 9, 10, 11], []),
        ([1, 2, 3, 5, 6, 7, 9, 10, 11, 13, 14, 15], [9, 10, 11, 13, 14, 15]),
    ],
)
def test_the_last_steps_that_follow_each_other_are_chosen(steps: list[int], chosen: list[int]) -> None:
    assert last_following(np.array(steps), 4).tolist() == chosen


def test_a_job_of_one_replica_is_not_cut() -> None:
    assert all(sample is None for sample, _ in samples(replace(JOB, data=1), 3, max_rows=300))


def test_a_replica_with_too_many_operations_is_not_cut() -> None:
    assert all(sample is None for sample, _ in samples(JOB, 3, max_rows=REPLICA_ROWS // 2))


def _renumbered(part: RankOperations, by: int) -> RankOperations:
    return part._replace(seats=tuple(seat._replace(number=seat.number + by) for seat in part.seats))


def test_new_groups_of_a_running_job_are_learnt() -> None:
    sampler, ranks = ReplicaSampler(3 * REPLICA_ROWS), range(JOB.world)
    for seed in (0, 1):
        for parts in windows(replace(JOB, seed=seed), 2):
            renamed = [_renumbered(part, seed) for part in parts]
            assert sampler.sample(ranks, renamed, 0, STEPS - 1, ()) is not None


def test_groups_are_looked_at_again_if_they_were_mistaken() -> None:
    looked = []
    sampler, ranks = ReplicaSampler(3 * REPLICA_ROWS), range(JOB.world)
    for parts in windows(JOB, 3):
        sample = sampler.sample(ranks, parts, 0, STEPS - 1, ())
        assert sample is not None
        looked.append(len(sample.operations.ranks))
        data = [group.name for group in join(parts).groups if len(group.ranks) == JOB.data]
        sampler.check(data[:1], [GroupKind.TENSOR])
    assert looked == [24, 24, 24]


@pytest.mark.usefixtures("few_rows")
@pytest.mark.parametrize("seed", range(3))
def test_hostile_operations_of_a_large_job_break_nothing(seed: int) -> None:
    random = np.random.default_rng(seed)
    path, columns = LivePath(DEFAULT_POLICY), rank_columns(JOB.world, STEPS, 0.5)
    for number, parts in enumerate(windows(JOB, 6)):
        forged = [_forged(part, random) if random.random() < 0.2 else part for part in parts]
        window = job_window(number, columns, forged, window_seconds=60.0)
        with np.errstate(all="ignore"):
            path.add(window)
            path.with_stages(window)
            path.take(window)
            path.draw(())


def _forged(part: RankOperations, random: np.random.Generator) -> RankOperations:
    """With some bytes, seats or times as nobody would send them; the last step stays, or no steps would be common."""
    rows = np.frombuffer(part.rows, np.uint8).copy()
    wild = random.random(len(rows)) < random.choice([0.0, 0.01, 0.5])
    wild[-28:] = False
    rows[wild] = random.integers(0, 256, np.count_nonzero(wild))
    seats = list(part.seats)
    match int(random.integers(4)):
        case 0:
            seats = [seat._replace(number=int(random.integers(1, 1 << 53))) for seat in seats]
        case 1:
            seats = [seats[0]] * 255
        case 2:
            seats = seats[: int(random.integers(len(seats)))]
    start = int(random.integers(0, 1 << 60)) if random.random() < 0.3 else part.start_ns
    return part._replace(rows=rows.tobytes(), seats=tuple(seats), start_ns=start)
