"""A fleet report as tables of text, for the terminal, the page and the console."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from rankscope.analysis.fleet.hardware import Evidence, Suspect
from rankscope.analysis.fleet.packing import PackingGroup
from rankscope.analysis.fleet.report import FleetReport, LowMfu, Usage
from rankscope.analysis.quantities import NOT_MEASURED, count, quantity, shorten

NAME_CHARACTERS = 48
MAX_ROWS_OF_PAGE = 30
MAX_GROUPS = 10  # of repetitive runs whose ways to pack are shown
_BAR_CHARACTERS = 30
# By column; docs/report.md has more.
DEFINITIONS = {
    "lost GPU-hours": "The impact of findings times ranks and time",
    "share of losses": "Of all GPU-hours that findings cost",
    "runs": "Runs that were seen in this time",
    "used GPU-hours": "Time in which ranks with a known GPU report; a GPU counts once, however many ranks share it",
    "lost": "GPU-hours that findings cost: their impact times ranks and time",
    "lost share": "Lost by used GPU-hours",
    "utilization": "Share of the time in which any kernel ran, as the driver says",
    "GPU-hours": "Time in which ranks with a known GPU report",
    "share": "Of the GPU-hours with a known utilization",
    "culprit of": "Runs in which verdicts blame its device for half an hour or longer, of all runs on the node",
    "other nodes": "The same share of the other nodes",
    "GPU-hours named": "Time in which verdicts name its devices",
    "MFU": "Model FLOPs utilisation, mean over the GPU-hours",
    "target": "The MFU below which low_mfu is raised",
    "shortfall": "GPU-hours that the same work would not need at the target",
    "memory": "Of the run that needs most, of the device",
    "saves GPU-hours": "If all runs are packed and take no longer: an upper bound",
}


@dataclass(frozen=True)
class ReportTable:
    """`left` are the columns of words."""

    title: str
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    left: tuple[str, ...]
    said: tuple[str, ...] = ()  # below the table
    empty: str = ""  # in place of a table without rows


def shortened(table: ReportTable, rows: int) -> ReportTable:
    """With so many rows at most, and a sentence about the others."""
    cut = len(table.rows) - rows
    if cut <= 0:
        return table
    rest = f"The first {rows}; rankscope report fleet --json has {cut} more."
    return replace(table, rows=table.rows[:rows], said=(*table.said[:rows], rest))


def headline(report: FleetReport) -> str:
    if not report.used_gpu_hours and report.rank_hours_without_gpu > 0:
        return "no rank has exactly one known GPU: there are no GPU-hours to report on"
    runs, nodes = count(report.runs, "run"), count(report.nodes, "node")
    share = f" ({_percent(report.lost_ratio)})" if report.lost_ratio is not None else ""
    used, lost = _hours(report.used_gpu_hours), _hours(report.lost_gpu_hours)
    return f"{runs} on {nodes} used {used} GPU-hours; findings cost {lost} of them{share}"


def span(report: FleetReport) -> str:
    return f"{_minute(report.begin_unix_seconds)} to {moment(report.end_unix_seconds)}"


def moment(unix_seconds: float) -> str:
    return f"{_minute(unix_seconds)} UTC"


def _minute(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(unix_seconds))


def notes(report: FleetReport) -> list[str]:
    found = [*report.remarks, *(f"incomplete: {problem}" for problem in report.problems)]
    if report.rank_hours_without_gpu > 0:
        hours = _hours(report.rank_hours_without_gpu)
        found.append(f"{hours} rank-hours have no known GPU, or several, and are not counted")
    return found


def tables(report: FleetReport) -> list[ReportTable]:
    return [
        _verdicts(report),
        _usage("By team", "team", report.teams),
        _utilization(report),
        _hardware(report.hardware),
        _low_mfu("Teams below their MFU target", "team", report.low_teams),
        _low_mfu("Runs below their MFU target", "run", report.low_runs),
        *_packing(report.packing),
        _usage("By run", "run", report.by_run),
        _usage("By node", "node", report.by_node),
    ]


def _verdicts(report: FleetReport) -> ReportTable:
    total = report.lost_gpu_hours or 1.0
    rows = [
        (loss.verdict, _hours(loss.lost_gpu_hours), _percent(loss.lost_gpu_hours / total), str(loss.runs))
        for loss in report.verdicts
    ]
    columns = ("verdict", "lost GPU-hours", "share of losses", "runs")
    empty = "Nothing was lost." if report.used_gpu_hours else "No GPU-hours are known."
    return ReportTable("GPU-hours lost, by verdict", columns, rows, ("verdict",), empty=empty)


def _usage(title: str, name: str, usages: Sequence[Usage]) -> ReportTable:
    rows = [
        (
            shorten(usage.name, NAME_CHARACTERS),
            _hours(usage.used_gpu_hours),
            _hours(usage.lost_gpu_hours),
            _percent(usage.lost_ratio),
            *(() if name == "run" else (str(usage.runs),)),
        )
        for usage in usages
    ]
    columns = (name, "used GPU-hours", "lost", "lost share", *(() if name == "run" else ("runs",)))
    return ReportTable(title, columns, rows, (name,), empty="None.")


def _utilization(report: FleetReport) -> ReportTable:
    hours = report.utilization_gpu_hours
    total, most = sum(hours), max(hours, default=0.0)
    rows = [
        (
            f"{10 * tenth} to {10 * tenth + 10} %",
            _hours(value),
            _percent(value / total),
            "█" * round(_BAR_CHARACTERS * value / most),
        )
        for tenth, value in enumerate(hours)
        if total > 0
    ]
    columns = ("utilization", "GPU-hours", "share", "")
    said = ("of GPUs that runs used; the share of the time in which any kernel ran, however small",) if rows else ()
    return ReportTable("Utilization of GPUs in use", columns, rows, ("",), said, "No GPU has a known utilization.")


def _hardware(suspects: Sequence[Suspect]) -> ReportTable:
    rows = [
        (
            shorten("/".join(part for part in (one.cluster, one.node) if part), NAME_CHARACTERS),
            one.gpu or "several",
            f"{len(one.culprit_of)} of {one.runs} runs",
            _percent(one.peers_ratio),
            _hours(one.named_gpu_hours),
            _hours(one.lost_gpu_hours),
            "; ".join(map(_cause, one.evidence[:3])),
        )
        for one in suspects
    ]
    columns = ("node", "GPU", "culprit of", "other nodes", "GPU-hours named", "lost", "evidence")
    said = tuple(f"{one.node}: {', '.join(one.culprit_of)}" for one in suspects)
    left = ("node", "GPU", "culprit of", "evidence")
    empty = "No node is a culprit again and again."
    return ReportTable("Bad hardware: culprits again and again", columns, rows, left, said, empty)


def _cause(evidence: Evidence) -> str:
    causes = [word for word in (evidence.phase if evidence.phase != "unknown" else "", evidence.bound) if word]
    return f"{evidence.verdict} ({', '.join(causes)}) {_hours(evidence.gpu_hours)}"


def _low_mfu(title: str, name: str, low: Sequence[LowMfu]) -> ReportTable:
    is_team = name == "team"
    rows = [
        (
            shorten(one.name, NAME_CHARACTERS),
            str(one.runs) if is_team else one.team,
            _percent(one.mfu_ratio),
            _percent(one.target_ratio),
            _hours(one.gpu_hours),
            _hours(one.shortfall_gpu_hours),
        )
        for one in low
    ]
    columns = (name, "runs" if is_team else "of team", "MFU", "target", "used GPU-hours", "shortfall")
    left = (name,) if is_team else (name, "of team")
    said = ("shortfall: GPU-hours that the same work would not need at the target",) if rows and is_team else ()
    return ReportTable(title, columns, rows, left, said, "None with a known target is.")


def _packing(groups: Sequence[PackingGroup]) -> Iterator[ReportTable]:
    rows = [
        (
            shorten(group.command, NAME_CHARACTERS),
            group.user or NOT_MEASURED,
            shorten(group.image, NAME_CHARACTERS) or NOT_MEASURED,
            str(group.runs),
            _hours(group.gpu_hours),
            _percent(group.utilization_ratio),
            f"{quantity(group.memory_bytes, 'B')} of {quantity(group.memory_total_bytes, 'B')}",
        )
        for group in groups
    ]
    columns = ("command", "user", "image", "runs", "GPU-hours", "utilization", "memory")
    title, empty = "Repetitive runs on one GPU that use it little", "None."
    yield ReportTable(title, columns, rows, ("command", "user", "image", "memory"), empty=empty)
    for group in groups[:MAX_GROUPS]:
        options = [(option.way, option.detail, _hours(option.saved_gpu_hours)) for option in group.options]
        said = tuple(f"{option.way}: if {option.assumption}" for option in group.options)
        who = f"{shorten(group.command, NAME_CHARACTERS)}{f' of {group.user}' if group.user else ''}"
        words = ("way", "detail", "saves GPU-hours")
        yield ReportTable(f"Ways to pack {who}", words, options, ("way", "detail"), said)


def _hours(hours: float) -> str:
    return f"{hours:,.0f}" if hours >= 100 or hours == 0 else f"{hours:.1f}"


def _percent(ratio: float | None) -> str:
    return NOT_MEASURED if ratio is None else f"{100 * ratio:.1f} %"
