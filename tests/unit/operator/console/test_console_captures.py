"""Captures and profiles through the console: a running server in front of real gRPC servers, asked with http.client."""

from __future__ import annotations

import gzip
import http.client
import json
import os
import re
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import grpc
import pytest

from rankscope.daemon.loop import Daemon
from rankscope.operator.console import captures as console_captures
from rankscope.operator.console.server import caller, local_channels
from rankscope.v1 import capture_service_pb2 as pb
from tests.unit.cli.capture_server import (
    ANALYSED,
    ARMED,
    FAILED,
    ID,
    RUNNING,
    ScriptedCaptures,
    capture,
    serve,
)
from tests.unit.cli.test_capture import joined
from tests.unit.daemon.profiles.served_profiles import LOAD, RUN, STEP, record, served_profiles
from tests.unit.operator.console.test_console_api import Answer, ask, check, served
from tools.played_runs import Played

HOSTILE = "<img src=x onerror=alert(1)>\x1b[2J\u202e"
BODY = {"run": "bert", "ranks": "0,1", "steps": 3}


@dataclass
class Console:
    address: str
    captures: ScriptedCaptures

    def get(self, path: str, **headers: str) -> Answer:
        return ask(self.address, f"/api/v1{path}", **headers)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        sent = {"Content_Type": "application/json", "Origin": f"http://{self.address}", **headers}
        return ask(self.address, f"/api/v1{path}", "POST", json.dumps(body), **sent)


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    captures, target = ScriptedCaptures(), f"unix:{tmp_path / 'd.sock'}"
    server = serve(captures, target)
    played = Played()
    played.tick(run="bert")
    with served(played, channels=lambda request: grpc.insecure_channel(target)) as address:
        yield Console(address, captures)
    captures.cancelled.set()
    server.stop(None).wait()


def test_a_capture_is_started_followed_and_cancelled(console: Console) -> None:
    console.captures.script = [capture(RUNNING, RUNNING, ARMED)]
    options = {"stacks": True, "warmup_steps": 2}
    started = console.post("/captures", {**BODY, "options": options, "reason": "slow"})
    check(started.json, "CaptureAnswer")
    assert (started.json["id"], started.json["is_final"]) == (ID, False)
    (request,) = console.captures.requests
    assert request == pb.StartCaptureRequest(
        job="bert", ranks="0,1", steps=3, reason="slow", options=pb.CaptureOptions(stacks=True, warmup_steps=2)
    )
    shown = console.get(f"/capture?id={ID}").json
    assert [(rank["state"], rank["progress"]) for rank in shown["ranks"]] == [
        ("running", "records"),
        ("armed", "has its orders; all begin together"),
    ]
    ended = console.post("/capture/cancel", {"id": ID}).json
    assert (ended["state"], ended["is_final"], ended["ranks"][0]["state"]) == ("cancelled", True, "cancelled")


def test_a_capture_without_a_length_leaves_it_to_the_daemon(console: Console) -> None:
    console.captures.script = [capture(ANALYSED, ANALYSED)]
    console.post("/captures", {"run": "bert", "ranks": "straggler+peer"})
    (request,) = console.captures.requests
    assert request.WhichOneof("length") is None
    # Forty steps of 0.1 s at most.
    assert console.get("/captures/cost?run=bert").json["recording_seconds"] == pytest.approx(4.0)


def test_a_summary_reports_the_traces_in_numbers_and_sentences(console: Console) -> None:
    console.captures.known[ID] = capture(ANALYSED, ANALYSED, ANALYSED, edit=joined)
    summary = console.get(f"/capture?id={ID}").json["summary"]
    assert summary["join"]["culprits"] and summary["join"]["last_arrivals"] and summary["ranks"][0]["span_seconds"]
    assert summary["findings"] and summary["sentence"].startswith("2 of 2 ranks delivered, 3 steps each")


def test_the_newest_captures_come_first_and_the_list_is_bounded(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_captures, "MAX_LISTED", 2)
    for number in range(3):
        made = capture(ANALYSED, ANALYSED, FAILED, job="bert" if number else "llama")
        made.id, made.requested_unix_millis = f"c-{number}", 1000 * number
        console.captures.known[made.id] = made
    told = console.get("/captures").json
    check(told, "CapturesAnswer")
    rows = told["captures"]
    assert [(row["id"], row["ranks"], row["ranks_delivered"]) for row in rows] == [("c-2", "0-1", 1), ("c-1", "0-1", 1)]
    assert [row["id"] for row in console.get("/captures?run=llama").json["captures"]] == ["c-0"]


