"""A daemon, a rank and a GPU of which everything is known: each metric that the daemon exports has a value here."""

from __future__ import annotations

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.verdicts.figures import OF_STEPS
from rankscope.daemon.captures.duty_cycle import REASONS
from rankscope.daemon.captures.service import CaptureStatus
from rankscope.daemon.collector import CollectorStatus
from rankscope.daemon.export.gpu_metrics import ALL_REASONS
from rankscope.daemon.export.metrics import DaemonStatus, Exporter, Snapshot
from rankscope.daemon.export.rank_metrics import GROUP_KINDS, RankReport, RankTotals, add_window
from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, SourceState
from rankscope.daemon.network.collector import NetworkStatus
from rankscope.daemon.network.ports import EVENTS, PortReading, TcpReading
from rankscope.daemon.profiles.push import PushStatus
from rankscope.daemon.profiles.store import StoreStatus
from rankscope.daemon.samples import (
    CollectiveRate,
    FrameCount,
    GroupSpan,
    ProbeFacts,
    ProcessSample,
    RankProcess,
    Span,
    StackSample,
    StepSample,
    self_seconds,
)
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe.ring_layout import GROUP_NCCL
from rankscope.v1.window_pb2 import Stall

SPAN = Span(1_700_000_000_000_000_000, 1_700_000_002_000_000_000)


def gpu_uuid(index: int) -> str:
    return f"GPU-{index:08d}-0000-0000-0000-000000000000"


def full_gpu(index: int = 0) -> GpuReading:
    """One of which everything is known: figures of an H200 under a bf16 transformer."""
    return GpuReading(
        gpu_uuid(index),
        index,
        "NVIDIA H200",
        utilization_ratio=1.0,
        memory_used_bytes=60 << 30,
        memory_total_bytes=140 << 30,
        power_watts=695.0,
        power_limit_watts=700.0,
        energy_joules=1.5e6,
        temperature_celsius=64.0,
        sm_clock_hertz=1755e6,
        sm_clock_max_hertz=1980e6,
        memory_clock_hertz=3201e6,
        memory_clock_max_hertz=3201e6,
        throttled_seconds={reason: float(number) for number, reason in enumerate(ALL_REASONS)},
        pcie_transmit_bytes_per_second=1e9,
        pcie_receive_bytes_per_second=2e9,
        nvlink_transmit_bytes_per_second=3e9,
        nvlink_receive_bytes_per_second=4e9,
        ecc_errors={(c, k): 1 for c in ("volatile", "aggregate") for k in ("corrected", "uncorrected")},
        remapped_rows={"correctable": 2, "uncorrectable": 0},
        remapping_pending=False,
        remapping_failed=False,
        retired_pages={"single_bit": 0, "double_bit": 0},
        xid_errors={79: 1},
        sm_active_ratio=0.907,
        sm_occupancy_ratio=0.297,
        tensor_active_ratio={"any": 0.574, "hmma": 0.574, "imma": 0.0, "dfma": 0.0},
        pipe_active_ratio={"fp64": 0.0, "fp32": 0.05, "fp16": 0.01},
        dram_active_ratio=0.283,
    )


def gpu_status(*gpus: GpuReading, fresh: bool = True, shared: frozenset[str] = frozenset()) -> GpuStatus:
    source = GpuSnapshot("nvml", SourceState.OK, polls_total=12, poll_seconds_total=0.25)
    return GpuStatus((source,), gpus, fresh, shared)


def full_port() -> PortReading:
    """One that counts everything, more than any real one."""
    events = {kind: number for number, kind in enumerate(EVENTS)}
    return PortReading("mlx5_0", 1, "infiniband", True, 400e9, 5_000_000, 6_000_000, events)


