"""The life of a capture, with back ends and an archive that do as the test says."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from rankscope.analysis.traces.joins.comparison import LiveSteps
from rankscope.common.rank_selection import Suspected
from rankscope.daemon.captures import runner as runner_module
from rankscope.daemon.captures.orders import (
    CancelledError,
    CaptureError,
    NoStepsError,
    Order,
    Recording,
    Stage,
    Workspace,
)
from rankscope.daemon.captures.records import Delivered, Recorded
from rankscope.daemon.captures.runner import MAX_PROCESSES, CaptureRunner, LearnedSteps
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.job_service_pb2 import Verdict
from tests.support.waiting import wait_until

PATIENCE_SECONDS = 180


def rank(number: int, job: str = "job", world_size: int = 4) -> RankProcess:
    return RankProcess(job, number, number, world_size, 100 + number, 1, (100 + number,))


@dataclass
class ScriptedBackend:
    name: str = "scripted"
    unsuited: frozenset[int] = frozenset()
    failing: dict[int, Exception] = field(default_factory=dict)
    gate: threading.Event | None = None  # records only when this is set
    orders: list[Order] = field(default_factory=list)
    keeps_schedules: bool = False
    needs_steps: bool = True
    blocked: dict[int, threading.Event] = field(default_factory=dict)  # ranks that answer nobody until then

    def objection(self, process: RankProcess) -> str | None:
        return "not this one" if process.rank in self.unsuited else None

    def record(
        self, order: Order, workspace: Workspace, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        self.orders.append(order)
        if order.rank.rank in self.blocked:
            self.blocked[order.rank.rank].wait(PATIENCE_SECONDS)
        report(Stage.ARMED)
        report(Stage.RUNNING)
        while self.gate is not None and not self.gate.wait(0.01):
            if cancelled.is_set():
                raise CancelledError("cancelled")
        if order.rank.rank in self.failing:
            raise self.failing[order.rank.rank]
        return Recording(workspace.folder / f"rank{order.rank.rank}", True, order.start_unix_millis + order.rank.rank)


@dataclass
class MemoryArchive:
    root: Path
    whole_steps: list[int] = field(default_factory=lambda: [9])  # of each delivery
    step_seconds: float = 0.1
    refused: dict[int, str] = field(default_factory=dict)
    empty: set[int] = field(default_factory=set)  # at first
    saved: list[pb.Capture] = field(default_factory=list)
    cleaned: list[str] = field(default_factory=list)
    known: Sequence[pb.Capture] = ()
    tenants: dict[str, str] = field(default_factory=dict)
    slow: bool = False  # works until it is cancelled
    delivering: threading.Event = field(default_factory=threading.Event)

    def assign(self, capture_id: str, tenant: str) -> None:
        self.tenants[capture_id] = tenant

    def tenant(self, capture_id: str) -> str:
        return self.tenants.get(capture_id, "")

    def workspace(self, capture_id: str) -> Workspace:
        return Workspace(self.root)

    def deliver(
        self,
        capture: pb.Capture,
        recorded: Recorded,
        steps: int | None,
        step_seconds: Mapping[int, float | None],
        cancelled: threading.Event,
    ) -> Iterator[tuple[int, Delivered | CaptureError]]:
        if self.slow:
            self.delivering.set()
            assert cancelled.wait(PATIENCE_SECONDS)
            yield from ((number, CancelledError("cancelled")) for number in recorded)
            return
        whole = self.whole_steps.pop(0) if len(self.whole_steps) > 1 else self.whole_steps[0]
        for number in recorded:
            if number in self.empty:
                self.empty.remove(number)
                yield number, NoStepsError("the trace is empty")
            elif number in self.refused:
                yield number, CaptureError(self.refused[number])
            else:
                yield (
                    number,
                    Delivered(
                        f"rank{number}",
                        7,
                        steps=min(whole, steps or 0),
                        step_seconds=self.step_seconds,
                        whole_steps=whole,
                    ),
                )

    def join(self, capture: pb.Capture) -> pb.JoinSummary | None:
        return pb.JoinSummary(verdict="healthy") if len(capture.ranks) > 1 else None

    def clean(self, capture_id: str) -> None:
        self.cleaned.append(capture_id)

    def save(self, capture: pb.Capture) -> None:
        copy = pb.Capture()
        copy.CopyFrom(capture)
        self.saved.append(copy)

    def load(self) -> Sequence[pb.Capture]:
        return self.known


@pytest.fixture
def archive(tmp_path: Path) -> MemoryArchive:
    return MemoryArchive(tmp_path)


def runner(backend: ScriptedBackend, archive: MemoryArchive, ranks: int = 4) -> CaptureRunner:
    return CaptureRunner("node-1", [backend], archive, lambda: [rank(number) for number in range(ranks)])


def ended(runner: CaptureRunner, capture_id: str) -> pb.Capture:
    *_, last = runner.records.follow(capture_id)
    return last


def test_ranks_pass_through_states_and_the_skew_is_reported(archive: MemoryArchive) -> None:
    conducted = runner(ScriptedBackend(), archive)
    seen = list(conducted.records.follow(conducted.start(pb.StartCaptureRequest(steps=3))))
    assert seen[-1].state == pb.CAPTURE_STATE_ANALYSED
    assert [entry.state for entry in seen[-1].ranks] == [pb.CAPTURE_STATE_ANALYSED] * 4
    assert [(entry.rank, entry.backend, entry.pid, entry.steps) for entry in seen[-1].ranks][1] == (
        1,
        "scripted",
        101,
        3,
    )
    assert seen[-1].start_skew_millis == 3
    assert seen[-1].join.verdict == "healthy"
    states = [capture.state for capture in seen]
    assert states == sorted(states)


def test_all_ranks_get_the_same_start(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    conducted = CaptureRunner(
        "n",
        [backend],
        archive,
        lambda: [rank(0), rank(1)],
        earliest_start=lambda ranks, now: now + len(ranks),
        unix_seconds=lambda: 1000.0,
    )
    ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1)))
    assert {order.start_unix_millis for order in backend.orders} == {1_002_000}


def test_one_ranks_failure_is_told_and_the_others_deliver(archive: MemoryArchive) -> None:
    backend = ScriptedBackend(failing={1: CaptureError("the process ended"), 2: RuntimeError("bug")})
    archive.refused[3] = "not a trace of that process"
    conducted = runner(backend, archive)
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(seconds=1)))
    assert capture.state == pb.CAPTURE_STATE_ANALYSED
    errors = [entry.error for entry in capture.ranks]
    assert errors[:2] == ["", "the process ended"]
    assert "bug" in errors[2] and "report this" in errors[2]
    assert errors[3] == "not a trace of that process"


def test_remote_ranks_and_unsuited_ranks_fail_with_a_reason(archive: MemoryArchive) -> None:
    conducted = runner(ScriptedBackend(unsuited=frozenset({1})), archive, ranks=2)
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(ranks="0-2", steps=1)))
    assert capture.ranks[0].state == pb.CAPTURE_STATE_ANALYSED
    assert capture.ranks[1].error == "rank 1 (pid 101) cannot be captured: scripted: not this one"
    assert "rank 2 does not run on node-1" in capture.ranks[2].error


def test_only_processes_of_the_named_pods_are_captured(archive: MemoryArchive) -> None:
    """Two tenants have jobs of one name on the node, and a rank may have moved to another pod since it was chosen."""
    pods = ("mine", "theirs", None)
    here = [replace(rank(number), pod=pod) for number, pod in enumerate(pods)]
    backend = ScriptedBackend()
    conducted = CaptureRunner("node-1", [backend], archive, lambda: here)
    request = pb.StartCaptureRequest(job="job", ranks="0-2", steps=1, pods={0: "mine", 1: "mine"})
    capture = ended(conducted, conducted.start(request))
    assert [order.rank.rank for order in backend.orders] == [0]
    assert [entry.state for entry in capture.ranks] == [pb.CAPTURE_STATE_ANALYSED] + [pb.CAPTURE_STATE_FAILED] * 2
    for wanted in ({0: "gone"}, {3: "mine"}):
        with pytest.raises(CaptureError, match="named pods"):
            conducted.start(pb.StartCaptureRequest(job="job", ranks="0", steps=1, pods=wanted))
    assert len(backend.orders) == 1


def test_ranks_of_an_unnamed_run_are_found_by_pod(archive: MemoryArchive) -> None:
    unnamed = replace(rank(0, job="10.0.0.1:29500"), pod="mine")
    here = [replace(rank(0, job="theirs/job"), pid=200, pod="theirs"), unnamed]
    backend = ScriptedBackend()
    conducted = CaptureRunner("node-1", [backend], archive, lambda: here)
    request = pb.StartCaptureRequest(job="mine/job", ranks="0", steps=1, pods={0: "mine"})
    assert ended(conducted, conducted.start(request)).job == unnamed.job
    assert backend.orders.pop().rank is unnamed
    here[1] = replace(unnamed, job="mine/job")
    assert ended(conducted, conducted.start(request)).job == "mine/job"
    with pytest.raises(CaptureError, match="named pods"):
        conducted.start(pb.StartCaptureRequest(job="mine/job", ranks="0", steps=1, pods={0: "theirs"}))


def test_a_renamed_run_is_not_captured_twice_at_once(archive: MemoryArchive) -> None:
    here = [replace(rank(0, job="10.0.0.1:29500"), pod="mine")]
    backend = ScriptedBackend(gate=threading.Event())
    conducted = CaptureRunner("node-1", [backend], archive, lambda: here)
    first = conducted.start(pb.StartCaptureRequest(ranks="0", steps=1))
    here[0] = replace(here[0], job="mine/job")
    second = ended(conducted, conducted.start(pb.StartCaptureRequest(ranks="0", steps=1)))
    assert f"is being captured already, by {first}" in second.ranks[0].error
    conducted.cancel(first)
    ended(conducted, first)


def test_a_capture_without_capturable_ranks_ends_with_reasons(
    archive: MemoryArchive, caplog: pytest.LogCaptureFixture
) -> None:
    conducted = runner(ScriptedBackend(unsuited=frozenset({0, 1})), archive, ranks=2)
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1)))
    assert capture.state == pb.CAPTURE_STATE_FAILED
    assert all("cannot be captured" in entry.error for entry in capture.ranks)
    assert not [record for record in caplog.records if record.exc_info]


def test_a_schedule_goes_to_a_backend_that_keeps_it(archive: MemoryArchive) -> None:
    best, able = ScriptedBackend("best"), ScriptedBackend("able", unsuited=frozenset({1}), keeps_schedules=True)
    conducted = CaptureRunner("n", [best, able], archive, lambda: [rank(0), rank(1)])
    scheduled = pb.StartCaptureRequest(steps=1, options=pb.CaptureOptions(repeat=2))
    capture = ended(conducted, conducted.start(scheduled))
    assert [entry.backend for entry in capture.ranks] == ["able", "best"]
    assert list(capture.ranks[0].notes) == ["not by best: it knows no --wait, --warmup and --repeat"]
    assert "recorded once, from the start on: by best, and it knows no --wait" in capture.ranks[1].notes[1]
    plain = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1)))
    assert [(entry.backend, list(entry.notes)) for entry in plain.ranks] == [("best", [])] * 2


def test_stacks_are_recorded_of_ranks_that_make_no_steps(archive: MemoryArchive) -> None:
    best, stacks = ScriptedBackend("best"), ScriptedBackend("stacks", needs_steps=False)
    still = {0: 34.0, 1: 90.0}
    conducted = CaptureRunner(
        "n", [best, stacks], archive, lambda: [rank(0), rank(1), rank(2)], stalled_seconds=lambda r: still.get(r.rank)
    )
    timed = ended(conducted, conducted.start(pb.StartCaptureRequest(seconds=2)))
    assert [entry.backend for entry in timed.ranks] == ["stacks", "stacks", "best"]
    assert list(timed.ranks[0].notes) == ["not by best: no step has ended for 34 s"]
    counted = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=3)))
    assert [entry.backend for entry in counted.ranks] == ["best", "stacks", "best"], "steps are awaited for a while"


def test_a_recording_without_steps_is_followed_by_stacks(archive: MemoryArchive) -> None:
    best = ScriptedBackend("best", failing={0: NoStepsError("no step has ended")})
    stacks = ScriptedBackend("stacks", needs_steps=False)
    archive.empty = {1}
    conducted = CaptureRunner("n", [best, stacks], archive, lambda: [rank(0), rank(1), rank(2)])
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(seconds=2)))
    assert [(entry.backend, list(entry.notes)) for entry in capture.ranks] == [
        ("stacks", ["not by best: no step has ended"]),
        ("stacks", ["not by best: the trace is empty"]),
        ("best", []),
    ]
    assert [entry.state for entry in capture.ranks] == [pb.CAPTURE_STATE_ANALYSED] * 3
    assert [order.rank.rank for order in stacks.orders] == [0, 1]


def test_without_stacks_a_rank_without_steps_delivers_nothing(archive: MemoryArchive) -> None:
    archive.empty = {0}
    stacks = ScriptedBackend("stacks", unsuited=frozenset({0}), needs_steps=False)
    conducted = CaptureRunner("n", [ScriptedBackend("best"), stacks], archive, lambda: [rank(0)])
    (entry,) = ended(conducted, conducted.start(pb.StartCaptureRequest(seconds=2))).ranks
    assert (entry.state, entry.error) == (pb.CAPTURE_STATE_FAILED, "the trace is empty; stacks: not this one")


def test_a_rank_is_captured_once_at_a_time(archive: MemoryArchive) -> None:
    gate = threading.Event()
    conducted = runner(ScriptedBackend(gate=gate), archive, ranks=2)
    first = conducted.start(pb.StartCaptureRequest(ranks="0", steps=1))
    second = ended(conducted, conducted.start(pb.StartCaptureRequest(ranks="0", steps=1)))
    assert second.state == pb.CAPTURE_STATE_FAILED
    assert f"already, by {first}" in second.ranks[0].error
    gate.set()
    assert ended(conducted, first).state == pb.CAPTURE_STATE_ANALYSED
    assert (
        ended(conducted, conducted.start(pb.StartCaptureRequest(ranks="0", steps=1))).state == pb.CAPTURE_STATE_ANALYSED
    )


def test_a_cancelled_capture_stops_and_says_so(archive: MemoryArchive) -> None:
    conducted = runner(ScriptedBackend(gate=threading.Event()), archive)
    capture_id = conducted.start(pb.StartCaptureRequest(steps=1))
    assert conducted.cancel(capture_id) is not None
    assert ended(conducted, capture_id).state == pb.CAPTURE_STATE_CANCELLED
    assert conducted.cancel("c-unknown") is None


def test_a_capture_can_be_cancelled_while_traces_are_processed(archive: MemoryArchive) -> None:
    archive.slow = True
    conducted = runner(ScriptedBackend(), archive)
    capture_id = conducted.start(pb.StartCaptureRequest(steps=1))
    assert archive.delivering.wait(PATIENCE_SECONDS)
    conducted.cancel(capture_id)
    capture = ended(conducted, capture_id)
    assert {capture.state, *(entry.state for entry in capture.ranks)} == {pb.CAPTURE_STATE_CANCELLED}


def test_too_few_steps_are_rerecorded_with_the_learned_time(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    archive.whole_steps = [2, 9]
    conducted = runner(backend, archive, ranks=2)
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5)))
    assert [order.step_seconds for order in backend.orders] == [None, None, 0.1, 0.1]
    assert [entry.steps for entry in capture.ranks] == [5, 5]


def test_a_second_attempt_is_not_followed_by_a_third(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    archive.whole_steps = [2]
    conducted = runner(backend, archive, ranks=1)
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5)))
    assert len(backend.orders) == 2
    assert capture.ranks[0].steps == 2


def test_a_step_time_that_is_seen_is_not_tried_twice(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    archive.whole_steps = [2]
    seen = CaptureRunner("n", [backend], archive, lambda: [rank(0)], step_seconds=lambda *_, **__: 0.02)
    ended(seen, seen.start(pb.StartCaptureRequest(steps=5)))
    assert [order.step_seconds for order in backend.orders] == [0.02]


def test_a_capture_reuses_the_step_time_of_earlier_ones(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    processes = [rank(0), rank(1)]
    conducted = CaptureRunner("n", [backend], archive, lambda: processes)
    ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5, ranks="0")))
    ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5)))
    # Rank 1 was not captured before: it trains with rank 0.
    assert [order.step_seconds for order in backend.orders] == [None, 0.1, 0.1]
    processes[:] = [replace(one, start_ticks=2) for one in processes]
    ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5, ranks="0")))
    assert backend.orders[-1].step_seconds is None


def test_ranks_are_free_when_the_captures_end_is_seen(archive: MemoryArchive) -> None:
    conducted = CaptureRunner("n", [ScriptedBackend()], archive, lambda: [rank(0)])
    busy = []
    change = conducted.records.change

    def observed(capture_id: str, edit: Callable[[pb.Capture], None]) -> None:
        busy.append(conducted.is_busy("job"))
        change(capture_id, edit)

    conducted.records.change = observed  # type: ignore[method-assign]
    ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5)))
    assert busy[-1] is False


def test_steps_longer_than_learned_are_recorded_again(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    conducted = runner(backend, archive, ranks=1)
    ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5)))
    archive.whole_steps, archive.step_seconds = [2, 9], 0.4
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=5)))
    assert [order.step_seconds for order in backend.orders] == [None, 0.1, 0.4]
    assert capture.ranks[0].steps == 5


def test_only_so_many_step_times_are_kept() -> None:
    learned = LearnedSteps()
    for number in range(MAX_PROCESSES + 1):
        learned.learn(rank(number), 0.1 + number)
    assert learned.longest([rank(0)]) is None
    assert learned.longest([rank(0), rank(1), rank(2)]) == 2.1


def test_the_straggler_is_who_the_correlation_says(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    conducted = runner(backend, archive)
    conducted.suspects_of = lambda job: Suspected((2,), (1,))
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(ranks="straggler+peer", steps=1)))
    assert [entry.rank for entry in capture.ranks] == [1, 2]


def test_the_length_and_the_verdict_come_from_the_correlation(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    live = {1: LiveSteps(0.1, 0.04, 0.03, 0.07), 2: LiveSteps(0.1, 0.09, 0.08, 0.12)}
    conducted = CaptureRunner(
        "node-1",
        [backend],
        archive,
        lambda: [rank(number) for number in range(4)],
        live_steps=lambda process: live[process.rank],
    )
    conducted.suspects_of = lambda job: Suspected((2,), (1,))
    conducted.verdict_of = lambda job: Verdict(culprits=[2], reason="slow\n")
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(ranks="straggler+peer")))
    assert (list(capture.verdict.culprits), capture.verdict.reason) == ([2], "slow")
    assert {order.steps for order in backend.orders} == {9}
    # An operator correlates the ranks of all nodes: its verdict counts.
    asked = pb.StartCaptureRequest(ranks="1,2", steps=3, verdict=Verdict(culprits=[1]))
    assert list(ended(conducted, conducted.start(asked)).verdict.culprits) == [1]


def test_ranks_without_steps_are_recorded_by_time(archive: MemoryArchive) -> None:
    backend = ScriptedBackend()
    ended(conducted := runner(backend, archive), conducted.start(pb.StartCaptureRequest()))
    assert {(order.steps, order.seconds) for order in backend.orders} == {(None, 3.0)}


def test_what_cannot_be_begun_leaves_no_rank_taken(archive: MemoryArchive) -> None:
    conducted = runner(ScriptedBackend(), archive)
    with pytest.raises(CaptureError, match="clocks"):
        conducted.start(pb.StartCaptureRequest(steps=1, start_unix_millis=5))
    assert ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1))).state == pb.CAPTURE_STATE_ANALYSED
    assert len(conducted.records.all()) == 1


def test_a_capture_ends_without_a_rank_that_never_answers(
    archive: MemoryArchive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner_module, "STUCK_SECONDS", 0.1)
    monkeypatch.setattr(runner_module, "AWAIT_SECONDS", 0.05)
    answers = threading.Event()
    backend = ScriptedBackend(blocked={1: answers})
    conducted = runner(backend, archive, ranks=2)
    capture_id = conducted.start(pb.StartCaptureRequest(steps=1))
    # What is not recorded by the time of the cancellation counts as stuck soon after it.
    for seen in conducted.records.follow(capture_id):
        if seen.ranks[0].state == pb.CAPTURE_STATE_WRITTEN:
            break
    conducted.cancel(capture_id)
    capture = ended(conducted, capture_id)
    assert "does not answer; it is left alone until it does" in capture.ranks[1].error
    # It is not asked again before, and nothing that it does later changes the record.
    again = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1)))
    assert [rank.state for rank in again.ranks] == [pb.CAPTURE_STATE_ANALYSED, pb.CAPTURE_STATE_FAILED]
    assert f"is being captured already, by {capture_id}" in again.ranks[1].error
    answers.set()
    wait_until(lambda: not conducted.is_busy("job"))
    assert conducted.records.get(capture_id) == capture
    assert ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1))).ranks[1].error == ""


def test_a_slow_check_of_a_process_blocks_no_other_caller(archive: MemoryArchive) -> None:
    backend, asked = ScriptedBackend(), threading.Event()
    answers = threading.Event()

    def objection(process: RankProcess) -> None:
        asked.set()
        answers.wait(PATIENCE_SECONDS)

    backend.objection = objection  # type: ignore[assignment]
    conducted = runner(backend, archive, ranks=1)
    starting = threading.Thread(target=lambda: conducted.start(pb.StartCaptureRequest(steps=1)))
    starting.start()
    assert asked.wait(PATIENCE_SECONDS)
    assert not conducted.is_busy("job")  # as the daemon's loop asks
    answers.set()
    starting.join()


def test_every_change_of_state_is_saved(archive: MemoryArchive) -> None:
    conducted = runner(ScriptedBackend(), archive, ranks=1)
    capture = ended(conducted, conducted.start(pb.StartCaptureRequest(steps=1, reason="why\nnot")))
    states = {saved.ranks[0].state for saved in archive.saved}
    assert states >= {pb.CAPTURE_STATE_ARMED, pb.CAPTURE_STATE_WRITTEN, pb.CAPTURE_STATE_ANALYSED}
    assert archive.saved[-1].state == pb.CAPTURE_STATE_ANALYSED
    assert capture.reason == "why not"


def test_captures_of_before_are_known_after_a_restart(archive: MemoryArchive) -> None:
    archive.known = [pb.Capture(id="c-1", job="old", state=pb.CAPTURE_STATE_FAILED)]
    conducted = runner(ScriptedBackend(), archive)
    assert [capture.id for capture in conducted.records.all()] == ["c-1"]
    assert conducted.records.all("other") == []


def test_asking_twice_under_the_same_id_is_one_capture(archive: MemoryArchive) -> None:
    conducted = runner(ScriptedBackend(), archive)
    request = pb.StartCaptureRequest(steps=1, id="k-1")
    assert conducted.start(request) == "k-1"
    assert conducted.start(request) == "k-1"
    assert [ended(conducted, "k-1").state] == [pb.CAPTURE_STATE_ANALYSED]
    assert conducted.start(request) == "k-1"  # also when it is over
    assert len(conducted.records.all()) == 1


@pytest.mark.parametrize("name", ["../up", "a/b", "UPPER", "-x", "x" * 64, "a\n"])
def test_an_id_that_is_no_folder_name_is_refused(archive: MemoryArchive, name: str) -> None:
    with pytest.raises(CaptureError, match="letters, digits and dashes"):
        runner(ScriptedBackend(), archive).start(pb.StartCaptureRequest(steps=1, id=name))
