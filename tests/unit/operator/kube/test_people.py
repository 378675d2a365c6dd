from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest

from rankscope.operator.kube import people_captures, people_guarding
from rankscope.operator.kube.api import ApiError, UnreachableError
from rankscope.operator.kube.capture_auditing import CaptureAudit
from rankscope.operator.kube.people_serving import PeopleServer, PeopleSettings
from rankscope.v1 import capture_service_pb2 as pb
from tests.unit.operator.kube.people_cluster import Cluster

RUN = "lab/pytorchjob-llama"
START = pb.StartCaptureRequest(job=RUN, ranks="all", steps=3, reason="slow since noon")
Code = grpc.StatusCode


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    made.server.stop()


@pytest.fixture
def audited(caplog: pytest.LogCaptureFixture) -> Callable[[], list[dict[str, Any]]]:
    caplog.set_level(logging.INFO, "rankscope.audit")
    return lambda: [json.loads(record.message) for record in caplog.records if record.name == "rankscope.audit"]


def refusal(call: Callable[[], Any]) -> grpc.RpcError:
    with pytest.raises(grpc.RpcError) as error:
        answer = call()
        if hasattr(answer, "__next__"):
            list(answer)
    return error.value


def every_call(stub: Any, capture: str, run: str = RUN) -> dict[str, Callable[[], Any]]:
    start = pb.StartCaptureRequest(job=run, ranks="all", steps=3)
    return {
        "start": lambda: stub.StartCapture(start, timeout=30),
        "get": lambda: stub.GetCapture(pb.GetCaptureRequest(id=capture), timeout=30),
        "list": lambda: stub.ListCaptures(pb.ListCapturesRequest(job=run), timeout=30),
        "cancel": lambda: stub.CancelCapture(pb.CancelCaptureRequest(id=capture), timeout=30),
        "delete": lambda: stub.DeleteCapture(pb.DeleteCaptureRequest(id=capture), timeout=30),
        "download": lambda: stub.DownloadArtifact(pb.DownloadArtifactRequest(id=capture), timeout=30),
    }


def begun(cluster: Cluster, name: str = "mine") -> str:
    """A capture of ada's, under way; her token."""
    token = cluster.may("ada", "create", "get", "list", "delete", "get/artifacts")
    stream = cluster.stub(token).StartCapture(pb.StartCaptureRequest(job=RUN, ranks="all", steps=3, id=name))
    next(stream)
    stream.cancel()
    return token