def test_the_cost_is_the_documented_one_until_measured(console: Console) -> None:
    first = console.get("/captures/cost?run=bert&steps=4").json
    check(first, "CaptureCost")
    assert (first["recording_seconds"], first["slowdown_ratio"], first["bytes_per_rank"]) == (
        pytest.approx(0.4),
        None,
        None,
    )
    assert "10 to 80 %" in " ".join(first["sentences"])
    made = capture(ANALYSED, ANALYSED)
    made.ranks[0].step_times.before_seconds, made.ranks[0].step_times.during_seconds = 0.1, 0.125
    console.captures.known[ID] = made
    second = console.get("/captures/cost?run=bert&steps=6").json
    assert (second["slowdown_ratio"], second["bytes_per_rank"]) == (pytest.approx(0.25), 5000)
    assert f"25 % longer in {ID}" in " ".join(second["sentences"])


def test_refusals_of_the_server_become_problems_with_a_next_step(console: Console) -> None:
    console.captures.refusal = "rank 0 is being captured already"
    refused = console.post("/captures", BODY)
    assert (refused.status, refused.json["error"]) == (409, console.captures.refusal) and refused.json["next"]
    assert console.get("/capture?id=c-unknown").status == 404
    console.captures.is_away = True
    away = console.get(f"/capture?id={ID}")
    assert away.status == 503 and "daemon" in away.json["next"]
    assert ask(console.address, "/api/v1/flame?run=bert").status == 501  # no such service
    with served(Played()) as address:
        assert ask(address, "/api/v1/captures").status == 501


def test_a_body_that_is_not_described_starts_nothing(console: Console) -> None:
    for body in (
        *({**BODY, "seconds": 1.0}, {**BODY, "steps": -1}, {**BODY, "steps": 2**40}),
        *({**BODY, "start_unix_millis": 1}, {**BODY, "options": {"x": True}}, {**BODY, "run": "x" * 601}, [], "x"),
    ):
        refused = console.post("/captures", body)
        check(refused.json, "Problem")
        assert refused.status == 400
    assert not console.captures.requests


def test_a_body_is_bounded(console: Console) -> None:
    assert console.post("/captures", {**BODY, "reason": "x" * 100_000}).status == 413


def test_no_page_of_another_origin_starts_or_cancels_a_capture(console: Console) -> None:
    console.captures.known[ID] = capture(RUNNING, RUNNING)
    for path, body in (("/captures", BODY), ("/capture/cancel", {"id": ID})):
        for headers in (
            {"Origin": "http://evil.example"},
            {"Origin": "null"},
            {"Origin": "http://127.0.0.1:1"},  # another port
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
        ):
            assert console.post(path, body, **headers).status == 403
        for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):  # as forms send
            assert console.post(path, body, Content_Type=kind).status == 415
        for method in ("PUT", "DELETE", "PATCH"):
            answer = ask(console.address, f"/api/v1{path}", method, "{}", Content_Type="application/json")
            assert answer.status == 405
    assert console.get(f"/capture/cancel?id={ID}").status == 404  # as an image would ask
    assert not console.captures.requests and not console.captures.cancelled.is_set()


def test_no_id_leads_anywhere(console: Console) -> None:
    console.captures.artifacts[0] = b"secret"
    for name in ("../../etc/passwd", "/etc/passwd", "a/../b", "..", "a/b/c", "A", "a b", "a%00", "", "x" * 321):
        for path in ("/capture?", "/capture/artifact?rank=0&", "/capture/merged?"):
            answer = console.get(f"{path}id={quote(name, safe='%')}")
            assert answer.status == 400 and b"secret" not in answer.body


def test_a_recording_is_downloaded_under_a_plain_name(console: Console) -> None:
    data = bytes(range(256)) * 10
    made = capture(ANALYSED, ANALYSED, FAILED, job='../x"; filename="evil.html\r\nX: y')
    made.ranks[0].bytes = len(data)
    made.ranks[0].more_windows.add(artifact="rank0.window2.json.gz", bytes=3)
    console.captures.known[ID] = made
    console.captures.artifacts = {0: data, (0, 1): b"abc"}
    answer = console.get(f"/capture/artifact?id={ID}&rank=0")
    assert (answer.status, answer.body, answer.headers["content-length"]) == (200, data, str(len(data)))
    assert re.fullmatch(rf'attachment; filename="[\w.-]+-{ID}-rank0\.json\.gz"', answer.headers["content-disposition"])
    assert (answer.headers["content-type"], answer.headers["x-content-type-options"]) == ("application/gzip", "nosniff")
    assert console.get(f"/capture/artifact?id={ID}&rank=0&window=1").body == b"abc"
    for missing in ("rank=1", "rank=7", "rank=0&window=2"):
        assert console.get(f"/capture/artifact?id={ID}&{missing}").status == 404


