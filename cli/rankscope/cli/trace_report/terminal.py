"""The trace report in a terminal: the main sentence, a table of ranks, then what to try."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from rankscope.analysis.quantities import NOT_MEASURED, count, display, number, quantity, shorten, shorten_all
from rankscope.analysis.traces.summary_records import LinesSummary, ModuleSummary, RankSummary
from rankscope.cli.terminal import Terminal, make_table
from rankscope.cli.trace_report.report import Report, facts, gbps, name_of, shown_rank, verdict_sentence
from rankscope.common.text import printable

MAX_ROWS = 16
_MAX_COLLECTIVES = 8
# Names of kernels can be thousands of characters long.
_NAME_CHARACTERS = 76
_KERNEL_NUMBERS_COLUMNS = 64
_LINE_CHARACTERS = 60
_MODULE_NUMBER = re.compile(r"_\d+$")

_COLUMNS: tuple[tuple[str, str, Callable[[RankSummary], float | None]], ...] = (
    ("step", "us", lambda rank: median_step_us(rank)),
    ("compute", "ratio", lambda rank: rank.compute_us / rank.span_us),
    ("comm.", "ratio", lambda rank: rank.communication_us / rank.span_us),
    ("exposed", "ratio", lambda rank: rank.exposed_communication_us / rank.span_us),
    ("hidden", "ratio", lambda rank: rank.overlap_ratio),
    ("copies", "ratio", lambda rank: rank.memory_copy_us / rank.span_us),
    ("idle", "ratio", lambda rank: rank.idle_us / rank.span_us),
    ("host", "ratio", lambda rank: rank.idle.host_bound_us / rank.span_us),
    ("input", "ratio", lambda rank: rank.idle.input_wait_us / rank.span_us),
    ("sync", "ratio", lambda rank: rank.idle.synchronisation_us / rank.span_us),
    ("tensor", "ratio", lambda rank: rank.tensor_core_ratio),
)


def print_report(report: Report, console: Terminal | None = None, *, most_lines: int = 10) -> None:
    if console is None:
        console = Terminal()
    verdict = verdict_sentence(report)
    if verdict:
        console.print(Text(verdict, style="bold red" if report.join and report.join.culprits else "bold"))
    console.print(Text(_sentence(report.sentence), style="" if verdict else "bold"))
    console.print(Text(facts(report), style="dim"))
    console.print()
    console.print(_rank_table(report))
    console.print(
        Text(
            "shares of the span; host, input, sync are parts of idle; hidden: of communication; tensor: of compute",
            style="dim",
        )
    )
    _print_breakdown(report, console)
    _print_kernels(report, console)
    _print_ranges(report, console, most_lines)
    _print_lines(report, console, most_lines)
    _print_collectives(report, console)
    _print_findings(report, console)
    _print_notes(report, console)


def median_step_us(rank: RankSummary) -> float | None:
    return float(np.median(rank.step_times_us)) if rank.steps else None


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:] + "."


def _rank_table(report: Report) -> Table:
    ranks = [rank for rank in report.ranks if rank.span_us > 0]
    many = len(ranks) > MAX_ROWS
    culprits = frozenset(report.join.culprits if report.join else ())
    table = make_table(("ranks" if many else "rank", *(name for name, _, _ in _COLUMNS)))
    if many:
        for row in extreme_rows(ranks):
            table.add_row(*row)
        ranks = [rank for rank in ranks if rank.rank in culprits]
    for rank in ranks:
        cells = [_cell(of(rank), unit) for _, unit, of in _COLUMNS]
        table.add_row(name_of(rank), *cells, style="red" if rank.rank in culprits else "")
    return table


def extreme_rows(ranks: Sequence[RankSummary]) -> list[list[str]]:
    """Least, middle and most of each column over many ranks, with the rank that has it."""
    rows = [["min"], ["median"], ["max"]]
    for _, unit, of in _COLUMNS:
        known = [(value, rank) for rank in ranks if (value := of(rank)) is not None]
        if not known:
            for row in rows:
                row.append(NOT_MEASURED)
            continue
        least, most = min(known, key=lambda pair: pair[0]), max(known, key=lambda pair: pair[0])
        # If all values are equal as shown, there is no extreme.
        same = _cell(least[0], unit) == _cell(most[0], unit)
        rows[0].append(_cell(least[0], unit) + ("" if same else f" #{name_of(least[1])}"))
        rows[1].append(_cell(float(np.median([value for value, _ in known])), unit))
        rows[2].append(_cell(most[0], unit) + ("" if same else f" #{name_of(most[1])}"))
    return rows


def _cell(value: float | None, unit: str) -> str:
    if unit == "ratio":
        return NOT_MEASURED if value is None else f"{value * 100:.1f} %"
    return quantity(value, unit)


def _print_breakdown(report: Report, console: Terminal) -> None:
    if report.join is None or report.join.breakdown is None:
        return
    from rankscope.cli.job_tables import breakdown_table

    console.print()
    console.print(breakdown_table(report.join.breakdown, console.columns))


def _print_kernels(report: Report, console: Terminal) -> None:
    rank = shown_rank(report)
    if not rank.top_kernels:
        return
    what = "operators" if rank.on_host else "kernels"
    title = f"top {what} of rank {name_of(rank)}"
    table = make_table(("share", "total", "count", "mean", "longest", "kind", title), ("kind", title))
    shown = display("us", [kernel.total_us for kernel in rank.top_kernels])
    room = _NAME_CHARACTERS if console.columns is None else max(16, console.columns - _KERNEL_NUMBERS_COLUMNS)
    names = shorten_all([printable(kernel.name) for kernel in rank.top_kernels], room)
    for kernel, name in zip(rank.top_kernels, names, strict=True):
        table.add_row(
            _cell(kernel.share_ratio, "ratio"),
            shown.text(kernel.total_us),
            f"{kernel.count:,}",
            quantity(kernel.mean_us, "us"),
            quantity(kernel.longest_us, "us"),
            "tensor" if kernel.tensor_core else kernel.kind,
            Text(name),
        )
    console.print()
    console.print(table)


def _print_ranges(report: Report, console: Terminal, most: int) -> None:
    rank = shown_rank(report)
    if not rank.ranges:
        return
    title = f"ranges of rank {name_of(rank)}"
    table = make_table(("share", "device", "host", "count", title), (title,))
    for one in rank.ranges[:most]:
        table.add_row(
            _cell(one.share_ratio, "ratio"),
            _amount(one.device_us, "us"),
            _amount(one.host_us, "us"),
            number(one.count),
            Text(_short(one.name)),
        )
    console.print()
    console.print(table)
    if len(rank.ranges) > most:
        console.print(Text(f"… and {len(rank.ranges) - most} more (--json has all)", style="dim"))


def _print_lines(report: Report, console: Terminal, most: int) -> None:
    """Of the rank whose kernels are shown, or the first that has lines."""
    ranks = (shown_rank(report), *report.ranks)
    rank = next((rank for rank in ranks if rank.lines is not None), None)
    if rank is None or rank.lines is None:
        return
    found = rank.lines
    title = f"lines of rank {name_of(rank)}"
    table = make_table(
        ("share", "forward", "backward", "optimizer", "kept", "at peak", "module", title), ("module", title)
    )
    for line in found.lines[:most]:
        table.add_row(
            _cell(line.share_ratio, "ratio"),
            *(_amount(value, "us") for value in (line.forward_us, line.backward_us, line.optimizer_us)),
            *(_amount(value, "B") for value in (line.kept_bytes, line.peak_bytes)),
            Text(_short(line.module)),
            Text(_short(f"{line.file}:{line.line} {line.function}" if line.file else "(no line)")),
        )
    console.print()
    console.print(table)
    _print_modules(found, console, most)
    per = f"of a step, over {count(found.steps, 'step')}" if found.steps else "of the whole trace"
    kept = "kept: by the forward pass for the backward pass; a line is the first of its function"
    console.print(Text(f"device time {per}; {kept}", style="dim"))


def _print_modules(found: LinesSummary, console: Terminal, most: int) -> None:
    """Modules of a class in one row."""
    classes: dict[str, list[ModuleSummary]] = {}
    for one in found.modules:
        classes.setdefault(_MODULE_NUMBER.sub("", one.module), []).append(one)
    if not classes:
        return
    title = "modules, with what is in them"
    table = make_table(("share", "forward", "backward", "kept", "at peak", "modules", title), (title,))
    rows = sorted(classes.items(), key=lambda row: -sum(one.share_ratio for one in row[1]))
    for name, members in rows[:most]:
        kept, peak = ([getattr(one, key) for one in members] for key in ("kept_bytes", "peak_bytes"))
        table.add_row(
            _cell(sum(one.share_ratio for one in members), "ratio"),
            _amount(sum(one.forward_us for one in members), "us"),
            _amount(sum(one.backward_us for one in members), "us"),
            *(_amount(None if None in sizes else sum(sizes), "B") for sizes in (kept, peak)),
            f"{len(members):,}",
            Text(_short(name)),
        )
    console.print()
    console.print(table)


def _amount(value: float | None, unit: str) -> str:
    return "0" if value == 0 else quantity(value, unit)


def _short(text: str) -> str:
    return shorten(printable(text), _LINE_CHARACTERS)


def _print_collectives(report: Report, console: Terminal) -> None:
    rank = shown_rank(report)
    found = [one for one in rank.collectives if one.measured_count]
    if not found:
        return
    title = f"collectives of rank {name_of(rank)}"
    table = make_table(("count", "size", "median", "exposed", "algbw", "busbw", title), (title,))
    for one in found[:_MAX_COLLECTIVES]:
        table.add_row(
            f"{one.count:,}",
            quantity(one.bytes_median, "B"),
            quantity(one.median_us, "us"),
            quantity(one.exposed_us, "us"),
            gbps(one.algbw_gbps),
            gbps(one.busbw_gbps),
            one.title,
        )
    console.print()
    console.print(table)
    if len(found) > _MAX_COLLECTIVES:
        console.print(Text(f"… and {len(found) - _MAX_COLLECTIVES} more kinds (--json has all)", style="dim"))


def _print_findings(report: Report, console: Terminal) -> None:
    console.print()
    if not report.findings:
        console.print(Text("Nothing found that would save 2 % of a step or more.", style="bold"))
        return
    console.print(Text("What to try, by what it would save at best", style="bold"))
    for place, finding in enumerate(report.findings, 1):
        saving = f"{quantity(finding.saving_us, 'us')} a step, {finding.saving_ratio * 100:.0f} %"
        console.print(Text(f"{place}. {finding.title}: {saving}"))
        console.print(Padding(Text(_sentence(printable(finding.evidence)), style="dim"), (0, 0, 0, 3), expand=False))
        console.print(Padding(Text(printable(finding.suggestion)), (0, 0, 0, 3), expand=False))


def _print_notes(report: Report, console: Terminal) -> None:
    for rank in report.ranks:
        for repair in rank.repairs:
            console.print(Text(f"note: {printable(rank.file)}: {printable(repair)}", style="yellow"))
    for note in (*report.notes, *(report.join.notes if report.join else ())):
        console.print(Text(f"note: {printable(note)}", style="dim"))
