from __future__ import annotations

import logging
import threading
from collections.abc import Iterator

import grpc
import pytest

from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.access import capture_service as people_captures
from rankscope.operator.access import guard as people_guarding
from rankscope.operator.access.api_server import UserApiServer, UserApiSettings
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.kube.api_client import UnreachableError
from rankscope.v1 import capture_service_pb2 as pb
from tests.support.audit_records import Audited
from tests.support.waiting import wait_until
from tests.unit.operator.access.fake_cluster import RUN, START, Cluster, begun, every_call, refusal

Code = grpc.StatusCode


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


def test_an_unknown_token_opens_nothing_and_is_never_logged(
    cluster: Cluster, caplog: pytest.LogCaptureFixture, audited: Audited
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


def test_strangers_of_one_address_cannot_make_the_api_server_work(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(cluster.authentication, "_strangers", KeyedTokenBuckets(5, 1.0, lambda: now[0]))
    token = begun(cluster)
    get = pb.GetCaptureRequest(id="lab/mine")

    def guess(number: int) -> grpc.StatusCode:
        return refusal(lambda: cluster.stub(f"guess{number}").GetCapture(get)).code()

    codes = [guess(number) for number in range(10)]
    assert codes == [Code.UNAUTHENTICATED] * 5 + [Code.RESOURCE_EXHAUSTED] * 5
    assert sum(each.startswith("guess") for each in cluster.reviewed) == 5
    # Who was known before is served, and others are soon.
    assert cluster.stub(token).GetCapture(get).capture.id == "lab/mine"
    now[0] = 2.0
    assert [guess(number) for number in (20, 21, 22)] == [*[Code.UNAUTHENTICATED] * 2, Code.RESOURCE_EXHAUSTED]
    now[0] = 3.0
    assert cluster.stub(cluster.may("bob", "get")).GetCapture(get).capture.id == "lab/mine"
    # A caller that is let in was no stranger, and an outage makes nobody one.
    cluster.error = UnreachableError("away")
    assert {guess(number) for number in range(30, 40)} == {Code.UNAVAILABLE}
    cluster.error = None
    assert guess(40) is Code.UNAUTHENTICATED
    assert cluster.guard.counts["GetCapture", "RESOURCE_EXHAUSTED"] == 6
    assert cluster.guard.counts["GetCapture", "OK"] == 2


def test_a_client_with_an_old_token_shuts_out_no_other(cluster: Cluster) -> None:
    old = cluster.stub("old-token")
    for _ in range(30):
        assert refusal(lambda: old.GetCapture(pb.GetCaptureRequest(id="lab/mine"))).code() is Code.UNAUTHENTICATED
    token = begun(cluster)
    assert cluster.stub(token).GetCapture(pb.GetCaptureRequest(id="lab/mine")).capture.id == "lab/mine"


def test_a_refusal_does_not_reveal_whether_the_object_exists(cluster: Cluster, audited: Audited) -> None:
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


def test_all_namespaces_are_listed_only_with_the_right_to_all(cluster: Cluster) -> None:
    token = begun(cluster)
    error = refusal(lambda: cluster.stub(token).ListCaptures(pb.ListCapturesRequest()))
    assert error.code() is Code.PERMISSION_DENIED
    warden = cluster.may("warden", "list", namespace="")
    assert [one.id for one in cluster.stub(warden).ListCaptures(pb.ListCapturesRequest()).captures] == ["lab/mine"]
    assert [one.id for one in cluster.stub(token).ListCaptures(pb.ListCapturesRequest(job="lab/")).captures] == [
        "lab/mine"
    ]


def test_garbage_is_no_request_and_not_worth_a_line(cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
    token = cluster.may("ada", "get")
    with grpc.insecure_channel(f"127.0.0.1:{cluster.server.port}") as channel:
        for method in ("GetCapture", "StartCapture"):
            call = channel.unary_unary(f"/rankscope.v1.CaptureService/{method}")
            error = refusal(
                lambda call=call: call(b"\xff\xff", metadata=[("authorization", f"Bearer {token}")], timeout=30)
            )
            assert error.code() is Code.INVALID_ARGUMENT, error
        error = refusal(lambda: channel.unary_unary("/rankscope.v1.RankService/ListRanks")(b"", timeout=30))
        assert error.code() is Code.UNIMPLEMENTED
    ours = [record for record in caplog.records if record.name.startswith(("rankscope.operator.access", "grpc"))]
    assert [record for record in ours if record.levelno >= logging.WARNING] == []


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

    def is_served() -> bool:
        try:
            next(cluster.stub(token).StartCapture(START))
        except grpc.RpcError as error:
            assert error.code() is Code.RESOURCE_EXHAUSTED
            return False
        return True

    wait_until(is_served)


def test_service_accounts_of_a_namespace_share_one_callers_limits(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(people_guarding, "CALLS_OF_ONE", 2)

    def account(namespace: str, name: str) -> str:
        user = f"system:serviceaccount:{namespace}:{name}"
        cluster.may(user, "create")
        cluster.tokens[f"token-of-{namespace}-{name}"] = user
        return f"token-of-{namespace}-{name}"

    accounts = [account("lab", f"a{number}") for number in range(3)]
    streams = [cluster.stub(token).StartCapture(START) for token in accounts[:2]]
    for stream in streams:
        next(stream)
    assert refusal(lambda: cluster.stub(accounts[2]).StartCapture(START)).code() is Code.RESOURCE_EXHAUSTED
    next(cluster.stub(account("lab2", "a0")).StartCapture(START))


def test_a_connection_silent_after_the_head_is_closed(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
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
    monkeypatch.setattr("rankscope.operator.access.token_review.YES_SECONDS", 0.0)
    token = cluster.may("ada", "create")
    stream = cluster.stub(token).StartCapture(START, timeout=60)
    next(stream)
    del cluster.tokens[token]
    assert refusal(lambda: stream).code() is Code.UNAUTHENTICATED


def test_without_tls_only_loopback_is_listened_on(cluster: Cluster) -> None:
    handler = cluster.captures.handler(
        people_guarding.Guard(people_guarding.TokenAuthentication(cluster.reviews), CaptureAudit())
    )
    for host in ("0.0.0.0", "::", "10.0.0.7", "operator.example"):
        with pytest.raises(ValueError, match="--api-certificate"):
            UserApiServer(UserApiSettings(host, 0), [handler], None)
