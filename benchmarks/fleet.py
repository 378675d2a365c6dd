"""A simulated fleet against the operator's core: real gRPC streams from every daemon, windows every two seconds.

It needs grpcio, protobuf, msgspec, numpy and prometheus-client, and no Kubernetes."""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.fleet_layout import FleetLayout, node_name
from benchmarks.reporting import Row, between, machine, table, write_json
from benchmarks.running import BenchmarkError

DAEMONS = 2000
RANKS_PER_NODE = 8
SECONDS = 300.0
# Verdicts need some windows, and the first ones meet a core that is still connecting.
SETTLING_SECONDS = 20.0
SERVER_PROCESSES = max(4, (os.cpu_count() or 1) // 2)
CONNECTING_SECONDS = 300.0
DESCRIPTORS = 16_384
PODS = 50_000
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Report:
    unix_seconds: float
    connected: int
    windows_total: int
    cpu_seconds: float
    resident_bytes: int
    latencies: list[float] = field(repr=False)
    refused: dict[str, int] = field(default_factory=dict)


class Core:
    """The operator's core in a process of its own."""

    def __init__(self, layout: FleetLayout, addresses: dict[str, str]) -> None:
        self.started_at = time.time()
        command = [sys.executable, "-m", "benchmarks.fleet_operator", str(layout.daemons), str(layout.ranks_per_node)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._daemons = layout.daemons
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(addresses) + "\n")
        self._process.stdin.flush()

    def reports(self) -> Iterator[Report]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            yield Report(**json.loads(line))
        raise BenchmarkError("the operator's core ended by itself")

    def await_streams(self) -> float:
        """Seconds since its start until every daemon was heard."""
        return self._until(lambda report: report.connected == self._daemons).unix_seconds - self.started_at

    def watch(self, seconds: float) -> list[Report]:
        found: list[Report] = []
        for report in self.reports():
            found.append(report)
            if report.unix_seconds - found[0].unix_seconds >= seconds:
                break
        return found

    def finish(self) -> None:
        """Ends it, and fails if its verdicts were wrong."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        last = self._process.stdout.readlines()[-1]
        self._process.wait(30.0)
        wrong = json.loads(last)["wrong"]
        if wrong:
            raise BenchmarkError(f"verdicts are not what was made: {wrong[0]}")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def _until(self, is_so: Callable[[Report], bool]) -> Report:
        for report in self.reports():
            if is_so(report):
                return report
            if report.unix_seconds - self.started_at > CONNECTING_SECONDS:
                raise BenchmarkError(f"{report.connected} of {self._daemons} daemons heard in {CONNECTING_SECONDS} s")
        raise AssertionError("reports never end")


@dataclass(frozen=True)
class Servers:
    """Of the simulated daemons."""

    addresses: dict[str, str]  # by node
    pids: tuple[int, ...]


@contextmanager
def daemons(layout: FleetLayout) -> Iterator[Servers]:
    share = -(-layout.daemons // SERVER_PROCESSES)
    firsts = range(0, layout.daemons, share)
    shape = [str(layout.daemons), str(layout.ranks_per_node)]
    with ExitStack() as stack:
        processes = []
        for first in firsts:
            count = min(share, layout.daemons - first)
            command = [sys.executable, "-m", "benchmarks.fleet_daemons", str(first), str(count), *shape]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.callback(process.wait)
            stack.callback(process.kill)
            processes.append(process)
        addresses: dict[str, str] = {}
        for process in processes:
            assert process.stdout is not None
            ports = json.loads(process.stdout.readline())
            addresses |= {node_name(int(node)): f"127.0.0.1:{port}" for node, port in ports.items()}
        yield Servers(addresses, tuple(process.pid for process in processes))


@dataclass(frozen=True)
class Usage:
    """CPU seconds since the machine, and the processes, began."""

    simulators: float
    machine: float

    @staticmethod
    def now(pids: Iterable[int]) -> Usage:
        ticks = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13] for pid in pids]
        user, nice, system, _, _, *interrupts = Path("/proc/stat").read_text().split(None, 9)[1:9]
        busy = sum(map(int, (user, nice, system, *interrupts[:2])))
        return Usage(sum(int(tick) for pair in ticks for tick in pair) / TICKS, busy / TICKS)


def measure(daemon_count: int = DAEMONS, seconds: float = SECONDS) -> list[Row]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 < hard < DESCRIPTORS and hard < 3 * daemon_count:
        raise BenchmarkError(f"{daemon_count} streams need more open files than the limit of {hard}; raise ulimit -Hn")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    layout = FleetLayout(daemon_count, RANKS_PER_NODE)
    with daemons(layout) as servers:
        core = Core(layout, servers.addresses)
        try:
            core.await_streams()
            core.watch(SETTLING_SECONDS)
            before = Usage.now(servers.pids)
            reports = core.watch(seconds)
            after, load = Usage.now(servers.pids), os.getloadavg()
            core.finish()
        finally:
            core.kill()
        restarted = Core(layout, servers.addresses)
        try:
            recovered_seconds = restarted.await_streams()
        finally:
            restarted.kill()
    used = Usage(after.simulators - before.simulators, after.machine - before.machine)
    return [*_rows(layout, reports, used, load, recovered_seconds), _pods()]


def _pods() -> Row:
    """Ten times the pods that train are no rarity in a cluster; all of them are told to the operator."""
    command = [sys.executable, "-m", "benchmarks.fleet_pods", str(PODS)]
    found = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    return Row(f"fleet: memory for each of {PODS:,} pods known", found["bytes"] / PODS / 1e3, "kB", raw=found)


def _rows(
    layout: FleetLayout,
    reports: list[Report],
    used: Usage,
    load: tuple[float, float, float],
    recovered_seconds: float,
) -> list[Row]:
    first, last = reports[0], reports[-1]
    seconds = last.unix_seconds - first.unix_seconds
    windows = last.windows_total - first.windows_total
    cpu = last.cpu_seconds - first.cpu_seconds
    latencies = np.array([latency for report in reports[1:] for latency in report.latencies])
    middle, high, longest = np.quantile(latencies, (0.5, 0.99, 1.0))
    # Sampled at other moments than the operator's own: a little less than nothing is nothing.
    others, cores = max(0.0, used.machine - used.simulators - cpu), len(os.sched_getaffinity(0))
    label = f"fleet: {layout.daemons:,} daemons × {layout.ranks_per_node}"
    raw = {
        "seconds": seconds,
        "windows": windows,
        "windows_per_second": windows / seconds,
        "cpu_seconds": cpu,
        "cpu_microseconds_a_window": 1e6 * cpu / windows,
        "cpu_seconds_simulators": used.simulators,
        "cpu_seconds_others": others,
        "cores": cores,
        "load_average": load,
        "resident_bytes": max(report.resident_bytes for report in reports),
        "recovered_seconds": recovered_seconds,
        "jobs": len(layout.jobs),
        "latency_seconds": {"p50": middle, "p99": high, "max": longest, "count": len(latencies)},
        "refused": last.refused,
    }
    made = layout.daemons * layout.ranks_per_node / 2.0
    shown = f"median {middle:.2f}, at most {longest:.2f}, {len(latencies):,} verdicts"
    return [
        Row(f"{label}, windows handled", windows / seconds, "/s", f"{made:,.0f} made", None, 0, raw=raw),
        Row(f"{label}, window to verdict, 99th percentile", float(high), "s", shown, 2.0),
        Row(
            f"{label}, CPU of the operator",
            100 * cpu / seconds,
            "% of a core",
            f"{1e6 * cpu / windows:.0f} µs a window",
        ),
        Row(f"{label}, CPU of the simulated daemons", 100 * used.simulators / seconds, "% of a core"),
        Row(
            f"{label}, CPU of anybody else",
            100 * others / seconds,
            "% of a core",
            f"{cores} cores, load {' '.join(f'{one:.1f}' for one in load)}: the figures hold if this is small",
        ),
        Row(
            f"{label}, resident memory",
            last.resident_bytes / 1e6,
            "MB",
            between(first.resident_bytes / 1e6, max(report.resident_bytes for report in reports) / 1e6, 0),
            None,
            0,
        ),
        Row(f"{label}, all streams back after a restart", recovered_seconds, "s", "from the start of the process"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fleet", description=__doc__)
    parser.add_argument("--daemons", type=int, default=DAEMONS, metavar="N", help="default: %(default)s")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="S", help="default: %(default)s")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the raw numbers there")
    arguments = parser.parse_args()
    rows = measure(arguments.daemons, arguments.seconds)
    print(table(rows))
    print(json.dumps({**machine(), **rows[0].raw}))
    if arguments.output:
        write_json(arguments.output, rows)


if __name__ == "__main__":
    main()
