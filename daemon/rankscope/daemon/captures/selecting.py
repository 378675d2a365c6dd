"""Which job and which ranks of it a request is about."""

from __future__ import annotations

from collections.abc import Callable, Collection

from rankscope.analysis.choosing_ranks import STRAGGLER, STRAGGLER_AND_PEER, ChoiceError, Suspected
from rankscope.analysis.choosing_ranks import choose_ranks as chosen
from rankscope.daemon.captures.orders import CaptureError

NAME_CHARACTERS = 200

SuspectsOf = Callable[[str], Suspected | None]


def choose_job(wanted: str, jobs: Collection[str], names_others: bool = True) -> str:
    """The job that is meant; may be left out where there is one. The answer to a caller elsewhere may end up before
    somebody's eyes whom the other jobs of the node do not concern: `names_others` False keeps them out of it."""
    if wanted:
        if wanted not in jobs:
            known = f"there is: {', '.join(sorted(jobs)) or 'none'}" if names_others else "it may have ended"
            raise CaptureError(f"no job {wanted[:NAME_CHARACTERS]!r} on this node; {known}")
        return wanted
    if not jobs:
        raise CaptureError("no training job on this node; is it running? `rankscope top` shows what is seen")
    if len(jobs) > 1:
        known = f": {', '.join(sorted(jobs))}" if names_others else ""
        raise CaptureError(f"several jobs run on this node; name one with --job{known}")
    return next(iter(jobs))


def choose_ranks(text: str, job: str, here: Collection[int], world_size: int, suspects_of: SuspectsOf) -> list[int]:
    """Rank numbers, sorted. They need not be on this node; that is for the caller to tell."""
    suspected = suspects_of(job) if text.strip() in (STRAGGLER, STRAGGLER_AND_PEER) else None
    try:
        return chosen(text, here, world_size, suspected)
    except ChoiceError as error:
        raise CaptureError(f"job {job!r}: {error}") from error
