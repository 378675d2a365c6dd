"""Builds a RankWindow from samples, and the table of a tick's windows. Pure; what was not measured stays absent."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
from google.protobuf.message import Message

from rankscope.analysis.models.mfu import step_mfu_ratio
from rankscope.analysis.verdicts.figures import FIGURES, OF_STEPS, PARTS_OF_SELF
from rankscope.analysis.verdicts.network import NodeNetwork
from rankscope.analysis.verdicts.window_columns import GROUP_FIGURES, GROUPS, pack
from rankscope.common.text import printable
from rankscope.daemon.samples import (
    Column,
    GpuSample,
    Problem,
    ProcessSample,
    RankProcess,
    Span,
    StackSample,
    StepSample,
)
from rankscope.probe import nccl_plugin, ring_layout
from rankscope.v1.identity_pb2 import ParallelCoordinates, Program, RankIdentity
from rankscope.v1.rank_service_pb2 import WindowColumns
from rankscope.v1.window_pb2 import (
    SOURCE_CAPTURE,
    SOURCE_GPU,
    SOURCE_NETWORK,
    SOURCE_PROBE,
    SOURCE_PROCESS,
    SOURCE_STACKS,
    CollectiveRate,
    FrameShare,
    GpuUsage,
    GroupSeat,
    GroupSpan,
    LongSteps,
    Memory,
    NcclLog,
    NetworkPort,
    ProcessUsage,
    RangeTime,
    RankWindow,
    StackSummary,
    Stall,
    StepOperations,
    StepStatistics,
)

PeakOfDevice = Callable[[str], float | None]

# The GPU part of a window.
GPU_NAME_CHARACTERS = 128
GPU_FIGURES = tuple(field.name for field in GpuUsage.DESCRIPTOR.fields if field.has_presence)
SHOWN_OF_GPU = tuple(
    name for figure in FIGURES if (name := figure.removeprefix("gpu_")) in GpuUsage.DESCRIPTOR.fields_by_name
)
NETWORK_NAME_CHARACTERS = 64
NCCL_FACTS = tuple(NcclLog.DESCRIPTOR.fields_by_name)


def add_gpu(window: RankWindow, sample: GpuSample, peak_of_device: PeakOfDevice) -> None:
    """Identity, usage, and the device's peak if the probe did not declare it."""
    identity = window.identity
    for name, text in (
        ("gpu_uuid", sample.uuid),
        ("gpu_model", sample.model),
        ("pod_name", sample.pod_name),
        ("namespace", sample.namespace),
    ):
        if text:
            setattr(identity, name, printable(text, GPU_NAME_CHARACTERS))
    measured_of_gpu = {name: getattr(sample, name) for name in GPU_FIGURES}
    usage = GpuUsage(gpus=sample.gpus, shared=sample.shared, **_sound(measured_of_gpu))
    for reason, seconds in sample.throttled_seconds.items():
        if math.isfinite(seconds) and seconds >= 0:
            usage.throttled_seconds[reason] = seconds
    window.gpu.CopyFrom(usage)
    window.sources["gpu"] = SOURCE_GPU
    if not window.HasField("peak_flops_per_second") and sample.model:
        peak = peak_of_device(sample.model)
        if peak is not None and math.isfinite(peak) and peak > 0:
            window.peak_flops_per_second = peak
            window.sources["peak_flops_per_second"] = SOURCE_GPU


def add_network(window: RankWindow, sample: NodeNetwork, peak_of_device: PeakOfDevice) -> None:
    """Names of ports are the kernel's; NCCL's log is the rank's own, and bounded by its parser."""
    network = window.network
    for name in ("tcp_segments", "tcp_retransmits", "tcp_usual_retransmit_ratio"):
        if (value := getattr(sample, name)) is not None:
            setattr(network, name, value)
    network.seconds, network.is_own_namespace = sample.seconds, sample.is_own_namespace
    for port in sample.ports:
        network.ports.append(NetworkPort(**vars(port) | {"device": printable(port.device, NETWORK_NAME_CHARACTERS)}))
    if sample.nccl is not None:
        network.nccl.CopyFrom(NcclLog(**{name: getattr(sample.nccl, name) for name in NCCL_FACTS}))
    window.sources["network"] = SOURCE_NETWORK


