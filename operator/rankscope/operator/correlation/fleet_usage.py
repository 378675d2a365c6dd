"""What runs used and lost since this process started: the facts of a fleet report where there is no Prometheus.

The sums of each run are in memory. Every few seconds a sample of its ranks stands for the time since the one before.
When there is no room, the run that ended first becomes part of one row of earlier runs."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

import numpy as np

from rankscope.analysis.fleet.facts import (
    CULPRIT_LABELS,
    LOST_LABELS,
    USED_LABELS,
    UTILIZATION_BUCKETS,
    Figures,
    FleetFacts,
    Program,
    RunFacts,
    RunKey,
)
from rankscope.analysis.fleet.tables import moment
from rankscope.analysis.quantities import count
from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.analysis.verdicts.window_columns import by_name, columns
from rankscope.common.metric_table import label
from rankscope.common.run_names import run_labels
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import HeldWindow, HeldWindows

SAMPLE_SECONDS: Final = 15.0
# A sample stands for no more: this machine was asleep, or its clock was set.
MAX_SAMPLE_SECONDS: Final = 120.0
HOUR_SECONDS: Final = 3600.0
MAX_RUNS: Final = 4096
MAX_ROWS: Final = 100_000  # of all runs together
MAX_CULPRITS: Final = 16  # of a verdict
EARLIER: Final = "(runs that ended earlier)"
OTHER_NODES: Final = "(other nodes)"

Rows = dict[tuple[str, ...], float]


@dataclass(frozen=True)
class _Sample:
    """A run at a moment."""

    gpus: Mapping[str, float] = field(default_factory=dict)  # by node; a GPU of several runs counts in equal parts
    ranks_without_gpu: int = 0
    utilization: tuple[float, ...] = ()  # GPUs by tenth
    mfu_ratio: float | None = None
    finding: Kind | None = None
    # Node, GPU, phase, bound and verdict of the ranks that the finding names.
    culprits: tuple[tuple[str, ...], ...] = ()
    lone_utilization_ratio: float | None = None  # of a run with one rank


@dataclass
class _Run:
    key: RunKey
    counted_unix_seconds: float  # until then its time is counted
    evaluated_unix_seconds: float
    sample: _Sample = field(default_factory=_Sample)
    ended_unix_seconds: float | None = None
    program: Program = field(default_factory=Program)
    device: str = ""
    hours: float = 0.0
    mfu_hours: float = 0.0  # MFU times hours
    hours_with_mfu: float = 0.0
    mfu_target_ratio: float | None = None
    utilization_hours: float = 0.0
    hours_with_utilization: float = 0.0
    memory_bytes: float | None = None
    memory_total_bytes: float | None = None
    lost_gpu_seconds: dict[Kind, float] = field(default_factory=dict)  # that are counted
    used: Rows = field(default_factory=dict)  # GPU-hours by node
    lost: Rows = field(default_factory=dict)  # by verdict and node
    culprits: Rows = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return len(self.used) + len(self.lost) + len(self.culprits)

    def facts(self) -> RunFacts:
        return RunFacts(
            program=self.program,
            hours=self.hours,
            mfu_ratio=self.mfu_hours / self.hours_with_mfu if self.hours_with_mfu else None,
            mfu_target_ratio=self.mfu_target_ratio,
            utilization_ratio=(
                self.utilization_hours / self.hours_with_utilization if self.hours_with_utilization else None
            ),
            memory_bytes=self.memory_bytes,
            memory_total_bytes=self.memory_total_bytes,
            device=self.device,
        )


class FleetUsage:
    """A listener of the correlator. Thread-safe. `lost` must be a listener after this one: it forgets a run that ended,
    and its last loss is read here before."""

    def __init__(
        self,
        lost: LostSeconds,
        mfu_target_of: Callable[[str], float | None] = lambda job: None,
        elsewhere: Callable[[], Mapping[str, str]] = dict,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`elsewhere` are the runs that another replica correlates."""
        self._lost = lost
        self._mfu_target_of = mfu_target_of
        self._elsewhere = elsewhere
        self._clock = clock
        self._lock = threading.Lock()
        self._runs: dict[str, _Run] = {}  # by job
        self._ended: dict[str, None] = {}  # jobs, in the order in which they ended
        self._earlier = _Run(("", "", EARLIER), 0.0, 0.0)
        self._folded = 0  # runs in `_earlier`
        self._rows = 0
        self._left_out: set[str] = set()  # runs at present for which there is no room
        self._is_cut = False  # rows are missing
        self._utilization = np.zeros(UTILIZATION_BUCKETS)
        self._rank_hours_without_gpu = 0.0
        self._sampled_unix_seconds = 0.0
        self.started_unix_seconds = clock()

    def __call__(self, states: tuple[JobState, ...]) -> None:
        with self._lock:
            present = {state.job for state in states}
            for job, run in list(self._runs.items()):
                if run.ended_unix_seconds is None and job not in present:
                    self._end(job, run)
            self._left_out &= present
            for state in states:
                if not self._is_new(state.job):
                    self._runs[state.job].evaluated_unix_seconds = state.evaluated_unix_seconds
            now = self._clock()
            is_new = any(self._is_new(job) for job in present - self._left_out)
            if is_new or not 0 <= now - self._sampled_unix_seconds < SAMPLE_SECONDS:
                self._sampled_unix_seconds = now
                self._take_samples(states)

    def _is_new(self, job: str) -> bool:
        run = self._runs.get(job)
        return run is None or run.ended_unix_seconds is not None

    # Counting.

    def _take_samples(self, states: Sequence[JobState]) -> None:
        places = {state.job: _places(state) for state in states}
        runs_of_gpu = Counter(gpu for of_run in places.values() for gpu in of_run)
        for state in states:
            run = self._run(state)
            if run is None:
                self._left_out.add(state.job)
                continue
            run.sample = self._sample(state, run, places[state.job], runs_of_gpu)
            self._count(state.job, run)

    def _run(self, state: JobState) -> _Run | None:
        """None if there is no room."""
        run = self._runs.get(state.job)
        if run is None:
            if len(self._runs) >= MAX_RUNS and not self._fold():
                return None
            namespace, name = map(label, run_labels(state.job).values())
            now = state.evaluated_unix_seconds
            run = self._runs[state.job] = _Run(("", namespace, name), now, now)
        elif run.ended_unix_seconds is not None:  # it is here again
            del self._ended[state.job]
            run.ended_unix_seconds, run.counted_unix_seconds = None, state.evaluated_unix_seconds
            run.evaluated_unix_seconds = state.evaluated_unix_seconds
        said = state.program
        names = (label(said.team), label(said.user), label(said.image), label(said.command))
        run.program = Program(*names, world_size=state.world_size)
        run.mfu_target_ratio = self._mfu_target_of(state.job)
        return run

    def _sample(
        self, state: JobState, run: _Run, places: frozenset[tuple[str, str]], runs_of_gpu: Mapping[tuple[str, str], int]
    ) -> _Sample:
        held = _held(state)
        figures = by_name(columns([window.figures for window in held]))
        gpus: dict[str, float] = {}
        for node, gpu in places:
            gpus[node] = gpus.get(node, 0.0) + 1.0 / runs_of_gpu[node, gpu]
        lone = None
        if state.world_size == 1 and len(held) == 1 and places:
            lone = _known(figures.gpu_utilization_ratio[0])
            self._read_lone(run, held[0], _known(figures.gpu_memory_used_bytes[0]))
        verdict = state.verdict
        finding = verdict.kind if verdict.kind.is_finding and verdict.severity is not Severity.NONE else None
        return _Sample(
            gpus=gpus,
            ranks_without_gpu=sum(not window.identity.gpu_uuid for window in held),
            utilization=_tenths(held, figures.gpu_utilization_ratio, runs_of_gpu),
            mfu_ratio=None if verdict.kind is Kind.HANG else state.mfu_ratio,
            finding=finding,
            culprits=() if finding is None else tuple(_culprits(state)),
            lone_utilization_ratio=lone,
        )

    def _read_lone(self, run: _Run, window: HeldWindow, memory_bytes: float | None) -> None:
        run.device = label(window.identity.gpu_model)
        if memory_bytes is not None:
            run.memory_bytes = max(memory_bytes, run.memory_bytes or 0.0)
        if run.memory_total_bytes is None:
            gpu = window.message().gpu
            run.memory_total_bytes = float(gpu.memory_total_bytes) if gpu.HasField("memory_total_bytes") else None

    def _count(self, job: str, run: _Run) -> None:
        """The time since it was last counted, as its sample has it."""
        seconds = min(max(0.0, run.evaluated_unix_seconds - run.counted_unix_seconds), MAX_SAMPLE_SECONDS)
        run.counted_unix_seconds = run.evaluated_unix_seconds
        hours, sample = seconds / HOUR_SECONDS, run.sample
        run.hours += hours
        if sample.mfu_ratio is not None:
            run.mfu_hours += hours * sample.mfu_ratio
            run.hours_with_mfu += hours
        if sample.lone_utilization_ratio is not None:
            run.utilization_hours += hours * sample.lone_utilization_ratio
            run.hours_with_utilization += hours
        if sample.utilization:
            self._utilization += hours * np.array(sample.utilization)
        self._rank_hours_without_gpu += hours * sample.ranks_without_gpu
        for node, gpus in sample.gpus.items():
            self._add(run.used, (node,), hours * gpus, (OTHER_NODES,))
        for culprit in dict.fromkeys(sample.culprits):  # a GPU once, however many ranks share it
            self._add(run.culprits, culprit, hours, None)
        self._count_losses(job, run)

    def _count_losses(self, job: str, run: _Run) -> None:
        nodes = Counter(culprit[0] for culprit in run.sample.culprits)
        for kind, lost in self._lost.by_verdict(job).items():
            grown = max(0.0, lost - run.lost_gpu_seconds.get(kind, 0.0)) / HOUR_SECONDS
            run.lost_gpu_seconds[kind] = lost
            named = nodes if kind is run.sample.finding and nodes else {"": 1}
            for node, ranks in named.items() if grown > 0 else ():
                share = grown * ranks / sum(named.values())
                self._add(run.lost, (kind.value, node), share, (kind.value, OTHER_NODES))

    def _add(
        self,
        table: Rows,
        key: tuple[str, ...],
        hours: float,
        otherwise: tuple[str, ...] | None,
    ) -> None:
        """`otherwise` is the row if there is no room for this one; None: it is left out."""
        if key not in table:
            if self._rows >= MAX_ROWS and not self._fold():
                self._is_cut = True
                if otherwise is None:
                    return
                key = otherwise
            self._rows += key not in table
        table[key] = table.get(key, 0.0) + hours

    def _end(self, job: str, run: _Run) -> None:
        self._count(job, run)
        run.ended_unix_seconds = run.evaluated_unix_seconds
        self._ended[job] = None
        run.sample = _Sample()
        run.lost_gpu_seconds = {}

    def _fold(self) -> bool:
        """Makes room: the run that ended first becomes part of the row of earlier ones."""
        if not self._ended:
            return False
        job = next(iter(self._ended))
        del self._ended[job]
        run = self._runs.pop(job)
        before = self._earlier.rows
        for mine, earlier in ((run.used, self._earlier.used), (run.lost, self._earlier.lost)):
            for key, hours in mine.items():
                earlier[key] = earlier.get(key, 0.0) + hours
        self._rows += self._earlier.rows - before - run.rows
        self._folded += 1
        self._earlier.ended_unix_seconds = max(run.evaluated_unix_seconds, self._earlier.ended_unix_seconds or 0.0)
        return True

    # The report.

    def facts(self) -> FleetFacts:
        end, elsewhere = self._clock(), len(self._elsewhere())
        with self._lock:
            runs = [*self._runs.values(), *([self._earlier] if self._folded else ())]
            tables = [_joined(runs, name) for name in ("used", "lost", "culprits")]
            utilization: Rows = {(str(tenth),): hours for tenth, hours in enumerate(self._utilization.tolist())}
            facts_of_runs = {run.key: run.facts() for run in self._runs.values()}
            without_gpu, problems = self._rank_hours_without_gpu, tuple(self._problems(elsewhere))
        labels = (USED_LABELS, LOST_LABELS, CULPRIT_LABELS)
        used, lost, culprits = (Figures.of(names, rows) for names, rows in zip(labels, tables, strict=True))
        return FleetFacts(
            begin_unix_seconds=self.started_unix_seconds,
            end_unix_seconds=end,
            used=used,
            lost=lost,
            culprits=culprits,
            utilization=Figures.of(("bucket",), utilization),
            runs=facts_of_runs,
            rank_hours_without_gpu=without_gpu,
            problems=problems,
            remarks=(
                f"only since {moment(self.started_unix_seconds)}, when this server started, whatever time is asked "
                "for; a restart forgets it. For more, start it with --prometheus-url",
            ),
        )

    def _problems(self, elsewhere: int) -> Iterator[str]:
        if self._folded:
            last = moment(self._earlier.ended_unix_seconds or 0.0)
            yield (
                f"{count(self._folded, 'run')} that ended until {last} became one row, and are not in the lists of "
                "hardware, MFU and packing"
            )
        if self._left_out:
            yield f"without {count(len(self._left_out), 'run')}: there is room for {MAX_RUNS}"
        if self._is_cut:
            yield f"some nodes are counted as {OTHER_NODES}: there is room for {MAX_ROWS} rows"
        if elsewhere:
            yield f"without {count(elsewhere, 'run')} that other replicas of the operator correlate"


