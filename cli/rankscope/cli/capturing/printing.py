"""The end of a capture on a terminal: what each rank did, then the sentences that matter."""

from __future__ import annotations

from rich.text import Text

from rankscope.analysis.drawing.quantities import count, quantity
from rankscope.analysis.drawing.svg import printable
from rankscope.cli.capturing.fetching import Fetched, next_steps
from rankscope.cli.capturing.following import FINAL
from rankscope.cli.capturing.table import make_console, result_table
from rankscope.cli.capturing.wording import (
    delivered,
    elsewhere,
    findings,
    is_complete,
    notes,
    outcome,
    slowdowns,
    state_word,
)
from rankscope.v1 import capture_service_pb2 as pb

MOST_NOTES = 8


def print_capture(capture: pb.Capture, fetched: Fetched | None = None) -> None:
    console = make_console()
    console.print(result_table(capture, None if fetched is None else fetched.files))
    console.print()
    errors = fetched.errors if fetched else {}
    complete = is_complete(capture) and not errors
    head = f"{capture.id} ({printable(capture.job)}): {outcome(capture)}"
    if capture.state not in FINAL:
        head += f"; it is {state_word(capture.state)}"
    lines = [Text(f"{head}.", style="bold green" if complete else "bold")]
    lines += [Text(_sentence(text)) for text in findings(capture)]
    lines += [Text(_sentence(f"warning: {text}"), style="yellow") for text in slowdowns(capture)]
    noted = notes(capture)
    lines += [Text(_sentence(f"note: {note}"), style="dim") for note in noted[:MOST_NOTES]]
    if len(noted) > MOST_NOTES:
        lines.append(Text(f"… and {len(noted) - MOST_NOTES} more notes: rankscope captures show {capture.id} --json"))
    lines += [Text(_sentence(f"rank {rank}: {error}"), style="red") for rank, error in errors.items()]
    lines += [Text(line) for line in _where(capture, fetched)]
    for line in lines:
        # The terminal wraps it: what is copied from there must be one line.
        console.print(line, soft_wrap=True)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:].rstrip('.')}."


def _where(capture: pb.Capture, fetched: Fetched | None) -> list[str]:
    here = delivered(capture)
    if not here:
        return []
    if fetched is None:
        uris = [f"Uploaded: {printable(entry.uri)}" for entry in here if entry.uri]
        command = f"  rankscope captures get {capture.id} --output DIR{elsewhere(capture.id)}"
        return [*uris, "The daemon keeps the files; next:", command]
    if not fetched.files:
        return []
    files = [path for paths in fetched.files.values() for path in paths]
    size = quantity(sum(path.stat().st_size for path in files), "B")
    steps = [f"  {step}" for step in next_steps(capture, fetched)]
    return [f"{count(len(files), 'file')}, {size}, in {fetched.folder}; next:", *steps]
