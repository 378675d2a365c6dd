"""An attacker at the console: text that containers choose, and pages of other origins in the same browser."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import RankWindow, StackSummary, StepStatistics
from tests.console.serving import TEXT, port_of, served
from tests.support.waiting import wait_until
from tools.chromium import Page
from tools.played_runs import Played

SCRIPT = "<script>window.owned=1</script>"
IMAGE = "<img src=x onerror=window.owned=1>"
# HTML, a quote, right-to-left override, an escape sequence, a null and a link that is a script.
HOSTILE = f"{SCRIPT}{IMAGE}\"'`${{owned}}\u202eevil\x1b[2J\x00</title></textarea>javascript:window.owned=1"
WINDOW = RankWindow(
    start_unix_nanos=0,
    end_unix_nanos=2 * 10**9,
    steps=20,
    step_seconds=StepStatistics(p50=0.1),
    wait_source=HOSTILE,
    stacks=StackSummary(phase_shares={HOSTILE: 1.0}),
    problems=[HOSTILE],
)
VERDICT = Verdict(
    Kind.SLOW_RANK,
    HOSTILE,
    Severity.ALARM,
    culprits=(1,),
    cause=Cause(HOSTILE, (FrameSeen(HOSTILE, f"/app/{HOSTILE}", 7, 0.5, 0.5, HOSTILE),), HOSTILE),
)
IS_CLEAN = """(() => {
  const allowed = new Set([...document.scripts].filter((one) => one.src.startsWith(location.origin)));
  return window.owned === undefined && document.images.length === 0
    && [...document.querySelectorAll('script')].every((one) => allowed.has(one))
    && [...document.links].every((one) => one.protocol === 'http:' && one.origin === location.origin)
    && [...document.querySelectorAll('*')].flatMap((one) => one.getAttributeNames()).every((name) => !/^on/.test(name))
    && !/[\\u202a-\\u202e\\u2066-\\u2069\\u001b\\u0000]/.test(document.body.textContent + document.title)
    && document.documentElement.scrollWidth <= innerWidth;
})()"""


def hostile(run: str, rank: int, size: int) -> RankIdentity:
    return RankIdentity(
        job=run, rank=rank, world_size=size, node=HOSTILE, pod_name=HOSTILE, gpu_model=HOSTILE, pid=rank + 1
    )


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    played = Played(identities=hostile)
    for _ in range(5):
        played.tick(run=HOSTILE, verdict=VERDICT, window=WINDOW)
        played.tick(run="x" * 600, verdict=VERDICT, window=WINDOW)
    with served(played) as console:
        yield console.url


@pytest.mark.parametrize("width", [1280, 400])
def test_text_of_a_container_is_shown_as_text(page: Page, address: str, width: int) -> None:
    page.open(address, width)
    page.wait_for("document.querySelectorAll('tbody tr').length === 2")
    assert SCRIPT in page.value("document.querySelector('main').textContent")
    assert page.value(IS_CLEAN)

    page.value("[...document.querySelectorAll('a.run')].find((one) => one.innerText.includes('owned')).click()")
    page.wait_for("document.querySelector('.heatmap canvas') !== null")
    assert SCRIPT in page.value("document.querySelector('h1').textContent")
    assert SCRIPT in page.value("document.title")
    assert page.value(IS_CLEAN)

    page.value("document.querySelector('.phases a').click()")
    page.wait_for(f"{TEXT}.includes('process')")
    assert f"node {SCRIPT}" in page.value(TEXT)
    assert page.value(IS_CLEAN)


def test_what_the_address_says_is_shown_as_text(chromium_page: Page, fleet: str) -> None:
    """A link that an attacker sends. The server is asked for a run that it does not have."""
    page = chromium_page
    page.open(f"{fleet}?run=%3Cimg%20src%3Dx%20onerror%3Dwindow.owned%3D1%3E&rank=%3Cb%3E&signal=__proto__&sort=%22%3E")
    page.wait_for("document.querySelector('.notice')?.innerText.includes('Expected int')")
    assert page.value(IS_CLEAN)
    asked = [one for one in page.events if "api/v1/rank" in json.dumps(one) and one["method"].endswith("WillBeSent")]
    assert len(asked) < 10  # not again at once
    # The browser notes each answer of 400, and nothing else.
    assert [one for one in page.problems() if "status of 400" not in one] == []


class OtherOrigin(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>evil</title>")

    def log_message(self, *arguments: object, **named: object) -> None:
        pass


@pytest.fixture(scope="module")
def evil() -> Iterator[int]:
    """The port of a server of another origin."""
    with ThreadingHTTPServer(("127.0.0.1", 0), OtherOrigin) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "evil.example"])
def test_another_origin_can_neither_read_frame_nor_change_anything(
    host: str, chromium_page: Page, fleet: str, evil: int
) -> None:
    page = chromium_page
    page.open(f"http://{host}:{evil}/")
    runs = f"{fleet}api/v1/runs"
    for address in (runs, f"{fleet}api/v1/step?run=vision/vit-22b"):
        read = f"fetch('{address}').then((answer) => answer.text(), (error) => String(error))"
        assert page.value(read).startswith("TypeError")
    page.value(f"fetch('{runs}', {{ mode: 'no-cors' }}).then(() => 0, () => 0)")
    page.value(f"fetch('{runs}', {{ method: 'POST', mode: 'no-cors', body: '{{}}' }}).then(() => 0, () => 0)")
    events = "new Promise((done) => { const one = new EventSource('%s'); one.onmessage = () => done('event');"
    events += "one.addEventListener('runs', () => done('event')); one.onerror = () => done('refused'); })"
    assert page.value(events % f"{fleet}api/v1/events") == "refused"
    script = "new Promise((done) => { const one = document.createElement('script'); one.src = '%s';"
    script += "one.onload = () => done('loaded'); one.onerror = () => done('refused'); document.head.append(one); })"
    assert page.value(script % runs) == "refused"
    frame = "new Promise((done) => { const one = document.createElement('iframe'); one.src = '%s';"
    frame += "one.onload = () => done(one.contentDocument === null ? 'opaque' : 'read'); document.body.append(one); })"
    assert page.value(frame % fleet) == "opaque"
    # The browser notes both a moment later.
    wait_until(
        lambda: any("frame-ancestors" in one or "X-Frame-Options" in one for one in page.problems()), page.problems
    )
    wait_until(lambda: len(statuses(page, f"{fleet}api")) >= 6, lambda: page.events)
    assert {*statuses(page, f"{fleet}api")} == {403}


def statuses(page: Page, prefix: str) -> list[int]:
    """Of the answers to requests whose address begins like that."""
    page.value("0")  # events that were sent before are here then
    asked = {
        one["params"]["requestId"]: one["params"]["request"]["url"]
        for one in page.events
        if one["method"] == "Network.requestWillBeSent"
    }
    answered = [one["params"] for one in page.events if one["method"] == "Network.responseReceivedExtraInfo"]
    return [one["statusCode"] for one in answered if asked.get(one["requestId"], "").startswith(prefix)]


def test_a_dns_name_rebound_to_this_machine_is_refused(chromium_page: Page, fleet: str) -> None:
    """DNS rebinding: for the browser it is one origin with the attacker's own page."""
    page = chromium_page
    page.open(f"http://evil.example:{port_of(fleet)}/")
    assert "the Host header names evil.example" in page.value("document.body.innerText")
    assert page.value("fetch('/api/v1/runs').then((answer) => answer.status)") == 421
