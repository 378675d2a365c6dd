"""Reports of hangs, with a relay and a clock as a test wants them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest

from rankscope.analysis.collectives.flight_recorder.tail import make_tail
from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict
from rankscope.operator.correlation import hang_reporter, hang_store
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.hang_reporter import REPORTS_OF_A_JOB, HangReporter
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.profile_service_pb2 import DumpStacksResponse, FlightRecorderTail, RankStack
from rankscope.v1.window_pb2 import RankWindow, Stall, StepStatistics
from tests.support.audit_records import Audited
from tests.support.waiting import wait_until
from tests.unit.analysis.collectives.flight_recorder.made_dumps import hung_job

HANG = Verdict(Kind.HANG, "no rank has advanced for 35 s", Severity.ALARM, culprits=(1,))
HEALTHY = Verdict(Kind.HEALTHY, "all ranks keep up")
MOVING = Verdict(Kind.INSUFFICIENT_DATA, "moving again; no window compared yet")
IN_TORCH = "all_reduce (/usr/lib/python3/site-packages/torch/distributed/distributed_c10d.py:99)"
ANSWER = DumpStacksResponse(
    ranks=[RankStack(rank=0, frames=[IN_TORCH, "main (train.py:1)"]), RankStack(rank=1, frames=["save (ckpt.py:51)"])]
)


class Watched:
    def __init__(self, folder: Path | None) -> None:
        self.now = 10_000.0
        self.asked: list[str] = []
        self.seen: list[HangReport] = []
        self.answer: Callable[[], DumpStacksResponse] = lambda: ANSWER
        self.store = HangStore(FolderFiles(folder), lambda: self.now)
        self.reporter = HangReporter(
            self.store, self.dump, self.seen.append, lambda: self.now, lambda: self.now, pauses_seconds=(0.0, 0.0)
        )

    def dump(self, job: str) -> DumpStacksResponse:
        answer = self.answer  # a test that waits for `asked` may set the next one
        self.asked.append(job)
        return answer()

    def state(self, verdict: Verdict, job: str = "llama", stalled_seconds: float = 35.0) -> JobState:
        windows = [
            RankWindow(
                identity=RankIdentity(job=job, rank=rank),
                stall=Stall(seconds_since_step=stalled_seconds + rank),
                end_unix_nanos=round(self.now * 1e9),
            )
            for rank in range(2)
        ]
        return JobState(
            job, 2, verdict, self.now, self.now, 2, 0.1, None, None, windows, window_end_unix_seconds=self.now
        )

    def show(self, *states: JobState) -> None:
        self.reporter(states)

    def hang(self, job: str = "llama", count: int = 1) -> HangReport:
        self.show(self.state(HANG, job))
        wait_until(lambda: len(self.seen) >= count)
        return self.seen[-1]

    def kept(self) -> list[HangReport]:
        return self.store.summaries(lambda run: True)


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    made = Watched(tmp_path / "hangs")
    yield made
    made.reporter.stop()


def test_a_lasting_hang_is_reported_once_with_its_length(watched: Watched) -> None:
    report = watched.hang("lab/llama")
    assert report.id.startswith("lab/h-") and report.run == "lab/llama"
    assert report.headline == "rank 1 in save (ckpt.py:51), rank 0 in all_reduce (train.py:1)"
    assert (report.began_unix_seconds, report.made_unix_seconds, report.ended_unix_seconds) == (9965, 10_000, None)
    for _ in range(3):
        watched.now += 20
        watched.show(watched.state(HANG, "lab/llama", watched.now - 9965))
    assert (watched.asked, watched.reporter.hangs_of("lab/llama")) == (["lab/llama"], 1)
    found = watched.store.find(report.id)
    assert found is not None and (found.seconds, found.ended_unix_seconds, found.places) == (95, None, report.places)
    watched.show()
    assert watched.reporter.hangs_of("lab/llama") == 0, "a job that is gone takes no memory"


def test_the_step_that_ends_a_hang_tells_its_length(watched: Watched) -> None:
    report = watched.hang()
    watched.now += 20
    watched.show(watched.state(HANG, stalled_seconds=55.0))
    watched.now += 2
    window = RankWindow(step_seconds=StepStatistics(max=56.25))
    watched.show(replace(watched.state(MOVING), windows=[RankWindow(), window]))
    wait_until(lambda: watched.kept()[0].ended_unix_seconds is not None)
    watched.now += 100
    watched.show(watched.state(HEALTHY))
    found = watched.store.find(report.id)
    assert found is not None and (found.seconds, found.places) == (56.25, report.places)
    watched.hang(count=2)
    assert watched.reporter.hangs_of("llama") == 2


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_job_that_ends_or_restarts_ends_its_hang(watched: Watched, restarts: int) -> None:
    watched.hang()
    watched.now += 20
    watched.show(watched.state(HANG, stalled_seconds=55.0))
    watched.now += 90
    watched.show(*[replace(watched.state(MOVING), restarts=restarts)] * restarts)
    wait_until(lambda: watched.kept()[0].ended_unix_seconds == 10_020)
    assert watched.kept()[0].seconds == 55


def test_a_hang_of_low_confidence_has_a_report_too(watched: Watched) -> None:
    watched.show(watched.state(replace(HANG, severity=Severity.WARNING, confidence=Confidence.LOW)))
    wait_until(lambda: watched.asked == ["llama"])


def test_flight_recorders_of_ranks_are_matched_and_missing_ones_named(watched: Watched) -> None:
    tails = {rank: make_tail(dump) for rank, dump in hung_job().items()}
    ranks = [
        RankStack(rank=rank, frames=["all_reduce (a.py:1)"], flight_recorder=FlightRecorderTail(records=tail))
        for rank, tail in tails.items()
        if rank not in (16, 17)
    ]
    ranks.append(RankStack(rank=16, frames=["f (a.py:1)"], flight_recorder=FlightRecorderTail(records=b"\x80garbage")))
    ranks.append(RankStack(rank=17, problem="\x1b[2Jno", flight_recorder=FlightRecorderTail(problem="<b>off</b>")))
    watched.answer = lambda: DumpStacksResponse(ranks=ranks, problems=["node-b: no answer within 20 s"])
    report = watched.hang()
    assert {(gap.ranks, gap.what, gap.reason) for gap in report.gaps} == {
        ("17", "stack", "\ufffd[2Jno"),
        ("16", "flight recorder", "its records cannot be read"),
        ("17", "flight recorder", "<b>off</b>"),
    }
    assert report.collectives[0].finding == "waits"
    assert report.problems == ("node-b: no answer within 20 s",)


class NoStacksError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str) -> None:
        self.code, self.details = lambda: code, lambda: details


def test_a_daemon_busy_with_other_stacks_is_asked_again(watched: Watched) -> None:
    busy = NoStacksError(grpc.StatusCode.RESOURCE_EXHAUSTED, "try again in 3 s")

    def busy_at_first() -> DumpStacksResponse:
        if len(watched.asked) < 3:
            raise busy
        return ANSWER

    watched.answer = busy_at_first
    assert watched.hang().headline.startswith("rank 1 in save (ckpt.py:51)")

    def always_busy() -> DumpStacksResponse:
        raise busy

    watched.answer = always_busy
    assert watched.hang("another", count=2).problems == ("the stacks could not be read: try again in 3 s",)
    assert watched.asked == ["llama"] * 3 + ["another"] * 3


def test_silent_daemons_leave_a_report_with_the_verdict(watched: Watched) -> None:
    def away() -> DumpStacksResponse:
        raise NoStacksError(grpc.StatusCode.UNAVAILABLE, "no daemon")

    watched.answer = away
    report = watched.hang()
    assert report.headline == HANG.reason and report.problems == ("the stacks could not be read: no daemon",)
    watched.answer = lambda: 1 // 0  # a defect of ours
    watched.show(watched.state(HANG, "another"))
    wait_until(lambda: watched.asked[-1] == "another")
    watched.answer = lambda: ANSWER
    watched.hang("third", count=2)


def test_reports_under_way_are_bounded_and_others_wait(watched: Watched) -> None:
    answering = threading.Event()

    def slow() -> DumpStacksResponse:
        assert answering.wait(60)
        return ANSWER

    watched.answer = slow
    states = [watched.state(HANG, f"job-{number}") for number in range(5)]
    watched.show(*states)
    watched.show(*states)
    wait_until(lambda: len(watched.asked) == hang_reporter.UNDER_WAY)
    answering.set()

    def all_reported() -> bool:
        watched.show(*states)
        return len(watched.seen) == len(states)

    wait_until(all_reported)
    assert sorted(watched.asked) == [state.job for state in states]


def test_a_constantly_hanging_job_is_counted_but_reported_seldom(
    watched: Watched, caplog: pytest.LogCaptureFixture
) -> None:
    limit = int(REPORTS_OF_A_JOB)
    for number in range(limit + 2):
        watched.now += 60
        watched.show(watched.state(HANG))
        wait_until(lambda number=number: len(watched.seen) >= min(number + 1, limit))
        watched.show(watched.state(HEALTHY))
    assert watched.reporter.hangs_of("llama") == limit + 2
    assert (len(watched.asked), caplog.text.count("hangs too often")) == (limit, 2)


def test_a_restart_lists_reports_and_repeats_no_lasting_one(tmp_path: Path) -> None:
    first = Watched(tmp_path)
    report = first.hang()
    first.reporter.stop()
    again = Watched(tmp_path)
    assert [(one.id, one.seconds) for one in again.kept()] == [(report.id, 35)]
    again.now += 30
    again.show(again.state(HANG, stalled_seconds=65.0))
    again.hang("other")
    assert again.asked == ["other"]
    wait_until(lambda: [one.ended_unix_seconds for one in again.kept() if one.id == report.id] == [again.now])
    again.reporter.stop()


def test_every_dump_is_in_the_audit_log(watched: Watched, audited: Audited) -> None:
    report = watched.hang("lab/llama")
    lines = audited()
    assert [(line["event"], line["via"], line["what"], line["run"], line["id"]) for line in lines] == [
        ("asked", "hang", "stacks", "llama", report.id),
        ("ended", "hang", "stacks", "llama", report.id),
    ]
    assert lines[1]["message"] == "2/2 ranks delivered"


# The folder.


def made(number: int, made_unix_seconds: float = 1000.0, **more: Any) -> HangReport:
    return HangReport(
        id=f"h-20260301-101500-{number:06x}",
        run="llama",
        headline="rank 1 in save",
        verdict="it hangs",
        world_size=2,
        began_unix_seconds=made_unix_seconds - 35,
        made_unix_seconds=made_unix_seconds,
        **more,
    )


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_the_oldest_reports_are_removed_by_number_bytes_and_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_store, "MAX_REPORTS", 3)
    now = 1000.0
    store = HangStore(FolderFiles(tmp_path), lambda: now)
    for number in range(5):
        store.keep(made(number))
    assert files(tmp_path) == [f"h-20260301-101500-{number:06x}.json" for number in (2, 3, 4)]
    monkeypatch.setattr(hang_store, "TOTAL_BYTES", 2 * len(msgspec.json.encode(made(1))))
    store.keep(made(5))
    assert [one.id[-1] for one in store.summaries(lambda run: run == "llama")] == ["5", "4"]
    now += hang_store.KEPT_SECONDS + 1
    assert (store.summaries(lambda run: True), files(tmp_path)) == ([], [])
    monkeypatch.setattr(hang_store, "REPORT_BYTES", 100)
    with pytest.raises(OSError, match="the most"):
        store.keep(made(6))
    store.close()


def test_files_are_private_and_damaged_ones_are_left_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = HangStore(FolderFiles(tmp_path), lambda: 1000.0)
    store.keep(made(1))
    store.close()
    (whole,) = tmp_path.iterdir()
    assert (whole.stat().st_mode & 0o777, tmp_path.stat().st_mode & 0o777) == (0o600, 0o700)
    broken = {"2": b"", "3": whole.read_bytes()[:40], "4": b"[]", "5": whole.read_bytes()}
    for name, content in broken.items():
        (tmp_path / f"h-20260301-101500-00000{name}.json").write_bytes(content)
    (tmp_path / "h-20260301-101500-000006.new").write_bytes(b"cut off by a crash")
    again = HangStore(FolderFiles(tmp_path), lambda: 1000.0)
    assert [one.id[-1] for one in again.summaries(lambda run: True)] == ["1"]
    assert caplog.text.count("is not read") == len(broken)
    assert again.find("../h-20260301-101500-000001") is None
    again.close()


def test_a_folder_in_use_or_full_disk_loses_only_reports(
    watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = HangStore(FolderFiles(tmp_path / "hangs"), lambda: 1000.0)
    second.keep(made(1))
    assert "only until this process ends" in caplog.text and not files(tmp_path / "hangs")
    second.close()

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hang_store, "write_whole", full)
    watched.hang()
    assert "No space left on device" in caplog.text and not watched.kept()
