"""The registered collectors, and one sample of the node: which ranks there are, and what each collector has of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

from rankscope.daemon.collector import Collector, CollectorStatus, Supervised, failure_of
from rankscope.daemon.config import Config
from rankscope.daemon.discovery.ranks import Conflict, Discovered, RankDiscovery
from rankscope.daemon.gpu.collector import GpuCollector
from rankscope.daemon.process_collector import ProcessCollector
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span
from rankscope.daemon.stacks.collector import StacksCollector
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.daemon.windows.schedule import Clock
from rankscope.daemon.windows.window import RankSamples

# To add a collector, add its class here and a field with its name to RankSamples.
COLLECTORS: Final[tuple[type[Collector[Any]], ...]] = (StepsCollector, ProcessCollector, StacksCollector, GpuCollector)


class Discovery(Protocol):
    def scan(self) -> Discovered: ...


@dataclass(frozen=True)
class Collectors:
    """Everything the daemon reads. Tests pass their own."""

    discovery: Discovery
    registered: tuple[Collector[Any], ...]

    @property
    def stacks(self) -> StacksCollector:
        stacks: StacksCollector = self._named("stacks")
        return stacks

    @property
    def gpu(self) -> GpuCollector | None:
        gpu: GpuCollector | None = self._named("gpu")
        return gpu

    def _named(self, name: str) -> Any:
        return next((collector for collector in self.registered if collector.name == name), None)


def real_collectors(config: Config) -> Collectors:
    made = (collector.from_config(config) for collector in COLLECTORS)
    registered = tuple(collector for collector in made if collector is not None)
    return Collectors(RankDiscovery(Path(config.proc_root), config.node, config.max_ranks), registered)


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
