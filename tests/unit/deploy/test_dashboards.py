"""The dashboards as files: fresh, valid for Grafana, tidy, and about metrics that exist. That their panels show
something is tried in tests/alerts, with a real Prometheus."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from deploy.grafana import dashboards, laying_out
from tests.promql_reading import label_lists, selectors
from tools.exported_metrics import exported_metrics

ROOT = Path(__file__).resolve().parents[3]
FILES = sorted(dashboards.FOLDER.glob("*.json"))
# Grafana's names of units that we use; one it does not know is shown as text behind the number.
UNITS = {"none", "short", "percentunit", "s", "bytes", "Bps", "watt", "celsius", "hertz"}
ADDED_BY_PROMETHEUS = {"instance", "cluster"}

each_dashboard = pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)


def read(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(path.read_text())
    return made


def panels(path: Path) -> list[dict[str, Any]]:
    return [panel for panel in read(path)["panels"] if panel["type"] != "row"]


def expressions(path: Path) -> Iterator[tuple[str, str]]:
    """(where it stands, PromQL) of every panel and variable."""
    for panel in panels(path):
        yield from ((panel["title"], target["expr"]) for target in panel["targets"])
    for variable in read(path)["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]


@cache
def schema() -> dict[str, Any]:
    """Of Grafana's own types. `make test` has made it already."""
    subprocess.run([str(ROOT / "tools" / "setup_grafana_schema.sh")], check=True)
    made: dict[str, Any] = json.loads((ROOT / ".grafana-schema" / "schema.json").read_text())
    checked: dict[str, Any] = made["definitions"]["Checked"]["properties"]
    return checked


def validate(document: object, part: dict[str, Any], where: str) -> None:
    errors = sorted(jsonschema.Draft7Validator(part).iter_errors(document), key=lambda error: error.json_path)
    assert not errors, "\n".join(f"{where} {error.json_path}: {error.message[:300]}" for error in errors)


def test_there_are_four_dashboards_and_they_are_fresh() -> None:
    """`make dashboards` regenerates them."""
    assert len(FILES) == 4
    assert dashboards.stale_files() == []


@each_dashboard
def test_a_dashboard_is_one_by_grafanas_own_types(path: Path) -> None:
    dashboard = read(path)
    validate(dashboard, schema()["dashboard"], path.name)
    # Options and fields of panels are free in the type of a dashboard; each kind of panel has types of its own.
    kinds = schema()["panels"]["properties"]
    for panel in panels(path):
        kind = kinds[panel["type"]]["properties"]
        where = f"{path.name}, {panel['title']}:"
        validate(panel["options"], kind["options"], where)
        validate(panel["fieldConfig"]["defaults"].get("custom", {}), kind["custom"], where)
        for override in panel["fieldConfig"]["overrides"]:
            custom = {
                property_["id"].removeprefix("custom."): property_["value"]
                for property_ in override["properties"]
                if property_["id"].startswith("custom.")
            }
            validate(custom, kind["custom"], where)


def test_the_schema_refuses_what_grafana_does_not_know() -> None:
    dashboard = read(FILES[0])
    panel = next(panel for panel in dashboard["panels"] if panel["type"] == "timeseries")
    panel["options"]["tooltip"]["mode"] = "loud"
    with pytest.raises(AssertionError, match="loud"):
        validate(panel["options"], schema()["panels"]["properties"]["timeseries"]["properties"]["options"], "")
    dashboard["pannels"] = []
    with pytest.raises(AssertionError, match="pannels"):
        validate(dashboard, schema()["dashboard"], "")


@each_dashboard
def test_panels_do_not_overlap_and_are_not_too_many(path: Path) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in read(path)["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= laying_out.COLUMNS, panel["title"]
        for cell in (
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        ):
            assert cell not in taken, f"{panel['title']} lies on {taken[cell]}"
            taken[cell] = panel["title"]
    identifiers = [panel["id"] for panel in read(path)["panels"]]
    assert len(set(identifiers)) == len(identifiers)
    assert len(panels(path)) <= 26
    # 900 pixels of a laptop's screen are about 22 rows of the grid: the numbers and the most important panel are on it.
    assert max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels(path)[:8]) <= 22


@each_dashboard
def test_every_panel_has_a_description_and_the_chosen_datasource(path: Path) -> None:
    titles = [panel["title"] for panel in panels(path)]
    assert len(set(titles)) == len(titles)
    for panel in panels(path):
        assert panel["description"].endswith("."), panel["title"]
        references = [target["refId"] for target in panel["targets"]]
        assert references and len(set(references)) == len(references), panel["title"]
        for target in panel["targets"]:
            assert target["expr"].strip(), panel["title"]
            assert target["legendFormat"], panel["title"]
        units = {panel["fieldConfig"]["defaults"].get("unit", "none")}
        units |= {
            property_["value"]
            for override in panel["fieldConfig"]["overrides"]
            for property_ in override["properties"]
            if property_["id"] == "unit"
        }
        assert units <= UNITS, panel["title"]
    for uid in re.findall(r'"datasource": \{[^}]*"uid": "([^"]*)"', path.read_text()):
        assert uid == "${datasource}"


@each_dashboard
def test_the_used_variables_are_the_defined_ones(path: Path) -> None:
    defined = [variable["name"] for variable in read(path)["templating"]["list"]]
    body = re.sub(r"\$\{?__\w+(\.[^}]*\})?", "", path.read_text())
    used = set(re.findall(r"\$\{?([a-z_]+)", body))
    assert used == set(defined)


@each_dashboard
def test_links_lead_to_own_dashboards_with_their_variables(path: Path) -> None:
    variables = {read(file)["uid"]: {v["name"] for v in read(file)["templating"]["list"]} for file in FILES}
    links = re.findall(r'"url": "/d/([^?"]+)\?([^"]*)"', path.read_text())
    assert links
    for uid, query in links:
        assert set(re.findall(r"var-(\w+)=", query)) <= variables[uid]
        assert "${datasource:queryparam}" in query
        assert "${__url_time_range}" in query


@each_dashboard
def test_every_query_tells_runs_and_machines_of_two_clusters_apart(path: Path) -> None:
    for where, expression in expressions(path):
        for labels in label_lists(expression):
            assert not labels & {"job", "namespace", "pod"}, where
            assert "run" not in labels or "run_namespace" in labels, where
            assert "cluster" in labels or not labels & {"run", "instance"}, where
        assert "on (gpu" not in expression, where
        # Every metric is chosen by cluster, or joined with one that is.
        assert where == "cluster" or "$cluster" in expression, where


@each_dashboard
def test_every_query_uses_exported_metrics_labels_and_values(path: Path) -> None:
    metrics = exported_metrics()
    for where, expression in expressions(path):
        for selector in selectors(expression):
            assert selector.metric in metrics, f"{where}: {selector.metric} is not exported"
            labels = metrics[selector.metric].labels
            for matcher in selector.matchers:
                assert matcher.label in {*labels, *ADDED_BY_PROMETHEUS}, (
                    f"{where}: {selector.metric} has no {matcher.label}"
                )
                if closed := labels.get(matcher.label):
                    assert set(matcher.words) <= set(closed), f"{where}: {selector.metric} {matcher}"
