"""A capture as an object for scripts. Keys are described in docs/captures.md; null is "not measured" or "none"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from rankscope.cli.capturing.wording import sentence, state_word
from rankscope.v1 import capture_service_pb2 as pb

SUMMARY_FILE = "summary.json"


def to_object(
    capture: pb.Capture,
    files: Mapping[int, Sequence[Path]] | None = None,
    download_errors: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """`files` are those fetched to this machine, by rank, the first window's first; without them, files are where the
    daemon keeps them."""
    ranks = [_rank(entry, files, (download_errors or {}).get(entry.rank, "")) for entry in capture.ranks]
    return {
        "id": capture.id,
        "job": capture.job,
        "state": state_word(capture.state),
        "reason": capture.reason,
        "requested_unix_ms": capture.requested_unix_millis,
        "requested_by": capture.requested_by,
        "ranks": ranks,
        "start_skew_ms": _value(capture, "start_skew_millis"),
        "summary": {
            "sentence": sentence(capture),
            "join": _join(capture.join) if capture.HasField("join") else None,
            "ranks": [{"rank": rank["rank"], **rank["summary"]} for rank in ranks if rank["summary"] is not None],
        },
        "notes": list(capture.notes),
    }


def _rank(entry: pb.RankCapture, files: Mapping[int, Sequence[Path]] | None, download_error: str) -> dict[str, Any]:
    if files is None:
        names = [entry.artifact, *(window.artifact for window in entry.more_windows)] if entry.artifact else []
    else:
        names = [str(path) for path in files.get(entry.rank, ())]
    return {
        "rank": entry.rank,
        "node": entry.node,
        "pid": entry.pid or None,
        "backend": entry.backend or None,
        "state": state_word(entry.state),
        "error": entry.error or download_error or None,
        "file": names[0] if names else None,
        "more_files": names[1:],
        "bytes": entry.bytes,
        "uri": entry.uri or None,
        "start_unix_ms": _value(entry, "start_unix_millis"),
        "steps": _value(entry, "steps"),
        "step_times": _fields(entry.step_times) if entry.HasField("step_times") else None,
        "notes": list(entry.notes),
        "summary": _fields(entry.summary) if entry.HasField("summary") else None,
    }


def _join(join: pb.JoinSummary) -> dict[str, Any]:
    last_arrivals = {str(rank): number for rank, number in sorted(join.last_arrivals.items())}
    return {**_fields(join), "culprits": sorted(join.culprits), "last_arrivals": last_arrivals}


def _fields(message: Message) -> dict[str, Any]:
    """A flat message; the contract's names are the keys."""
    return {field.name: _plain(message, field.name) for field in message.DESCRIPTOR.fields}


def _plain(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        return dict(sorted(value.items()))
    return list(value) if field.is_repeated else _value(message, name)


def _value(message: Message, name: str) -> Any:
    field = message.DESCRIPTOR.fields_by_name[name]
    return None if field.has_presence and not message.HasField(name) else getattr(message, name)
