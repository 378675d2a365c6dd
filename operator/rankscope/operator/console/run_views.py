"""Answers from the history of a run: its summary, its ranks over time, and the matrix of a heat map."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import Message

from rankscope.analysis.verdicts.windows import WORK_PHASES
from rankscope.common.text import printable
from rankscope.operator.console.answers import (
    TEXT_CHARACTERS,
    HeatmapHeader,
    Histogram,
    Layout,
    Numbers,
    RankDetail,
    RankHistory,
    RunDetail,
    RunSummary,
    Series,
    TimeSeries,
    breakdown_answer,
    measured,
    rank_fields,
    run_fields,
)
from rankscope.operator.console.history import RunView, Tick, Values
from rankscope.operator.console.older_history import COHORT, Key, Older, PrometheusHistory
from rankscope.operator.console.signals import PACE, SIGNAL_ROWS, SIGNALS
from rankscope.operator.correlation.daemon_windows import AXES, HeldWindows, RankSeen

SPARKLINE_SECONDS, SPARKLINE_POINTS = 900.0, 60
SERIES_POINTS = 180
HISTOGRAM_BINS, HISTOGRAM_TICKS = 32, 60
# Of a heat map. A browser asks every two seconds, and a screen has fewer pixels.
MAX_CELLS, MIN_COLUMNS = 1 << 19, 60
MAX_COHORT = 256
# Digits behind the point that float32 and a reader can tell apart in seconds.
DIGITS = 7
NO_PROMETHEUS = PrometheusHistory()

Times = tuple[list[float], list[float]]  # starts and ends
Spans = npt.NDArray[np.float64]  # the same, a row each
Rows = Values | Sequence[float] | Sequence[tuple[float, ...]]


def run_summary(view: RunView) -> RunSummary:
    return RunSummary(**_summary_fields(view))


def _summary_fields(view: RunView) -> dict[str, Any]:
    recent = _since(view.ticks, view.ticks[-1].end - SPARKLINE_SECONDS) if view.ticks else ()
    _, steps = _means(_spans(recent), [tick.pace[0] for tick in recent], 1, SPARKLINE_POINTS)
    return {
        **run_fields(view.state),
        "evaluated_unix_seconds": view.state.evaluated_unix_seconds,
        "ended_unix_seconds": view.ended_unix_seconds,
        "restarts": view.restarts,
        "lost_today_gpu_seconds": view.lost_today_gpu_seconds,
        "recent_step_seconds": numbers(steps[:, 0]),
    }


def run_detail(view: RunView, since: float = 0.0, source: PrometheusHistory = NO_PROMETHEUS) -> RunDetail:
    columns = layout_order(view)
    older = source.of_run(view, since, SERIES_POINTS)
    ticks = _since(view.ticks, since)
    rows = np.array([tick.pace for tick in ticks], dtype=np.float32).reshape(len(ticks), len(PACE))
    times, pace = _joined(older, _spans(ticks), rows, [(name, "") for name in PACE], SERIES_POINTS)
    phases = [
        name
        for name in (*(f"{phase}_seconds" for phase in WORK_PHASES), "wait_seconds")
        if view.ticks and name in view.signals
    ]
    return RunDetail(
        **_summary_fields(view),
        breakdown=breakdown_answer(view.state.breakdown, view.state.verdict),
        layout=_layout([view.members[column] for column in columns]),
        phase_seconds={name: numbers(_rows_of(view.ticks[-1:], view, name)[0][columns]) for name in phases},
        step_histogram=_histogram(view),
        pace=_time_series(
            view, source, older, times, [Series(name, numbers(pace[:, n])) for n, name in enumerate(PACE)]
        ),
        marks=list(view.marks),
        signals=list(view.signals),
    )


def layout_order(view: RunView) -> list[int]:
    """Columns of the run's values by place in the parallel layout."""
    places = [(who.coordinates, who.rank) for who in view.members]
    return sorted(range(len(places)), key=places.__getitem__)


def _layout(members: Sequence[RankSeen]) -> Layout:
    by_axis = {axis: [who.coordinates[number] for who in members] for number, axis in enumerate(AXES)}
    nodes = {node: number for number, node in enumerate(dict.fromkeys(who.node for who in members))}
    sizes = {axis: len({*values} - {-1}) for axis, values in by_axis.items()}
    return Layout(
        ranks=[who.rank for who in members],
        **by_axis,
        node=[nodes[who.node] for who in members],
        nodes=[printable(node, TEXT_CHARACTERS) for node in nodes],
        axes={axis: size for axis, size in sizes.items() if size},
    )


