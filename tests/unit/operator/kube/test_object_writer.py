from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rankscope.operator.kube import object_writer
from rankscope.operator.kube.api_client import ApiError, UnreachableError
from rankscope.operator.kube.object_writer import Outbox, Write
from tests.support.waiting import wait_until


@pytest.fixture
def outbox() -> Iterator[Outbox]:
    made = Outbox()
    made.start()
    yield made
    made.stop(0.1)


class Server:
    """Takes down what it is sent; `answer` may raise."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.taken: list[str] = []

    def send(self, content: str) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.taken.append(content)


def test_equal_content_is_written_once_and_newer_content_replaces_older(outbox: Outbox) -> None:
    server, gate = Server(), threading.Event()
    outbox.put(Write("gate", "g", lambda: void(gate.wait(60))))
    for content in ("old", "older", "new"):
        outbox.put(Write("status", content, lambda content=content: server.send(content)))  # type: ignore[misc]
    gate.set()
    wait_until(lambda: server.taken and not outbox.waiting)
    outbox.put(Write("status", "new", lambda: server.send("new")))
    outbox.put(Write("other", "x", lambda: server.send("x")))
    wait_until(lambda: len(server.taken) > 1)
    assert server.taken == ["new", "x"]


def test_writes_to_an_absent_or_starting_server_are_retried_soon(
    outbox: Outbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(object_writer, "FIRST_PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(object_writer, "FIRST_REFUSED_SECONDS", 0.05)
    refused = [ApiError(403, "Forbidden", "roles are not read yet") for _ in range(3)]
    server = Server(UnreachableError("away"), *refused)
    outbox.put(Write("status", "a", lambda: server.send("a")))
    wait_until(lambda: server.taken == ["a"] and not outbox.waiting)
    assert (outbox.failed_total, outbox.written_total, outbox.waiting) == (4, 1, 0)


def test_a_permanently_refused_write_holds_up_no_other(outbox: Outbox) -> None:
    server = Server()

    def refuse() -> None:
        raise ApiError(422, "Invalid", "never")

    outbox.put(Write("bad", "b", refuse))
    outbox.put(Write("good", "g", lambda: server.send("g")))
    wait_until(lambda: server.taken == ["g"] and outbox.waiting < 2)
    assert outbox.waiting == 1


def void(_: object) -> None:
    pass


def test_a_namespace_with_a_thousand_writes_delays_no_other(outbox: Outbox) -> None:
    server, gate = Server(), threading.Event()
    outbox.put(Write("gate", "g", lambda: void(gate.wait(60))))
    for number in range(1000):
        name = f"busy-{number}"
        outbox.put(Write(name, name, lambda name=name: server.send(name), "busy"))  # type: ignore[misc]
    for name in ("quiet-0", "quiet-1"):
        outbox.put(Write(name, name, lambda name=name: server.send(name), "quiet"))  # type: ignore[misc]
    gate.set()
    wait_until(lambda: len(server.taken) >= 4)
    assert server.taken[:4] == ["busy-0", "quiet-0", "busy-1", "quiet-1"]
