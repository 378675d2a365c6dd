"""Plots and tables of a trace report's page."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.drawing import colours
from rankscope.analysis.drawing.axes import Axis
from rankscope.analysis.drawing.charts import Series, bars, lines, stacked_bars
from rankscope.analysis.drawing.heat_map import heat_map
from rankscope.analysis.drawing.page import Table
from rankscope.analysis.drawing.quantities import NOT_MEASURED, quantity
from rankscope.analysis.traces.summaries.records import RankSummary
from rankscope.cli.traces.report import JoinReport, Report
from rankscope.cli.traces.wording import gbps, name_of

_TIME = Axis("time", "us")
# In the order of the stack; the parts of RankSummary.parts_us.
_PARTS = (
    ("compute", "compute", colours.BLUE),
    ("memory_kernels", "kernels that move data", colours.SKY),
    ("communication", "exposed communication", colours.ORANGE),
    ("memory_copies", "exposed copies", colours.GREEN),
    ("input", "waiting for input", colours.PURPLE),
    ("host", "waiting for the host", colours.VERMILION),
    ("synchronisation", "after synchronisation", "#8c510a"),
    ("other", "other idle", colours.GREY),
)
# A page that a browser scrolls without effort; the table has the rest.
_MOST_BARS = 256


def part_plot(report: Report) -> str:
    ranks = report.ranks[:_MOST_BARS]
    present = [part for part in _PARTS if any(rank.parts_us[part[0]] > 0 for rank in ranks)]
    series = [Series(name, [rank.parts_us[key] for rank in ranks], colour) for key, name, colour in present]
    return stacked_bars([name_of(rank) for rank in ranks], series, axis=_TIME, row_title="rank")


def step_plot(report: Report) -> str:
    """Rank by step where there are several of both, else one line."""
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
        series = [Series(name, values) for name, values in parts if name in ("step", "compute") or any(values)]
        return lines(
            [step.number for step in steps], series, across=Axis("step"), up=_TIME, title="Time of each step by part"
        )
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
    ranks = list(join.last_arrivals)[:_MOST_BARS]
    marked = [row for row, rank in enumerate(ranks) if rank in join.culprits]
    labels = [str(rank) for rank in ranks]
    return [
        bars(
            labels,
            [float(join.last_arrivals[rank]) for rank in ranks],
            axis=Axis("collectives in which the rank came last"),
            title="Who comes last",
            marked=marked,
            row_title="rank",
        ),
        stacked_bars(
            labels,
            [
                Series("transfer", [join.waits[rank].transfer_us for rank in ranks], colours.BLUE),
                Series("waiting for others", [join.waits[rank].wait_us for rank in ranks], colours.ORANGE),
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
    return bars(names, [kernel.total_us for kernel in rank.top_kernels], axis=_TIME, title=title, marked=marked)


def bucket_plots(rank: RankSummary) -> list[str]:
    found = rank.buckets
    if found is None or all(bucket.duration_us is None for bucket in found.buckets):
        return []
    hidden = [_product(bucket.duration_us, bucket.hidden_ratio) for bucket in found.buckets]
    exposed = [_difference(bucket.duration_us, part) for bucket, part in zip(found.buckets, hidden, strict=True)]
    labels = [f"{bucket.order}: {quantity(bucket.bytes, 'B')}" for bucket in found.buckets]
    plots = [
        stacked_bars(
            labels,
            [Series("hidden", hidden, colours.SKY), Series("exposed", exposed, colours.ORANGE)],
            axis=_TIME,
            title="DDP's buckets, in the order in which backward starts them",
        )
    ]
    if found.other_caps:
        caps = [float(cap.cap_mb) for cap in found.other_caps]
        predicted = Series("predicted", [cap.exposed_us for cap in found.other_caps])
        measured = Series("as it is", [found.exposed_us for _ in found.other_caps], colours.GREY)
        plots.append(
            lines(
                caps,
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
            one.group_description or one.group or NOT_MEASURED,
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
