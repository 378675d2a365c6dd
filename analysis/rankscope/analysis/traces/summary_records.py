"""The summary of one rank. Field names are the keys of the JSON output (docs/analyze-trace.md). Times are in µs;
None means not measured. Structs instead of dataclasses: creating a dozen dataclasses would take a tenth of the
command's time."""

from __future__ import annotations

from msgspec import Struct


class IdleSplit(Struct, frozen=True):
    """Why nothing ran. The sum is the idle time."""

    host_bound_us: float  # the host had not launched the next kernel yet
    input_wait_us: float
    synchronisation_us: float
    communication_us: float  # the host itself communicated (gloo)
    other_us: float  # launched but not started, or unknown


class StepSummary(Struct, frozen=True):
    number: int
    duration_us: float
    host_us: float
    whole: bool  # recorded from its beginning, with all of its device work
    traced_launch_ratio: float | None
    compute_us: float
    non_compute_us: float
    idle_us: float
    communication_us: float
    exposed_communication_us: float
    overlap_ratio: float | None
    memory_copy_us: float
    exposed_memory_copy_us: float
    idle: IdleSplit


class KernelSummary(Struct, frozen=True):
    """One kernel by name. In a trace without device: one operator, without the operators it called."""

    name: str
    kind: str
    tensor_core: bool
    count: int
    total_us: float
    mean_us: float
    longest_us: float
    share_ratio: float  # of the summed durations of all device work


class CollectiveSummary(Struct, frozen=True):
    kind: str
    group_kind: str  # a GroupKind
    group: str
    group_description: str
    group_size: int | None
    count: int
    measured_count: int
    bytes_total: int | None
    bytes_median: float | None
    total_us: float
    median_us: float | None
    longest_us: float | None
    exposed_us: float
    algbw_gbps: float | None
    busbw_gbps: float | None

    @property
    def title(self) -> str:
        """`tensor all_reduce of 2`, `pipeline messages of 2`; without the kind of the group if that is unknown."""
        purpose = "" if self.group_kind == "unknown" else f"{self.group_kind} "
        kind = "messages" if self.kind == "send_recv" else self.kind
        return f"{purpose}{kind}{f' of {self.group_size}' if self.group_size else ''}"


class LaunchSummary(Struct, frozen=True):
    """All kernels, copies and sets with a launch in the trace."""

    count: int  # launch calls; a graph's call launches many kernels
    kernel_count: int  # device events launched by them
    call_median_us: float
    call_total_us: float
    # From the start of the call to the start of the kernel. A small delay means that the device waits for the host.
    delay_median_us: float
    # Started within twice the median call time of the start of the call: the queue was empty.
    unqueued_ratio: float
    queue_median: int  # launched and not yet finished at the moment of another launch
    short_kernel_count: int  # kernels shorter than the call that launched them


class ComputeSummary(Struct, frozen=True):
    """What the time in computation kernels consists of."""

    kernel_count: int
    kernel_median_us: float
    tensor_core_ratio: float
    plain_matrix_ratio: float  # matrix products without tensor cores (FP32)
    moving_ratio: float  # kernels that only move data: elementwise, copies, norms, reductions
    unfused_ratio: float  # the part of moving_ratio not fused by a compiler


class BucketSummary(Struct, frozen=True):
    """One of DDP's buckets, by its position in the step. Medians over steps."""

    order: int
    bytes: int | None
    duration_us: float | None
    hidden_ratio: float | None


class CapSummary(Struct, frozen=True):
    cap_mb: int
    buckets: int
    exposed_us: float


class BucketsSummary(Struct, frozen=True):
    """Per step."""

    buckets: tuple[BucketSummary, ...]
    cap_mb: int | None
    communication_us: float
    exposed_us: float
    other_caps: tuple[CapSummary, ...]
    recommended_cap_mb: int | None
    gain_us: float | None
    advice: str
    reason: str  # why there is no prediction for other caps


class GatherSummary(Struct, frozen=True):
    """All-gathers or reduce-scatters of sharded parameters, over the whole trace."""

    kind: str
    count: int
    bytes: int | None
    duration_us: float
    exposed_us: float
    prefetched_ratio: float  # started while computation ran


class ShardingSummary(Struct, frozen=True):
    framework: str  # fsdp, zero; empty if unknown
    gathers: tuple[GatherSummary, ...]


class BubbleSummary(Struct, frozen=True):
    """The bubble of a pipeline, per step."""

    measured_ratio: float  # share of the step in which transfers to or from neighbouring stages prevented computation
    waiting_us: float
    stages: int | None
    microbatches: int | None
    chunks: int | None  # of layers on each stage; more than one: the schedule is interleaved
    theoretical_ratio: float | None  # of the 1F1B schedule, plain or interleaved


