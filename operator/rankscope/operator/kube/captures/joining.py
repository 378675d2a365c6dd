"""What the traces of several nodes say together, from their summaries: each daemon joins only its own. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import fmean, median

from rankscope.v1 import capture_service_pb2 as pb

# As for a verdict: less is noise.
RATIO = 1.10
LONGEST_SECONDS = 1e6


def own_seconds(ranks: Iterable[pb.RankCapture]) -> Mapping[int, float]:
    """Of each rank with whole steps, the mean time of a step that it did not spend waiting in collectives."""
    found = {}
    for rank in ranks:
        steps = list(rank.summary.each_step_seconds)
        waits = list(rank.summary.each_exposed_communication_seconds)
        if rank.state == pb.CAPTURE_STATE_ANALYSED and steps and len(steps) == len(waits):
            each = [step - wait for step, wait in zip(steps, waits, strict=True)]
            # Nor NaN, nor what cannot be added up: a daemon says what it likes.
            if all(abs(seconds) < LONGEST_SECONDS for seconds in each) and (own := fmean(each)) > 0:
                found[rank.rank] = own
    return found


def joint_finding(ranks: Iterable[pb.RankCapture]) -> str | None:
    """Who holds the others up; None where fewer than two ranks can be compared."""
    own = own_seconds(ranks)
    if len(own) < 2:
        return None
    slowest = max(own, key=lambda rank: own[rank])
    others = {rank: seconds for rank, seconds in own.items() if rank != slowest}
    usual = median(others.values())
    whom = f"rank {next(iter(others))}" if len(others) == 1 else f"the other {len(others)} ranks"
    if own[slowest] < RATIO * usual:
        return f"no rank stands out: all work {_text(usual)} to {_text(own[slowest])} of a step by themselves"
    return (
        f"rank {slowest} works {_text(own[slowest])} of each step by itself, {whom} {_text(usual)}: "
        f"it holds the others up by {_text(own[slowest] - usual)} a step"
    )


def _text(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
