from __future__ import annotations

import gzip
import json
import os
import re
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankscope.daemon.captures.orders import CancelledError, CaptureError
from rankscope.daemon.captures.processing import sandbox, worker
from rankscope.daemon.captures.processing.messages import (
    Job,
    Joined,
    RankJob,
    RankResult,
    find,
    job_file,
    join_file,
    leave,
    result_file,
)
from rankscope.daemon.captures.processing.sandbox import (
    MIN_MEMORY_BYTES,
    SHARE_OF_MEMORY,
    MemoryShares,
    run_module,
)
from rankscope.daemon.cgroups import memory_left_bytes
from tests.shared_data import H200, ROOT
from tests.unit.analysis.traces.step_files import StepFile

PID = 494


class Processed:
    """Recordings by rank, all worked on in one go: here, or by the confined process of the daemon."""

    def __init__(
        self,
        folder: Path,
        recordings: dict[int, bytes],
        asked: int | None,
        *,
        is_confined: bool = False,
        **options: Any,
    ) -> None:
        self.folder = folder
        jobs = []
        for rank, data in recordings.items():
            (folder / f"rank{rank}.json").write_bytes(data)
            jobs.append(self._job(rank, len(recordings), **options))
        leave(job_file(folder), Job(asked, jobs))
        if is_confined:
            run_module(worker.__name__, folder, seconds=120, what="working on the traces")
        else:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(worker, "confine", lambda **limits: None)  # which would hold for all tests after
                worker.main(folder)

    def _job(self, rank: int, world_size: int, **options: Any) -> RankJob:
        recording, artifact = self.folder / f"rank{rank}.json", self.folder / f"rank{rank}.json.gz"
        plain = {"pid": PID, "is_trace": True, "notes": {"rank": rank, "job": "j"}}
        return RankJob(
            rank=rank, world_size=world_size, recording=str(recording), artifact=str(artifact), **{**plain, **options}
        )

    def result(self, rank: int) -> RankResult:
        result = find(result_file(self.folder, rank), RankResult)
        assert result is not None
        return result

    def artifact(self, rank: int) -> dict[str, Any]:
        read: dict[str, Any] = json.loads(gzip.decompress((self.folder / f"rank{rank}.json.gz").read_bytes()))
        return read


def test_all_ranks_are_cut_at_the_same_step_boundary(tmp_path: Path) -> None:
    late = [100.0 * number + 7.0 for number in range(-1, 12)]
    processed = Processed(
        tmp_path,
        {
            0: StepFile().text(),
            1: StepFile(begin_ms=-60.0).text(),  # saw one boundary more
            2: StepFile(begin_ms=103.0, boundaries_ms=late).text(),  # passes boundaries a little later
        },
        asked=3,
        is_confined=True,
        flops_per_step=2e12,
        peak_flops_per_second=1e14,
    )
    starts = []
    for rank in range(3):
        result, artifact = processed.result(rank), processed.artifact(rank)
        assert (result.error, result.notes, result.steps) == ("", [], 3)
        assert result.step_seconds == pytest.approx(0.1)
        assert result.summary is not None
        assert result.summary.step_seconds == pytest.approx(0.1)
        assert result.summary.mfu_ratio == pytest.approx(2e12 / (0.1 * 1e14))
        assert result.summary.collectives == {"all_reduce": 3}
        assert result.summary.each_step_seconds == pytest.approx([0.1] * 3, rel=0.2)
        assert len(result.summary.each_exposed_communication_seconds) == 3
        assert max(result.summary.each_exposed_communication_seconds) <= max(result.summary.each_communication_seconds)
        assert min(result.summary.each_communication_seconds) > 0
        assert result.summary.events > 0
        assert artifact["rankscope"] == {
            "rank": rank, "job": "j", "steps": 3, "start_unix_millis": result.start_unix_millis,
        }  # fmt: skip
        assert artifact["distributedInfo"] == {"rank": rank, "world_size": 3}
        assert not (tmp_path / f"rank{rank}.json").exists()
        starts.append(result.start_unix_millis)
    assert starts[0] == starts[1] == starts[2] - 7  # type: ignore[operator]
    joined = find(join_file(tmp_path), Joined)
    assert joined is not None and joined.collectives_matched == 3


