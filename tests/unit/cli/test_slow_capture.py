"""`rankscope run --capture-when-slow`: one capture, when an alarm stands, which harms neither command nor card."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.cli.slow_capture import SlowCapture
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.job_service import verdict_message
from rankscope.v1 import capture_service_pb2 as pb
from tests.support.waiting import wait_until
from tests.unit.cli.capture_server import ANALYSED, ScriptedCaptures, capture, serve

SLOW = Verdict(Kind.SLOW_RANK, "slow", Severity.ALARM, culprits=(1,), impact_ratio=0.5)
STATE = JobState("bert", 2, SLOW, 0.0, 1.0, 2, 0.1, None, None, ())


def judged(record: pb.Capture) -> None:
    record.verdict.CopyFrom(verdict_message(SLOW, 0.0))
    excess = {"excess_seconds": 0.05, "low_seconds": 0.04, "high_seconds": 0.06}
    record.join.verdict = "slow_rank"
    record.join.excesses.add(rank=1, steps=12, **excess)
    for entry in record.ranks:
        entry.summary.findings.append("host-bound")


@pytest.fixture
def captures(tmp_path: Path) -> Iterator[ScriptedCaptures]:
    daemon = ScriptedCaptures()
    daemon.artifacts = {0: 2500 * b"x", 1: 2500 * b"y"}
    daemon.script = [capture(ANALYSED, ANALYSED, ANALYSED, edit=judged)]
    server = serve(daemon, f"unix:{tmp_path}/daemon.sock")
    yield daemon
    server.stop(None).wait()


def slow_capture(tmp_path: Path) -> SlowCapture:
    return SlowCapture(lambda: f"unix:{tmp_path}/daemon.sock", tmp_path / "traces")


def test_an_alarm_is_captured_once_with_what_the_recording_says(captures: ScriptedCaptures, tmp_path: Path) -> None:
    with slow_capture(tmp_path) as watch:
        watch((replace(STATE, verdict=replace(SLOW, severity=Severity.WARNING)),))
        watch((replace(STATE, verdict=Verdict(Kind.DATA_IMBALANCE, "", Severity.ALARM)),))
        for _ in range(3):
            watch((STATE,))
        wait_until(lambda: len(list((tmp_path / "traces").glob("*.json.gz"))) == 2)
    (request,) = captures.requests
    assert (request.job, request.ranks, request.WhichOneof("length")) == ("bert", "straggler+peer", None)
    assert watch.line == (
        f"{tmp_path}/traces: the recording confirms it: rank 1 works 50 ms longer in a step than the other ranks "
        "(between 40 ms and 60 ms, 12 steps)"
    )
    assert (tmp_path / "traces" / "summary.json").exists()


def test_without_an_alarm_no_folder_is_left(captures: ScriptedCaptures, tmp_path: Path) -> None:
    with slow_capture(tmp_path) as watch:
        watch((replace(STATE, verdict=Verdict(Kind.HEALTHY, "")),))
    assert watch.line == "no rank was slow for long enough to be captured"
    assert not (tmp_path / "traces").exists()
    watch((STATE,))  # the correlator may call once more
    assert captures.requests == []


def test_a_refused_capture_is_reported_and_raises_nothing(captures: ScriptedCaptures, tmp_path: Path) -> None:
    captures.refusal = "no rank is slow now"
    with slow_capture(tmp_path) as watch:
        watch((STATE,))
    assert watch.line == "the slow rank was not captured: no rank is slow now"
