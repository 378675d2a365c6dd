"""The console's API as a browser and an attacker see it: a running server, asked with http.client."""

from __future__ import annotations

import http.client
import json
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import jsonschema
import numpy as np
import pytest
from starlette.requests import Request
from starlette.types import ASGIApp

from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict
from rankscope.operator.console import api, run_views, server
from rankscope.operator.console.answers import RunDetail
from rankscope.operator.console.api import DOCUMENT, ENDPOINTS, AnswerCache, RunQuery
from rankscope.operator.console.endpoints import Channels, no_channel
from rankscope.operator.console.history import RunView
from rankscope.operator.console.server import SECURITY_HEADERS, Access, ConsoleServer
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.window_pb2 import GpuUsage, Memory, ProcessUsage, RankWindow, StackSummary, Stall, StepStatistics
from tools.played_runs import RUN, Played, usual

PATIENCE_SECONDS = 120.0
SLOW = Verdict(Kind.SLOW_RANK, "rank 1", Severity.ALARM, culprits=(1,), impact_ratio=0.4, lost_gpu_seconds=7200.0)
WINDOW = RankWindow(
    end_unix_nanos=2_000_000_000,
    steps=20,
    step_seconds=StepStatistics(p50=0.1),
    figures={"forward_seconds": 0.03, "host_seconds": 0.02},
    process=ProcessUsage(cpu_seconds=1.0, threads=9),
    memory=Memory(allocated_bytes=1 << 30),
    gpu=GpuUsage(gpus=1, utilization_ratio=0.9, throttled_seconds={"power": 0.5}, row_remap_pending=True),
    stacks=StackSummary(phase_shares={"forward": 1.0}),
    stall=Stall(seconds_since_step=12.0),
)


@contextmanager
def served(played: Played, access: Access | None = None, *names: str, channels: Channels = no_channel) -> Iterator[str]:
    """The address."""
    console = ConsoleServer(played.history, "127.0.0.1", 0, access=access, names=names, channels=channels)
    console.start()
    try:
        yield urlsplit(console.url).netloc
    finally:
        console.stop()


@pytest.fixture(scope="module")
def played() -> Played:
    played = Played()
    played.now += 1 / 7  # times as clocks have them
    for _ in range(10):
        played.tick(ranks=8, window=WINDOW)
    played.tick(ranks=8, verdict=SLOW, window=WINDOW)
    played.tick(run="bert", ranks=1)
    return played


@pytest.fixture(scope="module")
def address(played: Played) -> Iterator[str]:
    with served(played) as address:
        yield address


class Answer:
    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    @property
    def json(self) -> Any:
        assert self.headers["content-type"] == "application/json"
        return json.loads(self.body)


def ask(address: str, path: str, method: str = "GET", body: str | None = None, **headers: str) -> Answer:
    connection = http.client.HTTPConnection(address, timeout=PATIENCE_SECONDS)
    try:
        connection.request(method, path, body, {name.replace("_", "-"): text for name, text in headers.items()})
        return Answer(connection.getresponse())
    finally:
        connection.close()


def check(answer: Any, name: str) -> None:
    """Against the document, in which nothing may be missing either."""
    schema = {"$ref": f"#/components/schemas/{name}", "components": DOCUMENT["components"]}
    jsonschema.Draft202012Validator(schema).validate(answer)
    assert answer.keys() == DOCUMENT["components"]["schemas"][name]["properties"].keys()


def heatmap(address: str, query: str) -> tuple[Any, np.ndarray]:
    answer = ask(address, f"/api/v1/heatmap?{query}")
    assert answer.status == 200, answer.body
    (length,) = struct.unpack_from("<I", answer.body)
    header = json.loads(answer.body[4 : 4 + length])
    check(header, "HeatmapHeader")
    assert (4 + length) % 4 == 0
    return header, np.frombuffer(answer.body, "<f4", offset=4 + length).reshape(len(header["ranks"]), -1)


def test_every_answer_is_what_the_document_says(address: str) -> None:
    assert ask(address, "/api/v1/openapi.json").json == DOCUMENT
    queries = {"/run": f"?run={RUN}", "/rank": f"?run={RUN}&rank=3", "/step": f"?run={RUN}"}
    for endpoint in (each for each in ENDPOINTS if each.media == api.JSON and not each.is_remote):
        check(ask(address, api.PREFIX + endpoint.path + queries.get(endpoint.path, "")).json, endpoint.answer.__name__)
    parameters = DOCUMENT["paths"]["/api/v1/heatmap"]["get"]["parameters"]
    assert [(each["name"], each["required"]) for each in parameters] == [
        *(("run", True), ("signal", False), ("since", False), ("columns", False))
    ]


