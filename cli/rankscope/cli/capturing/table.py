"""Captures and their ranks as tables."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from rankscope.analysis.drawing.quantities import NOT_MEASURED, quantity
from rankscope.analysis.drawing.svg import printable
from rankscope.cli.capturing.wording import delivered, state_word, what_happened
from rankscope.v1 import capture_service_pb2 as pb

# A pipe has no width; what reads it wants whole lines.
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


def make_console(*, stderr: bool = False) -> Console:
    console = Console(stderr=stderr, highlight=False)
    return console if console.is_terminal else Console(stderr=stderr, highlight=False, width=_PIPE_COLUMNS)


def state_table(entries: Iterable[pb.RankCapture]) -> Table:
    """While it runs: how far each rank is."""
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
    """Words of a daemon or a container are no markup; only the last cell may be empty."""
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
