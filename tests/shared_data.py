"""Where test data lies: our own traces beside the tests, borrowed ones outside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
H200 = ROOT / "tests" / "data" / "h200"


def shared(name: str) -> Path:
    """A folder or file of borrowed data; skips the test where the data is not at hand."""
    folder = Path(os.environ.get("RANKSCOPE_TEST_DATA") or ROOT.parent / "shared" / "data")
    path = folder / name
    if not path.exists():
        pytest.skip(f"no {path}: put the borrowed data there or name its folder in RANKSCOPE_TEST_DATA")
    return path