def test_the_summary_says_what_would_help(tmp_path: Path) -> None:
    trace = gzip.decompress((H200 / "launch_bound.json.gz").read_bytes())
    result = Processed(tmp_path, {0: trace}, asked=None, pid=529, steps=5, step_seconds=0.01475).result(0)
    assert result.summary is not None and result.notes == []
    together, graph, fused = result.summary.advice
    assert re.match(r"graph\+fused would save 62\.\d % of the step: torch\.compile.*; fused=True", together)
    assert graph.startswith("graph would save 5") and fused.startswith("fused would save")


def test_a_ranks_windows_are_kept_separately_and_summed(tmp_path: Path) -> None:
    for number, begin_ms in ((2, 1030.0), (3, 2030.0)):
        later = StepFile(begin_ms=begin_ms, end_ms=begin_ms + 700, boundaries_ms=[100.0 * n for n in range(9, 35)])
        (tmp_path / f"rank0.window{number}.json").write_bytes(later.text())
    (tmp_path / "rank0.window4.json").write_text("not a trace")
    further = [str(tmp_path / f"rank0.window{number}.json") for number in (2, 3, 4)]
    alone = Processed(tmp_path, {0: StepFile().text()}, asked=None, steps=6).result(0)
    processed = Processed(tmp_path, {0: StepFile().text()}, asked=6, steps=18, more_windows=further)
    result = processed.result(0)
    assert result.summary is not None and alone.summary is not None
    assert [(window.number, window.steps) for window in result.more_windows] == [(1, 6), (2, 6)]
    assert result.start_unix_millis is not None
    assert [window.start_unix_millis - result.start_unix_millis for window in result.more_windows] == [1000, 2000]
    assert (result.steps, processed.artifact(0)["rankscope"]["steps"]) == (18, 6)
    # What went by between the windows is not in the sums.
    assert result.summary.span_seconds == pytest.approx(3 * alone.summary.span_seconds)
    assert result.summary.idle_seconds == pytest.approx(3 * alone.summary.idle_seconds)
    assert result.summary.step_seconds == pytest.approx(0.1)
    assert result.summary.collectives == {"all_reduce": 3 * alone.summary.collectives["all_reduce"]}
    assert result.summary.events == 3 * alone.summary.events
    (note,) = result.notes
    assert note.startswith("window 4 is not kept: the process wrote no complete trace")
    second = json.loads(gzip.decompress((tmp_path / "rank0.window2.json.gz").read_bytes()))
    assert second["rankscope"]["steps"] == 6


def test_captures_by_time_are_cut_to_what_all_ranks_recorded(tmp_path: Path) -> None:
    late, short = StepFile(begin_ms=90.0, end_ms=790.0), StepFile(end_ms=610.0)
    processed = Processed(tmp_path, {0: StepFile().text(), 1: late.text(), 2: short.text()}, asked=None)
    results = [processed.result(rank) for rank in range(3)]
    # From 90 to 610 ms: boundaries at 100, 200, … 600, and the first step that ends there was not seen from its start.
    assert {result.steps for result in results} == {5}
    starts = [result.start_unix_millis for result in results]
    assert starts[1] == starts[0] + 60 == starts[2] + 60  # type: ignore[operator]
    for rank in range(3):
        times = [event["ts"] for event in processed.artifact(rank)["traceEvents"] if event.get("cat") == "cpu_op"]
        ends = [e["ts"] + e["dur"] for e in processed.artifact(rank)["traceEvents"] if e.get("cat") == "cpu_op"]
        assert max(ends) - min(times) <= 520_000
    apart = StepFile(begin_ms=700.0, end_ms=1000.0)
    processed = Processed(tmp_path, {0: StepFile().text(), 1: apart.text()}, asked=None)
    assert processed.result(0).notes == ["the ranks recorded 0.0 s in common; nothing was cut"]
    assert processed.result(0).steps == 6


def test_work_that_is_not_wanted_any_more_is_ended(tmp_path: Path) -> None:
    cancelled = threading.Event()
    cancelled.set()
    leave(job_file(tmp_path), Job(None, []))
    with pytest.raises(CancelledError):
        run_module("http.server", tmp_path, seconds=120, what="work", cancelled=cancelled)


