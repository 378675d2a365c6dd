"""ProfileService for users, with daemons that answer as a test wants over real gRPC."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from rankscope.analysis.profiles.pprof import pprof, read_pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack
from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.access import profile_relay
from rankscope.operator.runs.inventory import RunNodes
from rankscope.v1 import profile_service_pb2 as pb
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub
from tests.kube.scripted_daemon import PROFILE_SAMPLES, TRAIN, ScriptedDaemon, Spoken, sampled
from tests.support.audit_records import Audited
from tests.support.waiting import wait_until
from tests.unit.daemon.profiles.served_profiles import STEP, served_profiles
from tests.unit.daemon.profiles.served_profiles import record as store
from tests.unit.operator.access.fake_cluster import RUN, Cluster, refusal

Code = grpc.StatusCode
PODS = {"node-a": frozenset({"uid-a"}), "node-b": frozenset({"uid-b"})}
OWNERS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}


def selected(**selection: Any) -> pb.ProfileSelection:
    return pb.ProfileSelection(**{"job": RUN, "start_unix_nanos": 1000, "end_unix_nanos": 9000, **selection})


class Fleet:
    """Two nodes with two ranks each of RUN, and one rank of another run."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.a, self.b = (ScriptedDaemon(cast(Any, None), node) for node in PODS)
        self.a.ranks = [Spoken("uid-a", 0, 4), Spoken("uid-a", 1, 4), Spoken("uid-of-another-run", 7, 8)]
        self.b.ranks = [Spoken("uid-b", 2, 4), Spoken("uid-b", 3, 4)]
        self.a.stored = {RUN: [0, 1], f"{RUN}#2": [0, 1], "other/pytorchjob-llama": [7], "other/secret-run": [7]}
        self.b.stored = {RUN: [2, 3], f"{RUN}#2": [2, 3]}
        for daemon in (self.a, self.b):
            daemon.serve()
            self.cluster.addresses[daemon.node] = f"127.0.0.1:{daemon.port}"
        self.cluster.nodes[RUN] = RunNodes(PODS, OWNERS)
        self.token = self.cluster.may("ada", "get/artifacts", "create")

    def stub(self, token: str | None = None) -> Any:
        return ProfileServiceStub(self.cluster.channel(self.token if token is None else token))

    def query(self, **selection: Any) -> tuple[Profile, list[str]]:
        request = pb.QueryProfileRequest(selection=selected(**selection))
        parts = list(self.stub().QueryProfile(request, timeout=60))
        assert not any(part.problems for part in parts[:-1])
        return read_pprof(b"".join(part.pprof for part in parts)), list(parts[-1].problems)

    def samples(self, **selection: Any) -> tuple[dict[int, int], list[str]]:
        """By rank."""
        profile, problems = self.query(**selection)
        found: dict[int, int] = {}
        for one in profile:
            found[one.rank] = found.get(one.rank, 0) + one.samples
        return found, problems

    def compare(self, reference: dict[str, Any] | None = None, **selection: Any) -> pb.CompareProfilesResponse:
        request = pb.CompareProfilesRequest(selection=selected(**selection))
        if reference is not None:
            request.reference.CopyFrom(pb.ProfileSelection(**reference))
        answer: pb.CompareProfilesResponse = self.stub().CompareProfiles(request, timeout=60)
        return answer

    def dump(self, **request: Any) -> pb.DumpStacksResponse:
        answer: pb.DumpStacksResponse = self.stub().DumpStacks(
            pb.DumpStacksRequest(**{"job": RUN, **request}), timeout=60
        )
        return answer

    def stop(self) -> None:
        self.cluster.server.stop()
        for daemon in (self.a, self.b):
            daemon.silence()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.stop()


