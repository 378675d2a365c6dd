"""A capture as text: states, what each rank did, and the sentences at the end."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.message import Message
from rich.table import Table
from rich.text import Text

from rankscope.analysis.quantities import NOT_MEASURED, count, quantity
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.analysis.verdicts.verdict import ranks as ranks_text
from rankscope.cli.capture_client.connection import CALL_SECONDS
from rankscope.cli.job_tables import headline
from rankscope.cli.terminal import Terminal
from rankscope.common.text import printable
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

# A process that CUPTI stays attached to is 19 to 31 % slower; a smaller difference is mostly a busy machine.
SLOWER_RATIO = 1.15
_BEHIND = {
    pb.CAPTURE_STATE_ACCEPTED: "waits for the process",
    pb.CAPTURE_STATE_ARMED: "has its orders; all begin together",
    pb.CAPTURE_STATE_RUNNING: "records",
    pb.CAPTURE_STATE_WRITTEN: "recorded; being checked and analysed",
}
SUMMARY_FILE = "summary.json"
# A pipe has no width; its reader expects whole lines.
_PIPE_COLUMNS = 2000
_STYLES = {
    pb.CAPTURE_STATE_ACCEPTED: "dim",
    pb.CAPTURE_STATE_ARMED: "cyan",
    pb.CAPTURE_STATE_RUNNING: "bold cyan",
    pb.CAPTURE_STATE_WRITTEN: "green",
    pb.CAPTURE_STATE_ANALYSED: "bold green",
    pb.CAPTURE_STATE_FAILED: "bold red",
    pb.CAPTURE_STATE_CANCELLED: "yellow",
}
FINAL = frozenset({pb.CAPTURE_STATE_ANALYSED, pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED})
# A restarting daemon is back within seconds.
RECONNECT_SECONDS = 30.0
POLL_SECONDS = 0.5
# Answers rather than connection errors: the operator reviews the token again during a capture.
REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.UNAUTHENTICATED,
        grpc.StatusCode.PERMISSION_DENIED,
    }
)


def state_word(state: int) -> str:
    """`armed`"""
    names: dict[int, str] = {value.number: value.name for value in pb.CaptureState.DESCRIPTOR.values}
    return names.get(state, "CAPTURE_STATE_UNSPECIFIED").removeprefix("CAPTURE_STATE_").lower()


def elsewhere(capture_id: str) -> str:
    """Arguments that a follow-up command needs: the operator's captures are named by namespace."""
    return " --operator HOST:PORT" if "/" in capture_id else ""


def delivered(capture: pb.Capture) -> list[pb.RankCapture]:
    return [entry for entry in capture.ranks if entry.state == pb.CAPTURE_STATE_ANALYSED]


def is_complete(capture: pb.Capture) -> bool:
    """Whether every requested rank delivered."""
    return bool(capture.ranks) and len(delivered(capture)) == len(capture.ranks)


def what_happened(entry: pb.RankCapture) -> str:
    """The cause of a failure, or what the rank waits for."""
    return printable(entry.error) or _BEHIND.get(entry.state, "")


def notes(capture: pb.Capture) -> list[str]:
    """Each note once, with its ranks; notes on the whole capture first."""
    said: dict[str, list[int]] = {}
    for entry in capture.ranks:
        for note in entry.notes:
            said.setdefault(printable(note), []).append(entry.rank)
    return [*(printable(note) for note in capture.notes), *(f"{ranks_text(who)}: {note}" for note, who in said.items())]


def tally(capture: pb.Capture) -> str:
    """`61 analysed, 2 running, 1 failed`"""
    states = Counter(entry.state for entry in capture.ranks)
    return ", ".join(f"{number} {state_word(state)}" for state, number in sorted(states.items(), reverse=True))


def outcome(capture: pb.Capture) -> str:
    """`4 of 4 ranks delivered, 3 steps each, begun within 2 ms of each other`"""
    here = delivered(capture)
    words = [f"{len(here)} of {count(len(capture.ranks), 'rank')} delivered"]
    steps = {entry.steps if entry.HasField("steps") else None for entry in here}
    known = sorted(number for number in steps if number is not None)
    if known and steps == set(known):
        words.append(f"{count(known[0], 'step')} each" if len(known) == 1 else f"{known[0]} to {known[-1]} steps")
    if capture.HasField("start_skew_millis"):
        words.append(f"begun within {quantity(capture.start_skew_millis / 1000, 's')} of each other")
    return ", ".join(words)


