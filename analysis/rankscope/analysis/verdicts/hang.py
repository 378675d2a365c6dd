"""The hang verdict: no rank advances. Names the ranks that never entered the collective that the others wait in."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import Cause, Confidence, Kind, Severity, Verdict, ranks
from rankscope.analysis.verdicts.windows import EXCUSED_PHASES, WAITING_PHASES, FrameSeen, Stall, step_phase

FRAMES_SHOWN = 3


def find_hang(
    stalls: Mapping[int, Stall | None],
    departed: tuple[int, ...],
    step_seconds: float | None,
    known_steps: bool,
    policy: Policy,
) -> Verdict | None:
    """`stalls` has every rank that reports; None for one that is moving."""
    patience = max(policy.hang_seconds, policy.hang_steps * (step_seconds or 0.0))
    standing = {rank: stall for rank, stall in stalls.items() if stall and stall.seconds_since_step >= patience}
    if not standing or len(standing) < len(stalls):
        return None
    if any(stall.phase in EXCUSED_PHASES for stall in standing.values()):
        return None
    stuck = sum(_is_stuck(stall) for stall in standing.values())
    if stuck * 2 < len(standing):
        return None  # a long evaluation, a checkpoint by other means: no rank steps, but they are at work
    first: Stall | None = None
    if departed:
        culprits, how = tuple(sorted(departed)), "its process has ended while the others wait for it"
    else:
        culprits, how = _behind_in_collectives(standing)
        if not culprits:
            culprits, how = _not_waiting(standing)
        first = standing[culprits[0]] if culprits else None
    stack = first.stack if first else ()
    seconds = min(stall.seconds_since_step for stall in standing.values())
    who = f"{ranks(culprits)}: {how}" if culprits else how
    where = f", at {stack[0]}" if stack else ""
    frames = tuple(frame for frame in map(_frame, stack[:FRAMES_SHOWN]) if frame)
    return Verdict(
        Kind.HANG,
        f"no rank has advanced for {seconds:.0f} s; {who}{where}",
        Severity.ALARM,
        Confidence.HIGH if known_steps else Confidence.LOW,
        culprits,
        impact_ratio=1.0,
        cause=Cause(step_phase(first.phase or "unknown") if first else "unknown", frames, how),
    )


def _is_stuck(stall: Stall) -> bool:
    """It waits for others, and was found in the same place twice; or, without stacks, is inside a collective."""
    if stall.phase is not None and stall.same_stack_looks is not None:
        return stall.phase in WAITING_PHASES and stall.same_stack_looks >= 2
    entered, left = stall.collectives_enqueued, stall.collectives_completed
    return stall.phase is None and entered is not None and left is not None and entered > left


def _behind_in_collectives(standing: Mapping[int, Stall]) -> tuple[tuple[int, ...], str]:
    entered = {rank: stall.collectives_enqueued for rank, stall in standing.items()}
    known = [count for count in entered.values() if count is not None]
    if len(known) < len(entered) or min(known) == max(known):
        return (), ""
    # Ranks of different stages enter different numbers of collectives; only a minority that is behind is evidence.
    behind = tuple(sorted(rank for rank, count in entered.items() if count == min(known)))
    if len(behind) * 2 >= len(entered) and len(entered) > 2:
        return (), ""
    waiting = sum(stall.phase in WAITING_PHASES for rank, stall in standing.items() if rank not in behind)
    if waiting == 0 and any(stall.phase is not None for stall in standing.values()):
        return (), ""
    return behind, f"it entered {min(known)} collectives, the others {max(known)}"


def _not_waiting(standing: Mapping[int, Stall]) -> tuple[tuple[int, ...], str]:
    odd = tuple(sorted(rank for rank, stall in standing.items() if stall.phase and stall.phase not in WAITING_PHASES))
    if not odd or (len(odd) * 2 >= len(standing) and len(standing) > 2) or len(odd) == len(standing):
        return (), "all ranks stand in the same place"
    return odd, "the others wait in a collective that it has not entered"


def _frame(text: str) -> FrameSeen | None:
    """`function (file:line)` as a frame."""
    function, bracket, rest = text.partition(" (")
    file, colon, line = rest.rstrip(")").rpartition(":")
    if not bracket or not colon or not line.isdigit():
        return None
    return FrameSeen(function, file, int(line), 1.0, 1.0, "unknown")
