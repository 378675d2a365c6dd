"""Shows a running capture on stderr, because stdout is for the result: a live table on a terminal, otherwise one line
for every change."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol

from rich.console import Group, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from rankscope.analysis.quantities import quantity
from rankscope.analysis.verdicts.verdict import ranks as ranks_text
from rankscope.cli.capture_client.output import FINAL, delivered, state_table, state_word, tally, what_happened
from rankscope.cli.messages import to_stderr
from rankscope.cli.terminal import Terminal
from rankscope.common.text import printable
from rankscope.v1 import capture_service_pb2 as pb

MOST_ROWS = 16
_FAILED = (pb.CAPTURE_STATE_FAILED, pb.CAPTURE_STATE_CANCELLED)


class Progress(Protocol):
    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None: ...

    def show(self, capture: pb.Capture) -> None: ...

    def say(self, text: str) -> None: ...

    def downloading(self, done_bytes: int, total_bytes: int) -> None: ...


def make_progress(console: Terminal) -> Progress:
    return LiveProgress(console) if console.is_terminal else LineProgress()


class LiveProgress:
    """Removed at the end: the result replaces it."""

    def __init__(self, console: Terminal) -> None:
        self._console = console
        self._capture: pb.Capture | None = None
        self._download = ""
        self._began = time.monotonic()
        self._spinner = Spinner("dots")
        self._live = Live(console=console, transient=True, refresh_per_second=8, get_renderable=self._render)

    def __enter__(self) -> Progress:
        self._live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._live.__exit__(kind, error, traceback)

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
        shown = rows(capture.ranks, min(MOST_ROWS, max(1, self._console.height - 6)))
        parts: list[RenderableType] = [self._spinner, state_table(shown)]
        if len(shown) < len(capture.ranks):
            parts.append(Text(f"… of {len(capture.ranks)} ranks: {tally(capture)}", style="dim"))
        return Group(*parts)


class LineProgress:
    def __init__(self) -> None:
        self._states: dict[int, int] = {}
        self._headline = ""
        self._tally = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        return

    def show(self, capture: pb.Capture) -> None:
        if not self._headline:
            self.say(headline(capture))
        changed: dict[tuple[int, str], list[int]] = {}
        for entry in capture.ranks:
            if self._states.get(entry.rank) != entry.state:
                self._states[entry.rank] = entry.state
                # For many ranks: one line per cause of failure, and a tally of the others.
                if len(capture.ranks) <= MOST_ROWS or entry.state in _FAILED:
                    changed.setdefault((entry.state, what_happened(entry)), []).append(entry.rank)
        for (state, words), numbers in changed.items():
            self.say(f"{ranks_text(numbers)}: {state_word(state)}{f' ({words})' if words else ''}")
        if len(capture.ranks) > MOST_ROWS and tally(capture) != self._tally:
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
