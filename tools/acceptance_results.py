"""docs/acceptance.json, which `make acceptance` writes, and what docs/performance.md shows of it: `make docs`, or with
--check fail if the page is stale."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TypedDict

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "docs" / "acceptance.json"
PAGE = ROOT / "docs" / "performance.md"
ELSEWHERE = ("frameworks",)  # have a page of their own
_BEGIN, _END = f"<!-- table: made from {FILE.name} -->\n", "\n<!-- end of table -->"


class Measurement(TypedDict):
    """One call of `measured` (tests/support/measuring.py)."""

    name: str
    value: float
    unit: str
    target: str
    is_met: bool


class SuiteResults(TypedDict):
    commit: str
    date: str
    seconds: int
    tests: dict[str, int]  # passed, failed, skipped
    failed: list[str]  # the tests
    measured: list[Measurement]


def load() -> dict[str, SuiteResults]:
    return json.loads(FILE.read_text()) if FILE.exists() else {}


def commit() -> str:
    """With a mark if files were changed since, other than by the suites before."""
    is_dirty = _git("diff", "--name-only", "HEAD", "--", f":!{FILE.relative_to(ROOT)}")
    return _git("rev-parse", "--short=7", "HEAD") + ("-dirty" if is_dirty else "")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()


def keep(suite: str, results: SuiteResults) -> None:
    """What other suites measured earlier stays in the file."""
    FILE.write_text(json.dumps({**load(), suite: results}, indent=1) + "\n")


def write_or_check(page: Path, table: str) -> int:
    """Puts the table into its place in the page; with --check only compares. Returns the exit status."""
    text = page.read_text()
    before, begin, rest = text.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"{page.name} has no place for the table: {_BEGIN!r}, {_END!r}")
    fresh = f"{before}{begin}{table}{end}{after}"
    if "--check" not in sys.argv[1:]:
        page.write_text(fresh)
    elif text != fresh:
        print(f"error: {page.name} does not show {FILE.name}; next step: make docs", file=sys.stderr)
        return 1
    return 0


def table() -> str:
    lines = ["| suite | measured | value | target | met |", "|---|---|---|---|---|"]
    for name, suite in load().items():
        counts = ", ".join(f"{count} {outcome}" for outcome, count in suite["tests"].items() if count)
        lines.append(f"| **{name}** | {suite['date']}, commit {suite['commit']}, {counts} | | | |")
        lines += [f"| | FAILED: `{test.rpartition('::')[2]}` | | | |" for test in suite["failed"]]
        if name not in ELSEWHERE:
            lines += [_row(row) for row in suite["measured"]]
    return "\n".join(lines)


def _row(row: Measurement) -> str:
    met = "yes" if row["is_met"] else "NO"
    return f"| | {row['name']} | {row['value']:.3g} {row['unit']} | {row['target']} | {met} |"


if __name__ == "__main__":
    sys.exit(write_or_check(PAGE, table()))
