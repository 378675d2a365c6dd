"""The capture store of the node: one directory per capture, with its record and artifacts, within a quota."""

from __future__ import annotations

import calendar
import contextlib
import logging
import os
import re
import shutil
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Final

from google.protobuf import json_format

from rankscope.common.private_folder import FolderError, claim
from rankscope.daemon.captures.orders import CaptureError, Workspace, surplus
from rankscope.daemon.captures.probe_commands import window_file
from rankscope.daemon.captures.records import FINAL, MAX_REMEMBERED_CAPTURES
from rankscope.v1 import capture_service_pb2 as pb

MAX_CAPTURES = 2000
log = logging.getLogger(__name__)
# Ids come from requests: a path is made of nothing else.
_ID: Final = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")
_OURS: Final = re.compile(r"c-([0-9]{8}-[0-9]{6})-[0-9a-f]{6}")
RECORD: Final = "capture.json"
WORKSPACE: Final = "recording"
MAX_RECORD_BYTES: Final = 16 << 20
TENANT: Final = "tenant"
MAX_TENANT_BYTES: Final = 1024
FEWER: Final = "capture fewer steps or ranks, or raise --capture-quota-bytes"
LOST: Final = "the daemon restarted during this capture; ask again"


# Which captures are removed when space is short: expired ones, then the oldest of the tenant that has most, until the
# rest fits.


@dataclass(frozen=True)
class Quota:
    total_bytes: int = 10 << 30
    age_seconds: float = 7 * 86400.0
    # Kept free on the disk regardless of the quota: others use it too.
    free_ratio: float = 0.05
    # Of the quota, for what one tenant has under way, which cannot be removed.
    active_ratio: float = 0.75


@dataclass(frozen=True)
class Kept:
    name: str
    begun_unix_seconds: float
    size_bytes: int  # with the room that is reserved for it
    is_active: bool  # never removed
    tenant: str = ""


@dataclass(frozen=True)
class Usage:
    disk_bytes: int
    free_bytes: int  # less what is reserved and not written yet
    now_unix_seconds: float


def captures_to_evict(
    kept: Sequence[Kept], usage: Usage, needed_bytes: int, quota: Quota, tenant: str = ""
) -> tuple[set[Kept], str | None]:
    """The captures to remove, and why there is still no room for `needed_bytes` more of a tenant; None if there is. If
    there is no room, nothing is removed for it."""
    removable = sorted((one for one in kept if not one.is_active), key=lambda one: (one.begun_unix_seconds, one.name))
    going = {one for one in removable if usage.now_unix_seconds - one.begun_unix_seconds > quota.age_seconds}
    left = [one for one in removable if one not in going]
    going.update(surplus(left, lambda one: one.tenant, MAX_CAPTURES - (len(kept) - len(removable))))
    reserve_bytes = quota.free_ratio * usage.disk_bytes
    sizes = Counter({tenant: needed_bytes})
    queues: dict[str, deque[Kept]] = {}
    for one in kept:
        sizes[one.tenant] += 0 if one in going else one.size_bytes
    for one in removable:
        if one not in going:
            queues.setdefault(one.tenant, deque()).append(one)
    free_bytes = usage.free_bytes - needed_bytes + sum(one.size_bytes for one in going)
    active_bytes = needed_bytes + sum(one.size_bytes for one in kept if one.is_active and one.tenant == tenant)
    if needed_bytes > 0 and active_bytes > quota.active_ratio * quota.total_bytes:
        return going, (
            f"{active_bytes} bytes of recordings of {tenant or 'one tenant'} at once do not fit into their part of the "
            f"quota ({quota.active_ratio:.0%} of {quota.total_bytes} bytes); {FEWER}"
        )
    leaving: set[Kept] = set()
    while sizes.total() > quota.total_bytes or free_bytes < reserve_bytes:
        largest = max((one for one in queues if queues[one]), key=sizes.__getitem__, default=None)
        if largest is None or sizes[largest] < sizes[tenant]:
            break
        one = queues[largest].popleft()
        leaving.add(one)
        sizes[largest] -= one.size_bytes
        free_bytes += one.size_bytes
    if sizes.total() > quota.total_bytes:
        return going, (
            f"{sizes.total()} bytes of captures do not fit into the quota of {quota.total_bytes} bytes, "
            f"{sizes[tenant]} of {tenant or 'this tenant'}; {FEWER}"
        )
    if free_bytes < reserve_bytes:
        return going, (
            f"the disk is almost full ({usage.free_bytes} of {usage.disk_bytes} bytes are free, {reserve_bytes:.0f} "
            f"are left to others, {max(0, needed_bytes)} are needed); make room on it, or pass another --capture-dir"
        )
    return going | leaving, None


