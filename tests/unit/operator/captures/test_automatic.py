from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from threading import Event
from typing import Any

import pytest

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.alerts.alert import RefusedError, Wanted
from rankscope.operator.alerts.decision import FailedError
from rankscope.operator.captures import automatic
from rankscope.operator.captures.alert_captures import AlertCaptures
from rankscope.operator.captures.automatic import AutomaticCaptureMaker
from rankscope.operator.captures.controller import PlanError, plan
from rankscope.operator.correlation.correlator import JobState, ranks_to_capture
from rankscope.operator.kube.api_client import ApiError, ConflictError, UnreachableError
from rankscope.operator.kube.objects import CaptureObject, PolicyObject, read_capture_object, timestamp
from rankscope.operator.kube.resources import CaptureSpec
from rankscope.v1.window_pb2 import RankWindow, StepStatistics
from tests.unit.operator.correlation.test_metrics import HEALTHY, SLOW, state
from tests.unit.operator.policies.policy_objects import AUTOMATIC, NOW, capture, policy, run_object

NAME = "team/run-llama"
POLICY = policy(automaticCaptures=AUTOMATIC)


@dataclass
class Cluster:
    """An API server, its watch and an operator's view of the run; the watch is as old as the test wants."""

    stored: dict[str, dict[str, Any]] = field(default_factory=dict)
    objects: dict[str, CaptureObject] = field(default_factory=dict)
    runs: dict[str, Any] = field(default_factory=lambda: {NAME: run_object()})
    trouble: Exception | None = None
    asked: int = 0
    events: list[str] = field(default_factory=list)
    held: bool = True

    def __post_init__(self) -> None:
        self.listed = Event()
        self.listed.set()
        self.watched = self

    def create(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        self.asked += 1
        if self.trouble is not None:
            raise self.trouble
        name = body["metadata"]["name"]
        if name in self.stored:
            raise ConflictError(409, "AlreadyExists", name)
        metadata = {**body["metadata"], "uid": f"uid-{name}", "creationTimestamp": timestamp(self.now)}
        self.stored[name] = {**body, "metadata": metadata}
        return self.stored[name]

    now = NOW

    def object_of(self, namespace: str, name: str) -> Any:
        return self.runs.get(f"{namespace}/{name}")

    def holds(self, key: str) -> bool:
        return self.held

    def emit(self, target: object, kind: str, reason: str, message: str, change: str) -> None:
        self.events.append(message)

    def see(self, phase: str = "Succeeded") -> None:
        """The watch catches up."""
        for document in self.stored.values():
            thing = read_capture_object({**document, "status": {"phase": phase}})
            assert thing is not None
            self.objects[thing.uid] = thing


class AtOnce:
    def __init__(self, *_: object, **__: object) -> None: ...

    def submit(self, call: Any, *arguments: Any) -> Future[None]:
        call(*arguments)
        return Future()


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    monkeypatch.setattr(automatic, "ThreadPoolExecutor", AtOnce)
    return Cluster()


class Operator:
    def __init__(self, cluster: Cluster, verdict: Verdict = SLOW) -> None:
        self.cluster = cluster
        self.verdict(verdict)
        self.others: dict[str, JobState] = {}
        fake: Any = cluster
        self.captures = AutomaticCaptureMaker(
            fake, fake, fake, fake, fake, lambda: {NAME: self.state, **self.others}, lambda: self.cluster.now
        )

    def verdict(self, verdict: Verdict, since_seconds: float = 0.0) -> None:
        made: JobState = state(verdict, NAME)
        self.state = replace(made, since_unix_seconds=self.cluster.now - since_seconds)

    def pulse(self, policy: PolicyObject = POLICY, times: int = 3) -> int:
        """How many captures there are after it."""
        for _ in range(times):
            self.captures.reconcile({NAME: policy})
        return len(self.cluster.stored)


def test_a_listed_alarm_captures_the_accused_and_a_peer_once(cluster: Cluster) -> None:
    assert Operator(cluster).pulse() == 1
    (made,) = cluster.stored.values()
    metadata, spec = made["metadata"], made["spec"]
    assert metadata["ownerReferences"][0] == {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "TrainingRun",
        "name": "run-llama",
        "uid": "uid-run",
    }
    assert metadata["annotations"] == {
        "rankscope.dev/trigger": "policy",
        "rankscope.dev/policy": "p",
        "rankscope.dev/finding": "slow_rank 1",
    }
    ranks = spec["ranks"].split(",")
    assert "1" in ranks and len(ranks) == 2
    assert spec["reason"] == "policy p: rank 1 is slow"
    assert "steps" not in spec and "seconds" not in spec  # chosen when the capture begins
    assert len(cluster.events) == 1


@pytest.mark.parametrize(
    "verdict",
    [
        HEALTHY,
        replace(SLOW, severity=Severity.WARNING),
        replace(SLOW, kind=Kind.SLOW_STAGE),
        Verdict(Kind.HANG, "no rank has advanced", Severity.ALARM, culprits=(1,)),
        Verdict(Kind.INSUFFICIENT_DATA, "few steps"),
    ],
)
def test_nothing_else_makes_one(cluster: Cluster, verdict: Verdict) -> None:
    everything = policy(automaticCaptures={**AUTOMATIC, "on": ["slow_rank", "hang", "insufficient_data", "healthy"]})
    assert Operator(cluster, verdict).pulse(everything) == 0


def test_an_operator_without_the_run_or_its_object_captures_nothing(cluster: Cluster) -> None:
    cluster.held = False
    assert Operator(cluster).pulse() == 0
    cluster.held = True
    cluster.runs.clear()
    assert Operator(cluster).pulse() == 0
    cluster.listed.clear()
    assert Operator(cluster).pulse() == 0


def test_two_operators_unaware_of_each_other_make_one_capture(cluster: Cluster) -> None:
    one, other = Operator(cluster), Operator(cluster, replace(SLOW, culprits=(1, 2)))
    one.pulse(times=1)
    assert other.pulse(policy("other", automaticCaptures=AUTOMATIC)) == 1
    assert cluster.asked > 1


def test_a_restarted_operator_respects_cooldown_and_captured_findings(
    cluster: Cluster,
) -> None:
    Operator(cluster).pulse()
    cluster.see()
    cluster.now += 599
    restarted = Operator(cluster, replace(SLOW, culprits=(3,)))
    assert restarted.pulse() == 1  # another finding, but the run rests
    cluster.now += 2
    assert Operator(cluster).pulse() == 1  # the same finding
    assert restarted.pulse() == 2


def test_a_finding_that_returns_after_a_while_counts_as_new(cluster: Cluster) -> None:
    operator = Operator(cluster)
    operator.pulse()
    cluster.see()
    cluster.now += 3600
    operator.verdict(HEALTHY, since_seconds=10)  # as an operator that has just begun sees it
    operator.pulse()
    operator.verdict(SLOW)
    assert operator.pulse() == 1
    cluster.now += 100
    operator.verdict(HEALTHY, since_seconds=61)
    operator.pulse()
    operator.verdict(SLOW)
    assert operator.pulse() == 2


def test_one_that_somebody_deleted_is_not_made_again_at_once(cluster: Cluster) -> None:
    operator = Operator(cluster)
    operator.pulse()
    cluster.see()
    operator.pulse()
    cluster.stored.clear()
    cluster.objects.clear()
    cluster.now += 100
    assert operator.pulse() == 0


def test_objects_that_count_for_limits_outlive_a_short_ttl(cluster: Cluster) -> None:
    Operator(cluster).pulse(policy(automaticCaptures={**AUTOMATIC, "ttlSecondsAfterFinished": 0}))
    (made,) = cluster.stored.values()
    assert made["spec"]["ttlSecondsAfterFinished"] == 86400


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ([capture(f"c{n}", 3600.0 * n, run=f"r{n}", trigger="policy", policy="p") for n in (1, 2)], 1),
        ([capture(f"c{n}", 3600.0 * n, run=f"r{n}", trigger="policy", policy="p") for n in (1, 2, 3)], 0),
        ([capture(f"c{n}", 3600.0 * n, run=f"r{n}", trigger="policy", policy="p") for n in (1, 2, 25)], 1),
        ([capture(f"c{n}", 3600.0 * n, run=f"r{n}", trigger="policy", policy="q") for n in (1, 2, 3)], 1),
        ([capture(f"c{n}", 60, run=f"r{n}", phase="Running", trigger="policy", policy="p") for n in (1,)], 1),
        ([capture(f"c{n}", 60, run=f"r{n}", phase="Running", trigger="policy", policy="p") for n in (1, 2)], 0),
        ([capture("mine", 30, phase="Running")], 0),  # a person's, of this run, under way
        ([capture("mine", 30)], 1),  # a person's, over: it does not count
        ([capture("alert", 30, trigger="alert")], 0),  # it rests after an alert's as well
    ],
)
def test_daily_budget_and_running_captures_are_counted_from_objects(
    cluster: Cluster, known: list[CaptureObject], expected: int
) -> None:
    cluster.objects = {thing.uid: thing for thing in known}
    assert Operator(cluster).pulse() == expected


