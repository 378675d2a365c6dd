"""Whatever the shape of the job: the verdict names exactly what was planted, and nothing when nothing was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.verdicts.verdict import Kind
from tests.unit.analysis.synthetic import SyntheticJob, watch


@st.composite
def jobs(draw: st.DrawFn) -> SyntheticJob:
    return SyntheticJob(
        pipeline=draw(st.sampled_from([1, 2, 4])),
        data=draw(st.integers(2, 8)),
        tensor=draw(st.sampled_from([1, 2])),
        self_seconds=draw(st.floats(0.005, 5.0)),
        transfer_seconds=draw(st.floats(0.0, 0.01)),
        noise=draw(st.floats(0.0, 0.015)),
    )


@given(job=jobs(), seed=st.integers(0, 2**32 - 1))
def test_nothing_is_found_where_nothing_was_planted(job: SyntheticJob, seed: int) -> None:
    assert not any(verdict.is_alarm for verdict in watch((job, 12), seed=seed))


@given(job=jobs(), seed=st.integers(0, 2**32 - 1), factor=st.floats(1.25, 4.0), data=st.data())
def test_the_planted_rank_is_named_and_no_other(
    job: SyntheticJob, seed: int, factor: float, data: st.DataObject
) -> None:
    culprit = data.draw(st.integers(0, job.world_size - 1))
    verdicts = watch((job, 4), (job.but(slow_ranks={culprit: factor}), 6), seed=seed)
    assert (verdicts[-1].kind, verdicts[-1].culprits) == (Kind.SLOW_RANK, (culprit,))
    assert {verdict.culprits for verdict in verdicts} <= {(), (culprit,)}


@given(job=jobs(), seed=st.integers(0, 2**32 - 1), factor=st.floats(1.3, 3.0), data=st.data())
def test_the_planted_stage_is_named_and_no_single_rank(
    job: SyntheticJob, seed: int, factor: float, data: st.DataObject
) -> None:
    job = job.but(pipeline=max(job.pipeline, 2))
    stage = data.draw(st.integers(0, job.pipeline - 1))
    verdict = watch((job, 4), (job.but(slow_stages={stage: factor}), 6), seed=seed)[-1]
    assert (verdict.kind, verdict.stage) == (Kind.SLOW_STAGE, stage)
    assert verdict.culprits == tuple(r for r in range(job.world_size) if job.stage_of(r) == stage)


@given(seed=st.integers(0, 2**32 - 1), ranks=st.integers(8, 64))
def test_uneven_data_never_names_a_rank(seed: int, ranks: int) -> None:
    assert all(verdict.culprits == () for verdict in watch((SyntheticJob(data=ranks, uneven=0.25), 12), seed=seed))
