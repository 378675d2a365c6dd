"""The numbers of one rank. Field names are the keys of the JSON output (docs/analyze-trace.md). Times are µs as
measured, None was not measured. Structs, not dataclasses: a dozen of those would take a tenth of the whole command."""

from __future__ import annotations

from msgspec import Struct


class IdleSplit(Struct, frozen=True):
    """Why nothing ran; sums to the idle time."""

    host_bound_us: float  # the host had not launched the next kernel yet
    input_wait_us: float
    synchronisation_us: float
    communication_us: float  # the host communicated itself (gloo)
    other_us: float  # launched but not started, or not known


class StepSummary(Struct, frozen=True):
    number: int
    duration_us: float
    host_us: float
    whole: bool  # it neither began before the recording nor has work that ran after it
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
    name: str
    kind: str
    tensor_core: bool
    count: int
    total_us: float
    mean_us: float
    longest_us: float
    share_ratio: float


class CollectiveSummary(Struct, frozen=True):
    kind: str
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


class LaunchSummary(Struct, frozen=True):
    count: int
    kernel_count: int
    call_median_us: float
    call_total_us: float
    delay_median_us: float
    unqueued_ratio: float
    queue_median: int
    short_kernel_count: int


class ComputeSummary(Struct, frozen=True):
    """How the time in computation kernels divides."""

    kernel_count: int
    kernel_median_us: float
    tensor_core_ratio: float
    plain_matrix_ratio: float  # matrix products on the plain FP32 units
    moving_ratio: float  # kernels that only move data: elementwise, copies, norms, reductions
    unfused_ratio: float  # of these, not fused by a compiler


class BucketSummary(Struct, frozen=True):
    """One of DDP's buckets, by its place in the step; medians over steps."""

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
    reason: str  # why nothing is predicted of other caps


class GatherSummary(Struct, frozen=True):
    """All-gathers or reduce-scatters of sharded parameters, over the whole trace."""

    kind: str
    count: int
    bytes: int | None
    duration_us: float
    exposed_us: float
    prefetched_ratio: float  # began while computation ran


class ShardingSummary(Struct, frozen=True):
    framework: str  # fsdp, zero; empty where the trace does not say
    gathers: tuple[GatherSummary, ...]


class BubbleSummary(Struct, frozen=True):
    """Of a pipeline, per step."""

    measured_ratio: float  # of the step, a transfer to or from a neighbouring stage kept it from computing
    waiting_us: float
    stages: int | None
    microbatches: int | None
    theoretical_ratio: float | None  # of 1F1B


class MemorySummary(Struct, frozen=True):
    """Device memory, as far as the trace tells (profile_memory=True)."""

    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    fragmentation_ratio: float | None  # 1 − allocated ÷ reserved, at the peak of what is reserved
    device_bytes: int | None
    allocator_calls: int  # cudaMalloc, cudaFree and the like in the trace
    allocator_us: float


class RankSummary(Struct, frozen=True):
    rank: int | None  # None: neither the trace nor the file's name tells
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
    outside_steps_us: float  # of the span, before the first step and after the last
    parts_us: dict[str, float]  # the span, divided without overlap: what the diagnosis reads
    idle: IdleSplit
    host_bound_after_synchronisation_us: float  # part of host_bound: the host had waited for the device until then
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
    repairs: tuple[str, ...]

    @property
    def whole_steps(self) -> tuple[StepSummary, ...]:
        return tuple(step for step in self.steps if step.whole)

    @property
    def step_times_us(self) -> tuple[float, ...]:
        """Of the whole steps. Where the recording cut them all, the time of the host, which keeps step with its device
        over time; its first step may be cut too."""
        if self.whole_steps:
            return tuple(step.duration_us for step in self.whole_steps)
        return tuple(step.host_us for step in self.steps[1:] or self.steps)

    @property
    def step_us(self) -> float | None:
        """The mean: times the number of steps it makes the whole. None where the trace shows no steps."""
        times = self.step_times_us
        return sum(times) / len(times) if times else None
