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


def test_the_name_of_a_test_has_at_most_ten_words() -> None:
    defined = re.compile(r"^ *(?:async )?def test_(\w+)", re.M)
    paths = list((ROOT / "tests").rglob("*.py"))
    names = [(path, name) for path in paths for name in defined.findall(path.read_text())]
    assert len(names) > 1000
    assert [(path, name) for path, name in names if len(name.split("_")) > 10] == []


def test_upper_bounds_begin_with_max_and_lower_ones_with_min() -> None:
    ends = "LIMIT|AT_MOST|AT_LEAST|MOST|LEAST|KEPT|REMEMBERED|LOOKED_AT|MAX|MIN"
    begins = "LONGEST|LARGEST|MOST|SHORTEST|LEAST|SMALLEST|FEWEST"
    other = re.compile(
        rf"^_?(?!MAX_|MIN_)(?:[A-Z_]+_(?:{ends})(?:_BYTES|_SECONDS|_NS)?|(?:{begins})_[A-Z_]+)\b.* = [\d-].*", re.M
    )
    paths = [path for folder in ("analysis", "cli", "daemon", "operator") for path in (ROOT / folder).rglob("*.py")]
    assert [(path.name, found) for path in paths for found in other.findall(path.read_text())] == []
