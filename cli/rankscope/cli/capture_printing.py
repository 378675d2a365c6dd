"""The end of a capture on a terminal: what each rank did, then the sentences that matter."""

from __future__ import annotations

from rich.text import Text

from rankscope.analysis.drawing.quantities import count, quantity
from rankscope.analysis.drawing.svg import printable
from rankscope.cli.capture_fetching import Fetched, next_steps
from rankscope.cli.capture_following import FINAL
from rankscope.cli.capture_table import make_console, result_table
from rankscope.cli.capture_wording import delivered, findings, is_complete, outcome, slowdowns, state_word
from rankscope.v1 import capture_service_pb2 as pb


def print_capture(capture: pb.Capture, fetched: Fetched | None = None) -> None:
    console = make_console()
    console.print(result_table(capture, None if fetched is None else fetched.files))
    console.print()
    complete = is_complete(capture) and not (fetched and fetched.errors)
    head = f"{capture.id} ({printable(capture.job)}): {outcome(capture)}"
    if capture.state not in FINAL:
        head += f"; it is {state_word(capture.state)}"
    console.print(Text(f"{head}.", style="bold green" if complete else "bold"))
    for text in findings(capture):
        console.print(Text(f"{text[:1].upper()}{text[1:].rstrip('.')}."))
    slower = slowdowns(capture)
    if slower:
        console.print(Text(f"Warning: {slower}.", style="yellow"))
    for note in capture.notes:
        console.print(Text(f"Note: {printable(note)}.", style="dim"))
    for rank, error in (fetched.errors if fetched else {}).items():
        console.print(Text(f"Rank {rank}: {error}.", style="red"))
    for line in _where(capture, fetched):
        console.print(Text(line))


def _where(capture: pb.Capture, fetched: Fetched | None) -> list[str]:
    here = delivered(capture)
    if not here:
        return []
    if fetched is None:
        uris = [f"Uploaded: {printable(entry.uri)}" for entry in here if entry.uri]
        return [*uris, "The daemon keeps the files; next:", f"  rankscope captures get {capture.id} --output DIR"]
    if not fetched.files:
        return []
    size = quantity(sum(path.stat().st_size for path in fetched.files.values()), "B")
    steps = [f"  {step}" for step in next_steps(capture, fetched)]
    return [f"{count(len(fetched.files), 'file')}, {size}, in {fetched.folder}; next:", *steps]