MAX_PROBLEMS = 8
PROBLEM_CHARACTERS = 300
NAME_CHARACTERS = 256
# A file name with a line break can forge lines of py-spy's output, with any count.
MAX_COUNT = (1 << 32) - 1
# Figures of which a window has more than the mean.
STATISTICS = ("step_seconds", "self_seconds", "wait_seconds")
COUNTS = ("steps", "steps_total")
USUAL = ("usual_wait_seconds", "usual_self_seconds", "usual_checkpoint_seconds")
SOURCES_OF_WAIT = {
    ring_layout.GROUP_NCCL: "NCCL",
    ring_layout.GROUP_DDP: "ddp timers",
    ring_layout.GROUP_EXPOSED: "collective spans",
    ring_layout.GROUP_OVERLAPPED: "collective spans",
    ring_layout.GROUP_POINT_TO_POINT: "collective spans",
    ring_layout.GROUP_RECORDER: "flight recorder",
}
BLIND = (
    "steps: waiting is not measured, as collectives are issued by compiled code, C++ or a CUDA graph, where the probe "
    "cannot time them; record steps with --duty-cycle-steps 10, or start the job with TORCH_NCCL_ENABLE_TIMING=1"
)
INSPECTOR = "NCCL Inspector"
OTHER_PLUGIN = f"steps: NCCL's own times are not measured, as {nccl_plugin.OTHER} that writes no lines of {INSPECTOR}"


@dataclass(frozen=True)
class RankSamples:
    """Everything that the collectors returned for one rank and one window: a field for each, by its name."""

    steps: StepSample | None = None
    process: ProcessSample | None = None
    stacks: StackSample | None = None
    problems: tuple[Problem, ...] = ()
    gpu: GpuSample | None = None
    network: NodeNetwork | None = None


def assemble(
    rank: RankProcess,
    node: str,
    span: Span,
    sequence: int,
    samples: RankSamples,
    peak_of_device: PeakOfDevice,
    stall: Stall | None = None,
) -> RankWindow:
    window = RankWindow(
        identity=identity_of(rank, node, samples.steps),
        sequence=sequence,
        start_unix_nanos=span.start_unix_nanos,
        end_unix_nanos=span.end_unix_nanos,
        problems=problem_texts(samples.problems),
    )
    for name, add in PARTS.items():
        if (sample := getattr(samples, name)) is not None:
            add(window, sample, peak_of_device)
    if stall is not None:
        window.stall.CopyFrom(stall)
        window.sources["stall"] = SOURCE_PROBE if samples.steps is not None else SOURCE_STACKS
    return window


def identity_of(rank: RankProcess, node: str, steps: StepSample | None = None) -> RankIdentity:
    identity = RankIdentity(
        job=printable(rank.job, NAME_CHARACTERS),
        rank=rank.rank,
        local_rank=rank.local_rank,
        world_size=rank.world_size,
        node=node,
        pod=None if rank.pod is None else printable(rank.pod, NAME_CHARACTERS),
        namespace=None if rank.namespace is None else printable(rank.namespace, NAME_CHARACTERS),
        pid=rank.pid,
        incarnation=rank.start_ticks,
        attempt=rank.attempt,
    )
    program = rank.program
    if program.command or program.user:
        identity.program.CopyFrom(Program(command=program.command, user=program.user, team=program.team))
    if steps is not None:
        place = {name: getattr(steps.facts, name) for name in ("pipeline", "tensor", "data")}
        known = {name: value for name, value in place.items() if value is not None and 0 <= value < 2**31}
        if known:
            identity.coordinates.CopyFrom(ParallelCoordinates(**known))
    return identity


def problem_texts(problems: Sequence[Problem]) -> list[str]:
    texts = [printable(f"{problem.source}: {problem.text}", PROBLEM_CHARACTERS) for problem in problems]
    if len(texts) > MAX_PROBLEMS:
        texts[MAX_PROBLEMS - 1 :] = [f"and {len(texts) - MAX_PROBLEMS + 1} more problems"]
    return texts


def statistics_of(seconds: Column) -> StepStatistics | None:
    """Over the measured values; None if there are none."""
    values = np.sort(seconds[~np.isnan(seconds)])
    if values.size == 0:
        return None
    # Linear quantiles as numpy computes them, at a tenth of the cost for the few values of a window.
    places = np.array((0.1, 0.5, 0.9)) * (values.size - 1)
    p10, p50, p90 = np.interp(places, np.arange(values.size), values)
    return StepStatistics(
        mean=float(values.mean()), p10=float(p10), p50=float(p50), p90=float(p90), max=float(values[-1])
    )


