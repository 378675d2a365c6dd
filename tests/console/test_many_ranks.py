"""A run of 4,096 ranks. How fast it is, `python -m benchmarks pages` measures."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator

import pytest

from benchmarks.console_pages import RANKS, SLOW_RANK, played_run
from rankscope.operator.console.api import STATIC
from tests.console.serving import HEAT_MAP, brightest_row, served
from tools.chromium import Page
from tools.played_runs import RUN

BOX = f"""(() => {{
  const canvas = document.querySelector('{HEAT_MAP}');
  canvas.scrollIntoView({{ block: 'center' }});
  const {{ left, top, width, height }} = canvas.getBoundingClientRect();
  return [left + width / 2, top, height];
}})()"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    played, _ = played_run(ticks=30)
    with served(played) as console:
        yield f"{console.url}?run={RUN}"


def ranks_in_order(address: str) -> list[int]:
    with urllib.request.urlopen(address.replace("?", "api/v1/run?")) as answer:
        ranks: list[int] = json.load(answer)["layout"]["ranks"]
    return ranks


def test_one_slow_rank_of_thousands_is_a_clickable_line(page: Page, address: str) -> None:
    page.open(address, 1280, 900)
    assert f" {RANKS} ranks " in page.wait_for(f"document.querySelector('{HEAT_MAP}')?.ariaLabel")
    page.wait_for(f"document.querySelector('{HEAT_MAP}').height > 300")
    order = ranks_in_order(address)
    assert len(order) == RANKS
    rows = page.value(f"document.querySelector('{HEAT_MAP}').height")
    line = brightest_row(page, rows, 0.7)
    assert line == order.index(SLOW_RANK) * rows // RANKS

    # A pixel has several ranks. Enlarged, each has a row.
    left, top, height = page.value(BOX)
    scale = height / rows
    page.drag((left, top + (line - 2) * scale), (left, top + (line + 3) * scale))
    page.wait_for("[...document.querySelectorAll('button')].some((one) => one.innerText === 'Show all ranks')")
    left, top, height = page.value(BOX)
    for at in range(3, int(height), 5):
        page.point(left, top + at)
        if page.value(f"document.querySelector('.reading').innerText.startsWith('rank {SLOW_RANK} at ')"):
            break
    page.click(left, top + at)
    page.wait_for(f"document.querySelector('h1').innerText === 'Rank {SLOW_RANK} of {RUN}'")


def test_the_page_reads_what_is_under_the_pointer(page: Page, address: str) -> None:
    page.open(address, 1280, 900)
    page.wait_for(f"document.querySelector('{HEAT_MAP}')?.height > 300")
    order = ranks_in_order(address)
    for share in (0.1, 0.5, 0.9):
        left, top, height = page.value(BOX)
        y = round(top + share * height)
        page.point(left, y)
        rank = order[int((y - top) / height * RANKS)]
        page.wait_for(f"document.querySelector('.reading').innerText.startsWith('rank {rank} at ')")


def test_the_assets_are_small() -> None:
    assert sum(path.stat().st_size for path in STATIC.rglob("*") if path.is_file()) <= 1_000_000
