"""One WatchRanks stream to every node's daemon, all in one thread: a fleet has thousands.

An unreachable daemon is retried with increasing pauses; a daemon without a certificate of ours is refused."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from rankscope.common.text import one_line
from rankscope.common.tls import Read
from rankscope.common.token_bucket import TokenBucket
from rankscope.operator.certificates.roles import DAEMON_NAME_OPTION, daemon_credentials
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.runs.pods import read_pod
from rankscope.v1 import rank_service_pb2

log = logging.getLogger(__name__)

FIRST_BACKOFF_SECONDS = 0.5
LAST_BACKOFF_SECONDS = 15.0
# A node sends every few seconds; one that has been silent for this long is gone without closing its connection.
SILENT_SECONDS = 90.0
# How often that is checked. A timer for every message would cost more than reading the message.
SWEEP_SECONDS = 5.0
# The first message comes at once: an unreachable node must not delay the others in the queue.
FIRST_MESSAGE_SECONDS = 20.0
# A daemon sends the windows of one node: a larger message is not a daemon's.
MAX_MESSAGE_BYTES = 8 << 20
# What a daemon may send ahead, about twenty messages.
LOOKAHEAD_BYTES = 512 << 10
METHOD = "/rankscope.v1.RankService/WatchRanks"
# Messages within this time are handed on together.
GATHERING_SECONDS = 0.05
MAX_GATHERED_BYTES = 32 << 20
# A daemon sends one message per window, of half a second or more. A daemon that sends more is disconnected and retried
# later.
MESSAGES_PER_SECOND = 20.0
MESSAGES_BURST = 200.0
# Connections in progress: a restarted operator must not connect to its whole fleet at once.
MAX_CONNECTING = 128

# A request must fit into what a daemon accepts: for a node with more pods than this, all windows are requested.
MAX_PODS = 1000

Accept = Callable[[Sequence[DaemonMessage]], None]


@dataclass(frozen=True)
class _Target:
    node: str
    address: str
    pods: frozenset[str] = frozenset()  # none: all of the node


def _target(node: str, address: str, pods: Mapping[str, frozenset[str]] | None) -> _Target:
    asked = frozenset[str]() if pods is None else pods[node]
    return _Target(node, address, asked if len(asked) <= MAX_PODS else frozenset())


class DaemonStreams:
    """`follow` sets the daemons. `accept` is called in one thread, with all messages of a moment: a fleet sends at
    the same time, and reading many messages together is faster."""

    def __init__(self, accept: Accept, tls: Read | None = None) -> None:
        self._accept = accept
        self._tls = tls
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[_Target, asyncio.Task[None]] = {}
        self._connected: dict[str, int] = {}
        self._connections = itertools.count()
        self._connecting = asyncio.Semaphore(MAX_CONNECTING)
        self._received_at: dict[grpc.aio.Call, float] = {}
        self._gathered: list[DaemonMessage] = []
        self._gathered_bytes = 0
        self._handing_on: asyncio.TimerHandle | None = None
        self._thread = threading.Thread(target=self._run, name="rankscope-streams", daemon=True)
        self.messages_total = 0

    @property
    def connected(self) -> Mapping[str, int]:
        """Nodes whose daemon sends windows, with the number of the connection: another after an interruption."""
        return self._connected.copy()

    @property
    def following(self) -> int:
        return len(self._tasks)

    def start(self) -> None:
        self._thread.start()

    def follow(self, addresses: Mapping[str, str], pods: Mapping[str, frozenset[str]] | None = None) -> None:
        """Node to HOST:PORT; missing nodes are disconnected. `pods` are the only pods of interest by node; a node
        without any is disconnected as well."""
        wanted = {_target(node, address, pods) for node, address in addresses.items() if pods is None or pods.get(node)}
        self._loop.call_soon_threadsafe(self._retarget, wanted)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._retarget, set())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5.0)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.call_later(SWEEP_SECONDS, self._sweep)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

    def _retarget(self, wanted: set[_Target]) -> None:
        for target in self._tasks.keys() - wanted:
            self._tasks.pop(target).cancel()
        for target in wanted - self._tasks.keys():
            self._tasks[target] = self._loop.create_task(self._keep_up(target))

    async def _keep_up(self, target: _Target) -> None:
        node = target.node
        backoff = FIRST_BACKOFF_SECONDS
        while True:
            try:
                if await self._stream(target):
                    backoff = FIRST_BACKOFF_SECONDS
            except grpc.aio.AioRpcError as error:
                level = logging.INFO if node in self._connected else logging.DEBUG
                log.log(level, "daemon of %s: %s %s", node, error.code().name, one_line(error.details() or "", 200))
            except (OSError, ValueError, asyncio.TimeoutError) as error:
                log.warning("daemon of %s: %s", node, str(error) or f"no message in {FIRST_MESSAGE_SECONDS:g} s")
            except Exception:
                log.exception("daemon of %s", node)
            finally:
                self._connected.pop(node, None)
            await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
            backoff = min(backoff * 2, LAST_BACKOFF_SECONDS)

    async def _stream(self, target: _Target) -> bool:
        """True if anything was received."""
        node, has_received = target.node, False
        bucket = TokenBucket(MESSAGES_BURST, MESSAGES_PER_SECOND)
        async with self._channel(target.address) as channel:
            request = rank_service_pb2.WatchRanksRequest(pods=sorted(target.pods))
            # Raw bytes: gRPC would parse the whole message, and log what it cannot parse.
            call = channel.unary_stream(METHOD)(request.SerializeToString())
            try:
                async with self._connecting:
                    message = await asyncio.wait_for(call.read(), FIRST_MESSAGE_SECONDS)
                while message is not grpc.aio.EOF:
                    now = self._loop.time()
                    if not bucket.take(now):
                        raise ValueError(f"it sends more than {MESSAGES_PER_SECOND:g} messages a second")
                    read = DaemonMessage(node, message)
                    has_received = True
                    if node not in self._connected:
                        self._connected[node] = next(self._connections)
                    self._received_at[call] = now
                    self.messages_total += 1
                    self._take(read, len(message))
                    message = await call.read()
            except asyncio.CancelledError:
                if has_received and call not in self._received_at:  # by `_sweep`; else by the task's owner
                    raise asyncio.TimeoutError(f"nothing was received for {SILENT_SECONDS:g} s") from None
                raise
            finally:
                self._received_at.pop(call, None)
                call.cancel()
        return has_received

    def _sweep(self) -> None:
        deadline = self._loop.time() - SILENT_SECONDS
        for call in [call for call, at in self._received_at.items() if at < deadline]:
            del self._received_at[call]
            call.cancel()
        self._loop.call_later(SWEEP_SECONDS, self._sweep)

    def _channel(self, address: str) -> grpc.aio.Channel:
        options: list[tuple[str, object]] = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.keepalive_time_ms", 30_000),
            # A daemon sends little at a time: bandwidth probing and flow-control updates cost as much as reading it.
            ("grpc.http2.bdp_probe", 0),
            ("grpc.http2.lookahead_bytes", LOOKAHEAD_BYTES),
            ("grpc.http2.max_frame_size", LOOKAHEAD_BYTES),
            # Channels to the same address would share a connection and with it the old certificate.
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if self._tls is not None:
            return grpc.aio.secure_channel(
                address, daemon_credentials(self._tls), options=[*options, DAEMON_NAME_OPTION]
            )
        return grpc.aio.insecure_channel(address, options=options)

    def _take(self, message: DaemonMessage, size_bytes: int) -> None:
        if not self._gathered:
            self._handing_on = self._loop.call_later(GATHERING_SECONDS, self._hand_on)
        self._gathered.append(message)
        self._gathered_bytes += size_bytes
        if self._gathered_bytes > MAX_GATHERED_BYTES:
            self._hand_on()

    def _hand_on(self) -> None:
        if self._handing_on is not None:
            self._handing_on.cancel()
        gathered, self._gathered, self._gathered_bytes = self._gathered, [], 0
        try:
            self._accept(gathered)
        except Exception:  # a failure of one daemon does not affect the others
            if len(gathered) == 1:
                log.exception("a message of the daemon of %s could not be taken in", gathered[0].node)
                return
            for message in gathered:
                self._gathered = [message]
                self._hand_on()


# The pods of our DaemonSet, by node.

SELECTOR = "app.kubernetes.io/part-of=rankscope,app.kubernetes.io/component=daemon"
PORT_NAME = "grpc"
DEFAULT_PORT = 9465


@dataclass(frozen=True)
class DaemonPod:
    node: str
    address: str  # HOST:PORT
    created: str


def read_daemon_pod(document: Mapping[str, Any]) -> DaemonPod | None:
    pod = read_pod(document)
    if pod is None or not pod.node or not pod.address or pod.is_over or pod.deleting:
        return None
    ports = [
        port.get("containerPort")
        for container in document["spec"].get("containers") or ()
        for port in container.get("ports") or ()
        if port.get("name") == PORT_NAME
    ]
    host = f"[{pod.address}]" if ":" in pod.address else pod.address
    return DaemonPod(pod.node, f"{host}:{ports[0] if ports else DEFAULT_PORT}", pod.created)


class DaemonPods:
    """Updated by a watch."""

    def __init__(self) -> None:
        self._pods: dict[str, DaemonPod] = {}
        self._lock = threading.Lock()

    def changed(self, uid: str, pod: DaemonPod) -> None:
        with self._lock:
            self._pods[uid] = pod

    def deleted(self, uid: str) -> None:
        with self._lock:
            self._pods.pop(uid, None)

    @property
    def addresses(self) -> Mapping[str, str]:
        """Node to HOST:PORT; while a daemon is replaced a node may have two, and the newest counts."""
        with self._lock:
            ordered = sorted(self._pods.values(), key=lambda pod: pod.created)
        return {pod.node: pod.address for pod in ordered}