class Store:
    """Thread-safe."""

    def __init__(
        self,
        folder: Path,
        quota: Quota = Quota(),  # noqa: B008 - frozen
        unix_seconds: Callable[[], float] = time.time,
        disk_usage: Callable[[Path], tuple[int, int, int]] = shutil.disk_usage,
        on_lost: Callable[[pb.Capture], None] = lambda capture: None,
    ) -> None:
        self.folder = folder
        self._quota = quota
        self._unix_seconds = unix_seconds
        self._disk_usage = disk_usage
        self._on_lost = on_lost
        self._room = threading.Lock()
        self._reserved: dict[str, dict[str, int]] = {}  # by capture and file, in bytes
        self._tenants: dict[str, str] = {}
        self._descriptor = _claim(folder)

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def assign(self, capture_id: str, tenant: str) -> None:
        """Count a capture for a tenant, from its beginning until it is removed."""
        path = self._of(capture_id)
        self._tenants[capture_id] = tenant
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
            (path / TENANT).write_text(tenant)
        except OSError as error:
            raise CaptureError(f"{path} cannot be made: {error.strerror}; pass another --capture-dir") from error

    def tenant(self, capture_id: str) -> str:
        if capture_id not in self._tenants:
            self._tenants[capture_id] = _read_tenant(self._of(capture_id) / TENANT)
        return self._tenants[capture_id]

    def workspace(self, capture_id: str) -> Workspace:
        """A private directory for a recording in progress; removed when the capture ends. Raises CaptureError if the
        disk has no room for a recording."""
        path = self._of(capture_id) / WORKSPACE
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise CaptureError(f"{path} cannot be made: {error.strerror}; pass another --capture-dir") from error
        with self._room:
            self._make_room(0, capture_id)
        return Workspace(path, partial(self._reserve, capture_id))

    def _reserve(self, capture_id: str, path: Path, size_bytes: int) -> None:
        with self._room:
            reserved = self._reserved.setdefault(capture_id, {})
            reserved.pop(path.name, None)  # of an earlier attempt
            self._make_room(size_bytes, capture_id)
            reserved[path.name] = size_bytes

    def release(self, capture_id: str) -> None:
        """What is in the workspace counts by its size from now on: nothing more is written."""
        with self._room:
            self._reserved.pop(capture_id, None)

    def clean(self, capture_id: str) -> None:
        shutil.rmtree(self._of(capture_id) / WORKSPACE, ignore_errors=True)
        self.release(capture_id)

    def remove(self, capture_id: str) -> None:
        with self._room:
            self._remove(capture_id)

    def sweep(self) -> None:
        """Remove what exceeds the quota."""
        with self._room, contextlib.suppress(CaptureError):
            self._make_room(0, None)

    def keep(self, capture_id: str, path: Path, name: str) -> int:
        """Move a file out of the workspace into the store if the quota allows; returns its size in bytes."""
        with self._room:
            kept = self._of(capture_id) / name
            size = path.stat().st_size
            # The rest of the workspace is about to be removed.
            left = _size(kept) + sum(_sizes(path.parent).values())
            self._make_room(_size(path) - left, capture_id)
            path.replace(kept)
            return size

    def open(self, capture_id: str, rank: int, window: int = 0) -> tuple[BinaryIO, int]:
        """A rank's artifact and its size."""
        for suffix in ("json.gz", "folded.gz"):
            with contextlib.suppress(FileNotFoundError):
                path = window_file(self._of(capture_id) / f"rank{int(rank)}.{suffix}", int(window))
                artifact = path.open("rb")
                return artifact, os.fstat(artifact.fileno()).st_size
        raise CaptureError(
            f"capture {capture_id} has no artifact of rank {int(rank)}: the rank delivered none, or it made room for "
            "later captures"
        )

    def save(self, capture: pb.Capture) -> None:
        text = json_format.MessageToJson(capture, preserving_proto_field_name=True).encode()
        folder = self._of(capture.id)
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            part = folder / f".{RECORD}.part"
            part.write_bytes(text)
            part.replace(folder / RECORD)
        except OSError as error:  # the capture continues; after a restart it would be unknown
            log.warning("record of capture %s cannot be saved: %s", capture.id, error)

    def load(self) -> list[pb.Capture]:
        """The captures known from before, oldest first. Call once, before any capture starts. Captures that were in
        progress when the daemon ended are lost, except for ranks that had delivered."""
        for path in self._captures():
            shutil.rmtree(path / WORKSPACE, ignore_errors=True)
        self.sweep()
        known = []
        oldest_first = sorted(self._captures(), key=_made_unix_seconds)
        forgotten = set(surplus(oldest_first, lambda path: self.tenant(path.name), MAX_REMEMBERED_CAPTURES))
        for path in oldest_first:
            capture = None if path in forgotten else self._read(path)
            if capture is None:
                continue
            if capture.state not in FINAL:
                _end_lost(capture)
                self._on_lost(capture)
                self.save(capture)
            known.append(capture)
        return known

    def _read(self, path: Path) -> pb.Capture | None:
        try:
            if (path / RECORD).stat().st_size > MAX_RECORD_BYTES:
                raise ValueError("too long")
            text = (path / RECORD).read_bytes()
            capture = json_format.Parse(text, pb.Capture(), ignore_unknown_fields=True)  # written by a later version
            if capture.id != path.name:
                raise ValueError(f"it is of {capture.id[:64]!r}")
        except (OSError, ValueError, json_format.ParseError) as error:
            log.warning("record %s cannot be read and is left out: %s", path / RECORD, error)
            return None
        return capture

    def _make_room(self, needed_bytes: int, capture_id: str | None) -> None:
        total, _, free = self._disk_usage(self.folder)
        kept = []
        for path in self._captures():
            one, unwritten = self._kept(path, active=path.name == capture_id)
            kept.append(one)
            free -= unwritten
        tenant = "" if capture_id is None else self.tenant(capture_id)
        usage = Usage(total, free, self._unix_seconds())
        going, objection = captures_to_evict(kept, usage, needed_bytes, self._quota, tenant)
        for one in going:
            log.info("capture %s of %s makes room", one.name, one.tenant or "an unknown tenant")
            self._remove(one.name)
        if objection:
            raise CaptureError(f"{self.folder}: {objection}")

    def _remove(self, capture_id: str) -> None:
        shutil.rmtree(self._of(capture_id), ignore_errors=True)
        self._tenants.pop(capture_id, None)

    def _kept(self, path: Path, active: bool) -> tuple[Kept, int]:
        """With the bytes that are reserved and not written yet. A capture with a workspace is active."""
        workspace = _sizes(path / WORKSPACE)
        written = sum(workspace.values())
        reserved = max(written, sum(self._reserved.get(path.name, {}).values()))
        stored = _sizes(path)
        active = active or WORKSPACE in stored
        size = sum(stored.values()) - stored.get(WORKSPACE, 0) + reserved
        return Kept(path.name, _made_unix_seconds(path), size, active, self.tenant(path.name)), reserved - written

    def _captures(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if _is_capture(path)]
        except OSError as error:
            raise CaptureError(f"{self.folder} cannot be read: {error.strerror}") from error

    def _of(self, capture_id: str) -> Path:
        if not _ID.fullmatch(capture_id):
            raise CaptureError(f"no capture {capture_id[:64]!r}; `rankscope captures ls` lists them")
        return self.folder / capture_id


