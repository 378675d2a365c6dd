"""What the dumps of a job say, in one sentence, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from rankscope.analysis.collectives.flight_recorder.catalog import Group
from rankscope.analysis.collectives.flight_recorder.dump import State
from rankscope.analysis.collectives.flight_recorder.matching import Analysis, Difference, Mismatch, Stall
from rankscope.analysis.collectives.flight_recorder.records import Absence, Position
from rankscope.analysis.quantities import count
from rankscope.common.rank_selection import rank_ranges

_RANGES_CHARACTERS = 24
_ABSENCES_NAMED = 3


class Outcome(str, Enum):
    HANG = "hang"  # ranks wait for others, or in different operations
    MISMATCH = "mismatch"  # ranks disagreed about an operation that has finished
    IN_FLIGHT = "in_flight"  # all ranks of each unfinished operation are in it
    HEALTHY = "healthy"  # nothing is unfinished
    INSUFFICIENT_DATA = "insufficient_data"


@dataclass(frozen=True)
class Report:
    outcome: Outcome
    headline: str
    culprits: tuple[int, ...]  # who is missing and does not wait, or has no dump; or who disagrees with most others
    analysis: Analysis


def make_report(analysis: Analysis) -> Report:
    stalls = [one for one in analysis.stalls if not one.is_in_flight]
    telling = [one for one in stalls if _is_telling(one)]
    for group, mismatch in analysis.mismatches:
        if _explains(group, mismatch, telling):
            return Report(Outcome.HANG, mismatch_text(group, mismatch), _disagreeing(mismatch), analysis)
    if telling:
        culprits = {rank for one in telling if one.is_root for rank in _missing(one, analysis)}
        if culprits:
            return Report(Outcome.HANG, stall_text(telling[0]), tuple(sorted(culprits)), analysis)
        cycle = "; ".join(map(stall_text, telling[:2]))
        return Report(Outcome.HANG, f"ranks wait for each other: {cycle}", (), analysis)
    if stalls:
        step = "give the dumps of all ranks" if stalls[0].no_dump else "record more with TORCH_FR_BUFFER_SIZE"
        reason = f"{stall_text(stalls[0])}; {step}"
        return Report(Outcome.INSUFFICIENT_DATA, reason, (), analysis)
    if not analysis.records:
        reason = "the dumps hold no collectives; set TORCH_FR_BUFFER_SIZE=2000 in the job, and dump with collectives"
        return Report(Outcome.INSUFFICIENT_DATA, reason, (), analysis)
    if analysis.mismatches:
        group, mismatch = analysis.mismatches[0]
        return Report(Outcome.MISMATCH, mismatch_text(group, mismatch), _disagreeing(mismatch), analysis)
    if analysis.stalls:
        first = analysis.stalls[0]
        reason = f"{stall_text(first)}: nobody is missing; it was running, or look at the network and the devices"
        return Report(Outcome.IN_FLIGHT, reason, (), analysis)
    groups = count(len(analysis.groups), "group")
    return Report(Outcome.HEALTHY, f"{groups}: no rank waits, and no collective differs between ranks", (), analysis)


def _explains(group: Group, mismatch: Mismatch, stalls: Sequence[Stall]) -> bool:
    """Ranks wait in it, or it may have failed before they came to where they wait."""
    states = {at.state for at in mismatch.positions}
    if State.PENDING in states:
        return True
    return State.ENDED in states and any(group in one.groups and mismatch.sequence <= one.sequence for one in stalls)


def _is_telling(stall: Stall) -> bool:
    """A rank whose dump is there is missing; or a few of the group have no dump, but not most."""
    members = {rank for group in stall.groups for rank in group.members or ()}
    return bool(stall.never_entered) or 0 < len(stall.no_dump) * 2 < len(members)


def _missing(stall: Stall, analysis: Analysis) -> list[int]:
    waiting = {rank for one in analysis.stalls for at in one.waiting if at.state is State.PENDING for rank in at.ranks}
    absent = [rank for one in stall.never_entered for rank in one.ranks if rank not in waiting]
    return absent or list(stall.no_dump)


def _disagreeing(mismatch: Mismatch) -> tuple[int, ...]:
    """Those that differ from the largest part; nobody if no part is the largest."""
    parts: dict[Any, list[int]] = {}
    for one in mismatch.positions:
        agreed = one.operation
        key = (agreed.name, agreed.inputs, agreed.outputs, agreed.input_types, agreed.output_types)
        parts.setdefault(key, []).extend(one.ranks)
    sizes = sorted((len(ranks) for ranks in parts.values()), reverse=True)
    if len(sizes) < 2 or sizes[0] == sizes[1]:
        return ()
    return tuple(sorted(rank for ranks in parts.values() if len(ranks) < sizes[0] for rank in ranks))


# Sentences.


def who(ranks: Sequence[int]) -> str:
    """`rank 17`, `ranks 0-3,7`, `63 ranks`"""
    ranges = rank_ranges(ranks)
    if len(ranks) == 1:
        return f"rank {ranges}"
    return f"ranks {ranges}" if len(ranges) <= _RANGES_CHARACTERS and len(ranks) <= 8 else count(len(ranks), "rank")


def operation_text(position: Position) -> str:
    """all_reduce seq 1041 of group 0 (default_pg)"""
    return f"{position.operation.name} seq {position.sequence} of group {position.group.label}"


def absence_text(absence: Absence) -> str:
    """`in barrier seq 3 of group 1, save (ckpt.py:51)`, `last in save (ckpt.py:51)`"""
    at = absence.last_record
    if at is None:
        return "in no collective yet"
    if at.state is not State.PENDING:
        return f"last in {at.line or operation_text(at)}"
    return f"in {operation_text(at)}" + (f", {at.line}" if at.line else "")


def stall_text(stall: Stall) -> str:
    first = stall.waiting[0]
    waiting = sorted({rank for one in stall.waiting for rank in one.ranks})
    others = f" and {count(len(stall.others), 'other')}" if stall.others else ""
    waiters = who(waiting) if len(waiting) < 3 else count(len(waiting), "rank")
    parts = [f"{waiters} in {operation_text(first)}{others}"]
    parts += [f"{who(one.ranks)} {absence_text(one)}" for one in stall.never_entered[:_ABSENCES_NAMED]]
    rest = [rank for one in stall.never_entered[_ABSENCES_NAMED:] for rank in one.ranks]
    if rest:
        parts.append(f"{who(rest)} elsewhere")
    if stall.no_dump:
        parts.append(f"{who(stall.no_dump)} without a dump")
    if stall.unknown and not stall.never_entered:
        parts.append(f"no record of that time of {who(stall.unknown)}")
    return ", ".join(parts)


def mismatch_text(group: Group, mismatch: Mismatch) -> str:
    parts = []
    for one in mismatch.positions[: _ABSENCES_NAMED + 1]:
        shapes = f" {one.operation.shapes}" if mismatch.difference is not Difference.OPERATION else ""
        parts.append(f"{who(one.ranks)} in {one.operation.name}{shapes}" + (f", {one.line}" if one.line else ""))
    where = f"seq {mismatch.sequence} of group {group.label}"
    return f"different {mismatch.difference.words} in {where}: {'; '.join(parts)}"


# JSON. The keys are documented in docs/analyze-flight-recorder.md.


def to_json(report: Report) -> dict[str, Any]:
    analysis = report.analysis
    return {
        "verdict": report.outcome.value,
        "reason": report.headline,
        "culprits": list(report.culprits),
        "ranks": list(analysis.ranks),
        "no_dump": list(analysis.no_dump),
        "without_records": list(analysis.without_records),
        "records": analysis.records,
        "stalls": [
            {
                "groups": [{"group": group.name, "description": group.description} for group in one.groups],
                "sequence": one.sequence,
                "point_to_point": one.is_p2p,
                "waiting": [_position(at) for at in one.waiting],
                "finished": list(one.finished),
                "never_entered": [
                    {
                        "ranks": list(absent.ranks),
                        "last_finished": _position(absent.last_finished),
                        "last_record": _position(absent.last_record),
                    }
                    for absent in one.never_entered
                ],
                "no_dump": list(one.no_dump),
                "unknown": list(one.unknown),
                "root": one.is_root,
            }
            for one in analysis.stalls
        ],
        "mismatches": [
            {
                "group": group.name,
                "description": group.description,
                "sequence": one.sequence,
                "difference": one.difference.value,
                "positions": [_position(at) for at in one.positions],
                "sequences": one.sequences,
            }
            for group, one in analysis.mismatches
        ],
        "groups": [
            {
                "group": one.group.name,
                "description": one.group.description,
                "ranks": list(one.ranks),
                "no_dump": list(one.no_dump),
                "last_entered": one.last_entered,
                "last_entered_by_all": one.last_entered_by_all,
                "status": one.status,
            }
            for one in analysis.groups
        ],
    }


def _position(position: Position | None) -> dict[str, Any] | None:
    if position is None:
        return None
    return {
        "ranks": list(position.ranks),
        "group": position.group.name,
        "sequence": position.sequence,
        "operation": position.operation.name,
        "shapes": position.operation.shapes,
        "line": position.line,
        "state": position.state.name.lower(),
    }
