"""Fetches artifacts into a directory. What was begun is continued, and a file has its name only once it is whole."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

import grpc

from rankscope.cli.capture_connecting import explain
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

ATTEMPTS = 4
PAUSE_SECONDS = 1.0
_NAME_CHARACTERS = 100
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


class DownloadError(Exception):
    pass


def file_name(capture: pb.Capture, entry: pb.RankCapture) -> str:
    """A job's name may hold anything, also `../`: what a path or a shell would mind is left out."""
    kind = "folded.gz" if entry.artifact.endswith(".folded.gz") else "json.gz"
    return f"{stem(capture)}-rank{entry.rank}.{kind}"


def stem(capture: pb.Capture) -> str:
    return f"{_safe(capture.job)}-{_safe(capture.id)}"


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
    capture: pb.Capture,
    entry: pb.RankCapture,
    folder: Path,
    advance: Callable[[int], None] = lambda size_bytes: None,
) -> Path:
    """`advance` is told how many bytes more are here."""
    path = folder / file_name(capture, entry)
    part = path.with_name(path.name + ".part")
    try:
        if path.is_file() and path.stat().st_size == entry.bytes:
            advance(entry.bytes)
            return path
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        with os.fdopen(os.open(part, flags, 0o644), "ab") as file:
            _lock(file.fileno(), part)
            _fill(stub, target, pb.DownloadArtifactRequest(id=capture.id, rank=entry.rank), file.fileno(), advance)
            size = os.fstat(file.fileno()).st_size
            if entry.bytes and size != entry.bytes:
                part.unlink()
                raise DownloadError(
                    f"rank {entry.rank}: {size} bytes came, the capture's record says {entry.bytes}; the partial file "
                    "was removed: get it again"
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


def _safe(text: str) -> str:
    return _UNSAFE.sub("_", text)[:_NAME_CHARACTERS].lstrip(".-") or "job"