def test_captures_of_a_round_count_for_the_policys_next_run(cluster: Cluster) -> None:
    once = policy(automaticCaptures={**AUTOMATIC, "concurrent": 1})
    cluster.runs["team/run-b"] = run_object("run-b", "uid-b")
    operator = Operator(cluster)
    fake: Any = cluster
    states = {NAME: operator.state, "team/run-b": replace(operator.state, job="team/run-b")}
    captures = AutomaticCaptureMaker(fake, fake, fake, fake, fake, lambda: states, lambda: cluster.now)
    for _ in range(3):
        captures.reconcile(dict.fromkeys(states, once))
    assert len(cluster.stored) == 1
    cluster.see()
    captures.reconcile(dict.fromkeys(states, once))
    assert len(cluster.stored) == 2


def test_an_outage_is_retried_and_a_refusal_not_at_once(cluster: Cluster) -> None:
    operator = Operator(cluster)
    cluster.trouble = UnreachableError("away")
    operator.pulse(times=3)
    assert cluster.asked == 3
    cluster.trouble = ApiError(403, "Forbidden", "no")
    operator.pulse(times=3)
    assert cluster.asked == 4
    assert cluster.events == []


def test_a_few_ranks_represent_all_with_none_or_many_accused() -> None:
    network = Verdict(Kind.SLOW_COMMUNICATION, "all wait", Severity.ALARM)
    assert len(ranks_to_capture(state(network))[1]) == 2
    many = replace(SLOW, culprits=tuple(range(100)))
    *accused, peer = ranks_to_capture(state(many, ranks=200))[1]
    assert accused == list(range(7))
    assert peer >= 100
    assert ranks_to_capture(state(SLOW, ranks=0))[1] == ()


