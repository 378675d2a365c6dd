"""Stacks of many ranks as a few groups: the ranks that are in the same place, the odd ones first. Stacks come as text,
`function (file:line)` per frame, innermost first."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from rankscope.analysis.profiles.frames import Frame, Stack, is_user_code
from rankscope.analysis.profiles.phases import (
    BACKWARD,
    CHECKPOINT,
    COMMUNICATION,
    DEVICE_SYNC,
    WAITING_PHASES,
    names_phase,
    phase_of,
)
from rankscope.analysis.quantities import count
from rankscope.common.rank_selection import rank_ranges
from rankscope.common.text import printable

NAMED_RANKS: Final = 8
PLACES_NAMED: Final = 4
FRAME_CHARACTERS: Final = 600
_FRAMES_READ: Final = 512
_FRAME: Final = re.compile(r"(.*?) \((.*?)(?::(\d{1,9}))?\)", re.ASCII | re.DOTALL)


@dataclass(frozen=True)
class StackGroup:
    ranks: tuple[int, ...]
    phase: str  # empty where there is no stack
    frame: Frame | None  # the innermost one of the user's program; in a program without any, the innermost
    stack: Stack  # innermost first, of the first of the ranks
    operation: str = ""  # in which the ranks may wait for others: a collective, backward, a synchronization

    @property
    def place(self) -> str:
        """`all_reduce (train.py:40)` in an operation, else `load_image (dataset.py:88)`."""
        if self.frame is None:
            return "an unknown place"
        return str(self.frame._replace(function=self.operation)) if self.operation else str(self.frame)

    def __str__(self) -> str:
        """`rank 17 in save_checkpoint (ckpt.py:51)`, `63 ranks in all_reduce (train.py:40)`."""
        who = f"rank {self.ranks[0]}" if len(self.ranks) == 1 else f"ranks {rank_ranges(self.ranks)}"
        return f"{who if len(self.ranks) <= NAMED_RANKS else count(len(self.ranks), 'rank')} in {self.place}"


def group_stacks(stacks: Mapping[int, Sequence[str]]) -> list[StackGroup]:
    """Groups ranks by their stacks. Small groups come first, and of equal ones those that do not wait for others.

    Lines inside libraries do not separate ranks: a wait that polls is seen at one or another of them."""
    members: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(stacks):
        members.setdefault(tuple(stacks[rank]), []).append(rank)
    alike: dict[Stack, tuple[Stack, list[int]]] = {}
    for lines, ranks in members.items():
        stack = stack_of(lines)
        alike.setdefault(_without_library_lines(stack), (stack, []))[1].extend(ranks)
    groups = [_group(stack, tuple(sorted(ranks))) for stack, ranks in alike.values()]
    return sorted(groups, key=lambda group: (len(group.ranks), group.phase in WAITING_PHASES, group.ranks))


def places_text(groups: Sequence[StackGroup]) -> str:
    """The odd ranks first; of many places the first, and the one where most ranks are."""
    named = [*groups[: PLACES_NAMED - 1], groups[-1]] if len(groups) > PLACES_NAMED else groups
    rest = len(groups) - len(named)
    return ", ".join(map(str, named)) + (f", and {rest} more places" if rest else "")


def frame_text(frame: Frame) -> str:
    """With the whole path."""
    place = f"{frame.file}:{frame.line}" if frame.line else frame.file
    return printable(f"{frame.function} ({place})" if place else frame.function, FRAME_CHARACTERS)


@lru_cache(maxsize=8192)
def frame_of(text: str) -> Frame:
    """The inverse of `frame_text`, for any text."""
    text = printable(text, FRAME_CHARACTERS)
    match = _FRAME.fullmatch(text)
    return Frame(text, "", 0) if match is None else Frame(match[1], match[2], int(match[3] or 0))


def stack_of(lines: Sequence[str]) -> Stack:
    return tuple(map(frame_of, lines[:_FRAMES_READ]))


def _group(stack: Stack, ranks: tuple[int, ...]) -> StackGroup:
    own = next((frame for frame in stack if frame.file and is_user_code(frame)), None)
    phase = phase_of(stack) if stack else ""
    return StackGroup(ranks, phase, own or (stack[0] if stack else None), stack, _operation(stack, phase))


def _operation(stack: Stack, phase: str) -> str:
    """The outermost frame of the library's collectives is the function that the program called."""
    if phase == BACKWARD:
        return BACKWARD
    named = {CHECKPOINT: COMMUNICATION, COMMUNICATION: COMMUNICATION, DEVICE_SYNC: DEVICE_SYNC}.get(phase, "")
    calls = [frame.function for frame in stack if named and names_phase(frame, named)]
    return calls[-1] if calls else ""


def _without_library_lines(stack: Stack) -> Stack:
    return tuple(frame if is_user_code(frame) else frame._replace(line=0) for frame in stack)
