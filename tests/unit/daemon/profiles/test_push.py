from __future__ import annotations

import base64
import contextlib
import gzip
import http.client
import http.server
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from email.utils import formatdate
from itertools import chain, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.common import http_client
from rankscope.daemon.profiles import push, pyroscope
from rankscope.daemon.profiles.database import Limits, RankInterval
from rankscope.daemon.profiles.push import ProfilePusher, PushLimits, PushStatus, pause_seconds, profile_pusher
from rankscope.daemon.profiles.pyroscope import PATH, PushError, Pyroscope, push_request
from rankscope.daemon.profiles.segment import NAME_CHARACTERS
from rankscope.daemon.profiles.store import ProfileStore, Recording
from rankscope.daemon.samples import Span
from rankscope.pprof import profile_pb2 as pb
from tests.certificates import Authority
from tests.free_ports import free_port
from tests.support.waiting import wait_until
from tests.unit.daemon import window_makers as make

SECOND = 10**9
LIMITS = Limits(total_bytes=1 << 30, age_seconds=7 * 86400.0)
MINUTE = Span(60 * SECOND, 120 * SECOND)
MAIN = Frame("main", "train.py", 10)
LOAD: Stack = (Frame("__getitem__", "/app/dataset.py", 88), Frame("f", "/x/torch/utils/data/dataloader.py", 1), MAIN)
STEP: Stack = (Frame("step", "/x/torch/optim/adam.py", 3), MAIN)
QUICK = PushLimits(first_wait_seconds=0.01, longest_wait_seconds=0.02)
DEADLINE_SECONDS = 120.0

Answer = Callable[["Handler"], None]


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        number = len(self.server.requests)
        self.server.requests.append((self.path, self.headers, body, time.monotonic()))
        with contextlib.suppress(OSError):
            self.server.answers[min(number, len(self.server.answers) - 1)](self)

    def log_message(self, *_arguments: object) -> None:
        pass


class Server(http.server.ThreadingHTTPServer):
    """Gives its answers one after the other; the last one for all further requests."""

    daemon_threads = False  # closing it waits for them

    def __init__(self, *answers: Answer, tls: ssl.SSLContext | None = None, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.answers = answers
        self.requests: list[tuple[str, Any, bytes, float]] = []
        self.closing = threading.Event()
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'s' if tls else ''}://localhost:{self.server_address[1]}"

    def handle_error(self, *_arguments: object) -> None:
        pass

    @property
    def series(self) -> list[dict[str, Any]]:
        return [series for _, _, body, _ in self.requests for series in json.loads(body)["series"]]


def status(code: int, text: str = "", **headers: str) -> Answer:
    def answer(handler: Handler) -> None:
        handler.send_response(code)
        for name, value in headers.items():
            handler.send_header(name.replace("_", "-"), value)
        handler.send_header("Content-Length", str(len(text)))
        handler.end_headers()
        handler.wfile.write(text.encode())

    return answer


OK = status(200, "{}")


@contextlib.contextmanager
def serving(*answers: Answer, tls: ssl.SSLContext | None = None, port: int = 0) -> Iterator[Server]:
    server = Server(*answers, tls=tls, port=port)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.closing.set()
        server.shutdown()
        thread.join()
        server.server_close()


@contextlib.contextmanager
def pushing(server: Pyroscope, limits: PushLimits = QUICK) -> Iterator[ProfilePusher]:
    pusher = ProfilePusher(server, "node-a", limits)
    try:
        yield pusher
    finally:
        pusher.close()
        pusher._thread.join(DEADLINE_SECONDS)
        assert not pusher._thread.is_alive()


def wait_for_status(pusher: ProfilePusher, condition: Callable[[PushStatus], bool]) -> PushStatus:
    def met() -> list[PushStatus]:
        return [now for now in [pusher.status()] if condition(now)]

    return wait_until(met, pusher.status)[0]


def interval(
    stacks: dict[Stack, int] | None = None, *, run: str = "team/llama", rank: int = 3, thread: str = "MainThread"
) -> RankInterval:
    return RankInterval(run, rank, MINUTE, [recording(stacks or {LOAD: 4}, thread)])


