"""What changes would bring: the replay of a job as it was, and of the job with each change."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from rankscope.analysis.replay.changes import CHANGES, Change, are_alternatives
from rankscope.analysis.replay.edits import NotApplicableError, Ranks, Traced
from rankscope.analysis.replay.graph import NOTHING, Graph, ReplayError
from rankscope.analysis.replay.job import build_graphs, recorded_step_ns, replayed_step_ns
from rankscope.analysis.replay.replay import Times, replay
from rankscope.analysis.traces.kernels import Kind
from rankscope.analysis.traces.trace import Trace

# Above this, what a replay says about changes means nothing.
MAX_ERROR_RATIO = 0.05
# Less is within the noise of any step.
MIN_GAIN_RATIO = 0.01
# Gains that differ by less are given as one number.
_SAME_GAIN_RATIO = 0.01
# The profiler makes the host's time longer: 1.5 to 2.9 times, on H200 machines.
MIN_HOST_FACTOR = 1 / 3
# If the host's time makes up less of a step, it cannot be derived from the step.
_MIN_HOST_RATIO = 0.02
_BISECTIONS = 12

# Is called with each replay that the answer comes from: its changes, of which the job as it is has none, the ranks and
# the times. What it does not keep is freed before the next.
Watch: TypeAlias = Callable[[tuple[Change, ...], Ranks, Mapping[int, Times]], None]


@dataclass(frozen=True)
class StepCosts:
    """What a step consists of: the median of the ranks."""

    kernels: float  # and copies
    host_ns: float  # without waiting for the device
    device_ns: float  # of computation and copies, added up
    communication_ns: float  # without waiting for other ranks, if these are known
    input_ns: float


@dataclass(frozen=True)
class Prediction:
    """The host's time may be known only as a range. `gain_ratio` is then the smallest gain in it."""

    changes: tuple[Change, ...]
    step_ns: float | None  # None if it does not apply
    gain_ratio: float | None  # of the time of a sample; below 0 if it becomes longer
    most_gain_ratio: float | None = None
    costs: StepCosts | None = None
    reason: str = ""  # why it does not apply

    @property
    def name(self) -> str:
        return "+".join(change.name for change in self.changes)

    @property
    def gain(self) -> float:
        """For sorting: what does not apply comes last."""
        return -math.inf if self.gain_ratio is None else self.gain_ratio

    @property
    def alters_training(self) -> bool:
        return any(change.alters_training for change in self.changes)


@dataclass(frozen=True)
class Forecast:
    recorded_step_ns: float  # while the profiler ran
    replayed_step_ns: float
    error_ratio: float
    diverges_at: str  # the kernel before which recording and replay drift apart most; empty if the replay is usable
    step_ns: float  # that the predictions start from: without the profiler, if that is known
    costs: StepCosts  # of that step
    host_factor: float | None  # the host's time without the profiler, as a share of its time with it; None: unknown
    # Those of the same training first, largest gain first; none if the replay is too far off.
    predictions: tuple[Prediction, ...]
    on_host: bool  # the job has no device

    @property
    def is_usable(self) -> bool:
        return abs(self.error_ratio) <= MAX_ERROR_RATIO

    @property
    def worthwhile(self) -> tuple[Prediction, ...]:
        """Of the same training, the largest gain first."""
        return _worthwhile(self.predictions)

    @property
    def best(self) -> Prediction | None:
        return next(iter(self.worthwhile), None)


def gain_words(one: Prediction) -> str:
    """`12.3 %`, or `12.3 to 20.1 %`."""
    low, high = one.gain_ratio or 0.0, one.most_gain_ratio or 0.0
    most = f"{100 * high:.1f} %"
    return most if high - low < _SAME_GAIN_RATIO else f"{100 * low:.1f} to {most}"


def gain_sentence(one: Prediction) -> str:
    remedies = "; ".join(change.remedy for change in one.changes)
    return f"{one.name} would save {gain_words(one)} of the step: {remedies}"


def _worthwhile(predictions: Sequence[Prediction]) -> tuple[Prediction, ...]:
    chosen = [one for one in predictions if one.gain >= MIN_GAIN_RATIO and not one.alters_training]
    return tuple(sorted(chosen, key=lambda one: -one.gain))


def forecast(
    traces: Mapping[int, Trace],
    changes: Sequence[Sequence[Change]] | None = None,
    true_step_ns: float | None = None,
    watch: Watch | None = None,
) -> Forecast:
    """Traces by rank. Without `changes`, each that there is, and the best two together. `true_step_ns` is the job's
    step without the profiler, to which the host's time is scaled. Raises ReplayError."""
    made, jobs = replay_as_is(traces, true_step_ns, watch)
    if not made.is_usable:
        return made
    found = [predict(jobs, tuple(one)) for one in changes or [(one,) for one in CHANGES]]
    if changes is None:
        found += _best_together(jobs, found)
    found.sort(key=lambda one: (one.alters_training, -one.gain))
    return replace(made, predictions=tuple(found))


@dataclass(frozen=True)
class Job:
    """The job as it is, with the host's time scaled."""

    ranks: Ranks
    step_ns: float
    watch: Watch | None


