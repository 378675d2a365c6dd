"""A console of made runs, and what the tests read on its pages."""

from __future__ import annotations

import functools
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

from rankscope.operator.console.api import Elsewhere
from rankscope.operator.console.endpoints import Channels, no_channel
from rankscope.operator.console.older_history import PrometheusHistory
from rankscope.operator.console.server import ConsoleServer
from tools.chromium import Page
from tools.played_runs import Played

TEXT = "document.querySelector('main').innerText"
HEAT_MAP = ".heatmap canvas"
# The lightness of each row of the heat map, in the column at this share of the width.
LIGHTNESS = """(() => {
  const canvas = document.querySelector('.heatmap canvas'), rows = %d;
  const copy = new OffscreenCanvas(1, canvas.height).getContext('2d', { willReadFrequently: true });
  copy.drawImage(canvas, -Math.min(canvas.width - 1, Math.floor(canvas.width * %f)), 0);
  const data = copy.getImageData(0, 0, 1, canvas.height).data;
  return Array.from({ length: rows }, (_, row) => {
    const at = 4 * Math.floor((row + 0.5) * canvas.height / rows);
    return 0.2126 * data[at] + 0.7152 * data[at + 1] + 0.0722 * data[at + 2];
  });
})()"""

ROOT = Path(__file__).resolve().parents[2]
FOUND = """axe.run(document).then(({ violations, passes }) => [passes.length, violations
  .filter(({ impact }) => impact === 'serious' || impact === 'critical')
  .map(({ id, nodes }) => `${id}: ${nodes.map(({ html, failureSummary }) => html + failureSummary).join(', ')}`)])"""


@contextmanager
def served_to(
    page: Page,
    played: Played,
    elsewhere: Elsewhere = dict,
    prometheus_url: str = "",
    channels: Channels = no_channel,
) -> Iterator[ConsoleServer]:
    """The page leaves before the server ends: what it asks for later is refused, and it would note that."""
    with served(played, elsewhere=elsewhere, prometheus_url=prometheus_url, channels=channels) as console:
        yield console
        page.leave()


@contextmanager
def served(
    played: Played,
    port: int = 0,
    elsewhere: Elsewhere = dict,
    prometheus_url: str = "",
    channels: Channels = no_channel,
) -> Iterator[ConsoleServer]:
    older = PrometheusHistory(prometheus_url)
    console = ConsoleServer(played.history, "127.0.0.1", port, elsewhere=elsewhere, older=older, channels=channels)
    console.start()
    try:
        yield console
    finally:
        console.stop()


def port_of(url: str) -> int:
    port = urlsplit(url).port
    assert port is not None
    return port


def brightest_row(page: Page, rows: int, at: float) -> int:
    """In the heat map's column at this share of its width; -1 while nothing is drawn."""
    values = page.value(LIGHTNESS % (rows, at))
    return max(range(rows), key=values.__getitem__) if max(values) > 0 else -1


def click_row(page: Page, row: int, rows: int, at: float = 0.9) -> None:
    left, top, width, height = page.value(
        f"(() => {{ const element = document.querySelector('{HEAT_MAP}'); element.scrollIntoView({{block: 'center'}});"
        "const box = element.getBoundingClientRect(); return [box.left, box.top, box.width, box.height]; })()"
    )
    page.click(left + at * width, top + (row + 0.5) * height / rows)


def press(page: Page, button: str) -> None:
    """The button with this text, once it is there."""
    found = f"[...document.querySelectorAll('button')].find((one) => one.innerText === {button!r})"
    page.wait_for(f"{found} !== undefined")
    page.value(f"{found}.click()")


@functools.cache
def axe() -> str:
    subprocess.run([ROOT / "tools" / "setup_console.sh"], check=True)
    return (ROOT / "console" / "node_modules" / "axe-core" / "axe.min.js").read_text()


def serious_findings(page: Page) -> list[str]:
    """Of axe-core, about accessibility, with the elements."""
    page.value(f"{axe()}; 0")
    passed, findings = page.value(FOUND)
    assert passed > 10  # it has looked
    return list(findings)
