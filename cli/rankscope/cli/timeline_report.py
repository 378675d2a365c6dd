"""The result of a timeline replay as text, tables, JSON, a heat map and a page."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from rich.text import Text

from rankscope.analysis.plots.charts import Curve, Series, bars, plot
from rankscope.analysis.plots.heat_map import heat_map
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis
from rankscope.analysis.timelines.report import TimelineReport
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.cli.terminal import Terminal

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


def print_report(report: TimelineReport, console: Terminal) -> None:
    verdict = report.judgement.verdict
    stages, replicas, tensors = report.rank.shape
    lanes = f"{stages} stages × {replicas} dp ranks" + (f" × {tensors} tensor lanes" if tensors > 1 else "")
    console.print(Text(verdict.kind.value, style=_STYLES.get(verdict.kind, "bold red")), Text(headline(report)))
    console.print(Text(summary(report)))
    console.print(Text(f"{lanes}, {len(report.steps)} of {report.steps_recorded} steps\n", style="dim"))
    for rows in tables(report):
        console.print_rows(rows, rows[0][:1], ROWS_SHOWN)
    for note in report.notes:
        console.print(Text(f"note: {note}", style="dim"))


def _stage_rows(report: TimelineReport) -> list[tuple[str, ...]]:
    own, found = report.judgement.self_seconds, report.decomposition
    rows: list[tuple[str, ...]] = [("stage", "self time", "slowdown", "step if like other stages")]
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
    found, out = report.decomposition, report.judgement.outliers
    culprits = set(report.judgement.verdict.culprits)
    stages, replicas, tensors = report.rank.shape
    places = [(s, d, t) for s in range(stages) for d in range(replicas) for t in range(tensors)]

    def badness(place: tuple[int, int, int]) -> tuple[bool, float, float]:
        ratio = float(out.ratio[place])
        known = 0.0 if math.isnan(ratio) else ratio
        return int(report.rank[place]) not in culprits, -known, -float(found.worker_score[place[:2]])

    head = ("rank", "stage", "dp rank", "self time", "of its stage", "slowdown", "step if like its peers")
    rows: list[tuple[str, ...]] = [head]
    for place in sorted(places, key=badness):
        rows.append(
            (
                f"{report.rank[place]}{' ✗' if int(report.rank[place]) in culprits else ''}",
                str(place[0]),
                str(report.data_ranks[place[1]]),
                _seconds(float(report.judgement.self_seconds[place])),
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


# JSON.


def to_json(report: TimelineReport) -> dict[str, Any]:
    """The keys are documented in docs/analyze-timeline.md."""
    found, verdict = report.decomposition, report.judgement.verdict
    stages, replicas, tensors = report.rank.shape
    places = [(s, d, t) for s in range(stages) for d in range(replicas) for t in range(tensors)]
    places.sort(key=lambda place: int(report.rank[place]))
    out = report.judgement.outliers
    return {
        "verdict": verdict.kind.value,
        "reason": verdict.reason,
        "culprit_ranks": list(verdict.culprits),
        "culprit_stage": verdict.stage,
        "impact_ratio": _number(verdict.impact_ratio),
        "slowdown": _number(found.slowdown),
        "lost_ratio": _number(report.lost_ratio),
        "m_w": _number(found.m_w),
        "m_s": _number(found.m_s),
        "step_seconds": _number(found.step_seconds.mean()),
        "ideal_step_seconds": _number(found.typical_seconds.mean()),
        "recorded_step_seconds": _number(report.recorded_step_seconds.mean()),
        "launch_slowdown": _number(report.launch_slowdown),
        "by_rank": {str(report.rank[p]): _number(found.worker_score[p[:2]]) for p in places},
        "by_dp_rank": dict(zip(map(str, report.data_ranks), map(_number, found.replica_slowdown), strict=True)),
        "by_stage": {str(stage): _number(value) for stage, value in enumerate(found.stage_slowdown)},
        "by_optype": dict(zip(report.families, map(_number, found.family_slowdown), strict=True)),
        "by_step": {
            str(step): _number(value)
            for step, value in zip(report.steps, found.step_seconds / found.typical_seconds, strict=True)
        },
        "own_work": {
            str(report.rank[p]): {
                "stage": p[0],
                "dp_rank": int(report.data_ranks[p[1]]),
                "seconds": _number(report.judgement.self_seconds[p]),
                "ratio_to_stage": _number(out.ratio[p]),
                "slow_steps_ratio": _number(out.slow_steps_ratio[p]),
            }
            for p in places
        },
        "what_if": {
            "if_rank": {
                str(report.rank[p]): _number(found.if_worker[p[:2]])
                for p in places
                if not math.isnan(found.if_worker[p[:2]])
            },
            "if_stage": {
                str(stage): _number(value) for stage, value in enumerate(found.if_stage) if not math.isnan(value)
            },
            "if_optype": dict(zip(report.families, map(_number, found.if_family), strict=True)),
        },
        "shape": {"stages": stages, "dp_ranks": replicas, "tensor_lanes": tensors},
        "steps": {"recorded": report.steps_recorded, "used": len(report.steps)},
        "notes": list(report.notes),
    }


def _number(value: float | None) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None


# Pictures: a heat map of the slowdowns, and one page with everything.


# The scale spans at least this much, or the noise of a healthy job would look like a finding.
MIN_TOP = 1.1
RANKS_ON_PAGE = 512


def draw_svg(report: TimelineReport) -> str:
    return heat_map(
        report.decomposition.worker_score,
        row_labels=[f"stage {stage}" for stage in range(report.rank.shape[0])],
        column_labels=[str(rank) for rank in report.data_ranks],
        title="Slowdown that each rank causes",
        column_title="data-parallel rank",
        value_title="slowdown",
        low=1.0,
        high=max(MIN_TOP, float(report.decomposition.worker_score.max())),
    )


def make_page(report: TimelineReport, name: str) -> str:
    found, verdict = report.decomposition, report.judgement.verdict
    made = [
        Table(rows[0], rows[1 : RANKS_ON_PAGE + 1], numeric=[False] + [True] * (len(rows[0]) - 1), marked=marked)
        for rows, marked in zip(tables(report), _marked(report), strict=True)
    ]
    order = np.argsort(-found.family_slowdown)
    places = range(len(report.steps))
    steps = plot(
        [
            Curve("as recorded", places, report.recorded_step_seconds.tolist()),
            Curve("replayed without delays", places, found.step_seconds.tolist()),
            Curve("everything typical", places, found.typical_seconds.tolist()),
        ],
        across=Axis("step, in order"),
        up=Axis("step time", "s"),
        title="Step time",
    )
    kinds = bars(
        [report.families[family] for family in order],
        [Series("", [float(found.family_slowdown[family]) - 1 for family in order])],
        axis=Axis("slowdown above 1"),
        title="Slowdown by operation",
    )
    sections = [
        Section("Verdict", [summary(report), *report.notes], plots=[draw_svg(report)]),
        Section("Stages", tables=[made[0]]),
        Section("Ranks", tables=[made[1]]),
        Section("Operations", tables=[made[2]], plots=[kinds]),
        Section("Steps", plots=[steps]),
    ]
    lead = f"{verdict.kind.value}: {headline(report)}"
    return page(f"What if: {name}", sections, lead=lead, foot="made by rankscope analyze timeline")


def _marked(report: TimelineReport) -> list[list[int]]:
    verdict = report.judgement.verdict
    stage = [] if verdict.stage is None else [verdict.stage]
    return [stage, list(range(len(verdict.culprits))), []]  # culprits come first among the ranks