def stack_summary(sample: StackSample) -> StackSummary:
    total = max(1, sample.samples)
    return StackSummary(
        samples=min(sample.samples, MAX_COUNT),
        errors=min(sample.errors, MAX_COUNT),
        phase_shares={printable(phase, 32): count / total for phase, count in sample.phase_counts.items()},
        frames=[
            FrameShare(
                function=printable(counted.frame.function, NAME_CHARACTERS),
                file=printable(counted.frame.file, NAME_CHARACTERS),
                line=counted.frame.line,
                share=counted.inclusive / total,
                own_share=counted.own / total,
                phase=printable(counted.phase, 32),
            )
            for counted in sample.frames
        ],
        distinct_stacks=sample.distinct_stacks,
        start_unix_nanos=sample.span.start_unix_nanos,
        end_unix_nanos=sample.span.end_unix_nanos,
    )


def _add_steps(window: RankWindow, sample: StepSample, peak_of_device: PeakOfDevice) -> None:
    _add_step_times(window, sample)
    _add_flops(window, sample, peak_of_device)
    _add_memory(window, sample)


def _add_step_times(window: RankWindow, sample: StepSample) -> None:
    window.steps = len(sample.step_seconds)
    window.steps_total = _counter(sample.steps_total)
    window.steps_lost = _counter(sample.steps_lost)
    names = ["steps", "steps_total", "steps_lost"]
    if sample.last_step_unix_nanos is not None and 0 <= sample.last_step_unix_nanos < 2**63:
        window.last_step_unix_nanos = sample.last_step_unix_nanos
        names.append("last_step_unix_nanos")
    for name in STATISTICS:
        statistics = statistics_of(getattr(sample, name))
        if statistics is not None:
            getattr(window, name).CopyFrom(statistics)
            names.append(name)
    # Over the steps where it was measured: sampled figures represent the window.
    means = {name: _mean(getattr(sample, name)) for name in OF_STEPS if name not in STATISTICS}
    figures = {name: mean for name, mean in means.items() if mean is not None}
    if window.HasField("self_seconds"):
        window.self_seconds.mean = _mean_self_seconds(sample)
        if figures.keys() >= set(PARTS_OF_SELF):
            parts = sum(figures[name] for name in PARTS_OF_SELF)
            figures["other_seconds"] = max(0.0, window.self_seconds.mean - parts)
    declared = {name: value for name, value in vars(sample.facts).items() if name in FIGURES and value is not None}
    window.figures.update({**figures, **sample.figures, **declared})
    window.groups.extend(GroupSpan(**vars(group)) for group in sample.groups)
    window.collectives.extend(CollectiveRate(**vars(rate)) for rate in sample.collectives)
    window.ranges.extend(RangeTime(name=name, seconds=seconds) for name, seconds in sample.ranges.items())
    if sample.operations is not None:
        operations = sample.operations
        window.operations.CopyFrom(
            StepOperations(
                first_step=operations.first_step,
                start_nanos=operations.start_ns,
                tick_nanos=operations.tick_ns,
                unix_less_gpu_nanos=operations.unix_less_gpu_ns,
                seats=[GroupSeat(**seat._asdict()) for seat in operations.seats],
                rows=operations.rows,
            )
        )
    window.wait_source = _wait_source(window, sample)
    if sample.long_steps is not None:
        window.long_steps.CopyFrom(LongSteps(**vars(sample.long_steps)))
        names.append("long_steps")
    if sample.facts.nccl_cost_ratio is not None:
        window.nccl_cost_ratio = sample.facts.nccl_cost_ratio
        names.append("nccl_cost_ratio")
    reason = sample.facts.nccl_reason
    # The plugin takes turns, so that a window may have no step of which NCCL was asked.
    is_asked = sample.facts.nccl_descriptor is not None and not reason
    if sample.is_blind and not window.wait_source and not is_asked and len(window.problems) < MAX_PROBLEMS:
        window.problems.append(printable(f"{BLIND}; {reason}" if reason else BLIND, PROBLEM_CHARACTERS))
    if reason == nccl_plugin.OTHER and not sample.is_inspected and len(window.problems) < MAX_PROBLEMS:
        window.problems.append(OTHER_PLUGIN)
    for name in (*names, *window.figures):
        window.sources[name] = SOURCE_PROBE


def measured(message: Message, names: Sequence[str]) -> dict[str, float]:
    """The fields that are set."""
    return {name: float(getattr(message, name)) for name in names if message.HasField(name)}


def held_figures(window: RankWindow) -> dict[str, float]:
    """The figures that a window holds under their names; of those with statistics, the mean."""
    known: Message = window
    statistics = {name: float(getattr(window, name).mean) for name in STATISTICS if known.HasField(name)}
    return {**statistics, **window.figures, **measured(window, COUNTS)}


