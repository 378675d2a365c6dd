"""What the replay of a timeline found, in words and tables."""

from __future__ import annotations

import math

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankscope.analysis.timelines.analyzing import TimelineReport
from rankscope.analysis.verdict import Kind

ROWS_SHOWN = 16
_STYLES = {Kind.HEALTHY: "bold green", Kind.INSUFFICIENT_DATA: "bold yellow"}


def headline(report: TimelineReport) -> str:
    verdict = report.judgement.verdict
    gain = "" if verdict.impact_ratio is None else f" Put right, {verdict.impact_ratio:.0%} of the step come back."
    return f"{verdict.reason[:1].upper()}{verdict.reason[1:]}.{gain}"


def summary(report: TimelineReport) -> str:
    found = report.decomposition
    shares = "".join(
        f", {name} {value:.2f} ({text})"
        for name, value, text in (("M_W", found.m_w, "slowest 3 % of ranks"), ("M_S", found.m_s, "last stage"))
        if value is not None
    )
    return (
        f"step {_seconds(float(found.step_seconds.mean()))}, {_seconds(float(found.typical_seconds.mean()))} if every "
        f"operation were typical: S = {found.slowdown:.3f}{shares}"
    )


def tables(report: TimelineReport) -> list[list[tuple[str, ...]]]:
    """Stages, ranks (worst first) and operations; the first row of each holds its headings."""
    return [_stage_rows(report), _rank_rows(report), _optype_rows(report)]


def print_report(report: TimelineReport, console: Console) -> None:
    verdict = report.judgement.verdict
    stages, replicas, tensors = report.rank.shape
    lanes = f"{stages} stages × {replicas} dp ranks" + (f" × {tensors} tensor lanes" if tensors > 1 else "")
    console.print(Text(verdict.kind.value, style=_STYLES.get(verdict.kind, "bold red")), Text(headline(report)))
    console.print(Text(summary(report)))
    console.print(Text(f"{lanes}, {len(report.steps)} of {report.steps_recorded} steps\n", style="dim"))
    for rows in tables(report):
        table = Table(box=None, pad_edge=False, header_style="bold")
        for number, name in enumerate(rows[0]):
            table.add_column(name, justify="left" if number == 0 else "right", no_wrap=True)
        for row in rows[1 : ROWS_SHOWN + 1]:
            table.add_row(*(Text(cell) for cell in row))
        console.print(table)
        if len(rows) > ROWS_SHOWN + 1:
            console.print(Text(f"… and {len(rows) - ROWS_SHOWN - 1} more (--json has all)", style="dim"))
        console.print()
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _stage_rows(report: TimelineReport) -> list[tuple[str, ...]]:
    own, found = report.judgement.own_seconds, report.decomposition
    rows: list[tuple[str, ...]] = [("stage", "own work", "slowdown", "step if like other stages")]
    for stage in range(len(own)):
        rows.append(
            (
                str(stage),
                _seconds(float(own[stage].mean())),
                f"{found.stage_slowdown[stage]:.3f}",
                _seconds(float(found.if_stage[stage])),
            )
        )
    return rows


def _rank_rows(report: TimelineReport) -> list[tuple[str, ...]]:
    found, out = report.decomposition, report.judgement.standing_out
    culprits = set(report.judgement.verdict.culprits)
    stages, replicas, tensors = report.rank.shape
    places = [(s, d, t) for s in range(stages) for d in range(replicas) for t in range(tensors)]

    def badness(place: tuple[int, int, int]) -> tuple[bool, float, float]:
        ratio = float(out.ratio[place])
        known = 0.0 if math.isnan(ratio) else ratio
        return int(report.rank[place]) not in culprits, -known, -float(found.worker_score[place[:2]])

    head = ("rank", "stage", "dp rank", "own work", "of its stage", "slowdown", "step if like its peers")
    rows: list[tuple[str, ...]] = [head]
    for place in sorted(places, key=badness):
        rows.append(
            (
                f"{report.rank[place]}{' ✗' if int(report.rank[place]) in culprits else ''}",
                str(place[0]),
                str(report.data_ranks[place[1]]),
                _seconds(float(report.judgement.own_seconds[place])),
                "–" if math.isnan(out.ratio[place]) else f"{out.ratio[place]:.3f}×",
                f"{found.worker_score[place[:2]]:.3f}",
                _seconds(float(found.if_worker[place[:2]])),
            )
        )
    return rows


def _optype_rows(report: TimelineReport) -> list[tuple[str, ...]]:
    found = report.decomposition
    order = sorted(range(len(report.families)), key=lambda family: -found.family_slowdown[family])
    return [
        ("operation", "slowdown", "step if always typical"),
        *((report.families[f], f"{found.family_slowdown[f]:.4f}", _seconds(float(found.if_family[f]))) for f in order),
    ]


def _seconds(value: float) -> str:
    if math.isnan(value):
        return "–"
    return f"{value:.3f} s" if value >= 1 else f"{value * 1e3:.3g} ms"
