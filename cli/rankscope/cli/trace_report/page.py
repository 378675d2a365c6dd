"""The trace report as one self-contained HTML page."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.plots import svg
from rankscope.analysis.plots.charts import Curve, Series, bars, plot
from rankscope.analysis.plots.heat_map import heat_map
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis
from rankscope.analysis.quantities import NOT_MEASURED, count, quantity
from rankscope.analysis.traces.summary_records import CollectiveSummary, RankSummary
from rankscope.cli.trace_report.report import JoinReport, Report, facts, gbps, name_of, shown_rank, verdict_sentence

_TIME = Axis("time", "us")
# In the order of the stack; the parts of RankSummary.parts_us.
_PARTS = (
    ("compute", "compute", svg.BLUE),
    ("memory_kernels", "kernels that move data", svg.SKY),
    ("communication", "exposed communication", svg.ORANGE),
    ("memory_copies", "exposed copies", svg.GREEN),
    ("input", "waiting for input", svg.PURPLE),
    ("host", "waiting for the host", svg.VERMILION),
    ("synchronisation", "after synchronisation", "#8c510a"),
    ("other", "other idle", svg.GREY),
)
_PARTS_EXPLAINED = (
    "Each rank's span from its first kernel to its last, divided without overlap: what a colour shows is time in which "
    "nothing of the colours before it ran. Communication here is what computation does not hide."
)
# Limit for a page that scrolls smoothly; the table has all ranks.
_MAX_BARS = 256
_FOLDED_ABOVE = 32


# Plots and tables.


def part_plot(report: Report) -> str:
    ranks = report.ranks[:_MAX_BARS]
    present = [part for part in _PARTS if any(rank.parts_us[part[0]] > 0 for rank in ranks)]
    series = [Series(name, [rank.parts_us[key] for rank in ranks], colour) for key, name, colour in present]
    return bars([name_of(rank) for rank in ranks], series, axis=_TIME, row_title="rank")


def step_plot(report: Report) -> str:
    """Rank by step if there are several of both, else one line."""
    numbers = sorted({step.number for rank in report.ranks for step in rank.steps})
    if len(numbers) < 2:
        return ""
    if len(report.ranks) == 1:
        steps = report.ranks[0].steps
        parts = (
            ("step", [step.duration_us for step in steps]),
            ("compute", [step.compute_us for step in steps]),
            ("exposed communication", [step.exposed_communication_us for step in steps]),
            ("idle", [step.idle_us for step in steps]),
        )
        shown = [part for part in parts if part[0] in ("step", "compute") or any(part[1])]
        curves = [Curve(name, [step.number for step in steps], values) for name, values in shown]
        return plot(curves, across=Axis("step"), up=_TIME, title="Time of each step by part")
    place = {number: column for column, number in enumerate(numbers)}
    values = np.full((len(report.ranks), len(numbers)), np.nan)
    for row, rank in enumerate(report.ranks):
        for step in rank.steps:
            values[row, place[step.number]] = step.duration_us - step.exposed_communication_us
    return heat_map(
        values,
        row_labels=[f"rank {name_of(rank)}" for rank in report.ranks],
        column_labels=[str(number) for number in numbers],
        title="Step less exposed communication: what each rank took itself",
        unit="us",
        column_title="step",
    )


def arrival_plots(join: JoinReport) -> list[str]:
    ranks = list(join.last_arrivals)[:_MAX_BARS]
    marked = [row for row, rank in enumerate(ranks) if rank in join.culprits]
    labels = [str(rank) for rank in ranks]
    return [
        bars(
            labels,
            [Series("", [float(join.last_arrivals[rank]) for rank in ranks])],
            axis=Axis("collectives in which the rank came last"),
            title="Who comes last",
            marked=marked,
            row_title="rank",
        ),
        bars(
            labels,
            [
                Series("transfer", [join.waits[rank].transfer_us for rank in ranks], svg.BLUE),
                Series("waiting for others", [join.waits[rank].wait_us for rank in ranks], svg.ORANGE),
            ],
            axis=_TIME,
            title="Time in matched collectives",
            row_title="rank",
        ),
    ]


def kernel_plot(rank: RankSummary) -> str:
    names = [kernel.name for kernel in rank.top_kernels]
    marked = [row for row, kernel in enumerate(rank.top_kernels) if kernel.kind == "communication"]
    title = "Total time (orange: communication)" if marked else "Total time"
    totals = Series("", [kernel.total_us for kernel in rank.top_kernels])
    return bars(names, [totals], axis=_TIME, title=title, marked=marked)


def bucket_plots(rank: RankSummary) -> list[str]:
    found = rank.buckets
    if found is None or all(bucket.duration_us is None for bucket in found.buckets):
        return []
    hidden = [_product(bucket.duration_us, bucket.hidden_ratio) for bucket in found.buckets]
    exposed = [_difference(bucket.duration_us, part) for bucket, part in zip(found.buckets, hidden, strict=True)]
    labels = [f"{bucket.order}: {quantity(bucket.bytes, 'B')}" for bucket in found.buckets]
    plots = [
        bars(
            labels,
            [Series("hidden", hidden, svg.SKY), Series("exposed", exposed, svg.ORANGE)],
            axis=_TIME,
            title="DDP's buckets, in the order in which backward starts them",
        )
    ]
    if found.other_caps:
        caps = [float(cap.cap_mb) for cap in found.other_caps]
        predicted = Curve("predicted", caps, [cap.exposed_us for cap in found.other_caps])
        measured = Curve("as it is", caps, [found.exposed_us for _ in found.other_caps], svg.GREY)
        plots.append(
            plot(
                [predicted, measured],
                across=Axis("bucket_cap_mb", "MB", log=True),
                up=Axis("exposed communication a step", "us"),
                title="What another bucket_cap_mb would expose",
            )
        )
    return plots


def collective_table(rank: RankSummary) -> Table:
    columns = ["kind", "group", "ranks", "count", "size (median)", "time (median)", "exposed", "algbw", "busbw"]
    rows = [
        [
            one.kind,
            _group(one),
            str(one.group_size or NOT_MEASURED),
            f"{one.count:,}",
            quantity(one.bytes_median, "B"),
            quantity(one.median_us, "us"),
            quantity(one.exposed_us, "us") if one.measured_count else NOT_MEASURED,
            gbps(one.algbw_gbps),
            gbps(one.busbw_gbps),
        ]
        for one in rank.collectives
    ]
    return Table(columns, rows, [False, False, *[True] * 7])


def _group(summary: CollectiveSummary) -> str:
    name = summary.group_description or summary.group
    if summary.group_kind == "unknown":
        return name or NOT_MEASURED
    return f"{summary.group_kind} ({name})" if name else summary.group_kind


def rank_table(report: Report) -> Table:
    columns = [
        "rank",
        "span",
        "compute",
        "communication",
        "exposed",
        "hidden",
        "copies",
        "idle",
        "tensor cores",
        "file",
    ]
    culprits = report.join.culprits if report.join else ()
    rows = [
        [
            name_of(rank),
            quantity(rank.span_us, "us"),
            quantity(rank.compute_us, "us"),
            quantity(rank.communication_us, "us"),
            quantity(rank.exposed_communication_us, "us"),
            quantity(rank.overlap_ratio, "ratio"),
            quantity(rank.memory_copy_us, "us"),
            quantity(rank.idle_us, "us"),
            quantity(rank.tensor_core_ratio, "ratio"),
            rank.file,
        ]
        for rank in report.ranks
    ]
    marked = [row for row, rank in enumerate(report.ranks) if rank.rank in culprits]
    return Table(columns, rows, [*[True] * 9, False], marked)


def _product(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left * right


def _difference(left: float | None, right: float | None) -> float | None:
    return None if left is None or right is None else left - right


def make_page(report: Report) -> str:
    sentence = f"{report.sentence[:1].upper()}{report.sentence[1:]}."
    verdict = verdict_sentence(report)
    sections = [
        Section("Where the time goes", [_PARTS_EXPLAINED], plots=[part_plot(report)]),
        _findings(report),
        Section("Steps", plots=[plot for plot in [step_plot(report)] if plot]),
    ]
    if report.join is not None:
        sections.append(_ranks_together(report.join))
    sections += [_kernels(report), _collectives(report)]
    numbers = rank_table(report)
    sections.append(Section("All ranks", tables=[numbers], open=len(report.ranks) <= _FOLDED_ABOVE))
    notes = [f"{rank.file}: {repair}" for rank in report.ranks for repair in rank.repairs]
    notes += [*report.notes, *(report.join.notes if report.join else ())]
    if report.broken:
        rows = [[one.file, one.reason] for one in report.broken]
        sections.append(Section("Files left out", tables=[Table(["file", "reason"], rows)]))
    if notes:
        sections.append(Section("Notes", notes))
    return page(
        "Rankscope trace report",
        [section for section in sections if section.paragraphs or section.tables or section.plots],
        lead=f"{verdict} {sentence}".strip(),
        foot=f"{facts(report)}. Times follow the definitions in docs/analyze-trace.md; this page needs no network.",
    )


def _findings(report: Report) -> Section:
    title = "What to try, by what it would save at best"
    if not report.findings:
        return Section(title, ["Nothing found that would save 2 % of a step or more."])
    rows = [
        [
            finding.title,
            quantity(finding.saving_us, "us"),
            f"{finding.saving_ratio * 100:.0f} %",
            f"{finding.evidence[:1].upper()}{finding.evidence[1:]}.",
            finding.suggestion,
        ]
        for finding in report.findings
    ]
    columns = ["loss", "per step", "share", "evidence", "what to try"]
    return Section(title, tables=[Table(columns, rows, [False, True, True, False, False])])


def _ranks_together(join: JoinReport) -> Section:
    text = f"{count(join.collectives_matched, 'collective')} matched between ranks by process group and sequence. "
    if join.clock_residual_us is not None:
        text += f"Clocks are aligned by their ends, to {quantity(join.clock_residual_us, 'us')}. "
    verdict = join.verdict.value
    text += f"Verdict: {verdict.replace('_', ' ')} ({join.reason})." if join.reason else f"Verdict: {verdict}."
    return Section("Ranks together", [text], _breakdown_tables(join), arrival_plots(join))


def _breakdown_tables(join: JoinReport) -> list[Table]:
    if join.breakdown is None:
        return []
    rows = [
        [part.text, quantity(part.seconds, "s"), quantity(part.ratio, "ratio"), part.details]
        for part in join.breakdown.parts
    ]
    rows.append(["step", quantity(join.breakdown.step_seconds, "s"), "", ""])
    return [Table(["where a step goes", "time", "share", "groups"], rows, [False, True, True, False])]


def _kernels(report: Report) -> Section:
    rank = shown_rank(report)
    if not rank.top_kernels:
        return Section("Kernels")
    what = "Operators" if rank.on_host else "Kernels"
    text = f"Of rank {rank.rank}, by total time; durations add up even where they overlap."
    if rank.tensor_core_ratio is not None:
        text += f" {quantity(rank.tensor_core_ratio, 'ratio')} of computation is in kernels of tensor cores."
    return Section(what, [text], plots=[kernel_plot(rank)])


def _collectives(report: Report) -> Section:
    rank = shown_rank(report)
    if not rank.collectives:
        return Section("Collectives")
    text = f"Of rank {rank.rank}. Durations include waiting for other ranks, so that bandwidths are at least this."
    return Section("Collectives", [text], [collective_table(rank)], bucket_plots(rank))
