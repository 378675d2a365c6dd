"""Reads trace files and keeps what a report needs: a rank's numbers and collectives, not its events."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from msgspec import structs

from rankscope.analysis.traces.breakdown import Breakdown, break_down
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.joins.join import keep_essentials
from rankscope.analysis.traces.reader.trace_file import TraceError, read_trace
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.summary_records import RankSummary
from rankscope.analysis.traces.trace import Trace
from rankscope.cli.trace_report.files import BrokenFile, Claim, assign_ranks, find_files, rank_in_name

# Below this much on disk, starting processes costs more than they save.
_POOL_BYTES = 8 << 20
_MOST_PROCESSES = 8
_BLOCK_BYTES = 1 << 20
SURPRISES = (ArithmeticError, LookupError, TypeError, ValueError)
_DIMENSIONS = ("pp", "dp", "tp", "cp", "ep")
_MOST_RANKS = 1 << 20


@dataclass(frozen=True)
class Reduced:
    """One file. `trace` holds only what a join needs."""

    path: Path
    summary: RankSummary
    breakdown: Breakdown
    trace: Trace
    collectives: Collectives


@dataclass(frozen=True)
class ReducedFiles:
    ranks: tuple[Reduced, ...]  # by rank; unknown ranks last
    broken: tuple[BrokenFile, ...]
    rank_reasons: dict[Path, str]


@dataclass(frozen=True)
class _Wanted:
    salvage: bool  # read the intact part of a truncated file
    top: int
    stages: int | None


def reduce_files(
    paths: Sequence[str],
    *,
    top: int,
    stages: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ReducedFiles:
    """Never raises for a bad file. One file's events are in memory at a time (per process)."""
    files, broken = find_files(paths)
    results: dict[Path, Reduced | str] = {}
    for path, result in _reduced(files, _Wanted(len(files) == 1, top, stages)):
        results[path] = result
        if progress:
            progress(len(results), len(files))
    good = {path: result for path in files if isinstance(result := results[path], Reduced)}
    broken += [BrokenFile(path, result) for path in files if isinstance(result := results[path], str)]
    assigned = assign_ranks([Claim(path, one.summary.rank, rank_in_name(path)) for path, one in good.items()])
    kept = [_ranked(one, assigned.rank[path]) for path, one in good.items() if path in assigned.rank]
    kept.sort(key=lambda one: (one.summary.rank is None, one.summary.rank or 0, str(one.path)))
    broken += [BrokenFile(path, assigned.reason[path]) for path in good if path not in assigned.rank]
    return ReducedFiles(tuple(kept), tuple(broken), assigned.reason)


def _reduced(files: list[Path], wanted: _Wanted) -> Iterator[tuple[Path, Reduced | str]]:
    count = min(os.cpu_count() or 1, len(files), _MOST_PROCESSES)
    done: set[Path] = set()
    if count > 1 and sum(_size(path) for path in files) > _POOL_BYTES:
        for path, result in _reduced_in_pool(files, wanted, count):
            done.add(path)
            yield path, result
    for path in files:
        if path not in done:
            yield path, _reduce_file(path, wanted)


def _reduced_in_pool(files: list[Path], wanted: _Wanted, count: int) -> Iterator[tuple[Path, Reduced | str]]:
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    try:
        # Forked: children reuse the imports, and no other threads run yet.
        with ProcessPoolExecutor(count, mp_context=get_context("fork")) as pool:
            waiting = {pool.submit(_reduce_file, path, wanted): path for path in files}
            for done in as_completed(waiting):
                yield waiting[done], done.result()
    except BrokenProcessPool:
        return  # a child was killed, probably for its memory: reading one by one takes less


def _reduce_file(path: Path, wanted: _Wanted) -> Reduced | str:
    """The file's numbers, or the reason why there are none."""
    trace = _read(path, wanted.salvage)
    if isinstance(trace, str):
        return trace
    try:
        breakdown = break_down(trace)
        if breakdown is None:
            return "it holds no work: neither events of a device nor operators; was anything profiled?"
        collectives = find_collectives(trace)
        summary = summarize(
            trace,
            breakdown,
            collectives,
            rank=trace.rank,
            file=str(path),
            top=wanted.top,
            stages=wanted.stages,
        )
        return Reduced(path, summary, breakdown, *keep_essentials(trace, collectives))
    except MemoryError:
        return "there is not enough memory to analyse it"
    except SURPRISES as error:
        # An unexpected file must not stop the others; the reason is worth a report.
        return f"it was read but cannot be analysed ({type(error).__name__}: {error}); please report this trace"


def _read(path: Path, salvage: bool) -> Trace | str:
    try:
        with path.open("rb", buffering=0) as file:
            return read_trace(iter(partial(file.read, _BLOCK_BYTES), b""), salvage=salvage)
    except TraceError as error:
        return error.reason
    except PermissionError:
        return "permission denied; run as a user who may read it, or change its mode"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"
    except MemoryError:
        return "there is not enough memory to read it"


def _ranked(one: Reduced, rank: int | None) -> Reduced:
    return replace(one, summary=structs.replace(one.summary, rank=rank), trace=replace(one.trace, rank=rank))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


# The pipeline stage of each rank, from the layout that the user gives.


class LayoutError(ValueError):
    """The layout is impossible; the message is for the user."""


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