def test_the_list_has_what_a_fleet_page_shows(address: str, played: Played) -> None:
    told = ask(address, "/api/v1/runs").json
    llama, bert = told["runs"]
    assert told["is_complete"] and told["version"] == played.history.version
    assert (llama["run"], llama["namespace"], llama["world_size"], bert["namespace"]) == (RUN, "team", 8, "")
    assert (llama["verdict"]["headline"], llama["verdict"]["culprits"]) == ("rank 1 is slow", [1])
    assert (llama["lost_today_gpu_seconds"], llama["step_seconds"]) == (7200.0, 0.1)
    assert llama["recent_step_seconds"] == [pytest.approx(0.1)] * 11


def test_a_rank_has_its_latest_window_and_signals_beside_cohort(address: str) -> None:
    told = ask(address, f"/api/v1/rank?run={quote(RUN, safe='')}&rank=3").json
    latest = told["latest"]
    assert (latest["coordinates"], latest["seconds_since_step"]) == ({"pipeline": 1, "data": 1}, 12.0)
    assert (latest["phase_seconds"], latest["phase_shares"]) == ({"forward": 0.03}, {"forward": 1.0})
    assert latest["throttled_seconds"] == {"power": 0.5} and latest["gpu"]["row_remap_pending"] == 1
    assert (latest["memory"], latest["process"]["threads"]) == ({"allocated_bytes": 1 << 30}, 9)
    (own,) = [series for series in told["history"]["series"] if series["signal"] == "self_seconds"]
    assert own["values"] == [pytest.approx(0.093)] * 11 and own["cohort_median"] == [pytest.approx(0.094)] * 11


def test_a_heat_map_matrix_follows_the_order_of_its_header(address: str, played: Played) -> None:
    header, matrix = heatmap(address, f"run={RUN}&signal=self_seconds")
    assert header["ranks"] == [0, 2, 4, 6, 1, 3, 5, 7] and matrix.shape == (8, 11)
    assert matrix[:, 0] == pytest.approx([0.09 + rank / 1e3 for rank in header["ranks"]])
    assert header["medians"] == pytest.approx(np.median(matrix, axis=0)) and header["unit"] == "seconds/step"
    assert heatmap(address, f"run={RUN}&since={header['ends'][-1]}")[0]["starts"] == []
    later, part = heatmap(address, f"run={RUN}&since={header['ends'][-3]}")
    assert later["ends"] == header["ends"][-2:] and (part == matrix[:, -2:]).all()
    fewer, means = heatmap(address, f"run={RUN}&columns=4")
    assert len(fewer["starts"]) == 4 and (fewer["starts"][0], fewer["ends"][-1]) == (
        *(header["starts"][0], header["ends"][-1]),
    )
    assert means == pytest.approx(np.repeat(matrix[:, :1], 4, axis=1))
    empty, none = heatmap(address, f"run={RUN}&signal=gpu_power_watts")
    assert {*empty["medians"]} == {None} and np.isnan(none).all()
    assert heatmap(address, f"run={RUN}&since={played.now + 1}")[0]["starts"] == []


@pytest.mark.parametrize(
    ("path", "status", "advice"),
    [
        ("/api/v1/run", 400, "openapi.json"),
        ("/api/v1/run?run=x", 404, "/api/v1/runs"),
        ("/api/v1/run?run=%00%1b[2J", 404, "/api/v1/runs"),
        (f"/api/v1/run?run={'x' * 601}", 400, "openapi.json"),
        (f"/api/v1/rank?run={RUN}&rank=8", 404, "/api/v1/run"),
        (f"/api/v1/rank?run={RUN}&rank=-1", 400, "openapi.json"),
        (f"/api/v1/heatmap?run={RUN}&signal=x", 400, "/api/v1/signals"),
        (f"/api/v1/heatmap?run={RUN}&columns=1e9", 400, "openapi.json"),
        ("/api/v1/runs?limit=3", 400, "openapi.json"),
        ("/api/v1/nothing", 404, "openapi.json"),
        ("/../server.py", 404, "openapi.json"),
        ("/%2e%2e/server.py", 404, "openapi.json"),
        ("/static/../../api.py", 404, "openapi.json"),
    ],
)
def test_an_error_says_what_to_do_next(address: str, path: str, status: int, advice: str) -> None:
    answer = ask(address, path)
    check(answer.json, "Problem")
    assert (answer.status, advice in answer.json["next"]) == (status, True)
    assert answer.json["error"].isprintable()


