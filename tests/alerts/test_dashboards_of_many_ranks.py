"""The heat maps of the Job dashboard for 512 ranks: a history that promtool wrote, asked of a real Prometheus."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import product

import pytest

from deploy.grafana.dashboards import FOLDER
from tests.alerts.prometheus_running import Prometheus, backfill, running_prometheus
from tests.alerts.test_dashboards import filled, panels

RANKS, STAGES = 512, 4
SLOW = {7: 2.0, 300: 1.3}  # how much longer than the others of their stage
HISTORY_SECONDS, STEP_SECONDS = 120, 15
VARIABLES = {
    "cluster": ".*",
    "run_namespace": ".*",
    "rows": "2",
    "__rate_interval": "1m",
    "__range": "2m",
    "__interval": "15s",
}

each_job = pytest.mark.parametrize("job", ["big", "sharded"])


def history(end: int) -> Iterator[str]:
    """Stages work for different times, as they do: the last one twice as long."""
    moments = range(end - HISTORY_SECONDS, end + 1, STEP_SECONDS)
    yield "# TYPE rankscope_rank_info gauge"
    for job, rank in product(("big", "sharded"), range(RANKS)):
        labels = f'run="{job}",rank="{rank}",pipeline="{stage(rank)}",node="n{rank // 8}",pid="{rank}"'
        yield from (f"rankscope_rank_info{{{labels}}} 1 {moment}" for moment in moments)
    yield "# TYPE rankscope_rank_self_seconds gauge"
    for rank in range(RANKS):
        own = 0.1 * (2 if stage(rank) == STAGES - 1 else 1) * SLOW.get(rank, 1.0)
        labels = f'run="big",rank="{rank}",stat="p50"'
        yield from (f"rankscope_rank_self_seconds{{{labels}}} {own} {moment}" for moment in moments)
    yield from sharded_history(moments)
    yield "# EOF"


def sharded_history(moments: range) -> Iterator[str]:
    """A job that shards its parameters: its ranks know how long they are in collectives, and not what they wait. What
    the collectives themselves take, 0.01 s, is the same for all members of a group: the ranks of one stage."""
    steps, spans = [], []
    for rank in range(RANKS):
        labels, group = f'run="sharded",rank="{rank}"', f'group="{stage(rank):x}",kind="overlapped"'
        slowest = max([factor for slow, factor in SLOW.items() if stage(slow) == stage(rank)], default=1.0)
        span = 0.01 + 0.1 * (slowest - SLOW.get(rank, 1.0))
        for moment in moments:
            steps.append(f'rankscope_rank_step_seconds{{{labels},stat="p50"}} {0.1 * slowest} {moment}')
            spans.append(f"rankscope_rank_group_seconds{{{labels},{group}}} {span} {moment}")
    yield "# TYPE rankscope_rank_step_seconds gauge"
    yield from steps
    yield "# TYPE rankscope_rank_group_seconds gauge"
    yield from spans


def stage(rank: int) -> int:
    return rank * STAGES // RANKS


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    folder = tmp_path_factory.mktemp("many")
    backfill(folder, history(int(time.time())))
    with running_prometheus(folder, {}) as prometheus:
        yield prometheus


def shown(prometheus: Prometheus, job: str, title: str) -> dict[str, float]:
    """Rows in the order in which they come, with the last value of each."""
    panel = next(panel for panel in panels(FOLDER / "rankscope-job.json") if panel["title"] == title)
    expression = filled(panel["targets"][0]["expr"], run=job, **VARIABLES)
    answer = prometheus.query_range(expression, seconds=HISTORY_SECONDS, step_seconds=STEP_SECONDS)
    name = panel["targets"][0]["legendFormat"].strip("{}")
    return {series["metric"][name]: float(series["values"][-1][1]) for series in answer}


@each_job
def test_all_ranks_appear_in_order_and_are_compared_within_stages(prometheus: Prometheus, job: str) -> None:
    rows = shown(prometheus, job, "Self time against the cohort, all ranks")
    assert list(rows) == [f"{rank:05}" for rank in range(RANKS)]
    assert {int(row): round(ratio, 3) for row, ratio in rows.items() if abs(ratio - 1) > 0.01} == SLOW


@each_job
def test_the_worst_ranks_panel_shows_only_the_slow_ranks_throughout(prometheus: Prometheus, job: str) -> None:
    rows = shown(prometheus, job, "Self time against the cohort, worst ranks")
    assert {int(row): round(ratio, 3) for row, ratio in rows.items()} == SLOW
