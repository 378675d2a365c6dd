"""Calls to the daemons about captures. Blocking; each call has its own deadline."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.message import Message
from msgspec import structs

from rankscope.common.text import one_line
from rankscope.common.tls import Read
from rankscope.operator.certificates.roles import DAEMON_NAME_OPTION, daemon_credentials
from rankscope.operator.kube.objects import CaptureObject
from rankscope.operator.kube.resources import CaptureSpec
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.job_service_pb2 import Verdict

CALL_SECONDS = 10.0
_REFUSALS = frozenset(
    {
        grpc.StatusCode.FAILED_PRECONDITION,
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNIMPLEMENTED,
        grpc.StatusCode.PERMISSION_DENIED,
        grpc.StatusCode.UNAUTHENTICATED,
    }
)


class DaemonRefusedError(Exception):
    """The daemon refused, with a reason."""


class DaemonAwayError(Exception):
    """The daemon did not answer: to be tried again."""


class DaemonCalls:
    def __init__(self, tls: Read | None = None) -> None:
        self._tls = tls

    def start(
        self,
        address: str,
        capture_id: str,
        job: str,
        pods: Mapping[int, str],
        spec: CaptureSpec,
        start_unix_millis: int,
        why: str,
        verdict: Verdict,
    ) -> pb.Capture:
        """`pods` is the rank to its pod's uid. The same id again is the same capture: a restarted operator may request
        it twice."""
        request = pb.StartCaptureRequest(
            id=capture_id,
            job=job,
            ranks=",".join(map(str, sorted(pods))),
            pods=pods,
            options=pb.CaptureOptions(**structs.asdict(spec.options)),
            reason=why,
            start_unix_millis=start_unix_millis,
            patience_seconds=spec.patience_seconds,
            verdict=verdict,
        )
        if isinstance(spec.steps, int):
            request.steps = spec.steps
        elif isinstance(spec.seconds, float):
            request.seconds = spec.seconds
        with self.channel(address) as channel:
            try:
                call = CaptureServiceStub(channel).StartCapture(request, timeout=CALL_SECONDS)
                first: pb.StartCaptureResponse = next(iter(call))
                call.cancel()
            except grpc.RpcError as error:
                raise _error(error) from error
            except StopIteration:
                raise DaemonAwayError("the daemon reported nothing about the capture") from None
        return first.capture

    def get(self, address: str, capture_id: str) -> pb.Capture | None:
        """None: the daemon knows of no such capture."""
        answer: pb.GetCaptureResponse | None = self._call(address, "GetCapture", pb.GetCaptureRequest(id=capture_id))
        return None if answer is None else answer.capture

    def cancel(self, address: str, capture_id: str) -> None:
        self._call(address, "CancelCapture", pb.CancelCaptureRequest(id=capture_id))

    def delete(self, address: str, capture_id: str) -> None:
        self._call(address, "DeleteCapture", pb.DeleteCaptureRequest(id=capture_id))

    def _call(self, address: str, method: str, request: Message) -> Any:
        """None: the daemon knows of no such capture."""
        with self.channel(address) as channel:
            try:
                return getattr(CaptureServiceStub(channel), method)(request, timeout=CALL_SECONDS)
            except grpc.RpcError as error:
                if error.code() is grpc.StatusCode.NOT_FOUND:
                    return None
                raise _error(error) from error

    def channel(self, address: str) -> grpc.Channel:
        if self._tls is None:
            return grpc.insecure_channel(address)
        try:
            shown = daemon_credentials(self._tls)
        except OSError as error:
            raise DaemonAwayError(f"the daemon cannot be asked: {error}") from error
        return grpc.secure_channel(address, shown, [DAEMON_NAME_OPTION])


def _error(error: grpc.RpcError) -> Exception:
    text = one_line(error.details() or error.code().name, 500)
    return DaemonRefusedError(text) if error.code() in _REFUSALS else DaemonAwayError(text)


log = logging.getLogger(__name__)

# How long a daemon may be away before its ranks fail, and how long a deletion waits for it.
AWAY_SECONDS = 120.0
# A start that is nearer than this is no longer requested: the daemon would refuse it.
LAST_CALL_SECONDS = 4.0
# For so long before that, ranks that have not reported for a moment are waited for.
WAITING_SECONDS = 2.0
CALLS_AT_ONCE = 64

CANCELLED, FAILED = pb.CAPTURE_STATE_CANCELLED, pb.CAPTURE_STATE_FAILED
FINAL = frozenset({pb.CAPTURE_STATE_ANALYSED, FAILED, CANCELLED})
UNBEGUN = "cancelled before the daemon was asked"


@dataclass(frozen=True)
class Target:
    """The job of a run as it is now, from its own pods."""

    job: str  # as the daemons call it
    identities: Mapping[int, RankIdentity]
    verdict: Verdict


class CaptureRequests:
    """The calls of one capture to all of its daemons, at the same time: one that is away must not make the others miss
    their common start. Thread-safe. Remembers only since when a daemon is away."""

    def __init__(
        self,
        calls: DaemonCalls,
        addresses: Callable[[], Mapping[str, str]],
        target_of: Callable[[CaptureObject], Target | None],
        starts: Callable[[CaptureObject], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`starts` is called before a daemon is asked to record."""
        self._calls = calls
        self._addresses = addresses
        self._target_of = target_of
        self._starts = starts
        self._clock = clock
        self._lock = threading.Lock()
        self._away_since: dict[tuple[str, str], float] = {}  # uid of the capture, node
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="rankscope-asking")

    def progress(self, thing: CaptureObject, nodes: Mapping[str, Sequence[int]]) -> Mapping[str, pb.Capture | str]:
        """The report of each node's daemon, or why it delivers nothing. Missing nodes are tried again later."""
        answers = zip(nodes, self._pool.map(lambda item: self._progress_of(thing, *item), nodes.items()), strict=True)
        return {node: answer for node, answer in answers if answer is not None}

    def clear(self, thing: CaptureObject) -> bool:
        """Cancels the capture and deletes its traces if requested. False: a daemon has to be asked again."""
        return all(list(self._pool.map(lambda node: self._is_cleared(thing, node), thing.nodes)))

    def forget(self, uid: str) -> None:
        with self._lock:
            for key in [key for key in self._away_since if key[0] == uid]:
                del self._away_since[key]

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _progress_of(self, thing: CaptureObject, node: str, ranks: Sequence[int]) -> pb.Capture | str | None:
        try:
            capture = self._ask(thing, node, ranks)
        except DaemonRefusedError as error:
            return str(error)
        except DaemonAwayError as error:
            return f"the daemon of {node} is away: {error}" if self._is_given_up(thing, node) else None
        with self._lock:
            self._away_since.pop((thing.uid, node), None)
        return capture

    def _ask(self, thing: CaptureObject, node: str, ranks: Sequence[int]) -> pb.Capture | None:
        spec, start_unix_millis, address = thing.spec, thing.status.start_unix_ms, self._address(node)
        assert spec is not None and isinstance(start_unix_millis, int)
        known = self._calls.get(address, thing.capture_id)
        if known is not None:
            if thing.is_cancelled and known.state not in FINAL:
                self._calls.cancel(address, thing.capture_id)
            return known
        if thing.is_cancelled:
            return pb.Capture(ranks=[pb.RankCapture(rank=rank, state=CANCELLED, error=UNBEGUN) for rank in ranks])
        left_seconds = start_unix_millis / 1000 - LAST_CALL_SECONDS - self._clock()
        if left_seconds < 0:
            raise DaemonRefusedError("the daemon does not have it: it was away when the capture had to be requested")
        target = self._target_of(thing)
        pods = {} if target is None else _pods_on(target, ranks, node)
        if target is None or len(pods) < len(ranks):
            if left_seconds > WAITING_SECONDS:
                return None
            if target is None or not pods:
                raise DaemonRefusedError(f"no rank of the capture runs on {node} any more; start another capture")
        why = f"Capture {thing.place}"
        if thing.requested_by:
            why += f" by {thing.requested_by}"
        if isinstance(spec.reason, str) and spec.reason:
            why += f": {spec.reason}"
        self._starts(thing)
        if not isinstance(spec.steps, int) and not isinstance(spec.seconds, float):
            spec = structs.replace(spec, steps=thing.status.steps, seconds=thing.status.seconds)
        capture = self._calls.start(
            address, thing.capture_id, target.job, pods, spec, start_unix_millis, why, target.verdict
        )
        gone = [rank for rank in ranks if rank not in pods]
        capture.ranks.extend(pb.RankCapture(rank=rank, state=FAILED, error=f"not on {node} any more") for rank in gone)
        return capture

    def _is_cleared(self, thing: CaptureObject, node: str) -> bool:
        try:
            address = self._address(node)
            if not thing.is_finished:
                self._calls.cancel(address, thing.capture_id)
            if thing.spec is not None and thing.spec.delete_artifacts:
                self._calls.delete(address, thing.capture_id)
        except DaemonAwayError as error:
            if not self._is_given_up(thing, node):
                return False
            log.warning("capture %s: traces may be left on %s: %s", thing.place, node, error)
        except DaemonRefusedError as error:
            log.warning("capture %s: %s: %s", thing.place, node, error)
        return True

    def _address(self, node: str) -> str:
        address = self._addresses().get(node)
        if address is None:
            raise DaemonAwayError("there is no daemon on this node")
        return address

    def _is_given_up(self, thing: CaptureObject, node: str) -> bool:
        with self._lock:
            since = self._away_since.setdefault((thing.uid, node), self._clock())
        return self._clock() - since > AWAY_SECONDS


def _pods_on(target: Target, ranks: Sequence[int], node: str) -> dict[int, str]:
    """The uid of the pod of each rank on the node; empty where there are no pods."""
    found = {rank: target.identities.get(rank) for rank in ranks}
    return {rank: identity.pod for rank, identity in found.items() if identity is not None and identity.node == node}