@pytest.mark.parametrize("path", ["/", "/api/v1/runs", "/api/v1/nothing", "/api/v1/run"])
def test_every_answer_has_the_headers_that_keep_a_browser_safe(address: str, path: str) -> None:
    answer = ask(address, path)
    assert {name: answer.headers[name] for name in SECURITY_HEADERS} == SECURITY_HEADERS
    assert answer.headers["cache-control"] in ("no-store", "no-cache") and "server" not in answer.headers
    assert "unsafe" not in SECURITY_HEADERS["content-security-policy"]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:9469", "127.0.0.1.evil.example", "192.0.2.1", "[", ""])
def test_a_dns_rebinding_page_gets_nothing(address: str, host: str) -> None:
    for path in ("/", "/api/v1/runs"):
        answer = ask(address, path, Host=host)
        assert answer.status == 421 and b"llama" not in answer.body


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "127.0.0.5", "[::1]:9469"])
def test_local_host_names_are_served_at_any_port(address: str, host: str) -> None:
    assert ask(address, "/api/v1/runs", Host=host).status == 200


def test_pages_of_other_origins_neither_read_nor_write(address: str) -> None:
    for foreign in (
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},  # another port of this machine
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
    ):
        assert ask(address, "/api/v1/runs", **foreign).status == 403
        assert ask(address, "/api/v1/runs", "POST", "{}", Content_Type="application/json", **foreign).status == 403
    # A link may open the page.
    assert ask(address, "/", Sec_Fetch_Site="cross-site").status == 200
    same = {"Origin": f"http://{address}", "Sec_Fetch_Site": "same-origin"}
    assert ask(address, "/api/v1/runs", **same).status == 200
    # What a form can send is no JSON; the rest is the API's own answer.
    assert ask(address, "/api/v1/runs", "POST", "{}", Content_Type="text/plain", **same).status == 415
    assert ask(address, "/api/v1/runs", "POST", "{}", Content_Type="application/json", **same).status == 405


def test_names_and_texts_of_containers_are_printable_and_stay_data() -> None:
    hostile = "<script>alert(1)</script>\x1b[2J\u202e"
    cause = Cause(evidence=hostile)
    verdict = Verdict(Kind.SLOW_RANK, hostile, Severity.ALARM, culprits=(0,), group=hostile, cause=cause)
    played = Played()
    played.tick(run=hostile, ranks=1, verdict=verdict, window=RankWindow(problems=[hostile], wait_source=hostile))
    with served(played) as address:
        (run,) = ask(address, "/api/v1/runs").json["runs"]
        name = quote(run["run"])
        answers = [ask(address, f"/api/v1/{path}") for path in ("runs", f"run?run={name}", f"rank?run={name}&rank=0")]
    for answer in answers:
        assert answer.status == 200 and json.dumps(answer.json, ensure_ascii=False).isprintable()
        assert answer.headers["x-content-type-options"] == "nosniff"


def test_files_are_revalidated_unless_their_name_has_a_hash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "assets").mkdir()
    (tmp_path / "index.html").write_text("<p>page</p>")
    (tmp_path / "assets" / "index-Bq3x9_Za.js").write_text("1")
    (tmp_path / "assets" / "outside.js").symlink_to("/etc/hostname")
    monkeypatch.setattr(api, "STATIC", tmp_path)
    with served(Played()) as address:
        page = ask(address, "/")
        assert (page.body, page.headers["cache-control"]) == (b"<p>page</p>", "no-cache")
        assert ask(address, "/", If_None_Match=page.headers["etag"]).status == 304
        assert "immutable" in ask(address, "/assets/index-Bq3x9_Za.js").headers["cache-control"]
        assert ask(address, "/assets/outside.js").status == 404


def test_the_packaged_page_has_no_inline_script_or_style(address: str) -> None:
    page = ask(address, "/")
    assert page.status == 200 and b'id="console"' in page.body
    assert not any(word in page.body.lower() for word in (b"<script>", b"style=", b"onclick", b"http://", b"https://"))


class Events:
    def __init__(self, address: str, receive_bytes: int | None = None) -> None:
        host, _, port = address.partition(":")
        self._socket = socket.socket()
        if receive_bytes is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
        self._socket.settimeout(PATIENCE_SECONDS)
        self._socket.connect((host, int(port)))
        self._socket.sendall(f"GET /api/v1/events HTTP/1.0\r\nHost: {address}\r\n\r\n".encode())
        self.answer = http.client.HTTPResponse(self._socket)
        self.answer.begin()

    def next(self) -> Any:  # HTTP/1.0 has no chunks, which http.client reads byte by byte
        """The next event that is no comment; None at the end."""
        while line := self.answer.readline():
            if line.startswith(b"data: "):
                return json.loads(line[6:])
        return None

    def close(self) -> None:
        self.answer.close()
        self._socket.close()