def _wait_source(window: RankWindow, sample: StepSample) -> str:
    """The source of the waiting time; empty if it is not measured."""
    kinds = {group.kind for group in sample.groups}
    names = [name for kind, name in SOURCES_OF_WAIT.items() if kind in kinds]
    if ring_layout.GROUP_NCCL in kinds:
        return INSPECTOR if sample.is_inspected else SOURCES_OF_WAIT[ring_layout.GROUP_NCCL]
    if "host_seconds" in window.figures:
        return " + ".join(dict.fromkeys(names))
    if not window.HasField("wait_seconds"):
        return ""
    has_ddp = not np.isnan(sample.forward_seconds).all()
    return " + ".join(["ddp timers"] * has_ddp + ["blocking calls"] * bool(names or not has_ddp))


def _mean_self_seconds(sample: StepSample) -> float:
    """Of all steps: those in which waiting was not measured are as the others, but for their checkpoints. These are
    rare and timed in every step. No step holds more work than it is long."""
    own, checkpoint = sample.self_seconds, np.nan_to_num(sample.checkpoint_seconds)
    usual = np.nanmean(np.maximum(own - checkpoint, 0.0))
    return float(np.where(np.isnan(own), np.minimum(usual + checkpoint, sample.step_seconds), own).mean())


def _mean(column: Column) -> float | None:
    values = column[~np.isnan(column)]
    return float(values.mean()) if values.size else None


def _add_flops(window: RankWindow, sample: StepSample, peak_of_device: PeakOfDevice) -> None:
    facts = sample.facts
    peak = facts.peak_flops_per_second
    if peak is None and facts.device_name:
        peak = peak_of_device(facts.device_name)
    flops = facts.model_flops_per_step
    if _is_positive(flops):
        window.model_flops_per_step = flops or 0.0
        window.sources["model_flops_per_step"] = SOURCE_PROBE
    if _is_positive(peak):
        window.peak_flops_per_second = peak or 0.0
        window.sources["peak_flops_per_second"] = SOURCE_PROBE
    known_flops = window.model_flops_per_step or None
    ratio = step_mfu_ratio(known_flops, window.step_seconds.mean, window.peak_flops_per_second)
    if ratio is None:
        return
    if math.isfinite(ratio):
        window.figures["mfu_ratio"] = ratio
        window.sources["mfu_ratio"] = SOURCE_PROBE
    if ratio > 1.0 and len(window.problems) < MAX_PROBLEMS:
        window.problems.append(
            f"steps: an MFU of {ratio:.3g} is impossible; correct the declared FLOPs per step (whole job) or peak"
        )


def _add_memory(window: RankWindow, sample: StepSample) -> None:
    memory = Memory(**_sound(sample.memory))
    if memory.ListFields():
        window.memory.CopyFrom(memory)
        window.sources["memory"] = SOURCE_PROBE


def _add_process(window: RankWindow, sample: ProcessSample, peak_of_device: PeakOfDevice) -> None:
    window.process.CopyFrom(ProcessUsage(**_sound(vars(sample)), starved_seconds=_starved_seconds(sample)))
    window.sources["process"] = SOURCE_PROCESS


def _add_stacks(window: RankWindow, sample: StackSample, peak_of_device: PeakOfDevice) -> None:
    window.stacks.CopyFrom(stack_summary(sample))
    window.sources["stacks"] = SOURCE_STACKS


def _starved_seconds(sample: ProcessSample) -> float | None:
    """Kernels differ in whether quota throttling counts as run delay, so the larger of the two is used."""
    waited = [seconds for seconds in (sample.run_delay_seconds, sample.throttled_seconds) if seconds is not None]
    return max(waited) + (sample.stopped_seconds or 0.0) if waited else None


def _counter(value: int) -> int:
    return value if 0 <= value < 2**63 else 0


def _sound(values: Mapping[str, float | None]) -> dict[str, Any]:
    """Those that were measured, and that a message can hold."""
    known = {name: value for name, value in values.items() if value is not None}
    return {
        name: value
        for name, value in known.items()
        if (0 <= value < 2**63 if isinstance(value, int) else math.isfinite(value))
    }