def test_a_finding_in_a_second_job_captures_that_job(cluster: Cluster) -> None:
    operator = Operator(cluster, HEALTHY)
    operator.others[f"{NAME}#2"] = state(SLOW, f"{NAME}#2")
    assert operator.pulse() == 1
    (made,) = cluster.stored.values()
    assert (made["spec"]["run"], made["spec"]["jobNumber"]) == ("run-llama", 2)
    assert made["metadata"]["annotations"]["rankscope.dev/finding"].endswith(" job 2")
    cluster.see()
    cluster.now += 601
    assert operator.pulse() == 1  # it has had its capture, and the first job is well
    operator.verdict(SLOW)
    assert operator.pulse() == 2


# --- by an alert -----------------------------------------------------------------------------------------------------


def wanted(occasion: str = "fingerprint 2026", ranks: tuple[int, ...] = (1, 2), job: str = NAME) -> Wanted:
    return Wanted(job, ranks, frozenset(ranks[:1]), "alert RankscopeStragglerRank", occasion)


def by_alert(cluster: Cluster) -> AlertCaptures:
    fake: Any = cluster
    return AlertCaptures(fake, Operator(cluster).captures, fake, lambda: cluster.now)


def test_a_firing_has_one_capture_even_for_a_forgetful_operator(cluster: Cluster) -> None:
    name = by_alert(cluster).start(wanted())
    assert by_alert(cluster).start(wanted()) == name  # neither has seen the other's
    cluster.see()
    cluster.now += 86400
    assert by_alert(cluster).start(wanted()) == name
    assert list(cluster.stored) == [name]
    made = cluster.stored[name]
    assert made["metadata"]["annotations"]["rankscope.dev/trigger"] == "alert"
    assert made["spec"]["ranks"] == "1,2"
    assert made["metadata"]["ownerReferences"][0]["uid"] == "uid-run"