def test_events_send_all_runs_then_changes_then_all_after_removal() -> None:
    played = Played()
    played.tick(run="a")
    played.tick(run="b")
    with served(played) as address:
        events = Events(address)
        assert events.answer.headers["content-type"].startswith("text/event-stream")
        first = events.next()
        check(first, "RunsAnswer")
        assert first["is_complete"] and [run["run"] for run in first["runs"]] == ["a", "b"]
        played.tick(run="b", verdict=SLOW)
        second = events.next()
        assert not second["is_complete"] and [run["run"] for run in second["runs"]] == ["b"]
        assert second["runs"][0]["verdict"]["kind"] == "slow_rank" and second["version"] > first["version"]
        played.end("a")
        assert events.next()["runs"][0]["ended_unix_seconds"] == played.now
        played.history._limit_bytes = 1
        played.tick(run="b")
        gone = events.next()
        assert gone["is_complete"] and [run["run"] for run in gone["runs"]] == ["b"]
    assert events.next() is None  # the server's end is the stream's
    events.close()


def crowd(played: Played, number: int) -> None:
    """One evaluation of runs whose summaries have some 200 KB together."""
    played.now += 2.0
    text = "x" * 400
    verdict = Verdict(Kind.SLOW_RANK, text, Severity.ALARM, culprits=(0,), cause=Cause(evidence=text))
    played.evaluate(
        *(JobState(f"run-{run}-{text}", 1, verdict, 1.0, played.now, number, 0.1, None, None, ()) for run in range(150))
    )


def test_a_slow_event_reader_gets_the_newest_state_without_queue(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(api, "EVENT_SECONDS", 0.0)
    played = Played()
    with served(played) as address:
        sleeper, quick = Events(address, receive_bytes=65536), Events(address)
        quick.next()
        for number in range(40):
            crowd(played, number)
            assert {run["ranks_seen"] for run in quick.next()["runs"]} == {number}
        received = []
        while not received or received[-1]["version"] < played.history.version:
            received.append(sleeper.next())
        assert len(received) < 40 and {run["ranks_seen"] for run in received[-1]["runs"]} == {39}
        sleeper.close()
        quick.close()


def test_a_reader_that_takes_nothing_for_long_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "EVENT_SECONDS", 0.0)
    monkeypatch.setattr(api, "EVENT_CLIENTS", 2)
    monkeypatch.setattr(server, "READER_SECONDS", 0.3)
    played = Played()
    with served(played) as address:
        sleeper, quick = Events(address, receive_bytes=65536), Events(address)
        quick.next()
        number = 0
        while ask_events(address) == 503:
            crowd(played, number := number + 1)
            quick.next()
        assert number > 3
        sleeper.close()
        quick.close()


def test_event_clients_are_limited_and_leaving_frees_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "EVENT_CLIENTS", 2)
    played = Played()
    with served(played) as address:
        clients = [Events(address) for _ in range(2)]
        refused = ask(address, "/api/v1/events")
        assert refused.status == 503 and "/runs" in refused.json["next"]
        clients.pop().close()
        while ask_events(address) == 503:
            played.tick()
        clients.pop().close()


def ask_events(address: str) -> int:
    events = Events(address)
    events.close()
    return events.answer.status


def test_a_client_without_request_is_disconnected_and_blocks_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "HEAD_SECONDS", PATIENCE_SECONDS)
    with served(Played()) as address:
        host, _, port = address.partition(":")

        def connections(count: int) -> list[socket.socket]:
            return [socket.create_connection((host, int(port)), PATIENCE_SECONDS) for _ in range(count)]

        request, part = f"GET / HTTP/1.1\r\nHost: {address}\r\n\r\n".encode(), b"GET / HTTP/1.1\r\nX: "
        waiting = connections(4)
        waiting[1].sendall(part)
        waiting[2].sendall(part + b"y" * (2 * server.HEAD_BYTES))
        assert _received(waiting[2]).startswith(b"HTTP/1.1 400")
        waiting[3].sendall(request)
        assert waiting[3].recv(65536).startswith(b"HTTP/1.1 200")
        assert ask(address, "/").status == 200
        # From here on no caller is waited for. A connection may be over before anything is sent on it.
        monkeypatch.setattr(server, "HEAD_SECONDS", 0.3)
        idle = [waiting.pop(), *connections(2)]
        for connection, sent in zip(idle, (request + part, part, b""), strict=True):
            with suppress(ConnectionError):
                connection.sendall(sent)
            while _received(connection):
                pass
        for connection in (*idle, *waiting):
            connection.close()


