"""Passes traces and their details from the daemons to users."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import grpc

from rankscope.common.text import one_line
from rankscope.operator.access.guard import RefusedError
from rankscope.operator.captures.daemon_calls import DaemonAwayError, DaemonCalls, DaemonRefusedError
from rankscope.operator.kube.objects import CaptureObject
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

log = logging.getLogger(__name__)

DOWNLOAD_SECONDS = 3600.0
CALLS_AT_ONCE = 16
TEXT_CHARACTERS = 300
CACHED_SECONDS = 30.0
CACHED_BYTES = 16 << 20  # of all captures: a daemon's report is hostile input
Code = grpc.StatusCode
_PASSED_ON = (Code.NOT_FOUND, Code.OUT_OF_RANGE, Code.FAILED_PRECONDITION, Code.INVALID_ARGUMENT)


@dataclass(frozen=True)
class _Details:
    at: float
    found: Mapping[str, pb.Capture]
    size_bytes: int


class Traces:
    def __init__(self, calls: DaemonCalls, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._calls = calls
        self._addresses = addresses
        self._lock = threading.Lock()
        self._cached: OrderedDict[str, _Details] = OrderedDict()  # by uid, the oldest first
        self._cached_bytes = 0
        self._pool = ThreadPoolExecutor(CALLS_AT_ONCE, thread_name_prefix="rankscope-traces")

    def stop(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)

    def details(self, thing: CaptureObject) -> Mapping[str, pb.Capture]:
        """What the daemons know beyond the status, by node; daemons that are away are left out. Details of a finished
        capture are cached: requests of users must not keep the daemons busy."""
        now = time.monotonic()
        with self._lock:
            known = self._cached.get(thing.uid)
            if known is not None and now - known.at < CACHED_SECONDS:
                return known.found
        found = {node: capture for node, capture in self._each(thing, self._calls.get) if capture is not None}
        if thing.is_finished:
            self._cache(thing.uid, _Details(now, found, sum(capture.ByteSize() for capture in found.values())))
        return found

    def _cache(self, uid: str, details: _Details) -> None:
        with self._lock:
            before = self._cached.pop(uid, None)
            self._cached_bytes += details.size_bytes - (0 if before is None else before.size_bytes)
            self._cached[uid] = details
            while self._cached and (
                self._cached_bytes > CACHED_BYTES or details.at - next(iter(self._cached.values())).at > CACHED_SECONDS
            ):
                self._cached_bytes -= self._cached.popitem(last=False)[1].size_bytes

    def remove(self, thing: CaptureObject) -> None:
        self._each(thing, self._calls.delete)

    def download(
        self, thing: CaptureObject, request: pb.DownloadArtifactRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.DownloadArtifactResponse]:
        rank = next((one for one in thing.captured_ranks if one.rank == request.rank), None)
        if rank is None or not isinstance(rank.node, str):
            raise RefusedError(Code.NOT_FOUND, f"rank {request.rank} is not part of this capture")
        address = self._addresses().get(rank.node)
        if address is None:
            raise RefusedError(Code.UNAVAILABLE, f"there is no daemon on {rank.node} now; its traces wait there")
        asked = pb.DownloadArtifactRequest(
            id=thing.capture_id, rank=request.rank, offset=request.offset, window=request.window
        )
        try:
            with self._calls.channel(address) as channel:
                parts = CaptureServiceStub(channel).DownloadArtifact(asked, timeout=DOWNLOAD_SECONDS)
                context.add_callback(parts.cancel)
                yield from parts
        except grpc.RpcError as error:
            text = one_line(error.details() or "", TEXT_CHARACTERS)
            if error.code() in _PASSED_ON:
                raise RefusedError(error.code(), text) from error
            log.warning("traces of %s from %s: %s %s", thing.place, rank.node, error.code(), text)
            raise RefusedError(Code.UNAVAILABLE, f"the daemon of {rank.node} does not answer; try again") from error
        except OSError as error:
            log.warning("traces of %s from %s: %s", thing.place, rank.node, error)
            raise RefusedError(Code.UNAVAILABLE, f"the daemon of {rank.node} cannot be asked now") from error

    def _each(
        self, thing: CaptureObject, ask: Callable[[str, str], pb.Capture | None]
    ) -> list[tuple[str, pb.Capture | None]]:
        addresses = self._addresses()
        nodes = [node for node in thing.nodes if node in addresses]

        def safely(node: str) -> pb.Capture | None:
            try:
                return ask(addresses[node], thing.capture_id)
            except (DaemonAwayError, DaemonRefusedError, OSError) as error:
                log.debug("%s: %s: %s", thing.place, node, error)
                return None

        return list(zip(nodes, self._pool.map(safely, nodes), strict=True))