def findings(capture: pb.Capture) -> list[str]:
    """Findings of the traces, the most important first; empty if nothing was analysed."""
    said = [_verdict(capture.join)] if capture.HasField("join") and capture.join.verdict else []
    with_findings = [entry for entry in delivered(capture) if entry.summary.findings]
    if with_findings:
        culprit = next((one for one in with_findings if one.rank in capture.join.culprits), with_findings[0])
        said.append(f"rank {culprit.rank}: {printable(culprit.summary.findings[0])}")
    return said


def slowdowns(capture: pb.Capture) -> list[str]:
    """`ranks 0 and 2 took longer for a step after the capture: …`; empty if none did."""
    slower = [
        entry
        for entry in capture.ranks
        if entry.step_times.HasField("before_seconds")
        and entry.step_times.HasField("after_seconds")
        and entry.step_times.after_seconds > SLOWER_RATIO * entry.step_times.before_seconds
    ]
    if not slower:
        return []
    worst = max(slower, key=lambda entry: entry.step_times.after_seconds / entry.step_times.before_seconds).step_times
    who = ranks_text([entry.rank for entry in slower])
    return [
        f"{who} took longer for a step after the capture: {quantity(worst.before_seconds, 's')} before, "
        f"{quantity(worst.after_seconds, 's')} in the seconds after"
    ]


def sentence(capture: pb.Capture) -> str:
    """The main sentence, for scripts and reports."""
    return "; ".join([outcome(capture), *findings(capture)[:1]])


def _verdict(join: pb.JoinSummary) -> str:
    """About what was recorded: a few steps do not prove how the job behaves all day."""
    reason = printable(join.reason)
    try:
        kind = Kind(join.verdict)
    except ValueError:
        return f"{printable(join.verdict)}: {reason}"
    if kind is Kind.INSUFFICIENT_DATA:
        return f"the ranks cannot be compared: {reason}"
    if kind is Kind.HEALTHY:
        return "in these steps no rank stands out"
    culprits = tuple(sorted(join.culprits))
    text = headline(Verdict(kind=kind, reason=reason, culprits=culprits))
    # The reason may begin with the rank's name, which the line already has.
    unsure = " (low confidence)" if join.confidence == "low" else ""
    return f"in these steps {text}{unsure}" + _because(
        reason.removeprefix(f"{ranks_text(culprits)}: ") if culprits else reason
    )


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""


# A capture as a JSON object. docs/captures.md describes the keys; null means "not measured" or "none".


def to_object(
    capture: pb.Capture,
    files: Mapping[int, Sequence[Path]] | None = None,
    download_errors: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """`files` are the downloaded files, by rank, first window first; without them, the paths at the daemon."""
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
    """A flat message; the field names are the keys."""
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


# Captures and their ranks as tables.


def make_console(*, stderr: bool = False) -> Terminal:
    return Terminal(stderr=stderr, pipe_columns=_PIPE_COLUMNS)


def state_table(entries: Iterable[pb.RankCapture]) -> Table:
    """While it runs: the state of each rank."""
    table = _table("rank", "pid", "by", "state", "")
    for entry in entries:
        pid = str(entry.pid or NOT_MEASURED)
        _add(table, str(entry.rank), pid, printable(entry.backend), _state(entry), what_happened(entry))
    return table


def result_table(capture: pb.Capture, files: Mapping[int, Sequence[Path]] | None = None) -> Table:
    """At the end: what each rank did."""
    nodes = len({entry.node for entry in capture.ranks}) > 1
    timed = any(entry.HasField("step_times") for entry in capture.ranks)
    node_column = ("node",) if nodes else ()
    time_columns = ("before", "during", "after") if timed else ()
    table = _table("rank", *node_column, "by", "state", "steps", "start", "size", *time_columns, "")
    starts = [entry.start_unix_millis for entry in capture.ranks if entry.HasField("start_unix_millis")]
    for entry in capture.ranks:
        paths = files.get(entry.rank, ()) if files else ()
        more = f" and {len(paths) - 1} more" if len(paths) > 1 else ""
        words = f"{paths[0].name}{more}" if paths else what_happened(entry)
        _add(
            table,
            str(entry.rank),
            *((printable(entry.node),) if nodes else ()),
            printable(entry.backend),
            _state(entry),
            str(entry.steps) if entry.HasField("steps") else NOT_MEASURED,
            f"+{entry.start_unix_millis - min(starts)} ms" if entry.HasField("start_unix_millis") else NOT_MEASURED,
            quantity(entry.bytes, "B") if entry.bytes else NOT_MEASURED,
            *(_step_times(entry.step_times) if timed else ()),
            words,
        )
    return table


def list_table(captures: Sequence[pb.Capture]) -> Table:
    table = _table("capture", "asked", "job", "state", "ranks", "skew", "why")
    for capture in captures:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(capture.requested_unix_millis / 1000))
        skew = f"{capture.start_skew_millis:g} ms" if capture.HasField("start_skew_millis") else NOT_MEASURED
        ranks = f"{len(delivered(capture))}/{len(capture.ranks)}"
        state = Text(state_word(capture.state), style=_STYLES.get(capture.state, ""))
        _add(table, printable(capture.id), when, printable(capture.job), state, ranks, skew, printable(capture.reason))
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(columns):
        is_last = number == len(columns) - 1
        is_text = is_last or name in ("by", "state", "node", "capture", "asked", "job")
        table.add_column(
            name,
            justify="left" if is_text else "right",
            no_wrap=not is_last,
            overflow="fold" if is_last else "ellipsis",
        )
    return table


