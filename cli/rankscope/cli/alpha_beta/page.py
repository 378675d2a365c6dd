"""Plots of a fit of collectives, and the page that holds them."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.collectives.alpha_beta import Algorithm, Fit, Observations, has_tree, residual_ratios
from rankscope.analysis.plots import page
from rankscope.analysis.plots.charts import Cloud, scatter
from rankscope.analysis.plots.svg import Axis
from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.cli.alpha_beta.report import Report, fit_rows, observations_of, prediction_rows

_MOST_POINTS = 1500
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
            clouds.append(Cloud(fit.label, _list(mine.seconds / residual_ratios(mine, fit)), _list(mine.seconds)))
    return scatter(
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
    mine = _thinned(mine.where(mine.ranks == fit.ranks))
    size = np.geomspace(max(mine.bytes.min(), 1), mine.bytes.max() + 1, _CURVE_POINTS)
    curves = [Cloud("ring", _list(size), _list(fit.predict(size, algorithm=Algorithm.RING)))]
    if has_tree(fit.kind):
        curves.append(Cloud("tree", _list(size), _list(fit.predict(size, algorithm=Algorithm.TREE))))
    return scatter(
        [Cloud("observed", _list(mine.bytes), _list(mine.seconds))],
        across=Axis("size", "B", log=True),
        up=Axis("time", "s", log=True),
        title=f"{fit.label}, {fit.ranks} ranks",
        curves=curves,
    )


def _page_table(rows: list[tuple[str, ...]]) -> page.Table:
    return page.Table(rows[0], rows[1:], numeric=[name not in ("group", "op") for name in rows[0]])


def _thinned(mine: Observations) -> Observations:
    return mine.where(np.unique(np.linspace(0, len(mine) - 1, min(len(mine), _MOST_POINTS)).round().astype(int)))


def _list(values: Floats | Ints) -> list[float]:
    return [float(value) for value in values]
