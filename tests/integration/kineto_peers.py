"""Clients of libkineto's protocol in network namespaces of their own, and endpoints that serve them. The machine's own
namespace is left alone: another daemon may be there."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rankscope.daemon.captures.kineto.endpoint import Endpoint, Offer
from rankscope.daemon.procfs import read_stat
from tests.support.waiting import wait_until

CLIENT = Path(__file__).parent / "jobs" / "kineto_client.py"
SILENCE_SECONDS = 0.5


TRIES = 20


class Peer:
    """`sends` returns what its sockets hear: [[its name, the sender, the type, is whole, the text], …]."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        assert process.stdout is not None
        self.own_pid = int(process.stdout.readline())  # as it knows it
        self.pid = process.pid
        self.namespace = Path(f"/proc/{self.pid}/ns/net").stat().st_ino
        self.start_ticks = read_stat(f"/proc/{self.pid}").start_ticks

    def tell(self, **order: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    def answer(self) -> Any:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def do(self, **order: Any) -> Any:
        self.tell(**order)
        return self.answer()

    def polls(self, mask: int = 3, **order: Any) -> list[str]:
        """The texts that it gets for a poll."""
        return self.texts(poll={"mask": mask}, **order)

    def texts(self, **order: Any) -> list[str]:
        """What it is answered."""
        return [text for *_, text in self.answers(**order)]

    def answers(self, **order: Any) -> list[list[Any]]:
        """On a busy machine an answer may be so late that the endpoint keeps it back: then it asks again, as libkineto
        does."""
        for _ in range(TRIES):
            heard: list[list[Any]] = self.do(do="send", **order)
            if heard:
                return heard
        return []

    def is_ignored(self, **order: Any) -> bool:
        return self.do(do="send", seconds=SILENCE_SECONDS, **order) == []


@contextmanager
def peer(*unshare: str) -> Iterator[Peer]:
    command = ["unshare", "--net", *unshare, sys.executable, "-I", "-S", str(CLIENT)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield Peer(process)
    finally:
        process.kill()
        process.communicate()


@contextmanager
def endpoint_for(*peers: Peer, **more: Any) -> Iterator[Endpoint]:
    endpoint = Endpoint(**{"settling_seconds": 0.0, **more})
    endpoint.start()
    try:
        watch(endpoint, {each.namespace: each.pid for each in peers})
        yield endpoint
    finally:
        endpoint.stop()


def watch(endpoint: Endpoint, namespaces: Mapping[int, int]) -> None:
    """Until sockets are there or have failed."""
    endpoint.watch(namespaces)
    wait_until(lambda: all(endpoint.served_seconds(each) is not None or endpoint.failure(each) for each in namespaces))


def offer(text: str, to: Peer, handed: Callable[[], object] = lambda: None) -> Offer:
    return Offer(to.start_ticks, lambda: text, handed)
