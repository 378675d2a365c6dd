"""A Prometheus that is away, slow, hostile or huge costs the older history and nothing else."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import parse_qs

import numpy as np
import pytest

from rankscope.operator.console import older_history
from rankscope.operator.console.history import RunView
from rankscope.operator.console.older_history import (
    MISSING,
    READING,
    Older,
    PrometheusHistory,
)
from rankscope.operator.console.run_views import heatmap, rank_history, run_detail
from rankscope.operator.console.signals import RUN_SIGNALS, SIGNALS
from tests.promql_reading import selectors
from tests.support.waiting import wait_until
from tests.unit.deploy.test_rules import rules
from tools.exported_metrics import exported_metrics
from tools.played_runs import MORNING, Played

DAY = 86_400.0
SINCE = MORNING - DAY
HEAD = b"HTTP/1.1 200 OK\r\n\r\n"
PATIENCE_SECONDS = 120.0
Behaviour = Callable[[socket.socket], None]


class Server:
    """Accepts connections and does something with each, until it is closed."""

    def __init__(self, behave: Behaviour) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._behave = behave
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.requests: list[str] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            head, _, body = connection.recv(1 << 16).partition(b"\r\n\r\n")
            length = int((re.search(rb"Content-Length: (\d+)", head) or [b"", b"0"])[1])
            while len(body) < length:
                body += connection.recv(1 << 16)
            self.requests.append(body.decode())
            try:
                self._behave(connection)
            except OSError:
                return  # the caller has left

    def close(self) -> None:
        self._listener.close()


@contextmanager
def serving(behave: Behaviour) -> Iterator[Server]:
    server = Server(behave)
    try:
        yield server
    finally:
        server.close()


def says(text: str, status: str = "200 OK") -> Behaviour:
    return lambda connection: connection.sendall(f"HTTP/1.1 {status}\r\n\r\n{text}".encode())


def series(*values: tuple[float, str], **labels: str) -> dict[str, object]:
    return {"metric": {"signal": "self_seconds", **labels}, "values": values}


def result(*every: dict[str, object]) -> str:
    return json.dumps({"status": "success", "data": {"resultType": "matrix", "result": every}})


def drip(connection: socket.socket) -> None:
    while True:
        connection.sendall(b"x")
        time.sleep(0.02)


def pour(connection: socket.socket) -> None:
    connection.sendall(HEAD)
    while True:
        connection.sendall(b" " * (1 << 16))


def claim(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999999\r\n\r\n{")


def silence(connection: socket.socket) -> None:
    connection.recv(1)


@pytest.fixture
def view() -> RunView:
    played = Played()
    for _ in range(5):
        played.tick(ranks=4)
    return played.view()


def history(url: str, request_seconds: float = PATIENCE_SECONDS) -> PrometheusHistory:
    return PrometheusHistory(url, request_seconds=request_seconds, answer_bytes=1 << 20)


def read(source: PrometheusHistory, view: RunView, since: float = SINCE, columns: int = 400) -> Older:
    def answered() -> list[Older]:
        older = source.of_ranks(view, "self_seconds", since, columns)
        return [] if older.note == READING.note else [older]

    return wait_until(answered)[0]


@pytest.mark.parametrize(
    ("behave", "reason"),
    [
        (silence, "timed out"),
        (drip, "timed out"),
        (pour, "longer than 1024 KiB"),
        (claim, "no result"),
        (says("<html>"), "answers 200 with what is no result"),
        (says("not here", "404 Not Found"), "answers 404"),
        (says("", "302 Found\r\nLocation: http://127.0.0.1:1/"), "answers 302"),
        (says('{"status": "error", "error": "too\\u001b[2J many"}', "422 X"), "answers 422: too�[2J many"),
        (says('{"status": "success"}'), "answers 200"),
        (says(result(series((1.0, "much"), rank="0"))), "much"),
        (says("[" * 100_000), "no result"),
        (says(result(series(cluster="a"), series(cluster="b"))), "several clusters (a, b)"),
    ],
)
def test_what_prometheus_does_wrong_is_said_and_memory_is_shown(
    view: RunView, behave: Behaviour, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(older_history, "FAILED_SECONDS", PATIENCE_SECONDS)
    with serving(behave) as server:
        source = history(server.url, 0.5 if reason == "timed out" else PATIENCE_SECONDS)
        # The first answer does not wait.
        assert heatmap(view, "self_seconds", SINCE, 400, source)[0].note == READING.note
        older = read(source, view)
        assert older.note.startswith(MISSING) and reason in older.note
        header, matrix = heatmap(view, "self_seconds", SINCE, 400, source)
        assert header.note == older.note and matrix == heatmap(view, "self_seconds", 0, 400)[1]
        wait_until(lambda: server.requests)  # which it may read after the client has left
        assert len(server.requests) == 1  # and is not asked again at once


def test_what_was_read_stays_when_prometheus_goes_away(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_history, "KEPT_SECONDS", 0.0)
    with serving(says(result(series((view.ticks[0].start, "1"), rank="0")))) as server:
        source = history(server.url)
        assert read(source, view).note == ""
    answers: list[Older] = []

    def has_failed() -> bool:
        answers.append(source.of_ranks(view, "self_seconds", SINCE, 400))
        return bool(source._failure)

    wait_until(has_failed)
    assert answers[-1].note == "" and len(answers[-1].ends) == 1


def test_a_prometheus_that_is_away_is_said(view: RunView) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    assert "refused" in read(history(f"http://127.0.0.1:{port}"), view).note


def test_values_that_cannot_be_are_left_out(view: RunView) -> None:
    end, step = view.ticks[0].start, 300
    moments = [(end - 3 * step, "0.5"), (end - 2 * step, "NaN"), (end - step, "-1"), (end, "+Inf")]
    answer = result(series((end + 1e9, "7"), (-1e300, "7"), *moments, rank="2"), series((end, "1e300"), rank="999"))
    with serving(says(answer)) as server:
        older = read(history(server.url), view)
        assert older.note == "" and older.step_seconds == step
        np.testing.assert_array_equal(older.values["self_seconds", "2"], np.float32([0.5, *[np.nan] * 3]))
        assert older.rows([("self_seconds", "3"), ("self_seconds", "2")]).shape == (4, 2)


def test_a_run_has_one_query_at_once_with_shared_answers(view: RunView) -> None:
    released = threading.Event()

    def wait(connection: socket.socket) -> None:
        released.wait(PATIENCE_SECONDS)
        connection.sendall(HEAD + result(series((view.ticks[0].start, "1"), rank="0")).encode())

    with serving(wait) as server:
        source = history(server.url)
        for signal in ("self_seconds", "wait_seconds", "step_seconds"):
            assert source.of_ranks(view, signal, SINCE, 400).note == READING.note
        released.set()
        for _ in range(5):
            assert read(source, view).note == ""
        assert len(server.requests) == 1


def test_query_steps_follow_the_columns_and_number_of_ranks(view: RunView) -> None:
    with serving(says(result())) as server:
        source = history(server.url)
        points = []
        for seconds, columns in ((6 * 3600.0, 400), (DAY, 400), (DAY, 2000), (90 * DAY, 2000), (90 * DAY, 1)):
            read(source, view, MORNING - seconds, columns)
            form = {name: values[0] for name, values in parse_qs(server.requests[-1]).items()}
            points.append((float(form["end"]) - float(form["start"])) / float(form["step"]) + 1)
            assert 0.3 * columns <= points[-1] <= columns + 17 <= 11_000
        many = Played()
        many.tick(ranks=4096)
        read(source, many.view(), columns=2000)
        form = {name: values[0] for name, values in parse_qs(server.requests[-1]).items()}
        assert (float(form["end"]) - float(form["start"])) / float(form["step"]) <= 400_000 / 4096 + 17


def test_answers_that_are_kept_are_bounded(view: RunView, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older_history, "MAX_KEPT_ANSWERS", 2)
    with serving(says(result(series((view.ticks[0].start, "1"), rank="0")))) as server:
        source = history(server.url)
        for seconds in (6 * 3600.0, DAY, 3 * DAY, 6 * DAY):
            read(source, view, MORNING - seconds)
        assert len(source._answers) == 2


@pytest.mark.parametrize(
    "url", ["prometheus:9090", "ftp://x", "http://", "http://me:secret@x", "http://x/?a=b", "http://x:no"]
)
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError):
        PrometheusHistory(url)


def test_without_prometheus_memory_says_where_it_begins(view: RunView) -> None:
    assert run_detail(view, SINCE).pace.begins_unix_seconds == view.ticks[0].start
    found = rank_history(view, 0, SINCE)
    assert found is not None and found.history.begins_unix_seconds == view.ticks[0].start and not found.history.note
    asked = rank_history(view, 0, SINCE, PrometheusHistory("http://127.0.0.1:1"))
    assert asked is not None and asked.history.begins_unix_seconds is None and asked.history.note == READING.note


def test_every_signal_of_a_rank_reads_exported_metrics() -> None:
    metrics = exported_metrics()
    recorded = {rule.get("record") for rule in rules()}
    for signal in (*SIGNALS, *RUN_SIGNALS[:4]):
        found = list(selectors(signal.promql))
        assert found, signal.name
        for selector in found:
            labels = metrics[selector.metric].labels
            for matcher in selector.matchers:
                closed = labels[matcher.label]
                assert not closed or set(matcher.words) <= set(closed), signal.name
            # Of a run, or joined with the ranks of one.
            assert "run" in labels or "rankscope_rank_info{$run" in signal.promql
        assert set(re.findall(r"\b\w+:rankscope_\w+:\w+", signal.promql)) <= recorded
        assert signal.promql.count("{") == signal.promql.count("{$run") + sum(
            "run" not in metrics[selector.metric].labels and bool(selector.matchers) for selector in found
        )
