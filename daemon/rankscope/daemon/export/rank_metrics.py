"""The table of rank metrics, and the counters over a rank's life that are summed from its windows. `standard` of a row
says what `metrics_detail = standard` shows of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from google.protobuf.message import Message
from prometheus_client.metrics_core import Metric as Family

from rankscope.analysis.profiles.phases import OTHER, PHASES
from rankscope.analysis.verdicts.figures import CAUSE, CAUSES, FIGURES, Figure
from rankscope.common.metric_table import ANY, FULL_ONLY, Counter, Gauge, Section
from rankscope.common.run_names import run_labels
from rankscope.daemon.samples import Problem
from rankscope.daemon.steps.nccl_bandwidth import ALGORITHMS, FUNCTIONS, PROTOCOLS
from rankscope.daemon.windows.window import held_figures, late_seconds, measured
from rankscope.probe import ring_layout
from rankscope.v1.window_pb2 import RankWindow, StepStatistics

PROCESS_COUNTERS = (
    "cpu_seconds",
    "run_delay_seconds",
    "throttled_seconds",
    "stopped_seconds",
    "involuntary_switches",
    "voluntary_switches",
)
MAX_PROBLEMS = 64
PROBLEMS_PER_RANK = 6
PROBLEMS_IN_STANDARD = 3
MEMORY_KINDS = ("allocated", "reserved", "peak_allocated", "total")
GROUP_KINDS = {
    ring_layout.GROUP_EXPOSED: "exposed",
    ring_layout.GROUP_OVERLAPPED: "overlapped",
    ring_layout.GROUP_POINT_TO_POINT: "point_to_point",
    ring_layout.GROUP_DDP: "ddp",
    ring_layout.GROUP_RECORDER: "recorder",
    ring_layout.GROUP_NCCL: "nccl",
}
MAX_COLLECTIVES = ring_layout.MAX_GROUPS
# Where NCCL tells all waiting, time in the same collectives would be waiting twice.
BESIDE_NCCL = (ring_layout.GROUP_NCCL, ring_layout.GROUP_POINT_TO_POINT)


@dataclass(frozen=True)
class RankTotals:
    """Since the daemon first saw this incarnation. A missing name was never measured."""

    cause_seconds: Mapping[str, float] = field(default_factory=dict)
    process: Mapping[str, float] = field(default_factory=dict)
    steps_lost: int | None = None
    stack_samples: int | None = None
    stack_errors: int | None = None
    long_seconds: float | None = None
    late_seconds: float | None = None
    collective_bytes: Mapping[tuple[str, str], float] = field(default_factory=dict)  # by group and function


@dataclass(frozen=True)
class RankReport:
    """One rank as the exporter shows it."""

    window: RankWindow
    totals: RankTotals
    problems: tuple[Problem, ...] = ()


def add_window(totals: RankTotals, window: RankWindow) -> RankTotals:
    has_stacks, has_long = window.HasField("stacks"), window.HasField("long_steps")
    long = window.long_steps
    return RankTotals(
        cause_seconds=_added(totals.cause_seconds, _cause_seconds(window)),
        process=_added(totals.process, measured(window.process, PROCESS_COUNTERS)),
        steps_lost=_sum(totals.steps_lost, window.steps_lost if window.HasField("steps_lost") else None),
        stack_samples=_sum(totals.stack_samples, window.stacks.samples if has_stacks else None),
        stack_errors=_sum(totals.stack_errors, window.stacks.errors if has_stacks else None),
        long_seconds=_sum(totals.long_seconds, long.seconds if has_long else None),
        late_seconds=_sum(
            totals.late_seconds, late_seconds(long) if has_long and long.HasField("waited_seconds") else None
        ),
        collective_bytes=_collective_bytes(totals.collective_bytes, window),
    )


def _cause_seconds(window: RankWindow) -> Mapping[str, float]:
    """Of all steps of the window: the window holds means per step."""
    means = held_figures(window)
    return {cause: means[name] * window.steps for cause, name in CAUSES.items() if name in means}


def _collective_bytes(before: Mapping[tuple[str, str], float], window: RankWindow) -> Mapping[tuple[str, str], float]:
    """Of all steps of the window. A process can make any number of groups: those seen last are kept."""
    totals = dict(before)
    for rate in window.collectives:
        key = (f"{rate.number:x}", rate.function)
        totals[key] = totals.pop(key, 0.0) + rate.bytes_per_step * window.steps
    return dict(list(totals.items())[-MAX_COLLECTIVES:])


def _added(before: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {**before, **{name: before.get(name, 0.0) + value for name, value in more.items()}}


_Number = TypeVar("_Number", int, float)


def _sum(before: _Number | None, value: _Number | None) -> _Number | None:
    return before if value is None else (before or 0) + value


@dataclass(frozen=True)
class _Rank:
    report: RankReport
    full: bool

    @property
    def window(self) -> RankWindow:
        return self.report.window


def _gauge(name: str, figure: Figure) -> Gauge[_Rank]:
    """Of a figure that the window has as it is."""
    standard = None if figure.is_standard else FULL_ONLY
    return Gauge(figure.metric, figure.definition, lambda rank: rank.window.figures.get(name), standard=standard)


# fmt: off
RANKS: Section[_Rank] = Section(("run_namespace", "run", "rank"), (
    Gauge("rankscope_rank_info",
        "Identity of a rank, value 1; join on run_namespace, run and rank. pipeline, tensor and data are its place in "
        "the parallel layout. A label is empty where it is not known.", lambda rank: _rank_info(rank.window),
        dict.fromkeys(("node", "run_pod", "gpu", "world_size", "pid", "attempt", "pipeline", "tensor", "data"), ANY)),
    Gauge("rankscope_rank_up", "1 if any source could measure the rank.", lambda rank: bool(rank.window.sources)),
    Counter("rankscope_rank_steps_total", FIGURES["steps_total"].definition,
        lambda rank: _optional(rank.window, "steps_total")),
    Gauge("rankscope_rank_seconds_since_step", "Time since the last step ended.",
        lambda rank: _seconds_since_step(rank.window)),
    Gauge("rankscope_rank_stalled", "1 while the rank makes no progress.",
        lambda rank: rank.window.HasField("stall") if rank.window.sources else None),
    Gauge("rankscope_rank_step_seconds", FIGURES["step_seconds"].definition,
        lambda rank: _statistics(rank.window.step_seconds), {"stat": ("p50", "p90")}),
    Gauge("rankscope_rank_self_seconds", FIGURES["self_seconds"].definition,
        lambda rank: _statistics(rank.window.self_seconds), {"stat": ("p50", "p90")}),
    *(_gauge(name, figure) for name, figure in FIGURES.items() if figure.metric and not figure.is_cause),
    Gauge("rankscope_rank_group_seconds",
        "Time in collectives per step by process group, where steps are timed on a device. What a rank spends beyond "
        "the least in its group is waiting. group is equal on all members.", lambda rank: _group_seconds(rank),
        {"group": ANY, "kind": tuple(GROUP_KINDS.values())}),
    Gauge("rankscope_rank_collective_bus_bandwidth_bytes_per_second",
        "Bus bandwidth as nccl-tests define it, of the rank's usual collectives in the last window, by process group "
        "and function. The rank that waits least shows the link: take the maximum of a group. From NCCL's own times.",
        lambda rank: _bus_bandwidths(rank),
        {"group": ANY, "function": FUNCTIONS, "algorithm": ALGORITHMS, "protocol": PROTOCOLS}),
    Counter("rankscope_rank_collective_bytes_total",
        "Size of the arrays in NCCL's operations as nccl-tests count it, by process group and function, in windows "
        "where NCCL's own times are known.", lambda rank: rank.report.totals.collective_bytes,
        {"group": ANY, "function": FUNCTIONS}, standard=FULL_ONLY),
    Gauge("rankscope_rank_nccl_cost_ratio",
        "Share of a step that asking NCCL for its times costs, measured in the job. Noise may make it negative.",
        lambda rank: _optional(rank.window, "nccl_cost_ratio"), standard=FULL_ONLY),
    Gauge("rankscope_rank_model_flops_per_step",
        "Model FLOPs of this rank per step: declared FLOPs of the job by world size, or counted.",
        lambda rank: _optional(rank.window, "model_flops_per_step"), standard=FULL_ONLY),
    Gauge("rankscope_rank_peak_flops_per_second",
        "Peak of the rank's device: declared, or dense bf16 by the device's name.",
        lambda rank: _optional(rank.window, "peak_flops_per_second")),
    Gauge("rankscope_rank_device_memory_bytes",
        "Memory of the rank's device: its total, and what torch's allocator has of it. CUDA only.",
        lambda rank: {kind: _optional(rank.window.memory, f"{kind}_bytes") for kind in MEMORY_KINDS},
        {"kind": MEMORY_KINDS}),
    Counter(CAUSE,
        "Time by cause. self + wait is the step; communication overlaps with backward, so not all causes add up.",
        lambda rank: {cause: rank.report.totals.cause_seconds.get(cause) for cause in CAUSES},
        {"cause": tuple(CAUSES)}),
    Counter("rankscope_rank_long_step_seconds_total",
        "Time of steps of at least twice the usual length, beyond the usual. Such steps are few.",
        lambda rank: rank.report.totals.long_seconds, standard=FULL_ONLY),
    Counter("rankscope_rank_late_seconds_total",
        "Of the time of long steps, what this rank did not spend waiting for others, nor in checkpoints.",
        lambda rank: rank.report.totals.late_seconds, standard=FULL_ONLY),
    Counter("rankscope_rank_steps_lost_total", "Steps overwritten in the ring before the daemon read them.",
        lambda rank: rank.report.totals.steps_lost, standard=FULL_ONLY),
    Counter("rankscope_rank_cpu_seconds_total", "CPU time of the process.",
        lambda rank: rank.report.totals.process.get("cpu_seconds")),
    Counter("rankscope_rank_run_delay_seconds_total", "Time the training thread was runnable but not running.",
        lambda rank: rank.report.totals.process.get("run_delay_seconds")),
    Counter("rankscope_rank_throttled_seconds_total", "Time the rank's cgroup was out of CPU quota.",
        lambda rank: rank.report.totals.process.get("throttled_seconds")),
    Counter("rankscope_rank_stopped_seconds_total", "Time the process was seen stopped by a signal.",
        lambda rank: rank.report.totals.process.get("stopped_seconds")),
    Counter("rankscope_rank_involuntary_switches_total", "Times the process was preempted.",
        lambda rank: rank.report.totals.process.get("involuntary_switches"), standard=FULL_ONLY),
    Counter("rankscope_rank_voluntary_switches_total", "Times the process gave the CPU up.",
        lambda rank: rank.report.totals.process.get("voluntary_switches"), standard=FULL_ONLY),
    Gauge("rankscope_rank_resident_bytes", FIGURES["resident_bytes"].definition,
        lambda rank: _optional(rank.window.process, "resident_bytes")),
    Gauge("rankscope_rank_threads", "Threads of the process.", lambda rank: _optional(rank.window.process, "threads"),
        standard=FULL_ONLY),
    Counter("rankscope_rank_stack_samples_total", "Stacks read of the training thread.",
        lambda rank: rank.report.totals.stack_samples),
    Counter("rankscope_rank_stack_errors_total", "Stacks that could not be read.",
        lambda rank: rank.report.totals.stack_errors, standard=FULL_ONLY),
    Gauge("rankscope_rank_phase_ratio",
        "Share of stack samples by phase in the last window. backward is autograd's engine, which may wait for other "
        "ranks; backward_code is Python code that it calls.", lambda rank: _phase_ratios(rank), {"phase": PHASES}),
    Gauge("rankscope_rank_problem", "1 while a source has this kind of problem with the rank.",
        lambda rank: _problems(rank), {"source": ANY, "kind": ANY}),
))
# fmt: on


def rank_metrics(reports: Iterable[RankReport], full: bool) -> Iterator[Family]:
    ranks = [_Rank(report, full) for report in reports]
    identities = [rank.window.identity for rank in ranks]
    yield from RANKS.families(
        zip(((*run_labels(one.job).values(), str(one.rank)) for one in identities), ranks, strict=True), full=full
    )


def _rank_info(window: RankWindow) -> Mapping[tuple[str, ...], float]:
    identity = window.identity
    pod = identity.pod_name or identity.pod
    size, pid = str(identity.world_size), str(identity.pid)
    place = identity.coordinates
    axes = (str(getattr(place, axis)) if place.HasField(axis) else "" for axis in ("pipeline", "tensor", "data"))
    return {(identity.node, pod, identity.gpu_uuid, size, pid, str(identity.attempt), *axes): 1}


def _seconds_since_step(window: RankWindow) -> float | None:
    if not window.HasField("last_step_unix_nanos"):
        return None
    return max(0.0, (window.end_unix_nanos - window.last_step_unix_nanos) / 1e9)


def _statistics(statistics: StepStatistics) -> Mapping[str, float]:
    return {"p50": statistics.p50, "p90": statistics.p90} if statistics.ListFields() else {}


def _group_seconds(rank: _Rank) -> Mapping[tuple[str, str], float]:
    window = rank.window
    step_mean_seconds = window.step_seconds.mean
    is_timed = "host_seconds" in window.figures and step_mean_seconds > 0
    # Where the rank knows its self time, groups add nothing to it.
    if not is_timed or (window.HasField("self_seconds") and not rank.full):
        return {}
    has_nccl = any(group.kind == ring_layout.GROUP_NCCL for group in window.groups)
    return {
        (f"{group.number:x}", GROUP_KINDS.get(group.kind, "")): group.seconds * step_mean_seconds / group.step_seconds
        for group in window.groups
        if group.step_seconds > 0 and not (has_nccl and group.kind not in BESIDE_NCCL)
    }


def _bus_bandwidths(rank: _Rank) -> Mapping[tuple[str, ...], float]:
    """By default only that with the most bytes, which are the first."""
    known = [rate for rate in rank.window.collectives if rate.HasField("bus_bytes_per_second")]
    return {
        (f"{rate.number:x}", rate.function, rate.algorithm, rate.protocol): rate.bus_bytes_per_second
        for rate in known[: MAX_COLLECTIVES if rank.full else 1]
    }


def _phase_ratios(rank: _Rank) -> Mapping[str, float]:
    # The probe's split of the step is the better one, and the two would double the cost of a rank.
    is_split = {"forward", "backward"} <= rank.report.totals.cause_seconds.keys()
    if not rank.window.HasField("stacks") or (is_split and not rank.full):
        return {}
    ratios = dict.fromkeys(PHASES, 0.0)
    for phase, ratio in rank.window.stacks.phase_shares.items():
        ratios[phase if phase in ratios else OTHER] += ratio
    return ratios


def _problems(rank: _Rank) -> Mapping[tuple[str, str], float]:
    kinds = dict.fromkeys(((problem.source, problem.kind) for problem in rank.report.problems[:MAX_PROBLEMS]), 1.0)
    return dict(list(kinds.items())[: PROBLEMS_PER_RANK if rank.full else PROBLEMS_IN_STANDARD])


def _optional(message: Message, name: str) -> float | None:
    return float(getattr(message, name)) if message.HasField(name) else None
