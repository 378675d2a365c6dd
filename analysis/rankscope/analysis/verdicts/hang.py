"""The hang verdict: no rank advances. Names the ranks that never entered the collective that the others wait in, and
where every rank stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from rankscope.analysis.profiles.frames import is_user_code
from rankscope.analysis.profiles.phases import CHECKPOINT, COMMUNICATION, COMPILE, WAITING_PHASES, names_phase
from rankscope.analysis.profiles.stack_groups import group_stacks, places_text, stack_of
from rankscope.analysis.verdicts.nccl_hang import find_missing, waits_in_nccl
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import (
    ENDED,
    MISMATCH,
    STOPPED,
    Cause,
    Confidence,
    Kind,
    Severity,
    Verdict,
    ranks,
)
from rankscope.analysis.verdicts.windows import FrameSeen, Stall, step_phase

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
    waiting = _waiting(standing)
    if any(_is_at_work(stall, rank in waiting, policy) for rank, stall in standing.items()):
        return None
    stuck = sum(_is_stuck(standing[rank]) for rank in waiting)
    if stuck * 2 < len(standing):
        return None  # a long evaluation, a checkpoint by other means: no rank steps, but they are at work
    culprits, how, phase = _culprits(standing, waiting, departed)
    seconds = min(stall.seconds_since_step for stall in standing.values())
    who = f"{ranks(culprits)}: {how}" if culprits else how
    groups = group_stacks({rank: stall.stack for rank, stall in standing.items() if stall.stack})
    places = f"; {places_text(groups)}" if groups else ""
    first = standing.get(culprits[0]) if culprits else None
    return Verdict(
        Kind.HANG,
        f"no rank has advanced for {seconds:.0f} s; {who}{places}",
        Severity.ALARM,
        Confidence.HIGH if known_steps else Confidence.LOW,
        culprits,
        impact_ratio=1.0,
        cause=Cause(phase, _frames(first.stack) if first else (), f"{how}{places}"),
    )


def _waiting(standing: Mapping[int, Stall]) -> frozenset[int]:
    """The ranks that wait for others, by their stacks, by NCCL or by their counters of collectives."""
    entered = max((stall.collectives_enqueued or 0 for stall in standing.values()), default=0)
    left = max((stall.collectives_completed or 0 for stall in standing.values()), default=0)
    return frozenset(
        rank
        for rank, stall in standing.items()
        if _waits(stall) or waits_in_nccl(stall) or _is_in_collective(stall, entered, left)
    )


def _is_at_work(stall: Stall, waits: bool, policy: Policy) -> bool:
    """Slow rather than stuck. A rank that waits for others may use CPU: it polls."""
    if stall.is_stopped:
        return False
    if stall.phase == COMPILE:
        return True  # other processes may do it, and then nothing of it is seen here
    if stall.phase == CHECKPOINT and stall.seconds_since_step < policy.hang_checkpoint_seconds:
        return True  # while a file system flushes, the process does nothing that could be measured
    if waits:
        return False
    if stall.phase == CHECKPOINT:
        return stall.is_working is not False
    # A loop that never ends works, too. Only counters show that the others are in the same collective all the time.
    is_counted = stall.collectives_enqueued is not None or bool(stall.communicators)
    return bool(stall.is_working) and not (is_counted and stall.seconds_since_step >= policy.hang_working_seconds)


def _waits(stall: Stall) -> bool:
    """For other ranks, by its stack."""
    if stall.phase == CHECKPOINT:
        return any(names_phase(frame, COMMUNICATION) for frame in stack_of(stall.stack))
    return stall.phase in WAITING_PHASES


def _is_stuck(stall: Stall) -> bool:
    """Of a rank that waits: it was found in the same place twice, or there are no stacks."""
    return stall.phase is None or (stall.same_stack_looks or 0) >= 2 or waits_in_nccl(stall)


def _is_in_collective(stall: Stall, most_entered: int, most_left: int) -> bool:
    """A CUDA host that waits for a collective may be anywhere: where it reads a result, or where its queue is full. It
    stays there, in a collective that no rank has left, or with no rank ahead of it: the counters of a rank that holds
    Python's lock may be old, and then others have left what it has entered. Hosts run ahead by different numbers."""
    entered, left = stall.collectives_enqueued, stall.collectives_completed
    if entered is None or left is None or entered <= left:
        return False
    if stall.phase is None:
        return True
    return (stall.same_stack_looks or 0) >= 2 and (entered > most_left or entered == most_entered)


def _culprits(
    standing: Mapping[int, Stall], waiting: frozenset[int], departed: tuple[int, ...]
) -> tuple[tuple[int, ...], str, str]:
    """The ranks, what they did, and the phase that they are in."""
    if departed:
        return tuple(sorted(departed)), "its process has ended while the others wait for it", ENDED
    stopped = tuple(sorted(rank for rank, stall in standing.items() if stall.is_stopped))
    if stopped and len(stopped) < len(standing):
        return stopped, "a signal has stopped it while the others wait for it", STOPPED
    if (found := find_missing(standing)) is not None:
        culprits, how = found.culprits, found.text
        if culprits and found.is_mismatch:
            return culprits, how, MISMATCH
    else:
        culprits, how = _behind_in_collectives(standing, waiting)
        if not culprits:
            culprits, how = _not_waiting(standing, waiting)
    return culprits, how, step_phase(standing[culprits[0]].phase or "unknown") if culprits else "unknown"


def _behind_in_collectives(standing: Mapping[int, Stall], waiting: frozenset[int]) -> tuple[tuple[int, ...], str]:
    entered = {rank: stall.collectives_enqueued for rank, stall in standing.items()}
    known = [count for count in entered.values() if count is not None]
    if len(known) < len(entered) or min(known) == max(known):
        return (), ""
    # Ranks of different stages enter different numbers of collectives; only a minority that is behind is evidence.
    behind = tuple(sorted(rank for rank, count in entered.items() if count == min(known)))
    if len(behind) * 2 >= len(entered) and len(entered) > 2:
        return (), ""
    if not waiting.difference(behind) and any(stall.phase is not None for stall in standing.values()):
        return (), ""
    return behind, f"it entered {min(known)} collectives, the others {max(known)}"


def _not_waiting(standing: Mapping[int, Stall], waiting: frozenset[int]) -> tuple[tuple[int, ...], str]:
    odd = tuple(sorted(rank for rank, stall in standing.items() if stall.phase and rank not in waiting))
    if not odd or (len(odd) * 2 >= len(standing) and len(standing) > 2) or len(odd) == len(standing):
        return (), "no rank stands out" if odd else "all ranks wait for each other"
    return odd, "the others wait in a collective that it has not entered"


def _frames(stack: Sequence[str]) -> tuple[FrameSeen, ...]:
    """The lines of the program itself, innermost first; in a stack without any, the innermost."""
    frames = [frame for frame in stack_of(stack) if frame.file]
    own = [frame for frame in frames if is_user_code(frame)] or frames
    seen = (FrameSeen(frame.function, frame.file, frame.line, 1.0, 1.0, "unknown") for frame in own)
    return tuple(islice(seen, FRAMES_SHOWN))