class MemorySummary(Struct, frozen=True):
    """Device memory, if the profiler recorded it (profile_memory=True)."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    fragmentation_ratio: float | None  # 1 − allocated ÷ reserved, when most was reserved
    device_bytes: int | None
    allocator_calls: int  # cudaMalloc, cudaFree and similar calls
    allocator_us: float


class LineSummary(Struct, frozen=True):
    """A line of the program and the innermost module that it called; each kernel and block belongs to one row."""

    file: str  # empty if the trace has no line of the program
    line: int  # the first of its function
    function: str
    module: str  # class; empty outside of modules
    forward_us: float
    backward_us: float
    optimizer_us: float
    share_ratio: float  # of all device time
    kept_bytes: int | None  # allocated in the forward pass, live when the backward pass begins
    peak_bytes: int | None  # live at the peak


class ModuleSummary(Struct, frozen=True):
    """One nn.Module, with the modules in it."""

    module: str
    forward_us: float
    backward_us: float
    share_ratio: float
    kept_bytes: int | None
    peak_bytes: int | None


class LinesSummary(Struct, frozen=True):
    """Times are of a step; over the whole trace if it has no steps."""

    steps: int | None
    total_us: float
    lines: tuple[LineSummary, ...]
    modules: tuple[ModuleSummary, ...]


class RangeSummary(Struct, frozen=True):
    """Annotations of the program with one name: NVTX ranges, record_function. Of a step; of the whole trace if it has
    no steps. Work in a range inside belongs to that range."""

    name: str
    count: float
    host_us: float
    device_us: float  # of kernels, copies and memory sets; with the backward pass of what it called
    share_ratio: float  # of all device time; of the host's time in ranges if the trace has no device


class RankSummary(Struct, frozen=True):
    rank: int | None  # None: neither in the trace nor in the file name
    file: str
    backend: str
    device: str
    world_size: int | None
    on_host: bool  # no device in the trace: operators are the computation
    span_us: float
    compute_us: float
    non_compute_us: float
    idle_us: float
    communication_us: float
    exposed_communication_us: float
    overlap_ratio: float | None
    memory_copy_us: float
    exposed_memory_copy_us: float
    outside_steps_us: float  # part of the span before the first step and after the last
    parts_us: dict[str, float]  # the span, divided without overlap; used by the diagnosis
    idle: IdleSplit
    exposed_by_group_kind_us: dict[str, float]  # its sum is exposed_communication_us
    host_bound_after_synchronisation_us: float  # part of host_bound: the host had just waited for the device
    idle_gap_longest_us: float
    tensor_core_ratio: float | None
    compute_mix: ComputeSummary | None
    launch: LaunchSummary | None
    steps: tuple[StepSummary, ...]
    top_kernels: tuple[KernelSummary, ...]
    collectives: tuple[CollectiveSummary, ...]
    buckets: BucketsSummary | None
    sharding: ShardingSummary | None
    bubble: BubbleSummary | None
    memory: MemorySummary
    ranges: tuple[RangeSummary, ...]  # most time first
    repairs: tuple[str, ...]
    lines: LinesSummary | None = None  # if wanted, and the trace has stacks

    @property
    def whole_steps(self) -> tuple[StepSummary, ...]:
        return tuple(step for step in self.steps if step.whole)

    @property
    def step_times_us(self) -> tuple[float, ...]:
        """Of whole steps. If the recording cut all of them, host times, which match the device's in the long run;
        the first is skipped because it may be incomplete."""
        if self.whole_steps:
            return tuple(step.duration_us for step in self.whole_steps)
        return tuple(step.host_us for step in self.steps[1:] or self.steps)

    @property
    def step_us(self) -> float | None:
        """The mean, so that steps × mean = total. None if the trace shows no steps."""
        times = self.step_times_us
        return sum(times) / len(times) if times else None


# What a capture says about the trace of a rank: as the trace worker writes it, and as the console's API shows it.
class TraceSummary(Struct, frozen=True):
    span_seconds: float
    compute_seconds: float
    communication_seconds: float
    exposed_communication_seconds: float
    memory_copy_seconds: float
    idle_seconds: float
    step_seconds: float | None
    overlap_ratio: float | None
    mfu_ratio: float | None
    collectives: dict[str, int]  # kind to count
    top_kernels: list[str]  # the longest first
    findings: list[str]
    advice: list[str]
    # One value for each step of the artifact; empty if the artifact holds more than whole steps.
    each_step_seconds: list[float]
    each_communication_seconds: list[float]
    each_exposed_communication_seconds: list[float]
    events: int
