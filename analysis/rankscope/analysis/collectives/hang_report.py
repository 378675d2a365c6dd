"""The report of a hang: where every rank stands, and what its collectives show. It is kept and sent as JSON."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from rankscope.analysis.collectives.flight_recorder.dump import State
from rankscope.analysis.collectives.flight_recorder.matching import Analysis, Stall
from rankscope.analysis.collectives.flight_recorder.records import Position
from rankscope.analysis.collectives.flight_recorder.report import (
    Outcome,
    Report,
    absence_text,
    operation_text,
    stall_text,
    who,
)
from rankscope.analysis.collectives.flight_recorder.tail import match_tails
from rankscope.analysis.profiles.phases import COMMUNICATION
from rankscope.analysis.profiles.stack_groups import StackGroup, frame_text, group_stacks, places_text
from rankscope.analysis.verdicts.verdict import ENDED, Verdict
from rankscope.common.rank_selection import rank_ranges
from rankscope.common.text import one_line, printable

# Ranks choose their frames, groups and problems: a report has at most about 1 MB.
MAX_PLACES: Final = 64
MAX_FRAMES: Final = 48
FRAME_CHARACTERS: Final = 300
MAX_ROWS: Final = 200
MAX_GAPS: Final = 64
MAX_PROBLEMS: Final = 64
RANKS_CHARACTERS: Final = 200
TEXT_CHARACTERS: Final = 300
SENTENCE_CHARACTERS: Final = 800


class Place(msgspec.Struct, frozen=True):
    """Ranks with the same stack."""

    ranks: str  # 0,3-5
    count: int
    place: str  # save_checkpoint (ckpt.py:51)
    phase: str
    stack: tuple[str, ...]  # innermost first


class CollectiveRow(msgspec.Struct, frozen=True):
    collective: str  # all_reduce seq 1041 of group dp0
    ranks: str
    finding: str  # waits, never entered, in another collective, different sizes, …
    detail: str


class Gap(msgspec.Struct, frozen=True):
    """What could not be read of these ranks."""

    ranks: str
    what: str  # stack, flight recorder
    reason: str


class HangReport(msgspec.Struct, frozen=True, kw_only=True):
    id: str  # NAMESPACE/NAME in Kubernetes, elsewhere NAME
    run: str
    headline: str
    verdict: str  # the sentence by which the hang was found
    world_size: int
    began_unix_seconds: float  # the last step of any rank
    made_unix_seconds: float
    seen_unix_seconds: float | None = None  # the last window in which it stood; None: none since the report
    ended_unix_seconds: float | None = None  # the next step, or the end of the job; None: it lasts, or was not observed
    culprits: str = ""  # of the verdict; where it names none, who disagrees with most others about a collective
    left: str = ""  # ranks whose processes have ended
    places: tuple[Place, ...] = ()  # the odd ranks first
    collectives: tuple[CollectiveRow, ...] = ()
    gaps: tuple[Gap, ...] = ()
    problems: tuple[str, ...] = ()  # of nodes, and of what had to be left out

    @property
    def seconds(self) -> float:
        """How long it lasted, or had lasted when it was last seen."""
        return max(0.0, self.until_unix_seconds - self.began_unix_seconds)

    @property
    def until_unix_seconds(self) -> float:
        return self.ended_unix_seconds or self.seen_unix_seconds or self.made_unix_seconds


@dataclass(frozen=True)
class Evidence:
    """What was read of the ranks: any text and any bytes."""

    stacks: Mapping[int, Sequence[str]]  # innermost first
    without_stack: Mapping[int, str] = field(default_factory=dict)  # the reason
    records: Mapping[int, bytes] = field(default_factory=dict)  # of flight recorders
    without_records: Mapping[int, str] = field(default_factory=dict)
    problems: Sequence[str] = ()


def make_hang_report(
    hang_id: str, run: str, verdict: Verdict, world_size: int, began: float, made: float, evidence: Evidence
) -> HangReport:
    """Times are in seconds since 1970."""
    groups = group_stacks({rank: stack for rank, stack in evidence.stacks.items() if stack})
    left = verdict.culprits if verdict.cause.phase == ENDED else ()
    report = match_tails(evidence.records) if evidence.records else None
    recorded = report.culprits if report is not None and report.outcome is Outcome.HANG else ()
    read = () if report is None else report.analysis.ranks
    unreadable = {rank: "its records cannot be read" for rank in evidence.records if rank not in read}
    problems = [one_line(text, TEXT_CHARACTERS) for text in evidence.problems[:MAX_PROBLEMS]]
    rows = [] if report is None else list(_rows(report.analysis))
    for listed, limit, name in ((groups, MAX_PLACES, "places"), (rows, MAX_ROWS, "rows of collectives")):
        if len(listed) > limit:
            problems.append(f"{len(listed) - limit} more {name} are left out")
    return HangReport(
        id=hang_id,
        run=run,
        headline=one_line(_headline(report, groups, left) or verdict.reason, SENTENCE_CHARACTERS),
        verdict=one_line(verdict.reason, SENTENCE_CHARACTERS),
        world_size=world_size,
        began_unix_seconds=began,
        made_unix_seconds=made,
        culprits=_ranks(verdict.culprits or recorded),
        left=_ranks(left),
        places=tuple(map(_place, groups[:MAX_PLACES])),
        collectives=tuple(rows[:MAX_ROWS]),
        gaps=(
            *_gaps("stack", evidence.without_stack),
            *_gaps("flight recorder", {**evidence.without_records, **unreadable}),
        ),
        problems=tuple(problems),
    )


def _headline(report: Report | None, groups: Sequence[StackGroup], left: Collection[int]) -> str:
    """`63 ranks in all_reduce seq 1041 of group dp0, rank 17 in save_checkpoint (ckpt.py:51)`"""
    parts = [f"{who(sorted(left))} left"] if left else []
    if report is not None and report.outcome is Outcome.HANG:
        stall = next((one for one in report.analysis.stalls if stall_text(one) == report.headline), None)
        parts = [*(_mismatch_parts(report, groups) if stall is None else _stall_parts(stall, groups)), *parts]
    elif groups:
        parts.append(places_text(groups))
    return ", ".join(parts)


def _mismatch_parts(report: Report, groups: Sequence[StackGroup]) -> Iterator[str]:
    """The recorder does not say which function called the collective. The stacks of ranks that stand in one do."""
    yield report.headline
    callers = (group for group in groups if group.phase == COMMUNICATION and group.frame is not None)
    yield from (f"{who(group.ranks)} in {group.frame}" for group in callers)


def _stall_parts(stall: Stall, groups: Sequence[StackGroup]) -> Iterator[str]:
    """Stacks say better than the recorder where a rank is that is in no collective."""
    waiting = sorted({rank for one in stall.waiting for rank in one.ranks})
    elsewhere = [
        replace(group, ranks=ranks)
        for group in groups
        if (ranks := tuple(rank for rank in group.ranks if rank not in waiting))
    ]
    if not elsewhere:
        yield stall_text(stall)
        return
    yield f"{who(waiting)} in {operation_text(stall.waiting[0])}"
    yield places_text(elsewhere)


def _rows(analysis: Analysis) -> Iterator[CollectiveRow]:
    for _, mismatch in analysis.mismatches:
        for at in mismatch.positions:
            yield _row(at, f"different {mismatch.difference.words}")
    for stall in analysis.stalls:
        for at in stall.waiting:
            yield _row(at, "waits")
        named = operation_text(stall.waiting[0])
        for absent in stall.never_entered:
            is_elsewhere = absent.last_record is not None and absent.last_record.state is State.PENDING
            finding = "in another collective" if is_elsewhere else "never entered"
            yield CollectiveRow(named, _ranks(absent.ranks), finding, absence_text(absent))
        for ranks, finding in (
            (stall.finished, "finished"),
            (stall.no_dump, "no records"),
            (stall.unknown, "no records of that time"),
        ):
            if ranks:
                yield CollectiveRow(named, _ranks(ranks), finding, "")


def _row(at: Position, finding: str) -> CollectiveRow:
    detail = " ".join(part for part in (at.operation.shapes, f"at {at.line}" if at.line else "") if part)
    return CollectiveRow(operation_text(at), _ranks(at.ranks), finding, detail)


def _place(group: StackGroup) -> Place:
    stack = tuple(printable(frame_text(frame), FRAME_CHARACTERS) for frame in group.stack[:MAX_FRAMES])
    place = one_line(group.place, FRAME_CHARACTERS)
    return Place(_ranks(group.ranks), len(group.ranks), place, group.phase, stack)


def _gaps(what: str, reasons: Mapping[int, str]) -> list[Gap]:
    """Ranks with the same reason together."""
    alike: dict[str, list[int]] = {}
    for rank, reason in reasons.items():
        alike.setdefault(one_line(reason, TEXT_CHARACTERS), []).append(rank)
    return [Gap(_ranks(ranks), what, reason) for reason, ranks in list(alike.items())[:MAX_GAPS]]


def _ranks(ranks: Collection[int]) -> str:
    return printable(rank_ranges(ranks), RANKS_CHARACTERS)
