"""The replay of a timeline as pictures: a heat map of the slowdowns, and one page with everything."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.plots.charts import Series, bars, lines
from rankscope.analysis.plots.heat_map import heat_map
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis
from rankscope.analysis.timelines.report import TimelineReport
from rankscope.cli.timeline_report.report import headline, summary, tables

# The scale spans at least this much, or the noise of a healthy job would look like a finding.
LEAST_TOP = 1.1
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
        high=max(LEAST_TOP, float(report.decomposition.worker_score.max())),
    )


def make_page(report: TimelineReport, name: str) -> str:
    found, verdict = report.decomposition, report.judgement.verdict
    made = [
        Table(rows[0], rows[1 : RANKS_ON_PAGE + 1], numeric=[False] + [True] * (len(rows[0]) - 1), marked=marked)
        for rows, marked in zip(tables(report), _marked(report), strict=True)
    ]
    order = np.argsort(-found.family_slowdown)
    steps = lines(
        [float(step) for step in range(len(report.steps))],
        [
            Series("as recorded", report.recorded_step_seconds.tolist()),
            Series("replayed without delays", found.step_seconds.tolist()),
            Series("everything typical", found.typical_seconds.tolist()),
        ],
        across=Axis("step, in order"),
        up=Axis("step time", "s"),
        title="Step time",
    )
    kinds = bars(
        [report.families[family] for family in order],
        [float(found.family_slowdown[family]) - 1 for family in order],
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
