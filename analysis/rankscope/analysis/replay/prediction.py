"""What changes would bring: the replay of a job as it was, and of the job with each change."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.replay.changes import CHANGES, Change, NotApplicableError, Ranks, Traced
from rankscope.analysis.replay.graph import Graph, ReplayError
from rankscope.analysis.replay.job import build_graphs, recorded_step_ns, replayed_step_ns
from rankscope.analysis.replay.replay import replay
from rankscope.analysis.traces.trace import Trace

# Above this, what a replay says about changes means nothing.
MOST_ERROR_RATIO = 0.05
# Less is within the noise of any step.
LEAST_GAIN_RATIO = 0.01
_BISECTIONS = 30


@dataclass(frozen=True)
class Prediction:
    changes: tuple[Change, ...]
    step_ns: float | None  # None if it does not apply
    gain_ratio: float | None  # of the step; below 0 if it becomes longer
    reason: str = ""  # why it does not apply

    @property
    def name(self) -> str:
        return "+".join(change.name for change in self.changes)

    @property
    def gain(self) -> float:
        """For sorting: what does not apply comes last."""
        return -math.inf if self.gain_ratio is None else self.gain_ratio


@dataclass(frozen=True)
class Forecast:
    recorded_step_ns: float  # while the profiler ran
    replayed_step_ns: float
    error_ratio: float
    diverges_at: str  # the kernel before which recording and replay drift apart most; empty if the replay is usable
    step_ns: float  # that the predictions start from: without the profiler, if that is known
    host_factor: float  # the host's time without the profiler, as a share of its time with it
    predictions: tuple[Prediction, ...]  # largest gain first; none if the replay is too far off
    on_host: bool = False  # the job has no device

    @property
    def is_usable(self) -> bool:
        return abs(self.error_ratio) <= MOST_ERROR_RATIO


def forecast(
    traces: Mapping[int, Trace],
    changes: Sequence[Sequence[Change]] | None = None,
    true_step_ns: float | None = None,
) -> Forecast:
    """Traces by rank. Without `changes`, each that there is, and the best two together. `true_step_ns` is the job's
    step without the profiler, to which the host's time is scaled. Raises ReplayError."""
    graphs = build_graphs(traces)
    recorded, replayed = recorded_step_ns(graphs), replayed_step_ns(graphs)
    if recorded <= 0:
        raise ReplayError("its steps take no time")
    on_host = any(graph.on_host for graph in graphs.values())
    made = Forecast(recorded, replayed, replayed / recorded - 1, "", replayed, 1.0, (), on_host)
    if not made.is_usable:
        return replace(made, diverges_at=_divergence(graphs, traces))
    factor = _host_factor(graphs, replayed, true_step_ns)
    scaled = _scaled(graphs, factor)
    ranks = {rank: Traced(scaled[rank], traces[rank]) for rank in traces}
    base = replayed if factor == 1.0 else replayed_step_ns(scaled)
    found = [_predict(ranks, tuple(one), base) for one in changes or [(one,) for one in CHANGES]]
    if changes is None:
        best = sorted((one for one in found if one.gain >= LEAST_GAIN_RATIO), key=lambda one: -one.gain)[:2]
        if len(best) == 2:
            found.append(_predict(ranks, best[0].changes + best[1].changes, base))
    found.sort(key=lambda one: -one.gain)
    return replace(made, step_ns=base, host_factor=factor, predictions=tuple(found))


def _divergence(graphs: Mapping[int, Graph], traces: Mapping[int, Trace]) -> str:
    times = replay(graphs)
    most, name = -1, ""
    for rank, graph in graphs.items():
        order = np.argsort(graph.start_ns, kind="stable")
        apart = np.abs(np.diff((times[rank].work_start_ns - graph.start_ns)[order], prepend=0))
        if len(apart) and int(apart.max()) > most:
            most = int(apart.max())
            name = traces[rank].named(int(traces[rank].name[graph.work_row[order[int(apart.argmax())]]]))
    return name


def _predict(ranks: Ranks, changes: tuple[Change, ...], base: float) -> Prediction:
    try:
        for change in changes:
            ranks = change.apply(ranks)
    except NotApplicableError as reason:
        return Prediction(changes, None, None, str(reason))
    step = replayed_step_ns({rank: one.graph for rank, one in ranks.items()})
    return Prediction(changes, step, 1 - step / base)


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


def _host_factor(graphs: Mapping[int, Graph], replayed: float, true_step_ns: float | None) -> float:
    """The factor of the host's time at which the replay takes as long as the job without the profiler; 1 where the
    device alone takes longer, so that the step does not tell."""
    if true_step_ns is None or true_step_ns >= replayed or replayed_step_ns(_scaled(graphs, 0.0)) > true_step_ns:
        return 1.0
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if replayed_step_ns(_scaled(graphs, middle)) < true_step_ns:
            low = middle
        else:
            high = middle
    return high