def _received(connection: socket.socket) -> bytes:
    try:
        return connection.recv(65536)
    except ConnectionResetError:
        return b""


def test_a_caller_sees_the_runs_that_it_may_see() -> None:
    class AdaSeesAll:
        def guarded(self, app: ASGIApp) -> ASGIApp:
            return app

        def authorize(self, request: Request, run: str) -> bool:
            return request.headers.get("x-user") == "ada" or run == "bert"

        channel = staticmethod(no_channel)

    played = Played()
    played.tick()
    played.tick(run="bert")
    with served(played, AdaSeesAll(), "console.example") as address:
        assert ask(address, "/api/v1/runs", Host="console.example").status == 200
        assert ask(address, "/api/v1/runs", Host="evil.example").status == 421
        assert [run["run"] for run in ask(address, "/api/v1/runs").json["runs"]] == ["bert"]
        assert [run["run"] for run in ask(address, "/api/v1/runs", X_User="ada").json["runs"]] == [RUN, "bert"]
        for path in ("run?", "rank?rank=0&", "heatmap?"):
            assert ask(address, f"/api/v1/{path}run={RUN}").status == 404
            assert ask(address, f"/api/v1/{path}run={RUN}", X_User="ada").status == 200
            assert ask(address, f"/api/v1/{path}run=bert").status == 200
        events = Events(address)
        assert [run["run"] for run in events.next()["runs"]] == ["bert"]
        events.close()


def test_a_failure_is_answered_without_its_details(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(view: object) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(api, "run_detail", broken)
    with served(played) as address:
        answer = ask(address, f"/api/v1/run?run={RUN}")
        assert answer.status == 500 and "log" in answer.json["next"] and b"secret" not in answer.body
        assert ask(address, "/api/v1/runs").status == 200


def test_without_a_login_only_loopback_is_listened_on() -> None:
    with pytest.raises(ValueError, match="SSH tunnel"):
        ConsoleServer(Played().history, "0.0.0.0", 0)


def test_a_port_that_is_taken_is_an_error_or_replaced() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use"):
            ConsoleServer(Played().history, "127.0.0.1", port)
        console = ConsoleServer(Played().history, "127.0.0.1", port, or_any_port=True)
        assert urlsplit(console.url).port not in (port, 0, None)
        console.stop()


def test_figures_that_are_no_numbers_are_null() -> None:
    played = Played()
    played.tick(lambda rank: usual(rank) if rank else {"steps": 0.0}, ranks=2)
    with served(played) as address:
        assert ask(address, f"/api/v1/run?run={RUN}").json["phase_seconds"]["wait_seconds"] == [None, 0.01]


def test_viewers_of_the_same_version_share_one_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    played = Played()
    played.tick()

    def run_detail(view: RunView, *rest: Any) -> RunDetail:
        made.append(view.version)
        return run_views.run_detail(view, *rest)

    monkeypatch.setattr(api, "run_detail", run_detail)
    with served(played) as address:
        first = ask(address, f"/api/v1/run?run={RUN}").body
        assert ask(address, f"/api/v1/run?run={RUN}").body == first
        assert made == [1]
        played.tick(restarts=1)
        assert ask(address, f"/api/v1/run?run={RUN}").json["restarts"] == 1
        assert made == [1, 2]


def test_an_ended_run_shows_the_time_before_its_end() -> None:
    played = Played(begin=1e9)
    for _ in range(20):
        played.tick()
    played.end()
    with served(played) as address:
        ended = ask(address, f"/api/v1/run?run={RUN}").json["ended_unix_seconds"]
        run = ask(address, f"/api/v1/run?run={RUN}&since=-11").json
        rank = ask(address, f"/api/v1/rank?run={RUN}&rank=1&since=-11").json
        for ends in (heatmap(address, f"run={RUN}&since=-11")[0]["ends"], run["pace"]["ends"], rank["history"]["ends"]):
            assert ends == [ended - seconds for seconds in (10, 8, 6, 4, 2)]


def test_kept_answers_are_bounded_and_the_latest_used_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "MAX_KEPT_BYTES", 250)
    played = Played()
    played.tick()
    kept, made = AnswerCache(), []

    def get(name: str) -> None:
        def make() -> bytes:
            made.append(name)
            return b"x" * 100

        assert kept.get(played.view(), RunQuery(name), make) == b"x" * 100

    for name in ("a", "b", "a", "c", "a", "b"):
        get(name)
    assert made == ["a", "b", "c", "b"]
    huge = b"x" * 1000
    assert kept.get(played.view(), RunQuery("huge"), lambda: huge) == huge
