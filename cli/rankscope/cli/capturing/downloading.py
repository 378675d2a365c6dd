"""Fetches artifacts into a directory. What was begun is continued, and a file has its name only once it is whole."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import grpc

from rankscope.cli.capturing.connecting import explain
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

ATTEMPTS = 4
PAUSE_SECONDS = 1.0
_NAME_CHARACTERS = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class DownloadError(Exception):
    pass


@dataclass(frozen=True)
class Artifact:
    """A file of a rank's: the recording, or one of several windows."""

    rank: int
    window: int  # from 0
    name: str  # to be given here
    size_bytes: int


def artifacts(capture: pb.Capture, entry: pb.RankCapture) -> list[Artifact]:
    more = [
        Artifact(entry.rank, number, file_name(capture, entry, number), window.bytes)
        for number, window in enumerate(entry.more_windows, 1)
    ]
    return [Artifact(entry.rank, 0, file_name(capture, entry), entry.bytes), *more]


def file_name(capture: pb.Capture, entry: pb.RankCapture, window: int = 0) -> str:
    """A job's name may hold anything, also `../`: what a path or a shell would mind is left out."""
    kind = "folded.gz" if entry.artifact.endswith(".folded.gz") else "json.gz"
    which = f".window{window + 1}" if window else ""
    return f"{stem(capture)}-rank{entry.rank}{which}.{kind}"


def stem(capture: pb.Capture) -> str:
    return f"{safe_name(capture.job)}-{safe_name(capture.id)}"


def prepare(folder: Path) -> None:
    """Make the directory, and find out now whether files can be put into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(f"{folder} cannot be made: {error.strerror}; name another --output") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise DownloadError(f"{folder} cannot be written to; name another --output")


def download(
    stub: CaptureServiceStub,
    target: str,
    capture_id: str,
    artifact: Artifact,
    folder: Path,
    advance: Callable[[int], None] = lambda size_bytes: None,
) -> Path:
    """`advance` is told how many bytes more are here."""
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
            _fill(stub, target, request, file.fileno(), advance)
            size = os.fstat(file.fileno()).st_size
            if artifact.size_bytes and size != artifact.size_bytes:
                part.unlink()
                raise DownloadError(
                    f"rank {artifact.rank}: {size} bytes came, the capture's record says {artifact.size_bytes}; the "
                    "partial file was removed: get it again"
                )
        part.replace(path)
    except OSError as error:
        raise DownloadError(f"{part}: {error.strerror}; make room or name another --output") from error
    return path


def _fill(
    stub: CaptureServiceStub,
    target: str,
    request: pb.DownloadArtifactRequest,
    descriptor: int,
    advance: Callable[[int], None],
) -> None:
    had = os.fstat(descriptor).st_size
    advance(had)
    for attempt in range(1, ATTEMPTS + 1):
        request.offset = os.fstat(descriptor).st_size
        try:
            total = _receive(stub, request, descriptor, advance)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.OUT_OF_RANGE and request.offset:
                # Not the beginning of this artifact, whatever it is.
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
    stub: CaptureServiceStub, request: pb.DownloadArtifactRequest, descriptor: int, advance: Callable[[int], None]
) -> int:
    total = 0
    for response in stub.DownloadArtifact(request):
        total = response.total_bytes
        left = memoryview(response.chunk)
        while left:
            left = left[os.write(descriptor, left) :]
        advance(len(response.chunk))
    return total


def _lock(descriptor: int, part: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise DownloadError(f"{part} is being written by another download; wait for that one") from error


def safe_name(text: str) -> str:
    """One part of a path, whatever it was."""
    return _UNSAFE.sub("_", text)[:_NAME_CHARACTERS].lstrip(".-") or "job"