def test_a_recording_of_unexpected_size_is_not_delivered(console: Console) -> None:
    console.captures.known[ID] = capture(ANALYSED, ANALYSED)  # 2500 bytes
    for size in (2501, 2499, 0):
        console.captures.artifacts[0] = bytes(size)
        assert console.get(f"/capture/artifact?id={ID}&rank=0").status == 502
    console.captures.artifacts[0] = bytes(2500)
    console.captures.break_off_after = 2
    with pytest.raises(http.client.IncompleteRead):
        console.get(f"/capture/artifact?id={ID}&rank=0")
    assert len(console.get(f"/capture/artifact?id={ID}&rank=0").body) == 2500


class Growing(bytes):
    """Announced as 2500 bytes."""

    def __len__(self) -> int:
        return 2500


def test_more_than_was_announced_breaks_off(console: Console) -> None:
    console.captures.known[ID] = capture(ANALYSED, ANALYSED)
    console.captures.artifacts[0] = Growing(5000)
    with pytest.raises(http.client.IncompleteRead) as caught:
        console.get(f"/capture/artifact?id={ID}&rank=0")
    assert len(caught.value.partial) == 2000


def test_downloads_are_limited_and_each_end_frees_a_place(console: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_captures, "DOWNLOADS", threading.BoundedSemaphore(1))
    console.captures.known[ID] = capture(ANALYSED, ANALYSED)
    console.captures.artifacts[0] = bytes(2500)
    assert console.get("/capture/artifact?id=c-unknown&rank=0").status == 404
    for _ in range(3):
        while console.get(f"/capture/artifact?id={ID}&rank=0").status != 200:
            pass  # the place becomes free just after the last byte
    console_captures.DOWNLOADS.acquire()
    assert console.get(f"/capture/artifact?id={ID}&rank=0").status == 503


def trace_of(rank: int) -> bytes:
    event = {"ph": "X", "cat": "cpu_op", "name": f"of {rank}", "pid": 7, "tid": 7, "ts": 1000.5 + rank, "dur": 2}
    return gzip.compress(json.dumps({"baseTimeNanoseconds": 10**18, "traceEvents": [event]}).encode())


def recorded(console: Console, *contents: bytes) -> None:
    made = console.captures.known[ID] = capture(ANALYSED, *[ANALYSED] * len(contents))
    for entry, content in zip(made.ranks, contents, strict=True):
        entry.bytes = len(content)
        console.captures.artifacts[entry.rank] = content


def test_the_traces_of_all_ranks_are_downloaded_as_one(console: Console) -> None:
    recorded(console, trace_of(0), trace_of(1))
    answer = console.get(f"/capture/merged?id={ID}")
    assert (answer.status, answer.headers["content-type"]) == (200, "application/gzip")
    assert answer.headers["content-disposition"].endswith(f'-{ID}-all-ranks.json.gz"')
    events = json.loads(gzip.decompress(answer.body))["traceEvents"]
    times = {one["name"]: one["ts"] for one in events if one["ph"] == "X"}
    assert times["of 1"] - times["of 0"] == 1.0
    assert [one["args"]["name"] for one in events if one["name"] == "process_name"] == ["rank 0", "rank 1"]


def test_a_merged_trace_that_is_not_whole_breaks_off(console: Console) -> None:
    for second in (b"no trace", trace_of(1)[:-20], b""):
        recorded(console, trace_of(0), second)
        with pytest.raises(http.client.IncompleteRead):
            console.get(f"/capture/merged?id={ID}")
    recorded(console, trace_of(0), os.urandom(5000))
    console.captures.break_off_after = 3
    with pytest.raises(http.client.IncompleteRead):
        console.get(f"/capture/merged?id={ID}")
    recorded(console, trace_of(0), trace_of(1))
    del console.captures.artifacts[1]
    with pytest.raises(http.client.IncompleteRead):
        console.get(f"/capture/merged?id={ID}")


