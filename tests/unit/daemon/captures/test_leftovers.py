"""Traces that nobody waits for are removed from containers, and nothing else is."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.daemon.captures.kineto import backend
from rankscope.daemon.captures.kineto.backend import Leftovers, left_behind
from rankscope.daemon.procfs import read_stat
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from tests.support.waiting import wait_until

ID = "c-20261115-120000-abcdef"
RANK = RankProcess("j", 3, 3, 8, os.getpid(), read_stat("/proc/self").start_ticks, (os.getpid(), 17))
NOW = 1_800_000_000.0


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "INTERVAL_SECONDS", 0.01)


def capture(state: pb.CaptureState.ValueType = pb.CAPTURE_STATE_FAILED, **changes: object) -> pb.Capture:
    entry = pb.RankCapture(**{"rank": 3, "pid": RANK.pid, "backend": "kineto", "state": state, **changes})
    return pb.Capture(id=ID, job="j", requested_unix_millis=round((NOW - 60) * 1000), ranks=[entry])


def test_only_the_expected_file_is_removed_when_it_appears(tmp_path: Path) -> None:
    expected, other = tmp_path / "rankscope-a.json", tmp_path / "rankscope-b.json"
    other.touch()
    removing = Leftovers()
    removing.expect(RANK.pid, RANK.start_ticks, str(expected))
    assert len(removing) == 1
    expected.touch()
    wait_until(lambda: not expected.exists() and len(removing) == 0)
    assert other.exists()
    # The thread that looked has ended; another one looks for the next.
    removing.expect(RANK.pid, RANK.start_ticks, str(other))
    wait_until(lambda: not other.exists() and len(removing) == 0)


def test_ended_processes_and_files_that_never_come_are_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    removing = Leftovers()
    removing.expect(RANK.pid, RANK.start_ticks + 1, str(tmp_path / "x"))  # another process by now
    wait_until(lambda: len(removing) == 0)
    monkeypatch.setattr(backend, "PATIENCE_SECONDS", 0.05)
    removing.expect(RANK.pid, RANK.start_ticks, str(tmp_path / "x"))
    wait_until(lambda: len(removing) == 0)


def test_an_earlier_daemons_files_are_known_by_its_records() -> None:
    assert left_behind([capture()], [RANK], NOW) == [(RANK, f"/tmp/rankscope-{ID}-rank3_17.json")]
    elsewhere = replace(RANK, environment={"KINETO_ONDEMAND_TRACE_DIR": "/scratch"})
    assert left_behind([capture()], [elsewhere], NOW)[0][1].startswith("/scratch/rankscope-")


@pytest.mark.parametrize(
    ("known", "rank"),
    [
        (capture(pb.CAPTURE_STATE_ANALYSED), RANK),
        (capture(backend="probe"), RANK),
        (capture(pid=RANK.pid + 1), RANK),
        (capture(), replace(RANK, job="another")),
        (capture(), replace(RANK, rank=4)),
        (capture(), replace(RANK, environment={"KINETO_ONDEMAND_TRACE_DIR": "/a/../../etc"})),
    ],
)
def test_what_is_not_provably_an_earlier_daemons_is_left_alone(known: pb.Capture, rank: RankProcess) -> None:
    assert left_behind([known], [rank], NOW) == []


def test_captures_of_long_ago_have_written_what_they_will() -> None:
    assert left_behind([capture()], [RANK], NOW + backend.LOST_SECONDS) == []