def _is_positive(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


# What the sample of each collector adds to a window, by the collector's name. The GPU comes first: a peak that the
# probe declares replaces that of the device.
PARTS: Final[Mapping[str, Callable[[RankWindow, Any, PeakOfDevice], None]]] = {
    "gpu": add_gpu,
    "steps": _add_steps,
    "process": _add_process,
    "stacks": _add_stacks,
    "network": add_network,
}


def check_collectors(names: Iterable[str]) -> None:
    """Raises ValueError for a collector whose samples would be dropped."""
    seen: set[str] = set()
    places = {"RankSamples": {each.name for each in fields(RankSamples)}, "PARTS": set(PARTS)}
    for name in names:
        for place, known in places.items():
            if name not in known:
                raise ValueError(
                    f"collector {name!r}: {place} has no {name!r}, so its samples would be dropped; next step: add it "
                    f"in {__name__} (CONTRIBUTING.md, Add a collector)"
                )
        if name in seen:
            raise ValueError(f"collector {name!r} is registered twice, and the second would replace the first")
        seen.add(name)


def window_columns(windows: Sequence[RankWindow], span: Span) -> WindowColumns:
    """The figures of a tick's windows as the table that an operator reads."""
    names, values = pack([_column_values(window) for window in windows])
    return WindowColumns(
        start_unix_nanos=span.start_unix_nanos,
        end_unix_nanos=span.end_unix_nanos,
        ranks=[window.identity for window in windows],
        names=names,
        values=values,
    )


def _column_values(window: RankWindow) -> dict[str, float]:
    row = held_figures(window)
    if window.HasField("wait_seconds"):
        row["transfer_seconds"] = window.wait_seconds.p10
    if window.self_seconds.p10 > 0:
        row["self_spread_ratio"] = window.self_seconds.p90 / window.self_seconds.p10
    if window.HasField("last_step_unix_nanos"):
        row["last_step_unix_seconds"] = window.last_step_unix_nanos / 1e9
    is_captured = window.sources.get("steps") == SOURCE_CAPTURE
    row["is_captured"] = float(is_captured)
    steps = float(window.steps)
    if is_captured and window.step_seconds.mean > 0:
        # Not the steps of the window: the time queued for a CPU is distributed over as many as fit into it.
        steps = (window.end_unix_nanos - window.start_unix_nanos) / 1e9 / window.step_seconds.mean
    if window.process.HasField("starved_seconds") and steps > 0:
        row["starved_seconds"] = window.process.starved_seconds / steps
    if window.groups and "host_seconds" in window.figures:
        row["self_steps"] = float(max(group.samples for group in window.groups))
    for number, group in enumerate(window.groups[:GROUPS]):
        row |= {f"group{number}_{name}": float(getattr(group, name)) for name in GROUP_FIGURES}
    _set_long_steps_apart(row, window)
    return row | _shown_values(window)


def late_seconds(long: LongSteps) -> float:
    """What the rank itself lost: neither waiting for others nor a checkpoint."""
    return max(long.seconds - long.waited_seconds - long.checkpoint_seconds, 0.0)


def _set_long_steps_apart(row: dict[str, float], window: RankWindow) -> None:
    """What long steps took beyond the usual has figures of its own. The others, but for the step time and its phases,
    are those of usual steps."""
    long = window.long_steps
    if not long.steps or not window.steps:
        return
    row["long_seconds"] = long.seconds / window.steps
    row["long_ratio"] = long.steps / window.steps
    if long.HasField("waited_seconds"):
        row["late_seconds"] = late_seconds(long) / window.steps
    if long.HasField("late_ahead_seconds"):
        row["late_ahead_seconds"] = long.late_ahead_seconds / window.steps
    row["late_ratio"] = long.late_steps / window.steps
    row |= {
        name.removeprefix("usual_"): seconds
        for name, seconds in measured(long, USUAL).items()
        if name.removeprefix("usual_") in row
    }


def _shown_values(window: RankWindow) -> dict[str, float]:
    seconds = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
    row = measured(window.process, ("resident_bytes",))
    if window.memory.HasField("allocated_bytes"):
        row["memory_allocated_bytes"] = float(window.memory.allocated_bytes)
    if window.process.HasField("cpu_seconds") and seconds > 0:
        row["cpu_ratio"] = window.process.cpu_seconds / seconds
    if window.gpu.gpus != 1:
        return row
    row |= {f"gpu_{name}": value for name, value in measured(window.gpu, SHOWN_OF_GPU).items()}
    if window.gpu.HasField("sm_clock_hertz") and seconds > 0:
        # Reasons overlap: the longest one is at least how long the clock was held back.
        row["gpu_throttled_ratio"] = min(max(window.gpu.throttled_seconds.values(), default=0.0) / seconds, 1.0)
    return row
