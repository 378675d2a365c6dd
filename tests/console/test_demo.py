"""The console of `rankscope demo`: a real job, in which one rank becomes slow. One demo serves all of these tests."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import quote

import pytest

from rankscope.daemon import procfs
from tests.console.serving import HEAT_MAP, TEXT, brightest_row, click_row, press, serious_findings
from tests.support.waiting import wait_until
from tools.chromium import Page

pytestmark = pytest.mark.acceptance

CULPRIT, RANKS = 1, 3
# Most of a step, also on a busy machine: a function's excess is shown once it is significant, and a small one takes
# longer.
DELAY_MS = 120
FUNCTION = "normalize_features"  # in which the demo's slow rank sleeps
VISIBLE_WINDOWS = 10  # of 2 s: a machine that is too busy for its windows skips them
START_SECONDS = 240.0
STOP_SECONDS = 180.0
# In the flame graph: the widest box of a function, and the colour in its corner.
BOX = f"""(() => {{
  const found = boxes.filter((box) => label(box.node).startsWith('{FUNCTION} (')).sort((a, b) => b.width - a.width)[0];
  const colour = Array.from(context.getImageData(found.left + found.width - 8, found.top + 3, 1, 1).data);
  return [found.width / canvas.clientWidth, excess(found.node), ...colour];
}})()"""


class Demo(NamedTuple):
    url: str
    run: str
    fault_unix_seconds: float


@pytest.fixture(scope="module")
def demo() -> Iterator[Demo]:
    """A running one, from the beginning of its fault on."""
    command = [sys.executable, "-m", "rankscope.cli.main", "demo", "--world-size", str(RANKS), "--seconds", "600"]
    command += ["--fault", f"slow-rank:rank={CULPRIT},delay={DELAY_MS}"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        try:
            url = next(line for line in process.stdout if "console:" in line).split()[-1]
            next(line for line in process.stdout if "begins now" in line)
            fault = time.time()
            wait_until(lambda: run_of(url, process.pid), lambda: answer(f"{url}api/v1/runs"))
            run = run_of(url, process.pid)
            assert run is not None
            yield Demo(url, run, fault)
        finally:
            process.terminate()  # it ends its ranks
            process.stdout.read()
            process.wait(STOP_SECONDS)


def answer(url: str) -> Any:
    with urllib.request.urlopen(url) as found:
        return json.load(found)


def run_of(url: str, process: int) -> str | None:
    """The run of the demo: there may be other jobs on this machine."""
    for run in answer(f"{url}api/v1/runs")["runs"]:
        with suppress(OSError):  # another one, which has just ended
            latest = answer(f"{url}api/v1/rank?run={quote(run['run'])}&rank=0")["latest"]
            ancestor = latest["pid"] if latest is not None else 1
            while ancestor > 1:
                if ancestor == process:
                    return str(run["run"])
                ancestor = procfs.read_stat(f"/proc/{ancestor}").parent_pid
    return None


def times_shown(url: str, run: str) -> list[float]:
    """The ends of the heat map's columns."""
    with urllib.request.urlopen(f"{url}api/v1/heatmap?run={quote(run)}&since=-900&columns=450") as found:
        length = int.from_bytes(found.read(4), "little")
        ends: list[float] = json.loads(found.read(length))["ends"]
    return ends


def open_run(page: Page, demo: Demo) -> None:
    """By clicks from the list of runs, until the slow rank is named."""
    page.open(demo.url, 1280, 900)
    page.wait_for(f"[...document.querySelectorAll('a.run')].some((one) => one.innerText === {demo.run!r})")
    page.value(f"[...document.querySelectorAll('a.run')].find((one) => one.innerText === {demo.run!r}).click()")
    page.wait_for(f"document.querySelector('{HEAT_MAP}')?.width > 300")
    page.wait_for(f"/rank {CULPRIT} is slow because of \\w+\\.py:\\d+/.test({TEXT})", START_SECONDS)


def test_a_rank_that_becomes_slow_is_soon_seen_and_named(page: Page, demo: Demo) -> None:
    open_run(page, demo)
    marks = answer(f"{demo.url}api/v1/run?run={quote(demo.run)}")["marks"]
    found = next(one["unix_seconds"] for one in marks if one["verdict"] == "slow_rank")
    ends = times_shown(demo.url, demo.run)
    assert sum(demo.fault_unix_seconds < end <= found for end in ends) <= VISIBLE_WINDOWS

    # In the window of the verdict the culprit is the brightest.
    def is_brightest() -> bool:
        ends = times_shown(demo.url, demo.run)
        column = next((place for place, end in enumerate(ends) if end >= found), None)  # None: not yet
        return column is not None and brightest_row(page, RANKS, (column + 0.5) / len(ends)) == CULPRIT

    wait_until(is_brightest, seconds=START_SECONDS)


def test_a_clicked_capture_finishes_and_names_the_slow_rank(page: Page, demo: Demo) -> None:
    open_run(page, demo)
    press(page, "Capture…")
    assert page.wait_for("document.querySelector('form [name=ranks]')?.value") == "all"
    page.wait_for("document.querySelector('form [aria-label=\"What it costs\"]') !== null")
    assert serious_findings(page) == []
    page.value("document.querySelector('form button[type=submit]').click()")
    page.wait_for("document.querySelector('.verdict.good .badge')?.innerText.includes('analysed')", START_SECONDS)
    page.wait_for(f"{TEXT}.includes('Where the recorded time goes') && {TEXT}.includes('Who arrived last')")
    assert "the ranks cannot be compared" not in page.value("document.querySelector('.verdict').innerText")
    latest = "[...document.querySelectorAll('h2')].find((one) => one.innerText.startsWith('Who arrived last'))"
    assert page.value(f"{latest}.parentElement.querySelector('.phases').innerText").startswith(f"rank {CULPRIT}")
    with urllib.request.urlopen(page.value("document.querySelector('a[download][href*=merged]').href")) as found:
        merged = json.loads(gzip.decompress(found.read()))["traceEvents"]
    named = [one["args"]["name"] for one in merged if one["name"] == "process_name"]
    assert named == [f"rank {rank}" for rank in range(RANKS)]
    assert serious_findings(page) == []
    page.type("c")
    page.wait_for("document.querySelectorAll('tbody tr').length === 1")
    assert serious_findings(page) == []


def test_the_flame_graph_against_the_peers_shows_the_guilty_function(page: Page, demo: Demo) -> None:
    """The last: its samples have to be many, and they come in while the other tests run."""
    open_run(page, demo)
    click_row(page, CULPRIT, RANKS)
    page.wait_for(f"document.querySelector('h1').innerText === 'Rank {CULPRIT} of {demo.run}'")
    page.wait_for(f"{TEXT}.includes('process ')")
    first = page.wait_for("document.querySelector('tbody td.frame')?.innerText", START_SECONDS)
    assert first.startswith(f"{FUNCTION} (model.py:")
    press(page, "Against its peers")
    page.wait_for("document.querySelector('iframe') !== null")
    graph = page.value("document.querySelector('iframe').src")
    assert "against=cohort" in graph and page.value("location.search").endswith("&flame=cohort")
    # The frame is sandboxed; the same page in a tab of its own can be looked into.
    page.wait_for(f"performance.getEntriesByName({graph!r}).length > 0")
    assert serious_findings(page) == []
    assert page.value("document.querySelector('a[target=_blank]').href") == graph
    page.open(graph, 1280, 900)
    width, excess, red, _, blue, _ = page.wait_for(BOX)
    assert width > 0.1 and excess > 0.5 and red > blue
