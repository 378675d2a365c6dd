"""Samples and fake time for tests of the daemon."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.verdicts.figures import OF_STEPS
from rankscope.daemon.collector import Collector
from rankscope.daemon.config import Config
from rankscope.daemon.discovery.ranks import Discovered
from rankscope.daemon.sampler import Collectors
from rankscope.daemon.samples import (
    Column,
    FrameCount,
    ProbeFacts,
    Problem,
    ProcessSample,
    RankKey,
    RankProcess,
    Recording,
    Span,
    StackSample,
    StallDump,
    StepSample,
    self_seconds,
)

START = 1_700_000_000_000_000_000  # a multiple of the default window
SECOND = 1_000_000_000


def span(index: int = 0, seconds: float = 2.0) -> Span:
    length = round(seconds * SECOND)
    return Span(START + index * length, START + (index + 1) * length)


def rank(
    number: int = 0, job: str = "10.0.0.1:29500/run", pid: int | None = None, start_ticks: int = 77
) -> RankProcess:
    pid = 4000 + number if pid is None else pid
    return RankProcess(job, number, number, 4, pid, start_ticks, (pid,))


def steps(
    *step_seconds: float,
    steps_total: int | None = None,
    last_step_unix_nanos: int | None = START + SECOND,
    facts: ProbeFacts | None = None,
    collectives: tuple[int, int] | None = None,
    memory: Mapping[str, int] | None = None,
    **columns: Sequence[float],
) -> StepSample:
    """Columns by name, one value per step; what is not named was not measured."""
    nothing = [np.nan] * len(step_seconds)
    values = {name: columns.get(name.removesuffix("_seconds"), nothing) for name in OF_STEPS}
    filled: dict[str, Column] = {name: np.array(column, float) for name, column in values.items()}
    filled["step_seconds"] = np.array(step_seconds, float)
    filled["self_seconds"] = self_seconds(filled["step_seconds"], filled["wait_seconds"])
    return StepSample(
        steps_total=len(step_seconds) if steps_total is None else steps_total,
        steps_lost=0,
        last_step_unix_nanos=last_step_unix_nanos,
        facts=facts or ProbeFacts(),
        memory=memory or {},
        collectives_enqueued=collectives[0] if collectives else None,
        collectives_completed=collectives[1] if collectives else None,
        **filled,
    )


def process(cpu_seconds: float | None = 1.5) -> ProcessSample:
    return ProcessSample(cpu_seconds, 0.25, 0.0, 0.0, 300_000_000, 12, 7, 90)


def stacks(
    index: int = 0, distinct_stacks: int = 3, samples: int = 20, function: str = "forward", phase: str = "forward"
) -> StackSample:
    frame = FrameCount(Frame(function, "train.py", 12), samples, samples // 2, phase)
    return StackSample(span(index), samples, 1, {phase: samples - 5, "input": 5}, (frame,), distinct_stacks)


class FakeClock:
    """Time that passes only while somebody waits; stops after `seconds` of it."""

    def __init__(self, seconds: float = 60.0, start_unix_nanos: int = START) -> None:
        self._unix_nanos = start_unix_nanos
        self._monotonic_seconds = 1000.0
        self._end_seconds = 1000.0 + seconds
        self._stopped = False

    def unix_nanos(self) -> int:
        return self._unix_nanos

    def monotonic_seconds(self) -> float:
        return self._monotonic_seconds

    def wait(self, seconds: float) -> bool:
        self.sleep(seconds)
        return self._stopped or self._monotonic_seconds > self._end_seconds

    def stop(self) -> None:
        self._stopped = True

    def sleep(self, seconds: float) -> None:
        self._unix_nanos += round(seconds * 1e9)
        self._monotonic_seconds += seconds

    def set_back(self, seconds: float) -> None:
        self._unix_nanos -= round(seconds * 1e9)


class FakeDiscovery:
    def __init__(self, *ranks: RankProcess) -> None:
        self.ranks = ranks
        self.cut: dict[str, int] = {}

    def scan(self) -> Discovered:
        return Discovered(self.ranks, cut=self.cut)


class FakeSource(Collector[object]):
    """A source whose answers a test decides: `answer(rank)` for each rank, or an exception out of it."""

    child_cpu_seconds = charged_cpu_seconds = 0.0
    recorded_ratio: float | None = None
    stuck = 0

    def __init__(self, name: str, answer: Callable[[RankProcess], object] = lambda _: None) -> None:
        self.name = name
        self.answer = answer
        self.dump: Callable[[RankProcess], StallDump | Problem] | None = None
        self.polls = 0
        self.rates: list[float] = []
        self.rates_of: list[dict[int, float]] = []
        self.hurried: list[str] = []
        self.dumped: list[list[int]] = []

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, object]:
        answers = {rank.key: self.answer(rank) for rank in ranks}
        return {key: answer for key, answer in answers.items() if answer is not None}

    def poll(self, now_monotonic: float = 0.0) -> None:
        self.polls += 1

    def set_rate(self, hz: float) -> None:
        self.rates.append(hz)

    def set_rates_of(self, hz: Mapping[RankKey, float]) -> None:
        self.rates_of.append({key[1]: rate for key, rate in hz.items()})

    def keep_recordings(self, keep: Callable[[Recording], None]) -> None:
        self.keep = keep

    def hurry(self, job: str, now_monotonic: float) -> None:
        self.hurried.append(job)

    def dump_all(self, ranks: Sequence[RankProcess]) -> Mapping[RankKey, StallDump | Problem]:
        self.dumped.append([rank.rank for rank in ranks])
        return {rank.key: self.dump(rank) for rank in ranks} if self.dump else {}


def collectors(
    *ranks: RankProcess,
    steps: Callable[[RankProcess], object] = lambda _: None,
    process: Callable[[RankProcess], object] = lambda _: None,
    stacks: Callable[[RankProcess], object] = lambda _: None,
) -> Collectors:
    answers = {"steps": steps, "process": process, "stacks": stacks}
    return Collectors(FakeDiscovery(*ranks), tuple(FakeSource(name, answer) for name, answer in answers.items()))


def config(**settings: object) -> Config:
    nowhere = dict.fromkeys(("metrics_listen", "socket", "capture_dir", "profile_dir"), "none")
    return Config(**{"node": "node-a", **nowhere, **settings})
