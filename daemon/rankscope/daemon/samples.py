"""What the collectors hand over: plain frozen data, one kind per source. `None`, or NaN in a column: not measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.analysis.step_graph.window_operations import RankOperations
from rankscope.analysis.verdicts.figures import StepColumns
from rankscope.analysis.verdicts.windows import Communicator

Column: TypeAlias = npt.NDArray[np.float64]
MAX_RANK = 1 << 31


@dataclass(frozen=True)
class Program:
    """What a rank runs, and for whom. Printable and bounded; empty where it is not known."""

    command: str = ""
    user: str = ""
    team: str = ""


@dataclass(frozen=True)
class RankProcess:
    """A training process found on this node. `key` names one incarnation of one rank."""

    job: str  # the run's name
    rank: int
    local_rank: int
    world_size: int
    pid: int
    start_ticks: int
    # The process' ids from the outermost pid namespace to its own; the last is what the process calls itself.
    namespace_pids: tuple[int, ...]
    # KINETO_USE_DAEMON, TEARDOWN_CUPTI and the like; never the whole environment, which holds secrets.
    environment: Mapping[str, str] = field(default_factory=dict)
    pod: str | None = None
    namespace: str | None = None
    attempt: int = 0  # restarts of the run
    owner: str = ""  # the pod or user whose it is, to share fairly between them
    program: Program = Program()

    @property
    def key(self) -> tuple[str, int, int, int]:
        return (self.job, self.rank, self.pid, self.start_ticks)

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid})"


RankKey: TypeAlias = tuple[str, int, int, int]


@dataclass(frozen=True)
class PodRun:
    """The run of a pod, as the operator names it."""

    name: str  # with its namespace: "team/pytorchjob-llama"
    attempt: int = 0


@dataclass(frozen=True)
class Span:
    """A stretch of wall-clock time. Windows of all nodes share their borders (multiples of the length since 1970)."""

    start_unix_nanos: int
    end_unix_nanos: int

    @property
    def seconds(self) -> float:
        return (self.end_unix_nanos - self.start_unix_nanos) / 1e9

    def overlaps(self, other: Span) -> bool:
        return self.start_unix_nanos < other.end_unix_nanos and self.end_unix_nanos > other.start_unix_nanos


@dataclass(frozen=True)
class Problem:
    """Why a collector has nothing for a rank, with the next step, in words a person can act on."""

    source: str
    kind: str  # a short, bounded word for the metric label: "permission", "corrupt", "version", "missing", …
    text: str


@dataclass(frozen=True)
class ProbeFacts:
    """What the probe says once about its process (and again when it changes)."""

    rank: int | None = None
    world_size: int | None = None
    local_rank: int | None = None
    store: str | None = None  # of the default process group, equal on all its ranks; None before there is a group
    pipeline: int | None = None
    tensor: int | None = None
    data: int | None = None
    model_flops_per_step: float | None = None  # this rank's share
    peak_flops_per_second: float | None = None  # declared; else looked up by device name
    device_name: str | None = None
    torch_version: str | None = None
    nccl_descriptor: int | None = None  # of the memory of the NCCL plugin
    nccl_reason: str | None = None  # why there is none
    nccl_cost_ratio: float | None = None  # of a step; negative where noise is larger
    tokens_per_step: float | None = None  # that the rank works on, as the program counts them


@dataclass(frozen=True)
class GroupSpan:
    """Time in the collectives of one process group since the last call, per sampled step."""

    number: int  # equal on all members
    size: int
    position: int
    kind: int  # as in the probe's layout
    samples: int
    seconds: float
    step_seconds: float


@dataclass(frozen=True)
class LongSteps:
    """The few steps that took far longer than usual. Seconds are sums of what they took beyond the usual step."""

    steps: int = 0
    seconds: float = 0.0
    waited_seconds: float | None = 0.0  # of it, in collectives: for a rank that was late; None: not known
    checkpoint_seconds: float = 0.0  # of it, in checkpoints of this rank
    late_steps: int = 0  # in which this rank was late
    late_ahead_seconds: float | None = None  # by how much its host got further ahead in them than usual
    # Means of the other steps; None where it is not known.
    usual_wait_seconds: float | None = None
    usual_self_seconds: float | None = None
    usual_checkpoint_seconds: float | None = None


@dataclass(frozen=True)
class CollectiveRate:
    """The operations of one process group and one function of NCCL since the last call. Bytes are those of the whole
    array, as nccl-tests count them."""

    number: int  # of the group, equal on all members
    size: int
    function: str
    algorithm: str  # with the protocol, that of most bytes
    protocol: str
    operations: int
    bytes_per_step: float
    bus_bytes_per_second: float | None  # of the usual operations of each size


def self_seconds(step_seconds: Column, wait_seconds: Column) -> Column:
    """What of a step is not waiting."""
    return np.maximum(step_seconds - wait_seconds, 0.0)


@dataclass(frozen=True)
class StepSample(StepColumns):
    """The steps of one rank that ended since the last call."""

    steps_total: int
    steps_lost: int  # overwritten before they were read, since the last call
    last_step_unix_nanos: int | None
    facts: ProbeFacts
    figures: Mapping[str, float] = field(default_factory=dict)  # that are of no single step
    memory: Mapping[str, int] = field(default_factory=dict)  # of the device, by the names of ring_layout.MEMORY
    collectives_enqueued: int | None = None
    collectives_completed: int | None = None
    groups: tuple[GroupSpan, ...] = ()
    ranges: Mapping[str, float] = field(default_factory=dict)  # seconds of a step by NVTX range, the longest first
    collectives: tuple[CollectiveRate, ...] = ()
    is_blind: bool = False  # collectives are issued where nothing can time them
    long_steps: LongSteps | None = None  # None: waiting is measured in a few steps only
    communicators: tuple[Communicator, ...] = ()  # of NCCL
    operations: RankOperations | None = None  # of whole steps
    is_inspected: bool = False  # NCCL's times are those of NCCL Inspector


@dataclass(frozen=True)
class ProcessSample:
    """Kernel accounting of one process over the time since the last call; the first call has no deltas."""

    cpu_seconds: float | None
    run_delay_seconds: float | None
    throttled_seconds: float | None
    stopped_seconds: float | None
    resident_bytes: int | None
    threads: int | None
    involuntary_switches: int | None
    voluntary_switches: int | None


@dataclass(frozen=True)
class FrameCount:
    frame: Frame
    inclusive: int
    own: int  # as the innermost frame, or for the user's code as its innermost
    phase: str


@dataclass(frozen=True)
class StackSample:
    """The training thread's stacks of one recording."""

    span: Span
    samples: int
    errors: int
    phase_counts: Mapping[str, int]
    frames: tuple[FrameCount, ...]  # the largest, at most MAX_FRAMES
    distinct_stacks: int


