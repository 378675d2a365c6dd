"""Callers that may call, and do not read what they asked for."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

import grpc
import pytest

from rankscope.daemon.captures.service import CaptureServicer
from rankscope.daemon.server.grpc_server import MAX_DOWNLOADS, SHORT_CALL_THREADS, GrpcServer, Service, rank_service
from rankscope.daemon.server.sockets import SocketLock
from rankscope.daemon.windows.broadcast import QUEUED_TICKS, Publisher, Tick
from rankscope.v1.capture_service_pb2 import DownloadArtifactRequest
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub, add_CaptureServiceServicer_to_server
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import ListRanksRequest, WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub
from rankscope.v1.window_pb2 import RankWindow
from tests.support.waiting import wait_until
from tests.unit.daemon import window_makers as make

READERS = 4
PATIENCE_SECONDS = 180.0
ARTIFACT = bytes(8 << 20)
# Small enough that a caller that does not read is soon waited for.
UNREAD = [("grpc.use_local_subchannel_pool", 1), ("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 1024)]


class _Artifacts:
    def open(self, capture_id: str, rank: int, window: int = 0) -> tuple[BinaryIO, int]:
        return io.BytesIO(ARTIFACT), len(ARTIFACT)

    def remove(self, capture_id: str) -> None: ...


@contextmanager
def channels(target: str) -> Iterator[Any]:
    with ExitStack() as opened:
        yield lambda: opened.enter_context(grpc.insecure_channel(target, UNREAD))


@pytest.fixture
def publisher() -> Publisher:
    return Publisher(READERS)


@pytest.fixture
def target(tmp_path: Path, publisher: Publisher) -> Iterator[str]:
    config = make.config(socket=str(tmp_path / "d.sock"), watch_readers=READERS)
    lock = SocketLock(Path(config.socket))
    servicer = CaptureServicer(cast(Any, None), _Artifacts())
    captures = Service.of("CaptureService", add_CaptureServiceServicer_to_server, servicer)
    services = (rank_service("node", publisher), captures)
    server = GrpcServer(services, lock, config)
    try:
        yield server.targets[0]
    finally:
        publisher.close()
        server.close(0.0)
        lock.release()


def test_unread_downloads_block_neither_calls_nor_other_downloads(target: str) -> None:
    """As many as the operator's API lets the accounts of one tenant have."""
    with channels(target) as opened:
        unread = []
        for _ in range(2 * (READERS + MAX_DOWNLOADS + SHORT_CALL_THREADS)):
            call = CaptureServiceStub(opened()).DownloadArtifact(DownloadArtifactRequest(id="c"))
            next(call)
            unread.append(call)
        honest = opened()
        RankServiceStub(honest).ListRanks(ListRanksRequest(), timeout=PATIENCE_SECONDS)
        parts = CaptureServiceStub(honest).DownloadArtifact(DownloadArtifactRequest(id="c"), timeout=PATIENCE_SECONDS)
        assert sum(len(part.chunk) for part in parts) == len(ARTIFACT)


def test_a_reader_of_windows_that_has_stopped_reading_gives_way(target: str, publisher: Publisher) -> None:
    large = {("job", 0, 1, 1): RankWindow(identity=RankIdentity(job="x" * 100_000))}
    with channels(target) as opened:
        stuck = [RankServiceStub(opened()).WatchRanks(WatchRanksRequest()) for _ in range(READERS)]
        wait_until(lambda: publisher.readers == READERS, lambda: publisher.readers)
        refused = RankServiceStub(opened()).WatchRanks(WatchRanksRequest())
        with pytest.raises(grpc.RpcError) as error:
            next(refused)
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "nobody is evicted who may still be reading"

        def are_stalled() -> bool:
            are = all(reader.is_stalled for reader in publisher._readers)
            for index in range(QUEUED_TICKS):
                publisher.publish(Tick(make.span(index), cast(Any, large)))
            return are

        wait_until(are_stalled, lambda: "flow control does not reach the daemon")
        with grpc.insecure_channel(target) as channel:
            arrived = RankServiceStub(channel).WatchRanks(WatchRanksRequest(), timeout=PATIENCE_SECONDS)
            assert next(arrived).windows
            assert publisher.readers == len(stuck)
