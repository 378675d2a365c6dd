"""CaptureService for users: a call becomes a Capture object, and is answered from its status. Any replica can answer:
the one that holds the run carries it out, and all of them watch the objects."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import grpc
from msgspec import structs

from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.access.guard import Call, Guard, RefusedError
from rankscope.operator.access.requests import (
    Place,
    capture_name,
    document,
    no_run,
    place_of_capture,
    place_of_run,
    places_to_list,
    read_spec,
    spec_document,
    starting,
)
from rankscope.operator.access.token_review import Access
from rankscope.operator.access.trace_relay import Traces
from rankscope.operator.captures.audit import CaptureAudit, asked_for
from rankscope.operator.kube.api_client import ApiError, ConflictError, MissingError, ObjectApi, UnreachableError
from rankscope.operator.kube.objects import CANCEL, CaptureObject, RunObject, collection, read_capture_object
from rankscope.operator.kube.resources import CapturedRank
from rankscope.operator.kube.watch_cache import Watched
from rankscope.v1 import capture_service_pb2 as pb

MAX_WINDOWS = 20
MAX_NOTES = 32
NOTE_CHARACTERS = 1000


def answer(thing: CaptureObject, details: Mapping[str, pb.Capture] | None = None) -> pb.Capture:
    """`details` are the daemons' reports by node; a daemon is trusted only about ranks that ran on its node."""
    status = thing.status
    capture = pb.Capture(
        id=thing.place,
        job=thing.namespace if thing.spec is None else thing.job,
        state=state_of(thing),
        reason=thing.spec.reason if thing.spec is not None and isinstance(thing.spec.reason, str) else "",
        requested_unix_millis=round(thing.created_unix_seconds * 1000),
        requested_by=thing.requested_by,
        ranks=[_rank(rank, details or {}) for rank in status.ranks],
    )
    if isinstance(status.start_skew_ms, float):
        capture.start_skew_millis = status.start_skew_ms
    judged = next((one for one in (details or {}).values() if one.HasField("verdict")), None)
    if judged is not None:
        capture.verdict.CopyFrom(judged.verdict)
    said = [one for one in (details or {}).values() if one.HasField("join")]
    if len(said) == 1 and len({rank.node for rank in status.ranks}) == 1:
        capture.join.CopyFrom(said[0].join)
    else:
        # Of several nodes, the operator's findings: each daemon has compared its own ranks only.
        capture.notes.extend(status.findings[:MAX_NOTES])
    if isinstance(status.message, str) and status.message and not any(rank.error for rank in capture.ranks):
        capture.notes.append(status.message)
    return capture


def state_of(thing: CaptureObject) -> pb.CaptureState.ValueType:
    states = [_state(rank.state) for rank in thing.status.ranks]
    if thing.is_finished:
        if pb.CAPTURE_STATE_ANALYSED in states:
            return pb.CAPTURE_STATE_ANALYSED
        is_cancelled = thing.status.phase == "Cancelled"
        return pb.CAPTURE_STATE_CANCELLED if is_cancelled else pb.CAPTURE_STATE_FAILED
    return min((state for state in states if state < pb.CAPTURE_STATE_ANALYSED), default=pb.CAPTURE_STATE_ACCEPTED)


def _rank(rank: CapturedRank, details: Mapping[str, pb.Capture]) -> pb.RankCapture:
    node = rank.node if isinstance(rank.node, str) else ""
    said = next((one for one in details.get(node, pb.Capture()).ranks if one.rank == rank.rank), None)
    entry = pb.RankCapture(
        rank=rank.rank,
        node=node,
        backend=rank.backend if isinstance(rank.backend, str) else "",
        state=_state(rank.state),
        error=rank.error if isinstance(rank.error, str) else "",
        bytes=rank.bytes if isinstance(rank.bytes, int) else 0,
    )
    if isinstance(rank.steps, int):
        entry.steps = min(rank.steps, 2**32 - 1)
    if isinstance(rank.start_unix_ms, int):
        entry.start_unix_millis = rank.start_unix_ms
    if isinstance(rank.uri, str):
        # A path on the node is not a URI for others.
        entry.artifact = rank.uri
        entry.uri = rank.uri if "://" in rank.uri else ""
    if said is not None:
        _add(entry, said)
    return entry


def _add(entry: pb.RankCapture, said: pb.RankCapture) -> None:
    """Node and result come from the object, not from the daemon."""
    if said.HasField("step_times"):
        entry.step_times.CopyFrom(said.step_times)
    if said.HasField("summary"):
        entry.summary.CopyFrom(said.summary)
    entry.artifact = said.artifact or entry.artifact
    entry.pid = said.pid
    entry.notes.extend(note[:NOTE_CHARACTERS] for note in said.notes[:MAX_NOTES])
    entry.more_windows.extend(said.more_windows[:MAX_WINDOWS])


def _state(word: str) -> pb.CaptureState.ValueType:
    try:
        return pb.CaptureState.Value(f"CAPTURE_STATE_{word.upper()}")
    except ValueError:
        return pb.CAPTURE_STATE_UNSPECIFIED


log = logging.getLogger(__name__)

