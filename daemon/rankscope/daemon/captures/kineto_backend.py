"""Captures by libkineto itself (level 1): the process polls, gets a configuration, and writes a trace in its own file
system, from where it is fetched."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.clients import DEFAULT_POLL_SECONDS
from rankscope.daemon.captures.cuda_care import slowdown_objection
from rankscope.daemon.captures.endpoint import Endpoint
from rankscope.daemon.captures.kineto_attempt import Attempt
from rankscope.daemon.captures.leftovers import Leftovers, left_behind
from rankscope.daemon.captures.namespaces import network_namespace
from rankscope.daemon.captures.orders import CaptureError, Order, Recording, Stage
from rankscope.daemon.captures.starting import Pasts, common_start
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

# A process that has not polled by then will not.
SILENCE_SECONDS: Final = 4 * DEFAULT_POLL_SECONDS


class KinetoBackend:
    name = "kineto"
    keeps_schedules = False  # libkineto takes a configuration for one window

    def __init__(self, endpoint: Endpoint, proc_root: Path = Path("/proc")) -> None:
        self._endpoint = endpoint
        self._proc_root = proc_root
        self._pasts = Pasts()
        self._leftovers = Leftovers(proc_root)

    def objection(self, rank: RankProcess) -> str | None:
        if self._endpoint.client(rank.pid) is not None:
            return None
        if rank.environment.get("KINETO_USE_DAEMON", "0") in ("", "0"):
            return "the process was started without KINETO_USE_DAEMON=1"
        try:
            namespace = network_namespace(rank.pid, self._proc_root)
        except OSError as error:
            return f"its network namespace cannot be read: {error.strerror}"
        failure = self._endpoint.failure(namespace)
        if failure is not None:
            return failure
        served_seconds = self._endpoint.served_seconds(namespace)
        if served_seconds is not None and served_seconds > SILENCE_SECONDS:
            return "libkineto has not called; has the process imported a torch that is built with Kineto?"
        return None

    def remove_leftovers(self, captures: Iterable[pb.Capture], ranks: Collection[RankProcess]) -> None:
        """Of captures by an earlier daemon that never came to fetch their files."""
        for rank, path in left_behind(captures, ranks, time.time()):
            self._leftovers.expect(rank.pid, rank.start_ticks, path)

    def poll_seconds(self, rank: RankProcess) -> float:
        """Until the next poll of a process is due."""
        client = self._endpoint.client(rank.pid)
        return DEFAULT_POLL_SECONDS if client is None else client.polls_in_seconds(time.monotonic())

    def common_start(self, ranks: Collection[RankProcess], earliest_unix_seconds: float) -> float:
        """A start for all these ranks, at the earliest or little later, that libkineto is sure to keep."""
        now = time.time()
        looks = [self._pasts.look((rank.pid, rank.start_ticks), now + self.poll_seconds(rank)) for rank in ranks]
        return common_start(earliest_unix_seconds, [look for look in looks if look is not None])

    def record(
        self, order: Order, workspace: Path, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        objection = slowdown_objection(order.rank, order.options, self._proc_root)
        if objection is not None:
            raise CaptureError(objection)
        attempt = Attempt(self._endpoint, self._pasts, self._leftovers, self._proc_root, order, report, cancelled)
        return attempt.run(workspace / f"rank{order.rank.rank}.json")
