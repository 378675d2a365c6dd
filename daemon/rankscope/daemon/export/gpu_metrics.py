"""The table of GPU metrics. `metrics_detail = standard` leaves out what no alert and no dashboard needs, so that a rank
and its GPU stay within sixty series: `standard` of a row lists what stays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prometheus_client.metrics_core import Metric as Family

from rankscope.analysis.models.mfu import estimated_hfu_ratio
from rankscope.common.metric_table import ANY, FULL_ONLY, Counter, Gauge, Section, label
from rankscope.daemon.gpu.collector import ANY as ANY_PIPE
from rankscope.daemon.gpu.collector import GpuStatus, estimate_of
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, GpuState, SourceState

GPUS_SHOWN = 1024  # 16 GPUs of seven slices each are 112; more is a broken source
XIDS_SHOWN = 32
# The reasons that slow a GPU against its will; the others are settings, or idleness.
STANDARD_REASONS = ("power_cap", "sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
ALL_REASONS = (*STANDARD_REASONS, "sync_boost", "application_clocks", "display_clocks", "idle")

# fmt: off
GPU_SOURCES: Section[GpuSnapshot] = Section(("source",), (
    Gauge("rankscope_gpu_source_state",
        "State a source of GPU counters is in: starting, ok, no_driver, no_gpu, hanging or failed; value 1.",
        lambda source: {source.state.value: 1}, {"state": tuple(state.value for state in SourceState)}),
    Counter("rankscope_gpu_polls_total", "How often a source has read the GPUs.", lambda source: source.polls_total),
    Counter("rankscope_gpu_poll_seconds_total", "Time a source has spent reading the GPUs.",
        lambda source: source.poll_seconds_total),
))
# fmt: on


@dataclass(frozen=True)
class _Gpu:
    reading: GpuReading
    is_up: bool
    is_shared: bool


# fmt: off
# What is known of a GPU even when it does not answer any more.
GPUS: Section[_Gpu] = Section(("gpu", "node"), (
    Gauge("rankscope_gpu_info", "Name and place of a GPU, or of a MIG instance with its parent; value 1.",
        lambda gpu: {(gpu.reading.name, str(gpu.reading.index), gpu.reading.parent_uuid or ""): 1},
        {"name": ANY, "index": ANY, "parent": ANY}),
    Gauge("rankscope_gpu_up", "1 if the GPU could be read just now; 0 if it was lost or its source fails.",
        lambda gpu: gpu.is_up),
    Counter("rankscope_gpu_throttled_seconds_total",
        "Time the GPU's clocks were held down, by reason; several reasons may hold at once.",
        lambda gpu: {reason: gpu.reading.throttled_seconds.get(reason) for reason in ALL_REASONS},
        {"reason": ALL_REASONS}, standard=STANDARD_REASONS),
    Counter("rankscope_gpu_xid_errors_total", "XID errors the driver reported since the daemon started, by number.",
        lambda gpu: {str(xid): n for xid, n in sorted((gpu.reading.xid_errors or {}).items())[:XIDS_SHOWN]},
        {"xid": ANY}),
    Counter("rankscope_gpu_ecc_errors_total",
        "ECC memory errors: volatile since the driver was loaded, aggregate over the GPU's life.",
        lambda gpu: gpu.reading.ecc_errors,
        {"counter": ("volatile", "aggregate"), "kind": ("corrected", "uncorrected")},
        standard=[("volatile", "uncorrected")]),
    Counter("rankscope_gpu_energy_joules_total", "Energy the GPU used since the driver was loaded.",
        lambda gpu: gpu.reading.energy_joules, standard=FULL_ONLY),
))

# Measurements of GPUs that answer.
LIVE_GPUS: Section[_Gpu] = Section(("gpu", "node"), (
    Gauge("rankscope_gpu_utilization_ratio", "Share of the time in which any kernel ran, however small.",
        lambda gpu: gpu.reading.utilization_ratio),
    Gauge("rankscope_gpu_power_watts", "Power the GPU draws.", lambda gpu: gpu.reading.power_watts),
    Gauge("rankscope_gpu_power_limit_watts", "Power the GPU is allowed to draw.",
        lambda gpu: gpu.reading.power_limit_watts),
    Gauge("rankscope_gpu_temperature_celsius", "Temperature of the GPU.", lambda gpu: gpu.reading.temperature_celsius),
    Gauge("rankscope_gpu_remapping_pending", "1 if rows of memory wait for a reset to be remapped.",
        lambda gpu: gpu.reading.remapping_pending),
    Gauge("rankscope_gpu_remapping_failed", "1 if remapping a row of memory has failed.",
        lambda gpu: gpu.reading.remapping_failed),
    Gauge("rankscope_gpu_memory_bytes", "Memory of the GPU, used by all processes and total.",
        lambda gpu: {"used": gpu.reading.memory_used_bytes, "total": gpu.reading.memory_total_bytes},
        {"kind": ("used", "total")}),
    Gauge("rankscope_gpu_clock_hertz", "Clock of the GPU at present.",
        lambda gpu: {"sm": gpu.reading.sm_clock_hertz, "memory": gpu.reading.memory_clock_hertz},
        {"clock": ("sm", "memory")}, standard=["sm"]),
    Gauge("rankscope_gpu_clock_max_hertz", "Highest clock of the GPU.",
        lambda gpu: {"sm": gpu.reading.sm_clock_max_hertz, "memory": gpu.reading.memory_clock_max_hertz},
        {"clock": ("sm", "memory")}, standard=["sm"]),
    Gauge("rankscope_gpu_remapped_rows",
        "Rows of memory that were remapped, by the kind of error that made it necessary.",
        lambda gpu: gpu.reading.remapped_rows, {"kind": ("correctable", "uncorrectable")}, standard=["uncorrectable"]),
    Gauge("rankscope_gpu_retired_pages", "Pages of memory that were retired, on GPUs before Ampere.",
        lambda gpu: gpu.reading.retired_pages, {"kind": ("single_bit", "double_bit")}, standard=["double_bit"]),
    Gauge("rankscope_gpu_pcie_bytes_per_second", "Traffic over PCIe at present.",
        lambda gpu: {"transmit": gpu.reading.pcie_transmit_bytes_per_second,
                     "receive": gpu.reading.pcie_receive_bytes_per_second},
        {"direction": ("transmit", "receive")}, standard=FULL_ONLY),
    Gauge("rankscope_gpu_nvlink_bytes_per_second", "Traffic over all NVLinks at present.",
        lambda gpu: {"transmit": gpu.reading.nvlink_transmit_bytes_per_second,
                     "receive": gpu.reading.nvlink_receive_bytes_per_second},
        {"direction": ("transmit", "receive")}, standard=FULL_ONLY),
    Gauge("rankscope_gpu_sm_active_ratio", "Share of the time and of the multiprocessors in which a warp was resident.",
        lambda gpu: gpu.reading.sm_active_ratio),
    Gauge("rankscope_gpu_dram_active_ratio", "Share of the time in which the memory interface was busy.",
        lambda gpu: gpu.reading.dram_active_ratio),
    Gauge("rankscope_gpu_tensor_active_ratio",
        "Share of the cycles in which a tensor pipe was busy. It is no share of the peak: the clock may be low.",
        lambda gpu: gpu.reading.tensor_active_ratio, {"pipe": (ANY_PIPE, "hmma", "imma", "dfma")}, standard=[ANY_PIPE]),
    Gauge("rankscope_gpu_sm_occupancy_ratio", "Resident warps as a share of those the GPU could hold.",
        lambda gpu: gpu.reading.sm_occupancy_ratio, standard=FULL_ONLY),
    Gauge("rankscope_gpu_pipe_active_ratio", "Share of the cycles in which an arithmetic pipe was busy.",
        lambda gpu: gpu.reading.pipe_active_ratio, {"pipe": ("fp64", "fp32", "fp16")}, standard=FULL_ONLY),
    Gauge("rankscope_gpu_estimated_flops_per_second",
        "Estimate of achieved FLOP/s: utilisation of the floating-point tensor pipes × their dense peaks × SM clock ÷ "
        "maximum SM clock. Recomputation counts.", lambda gpu: estimate_of(gpu.reading)),
    Gauge("rankscope_gpu_estimated_hfu_ratio", "The same estimate as a share of the peak; not MFU.",
        lambda gpu: estimated_hfu_ratio(
            gpu.reading.tensor_active_ratio, gpu.reading.sm_clock_hertz, gpu.reading.sm_clock_max_hertz)),
    Gauge("rankscope_gpu_shared", "1 if several ranks use the GPU, so that its figures belong to none alone.",
        lambda gpu: gpu.is_shared),
))
# fmt: on


def gpu_metrics(status: GpuStatus, node: str, full: bool) -> Iterator[Family]:
    yield from GPU_SOURCES.families(((source.source,), source) for source in status.sources)
    gpus: dict[tuple[str, str], _Gpu] = {}
    for reading in status.gpus[:GPUS_SHOWN]:
        is_up = status.fresh and reading.state is GpuState.OK
        gpus.setdefault((label(reading.uuid), node), _Gpu(reading, is_up, reading.uuid in status.shared))
    yield from GPUS.families(gpus.items(), full=full)
    yield from LIVE_GPUS.families(((labels, gpu) for labels, gpu in gpus.items() if gpu.is_up), full=full)
