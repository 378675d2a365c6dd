from __future__ import annotations

import gzip
import threading
import time
import urllib.request
from collections.abc import Iterable
from email.message import Message

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.common.http_server import HttpServer, Limits, Request, Response, Route
from rankscope.common.metric_table import MetricsPage
from tests.support.measuring import Measured


class Counted(Collector):
    def __init__(self) -> None:
        self.collections = 0

    def collect(self) -> Iterable[Metric]:
        self.collections += 1
        yield GaugeMetricFamily("collections", "How often.", value=self.collections)
        yield CounterMetricFamily("others", "Something else.", value=3)


def ask(page: MetricsPage, query: str = "", **headers: str) -> Response:
    message = Message()
    for name, value in headers.items():
        message[name.replace("_", "-")] = value
    return page.response(Request("/metrics", query, message, "127.0.0.1", b""))


def test_a_page_is_rendered_once_until_it_changes() -> None:
    source, version = Counted(), [object()]
    page = MetricsPage([source], lambda: version[0])
    plain = ask(page).body
    assert b"collections 1.0" in plain
    packed = ask(page, Accept_Encoding="deflate, gzip;q=1")
    assert packed.headers["Content-Encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain
    assert ask(page, Accept_Encoding="gzip").body is packed.body
    openmetrics = ask(page, Accept="application/openmetrics-text;version=1.0.0")
    assert openmetrics.content_type.startswith("application/openmetrics-text")
    assert openmetrics.body.endswith(b"# EOF\n")
    assert source.collections == 1
    version[0] = object()
    assert b"collections 2.0" in ask(page).body


def test_a_selection_has_the_named_samples_only() -> None:
    page = MetricsPage([Counted()], lambda: None)
    body = ask(page, "name[]=others_total&name[]=missing").body
    assert b"others_total 3.0" in body
    assert b"collections" not in body


def test_without_a_version_every_request_collects() -> None:
    page = MetricsPage([Counted()])
    assert [b"collections 2.0" in ask(page).body for _ in range(2)] == [False, True]


def test_formats_that_a_caller_invents_are_not_all_kept() -> None:
    page = MetricsPage([Counted()], lambda: None)
    accepts = [f"application/openmetrics-text;version=1.0.{number}" for number in range(100)]
    types = [ask(page, Accept=accept).content_type for accept in accepts]
    assert len(set(types)) < 20
    assert types[-1].startswith("text/plain")


def test_requests_beyond_the_core_share_wait_and_are_answered(measured: Measured) -> None:
    def work(request: Request) -> Response:
        until = time.thread_time() + 0.02
        while time.thread_time() < until:
            pass
        return Response(200, b"done\n")

    server = HttpServer("127.0.0.1", 0, {("GET", "/"): Route(work)}, limits=Limits(core_ratio=0.2))
    server.start()
    try:
        started = time.monotonic()

        def ask_often() -> None:
            for _ in range(25):
                with urllib.request.urlopen(f"{server.url}/", timeout=180) as answer:
                    assert answer.read() == b"done\n"

        callers = [threading.Thread(target=ask_often) for _ in range(4)]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
        # A hundred requests of 20 ms are 2 s of CPU time; a burst of 1 s is free.
        assert server.cpu_seconds >= 2.0
        share = (server.cpu_seconds - 1.5) / (time.monotonic() - started)
        measured("CPU of requests beyond their share", share, "cores", at_most=0.2)
    finally:
        server.stop()
