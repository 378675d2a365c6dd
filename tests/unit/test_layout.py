from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("analysis", "benchmarks", "cli", "daemon", "deploy", "operator", "tools")


def test_nothing_but_tests_imports_tests() -> None:
    importing = re.compile(r"^\s*(from|import) tests\b", re.M)
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    assert len(paths) > 100
    assert [path for path in paths if importing.search(path.read_text())] == []
