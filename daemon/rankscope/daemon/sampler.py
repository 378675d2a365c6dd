"""When windows begin and end, the registered collectors, and one sample of the node: which ranks there are, and what
each collector has of them.

Borders are multiples of the length since 1970, so windows of all nodes line up."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rankscope.daemon.collector import Collector, CollectorStatus, Supervised, failure_of
from rankscope.daemon.config import Config
from rankscope.daemon.discovery.ranks import Conflict, Discovered, RankDiscovery
from rankscope.daemon.gpu.collector import GpuCollector
from rankscope.daemon.network.collector import NetworkCollector
from rankscope.daemon.process_collector import ProcessCollector
from rankscope.daemon.samples import PodRun, Problem, RankKey, RankProcess, Span
from rankscope.daemon.stacks.collector import StacksCollector
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.window import RankSamples, check_collectors

log = logging.getLogger(__name__)

POLL_SECONDS = 0.2
# Of a window. Smaller steps of the wall clock are ignored: the window is that much too long or too short.
CLOCK_TOLERANCE_RATIO = 0.1

# To add a collector, add its class here, and its name to RankSamples and PARTS of windows/window.py.
COLLECTORS: Final[tuple[type[Collector[Any]], ...]] = (
    *(StepsCollector, ProcessCollector, StacksCollector, GpuCollector),
    NetworkCollector,
)


@dataclass(frozen=True)
class Collectors:
    """Everything the daemon reads. Tests pass their own."""

    discovery: RankDiscovery
    registered: tuple[Collector[Any], ...]

    @property
    def stacks(self) -> StacksCollector:
        stacks: StacksCollector = self._named("stacks")
        return stacks

    @property
    def gpu(self) -> GpuCollector | None:
        gpu: GpuCollector | None = self._named("gpu")
        return gpu

    @property
    def network(self) -> NetworkCollector | None:
        network: NetworkCollector | None = self._named("network")
        return network

    def _named(self, name: str) -> Any:
        return next((collector for collector in self.registered if collector.name == name), None)


def real_collectors(config: Config, run_of_pod: Callable[[str], PodRun | None] = lambda uid: None) -> Collectors:
    made = (collector.from_config(config) for collector in COLLECTORS)
    registered = tuple(collector for collector in made if collector is not None)
    discovery = RankDiscovery(Path(config.proc_root), config.node, config.max_ranks, run_of_pod=run_of_pod)
    return Collectors(discovery, registered)


@dataclass(frozen=True)
class Sampled:
    """The node at the end of a window."""

    ranks: tuple[RankProcess, ...]
    samples: Mapping[RankKey, RankSamples]
    collectors: Mapping[str, CollectorStatus]
    failures: Mapping[str, str] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    discovery_problems: tuple[Problem, ...] = ()
    ranks_cut: Mapping[str, int] = field(default_factory=dict)  # by the pod or user they are of


class Sampler:
    """Asks every collector once a window. One that fails costs its own measurements and nothing else."""

    def __init__(self, collectors: Collectors, clock: Clock) -> None:
        check_collectors(collector.name for collector in collectors.registered)
        self._clock = clock
        self._discovery = collectors.discovery
        self._known = Discovered(())
        self._supervised = [Supervised(collector, clock.monotonic_seconds) for collector in collectors.registered]

    def poll(self) -> None:
        """Between the ends of windows, about five times a second."""
        for supervised in self._supervised:
            supervised.poll()

    def _discover(self) -> None:
        """On a failure the ranks known so far are still watched."""
        self._known = self._discovery.scan()

    def sample(self, span: Span) -> Sampled:
        statuses: dict[str, CollectorStatus] = {}
        failures: dict[str, str] = {}
        started = self._clock.monotonic_seconds()
        failure = failure_of(self._discover)
        if failure is not None:
            failures["discovery"] = failure
        duration_seconds = self._clock.monotonic_seconds() - started
        statuses["discovery"] = CollectorStatus(duration_seconds, failure is None)
        ranks = self._known.ranks
        collected = [supervised.collect(ranks, span) for supervised in self._supervised]
        for each in collected:
            statuses[each.collector] = each.status
            if each.failure is not None:
                failures[each.collector] = each.failure
        samples = {}
        for key in (rank.key for rank in ranks):
            problems = tuple(each.problems[key] for each in collected if key in each.problems)
            by_name = {each.collector: each.samples[key] for each in collected if key in each.samples}
            samples[key] = RankSamples(problems=problems, **by_name)
        return Sampled(
            ranks=ranks,
            samples=samples,
            collectors=statuses,
            failures=failures,
            conflicts=self._known.conflicts,
            discovery_problems=self._known.problems,
            ranks_cut=self._known.cut,
        )


class Clock:
    def __init__(self) -> None:
        self._stop = threading.Event()

    def unix_nanos(self) -> int:
        return time.time_ns()

    def monotonic_seconds(self) -> float:
        return time.monotonic()

    def wait(self, seconds: float) -> bool:
        """True, at once, when the daemon should stop."""
        return self._stop.wait(seconds)

    def stop(self) -> None:
        self._stop.set()


class Ticker:
    """Waits for one border after the other. After a delay it continues from the last border that passed, without
    catching up. Borders are on the wall clock, lengths on the monotonic one: when the wall clock is set, or the machine
    was suspended, the next window ends on a border of the new time and is as long as it really was."""

    def __init__(self, clock: Clock, window_seconds: float) -> None:
        self._clock = clock
        self._length_nanos = round(window_seconds * 1e9)
        self._start, self._start_monotonic, _ = self._last_border()
        self.skipped_total = 0

    def next_span(self, poll: Callable[[], None]) -> Span | None:
        """Call `poll` about five times a second until the border; None when the daemon should stop. A span longer
        than a window means that the daemon or the machine missed the borders inside it."""
        while True:
            border, monotonic, remaining_seconds = self._last_border()
            passed_nanos = round((monotonic - self._start_monotonic) * 1e9)
            if passed_nanos >= self._length_nanos // 2:
                break
            if self._clock.wait(min(POLL_SECONDS, remaining_seconds)):
                return None
            poll()
        moved_nanos = border - self._start - passed_nanos
        is_set = abs(moved_nanos) > CLOCK_TOLERANCE_RATIO * self._length_nanos
        if is_set:
            log.warning("the clock was set by %+.1f s; windows continue at the new time", moved_nanos / 1e9)
        span = Span(border - passed_nanos if is_set else self._start, border)
        self.skipped_total += max(0, round(passed_nanos / self._length_nanos) - 1)
        self._start, self._start_monotonic = border, monotonic
        return span

    def _last_border(self) -> tuple[int, float, float]:
        """The border, when it was on the monotonic clock, and the seconds until the next one."""
        unix_nanos, monotonic = self._clock.unix_nanos(), self._clock.monotonic_seconds()
        since_nanos = unix_nanos % self._length_nanos
        return unix_nanos - since_nanos, monotonic - since_nanos / 1e9, (self._length_nanos - since_nanos) / 1e9
