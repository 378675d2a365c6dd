"""A dashboard of panels: where each is, which variables there are, and the way to the other dashboards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deploy.grafana.panels import DATASOURCE, Panel
from deploy.grafana.queries import CLUSTER, JOBS

COLUMNS = 24
TAG = "rankscope"
_SAME = "${datasource:queryparam}&${__url_time_range}"  # data source and time range, as they are
FLEET, JOB, RANK, DAEMONS = "rankscope-fleet", "rankscope-job", "rankscope-rank", "rankscope-daemon"


@dataclass(frozen=True)
class Line:
    """Panels beside each other, of equal width unless `widths` says otherwise; a `heading` makes a row of it."""

    height: int
    panels: Sequence[Panel]
    widths: Sequence[int] = ()
    heading: str = ""


def dashboard(
    uid: str,
    title: str,
    description: str,
    variables: Sequence[dict[str, Any]],
    lines: Sequence[Line],
    since: str = "now-1h",
) -> dict[str, Any]:
    navigation = {
        "type": "dashboards",
        "title": "Rankscope",
        "tags": [TAG],
        "asDropdown": False,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "tooltip": "",
        "url": "",
    }
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": [TAG],
        "editable": True,
        "graphTooltip": 1,  # one crosshair for all panels
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "time": {"from": since, "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "templating": {"list": [_datasource(), *variables]},
        "links": [navigation],
        "panels": _placed(lines),
    }


def _placed(lines: Sequence[Line]) -> list[Panel]:
    placed: list[Panel] = []
    top = 0
    for line in lines:
        if line.heading:
            place = {"x": 0, "y": top, "w": COLUMNS, "h": 1}
            heading = {"type": "row", "title": line.heading, "collapsed": False, "panels": [], "gridPos": place}
            placed.append({"id": len(placed) + 1, **heading})
            top += 1
        widths = line.widths or [COLUMNS // len(line.panels)] * len(line.panels)
        left = 0
        for panel, width in zip(line.panels, widths, strict=True):
            place = {"x": left, "y": top, "w": width, "h": line.height}
            placed.append({"id": len(placed) + 1, **panel, "gridPos": place})
            left += width
        top += line.height
    return placed


def _datasource() -> dict[str, Any]:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "includeAll": False,
        "multi": False,
        "refresh": 1,
        "hide": 0,
    }


def variable(name: str, label: str, query: str, *, several: bool = False, numeric: bool = False) -> dict[str, Any]:
    """Values of a label. With `several`, all of them at first, and a regular expression in queries (=~)."""
    made: dict[str, Any] = {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,  # when the time range changes
        "sort": 3 if numeric else 1,
        "includeAll": several,
        "multi": several,
        "hide": 0,
    }
    if several:
        # ".*" and not the list of all: a thousand nodes in a regular expression are slow, and "" is a value too.
        made |= {"allValue": ".*", "current": {"text": ["All"], "value": ["$__all"]}}
    return made


def choice(name: str, label: str, values: Sequence[str]) -> dict[str, Any]:
    """One of these; the first at first."""
    options = [{"text": value, "value": value, "selected": value == values[0]} for value in values]
    query = ",".join(values)
    return {
        "name": name,
        "label": label,
        "type": "custom",
        "query": query,
        "options": options,
        "current": options[0],
        "includeAll": False,
        "multi": False,
        "hide": 0,
    }


# Which run a link is about: that of the variables, that of a row (`queries.with_place`), or that of a line.
THIS_RUN = "${cluster:queryparam}&${run_namespace:queryparam}&${run:queryparam}"
RUN_OF_ROW = "&".join(
    f"var-{name}=${{__data.fields.{name}:percentencode}}" for name in ("cluster", "run_namespace", "run")
)
RUN_OF_LINE = "${cluster:queryparam}&${run_namespace:queryparam}&var-run=${__field.labels.run:percentencode}"


def to_job(run: str) -> dict[str, Any]:
    return {"title": "Job", "url": f"/d/{JOB}?{run}&{_SAME}"}


def to_rank(run: str, rank: str = "${__value.raw:percentencode}") -> dict[str, Any]:
    return {"title": "Rank", "url": f"/d/{RANK}?{run}&var-rank={rank}&{_SAME}"}


def to_node(node: str = "${__value.raw:percentencode}") -> dict[str, Any]:
    return {"title": "Daemon of the node", "url": f"/d/{DAEMONS}?${{cluster:queryparam}}&var-node={node}&{_SAME}"}


def cluster_variable() -> dict[str, Any]:
    return variable("cluster", "Cluster", "label_values(rankscope_build_info, cluster)", several=True)


def namespace_variable() -> dict[str, Any]:
    query = f"label_values(rankscope_rank_info{{{CLUSTER}}}, run_namespace)"
    return variable("run_namespace", "Namespace", query, several=True)


def run_variables() -> list[dict[str, Any]]:
    """The variables that choose one run."""
    run = variable("run", "Run", f"label_values(rankscope_rank_info{{{JOBS}}}, run)")
    return [cluster_variable(), namespace_variable(), run]
