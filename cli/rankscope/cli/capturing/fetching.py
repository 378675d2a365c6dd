"""Puts a capture's artifacts and its summary into a directory, and says where they are and what to do with them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.cli.capturing.as_json import SUMMARY_FILE, to_object
from rankscope.cli.capturing.downloading import DownloadError, artifacts, download, stem
from rankscope.cli.capturing.progress import Progress
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub


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
) -> Fetched:
    """One rank's trouble is not the others'. Raises DownloadError if not even the summary can be written."""
    files: dict[int, Sequence[Path]] = {}
    errors: dict[int, str] = {}
    total = sum(artifact.size_bytes for entry in entries for artifact in artifacts(capture, entry))
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
    """`rankscope analyze trace DIR`, or what else suits the files."""
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
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(to_object(capture, fetched.files, fetched.errors), indent=2) + "\n")
        part.replace(path)
    except OSError as error:
        raise DownloadError(f"{path}: {error.strerror}; make room or name another --output") from error