def _add(table: Table, *cells: str | Text) -> None:
    """Text of a daemon or a container is not markup; only the last cell may be empty."""
    *first, last = (Text(cell) if isinstance(cell, str) else cell for cell in cells)
    table.add_row(*(cell or Text(NOT_MEASURED) for cell in first), last)


def _state(entry: pb.RankCapture) -> Text:
    return Text(state_word(entry.state), style=_STYLES.get(entry.state, ""))


def _step_times(times: pb.StepTimes) -> list[str]:
    return [
        quantity(times.before_seconds if times.HasField("before_seconds") else None, "s"),
        quantity(times.during_seconds if times.HasField("during_seconds") else None, "s"),
        quantity(times.after_seconds if times.HasField("after_seconds") else None, "s"),
    ]


# Starts a capture and follows it to the end, across restarts of the daemon.


class LostError(Exception):
    """The daemon went away and did not report how the capture ended."""


def follow(
    stub: CaptureServiceStub, request: pb.StartCaptureRequest, warn: Callable[[str], None]
) -> Iterator[pb.Capture]:
    """The capture at every change; the last one is final. Raises grpc.RpcError if it is refused or unreachable."""
    capture_id = ""
    try:
        for response in stub.StartCapture(request):
            capture_id = response.capture.id
            yield response.capture
            if response.capture.state in FINAL:
                return
    except grpc.RpcError as error:
        if not capture_id or error.code() in REFUSALS:
            raise
        warn(f"the connection was lost ({error.code().name}); asking again for capture {capture_id}")
    if not capture_id:
        raise LostError("the daemon said nothing about the capture; `rankscope captures ls` shows whether there is one")
    yield from follow_again(stub, capture_id)


def follow_again(
    stub: CaptureServiceStub, capture_id: str, is_wanted: Callable[[], bool] = lambda: True
) -> Iterator[pb.Capture]:
    """The capture now and at every change, by repeated requests, until it is final or no longer wanted."""
    seen: pb.Capture | None = None
    silent_since = time.monotonic()
    while is_wanted():
        try:
            response = stub.GetCapture(pb.GetCaptureRequest(id=capture_id), timeout=CALL_SECONDS)
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise LostError(
                    f"the daemon was restarted and does not know capture {capture_id} any more; start another"
                ) from error
            if error.code() in REFUSALS:
                raise
            if time.monotonic() - silent_since > RECONNECT_SECONDS:
                raise LostError(
                    f"the daemon has been away for {RECONNECT_SECONDS:g} s; when it is back, "
                    f"`rankscope captures show {capture_id}` shows how the capture ended"
                ) from error
        else:
            silent_since = time.monotonic()
            if response.capture != seen:
                seen = response.capture
                yield seen
            if seen.state in FINAL:
                return
        time.sleep(POLL_SECONDS)
