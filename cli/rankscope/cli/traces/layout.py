"""Which pipeline stage each rank is, from what the user says about the job's layout."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_DIMENSIONS = ("pp", "dp", "tp", "cp", "ep")
_MOST_RANKS = 1 << 20


class LayoutError(ValueError):
    """The layout cannot be; the text is fit to be shown."""


@dataclass(frozen=True)
class Layout:
    said: str  # as the user wrote it
    stages: int
    stage_by_rank: tuple[int, ...]

    def stage_of(self, ranks: Sequence[int]) -> dict[int, int]:
        beyond = [rank for rank in ranks if rank >= len(self.stage_by_rank)]
        if beyond:
            raise LayoutError(
                f"{self.said}: that is {len(self.stage_by_rank)} ranks, and there is a rank {beyond[0]}; next step: "
                "cover all ranks, such as --parallelism pp=2,dp=4,tp=8"
            )
        return {rank: self.stage_by_rank[rank] for rank in ranks}


def read_layout(parallelism: str | None, stages: str | None) -> Layout | None:
    """None where nothing was said."""
    if stages is not None:
        listed = _listed(stages)
        return Layout(f"--stages {stages}", max(listed) + 1, listed)
    if parallelism is None:
        return None
    sizes = _sizes(parallelism)
    world = math.prod(sizes.values())
    if world > _MOST_RANKS:
        raise LayoutError(f"--parallelism {parallelism}: {world:,} ranks; next step: check the sizes")
    count = sizes.get("pp", 1)
    by_rank = tuple(stage for stage in range(count) for _ in range(world // count))
    return Layout(f"--parallelism {parallelism}", count, by_rank)


def _sizes(parallelism: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parallelism.split(","):
        name, _, size = part.strip().partition("=")
        if name not in _DIMENSIONS or name in sizes or not _is_count(size) or not 0 < int(size) < _MOST_RANKS:
            known = ", ".join(_DIMENSIONS)
            raise LayoutError(
                f"--parallelism {parallelism}: cannot read {part.strip()!r}; next step: give {known} once each with a "
                "size, such as pp=2,dp=4"
            )
        sizes[name] = int(size)
    return sizes


def _listed(stages: str) -> tuple[int, ...]:
    words = [word.strip() for word in stages.split(",")]
    bad = next((word for word in words if not _is_count(word)), None)
    if bad is not None:
        raise LayoutError(f"--stages {stages}: {bad!r} is no stage; next step: a number per rank, such as 0,0,1,1")
    return tuple(int(word) for word in words)


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 9
