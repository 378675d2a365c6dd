"""Detects the format of a file of collective timings and reads it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rankscope.analysis.collectives.alpha_beta import Observations
from rankscope.analysis.collectives.timings import UnreadableError, read_text
from rankscope.analysis.traces.collective_timings import observe_traces
from rankscope.cli.messages import overwrite
from rankscope.cli.trace_report.files import Progress, load_traces

_HEAD_BYTES = 64 << 10
_LARGEST_TEXT_BYTES = 256 << 20
_TRACE_MARKS = (b'"traceEvents"', b'"schemaVersion"', b'"ph"')


class FileError(Exception):
    """What is wrong with which file, as a message for the user."""

    def __init__(self, path: object, reason: str) -> None:
        super().__init__(f"{path}: {reason}")


@dataclass(frozen=True)
class ReadCollectives:
    observations: Observations
    source: str  # traces or text
    notes: tuple[str, ...]


def read_collectives(paths: Sequence[str], *, op: str | None = None, ranks: int | None = None) -> ReadCollectives:
    """Raises FileError. Broken traces among many are left out and named in the notes."""
    are_traces = [_is_trace(path) for path in paths]
    if all(are_traces):
        return _read_traces(paths, ranks)
    if any(are_traces):
        odd = paths[are_traces.index(not are_traces[0])]
        raise FileError(odd, "traces and tables of collectives cannot be read together; analyse them one by one")
    parts = [_read_text(path, op, ranks) for path in paths]
    return ReadCollectives(parts[0] if len(parts) == 1 else _together(paths, parts), "text", ())


def _is_trace(path: str) -> bool:
    """Directories and globs are traces; a file is a trace if it begins like one."""
    place = Path(path)
    try:
        if not place.is_file():
            return True  # the trace reader reports what is wrong with it
        with place.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError) as error:
        raise FileError(path, _os_reason(error)) from None
    if head.startswith(b"\x1f\x8b"):
        return True
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") and any(mark in head for mark in _TRACE_MARKS)


def _read_text(path: str, op: str | None, ranks: int | None) -> Observations:
    place = Path(path)
    try:
        if place.stat().st_size > _LARGEST_TEXT_BYTES:
            raise FileError(path, f"is larger than {_LARGEST_TEXT_BYTES >> 20} MiB; cut it into pieces")
        return read_text(place.read_text(encoding="utf-8"), name=place.stem, op=op, ranks=ranks)
    except UnicodeDecodeError:
        raise FileError(path, "is no text; give CSV, JSON, the output of nccl-tests, or torch traces") from None
    except OSError as error:
        raise FileError(path, _os_reason(error)) from None
    except UnreadableError as error:
        raise FileError(path, str(error)) from None


def _together(paths: Sequence[str], parts: list[Observations]) -> Observations:
    """Groups of different files are different groups."""
    groups: list[str] = []
    numbers = []
    for path, part in zip(paths, parts, strict=True):
        numbers.append(part.group + len(groups))
        groups += [" ".join(word for word in (Path(path).stem, group) if word) for group in part.groups]
    return Observations(
        group=np.concatenate(numbers),
        kind=np.concatenate([part.kind for part in parts]),
        ranks=np.concatenate([part.ranks for part in parts]),
        bytes=np.concatenate([part.bytes for part in parts]),
        seconds=np.concatenate([part.seconds for part in parts]),
        time_seconds=np.concatenate([part.time_seconds for part in parts]),
        groups=tuple(groups),
        in_order=all(part.in_order for part in parts),
    )


def _read_traces(paths: Sequence[str], ranks: int | None) -> ReadCollectives:
    loaded = load_traces(paths, progress=_show if sys.stderr.isatty() else None)
    overwrite("")
    if not loaded.traces:
        first = loaded.broken[0]
        more = f" (and {len(loaded.broken) - 1} more files)" if len(loaded.broken) > 1 else ""
        raise FileError(first.path, f"{first.reason}{more}")
    notes = [f"{broken.path} left out: {broken.reason}" for broken in loaded.broken]
    known = {one.trace.rank: one.trace for one in loaded.traces if one.trace.rank is not None}
    traces = known if known else {0: loaded.traces[0].trace}
    observed = observe_traces(traces, ranks=ranks)
    if not len(observed.observations):
        raise FileError(paths[0], "holds no collective that was timed; trace a job of several ranks with NCCL or gloo")
    return ReadCollectives(observed.observations, "traces", (*notes, *observed.notes))


def _show(progress: Progress) -> None:
    share = progress.bytes_done / max(progress.bytes, 1)
    overwrite(f"reading {progress.files} files: {share:.0%}")


def _os_reason(error: OSError | ValueError) -> str:
    words = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return f"cannot be read: {words[:1].lower()}{words[1:]}"
