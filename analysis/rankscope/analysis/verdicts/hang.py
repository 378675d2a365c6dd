"""The hang verdict: no rank advances. Names the ranks that never entered the collective that the others wait in, and
where every rank stands. It stands from the window in which it is found to the next step of any rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Final

import numpy as np

from rankscope.analysis.profiles.frames import Frame, is_user_code
from rankscope.analysis.profiles.phases import CHECKPOINT, COMMUNICATION, COMPILE, WAITING_PHASES, names_phase
from rankscope.analysis.profiles.stack_groups import group_stacks, places_text, stack_of
from rankscope.analysis.verdicts.nccl_hang import find_missing, waits_in_nccl
from rankscope.analysis.verdicts.thresholds import FIXED, Policy
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
from rankscope.analysis.verdicts.windows import UNREADABLE, FrameSeen, JobWindow, Stall, step_phase

FRAMES_SHOWN = 3
_DESTROYS: Final = ("destroy_process_group", "/torch/distributed/distributed_c10d.py")
# The outermost frame of a process that exits. While a program runs, that is its module.
_EXITS: Final = (
    ("_shutdown", "/threading.py"),
    ("_python_exit", "/concurrent/futures/thread.py"),
    ("_exit_function", "/multiprocessing/util.py"),
    ("_exitfunc", "/weakref.py"),
    ("__del__", ""),
)
# The code of a program that is in no function.
MODULE = "<module>"


class HangWatch:
    """The hang of one job. While it stands, ranks that end or are seen elsewhere neither end it nor change who is to
    blame: a launcher or a user ends the job then."""

    def __init__(self) -> None:
        self._verdict: Verdict | None = None
        self._hung_seconds = 0.0  # since the hang was found
        self._departed: tuple[int, ...] = ()
        self._since_departure_seconds = 0.0
        self._leaving_seconds = 0.0  # for which all ranks have been leaving
        self._moving_seconds = 0.0  # for which ranks without step records have stood nowhere

    def end(self) -> None:
        """A step has ended."""
        self._verdict = None

    def observe(self, window: JobWindow, step_seconds: float | None, policy: Policy) -> Verdict | None:
        """The hang that stands after this window. Call it with every window, or `end`."""
        is_departing = window.departed != self._departed
        self._departed = window.departed
        self._since_departure_seconds = 0.0 if is_departing else self._since_departure_seconds + window.window_seconds
        steps = window.columns.steps
        if np.fmax.reduce(steps, initial=0.0) > 0:
            self._verdict = None
            return None
        stalls, known_steps = window.stalls(), 2 * np.count_nonzero(~np.isnan(steps)) >= max(1, len(steps))
        leaving = _leaving({rank: stall for rank, stall in stalls.items() if stall is not None}, window.departed)
        self._leaving_seconds = self._leaving_seconds + window.window_seconds if len(leaving) == len(stalls) else 0.0
        is_still = known_steps or any(stalls.values()) or not stalls
        self._moving_seconds = 0.0 if is_still else self._moving_seconds + window.window_seconds
        if self._verdict is None:
            self._hung_seconds = 0.0
            if not self._is_ending(window, _patience(step_seconds, policy)):
                self._verdict = find_hang(stalls, window.departed, step_seconds, known_steps, policy)
            return self._verdict
        if self._moving_seconds >= policy.hang_seconds:
            self._verdict = None  # no step is known of any rank, but they move again
            return None
        self._hung_seconds += window.window_seconds
        is_settled = self._since_departure_seconds >= self._hung_seconds and not leaving and _are_steady(stalls)
        found = None
        if is_settled and self._hung_seconds <= FIXED.hang_refined_seconds:
            found = find_hang(stalls, window.departed, step_seconds, known_steps, policy)
        self._verdict = found or _lasting(self._verdict, stalls)
        return self._verdict

    def _is_ending(self, window: JobWindow, patience_seconds: float) -> bool:
        """The ranks of a job that ends leave one after the other. Those who wait for a rank that crashed wait on."""
        if window.departed and self._since_departure_seconds < patience_seconds:
            return True
        return 2 * len(window.departed) > window.world_size or 0 < self._leaving_seconds < FIXED.hang_leaving_seconds


def _lasting(verdict: Verdict, stalls: Mapping[int, Stall | None]) -> Verdict:
    seconds = min((stall.seconds_since_step for stall in stalls.values() if stall), default=None)
    return verdict if seconds is None else replace(verdict, reason=_reason(seconds, verdict.culprits, verdict.cause))


def _are_steady(stalls: Mapping[int, Stall | None]) -> bool:
    return all(stall is None or not stall.stack or (stall.same_stack_looks or 0) >= 2 for stall in stalls.values())


def _patience(step_seconds: float | None, policy: Policy) -> float:
    return max(policy.hang_seconds, policy.hang_steps * (step_seconds or 0.0))


def _leaving(stalls: Mapping[int, Stall], departed: tuple[int, ...]) -> set[int]:
    return {rank for rank, stall in stalls.items() if _is_leaving(stall)} | _past_their_program(stalls, departed)


def _is_leaving(stall: Stall) -> bool:
    """It tears down its process groups, exits, or has no interpreter any more."""
    if stall.phase == UNREADABLE:
        return True
    stack = stack_of(stall.stack)
    return any(_is_in(frame, _DESTROYS) for frame in stack) or any(_is_in(stack[-1], at) for at in _EXITS if stack)


def _past_their_program(stalls: Mapping[int, Stall], departed: tuple[int, ...]) -> set[int]:
    """The ranks in destructors, which take long on a busy machine: their last function has returned. Other ranks have
    ended, or all of them stand there."""
    innermost = {next((frame.function for frame in stack_of(stall.stack)), "") for stall in stalls.values()}
    if innermost == {MODULE}:
        return set(stalls)
    places = {
        rank: next((frame for frame in stack_of(stall.stack) if frame.file and is_user_code(frame)), None)
        for rank, stall in stalls.items()
        if departed and stall.phase not in WAITING_PHASES
    }
    return {rank for rank, own in places.items() if own is not None and own.function == MODULE}


def _is_in(frame: Frame, place: tuple[str, str]) -> bool:
    function, file = place
    return frame.function.rpartition(".")[2] == function and f"/{frame.file}".endswith(file)


def find_hang(
    stalls: Mapping[int, Stall | None],
    departed: tuple[int, ...],
    step_seconds: float | None,
    known_steps: bool,
    policy: Policy,
) -> Verdict | None:
    """A hang that begins. `stalls` has every rank that reports; None for one that is moving."""
    patience_seconds = _patience(step_seconds, policy)
    standing = {rank: stall for rank, stall in stalls.items() if stall and stall.seconds_since_step >= patience_seconds}
    if not standing or len(standing) < len(stalls):
        return None
    waiting, leaving = _waiting(standing), _leaving(standing, departed)
    if len(leaving) < len(standing):
        waiting -= leaving  # for nobody who still trains
    if any(_is_at_work(stall, rank in waiting, policy) for rank, stall in standing.items()):
        return None
    stuck = sum(_is_stuck(standing[rank]) for rank in waiting)
    if stuck * 2 < len(standing):
        return None  # a long evaluation, a checkpoint by other means: no rank steps, but they are at work
    culprits, how, phase = _culprits(standing, waiting, departed)
    seconds = min(stall.seconds_since_step for stall in standing.values())
    groups = group_stacks({rank: stall.stack for rank, stall in standing.items() if stall.stack})
    places = f"; {places_text(groups)}" if groups else ""
    first = standing.get(culprits[0]) if culprits else None
    cause = Cause(phase, _frames(first.stack) if first else (), f"{how}{places}")
    return Verdict(
        Kind.HANG,
        _reason(seconds, culprits, cause),
        Severity.ALARM if known_steps else Severity.WARNING,
        Confidence.HIGH if known_steps else Confidence.LOW,
        culprits,
        impact_ratio=1.0,
        cause=cause,
    )


def _reason(seconds: float, culprits: tuple[int, ...], cause: Cause) -> str:
    who = f"{ranks(culprits)}: " if culprits else ""
    return f"no rank has advanced for {seconds:.0f} s; {who}{cause.evidence}"


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
    has_place = bool(stall.stack) and (stall.same_stack_looks or 0) >= 2
    return stall.phase is None or has_place or waits_in_nccl(stall)


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
