"""Which ranks libkineto can be asked to record, and why not."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest

from rankscope.daemon.captures.kineto.backend import SILENCE_SECONDS, KinetoBackend
from rankscope.daemon.captures.kineto.clients import Client
from rankscope.daemon.captures.kineto.endpoint import Endpoint
from rankscope.daemon.captures.orders import CaptureError, Order
from rankscope.daemon.samples import RankProcess

RANK = RankProcess("j", 3, 3, 8, os.getpid(), 1, (os.getpid(),), {"KINETO_USE_DAEMON": "1"})


@dataclass
class Hearing:
    """Stands for the endpoint: what it has heard."""

    known: Client | None = None
    reason: str | None = None
    seconds: float | None = 0.0

    def client(self, pid: int) -> Client | None:
        return self.known

    def failure(self, namespace: int) -> str | None:
        return self.reason

    def served_seconds(self, namespace: int) -> float | None:
        return self.seconds


def objection(hearing: Hearing, rank: RankProcess = RANK) -> str | None:
    return KinetoBackend(cast(Endpoint, hearing)).objection(rank)


def test_a_polling_process_is_accepted_whatever_its_environment() -> None:
    polling = Client(1, b"", RANK.pid, time.monotonic(), 5.0, True)
    assert objection(Hearing(known=polling), replace(RANK, environment={})) is None


@pytest.mark.parametrize("value", [None, "", "0"])
def test_a_process_without_the_variable_is_told_so(value: str | None) -> None:
    environment = {} if value is None else {"KINETO_USE_DAEMON": value}
    assert objection(Hearing(), replace(RANK, environment=environment)) == (
        "the process was started without KINETO_USE_DAEMON=1"
    )


def test_a_silent_process_is_refused_only_on_an_old_socket() -> None:
    assert objection(Hearing(seconds=None)) is None
    assert objection(Hearing(seconds=SILENCE_SECONDS - 1)) is None
    assert "libkineto has not called" in str(objection(Hearing(seconds=SILENCE_SECONDS + 1)))


def test_a_socket_that_cannot_be_had_is_the_reason() -> None:
    assert objection(Hearing(reason="another profiling daemon")) == "another profiling daemon"


def test_a_process_that_has_ended_has_no_namespace() -> None:
    assert "network namespace cannot be read" in str(objection(Hearing(), replace(RANK, pid=1 << 22)))


def test_cuda_without_the_teardown_flag_is_refused(tmp_path: Path) -> None:
    descriptors = tmp_path / "proc" / str(RANK.pid) / "fd"
    descriptors.mkdir(parents=True)
    (descriptors / "7").symlink_to("/dev/nvidia0")
    order = Order("c", RANK, 3, None, 1, 2.0)
    backend = KinetoBackend(cast(Endpoint, Hearing()), tmp_path / "proc")
    with pytest.raises(CaptureError, match="start the job with TEARDOWN_CUPTI=1, or accept that with --allow-slowdown"):
        backend.record(order, tmp_path, lambda stage: None, threading.Event())
