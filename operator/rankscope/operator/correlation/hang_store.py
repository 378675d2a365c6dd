"""Reports of hangs as JSON, bounded in number, bytes and age: in a private folder, or where the replicas of an operator
share them."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Protocol

import msgspec

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.common.private_folder import FolderError, claim, write_whole
from rankscope.v1 import job_service_pb2 as pb

log = logging.getLogger(__name__)

MAX_REPORTS = 100
REPORT_BYTES: Final = 1 << 20
TOTAL_BYTES = 32 << 20
KEPT_SECONDS = 30 * 86400.0
# Another replica may have written meanwhile; a list costs the API server its contents.
RELOAD_SECONDS = 5.0
_NAME = re.compile(r"h-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}")
_REPORTS = msgspec.json.Decoder(HangReport)  # on import: two threads that are the first to decode one would crash


class ReportFiles(Protocol):
    """Contents by name. All methods raise OSError."""

    is_shared: bool  # others may write them, too

    def all(self) -> Iterator[tuple[str, bytes]]: ...

    def read(self, name: str) -> bytes: ...

    def write(self, name: str, content: bytes) -> None:
        """All of it, or nothing."""

    def remove(self, name: str) -> None:
        """It may be gone already."""

    def close(self) -> None: ...


class FolderFiles:
    """One process at a time. Without a folder, or with one that cannot be used, until the process ends."""

    is_shared = False

    def __init__(self, folder: Path | None) -> None:
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        try:
            self._folder, self._descriptor = self._claimed(folder)
        except FolderError as error:
            log.warning("%s; reports of hangs are kept only until this process ends", error)
            self._folder, self._descriptor = self._claimed(None)

    def all(self) -> Iterator[tuple[str, bytes]]:
        for path in sorted(self._folder.glob("h-*.json")):
            with path.open("rb") as opened:
                yield path.stem, opened.read(REPORT_BYTES + 1)

    def read(self, name: str) -> bytes:
        return self._path(name).read_bytes()

    def write(self, name: str, content: bytes) -> None:
        write_whole(self._path(name), content)

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        os.close(self._descriptor)
        if self._temporary is not None:
            self._temporary.cleanup()

    def _claimed(self, folder: Path | None) -> tuple[Path, int]:
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="rankscope-hangs-")
            folder = Path(self._temporary.name)
        return folder, claim(folder)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.json"


class HangStore:
    """Thread-safe."""

    def __init__(
        self,
        files: ReportFiles,
        unix_seconds: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._files = files
        self._unix_seconds = unix_seconds
        self._monotonic = monotonic
        self._lock = threading.Lock()
        # Without places and collectives, and the size; by id, the oldest first.
        self._kept: dict[str, tuple[HangReport, int]] = {}
        self._loaded_at = float("-inf")

    def close(self) -> None:
        self._files.close()

    def keep(self, report: HangReport) -> None:
        """A report with the same id is replaced. Raises OSError."""
        content = msgspec.json.encode(report)
        if len(content) > REPORT_BYTES:
            raise OSError(f"the report has {len(content)} bytes; {REPORT_BYTES} are the most")
        with self._lock:
            self._load()
            self._files.write(_name(report.id), content)
            self._kept[report.id] = (_summary(report), len(content))
            self._remove_oldest()

    def see(self, report_id: str, unix_seconds: float) -> None:
        """The hang stands. What is written knows it only when the report is kept again."""
        with self._lock:
            if report_id in self._kept:
                report, size = self._kept[report_id]
                self._kept[report_id] = msgspec.structs.replace(report, seen_unix_seconds=unix_seconds), size

    def summaries(self, is_wanted: Callable[[str], bool]) -> list[HangReport]:
        """Of runs with such names, without places and collectives; the latest first."""
        with self._lock:
            self._load()
            self._remove_oldest()
            return [report for report, _ in reversed(self._kept.values()) if is_wanted(report.run)]

    def listed(self, is_wanted: Callable[[str], bool]) -> pb.ListHangsResponse:
        return pb.ListHangsResponse(
            hangs=[
                pb.HangSummary(
                    id=report.id,
                    run=report.run,
                    headline=report.headline,
                    began_unix_nanos=int(report.began_unix_seconds * 1e9),
                    made_unix_nanos=int(report.made_unix_seconds * 1e9),
                    ended_unix_nanos=int((report.ended_unix_seconds or 0.0) * 1e9),
                    until_unix_nanos=int(report.until_unix_seconds * 1e9),
                )
                for report in self.summaries(is_wanted)
            ]
        )

    def find(self, report_id: str) -> HangReport | None:
        """None: there is none, or it cannot be read any more."""
        with self._lock:
            self._load()
            if report_id not in self._kept:
                return None
            try:
                found = _REPORTS.decode(self._files.read(_name(report_id)))
            except (OSError, msgspec.MsgspecError) as error:
                log.warning("the report of a hang %s cannot be read: %s", report_id, error)
                return None
            if found.id != report_id:
                return None
            summary, _ = self._kept[report_id]
            return msgspec.structs.replace(found, seen_unix_seconds=summary.seen_unix_seconds)

    def _load(self) -> None:
        now = self._monotonic()
        if now - self._loaded_at < (RELOAD_SECONDS if self._files.is_shared else float("inf")):
            return
        self._loaded_at = now  # an API server that refuses is not asked at once again
        found: dict[str, tuple[HangReport, int]] = {}
        try:
            for name, content in self._files.all():
                try:
                    report = _REPORTS.decode(content)
                    if _name(report.id) != name:
                        raise ValueError("its name is not the report's")
                    found[report.id] = (_summary(report), len(content))
                except (ValueError, msgspec.MsgspecError) as error:
                    log.warning("the report of a hang %s is not read: %s; remove it", name, error)
        except OSError as error:
            log.warning("reports of hangs cannot be listed: %s", error)
            return
        self._kept = dict(sorted(found.items(), key=lambda item: item[1][0].made_unix_seconds))

    def _remove_oldest(self) -> None:
        oldest = self._unix_seconds() - KEPT_SECONDS
        size = sum(size for _, size in self._kept.values())
        for report, own in list(self._kept.values()):
            if len(self._kept) <= MAX_REPORTS and size <= TOTAL_BYTES and report.made_unix_seconds >= oldest:
                break
            with contextlib.suppress(OSError):
                self._files.remove(_name(report.id))
            del self._kept[report.id]
            size -= own


def _name(report_id: str) -> str:
    name = report_id.rpartition("/")[2]
    if _NAME.fullmatch(name) is None:
        raise ValueError(f"not the id of a report: {report_id[:100]!r}")
    return name


def _summary(report: HangReport) -> HangReport:
    return msgspec.structs.replace(report, places=(), collectives=(), gaps=(), problems=())