def _claim(folder: Path) -> int:
    try:
        return claim(folder)
    except FolderError as error:
        raise CaptureError(f"{error}; pass another --capture-dir") from error


def _end_lost(capture: pb.Capture) -> None:
    delivered = any(rank.state == pb.CAPTURE_STATE_ANALYSED for rank in capture.ranks)
    capture.state = pb.CAPTURE_STATE_ANALYSED if delivered else pb.CAPTURE_STATE_FAILED
    capture.notes.append(LOST)
    for rank in capture.ranks:
        if rank.state not in FINAL:
            rank.state, rank.error = pb.CAPTURE_STATE_FAILED, LOST


def _is_capture(path: Path) -> bool:
    """Only directories with a record of ours are removed: a caller may have chosen any name."""
    if _OURS.fullmatch(path.name):
        return path.is_dir()
    return _ID.fullmatch(path.name) is not None and (path / RECORD).is_file()


def _made_unix_seconds(path: Path) -> float:
    ours = _OURS.fullmatch(path.name)
    if ours is not None:
        return _seconds(ours[1])
    try:
        return (path / RECORD).stat().st_mtime
    except OSError:
        return 0.0  # just removed


def _seconds(stamp: str) -> float:
    try:
        return float(calendar.timegm(time.strptime(stamp, "%Y%m%d-%H%M%S")))
    except ValueError:
        return 0.0  # not created by us: removed first


def _sizes(folder: Path) -> dict[str, int]:
    try:
        return {child.name: _size(child) for child in folder.iterdir()}
    except OSError:
        return {}  # none, or just removed


def _size(path: Path) -> int:
    """On the disk, where a small file takes a whole block."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return 0
    return max(status.st_size, status.st_blocks * 512)


def _read_tenant(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return file.read(MAX_TENANT_BYTES).decode(errors="replace")
    except OSError:
        return ""  # of an earlier version
