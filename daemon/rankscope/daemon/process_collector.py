"""The process collector: kernel accounting of each rank. It shows a rank that is starved, throttled or stopped."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypeVar

from rankscope.daemon import procfs
from rankscope.daemon.cgroups import CpuThrottling, Throttled
from rankscope.daemon.collector import Collector, blocked
from rankscope.daemon.config import Config
from rankscope.daemon.samples import Problem, ProcessSample, RankKey, RankProcess, Span

PAGE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")

Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class _Counters:
    """Counters that only grow, as of one moment. None: not known."""

    cpu_seconds: float | None = None
    run_delay_seconds: float | None = None
    voluntary_switches: int | None = None
    involuntary_switches: int | None = None
    throttled: Throttled = field(default_factory=Throttled)


@dataclass
class _Watched:
    """A rank between two calls."""

    rank: RankProcess
    counters: _Counters = field(default_factory=_Counters)
    is_new: bool = True
    looks: int = 0
    looks_stopped: int = 0


class ProcessCollector(Collector[ProcessSample]):
    """Deltas are since the last `collect`; the first has none. `poll` looks whether a process is stopped: without it, a
    stop would count only if the window ended during it."""

    name = "process"

    def __init__(
        self,
        proc_root: Path = Path("/proc"),
        cgroup_root: Path = Path("/sys/fs/cgroup"),
        clock_ticks_per_second: int = procfs.CLOCK_TICKS_PER_SECOND,
    ) -> None:
        self._root = str(proc_root)
        self._ticks_per_second = clock_ticks_per_second
        self._throttling = CpuThrottling(proc_root, cgroup_root)
        self._watched: dict[RankKey, _Watched] = {}

    @classmethod
    def from_config(cls, config: Config) -> ProcessCollector:
        return cls(Path(config.proc_root), Path(config.cgroup_root))

    def poll(self, now_monotonic: float = 0.0) -> None:
        def look(watched: _Watched) -> None:
            with suppress(OSError, ValueError):  # `collect` reports why
                self._look(watched)

        procfs.BLOCKING.each(self._watched.values(), self._folder, look)

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, ProcessSample | Problem]:
        self._throttling.begin_round()
        self._watched = {rank.key: self._watched.get(rank.key) or _Watched(rank) for rank in ranks}
        samples: dict[RankKey, ProcessSample | Problem] = {}

        def read(watched: _Watched) -> None:
            try:
                samples[watched.rank.key] = self._sample(watched, span.seconds)
            except procfs.GONE:
                pass  # ended; discovery will notice
            except (OSError, ValueError) as error:
                text = f"{watched.rank}: {self._folder(watched)} could not be read: {error}"
                samples[watched.rank.key] = Problem(self.name, "unreadable", text)

        for watched in procfs.BLOCKING.each(self._watched.values(), self._folder, read):
            samples[watched.rank.key] = blocked(self.name, watched.rank)
        return samples

    def _folder(self, watched: _Watched) -> str:
        return f"{self._root}/{watched.rank.pid}"

    def _look(self, watched: _Watched) -> procfs.ProcessStat:
        stat = procfs.read_stat(f"{self._root}/{watched.rank.pid}")
        if stat.start_ticks != watched.rank.start_ticks or stat.is_dead:
            raise ProcessLookupError(f"pid {watched.rank.pid} is another process now")
        watched.looks += 1
        watched.looks_stopped += stat.is_stopped
        return stat

    def _sample(self, watched: _Watched, span_seconds: float) -> ProcessSample:
        folder = f"{self._root}/{watched.rank.pid}"
        stat = self._look(watched)
        status = procfs.read_status(folder)
        now = _Counters(
            cpu_seconds=(stat.user_ticks + stat.system_ticks) / self._ticks_per_second,
            run_delay_seconds=_run_delay_seconds(folder),
            voluntary_switches=status.voluntary_switches,
            involuntary_switches=status.involuntary_switches,
            throttled=self._throttling.read(watched.rank.pid),
        )
        before, watched.counters = watched.counters, now
        stopped_seconds = None if watched.is_new else span_seconds * watched.looks_stopped / watched.looks
        watched.is_new, watched.looks, watched.looks_stopped = False, 0, 0
        return ProcessSample(
            cpu_seconds=_growth(before.cpu_seconds, now.cpu_seconds),
            run_delay_seconds=_growth(before.run_delay_seconds, now.run_delay_seconds),
            throttled_seconds=now.throttled.seconds_since(before.throttled, span_seconds),
            stopped_seconds=stopped_seconds,
            resident_bytes=stat.resident_pages * PAGE_BYTES,
            threads=stat.threads,
            involuntary_switches=_growth(before.involuntary_switches, now.involuntary_switches),
            voluntary_switches=_growth(before.voluntary_switches, now.voluntary_switches),
        )


def _run_delay_seconds(folder: str) -> float | None:
    """How long the main thread, which trains, was ready to run but had no CPU."""
    try:
        fields = procfs.read_bounded(folder + "/schedstat").split()
    except FileNotFoundError:
        return None  # a kernel without CONFIG_SCHED_INFO; a process that has ended shows elsewhere
    nanos = procfs.whole_number(fields[1]) if len(fields) >= 2 else None
    return None if nanos is None else nanos / 1e9


def _growth(before: Number | None, now: Number | None) -> Number | None:
    """None also for a counter that went backwards: it is another counter."""
    return None if before is None or now is None or now < before else now - before
