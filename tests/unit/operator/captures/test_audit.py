from __future__ import annotations

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rankscope.common.audit import AuditRecord
from rankscope.operator.captures.audit import REFUSALS_AT_ONCE, CaptureAudit
from rankscope.operator.captures.controller import CapturesController
from rankscope.operator.captures.daemon_calls import CaptureRequests, DaemonCalls, Target
from rankscope.operator.kube.leader_election import ShardLeases
from rankscope.operator.kube.objects import CaptureObject, read_capture_object
from rankscope.operator.kube.resources import CaptureStatus
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.job_service_pb2 import Verdict
from tests.support.audit_records import Audited


def capture(uid: str = "u1", **annotations: str) -> CaptureObject:
    held = {f"rankscope.dev/{name.replace('_', '-')}": value for name, value in annotations.items()}
    document = {
        "metadata": {
            "namespace": "lab",
            "name": "why",
            "uid": uid,
            "creationTimestamp": "2026-03-01T10:00:00Z",
            "annotations": held,
        },
        "spec": {"run": "llama", "ranks": "straggler", "seconds": 2.5, "reason": "slow", "options": {"stacks": True}},
        "status": {
            "phase": "Failed",
            "captureId": "k-u1",
            "startUnixMs": 1,
            "delivered": "0/1",
            "message": "the process ended",
            "ranks": [{"rank": 2, "node": "a", "state": "failed"}],
        },
    }
    made = read_capture_object(document)
    assert made is not None
    return made


def test_begin_and_end_are_recorded_once_with_request_and_choice(audited: Audited) -> None:
    audit, thing = CaptureAudit(names_are_stamped=True), capture(requested_by="ada")
    for _ in range(3):
        audit.begun(thing)
        audit.ended(thing, thing.status)
    begun, ended = audited()
    assert begun.pop("event") == "begun" and ended.pop("event") == "ended"
    assert (ended.pop("result"), ended.pop("message")) == ("Failed", "0/1 ranks delivered; the process ended")
    del begun["time"], ended["time"]
    assert (
        begun
        == ended
        == {
            "via": "kubectl",
            "user": "ada",
            "verified": True,
            "namespace": "lab",
            "run": "llama",
            "capture": "why",
            "id": "k-u1",
            "ranks": "2",
            "seconds": 2.5,
            "options": ["stacks"],
            "reason": "slow",
        }
    )


@pytest.mark.parametrize(
    ("annotations", "said"),
    [
        ({"requested_by": "ada"}, ("kubectl", "ada")),
        ({"requested_by": "ada", "via": "api"}, ("api", "ada")),
        ({"requested_by": "op", "trigger": "policy", "policy": "night"}, ("policy", "policy night")),
        ({"requested_by": "op", "trigger": "alert"}, ("alert", "alert")),
        ({}, ("kubectl", None)),
    ],
)
def test_it_is_told_how_it_was_asked_for(annotations: dict[str, str], said: Any, audited: Audited) -> None:
    thing = capture(**annotations)
    CaptureAudit(names_are_stamped=True).ended(thing, thing.status)
    (record,) = audited()
    assert (record["via"], record.get("user")) == said
    assert record["verified"] == (said[1] is not None)


def test_without_webhooks_only_names_we_wrote_are_verified(audited: Audited) -> None:
    audit = CaptureAudit(names_are_stamped=False)
    audit.vouch_for("ours")
    for thing in (capture("ours", requested_by="ada", via="api"), capture("theirs", requested_by="ada", via="api")):
        audit.ended(thing, thing.status)
    assert [record["verified"] for record in audited()] == [True, False]


def test_a_kubectl_requester_is_recorded_once_before_any_status(audited: Audited) -> None:
    audit = CaptureAudit(names_are_stamped=True)
    fresh = replace(capture(requested_by="ada"), status=CaptureStatus())
    for _ in range(3):
        audit.asked(fresh)
    (record,) = audited()
    assert (record["event"], record["user"], record["verified"]) == ("asked", "ada", True)
    assert (record["id"], record["ranks"]) == ("k-u1", "straggler")
    # The API, policies and alerts have their own records; a status was written by an operator that recorded it.
    for origin in ({"via": "api"}, {"trigger": "policy"}, {"trigger": "alert"}):
        audit.asked(replace(capture("u2", requested_by="ada", **origin), status=CaptureStatus()))
    audit.asked(replace(fresh, uid="u3", status=CaptureStatus(phase="Pending")))
    assert len(audited()) == 1


