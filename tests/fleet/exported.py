"""What `rankscope export` must write of a made-up fleet."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow.dataset
import pytest

from tests.alerts.prometheus_running import Prometheus
from tools.fleet_week import GPUS_PER_NODE, HOUR, SCRAPE_SECONDS, Fleet, Run

DAY_SECONDS = 24 * HOUR


def table(folder: Path, name: str) -> Any:
    return pyarrow.dataset.dataset(folder / name, partitioning="hive")


def rows(folder: Path, name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = table(folder, name).to_table().to_pylist()
    return found


def check_export(fleet: Fleet, prometheus: Prometheus, folder: Path) -> None:
    """All rows are there, once."""
    # Before version 3, a series without a marker of its end has a value at the next step, too.
    after = f"count(last_over_time(rankscope_gpu_info[{SCRAPE_SECONDS}s] @ {fleet.end})) > 0"
    has_tail = bool(prometheus.query(after))

    def steps(moments: Iterable[int]) -> set[int]:
        exact = set(moments)
        return exact | {moment + SCRAPE_SECONDS for moment in exact} if has_tail else exact

    def during(run: Run) -> list[int]:
        scrapes = range(fleet.begin, fleet.end, SCRAPE_SECONDS)
        return [moment for moment in scrapes if run.begin <= moment < run.end]

    gpus = fleet.scale.nodes * GPUS_PER_NODE
    expected = dict.fromkeys(("runs", "verdicts", "culprits", "ranks"), 0)
    expected["gpus"] = gpus * len(steps(range(fleet.begin, fleet.end, SCRAPE_SECONDS)))
    for run in fleet.runs:
        moments = during(run)
        expected["runs"] += len({moment // DAY_SECONDS for moment in steps(moments)})
        expected["ranks"] += len(run.gpus) * len(steps(moments))
        kinds: dict[str, list[int]] = {}
        for moment in moments:
            standing = run.finding(moment)
            kinds.setdefault("" if standing is None else standing.kind, []).append(moment)
        expected["verdicts"] += sum(len(steps(one)) for one in kinds.values())
        for episode in run.episodes:
            named = steps(moment for moment in moments if episode.begin <= moment < episode.end)
            expected["culprits"] += len(episode.ranks) * len(named)
    assert {name: table(folder, name).count_rows() for name in expected} == expected
    lost: dict[str, float] = {}
    for row in rows(folder, "losses"):
        lost[row["verdict"]] = lost.get(row["verdict"], 0.0) + row["lost_gpu_seconds"] / HOUR
    for kind in {episode.kind for run in fleet.runs for episode in run.episodes}:
        truth = sum(run.lost_gpu_seconds(kind, fleet.end) for run in fleet.runs) / HOUR
        assert lost[kind] == pytest.approx(truth, rel=0.05, abs=2.0), kind
