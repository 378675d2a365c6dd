"""The whole report on traces as one object: printed by `--json`, and the source of table and page.

Field names are the keys of the JSON output; docs/analyze-trace.md describes each, and a test compares the two."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

import msgspec

from rankscope.analysis.quantities import NOT_MEASURED, count, quantity
from rankscope.analysis.step_graph.clock_alignment import ClockShift
from rankscope.analysis.traces.diagnosis import diagnose
from rankscope.analysis.traces.diagnosis_rules import Finding
from rankscope.analysis.traces.joins.perfetto import merge_for_perfetto
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Verdict, headline, loss
from rankscope.analysis.verdicts.verdict import ranks as ranks_in_words
from rankscope.cli.output_file import open_output
from rankscope.cli.trace_report.reduction import SURPRISES, Reduced, ReducedFiles

if TYPE_CHECKING:
    from rankscope.analysis.traces.joins.join import GroupWaits, Join, RankWaits
    from rankscope.operator.console.answers import BreakdownAnswer


SCHEMA_VERSION = 1
# A smaller share of the span outside of steps needs no note.
_OUTSIDE_RATIO = 0.01


class BrokenReport(msgspec.Struct, frozen=True):
    file: str
    reason: str


class JoinReport(msgspec.Struct, frozen=True):
    """The join of several ranks, as it is printed and written as JSON."""

    clock_residual_us: float | None
    collectives_matched: int
    close_arrivals: int
    last_arrivals: Mapping[int, int]
    verdict: Kind
    culprits: tuple[int, ...]
    stage: int | None
    impact_ratio: float | None
    confidence: Confidence
    reason: str
    breakdown: BreakdownAnswer | None
    world_size: int
    clock_offsets_us: Mapping[int, float]
    waits: Mapping[int, RankWaits]
    groups: tuple[GroupWaits, ...]
    notes: tuple[str, ...]


class Report(msgspec.Struct, frozen=True):
    schema_version: int
    bound: str
    sentence: str
    shares: dict[str, float]
    findings: tuple[Finding, ...]
    join: JoinReport | None
    ranks: tuple[RankSummary, ...]
    broken: tuple[BrokenReport, ...]
    notes: tuple[str, ...]


class Outcome(msgspec.Struct, frozen=True):
    report: Report
    shifts: Mapping[int, ClockShift]  # onto a common clock
    failure: str  # why ranks could not be compared; usually empty


def make_report(files: ReducedFiles, stage_of: Mapping[int, int] | None = None) -> Outcome:
    failure = ""
    try:
        joined = _join(files.ranks, stage_of)
    except SURPRISES as error:
        # The figures of each rank remain useful if the join fails.
        joined = None
        failure = f"ranks cannot be compared ({type(error).__name__}: {error}); please report these traces"
    summaries = tuple(one.summary for one in files.ranks)
    diagnosis = diagnose(summaries, joined)
    report = Report(
        schema_version=SCHEMA_VERSION,
        bound=diagnosis.bound,
        sentence=diagnosis.sentence,
        shares=diagnosis.shares,
        findings=diagnosis.findings,
        join=_join_report(joined) if joined else None,
        ranks=summaries,
        broken=tuple(BrokenReport(str(one.path), one.reason) for one in files.broken),
        notes=(*filter(None, [failure]), *step_notes(summaries)),
    )
    return Outcome(report, joined.clocks.shifts if joined else {}, failure)


def step_notes(ranks: Sequence[RankSummary]) -> Iterator[str]:
    """What the borders of the recordings cut, and where it counts."""
    first = [rank for rank in ranks if rank.whole_steps and not rank.steps[0].whole]
    last = [rank for rank in ranks if rank.whole_steps and not rank.steps[-1].whole]
    cut = [rank for rank in ranks if rank.steps and not rank.whole_steps]
    outside = [rank for rank in ranks if rank.outside_steps_us > _OUTSIDE_RATIO * rank.span_us]
    if first:
        yield f"{_traces(first)}: the first step began before the recording; counted in the totals, not in step times"
    if last:
        most = min(last, key=lambda rank: rank.steps[-1].traced_launch_ratio or 0.0)
        steps = sum(not step.whole for step in most.steps) - (not most.steps[0].whole)
        which = "step" if steps == 1 else f"{steps} steps"
        traced = quantity(most.steps[-1].traced_launch_ratio, "ratio")
        yield (
            f"{_traces(last)}: the recording ended before the device had run all of the last {which} ({traced} of the "
            "launches in the last one have their kernel in the trace); counted in the totals, not in step times"
        )
    if cut:
        yield f"{_traces(cut)}: the recording holds no step as a whole; the step time is the host's"
    if outside:
        most = max(outside, key=lambda rank: rank.outside_steps_us)
        yield (
            f"{_traces(outside)}: {quantity(most.outside_steps_us, 'us')} of {quantity(most.span_us, 'us')} lie before "
            "the first step or after the last; counted in the totals, not in steps"
        )


def _traces(ranks: Sequence[RankSummary]) -> str:
    known = [rank.rank for rank in ranks if rank.rank is not None]
    if len(known) == len(ranks):
        return ranks_in_words(known)
    return count(len(ranks), "trace")


def to_json(report: Report) -> bytes:
    """One object. Not-a-number becomes null: JSON has no NaN."""
    return msgspec.json.encode(report)


def _join(ranks: Sequence[Reduced], stage_of: Mapping[int, int] | None) -> Join | None:
    """None for one rank: there is nothing to compare it with."""
    known = {one.summary.rank: one for one in ranks if one.summary.rank is not None}
    if len(known) < 2:
        return None
    # Half of the analysis is needed only here; a command on one rank should not wait for its import.
    from rankscope.analysis.traces.joins.join import join_traces

    return join_traces(
        {rank: one.trace for rank, one in known.items()},
        {rank: one.collectives for rank, one in known.items()},
        breakdowns={rank: one.breakdown for rank, one in known.items()},
        stage_of=stage_of,
    )


def _join_report(join: Join) -> JoinReport:
    same = {name: getattr(join, name) for name in JoinReport.__struct_fields__ if hasattr(join, name)}
    if join.breakdown is not None:
        from rankscope.operator.console.answers import breakdown_answer

        same["breakdown"] = breakdown_answer(join.breakdown, _verdict(join))
    offsets = {rank: shift.offset_ns / 1000 for rank, shift in join.clocks.shifts.items()}
    return JoinReport(clock_offsets_us=offsets, **same)


# Sentences for table and page.


def verdict_of(report: Report) -> Verdict | None:
    """The result of the join; None for one rank."""
    return None if report.join is None else _verdict(report.join)


def _verdict(join: Join | JoinReport) -> Verdict:
    return Verdict(
        kind=join.verdict,
        reason=join.reason,
        confidence=join.confidence,
        culprits=join.culprits,
        stage=join.stage,
        impact_ratio=join.impact_ratio,
    )


def verdict_sentence(report: Report) -> str:
    """The result of the join in one line; empty for one rank or without a finding."""
    verdict = verdict_of(report)
    if verdict is None or not verdict.kind.is_finding:
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
        if join.verdict is Kind.INSUFFICIENT_DATA:
            text += f"; no verdict on ranks: {join.reason}"
        elif join.verdict is Kind.HEALTHY:
            text += f"; {join.reason}"
    if report.broken:
        text += f"; {count(len(report.broken), 'file')} could not be read"
    return text


def shown_rank(report: Report) -> RankSummary:
    """The culprit if there is one, else the first rank."""
    culprits = report.join.culprits if report.join else ()
    return next((rank for rank in report.ranks if rank.rank in culprits), report.ranks[0])


def name_of(rank: RankSummary) -> str:
    return NOT_MEASURED if rank.rank is None else str(rank.rank)


def gbps(value: float | None) -> str:
    return quantity(None if value is None else value * 1e9, "B/s")


# Writes one trace of all ranks for Perfetto.


def write_merged(target: Path, paths: Mapping[int, Path], shifts: Mapping[int, ClockShift]) -> None:
    """Ranks in order, one file open at a time. An input may have the target's name."""
    with contextlib.ExitStack() as stack:
        file: IO[bytes] = stack.enter_context(open_output(target))
        if target.suffix == ".gz":
            file = cast(IO[bytes], stack.enter_context(gzip.GzipFile("", "wb", 5, file)))
        for piece in merge_for_perfetto(_files(paths), shifts):
            file.write(piece)


def _files(paths: Mapping[int, Path]) -> Iterator[tuple[int, bytes]]:
    for rank in sorted(paths):
        yield rank, paths[rank].read_bytes()
