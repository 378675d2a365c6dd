from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from rankscope.operator.access.guard import Credentials, Guard
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.console_access import CallerChannels, ConsoleAccess
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from tests.support.audit_records import Audited
from tests.unit.operator.access.fake_cluster import Cluster, refusal

LIST = pb.ListCapturesRequest(job="lab/")
Code = grpc.StatusCode


@pytest.fixture
def channels(cluster: Cluster) -> Iterator[CallerChannels]:
    made = CallerChannels(cluster.authentication, cluster.handlers, CaptureAudit())
    made.start()
    yield made
    made.stop()


def code(channel: grpc.Channel) -> grpc.StatusCode:
    refused: grpc.StatusCode = refusal(lambda: CaptureServiceStub(channel).ListCaptures(LIST, timeout=30)).code()
    return refused


def test_a_channel_has_its_callers_rights_and_audit_name(
    cluster: Cluster, channels: CallerChannels, audited: Audited
) -> None:
    for token, refused in ((cluster.may("bob", "get"), Code.PERMISSION_DENIED), ("forged", Code.UNAUTHENTICATED)):
        with channels.of(Credentials([f"Bearer {token}"]), "10.0.0.7") as opened, opened() as channel:
            assert code(channel) is refused
    shown = Credentials([f"Bearer {cluster.may('ada', 'list')}"])
    with channels.of(shown, "10.0.0.8") as opened, opened() as channel:
        CaptureServiceStub(channel).ListCaptures(LIST, timeout=30)
    assert [(each.get("user", ""), each["address"], each["result"]) for each in audited()] == [
        ("bob", "10.0.0.7", "PermissionDenied"),
        ("", "10.0.0.7", "Unauthenticated"),
    ]


def test_a_ticket_ends_with_its_request_on_a_private_socket(cluster: Cluster) -> None:
    channels = CallerChannels(cluster.authentication, cluster.handlers, CaptureAudit())
    channels.start()
    token = cluster.may("ada", "list")
    with channels.of(Credentials([f"Bearer {token}"]), "10.0.0.7") as opened:
        pass
    with opened() as channel:
        assert code(channel) is Code.UNAUTHENTICATED
    # Nor does a token open it: the socket takes tickets.
    ours = grpc.local_channel_credentials(grpc.LocalConnectionType.UDS)
    shown = grpc.composite_channel_credentials(ours, grpc.access_token_call_credentials(token))
    with grpc.secure_channel(channels._target, shown) as channel:
        assert code(channel) is Code.UNAUTHENTICATED
    folder = Path(channels._folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    channels.stop()
    assert not folder.exists()


def test_a_console_request_calls_the_api_as_its_caller(cluster: Cluster, channels: CallerChannels) -> None:
    access = ConsoleAccess(Guard(cluster.authentication, CaptureAudit()), channels)
    codes: list[grpc.StatusCode | None] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with access.channel(Request(scope)) as channel:
            for job in ("lab/", "other/"):
                try:
                    CaptureServiceStub(channel).ListCaptures(pb.ListCapturesRequest(job=job), timeout=30)
                    codes.append(None)
                except grpc.RpcError as error:
                    codes.append(error.code())

    async def nothing(message: Message | None = None) -> Any:
        return {"type": "http.disconnect"}

    scope = {
        "type": "http",
        "path": "/api/v1/captures",
        "headers": [(b"authorization", f"Bearer {cluster.may('ada', 'list')}".encode())],
        "client": ("10.0.0.7", 1234),
    }
    asyncio.run(access.guarded(app)(scope, nothing, nothing))
    assert codes == [None, Code.PERMISSION_DENIED]