def replay_as_is(
    traces: Mapping[int, Trace], true_step_ns: float | None, watch: Watch | None = None
) -> tuple[Forecast, tuple[Job, ...]]:
    """The forecast without predictions, and the job that they start from: one, or one for each end of the range that
    the host's time is in; none if the replay is too far off. Raises ReplayError."""
    graphs = build_graphs(traces)
    times = replay(graphs)
    recorded, replayed = recorded_step_ns(graphs), replayed_step_ns(graphs, times)
    if recorded <= 0:
        raise ReplayError("its steps take no time")
    on_host = any(graph.on_host for graph in graphs.values())
    made = Forecast(recorded, replayed, replayed / recorded - 1, "", replayed, _costs(graphs), None, (), on_host)
    if not made.is_usable:
        if watch is not None:
            watch((), {rank: Traced(graphs[rank], traces[rank]) for rank in traces}, times)
        return replace(made, diverges_at=_divergence(graphs, traces, times)), ()
    factor = _host_factor(graphs, replayed, true_step_ns)
    # On a CPU the host's time is what the job computes, which the profiler makes little longer.
    unknown = (1.0,) if on_host else (1.0, MIN_HOST_FACTOR)
    factors = unknown if factor is None else (factor,)
    jobs = tuple(_job(graphs, traces, one, watch if one == factors[0] else None) for one in factors)
    costs = _costs({rank: one.graph for rank, one in jobs[0].ranks.items()})
    return replace(made, step_ns=jobs[0].step_ns, costs=costs, host_factor=factor), jobs


def _job(graphs: Mapping[int, Graph], traces: Mapping[int, Trace], factor: float, watch: Watch | None) -> Job:
    scaled = _scaled(graphs, factor)
    times = replay(scaled)
    ranks = {rank: Traced(scaled[rank], traces[rank]) for rank in traces}
    if watch is not None:
        watch((), ranks, times)
    return Job(ranks, replayed_step_ns(scaled, times), watch)


def _best_together(jobs: Sequence[Job], found: Sequence[Prediction]) -> list[Prediction]:
    """The best, and the best of those that it can be combined with."""
    worthwhile = _worthwhile(found)
    for other in worthwhile[1:]:
        both = worthwhile[0].changes + other.changes
        if not are_alternatives(both):
            return [predict(jobs, both)]
    return []


def _divergence(graphs: Mapping[int, Graph], traces: Mapping[int, Trace], times: Mapping[int, Times]) -> str:
    most, name = -1, ""
    for rank, graph in graphs.items():
        order = np.argsort(graph.start_ns, kind="stable")
        apart = np.abs(np.diff((times[rank].work_start_ns - graph.start_ns)[order], prepend=0))
        if len(apart) and int(apart.max()) > most:
            most = int(apart.max())
            name = traces[rank].named(int(traces[rank].name[graph.work_row[order[int(apart.argmax())]]]))
    return name


def predict(jobs: Sequence[Job], changes: tuple[Change, ...]) -> Prediction:
    if are_alternatives(changes):
        return Prediction(changes, None, None, reason="one takes the place of the other")
    samples = math.prod(change.samples for change in changes)
    outcomes = []
    try:
        for job in jobs:
            ranks = job.ranks
            for change in changes:
                ranks = change.apply(ranks)
            graphs = {rank: one.graph for rank, one in ranks.items()}
            times = replay(graphs)
            if job.watch is not None:
                job.watch(changes, ranks, times)
            step = replayed_step_ns(graphs, times)
            outcomes.append((1 - step / samples / job.step_ns, step, _costs(graphs)))
    except NotApplicableError as reason:
        return Prediction(changes, None, None, reason=str(reason))
    gains = [gain for gain, _, _ in outcomes]
    return Prediction(changes, outcomes[0][1], min(gains), max(gains), outcomes[0][2])


def _costs(graphs: Mapping[int, Graph]) -> StepCosts:
    rows = []
    for graph in graphs.values():
        first, last = graph.step_range
        calls = (graph.call_step >= first) & (graph.call_step <= last)
        works = (graph.work_step >= first) & (graph.work_step <= last)
        communicates = works & (graph.kind == Kind.COMMUNICATION)
        transfers = np.where(graph.collective != NOTHING, graph.transfer_ns, graph.duration_ns)
        total = (
            works.sum(),
            (graph.gap_ns - graph.input_ns + graph.own_ns)[calls].sum(),
            graph.duration_ns[works & ~communicates].sum(),
            transfers[communicates].sum(),
            graph.input_ns[calls].sum(),
        )
        rows.append([float(one) / (last - first + 1) for one in total])
    return StepCosts(*np.median(rows, axis=0).tolist())


def _scaled(graphs: Mapping[int, Graph], factor: float) -> dict[int, Graph]:
    if factor == 1.0:
        return dict(graphs)
    made = {}
    for rank, graph in graphs.items():
        # Waiting for a batch is not the host's own time. On a CPU, neither is a long time without operators: a profiler
        # does not slow a process that sleeps or reads.
        kept = graph.input_ns + graph.apart_ns if graph.on_host else graph.input_ns
        gap = kept + (factor * (graph.gap_ns - kept)).astype(np.int64)
        made[rank] = replace(
            graph,
            gap_ns=gap,
            own_ns=(factor * graph.own_ns).astype(np.int64),
            optimizer_ns=(factor * graph.optimizer_ns).astype(np.int64),
            apart_ns=graph.apart_ns if graph.on_host else (factor * graph.apart_ns).astype(np.int64),
        )
    return made


def _host_factor(graphs: Mapping[int, Graph], replayed: float, true_step_ns: float | None) -> float | None:
    """The factor of the host's time at which the replay takes as long as the job without the profiler; None where the
    step does not depend on it."""
    if true_step_ns is None:
        return None
    device_ns = replayed_step_ns(_scaled(graphs, 0.0))
    if device_ns > min((1 - _MIN_HOST_RATIO) * replayed, true_step_ns):
        return None
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS if true_step_ns < replayed else 0):
        middle = (low + high) / 2
        if replayed_step_ns(_scaled(graphs, middle)) < true_step_ns:
            low = middle
        else:
            high = middle
    return high