def test_the_profile_of_a_run_is_joined_over_its_nodes(fleet: Fleet) -> None:
    profile, problems = fleet.query(threads=["MainThread"])
    assert {(one.rank, one.samples, one.stack) for one in profile} == {
        (rank, PROFILE_SAMPLES, (TRAIN,)) for rank in range(4)
    }
    assert problems == []
    (asked_a,) = fleet.a.selections
    assert (asked_a.job, list(asked_a.threads)) == (RUN, ["MainThread"])
    assert (asked_a.start_unix_nanos, asked_a.end_unix_nanos) == (1000, 9000)


def test_only_the_nodes_of_the_selected_ranks_are_asked(fleet: Fleet) -> None:
    assert fleet.samples(ranks=[2, 2]) == ({2: PROFILE_SAMPLES}, [])
    assert (len(fleet.a.selections), len(fleet.b.selections)) == (0, 1)
    # A rank that nobody reports may have been anywhere.
    assert fleet.samples(ranks=[2, 99])[0] == {2: PROFILE_SAMPLES}
    assert (len(fleet.a.selections), len(fleet.b.selections)) == (1, 2)


def test_a_further_job_of_a_run_has_its_own_name(fleet: Fleet) -> None:
    fleet.cluster.nodes[f"{RUN}#2"] = RunNodes(PODS, {})
    assert fleet.samples(job=f"{RUN}#2")[0].keys() == set(OWNERS)
    assert fleet.a.selections[0].job == f"{RUN}#2"


def test_one_end_of_the_time_is_set_for_all_nodes(fleet: Fleet) -> None:
    fleet.query(start_unix_nanos=time.time_ns() - 10**12, end_unix_nanos=0)
    (one,), (other,) = fleet.a.selections, fleet.b.selections
    assert one.end_unix_nanos == other.end_unix_nanos > 10**18


def content(*ranks: int, **shares: float) -> bytes:
    return pprof(Profile.of(one for rank in ranks for one in sampled(rank, **shares)))


def answering(*contents: bytes) -> Any:
    return lambda request, context: iter([pb.QueryProfileResponse(pprof=part) for part in contents])


def too_many_stacks() -> bytes:
    stack = SampledStack((TRAIN,), 1, 1, 3, "", "")
    return pprof(Profile.of(stack._replace(thread=str(number)) for number in range(2000)))


def silent(request: Any, context: grpc.ServicerContext) -> Iterator[pb.QueryProfileResponse]:
    gone = threading.Event()
    context.add_callback(gone.set)
    gone.wait(30)
    yield pb.QueryProfileResponse()


class _Hurried(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]  # untyped
    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(timeout=1.0), request)

    intercept_unary_stream = intercept_unary_unary


