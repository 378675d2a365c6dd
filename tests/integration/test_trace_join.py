"""Four real ranks profile themselves; their traces are read, joined and replayed."""

from __future__ import annotations

import pytest

from rankscope.analysis.replay.changes import CHANGES
from rankscope.analysis.replay.prediction import forecast
from rankscope.analysis.traces.communication.collectives import find_collectives
from rankscope.analysis.traces.joins.join import Join, join_traces
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Trace
from rankscope.analysis.verdicts.verdict import Kind
from tests.support.measuring import Measured
from tools.jobs.launcher import start_ranks

RANKS, STEPS, SLOW_RANK = 4, 6, 2
SLEEP_SECONDS = 1.0  # long against what delays the others, in a machine that pauses too

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[int, Trace]]:
    """Of one job, healthy and then slow."""
    folder = tmp_path_factory.mktemp("joined")
    for name in ("healthy", "slow"):
        (folder / name).mkdir()
    words = [str(folder), str(SLOW_RANK), str(SLEEP_SECONDS)]
    with start_ranks("profiled_ddp.py", words, folder, RANKS, {"OMP_NUM_THREADS": "1"}) as ranks:
        ranks.wait_until_ended(240)
    return {
        name: {rank: read_trace((folder / name / f"rank{rank}.json").read_bytes()) for rank in range(RANKS)}
        for name in ("healthy", "slow")
    }


@pytest.fixture(scope="module")
def joins(traces: dict[str, dict[int, Trace]]) -> dict[str, Join]:
    return {
        name: join_traces(of_ranks, {rank: find_collectives(trace) for rank, trace in of_ranks.items()})
        for name, of_ranks in traces.items()
    }


def test_the_rank_that_sleeps_is_named(joins: dict[str, Join], measured: Measured) -> None:
    found = joins["slow"]
    assert found.collectives_matched == STEPS
    assert max(found.last_arrivals, key=lambda rank: found.last_arrivals[rank]) == SLOW_RANK, found.last_arrivals
    assert (found.verdict, found.culprits) == (Kind.SLOW_RANK, (SLOW_RANK,)), found.reason
    assert found.impact_ratio is not None
    measured("impact of a rank that sleeps most of a step", found.impact_ratio, "of the time", at_least=0.5)
    wait_seconds = found.waits[0].wait_us * 1e-6 / STEPS
    measured("wait for a rank that sleeps 1 s", abs(wait_seconds / SLEEP_SECONDS - 1), "of it off", at_most=0.5)


def test_its_healthy_twin_names_nobody(joins: dict[str, Join]) -> None:
    found = joins["healthy"]
    assert found.collectives_matched == STEPS
    assert found.culprits == (), found.reason


def test_the_step_without_the_slow_rank_is_predicted(traces: dict[str, dict[int, Trace]], measured: Measured) -> None:
    """The traces show no waits: the replay finds them."""
    found = forecast(traces["slow"], [[change for change in CHANGES if change.name == "even"]])
    assert found.on_host and found.is_usable
    measured("gain without a rank that sleeps most of a step", found.predictions[0].gain, "of the step", at_least=0.5)
