"""Which pipeline stage each rank is, from what the user says about the job's layout."""

from __future__ import annotations

from collections.abc import Sequence

_DIMENSIONS = ("pp", "dp", "tp", "cp", "ep")
_MOST_RANKS = 1 << 24


class LayoutError(ValueError):
    """The layout cannot be; the text is fit to be shown."""


def stages_by_rank(parallelism: str | None, stages: str | None, ranks: Sequence[int]) -> dict[int, int] | None:
    """None where nothing was said."""
    if stages is not None:
        return _listed(stages, ranks)
    if parallelism is None:
        return None
    sizes = _sizes(parallelism)
    world = 1
    for size in sizes.values():
        world *= size
    beyond = [rank for rank in ranks if rank >= world]
    if beyond:
        raise LayoutError(
            f"--parallelism {parallelism}: that is {world} ranks, and there is a rank {beyond[0]}; "
            "next step: give every dimension, such as pp=2,dp=4,tp=8"
        )
    per_stage = world // sizes.get("pp", 1)
    return {rank: rank // per_stage for rank in ranks}


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


def _listed(stages: str, ranks: Sequence[int]) -> dict[int, int]:
    words = [word.strip() for word in stages.split(",")]
    bad = next((word for word in words if not _is_count(word)), None)
    if bad is not None:
        raise LayoutError(f"--stages {stages}: {bad!r} is no stage; next step: a number per rank, such as 0,0,1,1")
    beyond = [rank for rank in ranks if rank >= len(words)]
    if beyond:
        raise LayoutError(
            f"--stages {stages}: stages of {len(words)} ranks, and there is a rank {beyond[0]}; next step: one for each"
        )
    return {rank: int(words[rank]) for rank in ranks}


def _is_count(word: str) -> bool:
    return word.isascii() and word.isdigit() and len(word) < 9
