"""docs/security.md claims things: the tests it names have to be there, and so do the ports and Secrets."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.daemon.server.http_server import READERS
from rankscope.operator.certificates.roles import AUTHORITY_SECRET, fleet_roles

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / "security.md", ROOT / "docs" / "tls.md"]
DEFINED = {
    name
    for path in (ROOT / "tests").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
}


def test_a_listener_is_on_the_page_once() -> None:
    listeners = PAGES[0].read_text().split("\n## Listeners\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (\d{4})\b[^|]*\| ([^|]+) \|", listeners, re.MULTILINE)
    assert len(rows) > 5 and len(set(rows)) == len(rows), rows


def test_every_test_that_the_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", PAGES[0].read_text()))
    assert len(named) > 20
    assert named <= DEFINED, sorted(named - DEFINED)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_all_secrets_with_their_names_are_on_the_page(page: Path) -> None:
    rows = [line for line in page.read_text().splitlines() if line.startswith("| `rankscope-")]
    for role in fleet_roles("NAMESPACE"):
        (row,) = (row for row in rows if f"`{role.secret}`" in row)
        assert role.secret == "rankscope-api-tls" or f"`{role.names[0]}`" in row
    assert any(AUTHORITY_SECRET in row for row in rows)


def test_those_who_may_read_metrics_are_on_the_page() -> None:
    row = next(line for line in PAGES[0].read_text().splitlines() if line.startswith("| 9464"))
    assert "rankscope-metrics" in row
    assert {"rankscope-metrics", "rankscope-operator"} == READERS