def recording(stacks: dict[Stack, int], thread: str = "MainThread") -> Recording:
    return Recording("team/llama", 3, MINUTE, SECOND // 10, Counter(stacks), thread)


def labels_of(series: dict[str, Any]) -> dict[str, str]:
    return {pair["name"]: pair["value"] for pair in series["labels"]}


def profile_of(series: dict[str, Any]) -> pb.Profile:
    (sample,) = series["samples"]
    return pb.Profile.FromString(gzip.decompress(base64.b64decode(sample["rawProfile"], validate=True)))


def stacks_of(profile: pb.Profile) -> dict[tuple[str, ...], tuple[int, ...]]:
    texts, functions = profile.string_table, {function.id: function for function in profile.function}
    places = {
        location.id: f"{texts[functions[line.function_id].name]}:{line.line}"
        for location in profile.location
        for line in location.line
    }
    return {tuple(map(places.__getitem__, sample.location_id)): tuple(sample.value) for sample in profile.sample}


def test_each_phase_of_a_rank_is_a_labelled_series() -> None:
    with serving(OK) as server, pushing(Pyroscope(server.url + "/pyroscope/")) as pusher:
        recordings = [recording({LOAD: 3, STEP: 5}, "a"), recording({LOAD: 1}, "a"), recording({LOAD: 2}, "b")]
        pusher([RankInterval("team/llama", 3, MINUTE, recordings)])
        wait_for_status(pusher, lambda now: now.pushed_total == 1 and now.queued_bytes == 0)
        ((path, headers, _, _),) = server.requests
        assert path == "/pyroscope" + PATH
        assert headers["Content-Type"] == "application/json"
        assert headers["Authorization"] is None and headers["X-Scope-OrgID"] is None
        found = {labels_of(series)["phase"]: series for series in server.series}
        assert found.keys() == {"input", "optimizer"}
        assert labels_of(found["input"]) == {
            "__name__": "wall",
            "service_name": "team/llama",
            "run_namespace": "team",
            "run": "llama",
            "rank": "3",
            "node": "node-a",
            "phase": "input",
        }
        profile = profile_of(found["input"])
        assert stacks_of(profile) == {("__getitem__:88", "f:1", "main:10"): (6, 6 * SECOND // 10)}
        assert stacks_of(profile_of(found["optimizer"])) == {("step:3", "main:10"): (5, SECOND // 2)}
        assert (profile.time_nanos, profile.duration_nanos) == (60 * SECOND, 60 * SECOND)
        kinds = [(profile.string_table[kind.type], profile.string_table[kind.unit]) for kind in profile.sample_type]
        assert kinds == [("samples", "count"), ("wall", "nanoseconds")]


def test_names_a_process_chooses_are_bounded_and_add_no_labels() -> None:
    hostile: Stack = (Frame('f"},{"name":"x\n' * 1000, "\x1b[2J" * 1000, 1),)
    body = push_request(interval({hostile: 1}, run='a",phase="x', thread="t" * 5000), "node\n")
    (series,) = json.loads(body)["series"]
    assert labels_of(series)["run"] == 'a",phase="x' and labels_of(series)["node"] == "node "
    profile = profile_of(series)
    assert all(len(text) <= NAME_CHARACTERS and text.isprintable() for text in profile.string_table)
    assert not profile.sample[0].label


def test_an_interval_without_samples_is_not_sent() -> None:
    assert push_request(RankInterval("run", 0, MINUTE, [recording({})]), "node") == b""


@pytest.mark.parametrize(
    ("written", "header"),
    [("abc.def-1\n", "Bearer abc.def-1"), ("12:glc_x\n", "Basic " + base64.b64encode(b"12:glc_x").decode())],
)
def test_tenant_and_credentials_go_over_verified_tls(tmp_path: Path, written: str, header: str) -> None:
    authority = Authority(tmp_path / "ca")
    pair = authority.issue("server", "localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)
    token = tmp_path / "token"
    token.write_text(written)
    with serving(OK, tls=tls) as server:
        config = make.config(
            profile_push_url=server.url,
            profile_push_tenant="team-a",
            profile_push_token_file=str(token),
            profile_push_authority=str(authority.certificate),
        )
        pusher = profile_pusher(config)
        assert pusher is not None
        pusher([interval()])
        wait_for_status(pusher, lambda now: now.pushed_total == 1)
        token.write_text("new")
        pusher([interval()])
        wait_for_status(pusher, lambda now: now.pushed_total == 2)
        pusher.close()
        (_, first, _, _), (_, second, _, _) = server.requests
        assert (first["Authorization"], first["X-Scope-OrgID"]) == (header, "team-a")
        assert second["Authorization"] == "Bearer new"


def test_a_server_of_another_authority_gets_nothing(tmp_path: Path) -> None:
    pair = Authority(tmp_path / "other").issue("server", "localhost")
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(pair.certificate, pair.key)
    trusted = Authority(tmp_path / "ca").certificate
    with serving(OK, tls=tls) as server, pushing(Pyroscope(server.url, authority=trusted)) as pusher:
        pusher([interval()])
        now = wait_for_status(pusher, lambda now: now.failures.get("connection", 0) >= 2)
        assert now.problem is not None and "certificate verify failed" in now.problem.text
        assert now.queued_bytes > 0 and not server.requests


def test_profiles_are_sent_again_until_the_server_takes_them() -> None:
    with serving(status(503), status(429), status(500), OK) as server, pushing(Pyroscope(server.url)) as pusher:
        pusher([interval()])
        now = wait_for_status(pusher, lambda now: now.pushed_total == 1)
        assert now.failures == {"server": 2, "throttled": 1} and not now.lost and now.problem is None
        assert len({body for _, _, body, _ in server.requests}) == 1


def test_one_failing_profile_does_not_hold_up_the_others() -> None:
    def fails_on_rank_3(handler: Handler) -> None:
        is_bad = labels_of(json.loads(handler.server.requests[-1][2])["series"][0])["rank"] == "3"
        (status(500) if is_bad else OK)(handler)

    with serving(fails_on_rank_3) as server, pushing(Pyroscope(server.url)) as pusher:
        pusher([interval(rank=3), interval(rank=4), interval(rank=5)])
        assert wait_for_status(pusher, lambda now: now.pushed_total == 2).queued_bytes > 0


def test_profiles_wait_until_a_server_that_is_down_is_back() -> None:
    port = free_port()
    url = f"http://localhost:{port}"
    with pushing(Pyroscope(url)) as pusher:
        pusher([interval()])
        now = wait_for_status(pusher, lambda now: now.failures.get("connection", 0) >= 2)
        assert now.problem is not None and now.problem.kind == "connection"
        assert url in now.problem.text and "profile_push_url" in now.problem.text
        with serving(OK, port=port):
            wait_for_status(pusher, lambda now: now.pushed_total == 1 and now.problem is None)


@pytest.mark.parametrize("in_words", [False, True])
def test_retry_after_is_honoured(in_words: bool) -> None:
    def throttled(handler: Handler) -> None:
        # A date has whole seconds: two seconds from now are at least one.
        said = formatdate(time.time() + 2, usegmt=True) if in_words else "1"
        status(429, Retry_After=said)(handler)

    with serving(throttled, OK) as server, pushing(Pyroscope(server.url)) as pusher:
        pusher([interval()])
        wait_for_status(pusher, lambda now: now.pushed_total == 1)
        first, second = (at for _, _, _, at in server.requests)
        assert second - first >= (0.9 if in_words else 1.0)


@pytest.mark.parametrize("said", ["-5", "soon", "1e999", "99999999999", "Tue, 99 Foo 2026", "٣"])
def test_a_wrong_retry_after_holds_nothing_up_for_long(said: str) -> None:
    with serving(status(503, Retry_After=said.encode().decode("latin-1"))) as server:
        with pytest.raises(PushError) as raised:
            Pyroscope(server.url).push(b"{}")
        assert 0 <= raised.value.retry_after_seconds <= pyroscope.MAX_RETRY_AFTER_SECONDS


def test_the_pause_doubles_up_to_a_limit_with_jitter() -> None:
    limits = PushLimits(first_wait_seconds=1.0, longest_wait_seconds=8.0)
    for failed_before, full in ((0, 1), (1, 2), (2, 4), (3, 8), (4, 8), (10**9, 8)):
        pauses = {pause_seconds(failed_before, limits) for _ in range(50)}
        assert len(pauses) > 1 and all(full / 2 <= pause <= full for pause in pauses)


@pytest.mark.parametrize(
    ("code", "reason", "next_step"),
    [
        (400, "profile too\n\x1b[2J big", "check the server's limits"),
        (401, "who?", "check profile_push_token_file"),
        (404, "", "check profile_push_url"),
    ],
)
def test_what_is_refused_is_dropped_with_the_reason(code: int, reason: str, next_step: str) -> None:
    with serving(status(code, reason)) as server, pushing(Pyroscope(server.url)) as pusher:
        pusher([interval(), interval()])
        now = wait_for_status(pusher, lambda now: now.lost.get("refused") == 2)
        assert len(server.requests) == 2 and now.queued_bytes == 0
        assert now.problem is not None and now.problem.text.isprintable()
        assert f"{server.url} answers {code}" in now.problem.text and next_step in now.problem.text
        assert " ".join(reason.replace("\x1b", "\ufffd").split()) in now.problem.text


def test_a_redirection_is_not_followed() -> None:
    with serving(OK) as other, serving(status(307, Location=other.url + PATH)) as server:
        with pushing(Pyroscope(server.url)) as pusher:
            pusher([interval()])
            now = wait_for_status(pusher, lambda now: now.lost.get("refused") == 1)
            assert now.problem is not None and f"a redirection to {other.url}" in now.problem.text
        assert not other.requests


SAID = f"Basic {base64.b64encode(b'me:hunter2').decode()} is me:hunter2, password hunter2"


@pytest.mark.parametrize(
    "answer",
    [
        status(403, SAID),
        status(302, Location=SAID),
        lambda handler: handler.wfile.write(SAID.encode() + b"\r\n\r\n"),
    ],
    ids=["reason", "location", "no http"],
)
def test_credentials_the_server_repeats_are_not_in_a_problem(tmp_path: Path, answer: Answer) -> None:
    token = tmp_path / "token"
    token.write_text("me:hunter2")
    with serving(answer) as server, pytest.raises(PushError, match=r"\(secret\)") as raised:
        Pyroscope(server.url, token_file=token).push(b"{}")
    assert "hunter2" not in str(raised.value) and SAID.split()[1] not in str(raised.value)


@pytest.mark.parametrize("content", [None, "", "two\nlines", "\x00", "ü"])
def test_nothing_is_sent_without_a_token_in_the_file(tmp_path: Path, content: str | None) -> None:
    token = tmp_path / "token"
    if content is not None:
        token.write_text(content)
    with serving(OK) as server, pushing(Pyroscope(server.url, token_file=token)) as pusher:
        pusher([interval()])
        now = wait_for_status(pusher, lambda now: now.failures.get("files", 0) >= 1)
        assert now.problem is not None and str(token) in now.problem.text and not server.requests
        token.write_text("good")
        wait_for_status(pusher, lambda now: now.pushed_total == 1)


def test_an_authority_that_is_none_is_reported(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    file.write_text("no certificate")
    with pytest.raises(PushError, match="has no certificates in PEM"):
        Pyroscope("https://localhost:1", authority=file).push(b"{}")


def never(handler: Handler) -> None:
    handler.server.closing.wait(DEADLINE_SECONDS)


def drip(content: Iterable[bytes]) -> Answer:
    def answer(handler: Handler) -> None:
        for part in content:
            handler.wfile.write(part)
            handler.wfile.flush()
            if handler.server.closing.wait(0.01):
                return

    return answer


def endless_headers(handler: Handler) -> None:
    handler.wfile.write(b"HTTP/1.1 200 OK\r\n")
    while not handler.server.closing.is_set():
        handler.wfile.write(b"X: " + b"y" * 60_000 + b"\r\n")


def endless_continue(handler: Handler) -> None:
    while not handler.server.closing.is_set():
        handler.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n" * 1000)


SLOW = {
    "never": never,
    "byte by byte": drip(bytes([byte]) for byte in b"HTTP/1.1 200 OK\r\nX: " + b"y" * 5000),
    "headers now and then": drip(chain([b"HTTP/1.1 200 OK\r\n"], repeat(b"X: y\r\n"))),
    "no http": lambda handler: handler.wfile.write(b"220 mail.example ESMTP\r\n"),
}


@pytest.mark.parametrize("kind", SLOW)
def test_a_badly_answering_server_fails_a_request_in_time(kind: str) -> None:
    with serving(SLOW[kind]) as server:
        with pytest.raises(PushError) as raised:
            Pyroscope(server.url, request_seconds=0.3).push(b"{}")
        assert raised.value.reason == "connection"


@pytest.mark.parametrize("answer", [endless_headers, endless_continue])
def test_an_answer_without_end_is_given_up_at_a_size(answer: Answer) -> None:
    with serving(answer) as server, pytest.raises(PushError, match="longer than 256 KiB"):
        Pyroscope(server.url, request_seconds=DEADLINE_SECONDS).push(b"{}")


def test_a_refusal_whose_reason_does_not_end_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(handler: Handler) -> None:
        handler.wfile.write(b"HTTP/1.1 400 Bad\r\n\r\nzzz")
        handler.server.closing.wait(DEADLINE_SECONDS)

    now, read_reason = [0.0], pyroscope._reason

    def reason(answer: http.client.HTTPResponse) -> str:
        now[0] += DEADLINE_SECONDS  # the time is over when the status is there
        return read_reason(answer)

    monkeypatch.setattr(http_client, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(pyroscope, "_reason", reason)
    with serving(begin) as server, pytest.raises(PushError, match=r"answers 400: zzz; ") as raised:
        Pyroscope(server.url, request_seconds=DEADLINE_SECONDS).push(b"{}")
    assert raised.value.reason == "refused"


def test_a_server_that_reads_nothing_fails_requests_in_time() -> None:
    with serving(OK) as server:
        server.shutdown()  # still listens
        with pytest.raises(PushError, match="timed out"):
            Pyroscope(server.url, request_seconds=0.3).push(bytes(32 << 20))
        with pytest.raises(PushError, match="timed out"):
            Pyroscope(server.url.replace("http:", "https:"), request_seconds=0.3).push(b"{}")


def test_nobody_waits_for_a_server_that_never_answers(tmp_path: Path) -> None:
    with serving(never) as server:
        pusher = ProfilePusher(Pyroscope(server.url, request_seconds=2 * DEADLINE_SECONDS), "node-a")
        store = ProfileStore(tmp_path / "profiles", LIMITS, 60.0, listener=pusher)
        for rank in range(50):
            store.record(Recording("run", rank, MINUTE, 1, {LOAD: 1}))
            assert store.flush()
        assert store.status().samples_stored == 50
        store.close()
        pusher.close()
        assert pusher._thread.is_alive()
    pusher._thread.join(DEADLINE_SECONDS)
    assert not pusher._thread.is_alive()


def test_the_queue_is_bounded_in_bytes_and_loses_the_oldest() -> None:
    size = len(push_request(interval(), "node-a"))
    limits = PushLimits(queue_bytes=3 * size + size // 2, first_wait_seconds=DEADLINE_SECONDS)
    with serving(status(503), OK) as server, pushing(Pyroscope(server.url), limits) as pusher:
        pusher([interval(rank=0)])
        wait_for_status(pusher, lambda now: now.failures.get("server") == 1)
        pusher([interval(rank=rank) for rank in range(1, 6)])
        now = wait_for_status(pusher, lambda now: now.lost.get("queue_full") == 3)
        assert now.queued_bytes <= limits.queue_bytes
        pusher.close()  # sends what waits
        pusher._thread.join(DEADLINE_SECONDS)
        assert [labels_of(series)["rank"] for series in server.series] == ["0", "3", "4", "5"]


def test_profiles_that_waited_too_long_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = PushLimits(age_seconds=5.0, first_wait_seconds=0.01, longest_wait_seconds=0.02)
    now_seconds = [0.0]

    def fails_late(handler: Handler) -> None:
        now_seconds[0] += 10.0
        status(503)(handler)

    monkeypatch.setattr(push, "time", SimpleNamespace(monotonic=lambda: now_seconds[0]))
    with serving(fails_late) as server, pushing(Pyroscope(server.url), limits) as pusher:
        pusher([interval()])
        now = wait_for_status(pusher, lambda now: now.lost.get("expired") == 1)
        assert now.queued_bytes == 0 and now.failures["server"] >= 1


def test_a_profile_that_cannot_be_encoded_loses_itself_only() -> None:
    with serving(OK) as server, pushing(Pyroscope(server.url)) as pusher:
        pusher([interval({("no frame",): 1}), interval()])  # type: ignore[dict-item]
        now = wait_for_status(pusher, lambda now: now.pushed_total == 1)
        assert now.lost == {"invalid": 1}


def test_proxies_of_the_environment_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(OK) as proxy, serving(OK) as server:
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, proxy.url)
        Pyroscope(server.url).push(b'{"series":[]}')
        assert len(server.requests) == 1 and not proxy.requests


@pytest.mark.parametrize("is_disk_full", [False, True])
def test_the_store_hands_over_each_interval_once(tmp_path: Path, is_disk_full: bool) -> None:
    folder = tmp_path / "profiles"
    if is_disk_full:
        folder.write_text("no folder: nothing can be stored")
    with serving(OK) as server, pushing(Pyroscope(server.url)) as pusher:
        store = ProfileStore(folder, LIMITS, 60.0, listener=pusher)
        store.record(Recording("run", 0, MINUTE, SECOND // 10, {LOAD: 2}))
        store.record(Recording("run", 0, MINUTE, SECOND // 10, {LOAD: 3}))
        store.record(Recording("run", 1, MINUTE, SECOND // 10, {STEP: 1}))
        store.close()
        wait_for_status(pusher, lambda now: now.pushed_total == 2)
        found = {labels_of(series)["rank"]: stacks_of(profile_of(series)) for series in server.series}
        assert [samples for samples, _ in found["0"].values()] == [5]
        assert [samples for samples, _ in found["1"].values()] == [1]


def test_without_a_url_profiles_stay_on_the_node() -> None:
    assert profile_pusher(make.config()) is None
