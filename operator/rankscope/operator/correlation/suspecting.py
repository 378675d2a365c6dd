"""Whom a capture should look at: the ranks that a verdict names, and healthy ranks of the same role to hold against."""

from __future__ import annotations

from dataclasses import dataclass

from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.window_pb2 import RankWindow


@dataclass(frozen=True)
class Suspects:
    culprits: tuple[int, ...]
    peers: tuple[int, ...]  # the most typical first
    reason: str


def suspects(state: JobState) -> Suspects:
    """Of a job; no culprits where nobody is blamed. A slow stage's peers are ranks of other stages."""
    culprits = state.verdict.culprits if state.verdict.kind.is_finding else ()
    windows = {window.identity.rank: window for window in state.windows}
    accused = [windows[rank] for rank in culprits if rank in windows]
    others = [window for rank, window in windows.items() if rank not in culprits]
    if accused and state.verdict.stage is None:
        others = [window for window in others if _stage(window) == _stage(accused[0])]
    known = sorted((window for window in others if window.HasField("self")), key=lambda w: w.self.mean_seconds)
    middle = len(known) // 2
    typical = [*known[middle:], *reversed(known[:middle])] if known else others
    return Suspects(culprits, tuple(window.identity.rank for window in typical), state.verdict.reason)


def _stage(window: RankWindow) -> int | None:
    coordinates = window.identity.coordinates
    return coordinates.pipeline if coordinates.HasField("pipeline") else None
