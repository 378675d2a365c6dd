"""Ranks as text: which ones a capture is about ("all", "0,3-5", "straggler", "straggler+peer"), and the way back."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

MAX_TEXT_CHARACTERS = 4096
MAX_RANKS = 131_072
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
ALL = "all"
STRAGGLER = "straggler"
STRAGGLER_AND_PEER = "straggler+peer"
SUSPECTS = (STRAGGLER, STRAGGLER_AND_PEER)


class ChoiceError(Exception):
    """Why these words choose no ranks, with what would."""


class UnknownRankError(ChoiceError):
    """The job has no such rank."""


@dataclass(frozen=True)
class Suspected:
    """What the correlation says about a job: who is slow, and healthy ranks of the same role beside it."""

    culprits: tuple[int, ...]
    peers: tuple[int, ...]
    reason: str = ""


def choose_ranks(text: str, present: Collection[int], world_size: int, suspected: Suspected | None) -> list[int]:
    """Rank numbers, sorted. Only "all" keeps to those that are present; the caller reports the others."""
    wanted = text.strip()
    if wanted in SUSPECTS:
        return _suspected(wanted, suspected)
    return numbered_ranks(wanted, world_size, SUSPECTS) or sorted(present)


def numbered_ranks(text: str, world_size: int | None = None, words: Collection[str] = ()) -> list[int]:
    """Numbers and ranges, sorted; empty for "all". `words` are what else the caller takes."""
    wanted = text.strip() or ALL
    if wanted == ALL:
        return []
    if len(wanted) > MAX_TEXT_CHARACTERS:
        raise ChoiceError(f"ranks: a list of {len(wanted)} characters; use ranges, as in 0-511")
    chosen: set[int] = set()
    for part in wanted.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            said = ", ".join((ALL, *words))
            raise ChoiceError(f"ranks {part.strip()[:40]!r}: say {said}, or numbers and ranges, as in 0-7,12")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last:
            raise ChoiceError(f"ranks {part.strip()}: a range begins with its lower rank, as in {last}-{first}")
        if world_size is not None and last >= world_size:
            raise UnknownRankError(f"ranks {part.strip()}: the job has ranks 0 to {world_size - 1}")
        # A job is as large as one of its processes claims: a list of ten million numbers would take a gigabyte.
        if last - first + len(chosen) >= MAX_RANKS:
            raise ChoiceError(f"ranks {part.strip()}: {MAX_RANKS} at most can be named at a time")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def rank_ranges(numbers: Iterable[int]) -> str:
    """The inverse, for people: 0,3-5"""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def _suspected(wanted: str, suspected: Suspected | None) -> list[int]:
    if suspected is None or not suspected.culprits:
        why = f": {suspected.reason}" if suspected and suspected.reason else ""
        raise ChoiceError(f"no rank is slow now{why}; name ranks instead, as in 0,1")
    if wanted == STRAGGLER:
        return sorted(suspected.culprits)
    if not suspected.peers:
        raise ChoiceError(f"no healthy rank of the same role beside {suspected.culprits}; say {STRAGGLER} alone")
    return sorted({*suspected.culprits, suspected.peers[0]})
