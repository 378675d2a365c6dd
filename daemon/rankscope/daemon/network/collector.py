"""The network of the node per window: its ports for the exporter, and for each job how they compare with their past.

A thread of its own reads the counters: a network card that does not answer blocks who asks it, for a minute at times.
What a job needs goes into the window of its first rank on the node, once instead of eight times."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from rankscope.analysis.verdicts.network import NcclFacts, NetworkPort, NodeNetwork
from rankscope.daemon import procfs
from rankscope.daemon.collector import Collector, describe
from rankscope.daemon.config import Config
from rankscope.daemon.network.history import CounterHistory
from rankscope.daemon.network.nccl_debug import NcclDebugFile
from rankscope.daemon.network.ports import PortReading, TcpReading, read_ports, read_tcp
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span

log = logging.getLogger(__name__)

MAX_NAMESPACES: Final = 64
MAX_JOBS: Final = 1024
FRESH_INTERVALS: Final = 3
CLOSE_SECONDS: Final = 1.0
# Fewer segments in a minute do not show a ratio.
MIN_USUAL_SEGMENTS: Final = 100
_SENT, _RECEIVED, _SEGMENTS, _RETRANSMITS = "transmitted_bytes", "received_bytes", "segments", "retransmits"


@dataclass(frozen=True)
class NetworkStatus:
    """The network as the exporter shows it."""

    ports: tuple[PortReading, ...] = ()
    tcp: TcpReading | None = None  # of the node's own network namespace


@dataclass(frozen=True)
class _Snapshot:
    taken_monotonic: float = float("-inf")
    ports: tuple[PortReading, ...] = ()
    tcp: TcpReading | None = None
    histories: Mapping[object, CounterHistory] = field(default_factory=dict)
    nccl: Mapping[RankKey, NcclFacts] = field(default_factory=dict)


class NetworkCollector(Collector[NodeNetwork]):
    name = "network"

    def __init__(
        self,
        sys_root: Path = Path("/sys"),
        proc_root: Path = Path("/proc"),
        interval_seconds: float = 10.0,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._sys_root = sys_root
        self._proc_root = str(proc_root)
        self._interval_seconds = interval_seconds
        self._monotonic = monotonic
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # histories are read by one thread and written by the other
        self._latest = _Snapshot()
        self._jobs: dict[str, float] = {}  # since when each is here
        self._namespaces: Mapping[int, str] = {}  # folders of a process in each that a job is in
        self._first: Mapping[str, RankProcess] = {}  # the ranks that carry the network, by job
        self._logs: dict[RankKey, NcclDebugFile] = {}
        self._samples: dict[str, tuple[float, NodeNetwork]] = {}  # by job, with the reading that they are of
        self.status = NetworkStatus()

    @classmethod
    def from_config(cls, config: Config) -> NetworkCollector | None:
        if not config.network:
            return None
        return cls(Path(config.sys_root), Path(config.proc_root), config.network_interval_seconds)

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-network", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CLOSE_SECONDS)

    def read(self) -> None:
        """One reading of all counters; the collector's thread calls it."""
        namespaces = self._namespaces
        ports = read_ports(self._sys_root)
        tcp = read_tcp(f"{self._proc_root}/1") or read_tcp(f"{self._proc_root}/self")
        counters: dict[object, Mapping[str, int]] = {port.key: _counters(port) for port in ports}
        for inode, process in namespaces.items():
            found = read_tcp(process)
            if found is not None:
                counters[inode] = {_SEGMENTS: found.segments, _RETRANSMITS: found.retransmits}
        nccl = self._read_logs()
        now = self._monotonic()
        with self._lock:
            before = self._latest.histories
            histories = {key: before.get(key) or CounterHistory(self._interval_seconds) for key in counters}
            for key, values in counters.items():
                histories[key].add(values, now)
            self._latest = _Snapshot(now, ports, tcp, histories, nccl)

    def _read_logs(self) -> dict[RankKey, NcclFacts]:
        first = {rank.key: rank for rank in self._first.values()}
        self._logs = {
            key: self._logs.get(key) or NcclDebugFile(self._folder(rank), (rank.pid, *rank.namespace_pids)[-1])
            for key, rank in first.items()
        }
        found: dict[RankKey, NcclFacts] = {}
        for key, rank in first.items():
            with suppress(OSError):  # it ended, or blocks those who read it
                facts = procfs.BLOCKING.call(self._folder(rank), self._logs[key].read)
                if facts is not None:
                    found[key] = facts
        return found

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.read()
            except Exception as error:  # noqa: BLE001 - a driver may show anything; the next reading may work
                log.warning("the network could not be read: %s; it is tried again", describe(error))
            self._stop.wait(self._interval_seconds)

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, NodeNetwork | Problem]:
        first: dict[str, RankProcess] = {}
        for rank in ranks:
            if rank.job not in first or rank.rank < first[rank.job].rank:
                first[rank.job] = rank
        now, latest = self._monotonic(), self._latest
        self._jobs = {job: self._jobs.get(job, now) for job in list(first)[:MAX_JOBS]}
        inodes = {job: procfs.namespace_inode(self._folder(first[job]), "net") for job in self._jobs}
        named = {inode: self._folder(first[job]) for job, inode in inodes.items() if inode}
        self._first = {job: first[job] for job in self._jobs}
        self._namespaces = dict(list(named.items())[:MAX_NAMESPACES])
        is_fresh = now - latest.taken_monotonic <= FRESH_INTERVALS * self._interval_seconds
        self.status = NetworkStatus(latest.ports, latest.tcp) if is_fresh else NetworkStatus()
        if not is_fresh:
            self._samples = {}
            return {}
        own = procfs.namespace_inode(f"{self._proc_root}/1", "net")
        samples: dict[RankKey, NodeNetwork | Problem] = {}
        with self._lock:
            self._samples = {
                job: self._sample(job, inodes[job], own, latest, latest.nccl.get(first[job].key)) for job in self._jobs
            }
        for job, (_, network) in self._samples.items():
            if network.ports or network.tcp_segments is not None or network.nccl is not None:
                samples[first[job].key] = network
        return samples

    def _folder(self, rank: RankProcess) -> str:
        return f"{self._proc_root}/{rank.pid}"

    def _sample(
        self, job: str, inode: int, own: int, latest: _Snapshot, nccl: NcclFacts | None
    ) -> tuple[float, NodeNetwork]:
        """Made once for each reading: several windows close in between."""
        known = self._samples.get(job)
        if known is not None and known[0] == latest.taken_monotonic:
            return known
        since = self._jobs[job]
        ports = tuple(_port(port, latest.histories[port.key], since) for port in latest.ports)
        seconds = max((latest.histories[port.key].seconds for port in latest.ports), default=0.0)
        network = NodeNetwork(ports, seconds, is_own_namespace=bool(inode and own and inode != own), nccl=nccl)
        tcp = latest.histories.get(inode)
        if tcp is not None and _SEGMENTS in (grown := tcp.recent()):
            network = replace(
                network,
                seconds=seconds or tcp.seconds,
                tcp_segments=grown[_SEGMENTS],
                tcp_retransmits=grown[_RETRANSMITS],
                tcp_usual_retransmit_ratio=tcp.usual_ratio(_RETRANSMITS, _SEGMENTS, since, MIN_USUAL_SEGMENTS),
            )
        return latest.taken_monotonic, network


def _counters(port: PortReading) -> Mapping[str, int]:
    moved = {_SENT: port.transmitted_bytes, _RECEIVED: port.received_bytes}
    return {**port.events, **{name: count for name, count in moved.items() if count is not None}}


def _port(reading: PortReading, history: CounterHistory, since: float) -> NetworkPort:
    grown = history.recent()
    events = {kind: grown[kind] for kind in reading.events if grown.get(kind)}
    usual = {kind: history.usual(kind, since) for kind in events}
    return NetworkPort(
        reading.device,
        reading.port,
        reading.link,
        reading.is_up,
        reading.rate_bits_per_second,
        grown.get(_SENT),
        grown.get(_RECEIVED),
        events,
        {kind: count for kind, count in usual.items() if count is not None},
    )
