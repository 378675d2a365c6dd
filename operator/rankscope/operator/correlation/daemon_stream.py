"""One WatchRanks stream per daemon, kept up: a daemon that is gone is asked again, later and later."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

import grpc

from rankscope.v1 import rank_service_pb2, rank_service_pb2_grpc

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.2
LAST_BACKOFF_SECONDS = 15.0


class RankStream:
    """Calls `accept` with every message of one daemon until `stop`."""

    def __init__(self, endpoint: str, accept: Callable[[rank_service_pb2.WatchRanksResponse], None]) -> None:
        self.endpoint = endpoint
        self._accept = accept
        self._stopping = threading.Event()
        self._call: grpc.Call | None = None
        self._thread = threading.Thread(target=self._run, name=f"rankscope-stream-{endpoint}", daemon=True)
        self.connected = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        backoff = FIRST_BACKOFF_SECONDS
        while not self._stopping.is_set():
            try:
                with grpc.insecure_channel(self.endpoint) as channel:
                    self._call = call = rank_service_pb2_grpc.RankServiceStub(channel).WatchRanks(
                        rank_service_pb2.WatchRanksRequest(), wait_for_ready=False
                    )
                    for message in call:
                        self.connected.set()
                        backoff = FIRST_BACKOFF_SECONDS
                        self._accept(message)
            except grpc.RpcError as error:
                self.connected.clear()
                if not self._stopping.is_set():
                    log.info("daemon %s: %s; asking again in %.1f s", self.endpoint, error.code().name, backoff)
            # Jitter, or every stream of a restarted fleet returns in the same instant.
            self._stopping.wait(backoff * random.uniform(0.7, 1.3))
            backoff = min(backoff * 2, LAST_BACKOFF_SECONDS)

    def stop(self) -> None:
        self._stopping.set()
        if self._call is not None:
            self._call.cancel()
        self._thread.join(timeout=5)
