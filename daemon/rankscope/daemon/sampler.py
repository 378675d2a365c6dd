"""The sources of one node together: who the ranks are, and what each source says of each rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rankscope.daemon.collector import Collected, Collector, Supervised, describe
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.discovery.ranks import Conflict, Discovered
from rankscope.daemon.export.metrics import CollectorStatus
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.samples import (
    GpuSample,
    Problem,
    ProcessSample,
    RankKey,
    RankProcess,
    Span,
    StackSample,
    StallDump,
    StepSample,
)
from rankscope.daemon.windows.schedule import Clock
from rankscope.daemon.windows.window import RankSamples


class Discovery(Protocol):
    def scan(self) -> Discovered: ...


class ProcessSource(Collector[ProcessSample], Protocol):
    def poll(self) -> None: ...


class StackSource(Collector[StackSample], Protocol):
    @property
    def child_cpu_seconds(self) -> float: ...

    @property
    def recorded_ratio(self) -> float | None: ...

    def poll(self, now_monotonic: float, /) -> None: ...

    def set_rate(self, hz: float, /) -> None: ...

    def set_rates_of(self, hz: Mapping[RankKey, float], /) -> None: ...

    def hurry(self, job: str, now_monotonic: float, /) -> None: ...

    def dump_all(self, ranks: Sequence[RankProcess], /) -> Mapping[RankKey, StallDump | Problem]: ...

    def close(self) -> None: ...


class GpuNode(Collector[GpuSample], Protocol):
    @property
    def status(self) -> GpuStatus: ...

    def start(self) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Collectors:
    """Everything the daemon reads. Tests hand in their own."""

    discovery: Discovery
    steps: Collector[StepSample]
    process: ProcessSource
    stacks: StackSource
    gpu: GpuNode | None = None


def real_collectors(config: Config) -> Collectors:
    from rankscope.daemon.discovery.ranks import RankDiscovery
    from rankscope.daemon.process_collector import ProcessCollector
    from rankscope.daemon.stacks.collector import StacksCollector
    from rankscope.daemon.steps.collector import StepsCollector

    proc_root = Path(config.proc_root)
    return Collectors(
        discovery=RankDiscovery(proc_root, config.node),
        steps=StepsCollector(proc_root),
        process=ProcessCollector(proc_root, Path(config.cgroup_root)),
        stacks=StacksCollector(config.py_spy or None, config.stack_rate_hertz, proc_root=proc_root),
        gpu=_gpu_collector(config) if config.gpu else None,
    )


def _gpu_collector(config: Config) -> GpuNode:
    from rankscope.daemon.gpu.collector import GpuCollector
    from rankscope.daemon.gpu.dcgm import DcgmSource
    from rankscope.daemon.gpu.nvml import NvmlSource
    from rankscope.daemon.gpu.pod_resources import KubeletPods

    return GpuCollector(
        NvmlSource(config.gpu_interval_seconds),
        None if config.dcgm_url == NONE else DcgmSource(config.dcgm_url, config.gpu_interval_seconds),
        None if config.kubelet_socket == NONE else KubeletPods(Path(config.kubelet_socket)),
        interval_seconds=config.gpu_interval_seconds,
        proc_root=Path(config.proc_root),
    )


@dataclass(frozen=True)
class Sampled:
    """One node at one border."""

    ranks: tuple[RankProcess, ...]
    samples: Mapping[RankKey, RankSamples]
    collectors: Mapping[str, CollectorStatus]
    failures: Mapping[str, str] = field(default_factory=dict)
    conflicts: tuple[Conflict, ...] = ()
    discovery_problems: tuple[Problem, ...] = ()
    ranks_cut: int = 0


class Sampling:
    """Asks every source once a window. A source that fails costs its own figures and nothing else."""

    def __init__(self, collectors: Collectors, clock: Clock, max_ranks: int) -> None:
        self._clock = clock
        self._max_ranks = max_ranks
        self._discovery = collectors.discovery
        self._stacks = collectors.stacks
        self._known = Discovered(())
        seconds = clock.monotonic_seconds
        self._supervised_steps = Supervised(collectors.steps, monotonic=seconds)
        self._supervised_process = Supervised(collectors.process, collectors.process.poll, seconds)
        self._supervised_stacks = Supervised(collectors.stacks, lambda: self._stacks.poll(seconds()), seconds)
        self._supervised_gpu = None if collectors.gpu is None else Supervised(collectors.gpu, monotonic=seconds)

    @property
    def child_cpu_seconds(self) -> float:
        return self._stacks.child_cpu_seconds

    def poll(self) -> None:
        """Between borders, about five times a second."""
        self._supervised_process.poll()
        self._supervised_stacks.poll()

    def sample(self, span: Span) -> Sampled:
        statuses: dict[str, CollectorStatus] = {}
        failures: dict[str, str] = {}
        started = self._clock.monotonic_seconds()
        try:
            self._known = self._discovery.scan()
        except Exception as error:  # noqa: BLE001 - the ranks known so far go on being watched
            failures["discovery"] = describe(error)
        duration_seconds = self._clock.monotonic_seconds() - started
        statuses["discovery"] = CollectorStatus(duration_seconds, "discovery" not in failures)
        ranks = tuple(self._known.ranks)[: self._max_ranks]

        steps = self._supervised_steps.collect(ranks, span)
        process = self._supervised_process.collect(ranks, span)
        stacks = self._supervised_stacks.collect(ranks, span)
        gpu = Collected[GpuSample]("gpu") if self._supervised_gpu is None else self._supervised_gpu.collect(ranks, span)
        by_source: tuple[
            Collected[StepSample] | Collected[ProcessSample] | Collected[StackSample] | Collected[GpuSample], ...
        ]
        by_source = (steps, process, stacks) if self._supervised_gpu is None else (steps, process, stacks, gpu)
        for collected in by_source:
            statuses[collected.collector] = CollectorStatus(collected.duration_seconds, collected.success)
            if collected.failure is not None:
                failures[collected.collector] = collected.failure
        samples = {
            key: RankSamples(
                steps=steps.samples.get(key),
                process=process.samples.get(key),
                stacks=stacks.samples.get(key),
                gpu=gpu.samples.get(key),
                problems=(*(c.problems[key] for c in by_source if key in c.problems), *_beside(gpu.samples.get(key))),
            )
            for key in (rank.key for rank in ranks)
        }
        return Sampled(
            ranks=ranks,
            samples=samples,
            collectors=statuses,
            failures=failures,
            conflicts=tuple(self._known.conflicts),
            discovery_problems=tuple(self._known.problems),
            ranks_cut=len(self._known.ranks) - len(ranks),
        )


def _beside(sample: GpuSample | None) -> tuple[Problem, ...]:
    return () if sample is None or sample.problem is None else (sample.problem,)
