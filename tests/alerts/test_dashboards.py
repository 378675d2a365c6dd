"""Every query of every dashboard returns data from a Prometheus that scraped a real job."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana.dashboards import FOLDER
from rankscope.common.run_names import run_labels
from tests.alerts.dashboard_watching import RANKS, SLOW, Watched, watched_job
from tests.alerts.prometheus_running import QueryRefusedError
from tools.exported_metrics import exported_metrics

# Whichever test comes first waits for the job.
pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(600)]
PATIENCE_SECONDS = 240.0
FILES = sorted(FOLDER.glob("*.json"))
# Queries that have nothing to say here, and why. Everything else must.
NO_DEVICE = "the job runs on no CUDA device"
EMPTY = {
    ("rankscope-rank", "Memory of torch's allocator, and of the process", "A"): NO_DEVICE,
    ("rankscope-rank", "Held up by", "A"): NO_DEVICE,
    **{("rankscope-rank", "Device step, and its host", query): NO_DEVICE for query in "BCD"},
    **{("rankscope-rank", "Time in collectives, by process group", query): NO_DEVICE for query in "AB"},
    **{("rankscope-job", "Device steps, and their hosts", query): NO_DEVICE for query in "BCD"},
    **{("rankscope-job", "Ranks by what holds them up", query): NO_DEVICE for query in "AB"},
    ("rankscope-job", "Waiting in collectives, by process group", "A"): NO_DEVICE,
    ("rankscope-job", "Bus bandwidth, by process group", "A"): NO_DEVICE,
    ("rankscope-job", "The critical path of a step", "A"): "the ranks of the job have the same role",
    ("rankscope-daemon", "Ranks nobody could measure", "A"): "a process that lives can be measured",
}
MAY_BE_EMPTY = {"run_namespace", "run_pod", "pipeline", "tensor", "data"}
# What daemons alone do not tell (docs/dashboards.md). The other panels must do without the correlation.
NEED_CORRELATION = {
    *("Jobs with a finding", "GPU-hours lost", "GPUs lost, by job", "Jobs by verdict", "Ranks that verdicts name"),
    *("Verdict", "Impact", "Ranks missing", "The critical path of a step"),
}
TIMES = {"__rate_interval": "20s", "__range": "2m", "__interval": "2s"}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    with watched_job(tmp_path_factory.mktemp("dashboards")) as watched:
        yield watched


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in json.loads(path.read_text())["panels"] if panel["type"] != "row"]


def filled(expression: str, **variables: str) -> str:
    """As Grafana would send it."""
    return re.sub(r"\$([a-z_]+)", lambda match: {**TIMES, **variables}[match[1]], expression)


def variables(watched: Watched, rank: int = SLOW) -> dict[str, str]:
    every = {"cluster": ".*", "node": ".*", "instance": ".*", "gpu": ".*"}
    return {**run_labels(watched.job), "rank": str(rank), "rows": "16", **every}


Labels = Mapping[str, str]


def labels_of(watched: Watched, expression: str) -> list[Labels]:
    """Of every series that a panel would have shown in the last minute."""
    return [series["metric"] for series in watched.prometheus.query_range(expression, seconds=60, step_seconds=3)]


def answers(watched: Watched, path: Path) -> dict[tuple[str, str, str], list[Labels]]:
    """By dashboard, panel and query. A table of problems is also asked about the rank that has one."""
    found = {}
    for panel in panels(path):
        for target in panel["targets"]:
            expression = filled(target["expr"], **variables(watched))
            samples = labels_of(watched, expression)
            if not samples and "rank_problem" in expression:
                samples = labels_of(watched, re.sub(r'run="[^"]*",rank="\d+"', 'rank="0"', expression))
            found[path.stem, panel["title"], target["refId"]] = samples
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_query_of_a_dashboard_returns_data(watched: Watched, path: Path) -> None:
    give_up_at = time.monotonic() + PATIENCE_SECONDS
    while True:
        found = answers(watched, path)
        empty = {where for where, samples in found.items() if not samples}
        expected = {where for where in EMPTY if where[0] == path.stem}
        if empty == expected or time.monotonic() > give_up_at:
            break
        time.sleep(1)
    assert empty == expected, "\n".join(
        f"{panel['title']} {target['refId']}: {filled(target['expr'], **variables(watched))}"
        for panel in panels(path)
        for target in panel["targets"]
        if (path.stem, panel["title"], target["refId"]) in empty ^ expected
    )


def test_daemons_alone_leave_only_those_panels_empty_that_need_verdicts(watched: Watched) -> None:
    """As if the series of the correlation were not there."""
    empty = set()
    for panel in (panel for path in FILES for panel in panels(path)):
        expressions = [filled(target["expr"], **variables(watched)) for target in panel["targets"]]
        alone = [re.sub(r"\brankscope_job_", "absent_job_", expression) for expression in expressions]
        if any("absent_job_" in each for each in alone) and not any(labels_of(watched, each) for each in alone):
            empty.add(panel["title"])
    assert empty == NEED_CORRELATION


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_columns_that_a_table_orders_and_formats_are_there(watched: Watched, path: Path) -> None:
    found = answers(watched, path)
    for panel in panels(path):
        samples = [found[path.stem, panel["title"], target["refId"]] for target in panel["targets"]]
        if panel["type"] != "table" or not all(samples):
            continue
        organize = panel["transformations"][-1]["options"]
        labels = {label for answer in samples for series in answer for label in series}
        columns = (labels | set(organize["renameByName"])) - set(organize["excludeByName"])
        # A label that is empty is none to Prometheus, so those that may be are left to the list of metrics.
        assert columns <= set(organize["indexByName"]) <= columns | MAY_BE_EMPTY, panel["title"]
        shown = {organize["renameByName"].get(name, name) for name in organize["indexByName"]}
        assert {override["matcher"]["options"] for override in panel["fieldConfig"]["overrides"]} <= shown
        # Rows of several queries become one where the labels that they share are equal: they have to share some.
        assert set.intersection(*({*series} for answer in samples for series in answer)), panel["title"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_variable_offers_a_value(watched: Watched, path: Path) -> None:
    for variable in json.loads(path.read_text())["templating"]["list"]:
        if variable["type"] != "query" or variable["name"] == "run_namespace":  # there is none outside of Kubernetes
            continue
        match = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"])
        assert match is not None
        assert watched.prometheus.label_values(match[2], filled(match[1], **variables(watched))), variable["name"]


def test_heat_maps_show_every_rank_and_highlight_the_slow_one(watched: Watched) -> None:
    job = {panel["title"]: panel["targets"][0]["expr"] for panel in panels(FOLDER / "rankscope-job.json")}
    chosen = variables(watched)
    rows = labels_of(watched, filled(job["Self time against the cohort, all ranks"], **chosen))
    assert [row["row"] for row in rows] == [f"{rank:05}" for rank in range(RANKS)]
    worst = filled(job["Self time against the cohort, worst ranks"], **{**chosen, "rows": "1"})
    assert [series["rank"] for series in labels_of(watched, worst)] == [str(SLOW)]


def test_only_listed_metrics_are_exported(watched: Watched) -> None:
    names = watched.prometheus.label_values("__name__", '{__name__=~"rankscope_.*"}')
    assert len(names) > 60
    assert set(names) <= set(exported_metrics())


def test_a_query_that_prometheus_refuses_is_noticed(watched: Watched) -> None:
    with pytest.raises(QueryRefusedError, match="parse error"):
        watched.prometheus.query("sum(rankscope_rank_up")
