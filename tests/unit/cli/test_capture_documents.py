"""docs/captures.md says what the code does: its sentences and JSON keys are held against it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rankscope.cli.capture_output import to_object
from rankscope.daemon.captures.orders import MAX_PATIENCE_SECONDS, MAX_RECORDING_SECONDS, MAX_STEPS
from rankscope.v1 import capture_service_pb2 as pb
from tests.unit.cli.capture_server import ANALYSED, capture
from tests.unit.cli.test_capture import joined

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs/captures.md").read_text()
SOURCES = [
    *(ROOT / "daemon/rankscope/daemon").glob("captures/**/*.py"),
    *(ROOT / "cli/rankscope/cli").glob("capture*.py"),
    ROOT / "cli/rankscope/cli/connection.py",
    ROOT / "daemon/rankscope/daemon/server/grpc_server.py",
    ROOT / "daemon/rankscope/daemon/process_files.py",
    ROOT / "daemon/rankscope/common/rank_selection.py",
]
# What stands for something else in a sentence of the page.
PLACEHOLDERS = re.compile(
    r"c-…|…|\b[NM]\b|HOST:PORT|/run/rankscope/daemon\.sock|(?<=not by )\w+:|Address already in use"
)


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def said_by_the_code() -> set[str]:
    """Every text of the sources, with {#} for what is filled in."""
    texts = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "{#}" for part in node.values]
                texts.add("".join(parts))
    return texts


def test_every_documented_message_exists_in_the_code() -> None:
    said = said_by_the_code()
    sentences = re.findall(r"^\| `([^`]+)`", section("When it does not work"), re.MULTILINE)
    assert len(sentences) > 25
    unknown = []
    for sentence in sentences:
        pieces = [piece.strip(" :;,'") for piece in PLACEHOLDERS.split(sentence)]
        for piece in pieces:
            if len(piece) > 3 and not any(piece in text for text in said):
                unknown.append(piece)
    assert not unknown


def test_every_key_of_the_json_is_described_and_no_other() -> None:
    record = capture(ANALYSED, ANALYSED, ANALYSED, edit=joined)
    record.join.excesses.add(rank=1, steps=3)
    record.ranks[0].step_times.before_seconds = 1.0
    told = to_object(record)
    keys = {*told, *told["summary"], *told["summary"]["join"], *told["summary"]["join"]["excesses"][0]}
    for rank in told["ranks"]:
        keys |= {*rank, *rank["summary"], *(rank["step_times"] or {})}
    rows = [line for line in section("JSON").splitlines() if line.startswith("| `")]
    described = set(re.findall(r"`(?:summary)?\.?([a-z_]+)(?:\[\])?`", "\n".join(rows)))
    states = {value.name.removeprefix("CAPTURE_STATE_").lower() for value in pb.CaptureState.DESCRIPTOR.values}
    assert states - {"unspecified"} <= described
    assert described - states - {"join"} == keys - {"join"}


def test_the_limits_on_the_page_are_those_of_the_code() -> None:
    assert f"1 to {MAX_STEPS} steps, or 0.05 to {MAX_RECORDING_SECONDS:g} s" in PAGE
    assert f"0 to {MAX_PATIENCE_SECONDS:g} s" in PAGE
