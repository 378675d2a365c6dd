"""Finds and reads trace files: good ones sorted by rank, broken ones with the reason. A bad file does not stop the
others."""

from __future__ import annotations

import gc
import glob
import math
import os
import re
import signal
import stat
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from io import FileIO
from pathlib import Path
from typing import TypeVar

from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Trace, TraceError
from rankscope.cli.messages import CommandError, cannot_read, overwrite, to_stderr

# Most specific first. Bare numbers must be short: torch's default names end in a time, libkineto's in a process id.
_PATTERNS = (
    re.compile(r"(?:^|[^a-z])rank[-_ =.]?(\d+)(?!\d)"),
    re.compile(r"(?:^|[^a-z0-9])r[-_]?(\d+)(?=[._-]|$)"),
    re.compile(r"(?:^|[^a-z])worker[-_.]?(\d+)(?!\d)"),
    re.compile(r"(?:^|[^a-z])(?:trace|profile|kineto)[-_.]?(\d{1,5})$"),
    re.compile(r"\.(\d{1,5})$"),
    re.compile(r"^(\d{1,5})$"),
)
_SUFFIX = re.compile(r"(\.pt)?(\.trace)?\.json(\.gz)?$")
_SUFFIXES = (".json", ".json.gz")
# `rankscope capture --output` writes it beside the traces.
_CAPTURE_SUMMARY = "summary.json"
_BLOCK_BYTES = 1 << 20
MAX_WRITER_SECONDS = 10.0
PIPE_POLL_SECONDS = 0.05
# Below this, starting processes costs more than they save.
_POOL_TEXT_BYTES = 32 << 20
_GZIP_RATIO = 12
_MAX_PROCESSES = 8

Made = TypeVar("Made")
Progress = Callable[[int, int], None]  # files done, files