def test_traces_too_large_to_merge_are_refused_with_an_alternative(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(console, trace_of(0), trace_of(1))
    monkeypatch.setattr(console_captures, "MAX_MERGED_BYTES", 100)
    answer = console.get(f"/capture/merged?id={ID}")
    assert answer.status == 413 and b"rankscope analyze trace --merged" in answer.body
    console.captures.known[ID].ranks[0].artifact = console.captures.known[ID].ranks[1].artifact = "rank0.folded.gz"
    assert console.get(f"/capture/merged?id={ID}").status == 404


def test_text_of_containers_is_printable_and_stays_data(console: Console) -> None:
    made = capture(ANALYSED, ANALYSED, FAILED, job=HOSTILE, edit=joined)
    made.reason = made.requested_by = made.join.reason = made.ranks[1].error = HOSTILE
    made.notes.append(HOSTILE)
    made.ranks[0].notes.append(HOSTILE)
    for texts in (made.ranks[0].summary.findings, made.ranks[0].summary.top_kernels):
        texts.append(HOSTILE)
    made.ranks[0].summary.collectives[HOSTILE] = 1
    console.captures.known[ID] = made
    for path in ("/captures", f"/capture?id={ID}"):
        answer = console.get(path)
        assert json.dumps(answer.json, ensure_ascii=False).isprintable() and b"onerror" in answer.body


# Profiles.


@pytest.fixture
def profiled(tmp_path: Path) -> Iterator[tuple[str, Daemon]]:
    with served_profiles(tmp_path) as daemon:
        target = daemon.addresses.grpc_targets[0]
        with served(Played(), channels=lambda request: grpc.insecure_channel(target)) as address:
            yield address, daemon


def test_the_frames_in_excess_name_the_line(profiled: tuple[str, Daemon]) -> None:
    address, daemon = profiled
    for rank in range(3):
        record(daemon, rank, {LOAD: 600 if rank == 1 else 20, STEP: 600})
    told = ask(address, f"/api/v1/excess?run={quote(RUN)}&rank=1").json
    check(told, "ExcessAnswer")
    assert told["sentence"] == "rank 1 spends 50 % of its time in `load_image (dataset.py:88)`, its peers 3 %"
    first = told["frames"][0]
    assert (first["function"], first["line"], first["share_ratio"]) == ("load_image", 88, pytest.approx(0.5))
    assert ask(address, f"/api/v1/excess?run={quote(RUN)}&rank=0").json["frames"] == []


def test_a_flame_graph_is_a_page_that_can_reach_nothing(profiled: tuple[str, Daemon]) -> None:
    address, daemon = profiled
    record(daemon, 0, {LOAD: 10})
    record(daemon, 1, {STEP: 10})
    path = f"/api/v1/flame?run={quote(RUN)}"
    plain, compared = ask(address, path), ask(address, f"{path}&ranks=1&against=cohort")
    assert b'"compared":false' in plain.body and b'"compared":true' in compared.body
    assert b"load_image" in compared.body and b", rank 1, the last 10 min, against its peers" in compared.body
    policy = plain.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    assert policy.endswith("frame-ancestors 'self'; sandbox allow-scripts")
    assert plain.headers["x-frame-options"] == "SAMEORIGIN"
    assert "frame-src 'self'" in ask(address, "/").headers["content-security-policy"]
    assert ask(address, path, Sec_Fetch_Site="cross-site").status == 403


def test_an_impossible_flame_graph_says_what_to_do(profiled: tuple[str, Daemon]) -> None:
    for query, status in (
        *(("against=cohort", 400), ("ranks=x", 400), ("since=60", 400), ("against=x", 400), ("ranks=7", 404)),
    ):
        answer = ask(profiled[0], f"/api/v1/flame?run={quote(RUN)}&{query}")
        assert answer.status == status and answer.json["next"]


# Callers on this machine.


def test_captures_are_only_for_socket_users_identified_by_the_kernel(tmp_path: Path) -> None:
    captures, target = ScriptedCaptures(), f"unix:{tmp_path / 'd.sock'}"
    server = serve(captures, target)
    played = Played()
    played.tick(run="bert")
    for users, status in (({os.getuid()}, 200), ({os.getuid() + 1}, 403)):
        with served(played, channels=local_channels(target, users)) as address:
            assert ask(address, "/api/v1/captures").status == status
            assert ask(address, "/api/v1/runs").status == 200
    server.stop(None).wait()


@pytest.mark.parametrize(
    ("host", "to"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")]
)
def test_a_connection_belongs_to_nobody_once_it_is_closed(host: str, to: str) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        there = listener.getsockname()[:2]
        client = socket.create_connection((to, there[1]))
        accepted, address = listener.accept()
        name, port = address[:2]
        assert caller((name, port), there) == os.getuid()
        assert caller((name, port ^ 1), there) is None
        client.close()
        assert caller((name, port), there) is None
        accepted.close()
