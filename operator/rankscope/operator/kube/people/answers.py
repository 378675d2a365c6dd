"""A Capture object as CaptureService tells it: what the object says, and what the daemons of its nodes add. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from rankscope.operator.kube.captures.objects import CaptureObject
from rankscope.operator.kube.resources import CapturedRank
from rankscope.v1 import capture_service_pb2 as pb

WINDOWS_MOST = 20
NOTES_MOST = 32
NOTE_CHARACTERS = 1000


def answer(thing: CaptureObject, told: Mapping[str, pb.Capture] | None = None) -> pb.Capture:
    """`told` is what daemons said, by node; they are believed about ranks that ran there, and about nothing else."""
    status = thing.status
    capture = pb.Capture(
        id=f"{thing.namespace}/{thing.name}",
        job=thing.namespace if thing.spec is None else thing.job,
        state=state_of(thing),
        reason=thing.spec.reason if thing.spec is not None and isinstance(thing.spec.reason, str) else "",
        requested_unix_millis=round(thing.created_unix_seconds * 1000),
        requested_by=thing.requested_by,
        ranks=[_rank(rank, told or {}) for rank in status.ranks],
    )
    if isinstance(status.start_skew_ms, float):
        capture.start_skew_millis = status.start_skew_ms
    said = [one for one in (told or {}).values() if one.HasField("join")]
    if len(said) == 1 and len({rank.node for rank in status.ranks}) == 1:
        capture.join.CopyFrom(said[0].join)
    else:
        # Of several nodes, the operator's own words: each daemon has compared its own ranks only.
        capture.notes.extend(status.findings[:NOTES_MOST])
    if isinstance(status.message, str) and status.message and not any(rank.error for rank in capture.ranks):
        capture.notes.append(status.message)
    return capture


def state_of(thing: CaptureObject) -> pb.CaptureState.ValueType:
    states = [_state(rank.state) for rank in thing.status.ranks]
    if thing.is_finished:
        if pb.CAPTURE_STATE_ANALYSED in states:
            return pb.CAPTURE_STATE_ANALYSED
        is_cancelled = thing.status.phase == "Cancelled"
        return pb.CAPTURE_STATE_CANCELLED if is_cancelled else pb.CAPTURE_STATE_FAILED
    return min((state for state in states if state < pb.CAPTURE_STATE_ANALYSED), default=pb.CAPTURE_STATE_ACCEPTED)


def _rank(rank: CapturedRank, told: Mapping[str, pb.Capture]) -> pb.RankCapture:
    node = rank.node if isinstance(rank.node, str) else ""
    said = next((one for one in told.get(node, pb.Capture()).ranks if one.rank == rank.rank), None)
    entry = pb.RankCapture(
        rank=rank.rank,
        node=node,
        backend=rank.backend if isinstance(rank.backend, str) else "",
        state=_state(rank.state),
        error=rank.error if isinstance(rank.error, str) else "",
        bytes=rank.bytes if isinstance(rank.bytes, int) else 0,
    )
    if isinstance(rank.steps, int):
        entry.steps = min(rank.steps, 2**32 - 1)
    if isinstance(rank.start_unix_ms, int):
        entry.start_unix_millis = rank.start_unix_ms
    if isinstance(rank.uri, str):
        # A path on the node is no address for anybody else.
        entry.artifact = rank.uri
        entry.uri = rank.uri if "://" in rank.uri else ""
    if said is not None:
        _add(entry, said)
    return entry


def _add(entry: pb.RankCapture, said: pb.RankCapture) -> None:
    """Who ran where and how it ended is in the object, and not a daemon's to tell here."""
    if said.HasField("step_times"):
        entry.step_times.CopyFrom(said.step_times)
    if said.HasField("summary"):
        entry.summary.CopyFrom(said.summary)
    entry.artifact = said.artifact or entry.artifact
    entry.pid = said.pid
    entry.notes.extend(note[:NOTE_CHARACTERS] for note in said.notes[:NOTES_MOST])
    entry.more_windows.extend(said.more_windows[:WINDOWS_MOST])


def _state(word: str) -> pb.CaptureState.ValueType:
    try:
        return pb.CaptureState.Value(f"CAPTURE_STATE_{word.upper()}")
    except ValueError:
        return pb.CAPTURE_STATE_UNSPECIFIED
