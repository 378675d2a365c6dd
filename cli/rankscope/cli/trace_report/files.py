"""Finds and reads trace files: good ones sorted by rank, broken ones with the reason. A bad file does not stop the
others."""

from __future__ import annotations

import glob
import os
import re
import signal
import stat
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankscope.analysis.traces.reader.trace_file import TraceError, read_trace
from rankscope.analysis.traces.trace import Trace

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
# Below this, starting processes costs more than they save.
_POOL_TEXT_BYTES = 64 << 20
_GZIP_RATIO = 12


# The rank of a trace file: from the trace, else from its name; and how to resolve duplicates.


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
class Claim:
    path: Path
    stated: int | None  # according to the trace
    named: int | None  # according to the file name


@dataclass(frozen=True)
class Assigned:
    rank: dict[Path, int | None]  # without files that cannot have a rank of their own
    reason: dict[Path, str]


def assign_ranks(claims: list[Claim]) -> Assigned:
    """The trace takes precedence over the file name, unless several traces give the same rank and their names
    differ: then each was profiled as a job of its own."""
    stated = Counter(claim.stated for claim in claims if claim.stated is not None)
    names = Counter(claim.named for claim in claims if claim.named is not None)
    rank: dict[Path, int | None] = {}
    reason: dict[Path, str] = {}
    holder: dict[int, Path] = {}
    for claim in claims:
        mine, why = claim.stated, "the trace says so"
        if claim.stated is None:
            mine, why = claim.named, "the file's name says so"
        elif stated[claim.stated] > 1 and claim.named is not None and names[claim.named] == 1:
            mine, why = claim.named, "the file's name says so; several files say the same rank"
        if mine is None:
            rank[claim.path], reason[claim.path] = None, "neither the trace nor the file's name has the rank"
        elif mine in holder:
            other = holder[mine]
            reason[claim.path] = f"it is of rank {mine}, and so is {other}; give one trace per rank"
        else:
            holder[mine] = claim.path
            rank[claim.path], reason[claim.path] = mine, why
    return Assigned(rank, reason)


@dataclass(frozen=True)
class LoadedTrace:
    path: Path
    trace: Trace  # its rank is the assigned one, even if only the file name gives it
    rank_reason: str  # the source of the rank, or why there is none


@dataclass(frozen=True)
class BrokenFile:
    path: Path
    reason: str


@dataclass(frozen=True)
class LoadedTraces:
    traces: tuple[LoadedTrace, ...]  # by rank; those without a rank last
    broken: tuple[BrokenFile, ...]


@dataclass(frozen=True)
class Progress:
    path: Path
    files_done: int
    files: int
    bytes_done: int
    bytes: int