def test_an_alert_captures_the_second_job_separately_from_the_first(cluster: Cluster) -> None:
    desk = by_alert(cluster)
    first = desk.start(wanted())
    cluster.see()
    second = desk.start(wanted("another firing", job=f"{NAME}#2"))
    assert [cluster.stored[name]["spec"].get("jobNumber") for name in (first, second)] == [None, 2]
    cluster.see()
    assert sorted(thing.job for thing in cluster.objects.values()) == [NAME, f"{NAME}#2"]
    assert {thing.spec.run for thing in cluster.objects.values() if thing.spec} == {"run-llama"}


def test_recently_captured_ranks_are_refused_and_others_are_not(cluster: Cluster) -> None:
    desk = by_alert(cluster)
    desk.start(wanted())
    cluster.see()
    with pytest.raises(RefusedError, match="was made recently"):
        desk.start(wanted("another firing"))
    desk.start(wanted("another firing", (3, 2)))
    cluster.see("Running")
    with pytest.raises(RefusedError, match="under way"):
        desk.start(wanted("a third", (0, 2)))
    assert len(cluster.stored) == 2


def test_temporary_trouble_fails_and_permanent_trouble_is_refused(cluster: Cluster) -> None:
    desk = by_alert(cluster)
    cluster.trouble = UnreachableError("away")
    with pytest.raises(FailedError, match="away"):
        desk.start(wanted())
    cluster.trouble = ApiError(422, "Invalid", "no")
    with pytest.raises(RefusedError, match="422"):
        desk.start(wanted())
    cluster.held = False
    with pytest.raises(FailedError, match="another replica"):
        desk.start(wanted())
    assert desk.is_elsewhere(NAME)
    assert not desk.is_elsewhere("team/unknown")


def test_the_plan_has_the_job_and_accused_ranks_with_nodes() -> None:
    spec = CaptureSpec(run="r", ranks="straggler+peer", steps=3)
    made = plan(spec, "r", state(SLOW), 64)
    assert made.job == state(SLOW).job
    assert len(made.ranks) == 2
    assert (1, "a", "accepted") in [(rank.rank, rank.node, rank.state) for rank in made.ranks]


STEP = StepStatistics(mean=0.1, p10=0.09, p50=0.1, p90=0.14, max=0.2)


def test_the_plan_chooses_the_length_that_the_spec_leaves_open() -> None:
    given = plan(CaptureSpec(run="r", steps=3), "r", state(SLOW), 64)
    assert (given.steps, given.seconds) == (None, None)
    unmeasured = replace(state(SLOW), windows=[RankWindow(identity=w.identity) for w in state(SLOW).windows])
    assert plan(CaptureSpec(run="r", ranks="all"), "r", unmeasured, 64).seconds == 3.0
    timed = [RankWindow(identity=w.identity, step_seconds=STEP, self_seconds=STEP) for w in state(SLOW).windows]
    made = plan(CaptureSpec(run="r"), "r", replace(state(SLOW), windows=timed), 64)
    assert made.steps is not None and made.steps > 8 and made.seconds is None


@pytest.mark.parametrize(
    ("number", "says"), [(1, "no rank of run r reports"), (2, "no rank of job #2 of run r reports")]
)
def test_a_job_that_nobody_reports_for_is_named(number: int, says: str) -> None:
    with pytest.raises(PlanError, match=says) as refused:
        plan(CaptureSpec(run="r", steps=3, job_number=number), "r", None, 64)
    assert refused.value.reason == "NoRanks"
    with pytest.raises(PlanError, match="at most 64"):
        plan(CaptureSpec(run="r", steps=3, ranks="all"), "r", state(SLOW, ranks=65), 64)
