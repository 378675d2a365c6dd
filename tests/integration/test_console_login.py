"""The console's login in Chromium, with tokens of a cluster in memory: what a token opens, and what it does not."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.operator import console_access
from rankscope.operator.access import token_review
from rankscope.v1 import capture_service_pb2 as pb
from tests.support.waiting import wait_until
from tests.unit.operator.access.fake_cluster import RUN as MINE
from tests.unit.operator.access.fake_cluster import Cluster
from tests.unit.operator.access.test_profile_service import Fleet
from tests.unit.operator.console.test_console_access import THEIRS, ask, recorded, served
from tools.chromium import Browser, Page, browser
from tools.played_runs import Played

TEXT = "document.querySelector('main')?.innerText ?? ''"
FIELD = "document.querySelector('input[type=password]')"
HTML = "document.documentElement.outerHTML"
SECRET = "unreleased_model"
FINDING = Verdict(
    Kind.SLOW_RANK,
    SECRET,
    Severity.ALARM,
    culprits=(1,),
    cause=Cause("input", (FrameSeen(SECRET, f"/app/{SECRET}.py", 7, 0.5, 0.5, "input"),), ""),
)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as started:
        yield started


@pytest.fixture
def page(chromium: Browser) -> Iterator[Page]:
    made = chromium.page()
    yield made
    made.close()


@dataclass
class Served:
    """A console with a run and a recording in each of two namespaces."""

    url: str
    port: int
    cluster: Cluster
    played: Played
    ada: str  # the token of a caller of MINE
    bob: str  # of THEIRS


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    monkeypatch.setattr(token_review, "YES_SECONDS", 0.0)
    monkeypatch.setattr(console_access, "RECHECK_SECONDS", 0.0)
    fleet, played = Fleet(), Played()
    cluster = fleet.cluster
    played.tick(run=MINE)
    played.tick(run=THEIRS, verdict=FINDING)
    ada, bob = recorded(cluster), cluster.may("bob", "list", "get", "create", "get/artifacts", namespace="other")
    wanted = pb.StartCaptureRequest(job=THEIRS, ranks="all", steps=3, id="theirs", reason=SECRET)
    stream = cluster.stub(bob).StartCapture(wanted)
    next(stream)
    stream.cancel()
    with served(cluster, played) as port:
        yield Served(f"http://127.0.0.1:{port}/", port, cluster, played, ada, bob)
    fleet.stop()


def wait_for(browser: Page, condition: str) -> Any:
    return wait_until(lambda: browser.value(condition), lambda: browser.value(TEXT))


def log_in(browser: Page, token: str) -> None:
    wait_for(browser, f"{FIELD} !== null")
    browser.value(f"{FIELD}.focus(), {FIELD}.select()")
    browser.type(token)
    browser.value("document.querySelector('form button').click()")


def visit(browser: Page, url: str) -> None:
    """Returns when the page before is gone."""
    browser.value("window.isOld = true")
    browser.call("Page.navigate", url=url)
    wait_for(browser, "window.isOld === undefined && document.body !== null")


def click(browser: Page, selector: str) -> None:
    wait_for(browser, f"document.querySelector({selector!r}) !== null")
    browser.click(*browser.center(selector))


def opened(chromium: Browser, kind: str, part: str) -> Page:
    """The frame or tab with this in its address."""

    def targets() -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = chromium.call("Target.getTargets", filter=[{"type": kind}])["targetInfos"]
        return found

    found = wait_until(lambda: [each["targetId"] for each in targets() if part in each["url"]], targets)
    return chromium.attached(found[0])


def test_a_token_is_kept_in_the_tab_until_it_ends(page: Page, console: Served) -> None:
    visit(page, console.url)
    log_in(page, "forged")
    wait_for(page, "document.querySelector('[role=alert]')?.innerText.includes('not accepted')")
    log_in(page, console.ada)
    wait_for(page, f"({TEXT}).includes('{MINE}')")
    assert not page.value(f"({TEXT}).includes('{THEIRS}')")
    assert page.value("[sessionStorage.getItem('token'), JSON.stringify(localStorage), document.cookie]") == [
        *(console.ada, '{"theme":"system"}', "")
    ]
    page.call("Page.reload")
    wait_for(page, f"({TEXT}).includes('{MINE}')")
    console.cluster.tokens.clear()
    console.played.tick(run=MINE)
    wait_for(page, f"{FIELD} !== null")
    assert not page.value(f"({TEXT}).includes('{MINE}')")


# Refusals of a capture are read when the test says so.
LATE_REFUSALS = """
const json = Response.prototype.json;
const released = new Promise((release) => { window.release = release; });
let hold;
const held = new Promise((done) => { hold = done; });
Response.prototype.json = async function () {
  const said = await json.call(this);
  if (this.status !== 401) return said;
  if (!this.url.includes('/capture?')) { await held; return said; }  // or the page would not ask for the capture
  window.isHeld = true;
  hold();
  await released;
  return said;
};
"""


def test_a_late_refusal_after_login_does_not_ask_again(page: Page, console: Served) -> None:
    page.call("Page.addScriptToEvaluateOnNewDocument", source=LATE_REFUSALS)
    visit(page, f"{console.url}?view=captures&capture=lab%2Fmine")
    wait_for(page, "window.isHeld === true")
    log_in(page, console.ada)
    wait_for(page, "document.querySelector('a[download]') !== null")
    page.value("window.release(), new Promise((done) => setTimeout(done, 500))")
    assert page.value(f"{FIELD} === null")


def test_a_token_opens_recordings_and_flame_graphs(
    page: Page, console: Served, chromium: Browser, tmp_path: Path
) -> None:
    chromium.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    visit(page, f"{console.url}?view=captures&capture=lab%2Fmine")
    log_in(page, console.ada)
    click(page, "a[download]")
    # It is there, and empty, when the download begins.
    wait_until(lambda: any(path.read_bytes() == console.cluster.traces.content for path in tmp_path.glob("*.gz")))
    assert page.value("location.search.includes('lab%2Fmine')")  # the page is still there

    visit(page, f"{console.url}?run={MINE}&rank=0&flame=none")
    frame = opened(chromium, "iframe", "/flame?")
    wait_for(frame, f"document.querySelector('canvas') && document.title.includes('{MINE}, rank 0')")
    click(page, "a[target=_blank]")
    tab = opened(chromium, "page", "/flame?")
    wait_for(tab, f"document.querySelector('canvas') && document.title.includes('{MINE}, rank 0')")
    for graph in (frame, tab):  # its script runs, and has no access to the token
        assert graph.value("origin") == "null" and console.ada not in graph.value("location.href")
        assert graph.value(
            "(() => { try { return sessionStorage.length; } catch (error) { return error.name; } })()"
        ) == ("SecurityError")
        wait_for(graph, "document.querySelector('canvas').width > 300")
    tab.close()


class Perfetto(BaseHTTPRequestHandler):
    """A page that takes a trace as Perfetto does, and shows it."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(
            b"<!doctype html><script>addEventListener('message', (event) => {"
            b"if (event.data === 'PING') event.source.postMessage('PONG', event.origin);"
            b"else document.title = new TextDecoder().decode(event.data.perfetto.buffer); })</script>"
        )

    def log_message(self, *arguments: object, **named: object) -> None:
        pass