POLL_SECONDS = 0.25
# How long a created object may be missing from the watch.
UNSEEN_SECONDS = 30.0
RECHECK_SECONDS = 30.0
MAX_LISTED = 256
# Requests of one tenant: each is an object in the API server and two lines in the audit log.
ASKS_AT_ONCE = 30.0
ASKS_PER_SECOND = 0.2
SERVICE = pb.DESCRIPTOR.services_by_name["CaptureService"].full_name
Code = grpc.StatusCode


class UserCaptures:
    def __init__(
        self,
        api: ObjectApi,
        captures: Watched[CaptureObject],
        run_of: Callable[[str, str], RunObject | None],
        traces: Traces,
        audit: CaptureAudit,
        is_ready: Callable[[], bool] = lambda: True,
        has_namespaces: bool = True,
        plain_runs: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`has_namespaces` is False without Kubernetes: runs and captures have plain names there. `plain_runs` returns
        the names of the runs."""
        self._plain_runs = plain_runs
        self._api = api
        self._captures = captures
        self._run_of = run_of
        self._traces = traces
        self._audit = audit
        self._is_ready = is_ready
        self._has_namespaces = has_namespaces
        self._asks = KeyedTokenBuckets(ASKS_AT_ONCE, ASKS_PER_SECOND)  # by tenant
        self._lock = threading.Lock()
        self._made: dict[str, tuple[CaptureObject, float]] = {}  # by uid: not yet in the watch, and since when

    def handler(self, guard: Guard) -> grpc.GenericRpcHandler:
        methods = {
            "StartCapture": guard.streaming("StartCapture", pb.StartCaptureRequest, self.start),
            "GetCapture": guard.single("GetCapture", pb.GetCaptureRequest, self.get),
            "ListCaptures": guard.single("ListCaptures", pb.ListCapturesRequest, self.list),
            "CancelCapture": guard.single("CancelCapture", pb.CancelCaptureRequest, self.cancel),
            "DeleteCapture": guard.single("DeleteCapture", pb.DeleteCaptureRequest, self.delete),
            "DownloadArtifact": guard.streaming("DownloadArtifact", pb.DownloadArtifactRequest, self.download),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def start(self, request: pb.StartCaptureRequest, call: Call) -> Iterator[pb.StartCaptureResponse]:
        """The capture goes on when the caller leaves: GetCapture has the result."""
        place = place_of_run(request.job, self._has_namespaces, self._plain_runs())
        access = Access("create", place.namespace)
        call.require(access)
        spec = spec_document(request, place)
        self._require_ready()
        run = self._run_of(place.namespace, place.name)
        if run is None or run.deleting:
            raise no_run(place)
        if not self._asks.take(call.caller.tenant):
            text = f"{ASKS_AT_ONCE:g} captures asked for at once; one more every {1 / ASKS_PER_SECOND:g} s"
            raise RefusedError(Code.RESOURCE_EXHAUSTED, text)
        name = capture_name(request, time.time())
        record = asked_for(call.record("asked", namespace=place.namespace, capture=name), read_spec(spec))
        self._audit.write(record)
        try:
            thing = self._create(document(name, run, spec, call.caller))
        except ConflictError:
            thing = self._same(Place(place.namespace, name), spec, call)
        except UnreachableError as error:
            raise RefusedError(Code.UNAVAILABLE, "the API server does not answer; try again") from error
        except ApiError as error:
            self._audit.write(replace(record, event="refused", result=error.reason or str(error.status)))
            log.warning("capture %s of %s for %r: %s", name, request.job, call.caller.name, error)
            raise RefusedError(Code.FAILED_PRECONDITION, f"{error}"[:500]) from error
        yield from self._follow(thing, call, access)

    def get(self, request: pb.GetCaptureRequest, call: Call) -> pb.GetCaptureResponse:
        thing = self._found(request.id, call, "get")
        return pb.GetCaptureResponse(capture=answer(thing, self._traces.details(thing) if thing.is_finished else None))

    def list(self, request: pb.ListCapturesRequest, call: Call) -> pb.ListCapturesResponse:
        place = places_to_list(request.job, self._has_namespaces)
        call.require(Access("list", place.namespace))
        found = [
            thing
            for thing in self._all().values()
            if place.namespace in ("", thing.namespace)
            and (not place.name or (thing.spec is not None and thing.spec.run == place.name))
        ]
        found.sort(key=lambda thing: (thing.created_unix_seconds, thing.name), reverse=True)
        return pb.ListCapturesResponse(captures=[answer(thing) for thing in found[:MAX_LISTED]])

    def cancel(self, request: pb.CancelCaptureRequest, call: Call) -> pb.CancelCaptureResponse:
        thing = self._found(request.id, call, "delete")
        if not thing.is_finished and not thing.is_cancelled:
            self._audit.write(call.record("cancelled", namespace=thing.namespace, capture=thing.name))
            body = {"metadata": {"uid": thing.uid, "annotations": {CANCEL: call.caller.name[:256]}}}
            self._change(lambda: self._api.merge(thing.path, body))
        return pb.CancelCaptureResponse(capture=answer(thing))

    def delete(self, request: pb.DeleteCaptureRequest, call: Call) -> pb.DeleteCaptureResponse:
        thing = self._found(request.id, call, "delete")
        if not thing.is_finished:
            raise RefusedError(Code.FAILED_PRECONDITION, "the capture is under way; cancel it first")
        self._audit.write(call.record("deleted", namespace=thing.namespace, capture=thing.name))
        if thing.spec is None or not thing.spec.delete_artifacts:
            self._traces.remove(thing)
        self._change(lambda: self._api.delete(thing.path, {"preconditions": {"uid": thing.uid}}))
        return pb.DeleteCaptureResponse()

    def download(self, request: pb.DownloadArtifactRequest, call: Call) -> Iterator[pb.DownloadArtifactResponse]:
        thing = self._found(request.id, call, "get", "artifacts")
        access = Access("get", thing.namespace, subresource="artifacts")
        what = {"namespace": thing.namespace, "capture": thing.name, "ranks": str(request.rank)}
        self._audit.write_once_a_minute(call.record("downloaded", **what))
        checked = time.monotonic()
        for part in self._traces.download(thing, request, call.context):
            yield part
            if time.monotonic() - checked > RECHECK_SECONDS:
                checked = time.monotonic()
                call.recheck(access)

    def _follow(self, thing: CaptureObject, call: Call, access: Access) -> Iterator[pb.StartCaptureResponse]:
        """The capture now and at every change, until it is over."""
        checked = time.monotonic()
        yield pb.StartCaptureResponse(capture=answer(thing))
        while call.context.is_active() and not thing.is_finished:
            time.sleep(POLL_SECONDS)
            if time.monotonic() - checked > RECHECK_SECONDS:
                checked = time.monotonic()
                call.recheck(access)
            now = self._find(thing.uid)
            if now is None:
                gone = structs.replace(thing.status, phase="Cancelled", message="the Capture object was deleted")
                yield pb.StartCaptureResponse(capture=answer(replace(thing, status=gone)))
                return
            if now.version == thing.version:
                continue
            thing = now
            if not thing.is_finished:
                yield pb.StartCaptureResponse(capture=answer(thing))
        if thing.is_finished:
            if not thing.status.ranks:
                raise RefusedError(Code.FAILED_PRECONDITION, str(thing.status.message)[:1000])
            yield pb.StartCaptureResponse(capture=answer(thing, self._traces.details(thing)))

    def _create(self, body: dict[str, object]) -> CaptureObject:
        metadata = body["metadata"]
        assert isinstance(metadata, dict)
        made = read_capture_object(self._api.create(collection("captures", metadata["namespace"]), body))
        assert made is not None
        self._audit.vouch_for(made.uid)
        with self._lock:
            self._made[made.uid] = (made, time.monotonic())
        return made

    def _same(self, place: Place, spec: dict[str, object], call: Call) -> CaptureObject:
        """The capture of an earlier request of this caller with this id, perhaps to another replica."""
        give_up = time.monotonic() + UNSEEN_SECONDS
        while (thing := self._named(place)) is None:
            if time.monotonic() > give_up or not call.context.is_active():
                raise RefusedError(Code.UNAVAILABLE, "the capture of this id is being made or removed; try again")
            time.sleep(POLL_SECONDS)
        if thing.requested_by != call.caller.name[:256] or thing.spec != read_spec(spec):
            raise RefusedError(Code.ALREADY_EXISTS, "another capture has this id; choose another id")
        return thing

    def _all(self) -> Mapping[str, CaptureObject]:
        """By uid: those in the watch, and those just created."""
        self._require_ready()
        seen = self._captures.objects
        with self._lock:
            now = time.monotonic()
            self._made = {
                uid: (thing, since)
                for uid, (thing, since) in self._made.items()
                if uid not in seen and now - since < UNSEEN_SECONDS
            }
            return {**{uid: thing for uid, (thing, _) in self._made.items()}, **seen}

    def _require_ready(self) -> None:
        if not self._is_ready():
            raise starting()

    def _find(self, uid: str) -> CaptureObject | None:
        return self._captures.find(uid) or self._all().get(uid)

    def _named(self, place: Place) -> CaptureObject | None:
        everything = self._all().values()
        return next((one for one in everything if (one.namespace, one.name) == (place.namespace, place.name)), None)

    def _found(self, capture_id: str, call: Call, verb: str, subresource: str = "") -> CaptureObject:
        """Whether the capture exists is shown only to callers that may see it."""
        place = place_of_capture(capture_id, self._has_namespaces)
        call.require(Access(verb, place.namespace, subresource=subresource))
        thing = self._named(place)
        if thing is None:
            raise RefusedError(Code.NOT_FOUND, f"no capture {place}")
        return thing

    def _change(self, change: Callable[[], object]) -> None:
        try:
            change()
        except (MissingError, ConflictError):
            return  # deleted or replaced meanwhile
        except UnreachableError as error:
            raise RefusedError(Code.UNAVAILABLE, "the API server does not answer; try again") from error
        except ApiError as error:
            log.warning("%s", error)
            raise RefusedError(Code.FAILED_PRECONDITION, f"{error}"[:500]) from error
