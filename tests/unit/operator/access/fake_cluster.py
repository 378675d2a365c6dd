"""A cluster in memory for the API for people: tokens, rights, runs and Capture objects; the gRPC server is real."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import grpc
import pytest

from rankscope.operator.access import token_review
from rankscope.operator.access.api_server import UserApiServer, UserApiSettings
from rankscope.operator.access.capture_service import UserCaptures
from rankscope.operator.access.guard import Guard, TokenAuthentication
from rankscope.operator.access.profile_relay import ProfileRelay
from rankscope.operator.access.profile_service import UserProfiles
from rankscope.operator.access.recording_service import UserRecordings
from rankscope.operator.access.run_service import UserJobs
from rankscope.operator.access.token_review import Reviews
from rankscope.operator.access.trace_relay import Traces
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.daemon_calls import DaemonCalls
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.kube.api_client import Api, ApiError, ConflictError
from rankscope.operator.kube.objects import CaptureObject, RunObject, read_capture_object, read_run_object
from rankscope.operator.runs.inventory import RunNodes
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

RUN = "lab/pytorchjob-llama"
START = pb.StartCaptureRequest(job=RUN, ranks="all", steps=3, reason="slow since noon")

Right = tuple[str, str, str]  # user, verb (verb/subresource), namespace


@dataclass
class FakeTraces:
    said: Mapping[str, pb.Capture] = field(default_factory=dict)
    content: bytes = b"trace"
    removed: list[str] = field(default_factory=list)

    def details(self, thing: CaptureObject) -> Mapping[str, pb.Capture]:
        return self.said

    def remove(self, thing: CaptureObject) -> None:
        self.removed.append(thing.name)

    def download(
        self, thing: CaptureObject, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        yield pb.DownloadArtifactResponse(chunk=self.content[request.offset :], total_bytes=len(self.content))


@dataclass
class Cluster:
    tokens: dict[str, str] = field(default_factory=dict)  # token for our audience to user
    rights: set[Right] = field(default_factory=set)
    runs: set[tuple[str, str]] = field(default_factory=lambda: {("lab", "pytorchjob-llama"), ("other", "secret-run")})
    error: Exception | None = None
    refusal: ApiError | None = None  # of what is to be made
    traces: FakeTraces = field(default_factory=FakeTraces)
    reviewed: list[str] = field(default_factory=list)
    states: list[JobState] = field(default_factory=list)
    run_objects: list[RunObject] = field(default_factory=list)
    nodes: dict[str, RunNodes] = field(default_factory=dict)  # by job
    addresses: dict[str, str] = field(default_factory=dict)  # of the daemons, by node
    is_listed = True

    def __post_init__(self) -> None:
        self.documents: dict[str, dict[str, Any]] = {}  # Captures by uid
        self._numbers = itertools.count(1)
        audit = CaptureAudit()
        # On a clock that stands still: what is remembered is remembered however slow the machine is.
        self.reviews = Reviews(cast(Api, self), "rankscope", lambda: 0.0)
        self.captures = UserCaptures(cast(Api, self), self, self.object_of, cast(Traces, self.traces), audit)
        self.authentication = TokenAuthentication(self.reviews)
        self.guard = Guard(self.authentication, audit)
        self.hangs = HangStore(FolderFiles(None))
        self.reports = FleetReports(FleetUsage(LostSeconds()))
        self.jobs = UserJobs(lambda: self.states, self.hangs, self.reports, audit, lambda: self.run_objects)
        self.relay = ProfileRelay(DaemonCalls(), lambda: self.addresses)
        self.profiles = UserProfiles(self, self.relay, audit)
        self.recordings = UserRecordings(self, DaemonCalls(), lambda: self.addresses, audit)
        self.server = UserApiServer(UserApiSettings("127.0.0.1", 0), self.handlers(self.guard), None)
        self.server.start()

    def handlers(self, guard: Guard) -> list[grpc.GenericRpcHandler]:
        return [part.handler(guard) for part in (self.captures, self.profiles, self.recordings, self.jobs)]

    def stub(self, token: str | None = None, *more: tuple[str, str]) -> CaptureServiceStub:
        return CaptureServiceStub(self.channel(token, *more))

    def channel(self, token: str | None = None, *more: tuple[str, str]) -> grpc.Channel:
        metadata = [*([("authorization", f"Bearer {token}")] if token is not None else []), *more]
        channel = grpc.insecure_channel(f"127.0.0.1:{self.server.port}", [("grpc.use_local_subchannel_pool", 1)])
        return grpc.intercept_channel(channel, _Showing(metadata))

    @staticmethod
    def showing(token: str) -> _Showing:
        return _Showing([("authorization", f"Bearer {token}")])

    def may(self, user: str, *verbs: str, namespace: str = "lab") -> str:
        """The user's token."""
        self.rights |= {(user, verb, namespace) for verb in verbs}
        self.tokens[f"token-of-{user}"] = user
        return f"token-of-{user}"

    def write_status(self, name: str, **status: Any) -> None:
        document = next(one for one in self.documents.values() if one["metadata"]["name"] == name)
        document["status"] = {**document.get("status", {}), **status}
        document["metadata"]["resourceVersion"] = str(next(self._numbers))

    # --- as the API server is asked ---

    def create(self, path: str, body: Any, **query: Any) -> dict[str, Any]:
        if self.error is not None:
            raise self.error
        if path == token_review.TOKEN_REVIEWS:
            self.reviewed.append(body["spec"]["token"])
            user = self.tokens.get(body["spec"]["token"])
            if user is None:
                return {"status": {"authenticated": False, "error": "SECRET DETAILS"}}
            return {"status": {"authenticated": True, "user": {"username": user}, "audiences": ["rankscope"]}}
        if path == token_review.ACCESS_REVIEWS:
            wanted = body["spec"]["resourceAttributes"]
            verb = "/".join(part for part in (wanted["verb"], wanted.get("subresource")) if part)
            right = (body["spec"]["user"], verb, wanted.get("namespace", ""))
            return {"status": {"allowed": right in self.rights}}
        return self._make(body)

    def _make(self, body: Any) -> dict[str, Any]:
        if self.refusal is not None:
            raise self.refusal
        place = (body["metadata"]["namespace"], body["metadata"]["name"])
        if place in {(one["metadata"]["namespace"], one["metadata"]["name"]) for one in self.documents.values()}:
            raise ConflictError(409, "AlreadyExists", "there is one")
        number = str(next(self._numbers))
        metadata = {**body["metadata"], "uid": f"u{number}", "resourceVersion": number}
        metadata["creationTimestamp"] = "2026-03-01T10:00:00Z"
        self.documents[metadata["uid"]] = {**body, "metadata": metadata}
        return self.documents[metadata["uid"]]

    def merge(self, path: str, body: Any, **query: Any) -> dict[str, Any]:
        document = self.documents[body["metadata"]["uid"]]
        document["metadata"]["annotations"] |= body["metadata"]["annotations"]
        return document

    def delete(self, path: str, body: Any = None, **query: Any) -> dict[str, Any]:
        return self.documents.pop(body["preconditions"]["uid"])

    def find(self, uid: str) -> CaptureObject | None:
        return self.objects.get(uid)

    @property
    def objects(self) -> Mapping[str, CaptureObject]:
        read = {uid: read_capture_object(document) for uid, document in self.documents.items()}
        return {uid: thing for uid, thing in read.items() if thing is not None}

    def nodes_of(self, job: str) -> RunNodes:
        return self.nodes.get(job, RunNodes({}, {}))

    def object_of(self, namespace: str, name: str) -> RunObject | None:
        if (namespace, name) not in self.runs:
            return None
        metadata = {"namespace": namespace, "name": name, "uid": "run-uid"}
        return read_run_object({"metadata": metadata})


class _Showing(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]  # untyped
    def __init__(self, metadata: list[tuple[str, str]]) -> None:
        self._metadata = metadata

    def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), *self._metadata]), request)

    intercept_unary_stream = intercept_unary_unary


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
