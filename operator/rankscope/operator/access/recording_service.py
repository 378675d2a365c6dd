"""RecordingService for users: the records of a run, as the daemons of all its nodes send them.

A recording needs what a capture needs. Tables are passed on unread: those who ask read and check them. A node answers
for ranks that run on it and for no others."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Final

import grpc

from rankscope.common.text import one_line, printable
from rankscope.operator.access.guard import Call, Guard, RefusedError
from rankscope.operator.access.profile_relay import JobNodes
from rankscope.operator.access.profile_service import KnownRuns
from rankscope.operator.access.requests import audited, bad, check_ranks, no_run, place_of_run, starting
from rankscope.operator.access.token_review import Access
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.captures.daemon_calls import DaemonAwayError, DaemonCalls
from rankscope.v1 import recording_service_pb2 as pb
from rankscope.v1.recording_service_pb2_grpc import RecordingServiceStub

SERVICE: Final = pb.DESCRIPTOR.services_by_name["RecordingService"].full_name
MAX_SECONDS: Final = 600.0  # as the daemons have it
SLACK_SECONDS: Final = 10.0
MAX_NODES: Final = 64
MAX_PODS: Final = 500
# Under way, of all users and of a tenant.
MAX_RECORDINGS: Final = 4
MAX_RECORDINGS_OF_ONE: Final = 2
# Answers that wait for the caller. Each has up to 4 MiB; a daemon waits for its turn, and its ranks are not affected.
MAX_WAITING: Final = 4
TEXT_CHARACTERS: Final = 300
Code = grpc.StatusCode


class UserRecordings:
    def __init__(
        self,
        runs: KnownRuns,
        calls: DaemonCalls,
        addresses: Callable[[], Mapping[str, str]],
        audit: CaptureAudit,
        has_namespaces: bool = True,
        plain_runs: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """As for UserProfiles."""
        self._runs = runs
        self._calls = calls
        self._addresses = addresses
        self._audit = audit
        self._has_namespaces = has_namespaces
        self._plain_runs = plain_runs
        self._lock = threading.Lock()
        self._under_way: Counter[str] = Counter()  # by tenant

    def handler(self, guard: Guard) -> grpc.GenericRpcHandler:
        methods = {"RecordRun": guard.streaming("RecordRun", pb.RecordRunRequest, self.record)}
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def record(self, request: pb.RecordRunRequest, call: Call) -> Iterator[pb.RecordRunResponse]:
        place = place_of_run(request.job, self._has_namespaces, self._plain_runs())
        call.require(Access("create", place.namespace))
        check_ranks(request.ranks)
        if not 0 < request.seconds <= MAX_SECONDS:  # also refuses NaN
            raise bad(f"record between 0 and {MAX_SECONDS:.0f} s, not {request.seconds:g}")
        if not self._runs.is_listed:
            raise starting()
        target = JobNodes(place.job, self._runs.nodes_of(place.job))
        nodes = target.of_ranks(request.ranks)
        if not nodes:
            raise no_run(place)
        if len(nodes) > MAX_NODES:
            raise bad(f"the ranks are on {len(nodes)} nodes, of which {MAX_NODES} can be recorded; name fewer --ranks")
        with self._counted(call.caller.tenant):
            self._audit.write(call.record("asked", **audited("recording", place, request.ranks)))
            addresses = self._addresses()
            for node in nodes:
                if node not in addresses:
                    yield pb.RecordRunResponse(problems=[f"{node}: there is no daemon on this node now"])
            yield from self._joined(
                request, target, {node: addresses[node] for node in nodes if node in addresses}, call
            )

    @property
    def under_way(self) -> int:
        return self._under_way.total()

    @contextmanager
    def _counted(self, tenant: str) -> Iterator[None]:
        with self._lock:
            if self._under_way[tenant] >= MAX_RECORDINGS_OF_ONE or self._under_way.total() >= MAX_RECORDINGS:
                text = f"{self._under_way[tenant]} recordings of yours are under way, {self._under_way.total()} of all"
                raise RefusedError(Code.RESOURCE_EXHAUSTED, f"{text}; wait for one")
            self._under_way[tenant] += 1
        try:
            yield
        finally:
            with self._lock:
                self._under_way[tenant] -= 1

    def _joined(
        self, request: pb.RecordRunRequest, target: JobNodes, addresses: Mapping[str, str], call: Call
    ) -> Iterator[pb.RecordRunResponse]:
        """The answers of all daemons as they come. Ends with the last daemon, or when the caller leaves."""
        answers: queue.Queue[pb.RecordRunResponse | None] = queue.Queue(MAX_WAITING)
        has_left = threading.Event()

        def put(answer: pb.RecordRunResponse | None) -> bool:
            while not has_left.is_set():
                try:
                    answers.put(answer, timeout=1.0)
                    return True
                except queue.Full:
                    continue
            return False

        def follow(node: str, address: str) -> None:
            try:
                for answer in self._of_node(node, address, request, target, has_left, call):
                    if not put(answer):
                        break
            finally:
                put(None)

        with ExitStack() as stack:
            stack.callback(has_left.set)
            for node, address in addresses.items():
                name = "rankscope-recording"
                threading.Thread(target=follow, args=(node, address), name=name, daemon=True).start()
            under_way = len(addresses)
            while under_way and call.context.is_active():
                try:
                    answer = answers.get(timeout=1.0)
                except queue.Empty:
                    continue
                if answer is None:
                    under_way -= 1
                else:
                    yield answer

    def _of_node(
        self,
        node: str,
        address: str,
        request: pb.RecordRunRequest,
        target: JobNodes,
        has_left: threading.Event,
        call: Call,
    ) -> Iterator[pb.RecordRunResponse]:
        pods = sorted(target.where.pods[node])[:MAX_PODS]
        request_to_node = pb.RecordRunRequest(job=target.job, ranks=request.ranks, pods=pods, seconds=request.seconds)
        owners, wanted = target.where.owners, frozenset(request.ranks)
        try:
            with self._calls.channel(address) as channel:
                answers = RecordingServiceStub(channel).RecordRun(
                    request_to_node, timeout=request.seconds + SLACK_SECONDS
                )
                call.context.add_callback(answers.cancel)
                for answer in answers:
                    own = [
                        one
                        for one in answer.ranks
                        if owners.get(one.rank, node) == node and (not wanted or one.rank in wanted)
                    ]
                    for records in own:
                        records.node, records.problem = node, printable(records.problem, TEXT_CHARACTERS)
                    yield pb.RecordRunResponse(ranks=own)
        except grpc.RpcError as error:
            if not has_left.is_set():
                yield _problem(node, error.details() or error.code().name)
        except (DaemonAwayError, OSError) as error:
            yield _problem(node, str(error))


def _problem(node: str, text: str) -> pb.RecordRunResponse:
    return pb.RecordRunResponse(problems=[f"{node}: {one_line(text, TEXT_CHARACTERS)}"])
