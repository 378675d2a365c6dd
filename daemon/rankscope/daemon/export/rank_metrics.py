"""Ranks as Prometheus metrics. What was not measured has no series."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from google.protobuf.message import Message
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from rankscope.daemon.stacks.phases import OTHER, PHASES
from rankscope.daemon.windows.totals import CAUSES, RankReport
from rankscope.daemon.windows.window import bounded
from rankscope.probe import ring_layout
from rankscope.v1.window_pb2 import RankWindow

LABEL_CHARACTERS = 128
PROBLEMS_LOOKED_AT = 64
PROBLEMS_PER_RANK = 6
PROBLEMS_IN_STANDARD = 3
# Of the step: less is the time that it takes to reach the device.
DEVICE_BOUND_RATIO = 0.1
GROUP_KINDS = {
    ring_layout.GROUP_EXPOSED: "exposed",
    ring_layout.GROUP_OVERLAPPED: "overlapped",
    ring_layout.GROUP_POINT_TO_POINT: "point_to_point",
    ring_layout.GROUP_DDP: "ddp",
    ring_layout.GROUP_RECORDER: "recorder",
}
# No alert needs these, and a dashboard seldom.
FULL_ONLY = frozenset(
    {
        "rank_involuntary_switches",
        "rank_voluntary_switches",
        "rank_threads",
        "rank_steps_lost",
        "rank_stack_errors",
        "rank_model_flops_per_step",
        "rank_host_seconds",
    }
)


def label(text: str) -> str:
    return bounded(text, LABEL_CHARACTERS)


class _Families:
    """Metric families of ranks, made when the first sample comes."""

    def __init__(self, full: bool) -> None:
        self.full = full
        self.made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def gauge(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None and self._is_shown(name):
            family = self.made.get(name) or GaugeMetricFamily(f"rankscope_{name}", text, labels=list(labels))
            self._add(name, family, labels, value)

    def counter(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None and self._is_shown(name):
            family = self.made.get(name) or CounterMetricFamily(f"rankscope_{name}", text, labels=list(labels))
            self._add(name, family, labels, value)

    def _is_shown(self, name: str) -> bool:
        return self.full or name not in FULL_ONLY

    def _add(
        self, name: str, family: GaugeMetricFamily | CounterMetricFamily, labels: Mapping[str, str], value: float
    ) -> None:
        self.made[name] = family
        family.add_metric(list(labels.values()), value)


def rank_metrics(ranks: Iterable[RankReport], node: str, full: bool) -> Iterator[Metric]:
    """`full` has all; without it the least useful series are left out, to keep a rank and its GPU within sixty."""
    families = _Families(full)
    shown: set[tuple[str, str]] = set()
    for report in ranks:
        identity = report.window.identity
        who = {"job": label(identity.job), "rank": str(identity.rank)}
        # One series twice makes Prometheus refuse the whole scrape, so the first claim of a rank wins.
        if (who["job"], who["rank"]) not in shown:
            shown.add((who["job"], who["rank"]))
            _add_rank(families, report, who, node)
    yield from families.made.values()


def _add_rank(families: _Families, report: RankReport, who: Mapping[str, str], node: str) -> None:
    window, totals = report.window, report.totals
    identity = window.identity
    info = {
        **who,
        "node": label(node),
        "namespace": label(identity.namespace),
        "pod": label(identity.pod_name or identity.pod),
        "gpu": label(identity.gpu_uuid),
        "world_size": str(identity.world_size),
        "pid": str(identity.pid),
    }
    for axis in ("pipeline", "tensor", "data"):
        info[axis] = str(getattr(identity.coordinates, axis)) if identity.coordinates.HasField(axis) else ""
    text = (
        "Identity of a rank, value 1; join on job and rank. pipeline, tensor and data are its place in the parallel "
        "layout. A label is empty where it is not known."
    )
    families.gauge("rank_info", text, info, 1)
    families.gauge("rank_up", "1 if any source could measure the rank.", who, float(bool(window.sources)))
    problems = dict.fromkeys((label(p.source), label(p.kind)) for p in report.problems[:PROBLEMS_LOOKED_AT])
    for problem in list(problems)[: PROBLEMS_PER_RANK if families.full else PROBLEMS_IN_STANDARD]:
        labels = {**who, "source": problem[0], "kind": problem[1]}
        families.gauge("rank_problem", "1 while a source has this kind of problem with the rank.", labels, 1)
    _add_steps(families, window, who)
    for cause in CAUSES:
        seconds = totals.cause_seconds.get(cause)
        text = "Time by cause. self + wait is the step; communication overlaps with backward, so not all causes add up."
        families.counter("rank_cause_seconds", text, {**who, "cause": cause}, seconds)
    text = "Steps overwritten in the ring before the daemon read them."
    families.counter("rank_steps_lost", text, who, totals.steps_lost)
    _add_process(families, report, who)
    _add_stacks(families, report, who)


def _add_steps(families: _Families, window: RankWindow, who: Mapping[str, str]) -> None:
    families.counter("rank_steps", "Steps since the process began.", who, _optional(window, "steps_total"))
    since = (window.end_unix_nanos - window.last_step_unix_nanos) / 1e9
    known = window.HasField("last_step_unix_nanos")
    text = "Time since the last step ended."
    families.gauge("rank_seconds_since_step", text, who, max(0.0, since) if known else None)
    stalled = float(window.HasField("stall")) if window.sources else None
    families.gauge("rank_stalled", "1 while the rank makes no progress.", who, stalled)
    for name, text, statistics in (
        (
            "step",
            "Step time in the last window. In synchronous training it is the same on every rank.",
            window.step_seconds,
        ),
        ("self", "Step time less waiting on others, in the last window. The one to compare.", window.self_seconds),
    ):
        if statistics.ListFields():
            for quantile, value in (("0.5", statistics.p50), ("0.9", statistics.p90)):
                families.gauge(f"rank_{name}_seconds", text, {**who, "quantile": quantile}, value)
    _add_device(families, window, who)
    for name, text in (
        (
            "model_flops_per_step",
            "Model FLOPs of this rank per step: declared FLOPs of the job by world size, or counted.",
        ),
        ("peak_flops_per_second", "Peak of the rank's device: declared, or dense bf16 by the device's name."),
        (
            "mfu_ratio",
            "Model FLOPs utilisation in the last window. Absent unless the FLOPs and the peak are known.",
        ),
    ):
        families.gauge(f"rank_{name}", text, who, _optional(window, name))
    for kind in ("allocated", "reserved", "peak_allocated", "total"):
        amount = _optional(window.memory, f"{kind}_bytes")
        text = "Memory of the rank's device: its total, and what torch's allocator has of it. CUDA only."
        families.gauge("rank_device_memory_bytes", text, {**who, "kind": kind}, amount)


def _add_device(families: _Families, window: RankWindow, who: Mapping[str, str]) -> None:
    """Of ranks whose steps are timed on a device."""
    text = "What a step took on the host, where step time is the device's. It says nothing about the step by itself."
    families.gauge("rank_host_seconds", text, who, _optional(window, "host_seconds"))
    ahead = _optional(window, "run_ahead_seconds")
    text = "The furthest the host was ahead of the device within a step, in the last window."
    families.gauge("rank_run_ahead_seconds", text, who, ahead)
    if ahead is not None and window.step_seconds.mean > 0:
        is_device_bound = ahead >= DEVICE_BOUND_RATIO * window.step_seconds.mean
        text = "1 if the host runs ahead of the device, 0 if the device waits for its host."
        families.gauge("rank_device_bound", text, who, float(is_device_bound))
    text = (
        "Time in collectives per step by process group, where steps are timed on a device. What a rank spends beyond "
        "the least in its group is waiting. group is equal on all members."
    )
    # Where the rank knows its self time, groups add nothing to it.
    is_timed = window.HasField("host_seconds") and window.step_seconds.mean > 0
    is_shown = is_timed and (families.full or not window.HasField("self_seconds"))
    for group in window.groups if is_shown else ():
        labels = {**who, "group": f"{group.number:x}", "kind": GROUP_KINDS.get(group.kind, "other")}
        scaled = group.seconds * window.step_seconds.mean / group.step_seconds if group.step_seconds > 0 else None
        families.gauge("rank_group_seconds", text, labels, scaled)


def _add_process(families: _Families, report: RankReport, who: Mapping[str, str]) -> None:
    for name, text in (
        ("cpu_seconds", "CPU time of the process."),
        ("run_delay_seconds", "Time the training thread was runnable but not running."),
        ("throttled_seconds", "Time the rank's cgroup was out of CPU quota."),
        ("stopped_seconds", "Time the process was seen stopped by a signal."),
        ("involuntary_switches", "Times the process was preempted."),
        ("voluntary_switches", "Times the process gave the CPU up."),
    ):
        families.counter(f"rank_{name}", text, who, report.totals.process.get(name))
    usage = report.window.process
    families.gauge("rank_resident_bytes", "Memory of the process.", who, _optional(usage, "resident_bytes"))
    families.gauge("rank_threads", "Threads of the process.", who, _optional(usage, "threads"))


def _add_stacks(families: _Families, report: RankReport, who: Mapping[str, str]) -> None:
    totals = report.totals
    families.counter("rank_stack_samples", "Stacks read of the training thread.", who, totals.stack_samples)
    families.counter("rank_stack_errors", "Stacks that could not be read.", who, totals.stack_errors)
    # The probe's split of the step is the better one, and the two would double the cost of a rank.
    is_split = {"forward", "backward"} <= totals.cause_seconds.keys()
    if not report.window.HasField("stacks") or (is_split and not families.full):
        return
    # Phases are labels, so the set is closed.
    shares = dict.fromkeys(PHASES, 0.0)
    for phase, share in report.window.stacks.phase_shares.items():
        shares[phase if phase in shares else OTHER] += share
    for phase, share in shares.items():
        text = (
            "Share of stack samples by phase in the last window. backward is autograd's engine, which may wait for "
            "other ranks; backward_code is Python code that it calls."
        )
        families.gauge("rank_phase_ratio", text, {**who, "phase": phase}, share)


def _optional(message: Message, name: str) -> float | None:
    return float(getattr(message, name)) if message.HasField(name) else None
