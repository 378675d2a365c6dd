"""When the duty cycle records, what it skips, and where what it learned goes; captures do as the test says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from rankscope.daemon.captures.duty_cycle import MAX_RECORDS, YOUNG_WINDOWS, DutyCycle, DutySettings
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, SOURCE_PROBE, RankWindow, Stall
from tests.unit.daemon import window_makers as make

PERIOD, WINDOW = 600.0, 2.0
SETTINGS = DutySettings(steps=2, period_seconds=PERIOD, budget_ratio=0.005)


@dataclass
class ScriptedCaptures:
    started: list[tuple[pb.StartCaptureRequest, float | None]] = field(default_factory=list)
    made: dict[str, pb.Capture] = field(default_factory=dict)
    objections: dict[int, str] = field(default_factory=dict)
    unable: bool = False
    busy: bool = False
    refusal: str = ""

    def start(self, request: pb.StartCaptureRequest, requested_by: str, step_seconds: float | None) -> str:
        if self.refusal:
            raise CaptureError(self.refusal)
        assert requested_by == "duty cycle"
        self.started.append((request, step_seconds))
        capture = pb.Capture(id=f"c-{len(self.started)}", job=request.job, state=pb.CAPTURE_STATE_ARMED)
        self.made[capture.id] = capture
        return capture.id

    def find(self, capture_id: str) -> pb.Capture | None:
        return self.made.get(capture_id)

    def is_busy(self, job: str) -> bool:
        return self.busy

    def is_able(self, rank: RankProcess) -> bool:
        return not self.unable

    def objection(self, rank: RankProcess) -> str | None:
        return self.objections.get(rank.rank)

    def kept(self) -> Sequence[tuple[str, str]]:
        return [(c.id, c.job) for c in self.made.values() if c.state != pb.CAPTURE_STATE_ARMED]

    def forget(self, capture_id: str) -> None:
        del self.made[capture_id]

    def deliver(
        self, ranks: Sequence[int] = (0, 1), steps: int = 2, events: int = 2000, wait_seconds: float = 0.02
    ) -> None:
        capture = next(c for c in self.made.values() if c.state == pb.CAPTURE_STATE_ARMED)
        for rank in ranks:
            summary = pb.TraceSummary(
                span_seconds=0.1 * max(steps, 1),
                step_seconds=0.1 if steps else None,
                each_step_seconds=[0.1] * steps,
                each_exposed_communication_seconds=[wait_seconds] * steps,
                each_communication_seconds=[0.03] * steps,
                events=events,
            )
            capture.ranks.add(rank=rank, state=pb.CAPTURE_STATE_ANALYSED, steps=steps, summary=summary)
        capture.state = pb.CAPTURE_STATE_ANALYSED


class Node:
    """A daemon that ticks every two seconds of a fake clock."""

    def __init__(self, captures: ScriptedCaptures, settings: DutySettings = SETTINGS, begun: float = 1e9) -> None:
        self.captures, self.now = captures, begun
        self.ranks = [make.rank(0), make.rank(1)]
        self.sources: dict[int, int] = {}
        self.blind: set[int] = set()  # ranks whose probe does not see collectives
        self.sampled_every = 1
        self.ticks = 0
        self.stalled = False
        self.duty = DutyCycle(settings, captures, WINDOW, lambda: self.now)

    def tick(self) -> dict[int, RankWindow]:
        self.now += WINDOW
        self.ticks += 1
        windows: dict[RankKey, RankWindow] = {}
        for rank in self.ranks:
            window = windows[rank.key] = RankWindow(sequence=1)
            if rank.rank in self.sources:
                window.steps = 20
                window.sources["steps"] = self.sources[rank.rank]  # type: ignore[assignment]
                if rank.rank not in self.blind and self.ticks % self.sampled_every == 0:
                    window.wait_seconds.mean = 0.01
            if self.stalled:
                window.stall.CopyFrom(Stall(seconds_since_step=9))
            self.duty.fill(rank.key, window)
        self.duty.observe(self.ranks, windows)
        return {key[1]: window for key, window in windows.items()}

    def run(self, seconds: float) -> None:
        for _ in range(round(seconds / WINDOW)):
            self.tick()

    def run_until_started(self, count: int = 1, limit_seconds: float = 20 * PERIOD) -> None:
        end = self.now + limit_seconds
        while len(self.captures.started) < count:
            self.tick()
            assert self.now < end

    def capture(self, **delivery: int) -> Mapping[int, RankWindow]:
        """One more capture, from its start to the window that tells of it."""
        self.run_until_started(len(self.captures.started) + 1)
        self.captures.deliver(**delivery)  # type: ignore[arg-type]
        self.tick()
        return self.tick()


@pytest.fixture
def captures() -> ScriptedCaptures:
    return ScriptedCaptures()


def test_all_nodes_begin_together_whenever_their_daemons_started() -> None:
    starts = []
    for begun in (1e9, 1e9 + 123.4, 1e9 + 571.9):
        node = Node(ScriptedCaptures(), begun=begun)
        for _ in range(3):
            node.capture()
        starts.append([request.start_unix_millis for request, _ in node.captures.started])
        first = node.captures.started[0][0]
        assert (first.steps, first.ranks, first.patience_seconds) == (2, "all", 0.0)
    common = set(starts[0]) & set(starts[1]) & set(starts[2])
    assert len(common) >= 2
    for of_node in starts:
        assert [later - sooner for sooner, later in pairwise(of_node)] == [600_000] * 2


def test_starts_give_libkineto_time_to_ask_and_jobs_take_turns() -> None:
    captures = ScriptedCaptures()
    node = Node(captures)
    node.ranks = [make.rank(0, job="one"), make.rank(0, job="two")]
    node.run_until_started(1)
    assert 14.0 <= captures.started[0][0].start_unix_millis / 1000 - node.now <= 17.0
    node.run_until_started(2)
    first, second = (request.start_unix_millis for request, _ in captures.started)
    assert {request.job for request, _ in captures.started} == {"one", "two"} and first != second


def test_only_the_window_after_a_capture_holds_it(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    windows = node.capture()
    for window in windows.values():
        assert window.steps == 2
        assert window.step_seconds.mean == pytest.approx(0.1)
        assert (window.self_seconds.mean, window.self_seconds.p50) == pytest.approx((0.08, 0.08))
        assert window.wait_seconds.p50 == pytest.approx(0.02)
        assert window.figures["communication_seconds"] == pytest.approx(0.03)
        names = ("steps", "step_seconds", "self_seconds", "wait_seconds", "communication_seconds")
        assert {window.sources[name] for name in names} == {SOURCE_CAPTURE}
    later = node.tick()
    assert not any(window.HasField("steps") or window.sources for window in later.values())
    assert node.duty.results == {"done": 1, "failed": 0, "skipped": 0}


def test_gauges_show_the_last_capture_until_it_is_old(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    node.capture()
    window, key = RankWindow(sequence=9), node.ranks[0].key
    shown = node.duty.shown(key, window)
    assert (shown.steps, shown.sequence, window.HasField("steps")) == (2, 9, False)
    captures.busy = True
    node.run(3 * PERIOD + 10)
    assert not node.duty.shown(key, window).HasField("steps")


def test_a_replacement_rank_does_not_get_its_predecessors_steps(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    node.run_until_started()
    node.ranks[0] = make.rank(0, pid=9999)
    captures.deliver()
    node.tick()
    windows = node.tick()
    assert not windows[0].HasField("steps") and windows[1].HasField("steps")


def test_jobs_with_one_probe_or_no_recorder_are_left_alone() -> None:
    for unable, sources in ((False, {1: SOURCE_PROBE}), (True, {})):
        node = Node(ScriptedCaptures(unable=unable))
        node.sources = dict(sources)
        node.run(2 * PERIOD)
        assert node.captures.started == [] and node.duty.results["skipped"] == 0


def test_a_job_with_unmeasured_waiting_is_recorded(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    node.sources, node.blind = {0: SOURCE_PROBE, 1: SOURCE_PROBE}, {0, 1}
    for _ in range(2):
        for window in node.capture().values():
            assert (window.steps, window.wait_source, window.sources["steps"]) == (2, "capture", SOURCE_CAPTURE)
        for window in node.tick().values():
            assert (window.steps, window.wait_source, window.sources["steps"]) == (20, "", SOURCE_PROBE)
    live = RankWindow(steps=20, sources={"steps": SOURCE_PROBE})
    assert node.duty.shown(node.ranks[0].key, live).wait_seconds.mean == pytest.approx(0.02)


def test_a_probe_with_some_wait_figures_is_not_blind() -> None:
    for blind, sampled_every in ((set(), 10), ({0}, 1)):
        node = Node(ScriptedCaptures())
        node.sources, node.blind, node.sampled_every = {0: SOURCE_PROBE, 1: SOURCE_PROBE}, set(blind), sampled_every
        node.run(3 * PERIOD)
        assert node.captures.started == []


@pytest.mark.parametrize("reason", ["busy", "stalled", "profiler", "slowdown", "unable"])
def test_what_speaks_against_a_capture_is_counted(captures: ScriptedCaptures, reason: str) -> None:
    node = Node(captures)
    captures.busy = reason == "busy"
    node.stalled = reason == "stalled"
    captures.objections = {1: reason} if reason in ("profiler", "slowdown", "unable") else {}
    node.run(2 * PERIOD)
    assert captures.started == []
    assert node.duty.results["skipped"] == node.duty.skips[reason] == 2
    captures.busy, node.stalled, captures.objections = False, False, {}
    node.run_until_started()


def test_ranks_that_have_just_begun_are_given_time(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    node.run_until_started()
    captures.deliver()
    node.run(PERIOD - (YOUNG_WINDOWS - 1) * WINDOW)
    node.ranks[1] = make.rank(1, pid=9999)  # restarted shortly before the next one
    node.run(YOUNG_WINDOWS * WINDOW)
    assert len(captures.started) == 1 and node.duty.skips["young"] == 1


def test_a_refused_start_is_a_skipped_one(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    captures.refusal = "8 captures are under way"
    node.run(PERIOD)
    assert node.duty.skips["busy"] == 1


def test_expensive_captures_are_rarer_and_nodes_agree_when() -> None:
    """300,000 events a second, recorded for 0.55 s: 0.9 s, of 0.5 s that a period may cost."""
    settings = DutySettings(steps=2, period_seconds=PERIOD, budget_ratio=0.5 / PERIOD)
    starts = []
    for begun in (1e9, 1e9 + PERIOD):
        node = Node(ScriptedCaptures(), settings, begun=begun)
        for _ in range(3):
            node.capture(events=60_000)
        millis = [request.start_unix_millis for request, _ in node.captures.started]
        assert millis[2] - millis[1] == 2 * PERIOD * 1000
        assert node.duty.skips["budget"] >= 1
        starts.append(set(millis[1:]))
    assert starts[0] & starts[1]


def test_the_step_time_is_relearned_when_steps_do_not_fit(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    node.capture()
    node.capture(steps=0)
    node.capture(steps=0)
    node.capture()
    told = [step_seconds for _, step_seconds in captures.started]
    assert told[:3] == [None, pytest.approx(0.1), None]
    assert told[3] == pytest.approx(0.2)  # twice what held no whole step
    assert node.duty.results == {"done": 2, "failed": 2, "skipped": 0}


def test_one_failed_rank_fails_the_capture_not_other_ranks(captures: ScriptedCaptures) -> None:
    node = Node(captures)
    node.run_until_started()
    captures.deliver(ranks=(1,))
    captures.made["c-1"].ranks.add(rank=0, state=pb.CAPTURE_STATE_FAILED, error="rank 0: gone")
    node.tick()
    windows = node.tick()
    assert windows[1].HasField("steps") and not windows[0].HasField("steps")
    assert node.duty.results["failed"] == 1


def test_a_jobs_newest_record_is_kept_within_a_total_limit(captures: ScriptedCaptures) -> None:
    old = {f"c-old-{n}": pb.Capture(id=f"c-old-{n}", job=f"job {n}") for n in range(MAX_RECORDS + 5)}
    captures.made.update(old)
    node = Node(captures)
    for _ in range(3):
        node.capture()
    assert len(captures.made) == MAX_RECORDS
    assert list(captures.made)[-1] == "c-3" and "c-2" not in captures.made
