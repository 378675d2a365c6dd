"""Downloads artifacts into a directory. Resumes partial downloads; a file gets its name only when complete."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from rich.text import Text

from rankscope.analysis.quantities import count, quantity
from rankscope.cli.capture_output import (
    SUMMARY_FILE,
    Progress,
    elsewhere,
    is_complete,
    make_console,
    result_table,
    to_object,
)
from rankscope.cli.connection import explain
from rankscope.cli.messages import CommandError, cannot_write
from rankscope.cli.output_file import open_output, writing
from rankscope.cli.run_card import RECORD, advice
from rankscope.common.text import printable
from rankscope.operator.console.capture_answers import (
    FINAL,
    artifact_name,
    delivered,
    findings,
    notes,
    outcome,
    slowdowns,
    state_word,
    stem,
)
from rankscope.operator.correlation.job_service import verdict_of
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

ATTEMPTS = 4
PAUSE_SECONDS = 1.0
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
MAX_NOTES = 8


class DownloadError(CommandError):
    """Nothing was lost: the same command continues the download."""


@dataclass(frozen=True)
class Artifact:
    """A file of a rank: the recording, or one of several windows."""

    rank: int
    window: int  # from 0
    name: str  # local file name
    size_bytes: int


def artifacts(capture: pb.Capture, entry: pb.RankCapture) -> list[Artifact]:
    more = [
        Artifact(entry.rank, number, artifact_name(capture, entry, number), window.bytes)
        for number, window in enumerate(entry.more_windows, 1)
    ]
    return [Artifact(entry.rank, 0, artifact_name(capture, entry), entry.bytes), *more]


def prepare(folder: Path) -> None:
    """Create the directory, and check now that it is writable."""
    with writing("-o"):
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))


def download(
    stub: CaptureServiceStub,
    target: str,
    capture_id: str,
    artifact: Artifact,
    folder: Path,
    advance: Callable[[int], None] = lambda size_bytes: None,
) -> Path:
    """`advance` receives the number of new bytes."""
    path = folder / artifact.name
    request = pb.DownloadArtifactRequest(id=capture_id, rank=artifact.rank, window=artifact.window)
    part = path.with_name(path.name + ".part")
    try:
        if path.is_file() and path.stat().st_size == artifact.size_bytes:
            advance(artifact.size_bytes)
            return path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o644), "ab") as file:
            _lock(file.fileno(), part)
            _check_space(folder, artifact.size_bytes - os.fstat(file.fileno()).st_size)
            _fill(stub, target, request, file.fileno(), artifact.size_bytes, advance)
            size = os.fstat(file.fileno()).st_size
            if size != artifact.size_bytes:
                part.unlink()
                raise DownloadError(
                    f"rank {artifact.rank}: {size} bytes came, the capture's record says {artifact.size_bytes}; the "
                    "partial file was removed: get it again"
                )
        part.replace(path)
    except OSError as error:
        error.filename = str(part)
        raise DownloadError(cannot_write(error, "-o")) from error
    return path


def _fill(
    stub: CaptureServiceStub,
    target: str,
    request: pb.DownloadArtifactRequest,
    descriptor: int,
    size_bytes: int,
    advance: Callable[[int], None],
) -> None:
    if os.fstat(descriptor).st_size > size_bytes:
        os.ftruncate(descriptor, 0)  # not the beginning of this artifact
    advance(os.fstat(descriptor).st_size)
    for attempt in range(1, ATTEMPTS + 1):
        request.offset = os.fstat(descriptor).st_size
        try:
            total = _receive(stub, request, descriptor, size_bytes, advance)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE and request.offset:
                # A local file that is not the beginning of this artifact.
                advance(-request.offset)
                os.ftruncate(descriptor, 0)
            elif error.code() not in _LOST or attempt == ATTEMPTS:
                raise DownloadError(f"rank {request.rank}: {explain(target, error)}") from error
            else:
                time.sleep(PAUSE_SECONDS)
            continue
        if os.fstat(descriptor).st_size >= total:
            return
    here = os.fstat(descriptor).st_size
    raise DownloadError(f"rank {request.rank}: the transfer broke off after {here} bytes; get it again to continue")


def _receive(
    stub: CaptureServiceStub,
    request: pb.DownloadArtifactRequest,
    descriptor: int,
    size_bytes: int,
    advance: Callable[[int], None],
) -> int:
    total, expected = 0, size_bytes - request.offset
    stream = stub.DownloadArtifact(request)
    try:
        for response in stream:
            total = response.total_bytes
            expected -= len(response.chunk)
            if total > size_bytes or expected < 0:
                raise DownloadError(
                    f"rank {request.rank}: more comes than the {size_bytes} bytes that the capture's record says; the "
                    "rest was refused. Remove the file and get it again"
                )
            left = memoryview(response.chunk)
            while left:
                left = left[os.write(descriptor, left) :]
            advance(len(response.chunk))
    finally:
        stream.cancel()
    return total


def _check_space(folder: Path, needed_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise DownloadError(
            f"{quantity(needed_bytes, 'B')} do not fit: {folder} has {quantity(free, 'B')} free; make room or name "
            "another --output"
        )


def _lock(descriptor: int, part: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DownloadError(f"{part} is being written by another download; wait for that one") from error


# Downloads a capture's artifacts and summary, and reports where they are and what to do with them.


@dataclass(frozen=True)
class Fetched:
    folder: Path
    files: Mapping[int, Sequence[Path]] = field(default_factory=dict)
    errors: Mapping[int, str] = field(default_factory=dict)


def fetch(
    stub: CaptureServiceStub,
    target: str,
    capture: pb.Capture,
    entries: Sequence[pb.RankCapture],
    folder: Path,
    progress: Progress,
    max_bytes: int,
) -> Fetched:
    """A failure of one rank does not affect the others. Raises DownloadError if even the summary cannot be written."""
    files: dict[int, Sequence[Path]] = {}
    errors: dict[int, str] = {}
    total = sum(artifact.size_bytes for entry in entries for artifact in artifacts(capture, entry))
    if total > max_bytes:
        raise DownloadError(
            f"the recordings have {total} bytes, more than --max-bytes {max_bytes}; raise it, or get fewer ranks with "
            f"`rankscope captures get {capture.id} --ranks RANKS`"
        )
    done = 0

    def advance(size_bytes: int) -> None:
        nonlocal done
        done += size_bytes
        progress.downloading(done, total)

    for entry in entries:
        try:
            files[entry.rank] = [
                download(stub, target, capture.id, artifact, folder, advance) for artifact in artifacts(capture, entry)
            ]
        except DownloadError as error:
            errors[entry.rank] = f"recorded, but not downloaded: {error}"
    fetched = Fetched(folder, files, errors)
    _write_summary(capture, fetched)
    return fetched


def next_steps(capture: pb.Capture, fetched: Fetched) -> list[str]:
    """`rankscope analyze trace DIR`, or what suits the files."""
    names = [path.name for paths in fetched.files.values() for path in paths]
    steps = []
    if any(name.endswith(".json.gz") for name in names):
        others = [path for path in fetched.folder.glob("*.json.gz") if path.name not in names]
        what = str(fetched.folder / f"{stem(capture)}-rank*.json.gz") if others else str(fetched.folder)
        steps.append(f"rankscope analyze trace {shlex.quote(what)}")
    folded = next((name for name in names if name.endswith(".folded.gz")), None)
    if folded is not None:
        steps.append(f"gunzip -k {shlex.quote(str(fetched.folder / folded))}  # folded stacks, for speedscope")
    return steps


def _write_summary(capture: pb.Capture, fetched: Fetched) -> None:
    path = fetched.folder / SUMMARY_FILE
    text = json.dumps(to_object(capture, fetched.files, fetched.errors), indent=2) + "\n"
    with writing("-o"), open_output(path) as file:
        file.write(text.encode())


# The end of a capture on a terminal: what each rank did, then the findings.


def print_capture(capture: pb.Capture, fetched: Fetched | None = None) -> None:
    console = make_console()
    console.print(result_table(capture, None if fetched is None else fetched.files))
    console.print()
    errors = fetched.errors if fetched else {}
    complete = is_complete(capture) and not errors
    head = f"{capture.id} ({printable(capture.job)}): {outcome(capture)}"
    if capture.state not in FINAL:
        head += f"; it is {state_word(capture.state)}"
    lines = [Text(f"{head}.", style="bold green" if complete else "bold")]
    lines += [Text(_sentence(text)) for text in findings(capture)]
    what = advice(verdict_of(capture.verdict)) if capture.HasField("verdict") and delivered(capture) else ""
    if what and not what.startswith(RECORD):  # this is the recording
        lines.append(Text(f"Try: {printable(what)}"))
    lines += [Text(_sentence(f"warning: {text}"), style="yellow") for text in slowdowns(capture)]
    noted = notes(capture)
    lines += [Text(_sentence(f"note: {note}"), style="dim") for note in noted[:MAX_NOTES]]
    if len(noted) > MAX_NOTES:
        lines.append(Text(f"… and {len(noted) - MAX_NOTES} more notes: rankscope captures show {capture.id} --json"))
    lines += [Text(_sentence(f"rank {rank}: {error}"), style="red") for rank, error in errors.items()]
    lines += [Text(line) for line in _where(capture, fetched)]
    for line in lines:
        # The terminal wraps it: text copied from there must be one line.
        console.print(line, soft_wrap=True)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _where(capture: pb.Capture, fetched: Fetched | None) -> list[str]:
    here = delivered(capture)
    if not here:
        return []
    if fetched is None:
        uris = [f"Uploaded: {printable(entry.uri)}" for entry in here if entry.uri]
        command = f"  rankscope captures get {capture.id} --output DIR{elsewhere(capture.id)}"
        return [*uris, "The daemon keeps the files; next:", command]
    if not fetched.files:
        return []
    files = [path for paths in fetched.files.values() for path in paths]
    size = quantity(sum(path.stat().st_size for path in files), "B")
    steps = [f"  {step}" for step in next_steps(capture, fetched)]
    return [f"{count(len(files), 'file')}, {size}, in {fetched.folder}; next:", *steps]