def wait_a_second_for(fleet: Fleet, silent: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    """And for the others as long as ever."""
    calls = fleet.cluster.relay._calls
    channel = calls.channel

    def hurried(address: str) -> grpc.Channel:
        is_silent = address == f"127.0.0.1:{silent.port}"
        return grpc.intercept_channel(channel(address), _Hurried()) if is_silent else channel(address)

    monkeypatch.setattr(calls, "channel", hurried)


def endless(request: Any, context: grpc.ServicerContext) -> Iterator[pb.QueryProfileResponse]:
    while context.is_active():
        yield pb.QueryProfileResponse(problems=["x" * 10_000])


def failing(request: Any, context: grpc.ServicerContext) -> Iterator[pb.QueryProfileResponse]:
    context.abort(Code.FAILED_PRECONDITION, "no profiles\x1b[2J\nhere" + "x" * 1000)
    yield pb.QueryProfileResponse()


HOSTILE = {
    "nothing": (answering(), "cut off"),
    "not compressed": (answering(b"not a profile"), "not compressed with gzip"),
    "no profile": (answering(gzip.compress(b"\xff" * 100)), "not a profile in the pprof format"),
    "a bomb": (answering(gzip.compress(bytes(64 << 20))), "larger than 8 MiB"),
    "cut": (answering(content(2, 3)[:-20]), "cut off"),
    "too long": (answering(*[bytes(1 << 20)] * 5), "too large"),
    "without end": (endless, "too large"),
    "too many stacks": (lambda request, context: answering(too_many_stacks())(request, context), "rows"),
    "impossible numbers": (
        answering(pprof(Profile.of([SampledStack((TRAIN,), 1, 1 << 60, 3)]))),
        "its numbers are impossible",
    ),
    "an error": (failing, "no profiles�[2J here"),
    "silence": (silent, "no answer within 40 s"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_daemon_is_a_problem_and_the_others_count(
    fleet: Fleet, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind == "silence":
        wait_a_second_for(fleet, fleet.b, monkeypatch)
    monkeypatch.setattr(profile_relay, "MAX_ROWS", 1000)
    fleet.b.profile_answers, reason = HOSTILE[kind]
    found, problems = fleet.samples()
    assert found == {0: PROFILE_SAMPLES, 1: PROFILE_SAMPLES}
    (problem,) = problems
    assert problem.startswith("node-b: ") and reason in problem and len(problem) <= 300 and problem.isprintable()


def test_problems_reported_by_a_daemon_are_passed_on_within_limits(fleet: Fleet) -> None:
    def answers(request: Any, context: grpc.ServicerContext) -> Iterator[pb.QueryProfileResponse]:
        yield pb.QueryProfileResponse(pprof=content(2))
        yield pb.QueryProfileResponse(problems=["12 samples were lost"] * 100)

    fleet.b.profile_answers = answers
    found, problems = fleet.samples()
    assert found.keys() == {0, 1, 2}
    assert problems == ["node-b: 12 samples were lost"] * 4


def test_a_node_answers_for_its_own_ranks_only(fleet: Fleet) -> None:
    fleet.b.profile_answers = answering(content(0, 2, accused=0.9))
    profile, problems = fleet.query()
    assert {one.rank for one in profile if one.stack[0].function == "accused"} == {2}
    assert problems == ["node-b: samples of ranks 0 are left out: they run elsewhere"]


def test_ranks_reported_by_two_nodes_without_known_place_are_omitted(fleet: Fleet) -> None:
    fleet.cluster.nodes[RUN] = RunNodes(PODS, {})
    fleet.b.profile_answers = answering(content(0, 2, accused=0.9))
    found, problems = fleet.samples()
    assert found == {1: PROFILE_SAMPLES, 2: PROFILE_SAMPLES}
    assert problems == ["ranks 0 are left out: several nodes report them"]


def test_joined_profiles_take_bounded_memory(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_relay, "MAX_JOINED_ROWS", 3)
    found, problems = fleet.samples()
    assert len(found) == 2 and len(problems) == 1 and "too many stacks to join" in problems[0]
    monkeypatch.setattr(profile_relay, "MAX_NODE_BYTES", 100)
    found, problems = fleet.samples()
    assert not found and len(problems) == 2


def test_nodes_without_daemon_or_over_the_limit_are_named(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    del fleet.cluster.addresses["node-a"]
    found, problems = fleet.samples()
    assert found.keys() == {2, 3} and problems == ["node-a: there is no daemon on this node now"]
    monkeypatch.setattr(profile_relay, "MAX_QUERY_NODES", 1)
    assert "1 of 2 nodes were asked" in fleet.samples()[1][0]
    fleet.cluster.nodes.clear()
    fleet.cluster.addresses.clear()
    assert fleet.samples() == (
        {},
        ["there is no node to ask: the run has no pods now, or there are no daemons"],
    )


def test_an_ended_run_is_read_from_all_nodes_by_name(fleet: Fleet) -> None:
    fleet.cluster.nodes.clear()
    fleet.cluster.runs.clear()
    assert fleet.samples() == (dict.fromkeys(range(4), PROFILE_SAMPLES), [])
    answer = fleet.compare(ranks=[3])
    assert (answer.samples, answer.reference_samples) == (PROFILE_SAMPLES, 3 * PROFILE_SAMPLES)
    for call in (lambda: fleet.query(job="lab/pytorchjob-lama"), lambda: fleet.compare(job="lab/none", ranks=[3])):
        error = refusal(call)
        assert error.code() is Code.NOT_FOUND and "kubectl get trainingruns -n lab" in error.details()
    assert refusal(fleet.dump).code() is Code.NOT_FOUND


def test_no_name_reads_what_was_recorded_in_another_namespace(fleet: Fleet, tmp_path: Path) -> None:
    """On a real daemon whose store has runs of several namespaces with like names."""
    others = ["other/pytorchjob-llama", "lab2/pytorchjob-llama", "la/b-pytorchjob-llama", "lab-pytorchjob-llama"]
    with served_profiles(tmp_path) as daemon:
        for rank, run in enumerate([RUN, f"{RUN}#2", "lab/pytorchjob-llama2", *others]):
            store(daemon, rank, {STEP: 1 + rank}, run=run)
        fleet.cluster.nodes.clear()
        fleet.cluster.runs.clear()
        fleet.cluster.addresses = {"node": daemon.addresses.grpc_targets[0]}
        when = {"start_unix_nanos": time.time_ns() - 3600 * 10**9, "end_unix_nanos": 0}
        assert fleet.samples(**when) == ({0: 1}, [])
        assert fleet.samples(job=f"{RUN}#2", **when) == ({1: 2}, [])
        assert fleet.compare(ranks=[0], **when).reference_samples == 0
        for run in others:
            for ask in (lambda job: fleet.query(job=job, **when), lambda job: fleet.compare({"job": job}, ranks=[0])):
                expected = Code.INVALID_ARGUMENT if "/" not in run else Code.PERMISSION_DENIED
                assert refusal(lambda ask=ask, run=run: ask(run)).code() is expected
        for wildcard in ("lab/%", "lab/pytorchjob-llama*", "lab/pytorchjob_llama", "lab//pytorchjob-llama", "lab/"):
            assert refusal(lambda job=wildcard: fleet.query(job=job, **when)).code() in (
                Code.INVALID_ARGUMENT,
                Code.NOT_FOUND,
            )


def test_a_slow_rank_is_compared_with_ranks_of_all_nodes(fleet: Fleet) -> None:
    fleet.b.shares = {3: {"load_image": 0.4}}
    fleet.a.shares = {0: {"load_image": 0.02}}
    answer = fleet.compare(ranks=[3])
    first = answer.excesses[0]
    assert (first.function, first.file, first.line, first.phase) == ("load_image", "/app/data.py", 88, "forward")
    assert first.share_ratio == pytest.approx(0.4) and first.reference_share_ratio == pytest.approx(0.02 / 3)
    assert (answer.samples, answer.reference_samples) == (PROFILE_SAMPLES, 3 * PROFILE_SAMPLES)
    assert len(fleet.a.selections) == len(fleet.b.selections) == 1
    assert not fleet.a.selections[0].ranks


def test_comparing_times_or_runs_needs_read_access_to_both(fleet: Fleet) -> None:
    def by_time(request: pb.QueryProfileRequest, context: grpc.ServicerContext) -> Iterator[pb.QueryProfileResponse]:
        is_now = request.selection.start_unix_nanos >= 100
        return cast(Any, answering(content(2, 3, load_image=0.5 if is_now else 0.1))(request, context))

    fleet.b.profile_answers = by_time
    answer = fleet.compare({"start_unix_nanos": 5, "end_unix_nanos": 9}, ranks=[3])
    assert answer.excesses[0].function == "load_image"
    answer = fleet.compare({"ranks": [2]}, ranks=[3])
    assert (len(answer.excesses), answer.reference_samples) == (0, PROFILE_SAMPLES)
    asked = [(list(one.ranks), one.start_unix_nanos) for one in fleet.b.selections]
    assert asked == [([3], 1000), ([], 5), ([3], 1000), ([2], 1000)]
    error = refusal(lambda: fleet.compare({"job": "other/secret-run"}, ranks=[3]))
    assert error.code() is Code.PERMISSION_DENIED and "namespace other" in error.details()


def test_a_comparison_of_too_few_samples_says_so(fleet: Fleet) -> None:
    fleet.cluster.nodes[RUN] = RunNodes({"node-b": PODS["node-b"]}, {3: "node-b"})
    fleet.b.profile_answers = answering(content(3))
    answer = fleet.compare(ranks=[3])
    assert "0 samples of the reference are too few" in answer.reason and not answer.excesses
    assert refusal(lambda: fleet.compare()).code() is Code.INVALID_ARGUMENT


def test_stacks_of_all_ranks_come_with_those_that_are_missing(fleet: Fleet) -> None:
    assert [(stack.rank, stack.node, list(stack.frames), stack.problem) for stack in fleet.dump().ranks] == [
        (rank, node, ["train (train.py:10)"], "") for rank, node in OWNERS.items()
    ]
    assert list(fleet.a.dumps[0].pods) == ["uid-a"]
    fleet.b.silence()
    answer = fleet.dump(ranks=[1, 2, 50])
    fleet.b.serve()
    assert [(stack.rank, stack.node, bool(stack.frames), stack.problem) for stack in answer.ranks] == [
        (1, "node-a", True, ""),
        (2, "node-b", False, "its node did not answer for it"),
        (50, "", False, "the rank does not report: has it ended?"),
    ]
    assert len(answer.problems) == 1 and answer.problems[0].startswith("node-b: ")


def test_stacks_of_a_hostile_daemon_are_bounded_printable_and_own(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(request: pb.DumpStacksRequest) -> pb.DumpStacksResponse:
        frames = ["evil\x1b[2J\n" + "x" * 1000] * 1000
        own = pb.RankStack(rank=3, node="node-a", phase="p" * 1000, frames=frames)
        return pb.DumpStacksResponse(ranks=[pb.RankStack(rank=0, frames=["forged"]), own], problems=["\x1b" * 1000] * 9)

    fleet.b.stack_answers = answers
    answer = fleet.dump()
    by_rank = {stack.rank: stack for stack in answer.ranks}
    assert list(by_rank[0].frames) == ["train (train.py:10)"]
    assert (by_rank[3].node, len(by_rank[3].phase), len(by_rank[3].frames)) == ("node-b", 64, 256)
    assert all(frame.isprintable() and len(frame) <= 600 for frame in by_rank[3].frames)
    assert by_rank[2].problem == "its node did not answer for it"
    assert len(answer.problems) == 4 and all(len(text) <= 300 and text.isprintable() for text in answer.problems)
    monkeypatch.setattr(profile_relay, "MAX_STACKS_BYTES", 1000)
    assert "1 ranks are left out: the answer is too large" in " ".join(fleet.dump().problems)


def test_a_rank_that_two_nodes_report_has_no_stack(fleet: Fleet) -> None:
    fleet.cluster.nodes[RUN] = RunNodes(PODS, {})
    fleet.b.stack_answers = lambda request: pb.DumpStacksResponse(ranks=[pb.RankStack(rank=0, frames=["forged"])])
    first = fleet.dump().ranks[0]
    assert (first.rank, list(first.frames)) == (0, []) and "node-a" in first.problem and "node-b" in first.problem


def every_call(stub: Any, run: str) -> dict[str, Callable[[], Any]]:
    selection = selected(job=run, ranks=[3])
    limit = {"timeout": 60}
    return {
        "query": lambda: list(stub.QueryProfile(pb.QueryProfileRequest(selection=selection), **limit)),
        "compare": lambda: stub.CompareProfiles(pb.CompareProfilesRequest(selection=selection), **limit),
        "dump": lambda: stub.DumpStacks(pb.DumpStacksRequest(job=run), **limit),
    }


@pytest.mark.parametrize(
    ("verbs", "allowed"),
    [
        ((), set()),
        (("get", "list", "delete"), set()),
        (("get/artifacts",), {"query", "compare"}),
        (("create",), {"dump"}),
        (("get/artifacts", "create"), {"query", "compare", "dump"}),
    ],
)
def test_reading_needs_artifacts_and_dumping_needs_captures(
    fleet: Fleet, verbs: tuple[str, ...], allowed: set[str]
) -> None:
    stub = fleet.stub(fleet.cluster.may("bob", *verbs))
    for name, call in every_call(stub, RUN).items():
        if name in allowed:
            call()
        else:
            error = refusal(call)
            assert error.code() is Code.PERMISSION_DENIED and "rankscope-capture" in error.details(), name
    # Whether a run exists is told to those who may see it.
    for name, call in every_call(stub, "lab/none").items():
        assert refusal(call).code() is (Code.NOT_FOUND if name in allowed else Code.PERMISSION_DENIED)
    for run in ("other/secret-run", "other/none"):
        texts = {refusal(call).details() for call in every_call(stub, run).values()}
        assert texts == {
            f"bob may not {what} in namespace other; ask for the role rankscope-capture there"
            for what in ("get captures/artifacts", "create captures")
        }


def test_nobody_without_a_token_is_answered(fleet: Fleet) -> None:
    for call in every_call(ProfileServiceStub(fleet.cluster.channel()), RUN).values():
        assert refusal(call).code() is Code.UNAUTHENTICATED
    assert not fleet.a.selections and not fleet.a.dumps


@pytest.mark.parametrize("text", ["", "lab", "lab/..", "../lab", "lab/a/../b", "Lab/a", "lab/a\n", "lab/a#x"])
def test_no_name_leads_elsewhere(fleet: Fleet, text: str) -> None:
    for name, call in every_call(fleet.stub(), text).items():
        assert refusal(call).code() is Code.INVALID_ARGUMENT, name


@pytest.mark.parametrize(
    "selection",
    [
        {"start_unix_nanos": -1},
        {"start_unix_nanos": 0},
        {"start_unix_nanos": 9000},
        {"end_unix_nanos": -5},
        {"end_unix_nanos": 10**15},
        {"ranks": [2**32 - 1]},
        {"ranks": range(5000)},
        {"threads": ["x"] * 100},
        {"phases": ["sleep"]},
    ],
)
def test_a_selection_that_makes_no_sense_is_refused(fleet: Fleet, selection: dict[str, Any]) -> None:
    assert refusal(lambda: fleet.query(**selection)).code() is Code.INVALID_ARGUMENT
    assert not fleet.a.selections


def test_reads_and_dumps_leave_records(fleet: Fleet, audited: Audited) -> None:
    fleet.query(ranks=[2, 3])
    fleet.query(ranks=[2, 3])
    fleet.b.stack_answers = lambda request: pb.DumpStacksResponse()
    fleet.dump()
    read, asked, ended = audited()
    for record in (read, asked, ended):
        assert (record["user"], record["verified"], record["via"]) == ("ada", True, "api")
        assert (record["namespace"], record["run"], record["address"]) == ("lab", "pytorchjob-llama", "127.0.0.1")
    assert (read["event"], read["what"], read["ranks"]) == ("downloaded", "profile", "2-3")
    assert (asked["event"], asked["what"], asked["ranks"]) == ("asked", "stacks", "all")
    assert (ended["event"], ended["result"], ended["message"]) == ("ended", "Failed", "2/4 ranks delivered")


def test_a_reference_of_another_run_is_recorded_too(fleet: Fleet, audited: Audited) -> None:
    fleet.cluster.may("ada", "get/artifacts", namespace="other")
    fleet.compare({"job": "other/secret-run"}, ranks=[3])
    assert [(one["namespace"], one["run"], one["ranks"]) for one in audited()] == [
        ("lab", "pytorchjob-llama", "3"),
        ("other", "secret-run", "all"),
    ]


def test_a_dump_that_finds_no_turn_is_recorded_as_refused(
    fleet: Fleet, audited: Audited, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile_relay, "TURN_SECONDS", 0.05)
    monkeypatch.setattr(fleet.cluster.relay, "_dumps", threading.BoundedSemaphore(1))
    with profile_relay._turn(fleet.cluster.relay._dumps):
        assert refusal(fleet.dump).code() is Code.RESOURCE_EXHAUSTED
    assert [(one["event"], one.get("result")) for one in audited()] == [
        ("asked", None),
        ("refused", "RESOURCE_EXHAUSTED"),
    ]
    assert not fleet.a.dumps


def test_all_callers_and_jobs_share_a_runs_dump_limit(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.cluster.profiles, "_dumps", KeyedTokenBuckets(2, 0.0))
    fleet.dump()
    fleet.dump(job=f"{RUN}#2")
    bob = fleet.stub(fleet.cluster.may("bob", "create"))
    error = refusal(lambda: bob.DumpStacks(pb.DumpStacksRequest(job=f"{RUN}#3"), timeout=60))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert len(fleet.a.dumps) == 1


def test_profiles_that_one_tenant_reads_are_limited(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet.cluster.profiles, "_reads", KeyedTokenBuckets(1, 0.0))
    fleet.query()
    assert refusal(fleet.query).code() is Code.RESOURCE_EXHAUSTED
    bob = fleet.stub(fleet.cluster.may("bob", "get/artifacts"))
    every_call(bob, RUN)["query"]()


def test_callers_wait_for_their_turn_and_are_told(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_relay, "TURN_SECONDS", 0.2)
    fleet.b.profile_answers = silent
    waiting = [
        fleet.stub().QueryProfile(pb.QueryProfileRequest(selection=selected()), timeout=60)
        for _ in range(profile_relay.QUERIES_AT_ONCE)
    ]
    wait_until(lambda: len(fleet.b.selections) >= len(waiting))
    error = refusal(fleet.query)
    assert error.code() is Code.RESOURCE_EXHAUSTED and "try again" in error.details()
    for call in waiting:
        call.cancel()
    # Callers that left are not served to the end.
    fleet.b.profile_answers = None
    monkeypatch.setattr(profile_relay, "TURN_SECONDS", 20.0)
    assert fleet.samples()[0].keys() == set(OWNERS)


def test_nothing_is_answered_before_the_runs_are_known(fleet: Fleet) -> None:
    fleet.cluster.is_listed = False
    for call in every_call(fleet.stub(), RUN).values():
        assert refusal(call).code() is Code.UNAVAILABLE


def test_a_hang_dump_with_flight_recorders_survives_a_silent_node(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_a_second_for(fleet, fleet.b, monkeypatch)
    gone = threading.Event()

    def never(request: pb.DumpStacksRequest) -> pb.DumpStacksResponse:
        gone.wait(60)
        return pb.DumpStacksResponse()

    tails = [b'{"version": "2.10"}', b"x" * (profile_relay.MAX_TAIL_BYTES + 1)]
    fleet.a.stack_answers = lambda request: pb.DumpStacksResponse(
        ranks=[
            pb.RankStack(rank=rank, frames=["f"], flight_recorder=pb.FlightRecorderTail(records=tail, source="\x1b[2J"))
            for rank, tail in enumerate(tails)
        ]
    )
    fleet.b.stack_answers = never
    answer = fleet.cluster.relay.dump_hang(profile_relay.JobNodes(RUN, RunNodes(PODS, OWNERS)))
    gone.set()
    assert fleet.a.dumps[0].with_flight_recorder
    first, second, *others = answer.ranks
    assert (first.flight_recorder.records, first.flight_recorder.source) == (tails[0], "\ufffd[2J")
    assert not second.flight_recorder.records and "too large" in second.flight_recorder.problem
    assert [(one.rank, one.problem) for one in others] == [(rank, "its node did not answer for it") for rank in (2, 3)]
    assert list(answer.problems) == ["node-b: no answer within 20 s"]
    monkeypatch.setattr(profile_relay, "TURN_SECONDS", 0.01)
    monkeypatch.setattr(fleet.cluster.relay, "_dumps", threading.BoundedSemaphore(1))
    with fleet.cluster.relay._dumps:
        answer = fleet.cluster.relay.dump_hang(profile_relay.JobNodes(RUN, RunNodes(PODS, OWNERS)))
    assert "others are served now" in answer.problems[0]
