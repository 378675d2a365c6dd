"""What the daemon itself uses with eight ranks on the node: CPU and memory, by its own account and by the kernel's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from itertools import pairwise

import grpc

from benchmarks.reporting import Row, between
from benchmarks.running import RunningDaemon, await_ranks, child_pids, cpu_seconds, daemon, job, memory_bytes
from benchmarks.statistics import spread_of
from rankscope.v1.rank_service_pb2 import WatchRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub

RANKS = 8
# The first look at every rank costs once: importing, finding, attaching.
SETTLING_SECONDS = 12.0
SLICES = 6
SLICE_SECONDS = 10.0
MEGABYTE = 1e6


def measure(slices: int = SLICES) -> list[Row]:
    with job("light", RANKS) as running, daemon() as watching:
        await_ranks(watching, running)
        # An operator watches and a Prometheus scrapes (below, once a slice), as in real life.
        threading.Thread(target=_watch, args=(watching.grpc_target,), daemon=True).start()
        time.sleep(SETTLING_SECONDS)
        found = [_look(watching)]
        for _ in range(slices):
            time.sleep(SLICE_SECONDS)
            found.append(_look(watching))
            running.ranks.check()
    return _rows(found)


def _watch(target: str) -> None:
    try:
        with grpc.insecure_channel(target) as channel:
            for _ in RankServiceStub(channel).WatchRanks(WatchRanksRequest()):
                pass
    except grpc.RpcError:
        pass  # the daemon has been stopped


def _look(watching: RunningDaemon) -> dict[str, float]:
    metrics = watching.metrics()
    pid = watching.process.pid
    children = child_pids(pid)
    return {
        "seconds": time.monotonic(),
        "self": metrics['rankscope_daemon_cpu_seconds_total{part="self"}'],
        "sampling": metrics['rankscope_daemon_cpu_seconds_total{part="sampling"}'],
        "kernel": cpu_seconds(pid),
        "resident": float(memory_bytes(pid, "Rss")),
        "proportional": float(memory_bytes(pid, "Pss") + sum(memory_bytes(child, "Pss") for child in children)),
        "ranks": metrics["rankscope_daemon_ranks"],
        "samples": sum(value for name, value in metrics.items() if name.startswith("rankscope_rank_stack_samples")),
    }


def _rows(found: Sequence[dict[str, float]]) -> list[Row]:
    # Other jobs of this machine are watched too, and come and go.
    ranks = sum(look["ranks"] for look in found) / len(found)
    # More ranks than py-spy processes at once are sampled less often each, which looks cheap: no verdict on the target.
    crowded = any(look["ranks"] != RANKS for look in found)

    def percent_per_rank(*parts: str) -> tuple[float, list[float]]:
        def between_looks(before: dict[str, float], after: dict[str, float]) -> float:
            used = sum(after[part] - before[part] for part in parts)
            return 100 * used / (after["seconds"] - before["seconds"]) / ranks

        slices = [between_looks(before, after) for before, after in pairwise(found)]
        return between_looks(found[0], found[-1]), slices

    raw = {"looks": list(found)}
    rows = []
    for name, parts, target in (
        (f"daemon: CPU per rank with {ranks:g} ranks, by the kernel", ("kernel",), 1.0),
        ("daemon: CPU per rank, by its own metrics", ("self", "sampling"), None),
        ("daemon: of that, itself", ("self",), None),
        ("daemon: of that, py-spy", ("sampling",), None),
    ):
        value, slices = percent_per_rank(*parts)
        spread = spread_of(slices)
        rows.append(
            Row(
                name,
                value,
                "% core",
                between(spread.low, spread.high),
                target,
                raw=raw,
                noisy=target is not None and crowded,
            )
        )
        raw = {}
    rows.append(_sampling_row(found, ranks))
    for name, key, target in (
        ("daemon: resident memory", "resident", 90.0),
        ("daemon: proportional memory with py-spy", "proportional", None),
    ):
        values = [look[key] / MEGABYTE for look in found]
        rows.append(Row(name, max(values), "MB", between(min(values), max(values), 1), target, 1))
    return rows


def _sampling_row(found: Sequence[dict[str, float]], ranks: float) -> Row:
    """What that CPU bought: a daemon over its budget samples less, and would look cheap."""
    rates = [(b["samples"] - a["samples"]) / (b["seconds"] - a["seconds"]) / ranks for a, b in pairwise(found)]
    spread = spread_of(rates)
    return Row("daemon: stack samples per rank", spread.median, "Hz", between(spread.low, spread.high, 1), None, 1)