@dataclass(frozen=True)
class Recording:
    """What one recording saw of one thread of a rank. The stacks do not change any more."""

    run: str
    rank: int
    span: Span
    period_nanos: int  # that a sample stands for
    stacks: Mapping[Stack, int]
    thread: str = "MainThread"

    @property
    def samples(self) -> int:
        return sum(self.stacks.values())


@dataclass(frozen=True)
class GpuSample:
    """The GPU of one rank over one window: means; throttled time and errors of the window; memory and a pending remap
    as of the last reading. Figures are there only when the process uses exactly one GPU."""

    gpus: int = 0
    shared: bool = False
    uuid: str | None = None
    model: str | None = None
    pod_name: str | None = None  # as the kubelet says
    namespace: str | None = None
    utilization_ratio: float | None = None
    sm_active_ratio: float | None = None
    tensor_active_ratio: float | None = None
    dram_active_ratio: float | None = None
    power_watts: float | None = None
    sm_clock_hertz: float | None = None
    sm_clock_ratio: float | None = None
    temperature_celsius: float | None = None
    throttled_seconds: Mapping[str, float] = field(default_factory=dict)
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None
    estimated_flops_per_second: float | None = None
    ecc_uncorrected_errors: int | None = None
    ecc_corrected_errors: int | None = None
    xids: int | None = None
    row_remap_pending: bool | None = None
    problem: Problem | None = None  # with the attribution, beside what is known


@dataclass(frozen=True)
class Activity:
    """What a process has done since it started, with the data loader's workers where it waits for them."""

    monotonic_seconds: float  # when it was read
    cpu_seconds: float
    moved_bytes: int  # read and written


@dataclass(frozen=True)
class StallDump:
    """Where a rank stands right now: innermost frame first. Inside a data loader's wait, the worker that is at work."""

    phase: str
    stack: Stack
    activity: Activity | None = None