def test_a_token_opens_recordings_in_perfetto(page: Page, console: Served, chromium: Browser) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Perfetto) as perfetto:
        thread = threading.Thread(target=perfetto.serve_forever)
        thread.start()
        visit(page, f"{console.url}?view=captures&capture=lab%2Fmine")
        page.value(f"localStorage.setItem('perfetto', 'http://127.0.0.1:{perfetto.server_port}/shown')")
        log_in(page, console.ada)
        click(page, "td button")
        tab = opened(chromium, "page", "/shown")
        wait_for(tab, f"document.title === '{console.cluster.traces.content.decode()}'")
        tab.close()
        page.value("localStorage.clear()")
        perfetto.shutdown()
        thread.join()


def test_an_ended_token_is_answered_with_the_next_step(page: Page, console: Served, chromium: Browser) -> None:
    visit(page, f"{console.url}?view=captures&capture=lab%2Fmine")
    log_in(page, console.ada)
    wait_for(page, "document.querySelector('a[download]') !== null")
    # A copy of the link, which stays where it is if the page asks for a token before the click.
    page.value(
        "Object.assign(document.body.appendChild(document.querySelector('a[download]').cloneNode(true)).style,"
        "{ position: 'fixed', top: 0, left: 0 }), 0"
    )
    console.cluster.tokens.clear()
    click(page, "body > a[download]")
    tab = opened(chromium, "page", "/capture/artifact?")
    wait_for(tab, "document.body?.innerText.includes('kubectl create token')")
    assert '"next":"log in' in tab.value("document.body.innerText")
    tab.close()


ADDRESSES = (
    f"?run={THEIRS}",
    f"?run={THEIRS}&rank=1",
    f"?run={THEIRS}&rank=1&flame=cohort",
    f"?view=captures&run={THEIRS}",
    "?view=captures&capture=other%2Ftheirs",
    f"?view=hangs&run={THEIRS}",
)


def test_addresses_and_events_show_no_run_of_another_namespace(page: Page, console: Served) -> None:
    visit(page, console.url)
    log_in(page, console.ada)
    wait_for(page, f"({TEXT}).includes('{MINE}')")
    console.played.tick(run=THEIRS, verdict=FINDING)
    console.played.tick(run=MINE, pace=(0.25, 0.4, 0.1))
    wait_for(page, f"({TEXT}).includes('250 ms')")
    assert SECRET not in page.value(HTML)
    for address in ADDRESSES:
        visit(page, console.url + address)
        wait_for(page, "document.querySelector('.notice') !== null")
        assert SECRET not in page.value(HTML)
        assert page.value("document.querySelector('canvas, iframe')") is None
    # To the caller of that namespace they do.
    page.value("sessionStorage.clear()")
    visit(page, console.url)
    log_in(page, console.bob)
    for address in ("", ADDRESSES[0], ADDRESSES[3], ADDRESSES[4]):
        visit(page, console.url + address)
        wait_for(page, f"{HTML}.includes('{SECRET}')")


def test_an_address_that_another_caller_sends_opens_nothing(page: Page, console: Served) -> None:
    visit(page, console.url)
    log_in(page, console.ada)
    wait_for(page, f"({TEXT}).includes('{MINE}')")
    recordings = ("capture/artifact?id=other/theirs&rank=0", "capture/merged?id=other/theirs")
    for address in (*recordings, f"flame?run={THEIRS}", f"run?run={THEIRS}"):
        # Typed into the browser it has no token; with a token, it is the reader's.
        visit(page, f"{console.url}api/v1/{address}")
        wait_for(page, "document.body?.innerText.includes('kubectl create token')")
        assert ask(console.port, f"/{address}", console.ada).status in (403, 404)
