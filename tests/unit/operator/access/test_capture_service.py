from __future__ import annotations

from typing import Any

import grpc
import pytest

from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.kube.api_client import ApiError
from rankscope.v1 import capture_service_pb2 as pb
from tests.support.audit_records import Audited
from tests.unit.operator.access.fake_cluster import RUN, START, Cluster, begun, every_call, refusal

Code = grpc.StatusCode


def test_a_capture_runs_to_its_end_in_the_callers_name(cluster: Cluster, audited: Audited) -> None:
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


def test_a_repeated_id_is_the_same_capture_for_its_caller(cluster: Cluster) -> None:
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
    assert document["spec"]["reason"].startswith("a b�[2Jx") and len(document["spec"]["reason"]) <= 1024


def test_a_missing_run_is_reported_to_callers_with_capture_rights(cluster: Cluster) -> None:
    token = cluster.may("ada", "create")
    error = refusal(lambda: cluster.stub(token).StartCapture(pb.StartCaptureRequest(job="lab/none", steps=3)))
    assert error.code() is Code.NOT_FOUND and "kubectl get trainingruns -n lab" in error.details()


def test_a_capture_that_cannot_begin_reports_its_reason(cluster: Cluster) -> None:
    token = cluster.may("ada", "create")
    request = pb.StartCaptureRequest(job=RUN, ranks="straggler", steps=3, id="none")
    stream = cluster.stub(token).StartCapture(request, timeout=60)
    next(stream)
    cluster.write_status("none", phase="Failed", message="no rank is slow now")
    error = refusal(lambda: stream)
    assert error.code() is Code.FAILED_PRECONDITION and error.details() == "no rank is slow now"


def test_what_the_api_server_refuses_is_told_and_recorded(cluster: Cluster, audited: Audited) -> None:
    cluster.refusal = ApiError(403, "Forbidden", "exceeded quota")
    token = cluster.may("ada", "create")
    error = refusal(lambda: cluster.stub(token).StartCapture(START))
    assert error.code() is Code.FAILED_PRECONDITION and "exceeded quota" in error.details()
    assert [(record["event"], record.get("result")) for record in audited()] == [
        ("asked", None),
        ("refused", "Forbidden"),
    ]


def test_cancelling_says_who_and_keeps_the_object(cluster: Cluster, audited: Audited) -> None:
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


def test_nobody_fills_the_api_server_with_captures(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster.captures, "_asks", KeyedTokenBuckets(2, 0.0))
    token = cluster.may("ada", "create")
    for _ in range(2):
        next(cluster.stub(token).StartCapture(START))
    assert refusal(lambda: cluster.stub(token).StartCapture(START)).code() is Code.RESOURCE_EXHAUSTED
    assert len(cluster.documents) == 2
    next(cluster.stub(cluster.may("bob", "create")).StartCapture(START))


def test_a_trace_download_resumes_at_an_offset_and_is_audited(cluster: Cluster, audited: Audited) -> None:
    stub = cluster.stub(begun(cluster))
    parts = list(stub.DownloadArtifact(pb.DownloadArtifactRequest(id="lab/mine", rank=0)))
    rest = list(stub.DownloadArtifact(pb.DownloadArtifactRequest(id="lab/mine", rank=0, offset=3)))
    assert [part.chunk for part in (*parts, *rest)] == [b"trace", b"ce"]
    (download,) = [record for record in audited() if record["event"] == "downloaded"]
    assert (download["user"], download["capture"], download["ranks"]) == ("ada", "mine", "0")