STATUS = DaemonStatus(
    version="0.1.0",
    node="node-a",
    collectors={"steps": CollectorStatus(0.25, True), "stacks": CollectorStatus(0.5, False)},
    own_cpu_seconds=1.5,
    sampling_cpu_seconds=0.75,
    resident_bytes=60_000_000,
    budget_used_ratio=0.4,
    stack_rate_hertz=10.0,
    stack_recorded_ratio=0.95,
    scrape_cpu_seconds=0.25,
    stuck_samplers=1,
    ranks=2,
    windows_total=6,
    watch_readers=1,
    captures=CaptureStatus(
        {"delivered": 8, "failed": 1, "cancelled": 0},
        {"team/llama": 1.01},
        clients=8,
        malformed_total=2,
        unanswered={"late": 4, "skipped": 0, "unsent": 0},
        unvouched_total=1,
        duty_results={"done": 3, "failed": 0, "skipped": 1},
        duty_skips={**dict.fromkeys(REASONS, 0), "young": 1},
    ),
    profiles=StoreStatus(samples_stored=36_000, samples_lost=20, size_bytes=5_000_000),
    profile_push=PushStatus(40, {"connection": 2}, {"expired": 1}, 65_536),
    gpu=gpu_status(full_gpu()),
    network=NetworkStatus((full_port(),), TcpReading(90_000, 30)),
)


def report(rank: RankProcess, samples: RankSamples, stall: Stall | None = None, windows: int = 2) -> RankReport:
    window = assemble(rank, "node-a", SPAN, 1, samples, lambda _: None, stall)
    totals = RankTotals()
    for _ in range(windows):
        totals = add_window(totals, window)
    return RankReport(window, totals, samples.problems)


def rank_process(number: int) -> RankProcess:
    pid = 4000 + number
    return RankProcess("team/llama", number, number, 4, pid, 77, (pid,))


def full_rank(number: int = 0, without: tuple[str, ...] = ()) -> RankReport:
    """A rank of which every source measured everything, more than any real one: a step is timed on a device or not."""
    unknown = {f"{name}_seconds" for name in without}
    columns = {name: np.full(2, np.nan if name in unknown else 0.125) for name in OF_STEPS}
    columns["step_seconds"] = np.full(2, 1.0)
    columns["self_seconds"] = self_seconds(columns["step_seconds"], columns["wait_seconds"])
    steps = StepSample(
        steps_total=40,
        steps_lost=0,
        last_step_unix_nanos=SPAN.start_unix_nanos + 1_000_000_000,
        facts=ProbeFacts(
            pipeline=1,
            tensor=0,
            data=1,
            model_flops_per_step=5e14,
            peak_flops_per_second=1e15,
            nccl_cost_ratio=0.001,
            tokens_per_step=4096.0,
        ),
        groups=tuple(
            GroupSpan(0xABC, 4, number, kind, 2, 0.25, 1.0) for kind in sorted(GROUP_KINDS) if kind != GROUP_NCCL
        ),
        collectives=(
            CollectiveRate(0xABC, 4, "all_reduce", "nvls", "simple", 24, 1.5e9, 3e11),
            CollectiveRate(0xABC, 4, "reduce_scatter", "ring", "ll128", 8, 1e9, 2.5e11),
            CollectiveRate(0xABC, 4, "send", "other", "other", 2, 1e6, None),
        ),
        memory={
            "allocated_bytes": 1_000,
            "reserved_bytes": 2_000,
            "peak_allocated_bytes": 1_500,
            "total_bytes": 4_000,
        },
        collectives_enqueued=None,
        collectives_completed=None,
        **columns,
    )
    process = ProcessSample(1.5, 0.25, 0.0, 0.0, 300_000_000, 12, 7, 90)
    frame = FrameCount(Frame("forward", "train.py", 12), 20, 10, "forward")
    stacks = StackSample(SPAN, 20, 1, {"forward": 15, "input": 5}, (frame,), 3)
    return report(rank_process(number), RankSamples(steps, process, stacks), Stall(seconds_since_step=9))


def scrape(*ranks: RankReport, status: DaemonStatus = STATUS) -> str:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Exporter(lambda: Snapshot(status, ranks)))
    return generate_latest(registry).decode()
