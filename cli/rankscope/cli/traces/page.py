"""The report on traces as one self-contained page."""

from __future__ import annotations

from rankscope.analysis.drawing.page import Section, Table, page
from rankscope.analysis.drawing.quantities import count, quantity
from rankscope.cli.traces.page_plots import (
    arrival_plots,
    bucket_plots,
    collective_table,
    kernel_plot,
    part_plot,
    rank_table,
    step_plot,
)
from rankscope.cli.traces.report import Report
from rankscope.cli.traces.wording import facts, shown_rank, verdict_sentence

_FOLDED_ABOVE = 32


def make_page(report: Report) -> str:
    sentence = f"{report.sentence[:1].upper()}{report.sentence[1:]}."
    verdict = verdict_sentence(report)
    sections = [
        Section("Where the time goes", [_explain_parts(report)], plots=[part_plot(report)]),
        _findings(report),
        _steps(report),
    ]
    if report.join is not None:
        sections.append(_ranks_together(report))
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


def _explain_parts(report: Report) -> str:
    text = (
        "Each rank's span from its first kernel to its last, divided without overlap: what a colour shows is time in "
    )
    text += "which nothing of the colours before it ran. Communication here is what computation does not hide."
    return text


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


def _steps(report: Report) -> Section:
    plot = step_plot(report)
    return Section("Steps", plots=[plot] if plot else [])


def _ranks_together(report: Report) -> Section:
    join = report.join
    if join is None:
        return Section("Ranks together")
    text = f"{count(join.collectives_matched, 'collective')} matched between ranks by process group and sequence. "
    if join.clock_residual_us is not None:
        text += f"Clocks are aligned by their ends, to {quantity(join.clock_residual_us, 'us')}. "
    text += (
        f"Verdict: {join.verdict.replace('_', ' ')} ({join.reason})." if join.reason else f"Verdict: {join.verdict}."
    )
    return Section("Ranks together", [text], plots=arrival_plots(join))


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
