"""The network of the node per window: its ports for the exporter, and for each job how they compare with their past.

A thread of its own reads the counters: a network card that does not answer blocks who asks it, for a minute at times.
What a job needs goes into the window of its first rank on the node, once instead of eight times."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Final

from rankscope.analysis.verdicts.network import NcclFacts, NetworkPort, NodeNetwork
from rankscope.daemon import procfs
from rankscope.daemon.collector import Collector, describe
from rankscope.daemon.config import Config
from rankscope.daemon.network.nccl_debug import NcclDebugFile
from rankscope.daemon.network.ports import PortReading, TcpReading, read_ports, read_tcp
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span

RECENT_SECONDS: Final = 60.0
PAST_SECONDS: Final = 1800.0
# Fewer minutes than this do not show what is usual. They overlap.
MIN_PAST_MINUTES: Final = 3


@dataclass(frozen=True)
class _Moment:
    monotonic_seconds: float
    totals: Mapping[str, int]


class CounterHistory:
    """Counters of one port or namespace, which are read every `interval_seconds`: how much they grew in the last
    minute, and in a usual minute before it. A counter that becomes smaller was reset or has wrapped: what it counted
    meanwhile is not known, and adds nothing."""

    def __init__(self, interval_seconds: float) -> None:
        self._per_minute = max(1, round(RECENT_SECONDS / interval_seconds))
        self._moments: deque[_Moment] = deque(maxlen=self._per_minute + max(1, round(PAST_SECONDS / interval_seconds)))
        self._raw: dict[str, int] = {}

    def add(self, counters: Mapping[str, int], now: float) -> None:
        before = self._moments[-1].totals if self._moments else {}
        totals = {
            name: before.get(name, 0) + max(0, value - self._raw.get(name, value)) for name, value in counters.items()
        }
        self._raw = dict(counters)
        self._moments.append(_Moment(now, totals))

    @property
    def seconds(self) -> float:
        """What `recent` covers: a minute, or less where there is less."""
        if not self._moments:
            return 0.0
        return self._moments[-1].monotonic_seconds - self._moments[self._first_recent].monotonic_seconds

    @property
    def _first_recent(self) -> int:
        return max(0, len(self._moments) - 1 - self._per_minute)

    def recent(self) -> dict[str, int]:
        """By how much each counter grew in the last minute."""
        if len(self._moments) < 2:
            return {}
        return _grown(self._moments[self._first_recent], self._moments[-1])

    def usual(self, name: str, since: float) -> float | None:
        """By how much a counter grew in the median minute between `since` and the last minute. None where that is too
        short."""
        return _median([grown for grown in self._minutes(name, since) if grown is not None])

    def usual_ratio(self, part: str, whole: str, since: float, least: int) -> float | None:
        """The median of one counter's growth as a share of another's, over minutes in which that grew by `least`."""
        minutes = zip(self._minutes(part, since), self._minutes(whole, since), strict=True)
        return _median([some / all_ for some, all_ in minutes if some is not None and all_ and all_ >= least])

    def _minutes(self, name: str, since: float) -> list[int | None]:
        """Growth in each minute; minutes overlap."""
        past = list(self._moments)[: self._first_recent + 1]
        totals = [moment.totals.get(name) for moment in past if moment.monotonic_seconds >= since]
        pairs = zip(totals, totals[self._per_minute :], strict=False)
        return [None if first is None or last is None else max(0, last - first) for first, last in pairs]


def _grown(first: _Moment, last: _Moment) -> dict[str, int]:
    return {name: max(0, total - first.totals.get(name, total)) for name, total in last.totals.items()}


def _median(values: list[float] | list[int]) -> float | None:
    return float(median(values)) if len(values) >= MIN_PAST_MINUTES else None


log = logging.getLogger(__name__)

OWN_SYS: Final = Path("/sys")
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
class _OfRank:
    """What a rank itself shows."""

    namespace: int  # 0 where it is not known
    tcp: TcpReading | None  # of that namespace
    nccl: NcclFacts | None


@dataclass(frozen=True)
class _Snapshot:
    taken_monotonic: float = float("-inf")
    ports: tuple[PortReading, ...] = ()
    tcp: TcpReading | None = None
    histories: Mapping[object, CounterHistory] = field(default_factory=dict)
    of_ranks: Mapping[RankKey, _OfRank] = field(default_factory=dict)
    namespace: int = 0  # that the ports are of


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
        self._first: Mapping[RankKey, RankProcess] = {}  # of each job, the rank that carries the network
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
        ports = read_ports(self._sys_root)
        node = f"{self._proc_root}/1"
        tcp = read_tcp(node) or read_tcp(f"{self._proc_root}/self")
        counters: dict[object, Mapping[str, int]] = {port.key: _counters(port) for port in ports}
        of_ranks = self._read_ranks()
        for found in list({one.namespace: one.tcp for one in of_ranks.values()}.items())[:MAX_NAMESPACES]:
            if found[1] is not None:
                counters[found[0]] = {_SEGMENTS: found[1].segments, _RETRANSMITS: found[1].retransmits}
        # The ports are those of the namespace that /sys was mounted in.
        shown = f"{self._proc_root}/self" if self._sys_root == OWN_SYS else node
        namespace, now = procfs.namespace_inode(shown, "net"), self._monotonic()
        with self._lock:
            before = self._latest.histories
            histories = {key: before.get(key) or CounterHistory(self._interval_seconds) for key in counters}
            for key, values in counters.items():
                histories[key].add(values, now)
            self._latest = _Snapshot(now, ports, tcp, histories, of_ranks, namespace)

    def _read_ranks(self) -> dict[RankKey, _OfRank]:
        first = self._first
        self._logs = {
            key: self._logs.get(key) or NcclDebugFile(self._folder(rank), (rank.pid, *rank.namespace_pids)[-1])
            for key, rank in first.items()
        }
        found: dict[RankKey, _OfRank] = {}

        def read(rank: RankProcess) -> None:
            folder, nccl = self._folder(rank), None
            namespace = procfs.namespace_inode(folder, "net")
            with suppress(OSError):  # it ended, or its file cannot be read
                nccl = self._logs[rank.key].read()
            found[rank.key] = _OfRank(namespace, read_tcp(folder) if namespace else None, nccl)

        procfs.BLOCKING.each(first.values(), self._folder, read)
        return found

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.read()
            except Exception as error:  # noqa: BLE001 - one reading is lost; if the thread ended, all would be
                log.warning("the network could not be read: %s; it is tried again", describe(error))
            self._stop.wait(self._interval_seconds)

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, NodeNetwork | Problem]:
        first: dict[str, RankProcess] = {}
        for rank in ranks:
            if rank.job not in first or rank.rank < first[rank.job].rank:
                first[rank.job] = rank
        now, latest = self._monotonic(), self._latest
        self._jobs = {job: self._jobs.get(job, now) for job in list(first)[:MAX_JOBS]}
        self._first = {first[job].key: first[job] for job in self._jobs}
        is_fresh = now - latest.taken_monotonic <= FRESH_INTERVALS * self._interval_seconds
        self.status = NetworkStatus(latest.ports, latest.tcp) if is_fresh else NetworkStatus()
        if not is_fresh:
            self._samples = {}
            return {}
        samples: dict[RankKey, NodeNetwork | Problem] = {}
        with self._lock:
            self._samples = {job: self._sample(job, first[job].key, latest) for job in self._jobs}
        for job, (_, network) in self._samples.items():
            if network.ports or network.tcp_segments is not None or network.nccl is not None:
                samples[first[job].key] = network
        return samples

    def _folder(self, rank: RankProcess) -> str:
        return f"{self._proc_root}/{rank.pid}"

    def _sample(self, job: str, key: RankKey, latest: _Snapshot) -> tuple[float, NodeNetwork]:
        """Made once for each reading: several windows close in between."""
        known = self._samples.get(job)
        if known is not None and known[0] == latest.taken_monotonic:
            return known
        since = self._jobs[job]
        ports = tuple(_port(port, latest.histories[port.key], since) for port in latest.ports)
        seconds = max((latest.histories[port.key].seconds for port in latest.ports), default=0.0)
        rank = latest.of_ranks.get(key) or _OfRank(0, None, None)
        is_own = not rank.namespace or rank.namespace != latest.namespace
        network = NodeNetwork(ports, seconds, is_own_namespace=is_own, nccl=rank.nccl)
        tcp = latest.histories.get(rank.namespace)
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
