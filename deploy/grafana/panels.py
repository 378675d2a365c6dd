"""Panels as Grafana wants them, with the few options that we use. `laying_out` gives them ids and places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Panel = dict[str, Any]
Threshold = tuple[float | None, str]  # from which value on (None: from the lowest), and the colour

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
GOOD, NOTICE, WARN, BAD, NEUTRAL = "green", "yellow", "orange", "red", "text"


@dataclass(frozen=True)
class Query:
    expr: str
    legend: str = "__auto"
    instant: bool = False


def timeseries(
    title: str,
    description: str,
    queries: Sequence[Query],
    unit: str,
    *,
    stacked: bool = False,
    top: float | None = None,
    thresholds: Sequence[Threshold] = (),
    beside: Sequence[str] = (),
    links: Sequence[dict[str, Any]] = (),
) -> Panel:
    """`beside`: legends of series to compare with, drawn dashed and grey."""
    custom: dict[str, Any] = {"lineWidth": 1, "fillOpacity": 70 if stacked else 5, "showPoints": "never"}
    custom |= {"spanNulls": False, "axisSoftMin": 0}
    if stacked:
        custom["stacking"] = {"mode": "normal", "group": "A"}
    if thresholds:
        custom["thresholdsStyle"] = {"mode": "dashed"}
    overrides = [
        override(
            legend,
            ("custom.lineStyle", {"fill": "dash", "dash": [8, 6]}),
            ("color", {"mode": "fixed", "fixedColor": NEUTRAL}),
            ("custom.fillOpacity", 0),
        )
        for legend in beside
    ]
    defaults = _defaults(unit, custom, thresholds or ((None, GOOD),), links)
    defaults["color"] = {"mode": "palette-classic"}
    if top is not None:
        defaults["max"] = top
    legend = {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []}
    tooltip = {"mode": "multi", "sort": "desc"}
    panel = _panel("timeseries", title, description, queries, defaults, {"legend": legend, "tooltip": tooltip})
    panel["fieldConfig"]["overrides"] = overrides
    return panel


def stat(
    title: str,
    description: str,
    query: Query,
    unit: str,
    thresholds: Sequence[Threshold] = ((None, NEUTRAL),),
    *,
    show_name: bool = False,
    decimals: int | None = None,
    mappings: Sequence[dict[str, Any]] = (),
) -> Panel:
    """One number; with `show_name`, the legend of its series instead."""
    options = {
        "colorMode": "value",
        "graphMode": "none",
        "justifyMode": "center",
        "orientation": "auto",
        "percentChangeColorMode": "standard",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
        "showPercentChange": False,
        "textMode": "name" if show_name else "value",
        "wideLayout": True,
    }
    defaults = _defaults(unit, {}, thresholds, ())
    if decimals is not None:
        defaults["decimals"] = decimals
    if mappings:
        defaults["mappings"] = list(mappings)
    return _panel("stat", title, description, [query], defaults, options)


def table(
    title: str,
    description: str,
    columns: Sequence[tuple[Query, str]],
    *,
    sort_by: str,
    hide: Sequence[str] = (),
    order: Sequence[str] = (),
    overrides: Sequence[dict[str, Any]] = (),
) -> Panel:
    """One row per set of labels. Each query brings its labels and a value, in a column of that name ("": not shown)."""
    queries = [query for query, _ in columns]
    values = [f"Value #{_reference(number)}" if len(columns) > 1 else "Value" for number in range(len(columns))]
    unnamed = [value for value, (_, name) in zip(values, columns, strict=True) if not name]
    renamed = {value: name for value, (_, name) in zip(values, columns, strict=True) if name}
    names = {name: value for value, name in renamed.items()}
    organize = {
        "excludeByName": dict.fromkeys(["Time", *hide, *unnamed], True),
        "renameByName": renamed,
        "indexByName": {names.get(name, name): position for position, name in enumerate(order)},
    }
    transformations = [{"id": "merge", "options": {}}] if len(columns) > 1 else []
    options = {
        "cellHeight": "sm",
        "frameIndex": 0,
        "showHeader": True,
        "sortBy": [{"displayName": sort_by, "desc": True}],
    }
    defaults = _defaults("short", {"align": "auto", "filterable": False}, ((None, NEUTRAL),), ())
    panel = _panel("table", title, description, queries, defaults, options)
    for target in panel["targets"]:
        target |= {"format": "table", "instant": True, "range": False}
    panel["transformations"] = [*transformations, {"id": "organize", "options": organize}]
    panel["fieldConfig"]["overrides"] = list(overrides)
    return panel


def rows_over_time(
    title: str,
    description: str,
    query: Query,
    unit: str,
    thresholds: Sequence[Threshold],
    links: Sequence[dict[str, Any]],
) -> Panel:
    """One row per series, coloured by threshold; for a few dozen series."""
    options = {
        "colWidth": 1,
        "rowHeight": 0.9,
        "showValue": "never",
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": False, "calcs": []},
        "tooltip": {"mode": "single", "sort": "none"},
    }
    defaults = _defaults(unit, {"fillOpacity": 90, "lineWidth": 0}, thresholds, links)
    defaults["color"] = {"mode": "thresholds"}
    panel = _panel("status-history", title, description, [query], defaults, options)
    panel["maxDataPoints"] = 120
    return panel


def heat_map(title: str, description: str, query: Query, unit: str, low: float, high: float) -> Panel:
    """One thin row per series, in the order of their names; for hundreds of series."""
    color = {"mode": "scheme", "scheme": "RdYlGn", "reverse": True, "steps": 64, "min": low, "max": high}
    color |= {"exponent": 0.5, "fill": "dark-orange", "scale": "linear"}
    options = {
        "calculate": False,
        "cellGap": 0,
        "cellValues": {"unit": unit, "decimals": 0},
        "color": color,
        "exemplars": {"color": "rgba(255,0,255,0.7)"},
        "legend": {"show": True},
        "rowsFrame": {"layout": "auto"},
        "showValue": "never",
        "tooltip": {"mode": "single", "yHistogram": False, "showColorScale": True},
        "yAxis": {"axisPlacement": "left", "reverse": True, "unit": "none"},
    }
    panel = _panel("heatmap", title, description, [query], {"custom": {}}, options)
    panel["maxDataPoints"] = 240
    return panel


def override(name: str, *properties: tuple[str, Any]) -> dict[str, Any]:
    """Of the field of that name, as it is shown."""
    return {
        "matcher": {"id": "byName", "options": name},
        "properties": [{"id": identifier, "value": value} for identifier, value in properties],
    }


def column(name: str, unit: str, thresholds: Sequence[Threshold] = (), *, width: int | None = None) -> dict[str, Any]:
    """A column of numbers; coloured where it has thresholds."""
    properties: list[tuple[str, Any]] = [("unit", unit)]
    if thresholds:
        properties += [("thresholds", _steps(thresholds)), ("custom.cellOptions", {"type": "color-text"})]
    if width is not None:
        properties.append(("custom.width", width))
    return override(name, *properties)


def words(name: str, colors: dict[str, str]) -> dict[str, Any]:
    """A column of words, each in its colour."""
    return override(
        name, ("mappings", [_words(colors)]), ("custom.cellOptions", {"type": "color-text"}), ("custom.width", 150)
    )


def linked(name: str, link: dict[str, Any], width: int | None = None) -> dict[str, Any]:
    more: list[tuple[str, Any]] = [] if width is None else [("custom.width", width)]
    return override(name, ("links", [link]), *more)


def numbers_as_words(**meanings: tuple[str, str]) -> dict[str, Any]:
    """`_0=("no", GOOD)`: how a number is to be shown."""
    options = {
        name.lstrip("_"): {"text": text, "color": color, "index": index}
        for index, (name, (text, color)) in enumerate(meanings.items())
    }
    return {"type": "value", "options": options}


def _words(colors: dict[str, str]) -> dict[str, Any]:
    options = {word: {"color": color, "index": index} for index, (word, color) in enumerate(colors.items())}
    return {"type": "value", "options": options}


def _panel(
    kind: str, title: str, description: str, queries: Sequence[Query], defaults: dict[str, Any], options: dict[str, Any]
) -> Panel:
    targets = []
    for number, query in enumerate(queries):
        target = {
            "datasource": DATASOURCE,
            "refId": _reference(number),
            "expr": query.expr,
            "legendFormat": query.legend,
        }
        targets.append({**target, "editorMode": "code", "instant": query.instant, "range": not query.instant})
    return {
        "type": kind,
        "title": title,
        "description": description,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
    }


def _defaults(
    unit: str, custom: dict[str, Any], thresholds: Sequence[Threshold], links: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": unit, "custom": custom, "thresholds": _steps(thresholds)}
    if links:
        defaults["links"] = list(links)
    return defaults


def _steps(thresholds: Sequence[Threshold]) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"value": value, "color": color} for value, color in thresholds]}


def _reference(number: int) -> str:
    return chr(ord("A") + number)