def _held(state: JobState) -> Sequence[HeldWindow]:
    return state.windows.in_order if isinstance(state.windows, HeldWindows) else ()


def _places(state: JobState) -> frozenset[tuple[str, str]]:
    """Nodes and GPUs of the ranks whose GPU is known."""
    known = ((window.who.node, window.identity.gpu_uuid) for window in _held(state))
    return frozenset((label(node), label(gpu)) for node, gpu in known if gpu)


def _tenths(
    held: Sequence[HeldWindow], utilization: np.ndarray, runs_of_gpu: Mapping[tuple[str, str], int]
) -> tuple[float, ...]:
    counts = [0.0] * UTILIZATION_BUCKETS
    seen: set[tuple[str, str]] = set()
    for window, ratio in zip(held, utilization.tolist(), strict=True):
        place = (label(window.who.node), label(window.identity.gpu_uuid))
        if place[1] and place not in seen and ratio == ratio:  # not NaN
            seen.add(place)
            counts[min(int(UTILIZATION_BUCKETS * ratio), UTILIZATION_BUCKETS - 1)] += 1.0 / runs_of_gpu[place]
    return tuple(counts) if seen else ()


def _culprits(state: JobState) -> Iterator[tuple[str, ...]]:
    verdict, identities = state.verdict, state.identities
    for rank in islice(dict.fromkeys(verdict.culprits), MAX_CULPRITS):
        identity = identities.get(rank)
        if identity is not None:
            cause = (label(verdict.cause.phase), label(verdict.cause.bound), verdict.kind.value)
            yield (label(identity.node), label(identity.gpu_uuid), *cause)


def _joined(runs: Sequence[_Run], name: str) -> Rows:
    rows: Rows = {}
    for run in runs:
        for key, hours in getattr(run, name).items():
            whole = (*run.key, *key)
            rows[whole] = rows.get(whole, 0.0) + hours
    return rows


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
