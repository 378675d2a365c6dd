"""Structs of the daemon and the operator are ready to be decoded by any number of threads when they are imported.

msgspec reads the annotations of a Struct when the first one is decoded. Two threads that do so at the same time crash
the process: an operator died in one of some hundred starts, as its watches listed objects."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NEVER_DECODED = {"RankAnswer", "RunAnswer", "RunQuery", "TopAnswer"}
# Prints the Structs whose annotations are read by the first that is decoded, in a process that has decoded none.
UNREADY = """
import importlib, json, sys
import msgspec

class Control(msgspec.Struct):
    field: int

def is_ready(kind):
    called = set()
    sys.setprofile(lambda frame, event, argument: called.add(frame.f_code.co_name))
    try:
        msgspec.json.Decoder(kind)
    finally:
        sys.setprofile(None)
    return "get_class_annotations" not in called

for name in sys.argv[1:]:
    importlib.import_module(name)
kinds = [kind for kind in msgspec.Struct.__subclasses__() if kind.__module__.split(".")[:2] in OURS]
print(json.dumps([kind.__qualname__ for kind in kinds if not is_ready(kind)]))
"""


def test_no_thread_is_the_first_to_decode_a_struct() -> None:
    ours = [["rankscope", "daemon"], ["rankscope", "operator"], ["__main__"]]
    modules = [
        ".".join(path.relative_to(ROOT / part).with_suffix("").parts)
        for part in ("daemon", "operator")
        for path in sorted((ROOT / part).rglob("*.py"))
        if "msgspec" in path.read_text()
    ]
    assert "rankscope.operator.kube.resources" in modules
    program = UNREADY.replace("OURS", repr(ours))
    printed = subprocess.run(
        [sys.executable, "-c", program, *modules], check=True, capture_output=True, text=True, timeout=120
    )
    unready = set(json.loads(printed.stdout)) - NEVER_DECODED
    assert unready == {"Control"}, "give each to a msgspec.json.Decoder in its module, as in kube/resources.py"
