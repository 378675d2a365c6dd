"""The result of an alpha-beta fit as text, tables, JSON, plots and a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.text import Text

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import (
    Algorithm,
    Fit,
    Observations,
    crossover_bytes,
    fit_collectives,
    has_tree,
    residual_ratios,
)
from rankscope.analysis.collectives.anomalies import Anomaly, anomalies
from rankscope.analysis.plots import page
from rankscope.analysis.plots.charts import Curve, plot
from rankscope.analysis.plots.svg import Axis
from rankscope.analysis.quantities import quantity
from rankscope.analysis.stats.robust import Floats, Ints, take_rows
from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.cli.terminal import Terminal

_MAX_SIZES = 32
ROWS_SHOWN = 24


@dataclass(frozen=True)
class Prediction:
    group: str
    op: str
    ranks: int
    bytes: int
    count: int  # observed at this size; 0 for numbers of ranks that were not observed
    actual_seconds: float | None  # median
    predicted_seconds: float
    ring_seconds: float
    tree_seconds: float | None


@dataclass(frozen=True)
class Report:
    observed: Observations
    fits: tuple[Fit, ...]
    anomalies: tuple[Anomaly, ...]
    predictions: tuple[Prediction, ...]
    notes: tuple[str, ...]
    source: str

    @property
    def verdict(self) -> Kind:
        if any(anomaly.severity is Severity.ALARM for anomaly in self.anomalies):
            return Kind.SLOW_COMMUNICATION
        return Kind.HEALTHY if any(fit.is_fitted for fit in self.fits) else Kind.INSUFFICIENT_DATA

    @property
    def headline(self) -> str:
        if self.verdict is Kind.SLOW_COMMUNICATION:
            worst = self.anomalies[0]
            return f"{worst.reason}; {worst.lost_ratio:.0%} of its time is lost"
        if self.verdict is Kind.INSUFFICIENT_DATA:
            return "nothing could be fitted: " + "; ".join(
                dict.fromkeys(f"{fit.label}: {fit.reason}" for fit in self.fits)
            )
        if self.anomalies:
            return f"{self.anomalies[0].reason}, not long enough to be sure"
        return "no collective stays slower than it should be"


def make_report(observed: Observations, notes: Sequence[str], source: str, at_ranks: int | None) -> Report:
    fits = fit_collectives(observed)
    predictions = [row for fit in fits if fit.is_fitted for row in _predictions(observed, fit, at_ranks)]
    return Report(observed, fits, anomalies(observed, fits), tuple(predictions), tuple(notes), source)


def to_json(report: Report) -> dict[str, Any]:
    """The keys are documented in docs/analyze-alphabeta.md."""
    return {
        "verdict": report.verdict.value,
        "reason": report.headline,
        "source": report.source,
        "observations": len(report.observed),
        "fits": [
            {
                "group": fit.group,
                "op": CollectiveKind(fit.kind).label,
                "ranks": _known(fit.ranks),
                "count": fit.count,
                "distinct_sizes": fit.distinct_sizes,
                "alpha_us": _scaled(fit.alpha_seconds, 1e6),
                "beta_gbps": _scaled(fit.beta_bytes_per_second, 1e-9),
                "algorithm": fit.algorithm.value if fit.is_fitted else None,
                "algorithm_observed": fit.algorithm_observed,
                "residual_p50": _scaled(fit.residual_p50, 1),
                "residual_p95": _scaled(fit.residual_p95, 1),
                "busbw_p50_gbps": _scaled(fit.bus_bytes_per_second_p50, 1e-9),
                "crossover_bytes": _scaled(_crossover(fit), 1),
                "reason": fit.reason or None,
            }
            for fit in report.fits
        ],
        "anomalies": [
            {
                "group": one.group,
                "op": CollectiveKind(one.kind).label,
                "ranks": _known(one.ranks),
                "against": one.against,
                "severity": one.severity.value,
                "ratio": one.ratio,
                "windows": one.windows,
                "slow_windows": one.slow_windows,
                "since_seconds": one.since_seconds,
                "ongoing": one.ongoing,
                "lost_us": one.lost_seconds * 1e6,
                "lost_ratio": one.lost_ratio,
                "reason": one.reason,
            }
            for one in report.anomalies
        ],
        "predicted": [
            {
                "group": row.group,
                "op": row.op,
                "ranks": row.ranks,
                "bytes": row.bytes,
                "count": row.count,
                "actual_us": _scaled(row.actual_seconds, 1e6),
                "predicted_us": row.predicted_seconds * 1e6,
                "ratio": None if row.actual_seconds is None else row.actual_seconds / row.predicted_seconds,
                "ring_us": row.ring_seconds * 1e6,
                "tree_us": _scaled(row.tree_seconds, 1e6),
            }
            for row in report.predictions
        ],
        "notes": list(report.notes),
    }


def _predictions(observed: Observations, fit: Fit, at_ranks: int | None) -> Iterable[Prediction]:
    mine = observations_of(observed, fit)
    mine = take_rows(mine, mine.ranks == fit.ranks)
    sizes, which, counts = np.unique(mine.bytes, return_inverse=True, return_counts=True)
    chosen = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), _MAX_SIZES)).round().astype(int))
    for ranks in [fit.ranks] if at_ranks in (None, fit.ranks) else [fit.ranks, at_ranks or 0]:
        for number in chosen.tolist():
            size, count = sizes[number : number + 1], np.array([ranks])
            seen = ranks == fit.ranks
            tree = fit.predict(size, count, Algorithm.TREE)[0] if has_tree(fit.kind) else None
            yield Prediction(
                group=fit.group,
                op=CollectiveKind(fit.kind).label,
                ranks=ranks,
                bytes=int(size[0]),
                count=int(counts[number]) if seen else 0,
                actual_seconds=float(np.median(mine.seconds[which == number])) if seen else None,
                predicted_seconds=float(fit.predict(size, count)[0]),
                ring_seconds=float(fit.predict(size, count, Algorithm.RING)[0]),
                tree_seconds=None if tree is None else float(tree),
            )


def observations_of(observed: Observations, fit: Fit) -> Observations:
    group = observed.groups.index(fit.group)
    chosen = (observed.group == group) & (observed.kind == fit.kind) & (observed.bytes > 0) & (observed.ranks > 0)
    return take_rows(observed, chosen & (observed.seconds > 0))


def _crossover(fit: Fit) -> float | None:
    if fit.beta_bytes_per_second is None or fit.alpha_seconds is None:
        return None
    return crossover_bytes(fit.kind, fit.ranks, fit.alpha_seconds, fit.beta_bytes_per_second)


def _known(ranks: int) -> int | None:
    return ranks if ranks > 0 else None


def _scaled(value: float | None, factor: float) -> float | None:
    return value * factor if value is not None and math.isfinite(value) else None


# Text and tables.


def print_report(report: Report, console: Terminal) -> None:
    style = {Kind.HEALTHY: "bold green", Kind.INSUFFICIENT_DATA: "bold yellow"}.get(report.verdict, "bold red")
    console.print(Text(report.verdict.value, style=style), Text(report.headline))
    console.print()
    for rows in (fit_rows(report), prediction_rows(report)):
        if len(rows) > 1:
            console.print_rows(rows, ("group", "op"), ROWS_SHOWN)
    for anomaly in report.anomalies:
        console.print(Text(f"{anomaly.severity.value}: {anomaly.reason}", style="red"))
    if any(fit.is_fitted and has_tree(fit.kind) and not fit.algorithm_observed for fit in report.fits):
        console.print(Text("α is per step of a ring: one count of ranks cannot tell it from a tree", style="dim"))
    for fit in report.fits:
        if fit.reason:
            console.print(Text(f"no fit of {fit.label}: {fit.reason}", style="yellow"))
    if any(fit.ranks < 0 for fit in report.fits):
        console.print(Text("--ranks N says how many ranks a group has where the file does not", style="dim"))
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


def fit_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("group", "op", "ranks", "count", "α", "β", "busbw", "residual p50", "p95")]
    for fit in report.fits:
        alpha = "not seen" if fit.is_fitted and fit.alpha_seconds is None else _text(fit.alpha_seconds, 1e6, " µs")
        rows.append(
            (
                fit.group or "–",
                CollectiveKind(fit.kind).label,
                str(fit.ranks) if fit.ranks > 0 else "–",
                str(fit.count),
                alpha,
                _text(fit.beta_bytes_per_second, 1e-9, " GB/s"),
                _text(fit.bus_bytes_per_second_p50, 1e-9, " GB/s"),
                _text(fit.residual_p50, 1, "×"),
                _text(fit.residual_p95, 1, "×"),
            )
        )
    return _without_empty_groups(rows)


def _without_empty_groups(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    return rows if any(row[0] != "–" for row in rows[1:]) else [row[1:] for row in rows]


def prediction_rows(report: Report) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("group", "op", "ranks", "size", "actual", "predicted", "ratio", "ring", "tree")]
    for row in report.predictions:
        ratio = None if row.actual_seconds is None else row.actual_seconds / row.predicted_seconds
        rows.append(
            (
                row.group or "–",
                row.op,
                str(row.ranks),
                quantity(row.bytes, "B"),
                "–" if row.actual_seconds is None else quantity(row.actual_seconds, "s"),
                quantity(row.predicted_seconds, "s"),
                _text(ratio, 1, "×"),
                quantity(row.ring_seconds, "s"),
                "–" if row.tree_seconds is None else quantity(row.tree_seconds, "s"),
            )
        )
    return _without_empty_groups(rows)


def _text(value: float | None, factor: float, unit: str) -> str:
    return "–" if value is None else f"{value * factor:.3g}{unit}"


# Plots, and the page that holds them.


_MAX_POINTS = 1500
_CURVE_POINTS = 60
_EXPLAINED = (
    "T = α·steps + bytes/β: α is the latency of one step, β the bus bandwidth that large messages approach (bytes "
    "counted as nccl-tests do). A residual is actual over predicted."
)


def draw_svg(report: Report) -> str:
    """Predicted against actual time: above the diagonal the collective was slow."""
    clouds = []
    for fit in report.fits:
        if fit.is_fitted:
            mine = _thinned(observations_of(report.observed, fit))
            clouds.append(_cloud(fit.label, mine.seconds / residual_ratios(mine, fit), mine.seconds))
    return plot(
        clouds,
        across=Axis("predicted", "s", log=True),
        up=Axis("actual", "s", log=True),
        title="Predicted against actual time",
        diagonal=True,
    )


def make_page(report: Report, name: str) -> str:
    sections = [
        page.Section("Predicted and actual", plots=(draw_svg(report),)),
        page.Section("Fits", paragraphs=(_EXPLAINED,), tables=(_page_table(fit_rows(report)),)),
        page.Section(
            "Time by size",
            plots=tuple(_draw_by_size(report.observed, fit) for fit in report.fits if fit.is_fitted),
            tables=(_page_table(prediction_rows(report)),),
        ),
    ]
    said = [one.reason for one in report.anomalies]
    said += [f"No fit of {fit.label}: {fit.reason}." for fit in report.fits if fit.reason]
    said += report.notes
    if said:
        sections.append(page.Section("Remarks", paragraphs=said))
    return page.page(f"Collectives of {name}", sections, lead=f"{report.verdict.value}: {report.headline}")


def _draw_by_size(observed: Observations, fit: Fit) -> str:
    mine = observations_of(observed, fit)
    mine = _thinned(take_rows(mine, mine.ranks == fit.ranks))
    size = np.geomspace(max(mine.bytes.min(), 1), mine.bytes.max() + 1, _CURVE_POINTS)
    curves = [_cloud("observed", mine.bytes, mine.seconds)]
    for name, algorithm in (("ring", Algorithm.RING), ("tree", Algorithm.TREE)):
        if algorithm is Algorithm.RING or has_tree(fit.kind):
            predicted = _list(fit.predict(size, algorithm=algorithm))
            curves.append(Curve(name, _list(size), predicted, dot_pixels=0))
    return plot(
        curves,
        across=Axis("size", "B", log=True),
        up=Axis("time", "s", log=True),
        title=f"{fit.label}, {fit.ranks} ranks",
    )


def _cloud(name: str, x: Floats | Ints, y: Floats) -> Curve:
    return Curve(name, _list(x), _list(y), has_line=False, dot_pixels=3.5)


def _page_table(rows: list[tuple[str, ...]]) -> page.Table:
    return page.Table(rows[0], rows[1:], numeric=[name not in ("group", "op") for name in rows[0]])


def _thinned(mine: Observations) -> Observations:
    return take_rows(mine, np.unique(np.linspace(0, len(mine) - 1, min(len(mine), _MAX_POINTS)).round().astype(int)))


def _list(values: Floats | Ints) -> list[float]:
    return [float(value) for value in values]