@contextmanager
def without_collection() -> Iterator[None]:
    """Millions of records are created without reference cycles: garbage collection would only cost time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def rank_in_name(path: Path) -> int | None:
    """`rank-12.json`, `job_rank12.pt.trace.json.gz`, `r12.json`, `worker3.pt.trace.json`, `x.12.pt.trace.json`,
    `rank_12/trace.json`."""
    name = _SUFFIX.sub("", path.name.lower())
    for text, patterns in ((name, _PATTERNS), (path.parent.name.lower(), _PATTERNS[:1])):
        for pattern in patterns:
            found = pattern.findall(text)
            if found:
                return int(found[-1])
    return None


@dataclass(frozen=True)
class LoadedTrace:
    path: Path
    trace: Trace  # its rank is the assigned one, even if only the file name gives it


@dataclass(frozen=True)
class BrokenFile:
    path: Path
    reason: str


@dataclass(frozen=True)
class LoadedTraces:
    traces: tuple[LoadedTrace, ...]  # by rank; those without a rank last
    broken: tuple[BrokenFile, ...]


def load_traces(
    paths: Sequence[str | Path], *, processes: int | None = None, progress: Progress | None = None
) -> LoadedTraces:
    """Whole traces, by `read_files`."""
    read, broken = read_files(paths, _load, lambda trace: trace.rank, processes=processes, progress=progress)
    return LoadedTraces(tuple(LoadedTrace(path, replace(trace, rank=rank)) for path, rank, trace in read), broken)


def load_ranks(paths: Sequence[str | Path]) -> dict[int, LoadedTrace]:
    """By rank; one trace that names none is rank 0. Broken files are named. Raises CommandError."""
    loaded = load_traces(paths, progress=show_progress)
    if not loaded.traces:
        raise nothing_read(loaded.broken)
    for one in loaded.broken:
        to_stderr(f"warning: {one.path}: {one.reason}")
    known = {one.trace.rank: one for one in loaded.traces if one.trace.rank is not None}
    if known:
        return known
    if len(loaded.traces) > 1:
        raise CommandError("the traces name no ranks; next step: name one of them, or files as rank-0.json.gz")
    return {0: loaded.traces[0]}


def nothing_read(broken: Sequence[BrokenFile]) -> CommandError:
    first = f"{broken[0].path}: {broken[0].reason}"
    if len(broken) > 1:
        first = f"none of {len(broken)} files could be read; the first, {first}"
    return CommandError(f"{first}; next step: name files that torch.profiler wrote (.json or .json.gz)")


def _load(path: Path, salvage: bool) -> Trace | str:
    trace = read_file(path, salvage)
    if not isinstance(trace, str) and not len(trace):
        return "it holds no event with a duration: nothing was recorded"
    return trace


def read_files(
    paths: Sequence[str | Path],
    read: Callable[[Path, bool], Made | str],
    rank_of: Callable[[Made], int | None],
    *,
    processes: int | None = None,
    progress: Progress | None = None,
) -> tuple[list[tuple[Path, int | None, Made]], tuple[BrokenFile, ...]]:
    """What `read` makes of files, all traces below directories, and globs, with the rank of each, in their order; those
    without a rank come last. Never raises for a bad file: missing files, missing permissions, what `read` gives a
    reason for, and duplicate ranks are in the second part. A truncated file is salvaged only if it is the only one:
    torch writes kernels last, so beside complete traces it would look like a rank that computes nothing."""
    files, broken = find_files(paths)
    results: dict[Path, Made | str] = {}
    for path, result in _each(files, read, processes):
        results[path] = result
        if progress:
            progress(len(results), len(files))
    made: dict[Path, Made] = {}
    for path in files:
        result = results[path]
        if isinstance(result, str):
            broken.append(BrokenFile(path, result))
        else:
            made[path] = result
    ranks = _assign_ranks({path: rank_of(one) for path, one in made.items()}, broken)
    found = [(path, rank, made[path]) for path, rank in ranks.items()]
    found.sort(key=lambda one: (one[1] is None, one[1] or 0, str(one[0])))
    return found, tuple(broken)


def show_progress(done: int, total: int) -> None:
    if total > 1:
        overwrite("" if done == total else f"read {done} of {total} traces")


def _assign_ranks(stated: Mapping[Path, int | None], broken: list[BrokenFile]) -> dict[Path, int | None]:
    """The trace takes precedence over the file name, unless several traces give the same rank and their names
    differ: then each was profiled as a job of its own."""
    named = {path: rank_in_name(path) for path in stated}
    times_stated, times_named = Counter(stated.values()), Counter(named.values())
    ranks: dict[Path, int | None] = {}
    holder: dict[int, Path] = {}
    for path, rank in stated.items():
        name = named[path]
        if rank is None or (times_stated[rank] > 1 and name is not None and times_named[name] == 1):
            rank = name
        if rank is not None and holder.setdefault(rank, path) != path:
            broken.append(BrokenFile(path, f"it is of rank {rank}, and so is {holder[rank]}; give one trace per rank"))
        else:
            ranks[path] = rank
    return ranks


def is_trace_name(name: str) -> bool:
    return name.endswith(_SUFFIXES) and name != _CAPTURE_SUMMARY


def find_files(
    paths: Sequence[str | Path],
    is_wanted: Callable[[str], object] = is_trace_name,
    nothing: str = "this directory holds no *.json or *.json.gz",
) -> tuple[list[Path], list[BrokenFile]]:
    """Files, those below directories whose names are wanted, and those that globs match: each once, in order; and what
    cannot be read. `nothing` is the reason for a directory without any."""
    files: dict[Path, Path] = {}
    broken: list[BrokenFile] = []
    for asked in paths:
        if not str(asked):  # to Path, this directory
            raise CommandError("the name of a file is empty; next step: name files or directories")
        for path in _expand(asked, partial(_below, is_wanted=is_wanted, nothing=nothing, broken=broken), broken):
            files.setdefault(path.resolve(), path)
    return list(files.values()), broken


def _expand(asked: str | Path, below: Callable[[Path], list[Path]], broken: list[BrokenFile]) -> list[Path]:
    path = Path(asked)
    try:
        if path.is_dir():
            return below(path)
        path.stat()
    except FileNotFoundError as error:
        if glob.has_magic(str(asked)):
            found = [Path(each) for each in sorted(glob.glob(str(asked), recursive=True))]  # noqa: PTH207 (absolute too)
            files = _regular([each for each in found if not each.is_dir()], broken)
            inside = [*files, *(file for each in found if each.is_dir() for file in below(each))]
            if not found:
                broken.append(BrokenFile(path, "no file matches"))
            return inside
        broken.append(BrokenFile(path, cannot_read(error)))
        return []
    except (OSError, ValueError) as error:
        broken.append(BrokenFile(path, cannot_read(error)))
        return []
    return [path]


def _below(folder: Path, is_wanted: Callable[[str], object], nothing: str, broken: list[BrokenFile]) -> list[Path]:
    problems: list[BrokenFile] = []

    def note(error: OSError) -> None:
        problems.append(BrokenFile(Path(error.filename or folder), cannot_read(error)))

    named = [
        Path(place) / name
        for place, _, names in os.walk(folder, onerror=note)
        for name in names
        if is_wanted(name) and not name.startswith(".")
    ]
    found = _regular(sorted(named), problems)
    broken += problems
    if not found and not problems:
        broken.append(BrokenFile(folder, nothing))
    return found


def _regular(paths: list[Path], broken: list[BrokenFile]) -> list[Path]:
    """Without pipes and devices: opening a pipe waits for its writer. One that the user names is the user's choice."""
    found = []
    for path in paths:
        try:
            if stat.S_ISREG(path.stat().st_mode):
                found.append(path)
            else:
                broken.append(BrokenFile(path, "it is not a regular file"))
        except OSError as error:
            broken.append(BrokenFile(path, cannot_read(error)))
    return found


