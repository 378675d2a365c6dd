"""Where artifacts are kept on the node: a folder for each capture, within a quota of bytes and of age, and never so
much that the disk fills up. The oldest captures make room."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from google.protobuf import json_format

from rankscope.daemon.captures.orders import CaptureError
from rankscope.v1 import capture_service_pb2 as pb

log = logging.getLogger(__name__)

# Ids are ours, but they come back in requests: a path is made of nothing else.
_ID = re.compile(r"c-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
RECORD = "capture.json"
WORKSPACE = "recording"
RECORD_LIMIT_BYTES = 4 << 20


@dataclass(frozen=True)
class Quota:
    total_bytes: int = 10 << 30
    age_seconds: float = 7 * 86400.0
    # Left free on the disk whatever the quota says: others live on it too.
    free_ratio: float = 0.05


class Store:
    """Safe to use from several threads, but for two that write the same rank of the same capture."""

    def __init__(
        self,
        folder: Path,
        quota: Quota = Quota(),  # noqa: B008 - frozen
        unix_seconds: Callable[[], float] = time.time,
        disk_usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage,
    ) -> None:
        self.folder = folder
        self._quota = quota
        self._unix_seconds = unix_seconds
        self._disk_usage = disk_usage
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(f"{folder} cannot be made: {error.strerror}; pass another --capture-dir") from error

    def workspace(self, capture_id: str) -> Path:
        """A private folder for what is being recorded; gone when the capture is over."""
        path = self._of(capture_id) / WORKSPACE
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        return path

    def clean(self, capture_id: str) -> None:
        shutil.rmtree(self._of(capture_id) / WORKSPACE, ignore_errors=True)

    def artifact(self, capture_id: str, rank: int) -> Path:
        for suffix in ("json.gz", "folded.gz"):
            path = self._of(capture_id) / f"rank{int(rank)}.{suffix}"
            if path.is_file():
                return path
        raise CaptureError(
            f"capture {capture_id} has no artifact of rank {rank}; it failed, or its age was over the quota"
        )

    def open(self, capture_id: str, rank: int) -> tuple[BinaryIO, int]:
        path = self.artifact(capture_id, rank)
        try:
            artifact = path.open("rb")
        except OSError as error:
            raise CaptureError(f"{path}: {error.strerror}") from error
        return artifact, os.fstat(artifact.fileno()).st_size

    def make_room(self, needed_bytes: int, keep: str) -> None:
        """Let the oldest captures go until `needed_bytes` fit; `keep` is the capture that needs them."""
        captures = sorted((path for path in self._captures() if path.name != keep), key=lambda path: path.name)
        sizes = {path: _size(path) for path in captures}
        used = sum(sizes.values()) + _size(self._of(keep))
        total, _, free = self._disk_usage(self.folder)
        reserve = self._quota.free_ratio * total
        now = self._unix_seconds()
        for path in captures:
            is_old = now - path.stat().st_mtime > self._quota.age_seconds
            fits = used + needed_bytes <= self._quota.total_bytes and free - needed_bytes >= reserve
            if fits and not is_old:
                continue
            log.info("capture %s makes room", path.name)
            shutil.rmtree(path, ignore_errors=True)
            used, free = used - sizes[path], free + sizes[path]
        if used + needed_bytes > self._quota.total_bytes:
            raise CaptureError(
                f"{needed_bytes} bytes do not fit into the quota of {self._quota.total_bytes} bytes of {self.folder}; "
                "capture fewer steps or ranks, or raise --capture-quota-bytes"
            )
        if free - needed_bytes < reserve:
            raise CaptureError(
                f"the disk of {self.folder} is almost full ({free} bytes free); make room, or pass another "
                "--capture-dir"
            )

    def write(self, capture_id: str, name: str, write: Callable[[BinaryIO], None]) -> Path:
        """A file that is there whole or not at all."""
        folder = self._of(capture_id)
        folder.mkdir(mode=0o700, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=f".{name}.")
        try:
            with os.fdopen(descriptor, "wb") as file:
                write(file)
            path = folder / name
            Path(temporary).replace(path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
        return path

    def save(self, capture: pb.Capture) -> None:
        text = json_format.MessageToJson(capture, preserving_proto_field_name=True).encode()
        try:
            self.write(capture.id, RECORD, lambda file: void(file.write(text)))
        except OSError as error:  # the capture itself goes on; after a restart it would be unknown
            log.warning("record of capture %s cannot be saved: %s", capture.id, error)

    def load(self) -> list[pb.Capture]:
        """The captures that are known from before, oldest first. What is under way has been lost with the daemon."""
        known = []
        for folder in sorted(self._captures()):
            with contextlib.suppress(OSError, ValueError, json_format.ParseError):
                text = (folder / RECORD).read_bytes()[:RECORD_LIMIT_BYTES]
                known.append(json_format.Parse(text, pb.Capture()))
        return known

    def _captures(self) -> list[Path]:
        return [path for path in self.folder.iterdir() if _ID.fullmatch(path.name) and path.is_dir()]

    def _of(self, capture_id: str) -> Path:
        if not _ID.fullmatch(capture_id):
            raise CaptureError(f"no capture {capture_id[:64]!r}; `rankscope captures ls` lists them")
        return self.folder / capture_id


def void(_: object) -> None:
    """Drops what a call returns."""


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