def test_a_recording_by_time_or_too_short_is_kept_whole(tmp_path: Path) -> None:
    text = StepFile().text()
    by_time = Processed(tmp_path, {0: text}, asked=None)
    assert (by_time.result(0).steps, by_time.result(0).notes) == (6, [])
    by_time_summary = by_time.result(0).summary
    assert by_time_summary is not None and by_time_summary.each_step_seconds == []  # its first step is cut
    assert by_time.artifact(0)["traceEvents"] == StepFile().events()
    for steps in (7, 100):
        too_short = Processed(tmp_path, {0: text}, asked=steps).result(0)
        assert too_short.notes == [f"6 whole steps were recorded, of {steps}; nothing was cut"]
        assert (too_short.whole_steps, too_short.step_seconds) == (6, pytest.approx(0.1))


def test_ranks_that_share_fewer_steps_than_asked_say_how_many(tmp_path: Path) -> None:
    recordings = {0: StepFile().text(), 1: StepFile(begin_ms=330.0, end_ms=1030.0).text()}
    processed = Processed(tmp_path, recordings, asked=5)
    assert processed.result(0).notes == ["the ranks recorded 3 steps in common, of 5; nothing was cut"]
    assert processed.result(0).whole_steps == 3


def test_a_recording_without_whole_steps_bounds_the_step_time(tmp_path: Path) -> None:
    slow = StepFile(boundaries_ms=(-1000.0, 2000.0, 9000.0), begin_ms=-500.0, end_ms=2500.0)
    result = Processed(tmp_path, {0: slow.text()}, asked=1).result(0)
    assert result.whole_steps == 0
    assert result.step_seconds is not None and 1.0 < result.step_seconds < 3.0


def test_a_recording_stopped_at_a_boundary_is_not_cut(tmp_path: Path) -> None:
    processed = Processed(tmp_path, {0: StepFile().text()}, 3, steps=3)
    assert (processed.result(0).steps, processed.result(0).notes) == (3, [])
    assert len(processed.artifact(0)["traceEvents"]) == len(StepFile().events())


def test_device_time_counts_and_the_devices_peak_is_known(tmp_path: Path) -> None:
    processed = Processed(tmp_path, {0: StepFile(lag_ms=12.0).text()}, 3, flops_per_step=1e12)
    summary = processed.result(0).summary
    assert summary is not None and summary.step_seconds == pytest.approx(0.1)
    assert summary.mfu_ratio == pytest.approx(1e12 / (0.1 * 989e12))


def test_each_hostile_recording_is_refused_with_its_reason(tmp_path: Path) -> None:
    good = StepFile().text()
    forged = StepFile(head={"rankscope": {"job": "other", "rank": 0}, "distributedInfo": {"rank": 77}}).text()
    hostile = {
        "the file is empty": b"",
        "not a JSON object": b"\x7fELF" + bytes(200),
        "the file is cut off inside traceEvents": good[: len(good) // 2],
        "its end is missing": good[: good.rindex(b"]") + 1] + b', "traceName": "t',
        "is a trace of process 4711, not of 494": StepFile(pid=4711).text(),
        "the trace is empty: the process ran no torch operator": b'{"traceEvents": []}',
        "JSON without traceEvents": b'{"a": 1}',
        "the gzip data ends early": gzip.compress(good)[:-20],
        "nothing in traceEvents can be read": b'{"traceEvents": [' + b"[" * 100_000 + b"]" * 100_000 + b"]}",
    }
    strange = {
        50: good.replace(b'"aten::forward_2"', b'"\\u001b[2J\\ud800 <b>"'),
        51: good.replace(b'"dur": 24000.0', b'"dur": 1e308').replace(b'"dur": 16000.0', b'"dur": -9e99'),
        52: forged,
        53: gzip.compress(good),
    }
    recordings = dict(enumerate(hostile.values())) | strange
    processed = Processed(tmp_path, {**recordings, 99: good}, asked=2, is_confined=True)
    for rank, reason in enumerate(hostile):
        assert reason in processed.result(rank).error
        assert not (tmp_path / f"rank{rank}.json.gz").exists()
        assert processed.result(rank).is_empty is reason.startswith("the trace is empty")
    for rank in (*strange, 99):
        assert processed.result(rank).error == ""
        assert processed.artifact(rank)["rankscope"]["job"] == "j"
        texts = msgspec.json.encode(processed.result(rank)).decode()
        assert "\\u001b" not in texts
    assert "calls itself rank 77 in its trace; its environment says 52" in processed.result(52).notes[0]
    assert processed.result(99).steps == 2


def test_stacks_are_compressed_and_annotated_beside(tmp_path: Path) -> None:
    stacks = (H200 / "pyspy_50hz_5s.raw").read_bytes()
    processed = Processed(tmp_path, {0: stacks}, None, is_trace=False)
    assert processed.result(0).error == ""
    assert gzip.decompress((tmp_path / "rank0.json.gz").read_bytes()) == stacks
    assert json.loads((tmp_path / "rank0.json.gz.notes").read_bytes()) == {"rank": 0, "job": "j"}


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("crash", r"testing failed \(signal 6\)"),
        ("exit", r"testing failed \(exit status 1\): out of order"),
        ("memory", r"testing failed \(exit status 1\): MemoryError"),
        ("disk", r"testing failed \(exit status 1\): OSError: \[Errno 27\] File too large"),
        ("hang", r"testing took longer than 3 s and was ended"),
    ],
)
def test_a_failing_confined_process_is_only_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, reason: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (tmp_path / "what").write_text(what)
    with pytest.raises(CaptureError, match=reason):
        run_module(
            "tests.unit.daemon.captures.misbehaving", tmp_path, seconds=3 if what == "hang" else 180, what="testing"
        )


