"""What a fit of collectives found, in words and tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankscope.analysis.alphabeta_predicting import has_tree
from rankscope.analysis.drawing.quantities import quantity
from rankscope.analysis.traces.communication.kinds import CollectiveKind
from rankscope.analysis.verdict import Kind
from rankscope.cli.alphabeta.report import Report

ROWS_SHOWN = 24


def print_report(report: Report, console: Console) -> None:
    style = {Kind.HEALTHY: "bold green", Kind.INSUFFICIENT_DATA: "bold yellow"}.get(report.verdict, "bold red")
    console.print(Text(report.verdict.value, style=style), Text(report.headline))
    console.print()
    tables = [fit_rows(report), prediction_rows(report)]
    for rows in tables:
        if len(rows) == 1:
            continue
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in rows[0]:
            table.add_column(name, justify="left" if name in ("group", "op") else "right", no_wrap=True)
        for row in rows[1 : ROWS_SHOWN + 1]:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        if len(rows) > ROWS_SHOWN + 1:
            console.print(Text(f"… and {len(rows) - ROWS_SHOWN - 1} more (--json has all)", style="dim"))
        console.print()
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
