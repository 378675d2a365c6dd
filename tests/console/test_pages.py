"""The console's pages in Chromium, on made runs: what they show, links, keys, a server that restarts, accessibility."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from struct import unpack
from urllib.parse import quote

import grpc
import msgspec
import pytest

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.console.api import EVENT_CLIENTS
from rankscope.operator.console.endpoints import Channels
from rankscope.operator.correlation.correlator import Correlator, LostSeconds
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.correlation.job_service import JobServicer
from rankscope.v1.job_service_pb2_grpc import add_JobServiceServicer_to_server
from tests.console.serving import (
    HEAT_MAP,
    ROOT,
    TEXT,
    brightest_row,
    click_row,
    press,
    serious_findings,
    served,
    served_to,
)
from tests.free_ports import free_port
from tests.support.breakdowns import a_breakdown
from tests.support.prometheus_stub import of_a_run, server
from tests.support.waiting import wait_until
from tools.chromium import Page
from tools.draw_console import IMAGES, PAGES, PICTURES, SLOW, SLOW_RANK, WIDTH, open_page
from tools.played_runs import RUN, Played

SENTENCE = f"rank {SLOW_RANK} is slow because of dataset.py:88 (load_image, input)"
RANK_ADDRESS = f"?run={quote(SLOW, safe='')}&rank={SLOW_RANK}"


def test_a_run_opened_from_the_fleet_shows_its_slow_rank(page: Page, fleet: str) -> None:
    open_page(page, fleet, "fleet", 1280, 800)
    assert page.value("document.querySelector('tbody tr .run').innerText") == SLOW  # worst first
    page.click(*page.center("tbody tr .run"))
    page.wait_for(f"document.querySelector('{HEAT_MAP}')?.width > 300")
    page.wait_for(f"{TEXT}.includes({SENTENCE!r})")
    assert brightest_row(page, 64, 0.9) == SLOW_RANK
    assert brightest_row(page, 64, 0.1) != SLOW_RANK  # before the fault

    click_row(page, SLOW_RANK, 64)
    page.wait_for(f"document.querySelector('h1').innerText === 'Rank {SLOW_RANK} of {SLOW}'")
    assert page.value("location.search") == RANK_ADDRESS
    page.wait_for(f"{TEXT}.includes('node gpu-15')")


def test_a_link_shows_another_reader_the_same(page: Page, fleet: str) -> None:
    open_page(page, fleet, "run", 1280, 800)
    page.value(
        "const choice = document.querySelector('select[aria-label=Signal]'); choice.value = 'input_seconds';"
        "choice.dispatchEvent(new Event('change', { bubbles: true }))"
    )
    press(page, "5 min")
    press(page, "against the median")
    caption = page.wait_for("document.querySelector('.heatmap canvas')?.ariaLabel")
    address = page.value("location.href")
    other = page.browser.page()
    other.open(address)
    assert other.wait_for("document.querySelector('.heatmap canvas')?.ariaLabel") == caption
    assert caption.startswith("Input time of 64 ranks")
    assert other.value("document.querySelector('select[aria-label=Signal]').value") == "input_seconds"
    assert other.value("[...document.querySelectorAll('[aria-pressed=true]')].map((one) => one.innerText)") == ["5 min"]
    other.close()


def test_the_pages_can_be_used_without_a_pointer(page: Page, fleet: str) -> None:
    open_page(page, fleet, "fleet", 1280, 800)
    page.type("/")
    page.type("sam")
    page.wait_for("document.querySelectorAll('tbody tr').length === 1")
    assert page.value("location.search") == "?filter=sam"
    page.press("Escape")

    open_page(page, fleet, "run", 1280, 800)
    page.value(f"document.querySelector('{HEAT_MAP}').focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowDown", "ArrowUp", "ArrowLeft"):
        page.press(key)
    page.wait_for("document.querySelector('.reading').innerText.startsWith('rank 2 at ')")
    page.press("Enter")
    page.wait_for(f"document.querySelector('h1').innerText === 'Rank 2 of {SLOW}'")
    page.type("r")
    page.wait_for(f"document.querySelector('h1').innerText === '{SLOW}'")
    page.type("g")
    page.wait_for("document.querySelector('h1').innerText === 'Runs' && location.search === ''")


def test_a_page_survives_a_restart_of_the_server(chromium_page: Page) -> None:
    page = chromium_page
    played, later = Played(), Played()
    played.tick()
    later.tick(pace=(0.25, 0.4, 0.1))
    port = free_port()  # no other process gets it while the server is down
    with served(played, port) as console:
        page.open(console.url)
        page.wait_for(f"{TEXT}.includes('100 ms')")
        page.value("window.isSamePage = true")
    page.wait_for("document.querySelector('.notice')?.innerText.includes('does not answer')")
    assert page.value(f"{TEXT}.includes('100 ms')")
    with served(later, port):
        page.wait_for("document.querySelector('.notice') === null")
        page.wait_for(f"{TEXT}.includes('250 ms')")
        assert page.value("window.isSamePage")


def test_a_run_moved_to_another_replica_is_not_shown_live(chromium_page: Page) -> None:
    page = chromium_page
    held, elsewhere = {RUN}, dict[str, str]()
    played = Played(keeps=held.__contains__)
    played.tick()
    with served(played, elsewhere=lambda: elsewhere) as console:
        fleet = page.browser.page()
        fleet.open(console.url)
        fleet.wait_for("document.querySelectorAll('tbody tr').length === 1")
        page.open(f"{console.url}?run={RUN}")
        page.wait_for(f"document.querySelector('{HEAT_MAP}')?.width > 300")
        held.clear()
        elsewhere[RUN] = "operator-1"
        played.history.forget_lost_runs()
        for one in (fleet, page):
            one.wait_for(f"{TEXT}.includes('kubectl port-forward pod/operator-1 9469')")
            one.wait_for("document.querySelector('tbody tr, .verdict, .heatmap canvas') === null")
        fleet.close()


def asked(page: Page, path: str) -> int:
    page.value("0")  # events that were sent before are here then
    sent = [one["params"]["request"]["url"] for one in page.events if one["method"] == "Network.requestWillBeSent"]
    return sum(f"/api/v1/{path}?" in url for url in sent)


def test_unserved_features_are_requested_once_and_hidden(page: Page) -> None:
    """This one has neither captures nor profiles."""
    played = Played()
    for _ in range(3):
        played.tick()
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={quote(RUN, safe='')}")
        page.wait_for("document.querySelectorAll('.phases a').length > 1")
        page.wait_for("!document.querySelector('nav').innerText.includes('Captures')")
        assert not page.value(f"{TEXT}.includes('Capture…')")
        for rank in (0, 1):
            page.value(f"document.querySelectorAll('.phases a')[{rank}].click()")
            page.wait_for(f"{TEXT}.includes('Self time') && !{TEXT}.includes('by its stacks')")
            page.type("r")
            page.wait_for(f"document.querySelector('h1').innerText === '{RUN}' && {TEXT}.includes('Ranks over time')")
        page.type("c")
        page.wait_for("document.querySelector('.notice')?.innerText.includes('no captures')")
        assert (asked(page, "captures"), asked(page, "excess")) == (1, 1)


def test_a_page_that_was_left_holds_no_connection(page: Page) -> None:
    """A browser has six for a server, and keeps pages to return to."""
    played = Played()
    played.tick()
    with served_to(page, played) as console:
        slots = console._api.event_slots
        for _ in range(4):
            page.open(console.url)
            page.wait_for(f"{TEXT}.includes('100 ms')")
            page.leave()
        wait_until(lambda: slots._value >= EVENT_CLIENTS)
        page.call("Page.navigateToHistoryEntry", entryId=page.call("Page.getNavigationHistory")["entries"][-2]["id"])
        page.wait_for(f"location.href === '{console.url}' && {TEXT}.includes('100 ms')")
        played.tick(pace=(0.25, 0.4, 0.1))
        page.wait_for(f"{TEXT}.includes('250 ms')")


RANGES = "[...document.querySelectorAll('[aria-label=\"Time shown\"] button')].map((one) => one.innerText).join()"
SHORT, LONG = "5 min,15 min,1 h", "6 h,24 h,7 d"


def test_long_ranges_are_offered_with_prometheus_and_gaps_are_named(page: Page) -> None:
    played = Played(begin=time.time() - 10)
    for _ in range(5):
        played.tick()
    address = f"?run={quote(RUN, safe='')}"
    with served_to(page, played) as console:
        page.open(console.url + address)
        assert page.wait_for(RANGES) == SHORT
    with served_to(page, played, prometheus_url="http://127.0.0.1:1") as console:
        for view in ("", "&rank=1"):
            page.open(console.url + address + view)
            assert page.wait_for(RANGES) == f"{SHORT},{LONG}"
            page.value("[...document.querySelectorAll('button')].find((one) => one.innerText === '24 h').click()")
            page.wait_for(f"{TEXT}.includes('Older history is missing. Prometheus: ')")
            assert page.value("location.search").endswith("since=86400")
        page.open(console.url + address + "&since=86400")
        assert page.wait_for("document.querySelector('.heatmap canvas')?.width > 300")  # what is in memory is shown


def test_events_are_marked_and_named_on_the_time_axis(page: Page) -> None:
    played = Played(begin=time.time() - 60)
    for number in range(25):
        played.tick(restarts=number // 13)
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={quote(RUN, safe='')}")
        page.wait_for(f"document.querySelector('{HEAT_MAP}')?.width > 300")
        page.value(f"document.querySelector('{HEAT_MAP}').focus()")
        named = "document.querySelector('.reading').innerText.includes('all processes were replaced')"
        for _ in range(25):
            page.press("ArrowLeft")
            if page.value(named):
                break
        page.wait_for(named)


@pytest.mark.parametrize("width", [1280, 400])
def test_a_run_page_shows_where_a_step_goes(width: int, page: Page, tmp_path: Path) -> None:
    played = Played(begin=time.time() - 60)
    for _ in range(5):
        played.tick()
    table = "[...document.querySelectorAll('h2')].find((one) => one.innerText === 'Where a step goes')?.parentElement"
    with served_to(page, played) as console:
        page.open(f"{console.url}?run={quote(RUN, safe='')}", width, 900)
        page.wait_for(f"{TEXT}.includes('Time of a step, by rank')")
        assert page.value(f"{table} === undefined"), "a run that is judged by sums has no such table"
        slow = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(1,))
        played.now += 2
        state = replace(played.view().state, verdict=slow, evaluated_unix_seconds=played.now)
        played.evaluate(replace(state, breakdown=a_breakdown(0.3)))
        text = page.wait_for(f"{table}?.innerText")
        for part in ("own work of stage 1", "excess of rank 1", "pipeline bubble", "tensor communication"):
            assert part in text
        assert "4 groups of 2 ranks, 64 MiB at 80 GB/s" in text and "400 ms" in text
        page.value(f"{table}.scrollIntoView()")
        page.screenshot(Path(os.environ.get("RANKSCOPE_SCREENSHOTS", tmp_path)) / f"step-parts-{width}.png")
        assert page.value("document.documentElement.scrollWidth <= innerWidth")
        assert serious_findings(page) == []


NUMBERS = "main th.number, main dt, main .phases > * > :last-child, main .verdict .faint span, main .chart"


@pytest.mark.parametrize("name", [name for name in PAGES if name != "hang"])  # which has none
def test_every_number_has_a_definition(name: str, page: Page, fleet: str) -> None:
    open_page(page, fleet, name, 1280, 900)
    numbers = f"[...document.querySelectorAll({NUMBERS!r})]"
    assert page.value(f"{numbers}.length") > 4
    bare = f"{numbers}.filter((one) => !one.closest('[title]') && !one.querySelector('[title]'))"
    assert page.value(f"{bare}.map((one) => one.outerHTML)") == []


@pytest.mark.parametrize("variant", ["light", "dark", "narrow"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_accessible_and_fits(name: str, variant: str, page: Page, fleet: str, tmp_path: Path) -> None:
    """Its picture is written to RANKSCOPE_SCREENSHOTS, if that names a folder."""
    open_page(page, fleet, name, 400 if variant == "narrow" else 1280, 900, variant == "dark")
    page.screenshot(Path(os.environ.get("RANKSCOPE_SCREENSHOTS", tmp_path)) / f"{name}-{variant}.png")
    assert page.value("document.documentElement.scrollWidth <= innerWidth")
    assert serious_findings(page) == []


def test_documentation_pictures_are_small_and_three_are_in_the_readme() -> None:
    for name, (_, height) in PICTURES.items():
        content = (IMAGES / f"console-{name}.png").read_bytes()
        assert len(content) <= 150_000
        assert unpack(">II", content[16:24]) == (WIDTH, height)
    readme = (ROOT / "README.md").read_text()
    assert sum(f"docs/images/console-{name}.png" in readme for name in PICTURES) == 3


def test_large_run_captures_preselect_straggler_and_peer_with_a_warning(page: Page, fleet: str) -> None:
    open_page(page, fleet, "run", 1280, 800)
    press(page, "Capture…")
    assert page.wait_for("document.querySelector('form [name=ranks]')?.value") == "straggler+peer"
    assert page.value("document.querySelector('form').innerText.includes('are compared with each other')")
    press(page, "all")
    page.wait_for("!document.querySelector('form').innerText.includes('are compared with each other')")
    assert page.value("document.querySelector('form [name=ranks]').value") == "all"
    assert serious_findings(page) == []


@contextmanager
def job_service(folder: Path, report: HangReport | None = None, prometheus_url: str = "") -> Iterator[Channels]:
    """Channels to a JobService that has the report of a hang, and makes fleet reports from Prometheus."""
    store, reports = HangStore(FolderFiles(folder / "hangs")), FleetReports(FleetUsage(LostSeconds()), prometheus_url)
    if report is not None:
        store.keep(report)
    api = grpc.server(ThreadPoolExecutor(2))
    add_JobServiceServicer_to_server(JobServicer(Correlator(), store, reports), api)
    target = f"unix:{folder / 'jobs.sock'}"
    api.add_insecure_port(target)
    api.start()
    try:
        yield lambda request: grpc.insecure_channel(target)
    finally:
        api.stop(None).wait()
        reports.close()
        store.close()


def test_a_hang_report_lists_the_odd_rank_first_with_collectives(page: Page, tmp_path: Path) -> None:
    """Of a real job of three ranks, in which rank 2 never entered a collective."""
    report = msgspec.json.decode((ROOT / "tests" / "data" / "hang_report.json").read_bytes(), type=HangReport)
    with job_service(tmp_path, report) as channels, served_to(page, Played(), channels=channels) as console:
        page.open(console.url, 1280, 900)
        page.wait_for(f"{TEXT}.includes('No training job is seen')")  # so it hears keys
        page.type("h")
        page.wait_for("document.querySelectorAll('tbody tr').length === 1")
        page.value("document.querySelector('a.run').click()")
        page.wait_for(f"document.querySelector('h1')?.innerText === 'Hang of {report.run}'")
        places = page.value("[...document.querySelectorAll('summary')].map((one) => one.innerText)")
        assert places[0].startswith("rank 2 in wait_for_schedule (hanging.py:57)")
        assert places[1].startswith("2 ranks in backward (hanging.py:174)") and places[1].endswith("ranks 0-1")
        stacks = page.value("[...document.querySelectorAll('details[open] pre')].map((one) => one.innerText)")
        assert stacks == ["\n".join(report.places[0].stack)]
        rows = page.value("[...document.querySelectorAll('tbody tr')].map((one) => one.innerText.split('\\t'))")
        assert [row[1:3] for row in rows] == [["0-1", "waits"], ["2", "never entered"]]
        assert all(row[0] == "all_reduce seq 66 of group 0 (default_pg)" for row in rows)
        assert serious_findings(page) == []


def test_a_report_page_shows_progress_then_tables(page: Page, tmp_path: Path) -> None:
    may_answer = threading.Event()

    def answer(query: str) -> tuple[int, object]:
        if "mfu_target" in query:
            may_answer.wait()
        return of_a_run(query)

    with (
        server(answer) as url,
        job_service(tmp_path, prometheus_url=url) as channels,
        served_to(page, Played(), channels=channels) as console,
    ):
        page.open(console.url, 1280, 900)
        page.wait_for(f"{TEXT}.includes('No training job is seen')")
        page.value("[...document.querySelectorAll('nav a')].find((one) => one.innerText === 'Report').click()")
        page.wait_for(f"{TEXT}.includes('The report is being made: ')")
        press(page, "24 h")
        may_answer.set()
        page.wait_for(f"{TEXT}.includes('1 run on 1 node used 0.5 GPU-hours')")
        assert page.value("location.search") == "?view=report&since=24h"
        titles = page.value("[...document.querySelectorAll('h2')].map((one) => one.innerText)")
        assert {"GPU-hours lost, by verdict", "By team", "By run", "By node"} <= set(titles)
        assert page.value(f"{TEXT}.includes('<script>alert(1)')") and not page.value("document.scripts.length > 1")
        assert serious_findings(page) == []


def test_a_report_that_fails_says_what_to_do(chromium_page: Page, tmp_path: Path) -> None:
    page = chromium_page  # notes the answer 503 as an error
    with (
        job_service(tmp_path, prometheus_url="http://127.0.0.1:1") as channels,
        served_to(page, Played(), channels=channels) as console,
    ):
        page.open(f"{console.url}?view=report")
        page.wait_for(f"{TEXT}.includes('see that it runs')")