def test_the_same_refusal_is_told_once_a_minute(audited: Audited) -> None:
    now = [0.0]
    audit = CaptureAudit(monotonic_seconds=lambda: now[0])
    record = AuditRecord("refused", "api", "ada", address="10.0.0.7", namespace="lab", result="PermissionDenied")
    for _ in range(100):
        audit.refused(record)
    audit.refused(replace(record, namespace="other"))
    now[0] = 61.0
    audit.refused(record)
    assert [told["namespace"] for told in audited()] == ["lab", "other", "lab"]


def test_varied_refusals_of_one_caller_do_not_fill_the_log(audited: Audited) -> None:
    audit = CaptureAudit(monotonic_seconds=lambda: 0.0)
    record = AuditRecord("refused", "api", "mallory", address="10.0.0.7", result="PermissionDenied")
    for number in range(1000):
        audit.refused(replace(record, namespace=f"n-{number}"))
    audit.refused(replace(record, user="ada", namespace="lab"))
    told = audited()
    assert len(told) == REFUSALS_AT_ONCE + 2
    assert (told[-2]["user"], told[-2]["result"]) == ("mallory", "TooMany")
    assert (told[-1]["user"], told[-1]["result"]) == ("ada", "PermissionDenied")


@dataclass
class FakeCalls:
    known: pb.Capture | None
    done: list[str] = field(default_factory=list)

    def get(self, address: str, capture_id: str) -> pb.Capture | None:
        return self.known

    def cancel(self, address: str, capture_id: str) -> None:
        self.done.append("cancel")

    def start(self, *_: object) -> pb.Capture:
        self.done.append("start")
        return pb.Capture()


def test_a_cancelled_capture_is_stopped_if_running_otherwise_never_begun() -> None:
    running = pb.Capture(state=pb.CAPTURE_STATE_RUNNING)
    over = pb.Capture(state=pb.CAPTURE_STATE_ANALYSED)
    for known, cancel, done in (
        (running, "ada", ["cancel"]),
        (running, "", []),
        (over, "ada", []),
        (None, "ada", []),
        (None, "", ["recorded", "start"]),
    ):
        calls = FakeCalls(known)
        target = Target("team/run-x", {2: RankIdentity(rank=2, node="a", pod="p")}, Verdict())
        asking = CaptureRequests(
            cast(DaemonCalls, calls),
            lambda: {"a": "10.0.0.1:1"},
            lambda thing, target=target: target,
            lambda thing, calls=calls: calls.done.append("recorded"),
            clock=lambda: -100.0,
        )
        thing = capture(**({"cancel": cancel} if cancel else {}))
        answer = asking.progress(thing, {"a": [2]})["a"]
        asking.stop()
        assert calls.done == done
        if known is None and cancel:
            assert isinstance(answer, pb.Capture)
            assert [(rank.rank, rank.state) for rank in answer.ranks] == [(2, pb.CAPTURE_STATE_CANCELLED)]


def test_a_capture_deleted_while_waiting_has_a_last_record(audited: Audited) -> None:
    leases = cast(ShardLeases, SimpleNamespace(holds=lambda job: job == "lab/llama"))
    nothing = cast(Any, None)
    controller = CapturesController(nothing, nothing, leases, nothing, dict, dict, lambda job: None)
    waiting = replace(capture("waiting"), status=CaptureStatus(phase="Pending", message="waits for capture x"))
    elsewhere = replace(waiting, uid="elsewhere", namespace="other")
    for thing in (waiting, elsewhere, capture("over")):
        controller.changed(thing.uid, thing)
        controller.deleted(thing.uid)
        controller.deleted(thing.uid)
    controller.stop()
    (record,) = audited()
    assert (record["event"], record["result"], record["ranks"]) == ("ended", "Deleted", "straggler")