def _histogram(view: RunView) -> Histogram | None:
    if "step_seconds" not in view.signals:
        return None
    steps = _rows_of(view.ticks[-HISTOGRAM_TICKS:], view, "step_seconds")
    steps = steps[~np.isnan(steps)]
    if not len(steps):
        return None
    low, high = float(steps.min()), float(np.quantile(steps, 0.995))
    counts, edges = np.histogram(np.minimum(steps, high), HISTOGRAM_BINS, (low, max(high, low * 1.001, low + 1e-6)))
    return Histogram(edges=np.round(edges, DIGITS).tolist(), counts=counts.tolist())


def rank_history(
    view: RunView, rank: int, since: float = 0.0, source: PrometheusHistory = NO_PROMETHEUS
) -> RankHistory | None:
    """None if the run has no such rank."""
    column = next((column for column, who in enumerate(view.members) if who.rank == rank), None)
    if column is None:
        return None
    stage = view.members[column].stage
    cohort = [other for other, who in enumerate(view.members) if who.stage == stage]
    cohort = cohort[:: -(-len(cohort) // MAX_COHORT)]
    older = source.of_rank(view, rank, [view.members[other].rank for other in cohort], since, SERIES_POINTS)
    ticks = _since(view.ticks, since)
    series: list[Series] = []
    times: Times = ([], [])
    for name in view.signals:
        rows = _rows_of(ticks, view, name)[:, [column, *cohort]]
        times, means = _means(_spans(ticks), rows, len(cohort) + 1, SERIES_POINTS)
        both = np.stack([means[:, 0], _medians(means[:, 1:])], axis=1)
        times, both = _joined(older, np.array(times), both, [(name, str(rank)), (name, COHORT)], SERIES_POINTS)
        series.append(Series(signal=name, values=numbers(both[:, 0]), cohort_median=numbers(both[:, 1])))
    return RankHistory(
        run=view.name,
        rank=rank,
        latest=_rank_detail(view, view.members[column]),
        history=_time_series(view, source, older, times, series),
    )


def _rank_detail(view: RunView, who: RankSeen) -> RankDetail | None:
    windows = view.state.windows
    window = windows.of(who.rank) if isinstance(windows, HeldWindows) else None
    if window is None:
        return None
    phases = {phase: measured(window, f"{phase}_seconds") for phase in (*WORK_PHASES, "communication")}
    identity = window.identity
    return RankDetail(
        **rank_fields(window),
        run=view.name,
        pod=printable(identity.pod_name or identity.pod, TEXT_CHARACTERS),
        gpu_model=printable(identity.gpu_model, TEXT_CHARACTERS),
        attempt=identity.attempt,
        coordinates={axis: at for axis, at in zip(AXES, who.coordinates, strict=True) if at >= 0},
        window_end_unix_seconds=window.end_unix_nanos / 1e9,
        steps=window.steps if window.HasField("steps") else None,
        wait_source=printable(window.wait_source, TEXT_CHARACTERS),
        seconds_since_step=window.stall.seconds_since_step if window.HasField("stall") else None,
        host_seconds=measured(window, "host_seconds"),
        run_ahead_seconds=measured(window, "run_ahead_seconds"),
        phase_seconds={phase: seconds for phase, seconds in phases.items() if seconds is not None},
        phase_shares=_printable_keys(window.stacks.phase_shares),
        gpu=_scalars(window.gpu),
        throttled_seconds=_printable_keys(window.gpu.throttled_seconds),
        memory=_scalars(window.memory),
        process=_scalars(window.process),
    )


def _scalars(message: Message) -> dict[str, float]:
    return {field.name: float(value) for field, value in message.ListFields() if isinstance(value, int | float)}


def _printable_keys(shares: Mapping[str, float]) -> dict[str, float]:
    return {printable(name, 64): share for name, share in sorted(shares.items())[:64]}


def heatmap(
    view: RunView, signal: str, since: float, most_columns: int, source: PrometheusHistory = NO_PROMETHEUS
) -> tuple[HeatmapHeader, bytes]:
    """Since a moment, in at most so many columns, and in fewer where there are many ranks."""
    ticks = _since(view.ticks, since)
    ranks = layout_order(view)
    most_columns = min(most_columns, max(MIN_COLUMNS, MAX_CELLS // max(1, len(ranks))))
    older = source.of_ranks(view, signal, since, most_columns)
    keys = [(signal, str(who.rank)) for who in view.members]
    times, means = _joined(older, _spans(ticks), _rows_of(ticks, view, signal), keys, most_columns)
    matrix = np.ascontiguousarray(means.T[ranks], dtype="<f4")
    header = HeatmapHeader(
        run=view.name,
        signal=signal,
        unit=SIGNALS[SIGNAL_ROWS[signal]].unit,
        ranks=[view.members[column].rank for column in ranks],
        starts=times[0],
        ends=times[1],
        medians=_medians(means).tolist(),
        note=older.note,
    )
    return header, matrix.tobytes()


def _since(ticks: Sequence[Tick], since: float) -> Sequence[Tick]:
    first = next((place for place, tick in enumerate(ticks) if tick.end > since), len(ticks))
    return ticks[first:]


def _rows_of(ticks: Sequence[Tick], view: RunView, signal: str) -> Values:
    """A row per tick, a column per rank."""
    rows = np.full((len(ticks), len(view.members)), np.nan, dtype=np.float32)
    place = view.signals.index(signal) if signal in view.signals else None
    for row, tick in zip(rows, ticks, strict=True):
        if place is not None and place < len(tick.values):
            values = tick.values[place]
            row[: len(values)] = values
    return rows


def _spans(ticks: Sequence[Tick]) -> Spans:
    return np.array([[tick.start for tick in ticks], [tick.end for tick in ticks]])


def _joined(older: Older, spans: Spans, rows: Values, keys: list[Key], most: int) -> tuple[Times, Values]:
    """Older history and then these rows, a column per key, as at most so many rows of equal time."""
    if len(older.ends):
        before = np.stack([older.ends - older.step_seconds, older.ends])
        spans, rows = np.concatenate([before, spans], axis=1), np.concatenate([older.rows(keys), rows])
        most = max(1, min(most, round((spans[1, -1] - spans[0, 0]) / older.step_seconds)))
    return _means(spans, rows, len(keys), most)


def _means(spans: Spans, rows: Rows, width: int, most: int) -> tuple[Times, Values]:
    """At most so many rows, each of as much time as the others: the mean of what is known by time."""
    starts, ends = spans
    values = np.asarray(rows, dtype=np.float32).reshape(len(ends), width)
    if len(ends) > most:
        bins = ((ends - starts[0]) / (ends[-1] - starts[0]) * most).clip(0, most - 1).astype(np.int64)
        firsts = np.flatnonzero(np.diff(bins, prepend=-1))
        weights = (ends - starts).astype(np.float32)[:, None]
        known = ~np.isnan(values)
        total, held = (_sums(each, firsts) for each in (np.where(known, values, 0) * weights, known * weights))
        with np.errstate(invalid="ignore", divide="ignore"):
            values = np.divide(total, held, dtype=np.float32)
        starts, ends = starts[firsts], ends[np.append(firsts[1:], len(ends)) - 1]
    return (starts.tolist(), ends.tolist()), values  # exact: a client asks again since the last of them


def _sums(rows: Values, firsts: npt.NDArray[np.int64]) -> Values:
    """Of the rows from each of `firsts` to the next. np.add.reduceat takes five times as long."""
    return np.stack([part.sum(axis=0) for part in np.split(rows, firsts[1:])])


def _medians(rows: Values) -> Values:
    """Of each row; NaN where nothing is known."""
    ordered = np.sort(rows, axis=1)  # NaN comes last
    known = (~np.isnan(rows)).sum(axis=1)
    middle = np.stack([(known - 1).clip(0) // 2, (known // 2).clip(0, rows.shape[1] - 1)], axis=1)
    medians: Values = np.take_along_axis(ordered, middle, axis=1).mean(axis=1)
    return medians


def _time_series(
    view: RunView, source: PrometheusHistory, older: Older, times: Times, series: list[Series]
) -> TimeSeries:
    begins = view.ticks[0].start if view.ticks and not source.url else None
    return TimeSeries(starts=times[0], ends=times[1], series=series, begins_unix_seconds=begins, note=older.note)


def numbers(values: npt.NDArray[Any]) -> Numbers:
    """NaN is encoded as null."""
    rounded: Numbers = np.round(values.astype(np.float64), DIGITS).tolist()
    return rounded
