"""Sentences that table and page share."""

from __future__ import annotations

from rankscope.analysis.drawing.quantities import NOT_MEASURED, count, quantity
from rankscope.analysis.traces.summaries.records import RankSummary
from rankscope.analysis.verdict import Confidence, Kind, Verdict
from rankscope.cli.sentences import headline, loss
from rankscope.cli.traces.report import Report


def verdict_sentence(report: Report) -> str:
    """What the join found, in one line; empty for one rank, or where it found nothing."""
    if report.join is None:
        return ""
    verdict = Verdict(
        kind=Kind(report.join.verdict),
        reason=report.join.reason,
        confidence=Confidence(report.join.confidence),
        culprits=report.join.culprits,
        stage=report.join.stage,
        impact_ratio=report.join.impact_ratio,
    )
    if not verdict.kind.is_finding:
        return ""
    text = headline(verdict)
    lost = loss(verdict)
    return f"{text[:1].upper()}{text[1:]}{'; ' + lost if lost else ''}."


def facts(report: Report) -> str:
    """`61 ranks, 3 steps each; 75 collectives matched, clocks to 4.2 µs; …`"""
    steps = sorted({len(rank.steps) for rank in report.ranks})
    words = [count(len(report.ranks), "rank")]
    words.append(count(steps[0], "step") if len(steps) == 1 else f"{steps[0]} to {steps[-1]} steps")
    whole = sorted({len(rank.whole_steps) for rank in report.ranks})
    if whole != steps:
        words[-1] += f" ({whole[0]} whole)" if len(whole) == 1 else f" ({whole[0]} to {whole[-1]} whole)"
    devices = sorted({rank.device for rank in report.ranks if rank.device})
    if devices:
        words.append(devices[0] if len(devices) == 1 else f"{len(devices)} kinds of device")
    join = report.join
    text = ", ".join(words)
    if join is not None:
        text += f"; {count(join.collectives_matched, 'collective')} matched"
        if join.clock_residual_us is not None:
            text += f", clocks aligned to {quantity(join.clock_residual_us, 'us')}"
        if join.verdict == Kind.INSUFFICIENT_DATA.value:
            text += f"; no verdict on ranks: {join.reason}"
        elif join.verdict == Kind.HEALTHY.value:
            text += "; no rank stands out"
    if report.broken:
        text += f"; {count(len(report.broken), 'file')} could not be read"
    return text


def shown_rank(report: Report) -> RankSummary:
    """The culprit where there is one, else the first."""
    culprits = report.join.culprits if report.join else ()
    return next((rank for rank in report.ranks if rank.rank in culprits), report.ranks[0])


def name_of(rank: RankSummary) -> str:
    return NOT_MEASURED if rank.rank is None else str(rank.rank)


def gbps(value: float | None) -> str:
    return quantity(None if value is None else value * 1e9, "B/s")