def _blocks(file: FileIO) -> Iterator[bytes]:
    """The file must have been opened with O_NONBLOCK: opening a pipe waits for its writer otherwise."""
    if stat.S_ISFIFO(os.fstat(file.fileno()).st_mode):
        yield _first_block(file)
    os.set_blocking(file.fileno(), True)
    yield from iter(partial(file.read, _BLOCK_BYTES), b"")


def _first_block(pipe: FileIO) -> bytes:
    """A program that has opened the pipe may take its time. Raises OSError if there is none."""
    deadline = time.monotonic() + MAX_WRITER_SECONDS
    while time.monotonic() < deadline:
        block = pipe.read(_BLOCK_BYTES)
        if block:
            return block
        if block is None:  # it has a writer, and no data yet
            deadline = math.inf
        time.sleep(PIPE_POLL_SECONDS)
    raise OSError(f"it is a pipe into which no program has written for {MAX_WRITER_SECONDS:g} s")


def read_file(path: Path, salvage: bool) -> Trace | str:
    """A trace, or the reason why there is none."""
    try:
        with FileIO(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
            return read_trace(_blocks(file), salvage=salvage)
    except TraceError as error:
        return str(error)
    except OSError as error:
        return cannot_read(error)
    except MemoryError:
        return "there is not enough memory to read it"


def _each(
    files: list[Path], read: Callable[[Path, bool], Made | str], processes: int | None
) -> Iterator[tuple[Path, Made | str]]:
    """In processes, if the files are large. One file's events are in memory at a time in each."""
    done: set[Path] = set()
    count = _process_count(files, processes)
    if count > 1:
        for path, result in _each_in_pool(files, read, count):
            done.add(path)
            yield path, result
    for path in files:
        if path not in done:
            yield path, read(path, len(files) == 1)


def _each_in_pool(
    files: list[Path], read: Callable[[Path, bool], Made | str], count: int
) -> Iterator[tuple[Path, Made | str]]:
    # Most calls read one or two files and need no pool.
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    # Forked: children reuse the imports, and no other threads run yet.
    pool = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=_leave_interrupts_to_the_parent)
    try:
        waiting = {pool.submit(read, path, False): path for path in files}
        for done in as_completed(waiting):
            yield waiting[done], done.result()
    except BrokenProcessPool:
        return  # a child was killed, probably for its memory: reading one by one takes less
    finally:
        pool.shutdown(cancel_futures=True)


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _process_count(files: list[Path], asked: int | None) -> int:
    if asked is not None:
        return min(asked, len(files))
    text_bytes = sum(_size(path) * (_GZIP_RATIO if path.suffix == ".gz" else 1) for path in files)
    return min(os.cpu_count() or 1, len(files), _MAX_PROCESSES) if text_bytes > _POOL_TEXT_BYTES else 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