class Ending:
    """Stands in for a child that ends after some looks at it, and for an event that is never set."""

    def __init__(self, looks: int) -> None:
        self._looks = looks

    def poll(self) -> int | None:
        self._looks -= 1
        return None if self._looks >= 0 else 0

    def wait(self, seconds: float) -> bool:
        return False


def test_a_process_is_checked_once_more_at_its_timeout() -> None:
    ticks = 8
    for looks, status in ((ticks, 0), (ticks + 1, None)):
        child: Any = Ending(looks)
        assert sandbox._await(child, ticks * sandbox.TICK_SECONDS, child) == status


def test_tenants_processes_share_no_more_than_available_memory() -> None:
    shares, never = MemoryShares(lambda: 2 << 30), threading.Event()
    with ExitStack() as stack:
        granted = [stack.enter_context(shares.share(f"pod {number}", 9.0, never)) for number in range(3)]
        assert all(one is not None and one >= MIN_MEMORY_BYTES for one in granted)
        assert sum(one or 0 for one in granted) < 2 << 30
        # The next one, and a second one of the same tenant, wait until there is enough.
        for tenant in ("pod 0", "pod 3"):
            with pytest.raises(CaptureError, match="other captures were worked on"):
                stack.enter_context(shares.share(tenant, 0.1, never))
    with shares.share("pod 0", 9.0, never) as alone:
        assert alone == int(SHARE_OF_MEMORY * (2 << 30))


def test_waiting_for_memory_ends_when_the_capture_is_cancelled() -> None:
    shares, cancelled = MemoryShares(lambda: None), threading.Event()
    with shares.share("pod 0", 9.0, cancelled) as unlimited, shares.share("pod 1", 9.0, cancelled):
        assert unlimited is None
        cancelled.set()
        with pytest.raises(CancelledError), shares.share("pod 0", 9.0, cancelled):
            pass


def test_a_process_has_the_memory_that_it_was_granted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    (tmp_path / "what").write_text("little memory")
    with pytest.raises(CaptureError, match="MemoryError"):
        run_module(
            "tests.unit.daemon.captures.misbehaving", tmp_path, seconds=180, what="testing", memory_bytes=1 << 20
        )


def test_a_container_with_little_memory_left_gives_its_process_less(tmp_path: Path) -> None:
    membership, group = tmp_path / "membership", tmp_path / "pod" / "daemon"
    group.mkdir(parents=True)
    membership.write_text("0::/pod/daemon\n")
    assert memory_left_bytes(tmp_path, membership) is None
    for folder, limit in ((group, "max"), (group.parent, "1000")):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text("900\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 300\nactive_file 7\n")
    assert memory_left_bytes(tmp_path, membership) == 1000 - (900 - 300)
    (tmp_path / "memory").mkdir()
    membership.write_text("4:cpu,memory:/\n")
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_left_bytes(tmp_path, membership) is None
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("500\n")
    (tmp_path / "memory" / "memory.usage_in_bytes").write_text("600\n")
    (tmp_path / "memory" / "memory.stat").write_text("total_inactive_file 150\n")
    assert memory_left_bytes(tmp_path, membership) == 50
