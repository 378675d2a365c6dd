"""`python -m benchmarks.fleet_daemons FIRST COUNT DAEMONS RANKS`: many daemons in one process, each a gRPC server
with a port of its own, that tell of windows and of nothing else. Prints the ports, then runs until its input ends."""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import AsyncIterator

import grpc
import grpc.aio

from benchmarks.fleet_layout import WINDOW_SECONDS, FleetLayout, ScriptedDaemon

# A daemon closes its window at the border and needs a moment to make messages of it.
ASSEMBLING_SECONDS = (0.02, 0.25)
METHOD = "/rankscope.v1.RankService/WatchRanks"


class Handler(grpc.GenericRpcHandler):  # type: ignore[misc]  # grpc has no types
    def __init__(self, node: int, layout: FleetLayout) -> None:
        self._daemon = ScriptedDaemon(layout, node)
        self._delay_seconds = random.Random(node).uniform(*ASSEMBLING_SECONDS)

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:
        if handler_call_details.method != METHOD:
            return None
        return grpc.unary_stream_rpc_method_handler(self._watch)  # bytes as they are

    async def _watch(self, request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        tick = int((time.time() - self._delay_seconds) / WINDOW_SECONDS)
        yield self._daemon.message(tick)  # the latest, at once
        while True:
            tick += 1
            await asyncio.sleep(max(0.0, tick * WINDOW_SECONDS + self._delay_seconds - time.time()))
            if time.time() > (tick + 8) * WINDOW_SECONDS:
                tick = int(time.time() / WINDOW_SECONDS)  # as the real one: late news is dropped
            yield self._daemon.message(tick)


async def serve(first: int, count: int, layout: FleetLayout) -> None:
    ports, servers = {}, []
    for node in range(first, first + count):
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((Handler(node, layout),))
        ports[node] = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        servers.append(server)
    print(json.dumps(ports), flush=True)
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)
    await asyncio.gather(*(server.stop(None) for server in servers))


if __name__ == "__main__":
    first, count, daemons, ranks = map(int, sys.argv[1:])
    asyncio.run(serve(first, count, FleetLayout(daemons, ranks)))
