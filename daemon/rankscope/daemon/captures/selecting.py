"""Which ranks a capture is about: "all", "0,3-5", "straggler", "straggler+peer"."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from rankscope.daemon.captures.orders import CaptureError

TEXT_LIMIT = 4096
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")
STRAGGLER = "straggler"
STRAGGLER_AND_PEER = "straggler+peer"


@dataclass(frozen=True)
class Suspects:
    """What the correlation says about a job: who is slow, and healthy ranks of the same role beside it."""

    culprits: tuple[int, ...]
    peers: tuple[int, ...]
    reason: str = ""


SuspectsOf = Callable[[str], Suspects | None]


def choose_job(wanted: str, jobs: Collection[str]) -> str:
    """The job that is meant; may be left out where there is one."""
    if wanted:
        if wanted not in jobs:
            known = ", ".join(sorted(jobs)) or "none"
            raise CaptureError(f"no job {wanted!r} on this node; there is: {known}")
        return wanted
    if not jobs:
        raise CaptureError("no training job on this node; is it running? `rankscope top` shows what is seen")
    if len(jobs) > 1:
        raise CaptureError(f"several jobs run on this node; name one with --job: {', '.join(sorted(jobs))}")
    return next(iter(jobs))


def choose_ranks(text: str, job: str, here: Collection[int], world_size: int, suspects_of: SuspectsOf) -> list[int]:
    """Rank numbers, sorted. They need not be on this node; that is for the caller to tell."""
    wanted = text.strip() or "all"
    if len(wanted) > TEXT_LIMIT:
        raise CaptureError(f"a list of ranks of {len(wanted)} characters; use ranges, as in 0-511")
    if wanted == "all":
        return sorted(here)
    if wanted in (STRAGGLER, STRAGGLER_AND_PEER):
        return _suspected(wanted, job, suspects_of)
    chosen: set[int] = set()
    for part in wanted.split(","):
        match = _RANGE.fullmatch(part.strip())
        if match is None:
            raise CaptureError(
                f"ranks {part.strip()[:40]!r}: say all, numbers and ranges (0,3-5), or {STRAGGLER}[+peer]"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= world_size:
            raise CaptureError(f"ranks {part.strip()}: the job has ranks 0 to {world_size - 1}")
        chosen.update(range(first, last + 1))
    return sorted(chosen)


def _suspected(wanted: str, job: str, suspects_of: SuspectsOf) -> list[int]:
    suspects = suspects_of(job)
    if suspects is None or not suspects.culprits:
        why = f": {suspects.reason}" if suspects and suspects.reason else ""
        raise CaptureError(f"no rank of {job!r} is slow now{why}; name ranks instead, as in --ranks 0,1")
    if wanted == STRAGGLER:
        return sorted(suspects.culprits)
    if not suspects.peers:
        raise CaptureError(f"no healthy rank of the same role beside {suspects.culprits}; use --ranks straggler")
    return sorted({*suspects.culprits, suspects.peers[0]})
