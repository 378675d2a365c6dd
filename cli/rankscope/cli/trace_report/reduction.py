"""Reads trace files and keeps what a report needs: a rank's numbers and collectives, not its events."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
from msgspec import structs

from rankscope.analysis.profiles.profile import Profile
from rankscope.analysis.traces.breakdown import Breakdown, break_down
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.joins.join import keep_essentials
from rankscope.analysis.traces.kernel_stacks import kernel_profile
from rankscope.analysis.traces.source_lines import summarize_lines
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.traces.trace import Trace
from rankscope.cli.messages import CommandError
from rankscope.cli.trace_report.files import BrokenFile, Progress, read_file, read_files

SURPRISES = (ArithmeticError, LookupError, TypeError, ValueError)
_DIMENSIONS = ("pp", "dp", "tp", "cp", "ep")
_MAX_RANKS = 1 << 20


@dataclass(frozen=True)
class Reduced:
    """One file. `trace` holds only what a join needs."""

    path: Path
    summary: RankSummary
    breakdown: Breakdown
    trace: Trace
    collectives: Collectives
    kernels: Profile | None  # if wanted


@dataclass(frozen=True)
class ReducedFiles:
    ranks: tuple[Reduced, ...]  # by rank; unknown ranks last
    broken: tuple[BrokenFile, ...]


def reduce_files(
    paths: Sequence[str],
    *,
    top: int,
    stages: int | None = None,
    kernels: bool = False,
    lines: bool = False,
    progress: Progress | None = None,
) -> ReducedFiles:
    """By `read_files`: never raises for a bad file."""
    read = partial(_reduce_file, top=top, stages=stages, kernels=kernels, lines=lines)
    found, broken = read_files(paths, read, lambda one: one.summary.rank, progress=progress)
    return ReducedFiles(tuple(_ranked(one, rank) for _, rank, one in found), broken)


def _reduce_file(path: Path, salvage: bool, top: int, stages: int | None, kernels: bool, lines: bool) -> Reduced | str:
    """The file's numbers, or the reason why there are none."""
    trace = read_file(path, salvage)
    if isinstance(trace, str):
        return trace
    return reduce_trace(path, trace, top=top, stages=stages, kernels=kernels, lines=lines)


def reduce_trace(
    path: Path, trace: Trace, *, top: int, stages: int | None = None, kernels: bool = False, lines: bool = False
) -> Reduced | str:
    """The trace's numbers, or the reason why there are none."""
    try:
        breakdown = break_down(trace)
        if breakdown is None:
            return "it holds no work: neither events of a device nor operators; was anything profiled?"
        collectives = find_collectives(trace)
        summary = summarize(trace, breakdown, collectives, rank=trace.rank, file=str(path), top=top, stages=stages)
        if lines:
            summary = structs.replace(summary, lines=summarize_lines(trace))
        profile = kernel_profile(trace) if kernels else None
        return Reduced(path, summary, breakdown, *keep_essentials(trace, collectives), profile)
    except MemoryError:
        return "there is not enough memory to analyse it"
    except SURPRISES as error:
        # An unexpected file must not stop the others; the reason is worth a report.
        return f"it was read but cannot be analysed ({type(error).__name__}: {error}); please report this trace"


def _ranked(one: Reduced, rank: int | None) -> Reduced:
    kernels = one.kernels and replace(one.kernels, rank=np.full_like(one.kernels.rank, rank or 0))
    summary, trace = structs.replace(one.summary, rank=rank), replace(one.trace, rank=rank)
    return replace(one, summary=summary, trace=trace, kernels=kernels)


# The pipeline stage of each rank, from the layout that the user gives.


class LayoutError(CommandError):
    """The layout is impossible."""


@dataclass(frozen=True)
class Layout:
    said: str  # as given by the user
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
    """None if no layout is given."""
    if stages is not None:
        listed = _listed(stages)
        return Layout(f"--stages {stages}", max(listed) + 1, listed)
    if parallelism is None:
        return None
    sizes = _sizes(parallelism)
    world = math.prod(sizes.values())
    if world > _MAX_RANKS:
        raise LayoutError(f"--parallelism {parallelism}: {world:,} ranks; next step: check the sizes")
    count = sizes.get("pp", 1)
    by_rank = tuple(stage for stage in range(count) for _ in range(world // count))
    return Layout(f"--parallelism {parallelism}", count, by_rank)


def _sizes(parallelism: str) -> dict[str, int]:
    sizes: dict[str, int] = {}
    for part in parallelism.split(","):
        name, _, size = part.strip().partition("=")
        if name not in _DIMENSIONS or name in sizes or not _is_count(size) or not 0 < int(size) < _MAX_RANKS:
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
