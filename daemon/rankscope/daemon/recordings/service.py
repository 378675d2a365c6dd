"""RecordingService of the daemon: the records of its ranks, from what is still in memory until the time is over."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

import grpc

from rankscope.common.text import printable
from rankscope.daemon.recordings.rank_reader import RankReader, to_npy
from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.daemon.server.grpc_server import Service
from rankscope.daemon.server.rank_requests import RequestError, check_names, ranks_of, refusing, turn
from rankscope.v1 import recording_service_pb2 as pb
from rankscope.v1 import recording_service_pb2_grpc

MAX_SECONDS: Final = 600.0
RECORDINGS_AT_ONCE: Final = 2
# The plugin's memory holds 16,384 operations of a rank.
LOOK_SECONDS: Final = 0.5
SEND_SECONDS: Final = 30.0
TEXT_CHARACTERS: Final = 300


class RecordingServicer(recording_service_pb2_grpc.RecordingServiceServicer):
    """`ranks` are those that are known now."""

    def __init__(self, node: str, ranks: Callable[[], Sequence[RankProcess]], proc_root: Path) -> None:
        self._node = node
        self._ranks = ranks
        self._proc_root = proc_root
        self._recording = threading.Semaphore(RECORDINGS_AT_ONCE)

    def RecordRun(self, request: pb.RecordRunRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        with refusing(context):
            check_names(request.job, request.ranks, request.pods)
            if not 0 < request.seconds <= MAX_SECONDS:  # also refuses NaN
                text = f"record between 0 and {MAX_SECONDS:.0f} s, not {request.seconds:g}"
                raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, text)
            if not ranks_of(request, self._ranks()):
                text = f"no such rank of run {printable(request.job, 64)!r} runs on {self._node} now"
                raise RequestError(grpc.StatusCode.NOT_FOUND, text)
            with turn(self._recording, f"{RECORDINGS_AT_ONCE} recordings are made on this node now"):
                # A caller that does not read must not keep a thread of the server.
                too_late = threading.Timer(request.seconds + SEND_SECONDS, context.cancel)
                too_late.daemon = True
                too_late.start()
                try:
                    yield from self._record(request, context)
                finally:
                    too_late.cancel()

    def _record(self, request: pb.RecordRunRequest, context: grpc.ServicerContext) -> Iterator[pb.RecordRunResponse]:
        """Ends early when all ranks have ended, or when the caller leaves."""
        has_left = threading.Event()
        if not context.add_callback(has_left.set):
            return
        readers: dict[RankKey, RankReader] = {}
        problems: dict[RankKey, str] = {}
        end_seconds = time.monotonic() + request.seconds
        left_seconds = math.inf
        while left_seconds > 0 and (ranks := ranks_of(request, self._ranks())):
            # The last look comes after the end.
            left_seconds = end_seconds - time.monotonic()
            for rank in ranks:
                reader = readers.setdefault(rank.key, self._reader(rank))
                new = reader.read()
                if new.is_empty and new.problem == problems.get(rank.key, ""):
                    continue
                problems[rank.key] = new.problem
                records = pb.RankRecords(
                    rank=rank.rank,
                    node=self._node,
                    steps=to_npy(new.steps),
                    operations=to_npy(new.operations),
                    communicators=to_npy(new.communicators),
                    overwritten=new.overwritten,
                    problem=printable(new.problem, TEXT_CHARACTERS),
                )
                # A message for each rank: together they could exceed the limit of a message.
                yield pb.RecordRunResponse(ranks=[records])
            if has_left.wait(max(0.0, min(LOOK_SECONDS, left_seconds))):
                return

    def _reader(self, rank: RankProcess) -> RankReader:
        own_pid = rank.namespace_pids[-1] if rank.namespace_pids else rank.pid
        return RankReader(f"{self._proc_root}/{rank.pid}", own_pid)


def recording_service(servicer: RecordingServicer) -> Service:
    add = recording_service_pb2_grpc.add_RecordingServiceServicer_to_server
    return Service.of("RecordingService", add, servicer)
