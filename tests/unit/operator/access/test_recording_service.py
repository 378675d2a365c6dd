"""RecordingService for users, with daemons that answer as a test wants over real gRPC."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from rankscope.operator.access import recording_service
from rankscope.operator.runs.inventory import RunNodes
from rankscope.v1 import recording_service_pb2 as pb
from rankscope.v1.recording_service_pb2_grpc import (
    RecordingServiceServicer,
    RecordingServiceStub,
    add_RecordingServiceServicer_to_server,
)
from tests.support.waiting import wait_until
from tests.unit.operator.access.fake_cluster import RUN, Cluster

Code = grpc.StatusCode
PODS = {"node-a": frozenset({"uid-a"}), "node-b": frozenset({"uid-b"})}
OWNERS = {0: "node-a", 1: "node-a", 2: "node-b", 3: "node-b"}
Answers = Callable[[grpc.ServicerContext], Iterator[pb.RecordRunResponse]]


def records(*ranks: int, **content: Any) -> pb.RecordRunResponse:
    return pb.RecordRunResponse(ranks=[pb.RankRecords(rank=rank, **content) for rank in ranks])


class Node(RecordingServiceServicer):
    def __init__(self, answers: Answers) -> None:
        self.asked: list[pb.RecordRunRequest] = []
        self.answers = answers
        self.server = grpc.server(ThreadPoolExecutor(4))
        add_RecordingServiceServicer_to_server(self, self.server)
        self.address = f"127.0.0.1:{self.server.add_insecure_port('127.0.0.1:0')}"
        self.server.start()

    def RecordRun(self, request: pb.RecordRunRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        self.asked.append(request)
        yield from self.answers(context)


class Fleet:
    """Two nodes with two ranks each of RUN."""

    def __init__(self) -> None:
        self.cluster = Cluster()
        self.a = Node(lambda _: iter([records(0, operations=b"a0"), records(1, operations=b"a1")]))
        self.b = Node(lambda _: iter([records(2, operations=b"b2"), records(3, operations=b"b3")]))
        self.cluster.addresses.update({"node-a": self.a.address, "node-b": self.b.address})
        self.cluster.nodes[RUN] = RunNodes(PODS, OWNERS)
        self.token = self.cluster.may("ada", "create")

    def stub(self, token: str | None = None) -> Any:
        return RecordingServiceStub(self.cluster.channel(self.token if token is None else token))

    def record(self, token: str | None = None, **request: Any) -> list[pb.RecordRunResponse]:
        asked = pb.RecordRunRequest(**{"job": RUN, "seconds": 1.0, **request})
        return list(self.stub(token).RecordRun(asked, timeout=60))

    def refusal(self, token: str | None = None, **request: Any) -> tuple[grpc.StatusCode, str]:
        with pytest.raises(grpc.RpcError) as refused:
            self.record(token, **request)
        return refused.value.code(), refused.value.details()

    def stop(self) -> None:
        self.cluster.server.stop()
        for node in (self.a, self.b):
            node.server.stop(None).wait()


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    made = Fleet()
    yield made
    made.stop()


def by_rank(answers: list[pb.RecordRunResponse]) -> dict[int, tuple[str, bytes]]:
    return {one.rank: (one.node, one.operations) for answer in answers for one in answer.ranks}


def test_records_of_all_nodes_come_together(fleet: Fleet) -> None:
    assert by_rank(fleet.record()) == {
        0: ("node-a", b"a0"),
        1: ("node-a", b"a1"),
        2: ("node-b", b"b2"),
        3: ("node-b", b"b3"),
    }
    (asked,) = fleet.a.asked
    assert (asked.job, list(asked.pods), asked.seconds) == (RUN, ["uid-a"], 1.0)


def test_only_the_nodes_of_the_named_ranks_are_asked(fleet: Fleet) -> None:
    fleet.record(ranks=[2])
    assert (len(fleet.a.asked), [list(asked.ranks) for asked in fleet.b.asked]) == (0, [[2]])


def test_a_node_answers_for_its_own_ranks_only(fleet: Fleet) -> None:
    fleet.b.answers = lambda _: iter([records(0, 2, operations=b"forged")])
    assert by_rank(fleet.record())[0] == ("node-a", b"a0")
    assert by_rank(fleet.record())[2] == ("node-b", b"forged")


def test_a_node_that_fails_is_a_problem(fleet: Fleet) -> None:
    def refuse(context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        yield records(2, operations=b"b2")
        context.abort(Code.RESOURCE_EXHAUSTED, "2 recordings are made\x1b[2J now")

    fleet.b.answers = refuse
    answers = fleet.record()
    assert by_rank(answers).keys() == {0, 1, 2}
    (problem,) = [problem for answer in answers for problem in answer.problems]
    assert problem.startswith("node-b: 2 recordings") and problem.isprintable()
    del fleet.cluster.addresses["node-a"]
    assert "node-a: there is no daemon on this node now" in {
        problem for answer in fleet.record() for problem in answer.problems
    }


def test_a_recording_needs_what_a_capture_needs(fleet: Fleet) -> None:
    reader = fleet.cluster.may("bob", "get", "get/artifacts")
    code, text = fleet.refusal(reader)
    assert code is Code.PERMISSION_DENIED and "bob may not create" in text
    assert fleet.refusal("unknown")[0] is Code.UNAUTHENTICATED
    assert not fleet.a.asked and not fleet.b.asked


def test_what_cannot_be_recorded_is_refused(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    for seconds in (0.0, 601.0, float("nan")):
        assert "between 0 and 600 s" in fleet.refusal(seconds=seconds)[1]
    fleet.cluster.nodes["lab/gone"] = RunNodes({}, {})
    assert fleet.refusal(job="lab/gone")[0] is Code.NOT_FOUND
    assert fleet.refusal(ranks=range(5000))[0] is Code.INVALID_ARGUMENT
    monkeypatch.setattr(recording_service, "MAX_NODES", 1)
    assert "name fewer --ranks" in fleet.refusal()[1]


def test_a_caller_that_leaves_ends_the_recording(fleet: Fleet) -> None:
    ended = threading.Event()

    def endless(context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        context.add_callback(ended.set)
        while not ended.wait(0.01):
            yield records(2, operations=b"b2")

    fleet.b.answers = endless
    answers = fleet.stub().RecordRun(pb.RecordRunRequest(job=RUN, seconds=600.0))
    next(answers)
    answers.cancel()
    assert ended.wait(60.0)
    wait_until(lambda: fleet.cluster.recordings.under_way == 0)


def test_a_user_has_few_recordings_at_once(fleet: Fleet) -> None:
    go_on = threading.Event()

    def slow(context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        yield records(2, operations=b"b2")
        go_on.wait(60.0)

    fleet.b.answers = slow
    request = pb.RecordRunRequest(job=RUN, ranks=[2], seconds=600.0)
    others = [fleet.stub().RecordRun(request) for _ in range(recording_service.MAX_RECORDINGS_OF_ONE)]
    for other in others:
        next(other)
    assert fleet.refusal()[0] is Code.RESOURCE_EXHAUSTED
    bob = fleet.cluster.may("bob", "create")
    assert by_rank(fleet.record(bob, ranks=[0])) == {0: ("node-a", b"a0")}
    go_on.set()
    for other in others:
        list(other)