def test_without_a_token_nothing_is_to_be_had(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    begun(cluster)
    stubs = {
        "none": cluster.stub(),
        "another scheme": cluster.stub(None, ("authorization", "Basic YWRhOmFkYQ==")),
        "an empty one": cluster.stub(""),
        "two": cluster.stub("token-of-ada", ("authorization", "Bearer token-of-ada")),
    }
    for stub in stubs.values():
        for call in every_call(stub, "lab/mine").values():
            error = refusal(call)
            assert error.code() is Code.UNAUTHENTICATED, error
            assert "kubectl create token" in error.details()
    refused = [record for record in caplog.records if "refused 127.0.0.1" in record.message]
    assert len(refused) == 1


def test_a_token_that_the_api_server_does_not_know_opens_nothing_and_is_told_nowhere(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, audited: Callable[[], list[dict[str, Any]]]
) -> None:
    begun(cluster)
    caplog.clear()
    for call in every_call(cluster.stub("forged-token"), "lab/mine").values():
        error = refusal(call)
        assert error.code() is Code.UNAUTHENTICATED
        assert "SECRET" not in error.details() and "forged-token" not in error.details()
    assert "forged-token" not in caplog.text
    assert [record["result"] for record in audited()] == ["Unauthenticated"]
    assert cluster.reviewed.count("forged-token") == 1


def test_strangers_of_one_address_cannot_make_the_api_server_work(cluster: Cluster) -> None:
    token = begun(cluster)
    stub = cluster.stub(token)
    codes = [
        refusal(
            lambda number=number: cluster.stub(f"guess{number}").GetCapture(pb.GetCaptureRequest(id="lab/mine"))
        ).code()
        for number in range(20)
    ]
    assert codes[:10] == [Code.UNAUTHENTICATED] * 10
    assert codes[-1] is Code.RESOURCE_EXHAUSTED
    assert sum(each.startswith("guess") for each in cluster.reviewed) < 20
    # Who was known before is served.
    assert stub.GetCapture(pb.GetCaptureRequest(id="lab/mine")).capture.id == "lab/mine"


def test_one_client_with_an_old_token_does_not_shut_out_its_neighbours(cluster: Cluster) -> None:
    old = cluster.stub("old-token")
    for _ in range(30):
        assert refusal(lambda: old.GetCapture(pb.GetCaptureRequest(id="lab/mine"))).code() is Code.UNAUTHENTICATED
    token = begun(cluster)
    assert cluster.stub(token).GetCapture(pb.GetCaptureRequest(id="lab/mine")).capture.id == "lab/mine"


def test_whoever_may_not_is_told_the_same_whether_there_is_something_or_not(
    cluster: Cluster, audited: Callable[[], list[dict[str, Any]]]
) -> None:
    begun(cluster)
    bob = cluster.stub(cluster.may("bob", "create", "get", "list", "delete", namespace="bobs"))
    there, nowhere = every_call(bob, "lab/mine"), every_call(bob, "lab/none", "lab/none")
    for name in there:
        first, second = refusal(there[name]), refusal(nowhere[name])
        assert first.code() is second.code() is Code.PERMISSION_DENIED
        assert first.details() == second.details()
        assert "namespace lab" in first.details() and "ask for the role rankscope-" in first.details()
        assert "llama" not in first.details() and "mine" not in first.details()
    assert len(cluster.documents) == 1
    denied = [record for record in audited() if record["event"] == "refused"]
    assert {record["user"] for record in denied} == {"bob"}
    assert {record["message"] for record in denied} == {
        "create captures",
        "get captures",
        "list captures",
        "delete captures",
        "get captures/artifacts",
    }


def test_each_call_needs_its_own_right(cluster: Cluster) -> None:
    begun(cluster)
    rights = {
        "start": "create",
        "get": "get",
        "list": "list",
        "cancel": "delete",
        "delete": "delete",
        "download": "get/artifacts",
    }
    for name, right in rights.items():
        others = set(rights.values()) - {right}
        user = f"all-but-{name}"
        error = refusal(every_call(cluster.stub(cluster.may(user, *others)), "lab/mine")[name])
        assert error.code() is Code.PERMISSION_DENIED, name


def test_all_namespaces_are_listed_only_for_those_who_may_list_all(cluster: Cluster) -> None:
    token = begun(cluster)
    error = refusal(lambda: cluster.stub(token).ListCaptures(pb.ListCapturesRequest()))
    assert error.code() is Code.PERMISSION_DENIED
    warden = cluster.may("warden", "list", namespace="")
    assert [one.id for one in cluster.stub(warden).ListCaptures(pb.ListCapturesRequest()).captures] == ["lab/mine"]
    assert [one.id for one in cluster.stub(token).ListCaptures(pb.ListCapturesRequest(job="lab/")).captures] == [
        "lab/mine"
    ]


def test_a_capture_is_made_in_the_callers_name_and_followed_to_its_end(
    cluster: Cluster, audited: Callable[[], list[dict[str, Any]]]
) -> None:
    token = cluster.may("ada", "create")
    stream = cluster.stub(token).StartCapture(START, timeout=60)
    first = next(stream).capture
    assert first.state == pb.CAPTURE_STATE_ACCEPTED and first.requested_by == "ada"
    namespace, _, name = first.id.partition("/")
    (document,) = cluster.documents.values()
    assert (namespace, name) == ("lab", document["metadata"]["name"])
    assert document["metadata"]["annotations"] == {
        "rankscope.dev/via": "api",
        "rankscope.dev/requested-by": "ada",
    }
    assert document["spec"]["reason"] == "slow since noon" and document["spec"]["run"] == "pytorchjob-llama"
    rank = {"rank": 0, "node": "node-a", "state": "running"}
    cluster.write_status(name, phase="Running", captureId="k-1", ranks=[rank])
    assert next(stream).capture.state == pb.CAPTURE_STATE_RUNNING
    said = pb.Capture(ranks=[pb.RankCapture(rank=0, node="elsewhere", pid=7, notes=["cut to 3 steps"])])
    said.ranks.append(pb.RankCapture(rank=9, state=pb.CAPTURE_STATE_ANALYSED))
    cluster.traces.said = {"node-a": said}
    done = {**rank, "state": "analysed", "bytes": 5, "uri": "/captures/rank0.json.gz"}
    cluster.write_status(name, phase="Succeeded", ranks=[done], findings=["no rank stands out"])
    (last,) = list(stream)
    assert last.capture.state == pb.CAPTURE_STATE_ANALYSED
    assert [(one.rank, one.node, one.pid, list(one.notes)) for one in last.capture.ranks] == [
        (0, "node-a", 7, ["cut to 3 steps"])
    ]
    assert list(last.capture.notes) == ["no rank stands out"]
    (asked,) = audited()
    assert asked["event"] == "asked" and asked["user"] == "ada" and asked["verified"] is True
    assert (asked["namespace"], asked["run"], asked["steps"]) == ("lab", "pytorchjob-llama", 3)
    assert asked["reason"] == "slow since noon" and asked["capture"] == name and asked["address"] == "127.0.0.1"


def test_the_same_id_again_is_the_same_capture_and_nobody_elses(cluster: Cluster) -> None:
    token = begun(cluster, "once")
    again = pb.StartCaptureRequest(job=RUN, ranks="all", steps=3, id="once")
    stream = cluster.stub(token).StartCapture(again)
    assert next(stream).capture.id == "lab/once"
    stream.cancel()
    assert len(cluster.documents) == 1
    longer = pb.StartCaptureRequest(job=RUN, ranks="all", steps=4, id="once")
    assert refusal(lambda: cluster.stub(token).StartCapture(longer)).code() is Code.ALREADY_EXISTS
    bob = cluster.may("bob", "create")
    assert refusal(lambda: cluster.stub(bob).StartCapture(again)).code() is Code.ALREADY_EXISTS


TRICKS = (
    "",
    "/",
    "lab",
    "lab/",
    "lab/..",
    "../lab",
    "lab/a/../../b",
    "lab/a%2fb",
    "lab/a?x=1",
    "Lab/a",
    "lab/a\n",
    "l/\0",
)


@pytest.mark.parametrize("text", [*TRICKS, "lab/" + "a" * 254, "a" * 64 + "/a", "lab/a#0", "lab/a#x", "lab/a#²"])
def test_no_name_leads_elsewhere(cluster: Cluster, text: str) -> None:
    token = cluster.may("ada", "create", "get", "list", "delete", "get/artifacts")
    for name, call in every_call(cluster.stub(token), text, text).items():
        if name == "list" and text in ("", "lab/"):
            continue
        assert refusal(call).code() is Code.INVALID_ARGUMENT, name
    assert cluster.documents == {}


@pytest.mark.parametrize(
    "change",
    [
        {"ranks": "0;1"},
        {"ranks": "3-1"},
        {"steps": 0},
        {"steps": 101},
        {"seconds": float("nan")},
        {"seconds": 1e9},
        {"patience_seconds": -1},
        {"patience_seconds": float("inf")},
        {"id": "Upper"},
        {"id": "../x"},
        {"id": "x" * 64},
        {"start_unix_millis": 1},
        {"options": pb.CaptureOptions(repeat=2)},
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(cluster: Cluster, change: dict[str, Any]) -> None:
    token = cluster.may("ada", "create")
    fields: dict[str, Any] = {"job": RUN, "ranks": "all", **({} if "seconds" in change else {"steps": 3}), **change}
    request = pb.StartCaptureRequest(**fields)
    assert refusal(lambda: cluster.stub(token).StartCapture(request)).code() is Code.INVALID_ARGUMENT
    assert cluster.documents == {}


def test_a_reason_is_one_bounded_line(cluster: Cluster) -> None:
    token = cluster.may("ada", "create")
    request = pb.StartCaptureRequest(job=RUN, ranks="all", steps=3, reason="a\nb\x1b[2J" + "x" * 5000)
    next(cluster.stub(token).StartCapture(request))
    (document,) = cluster.documents.values()
    assert document["spec"]["reason"].startswith("a b [2Jx") and len(document["spec"]["reason"]) <= 1024


def test_a_run_that_is_not_there_is_named_to_those_who_may_capture_it(cluster: Cluster) -> None:
    token = cluster.may("ada", "create")
    error = refusal(lambda: cluster.stub(token).StartCapture(pb.StartCaptureRequest(job="lab/none", steps=3)))
    assert error.code() is Code.NOT_FOUND and "kubectl get trainingruns -n lab" in error.details()


def test_a_capture_that_cannot_begin_is_an_error_with_its_reason(cluster: Cluster) -> None:
    token = cluster.may("ada", "create")
    request = pb.StartCaptureRequest(job=RUN, ranks="straggler", steps=3, id="none")
    stream = cluster.stub(token).StartCapture(request, timeout=60)
    next(stream)
    cluster.write_status("none", phase="Failed", message="no rank is slow now")
    error = refusal(lambda: stream)
    assert error.code() is Code.FAILED_PRECONDITION and error.details() == "no rank is slow now"


def test_what_the_api_server_refuses_is_told_and_recorded(
    cluster: Cluster, audited: Callable[[], list[dict[str, Any]]]
) -> None:
    cluster.refusal = ApiError(403, "Forbidden", "exceeded quota")
    token = cluster.may("ada", "create")
    error = refusal(lambda: cluster.stub(token).StartCapture(START))
    assert error.code() is Code.FAILED_PRECONDITION and "exceeded quota" in error.details()
    assert [(record["event"], record.get("result")) for record in audited()] == [
        ("asked", None),
        ("refused", "Forbidden"),
    ]


def test_cancelling_says_who_and_keeps_the_object(
    cluster: Cluster, audited: Callable[[], list[dict[str, Any]]]
) -> None:
    stub = cluster.stub(begun(cluster))
    stub.CancelCapture(pb.CancelCaptureRequest(id="lab/mine"))
    stub.CancelCapture(pb.CancelCaptureRequest(id="lab/mine"))
    (document,) = cluster.documents.values()
    assert document["metadata"]["annotations"]["rankscope.dev/cancel"] == "ada"
    assert [record["event"] for record in audited()] == ["asked", "cancelled"]
    assert (
        refusal(lambda: stub.DeleteCapture(pb.DeleteCaptureRequest(id="lab/mine"))).code() is Code.FAILED_PRECONDITION
    )
    cluster.write_status("mine", phase="Cancelled")
    stub.DeleteCapture(pb.DeleteCaptureRequest(id="lab/mine"))
    assert cluster.documents == {}


def test_a_trace_is_passed_on_from_where_it_broke_off_and_its_download_recorded(
    cluster: Cluster, audited: Callable[[], list[dict[str, Any]]]
) -> None:
    stub = cluster.stub(begun(cluster))
    parts = list(stub.DownloadArtifact(pb.DownloadArtifactRequest(id="lab/mine", rank=0)))
    rest = list(stub.DownloadArtifact(pb.DownloadArtifactRequest(id="lab/mine", rank=0, offset=3)))
    assert [part.chunk for part in (*parts, *rest)] == [b"trace", b"ce"]
    (download,) = [record for record in audited() if record["event"] == "downloaded"]
    assert (download["user"], download["capture"], download["ranks"]) == ("ada", "mine", "0")


def test_an_api_server_that_is_away_lets_nobody_in(cluster: Cluster) -> None:
    cluster.may("ada", "create")
    cluster.error = UnreachableError("POST https://10.0.0.1: timed out")
    error = refusal(lambda: cluster.stub("token-of-ada").StartCapture(START))
    assert error.code() is Code.UNAVAILABLE and "10.0.0.1" not in error.details()


def test_what_goes_wrong_inside_is_not_told_outside(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    token = begun(cluster)

    def fail(*_: object) -> None:
        raise ValueError("/etc/secret")

    monkeypatch.setattr(people_captures, "answer", fail)
    error = refusal(lambda: cluster.stub(token).GetCapture(pb.GetCaptureRequest(id="lab/mine")))
    assert error.code() is Code.INTERNAL and "secret" not in error.details()


def test_nobody_has_more_calls_under_way_than_their_share(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people_guarding, "CALLS_OF_ONE", 2)
    token = cluster.may("ada", "create")
    streams = [cluster.stub(token).StartCapture(START) for _ in range(2)]
    for stream in streams:
        next(stream)
    assert refusal(lambda: cluster.stub(token).StartCapture(START)).code() is Code.RESOURCE_EXHAUSTED
    next(cluster.stub(cluster.may("bob", "create")).StartCapture(START))
    streams[0].cancel()
    give_up = time.monotonic() + 30
    while True:
        try:
            next(cluster.stub(token).StartCapture(START))
            break
        except grpc.RpcError as error:
            assert error.code() is Code.RESOURCE_EXHAUSTED and time.monotonic() < give_up
            time.sleep(0.05)


def test_whoever_says_nothing_after_the_head_is_cut_off(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people_guarding, "REQUEST_SECONDS", 0.3)
    token = cluster.may("ada", "get")
    silent = threading.Event()

    def never() -> Iterator[bytes]:
        silent.wait(60)
        yield b""

    with grpc.insecure_channel(f"127.0.0.1:{cluster.server.port}") as channel:
        call = channel.stream_unary("/rankscope.v1.CaptureService/GetCapture")
        error = refusal(lambda: call(never(), metadata=[("authorization", f"Bearer {token}")], timeout=60))
        assert error.code() is Code.CANCELLED
        # And a stranger is not waited for at all.
        monkeypatch.setattr(people_guarding, "REQUEST_SECONDS", 60)
        assert refusal(lambda: call(never(), timeout=60)).code() is Code.UNAUTHENTICATED
    silent.set()


def test_a_message_that_is_too_large_is_refused(cluster: Cluster) -> None:
    token = cluster.may("ada", "create")
    request = pb.StartCaptureRequest(job=RUN, steps=3, reason="x" * (65 * 1024))
    assert refusal(lambda: cluster.stub(token).StartCapture(request)).code() is Code.RESOURCE_EXHAUSTED
    assert cluster.documents == {}


def test_a_stream_ends_when_its_token_was_taken_back(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(people_captures, "RECHECK_SECONDS", 0.0)
    monkeypatch.setattr("rankscope.operator.kube.reviewing.YES_SECONDS", 0.0)
    token = cluster.may("ada", "create")
    stream = cluster.stub(token).StartCapture(START, timeout=60)
    next(stream)
    del cluster.tokens[token]
    assert refusal(lambda: stream).code() is Code.UNAUTHENTICATED


def test_without_tls_only_loopback_is_listened_on(cluster: Cluster) -> None:
    handler = cluster.captures.handler(people_guarding.Guard(cluster.reviews, CaptureAudit()))
    for host in ("0.0.0.0", "::", "10.0.0.7", "operator.example"):
        with pytest.raises(ValueError, match="--api-certificate"):
            PeopleServer(PeopleSettings(host, 0), handler, None)