def load_traces(
    paths: Sequence[str | Path],
    *,
    processes: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> LoadedTraces:
    """Read files, all traces below directories, and globs. Never raises for a bad file: missing files, missing
    permissions, files that are not traces and duplicate ranks are in `broken`. A truncated file is salvaged only if
    it is the only one: torch writes kernels last, so beside complete traces it would look like a rank that computes
    nothing."""
    files, broken = find_files(paths)
    tracker = _Tracker(files, progress)
    salvage = len(files) == 1
    count = _process_count(files, processes)
    if count > 1:
        read = _read_in_pool(files, salvage, count, tracker)
    else:
        read = {path: _read_file(path, salvage, tracker) for path in files}
    traces = {path: result for path in files if isinstance(result := read[path], Trace)}
    broken += [BrokenFile(path, result) for path in files if isinstance(result := read[path], str)]
    claims = [Claim(path, trace.rank, rank_in_name(path)) for path, trace in traces.items()]
    assigned = assign_ranks(claims)
    loaded = [
        LoadedTrace(path, replace(trace, rank=assigned.rank[path]), assigned.reason[path])
        for path, trace in traces.items()
        if path in assigned.rank
    ]
    loaded.sort(key=lambda one: (one.trace.rank is None, one.trace.rank or 0))
    broken += [BrokenFile(path, assigned.reason[path]) for path in traces if path not in assigned.rank]
    return LoadedTraces(tuple(loaded), tuple(broken))


def find_files(paths: Sequence[str | Path]) -> tuple[list[Path], list[BrokenFile]]:
    """Each file once, in order; and requested files that do not exist."""
    files: dict[Path, Path] = {}
    broken: list[BrokenFile] = []
    for asked in paths:
        for path in _expand(asked, broken):
            files.setdefault(path.resolve(), path)
    return list(files.values()), broken


def _expand(asked: str | Path, broken: list[BrokenFile]) -> list[Path]:
    path = Path(asked)
    try:
        if path.is_dir():
            return _below(path, broken)
        path.stat()
    except FileNotFoundError:
        if glob.has_magic(str(asked)):
            found = [Path(each) for each in sorted(glob.glob(str(asked), recursive=True))]  # noqa: PTH207 (absolute too)
            files = _regular([each for each in found if not each.is_dir()], broken)
            inside = [*files, *(below for each in found if each.is_dir() for below in _below(each, broken))]
            if not found:
                broken.append(BrokenFile(path, "no file matches"))
            return inside
        broken.append(BrokenFile(path, "there is no such file or directory"))
        return []
    except (OSError, ValueError) as error:
        broken.append(BrokenFile(path, _os_reason(error)))
        return []
    return [path]


def _below(folder: Path, broken: list[BrokenFile]) -> list[Path]:
    problems: list[BrokenFile] = []

    def note(error: OSError) -> None:
        problems.append(BrokenFile(Path(error.filename or folder), _os_reason(error)))

    named = [
        Path(place) / name
        for place, _, names in os.walk(folder, onerror=note)
        for name in names
        if name.endswith(_SUFFIXES) and not name.startswith(".") and name != _CAPTURE_SUMMARY
    ]
    found = _regular(named, problems)
    broken += problems
    if not found and not problems:
        broken.append(BrokenFile(folder, "this directory holds no *.json or *.json.gz"))
    return sorted(found)


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
            broken.append(BrokenFile(path, _os_reason(error)))
    return found


def _read_file(path: Path, salvage: bool, tracker: _Tracker | None = None) -> Trace | str:
    """A trace, or the reason why there is none."""
    try:
        trace = read_trace(_blocks(path, tracker), salvage=salvage)
        return trace if len(trace) else "it holds no event with a duration: nothing was recorded"
    except TraceError as error:
        return error.reason
    except OSError as error:
        return _os_reason(error)
    except MemoryError:
        return "there is not enough memory to read it"
    finally:
        if tracker:
            tracker.finish(path)


def _blocks(path: Path, tracker: _Tracker | None) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block
            if tracker:
                tracker.advance(path, len(block))


def _read_in_pool(files: list[Path], salvage: bool, count: int, tracker: _Tracker) -> dict[Path, Trace | str]:
    """Columns are small compared with the text, so returning them from a process is cheap."""
    # Most calls read one or two files and need no pool.
    from concurrent.futures import ProcessPoolExecutor, as_completed
    from concurrent.futures.process import BrokenProcessPool
    from multiprocessing import get_context

    read: dict[Path, Trace | str] = {}
    # Forked: children reuse the imports, and no other threads run yet.
    pool = ProcessPoolExecutor(count, mp_context=get_context("fork"), initializer=_leave_interrupts_to_the_parent)
    try:
        waiting = {pool.submit(_read_file, path, salvage): path for path in files}
        for done in as_completed(waiting):
            read[waiting[done]] = done.result()
            tracker.finish(waiting[done])
    except BrokenProcessPool:
        # A child was killed, probably for its memory: reading one by one takes less.
        for path in files:
            if path not in read:
                read[path] = _read_file(path, salvage, tracker)
    finally:
        pool.shutdown(cancel_futures=True)
    return read


def _leave_interrupts_to_the_parent() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _process_count(files: list[Path], asked: int | None) -> int:
    if asked is not None:
        return min(asked, len(files))
    text_bytes = sum(_size(path) * (_GZIP_RATIO if path.suffix == ".gz" else 1) for path in files)
    return min(os.cpu_count() or 1, len(files)) if text_bytes > _POOL_TEXT_BYTES else 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _os_reason(error: OSError | ValueError) -> str:
    if isinstance(error, PermissionError):
        return "permission denied; run as a user who may read it, or change its mode"
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot be read: {words[:1].lower()}{words[1:]}"


class _Tracker:
    """Progress of reading, for display."""

    def __init__(self, files: list[Path], progress: Callable[[Progress], None] | None) -> None:
        self._progress = progress
        self._sizes = {path: _size(path) for path in files} if progress else {}
        self._read = dict.fromkeys(self._sizes, 0)
        self._files_done = 0

    def advance(self, path: Path, count: int) -> None:
        if self._progress:
            self._read[path] += count
            self._tell(path)

    def finish(self, path: Path) -> None:
        if self._progress:
            self._read[path] = self._sizes[path]
            self._files_done += 1
            self._tell(path)

    def _tell(self, path: Path) -> None:
        if self._progress:
            done, total = sum(self._read.values()), sum(self._sizes.values())
            self._progress(Progress(path, self._files_done, len(self._sizes), done, total))
