"""A capture as tables and as a JSON object; following one to its end, and showing it while it runs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc
import msgspec
from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from rankscope.analysis.quantities import NOT_MEASURED, quantity
from rankscope.analysis.verdicts.verdict import ranks as ranks_text
from rankscope.cli.connection import CALL_SECONDS
from rankscope.cli.messages import CommandError, Exit, to_stderr
from rankscope.cli.terminal import Terminal
from rankscope.common.text import printable
from rankscope.operator.console.capture_answers import FINAL, capture_answer, delivered, state_word, what_happened
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

SUMMARY_FILE = "summary.json"
_STYLES = {
    pb.CAPTURE_STATE_ACCEPTED: "dim",
    pb.CAPTURE_STATE_ARMED: "cyan",
    pb.CAPTURE_STATE_RUNNING: "bold cyan",
    pb.CAPTURE_STATE_WRITTEN: "green",
    pb.CAPTURE_STATE_ANALYSED: "bold green",
    pb.CAPTURE_STATE_FAILED: "bold red",
    pb.CAPTURE_STATE_CANCELLED: "yellow",
}
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


def elsewhere(capture_id: str) -> str:
    """Arguments that a follow-up command needs: an operator's captures are named by namespace."""
    return " --connect HOST:PORT" if "/" in capture_id else ""


def is_complete(capture: pb.Capture) -> bool:
    """Whether every requested rank delivered."""
    return bool(capture.ranks) and len(delivered(capture)) == len(capture.ranks)


def tally(capture: pb.Capture) -> str:
    """`61 analysed, 2 running, 1 failed`"""
    states = Counter(entry.state for entry in capture.ranks)
    return ", ".join(f"{number} {state_word(state)}" for state, number in sorted(states.items(), reverse=True))


def to_object(
    capture: pb.Capture,
    files: Mapping[int, Sequence[Path]] | None = None,
    download_errors: Mapping[int, str] | None = None,
) -> dict[str, Any]:
    """As `--json` and summary.json have it; docs/captures.md describes the keys. `files` are those downloaded."""
    names = None if files is None else {rank: [str(path) for path in paths] for rank, paths in files.items()}
    made: dict[str, Any] = msgspec.to_builtins(capture_answer(capture, names, download_errors))
    return made


# Captures and their ranks as tables.


def make_console(*, stderr: bool = False) -> Terminal:
    return Terminal(stderr=stderr)


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


class LostError(CommandError):
    """The daemon went away and did not report how the capture ended."""

    status = Exit.UNREACHABLE


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


# Shows a running capture on stderr, because stdout is for the result: a live table on a terminal, otherwise one line
# per change.


MAX_ROWS = 16
_FAILED = (pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED)


class LiveProgress:
    """Removed at the end: the result replaces it."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._capture: pb.Capture | None = None
        self._download = ""
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> LiveProgress:
        self._live.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._live.stop()

    def show(self, capture: pb.Capture) -> None:
        self._capture = capture

    def say(self, text: str) -> None:
        self._console.print(Text(printable(text)))

    def downloading(self, done_bytes: int, total_bytes: int) -> None:
        self._download = f"fetching traces: {quantity(done_bytes, 'B')} of {quantity(total_bytes, 'B')}"

    def _render(self) -> RenderableType:
        capture = self._capture
        self._spinner.update(
            text=Text(f"{self._download or headline(capture)}  {time.monotonic() - self._began:.0f} s")
        )
        if capture is None or self._download:
            return self._spinner
        shown = rows(capture.ranks, min(MAX_ROWS, max(1, self._console.height - 6)))
        parts: list[RenderableType] = [self._spinner, state_table(shown)]
        if len(shown) < len(capture.ranks):
            parts.append(Text(f"… of {len(capture.ranks)} ranks: {tally(capture)}", style="dim"))
        return Group(*parts)


class LineProgress:
    def __init__(self) -> None:
        self._states: dict[int, int] = {}
        self._headline = ""
        self._tally = ""

    def __enter__(self) -> LineProgress:
        return self

    def __exit__(self, *problem: object) -> None:
        return

    def show(self, capture: pb.Capture) -> None:
        if not self._headline:
            self.say(headline(capture))
        changed: dict[tuple[int, str], list[int]] = {}
        for entry in capture.ranks:
            if self._states.get(entry.rank) != entry.state:
                self._states[entry.rank] = entry.state
                # For many ranks: one line per cause of failure, and a tally of the others.
                if len(capture.ranks) <= MAX_ROWS or entry.state in _FAILED:
                    changed.setdefault((entry.state, what_happened(entry)), []).append(entry.rank)
        for (state, words), numbers in changed.items():
            self.say(f"{ranks_text(numbers)}: {state_word(state)}{f' ({words})' if words else ''}")
        if len(capture.ranks) > MAX_ROWS and tally(capture) != self._tally:
            self._tally = tally(capture)
            self.say(self._tally)
        text = headline(capture)
        if self._headline and text != self._headline and capture.state not in FINAL:
            self.say(text)
        self._headline = text

    def say(self, text: str) -> None:
        to_stderr(text)

    def downloading(self, done_bytes: int, total_bytes: int) -> None:
        return


Progress = LiveProgress | LineProgress


def make_progress(console: Terminal) -> Progress:
    return LiveProgress(console) if console.is_terminal else LineProgress()


def headline(capture: pb.Capture | None) -> str:
    if capture is None:
        return "asking"
    if not capture.ranks:
        waits = capture.notes[0] if capture.notes else "is about to begin"
        return printable(f"capture {capture.id} of {capture.job} {waits}")
    text = f"capture {capture.id} of {ranks_text([entry.rank for entry in capture.ranks])} of {capture.job}"
    if delivered(capture) and capture.state not in FINAL and all(entry.state in FINAL for entry in capture.ranks):
        text += ": recorded; comparing the ranks, and step times before and after"
    return printable(text)


def rows(entries: Sequence[pb.RankCapture], most: int) -> list[pb.RankCapture]:
    """All of them, or for many ranks the most relevant: failed ones, then the least advanced."""
    if len(entries) <= most:
        return list(entries)
    ordered = sorted(entries, key=lambda entry: (entry.state not in _FAILED, entry.state, entry.rank))
    return sorted(ordered[:most], key=lambda entry: entry.rank)
