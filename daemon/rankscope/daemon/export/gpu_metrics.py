"""GPUs as Prometheus metrics. `standard` leaves out what no alert and no dashboard needs, so that a rank and its GPU
stay within sixty series; `full` has everything."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

from rankscope.analysis.models.mfu import estimated_hfu_ratio
from rankscope.common.text import printable
from rankscope.daemon.gpu.collector import ANY, GpuStatus, estimate_of
from rankscope.daemon.gpu.readings import GpuReading, GpuState

FULL = "full"
LABEL_CHARACTERS = 128
GPUS_SHOWN = 1024  # 16 GPUs of seven slices each are 112; more is a broken source
XIDS_SHOWN = 32
# The reasons that slow a GPU against its will; the others are settings, or idleness.
STANDARD_REASONS = ("power_cap", "sw_thermal", "hw_thermal", "hw_slowdown", "hw_power_brake")
ALL_REASONS = (*STANDARD_REASONS, "sync_boost", "application_clocks", "display_clocks", "idle")


def gpu_metrics(status: GpuStatus, node: str, detail: str) -> Iterator[Metric]:
    yield from _source_metrics(status)
    families = _Families()
    shown: set[str] = set()
    for gpu in status.gpus[:GPUS_SHOWN]:
        uuid = printable(gpu.uuid, LABEL_CHARACTERS)
        # One series twice makes Prometheus refuse the whole scrape: of two GPUs with one name the first is shown.
        if uuid in shown:
            continue
        shown.add(uuid)
        _add_gpu(families, gpu, {"gpu": uuid, "node": printable(node, LABEL_CHARACTERS)}, status, detail == FULL)
    yield from families.made.values()


def _source_metrics(status: GpuStatus) -> Iterable[Metric]:
    state = GaugeMetricFamily(
        "rankscope_gpu_source_state",
        "State a source of GPU counters is in: starting, ok, no_driver, no_gpu, hanging or failed; value 1.",
        labels=["source", "state"],
    )
    polls = CounterMetricFamily("rankscope_gpu_polls", "How often a source has read the GPUs.", labels=["source"])
    seconds = CounterMetricFamily(
        "rankscope_gpu_poll_seconds", "Time a source has spent reading the GPUs.", labels=["source"]
    )
    for source in {found.source: found for found in status.sources}.values():
        state.add_metric([source.source, source.state.value], 1)
        polls.add_metric([source.source], source.polls_total)
        seconds.add_metric([source.source], source.poll_seconds_total)
    return (state, polls, seconds)


class _Families:
    """Made when the first sample comes. A value that is not known, or no number, has no series."""

    def __init__(self) -> None:
        self.made: dict[str, GaugeMetricFamily | CounterMetricFamily] = {}

    def gauge(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None and math.isfinite(value):
            made = self.made.get(name) or GaugeMetricFamily(f"rankscope_gpu_{name}", text, labels=list(labels))
            self.made[name] = made
            made.add_metric(list(labels.values()), value)

    def counter(self, name: str, text: str, labels: Mapping[str, str], value: float | None) -> None:
        if value is not None and math.isfinite(value) and value >= 0:
            made = self.made.get(name) or CounterMetricFamily(f"rankscope_gpu_{name}", text, labels=list(labels))
            self.made[name] = made
            made.add_metric(list(labels.values()), value)


def _add_gpu(families: _Families, gpu: GpuReading, who: Mapping[str, str], status: GpuStatus, full: bool) -> None:
    name, parent = (printable(text, LABEL_CHARACTERS) for text in (gpu.name, gpu.parent_uuid or ""))
    info = {**who, "name": name, "index": str(gpu.index), "parent": parent}
    families.gauge("info", "Name and place of a GPU, or of a MIG instance with its parent; value 1.", info, 1)
    up = status.fresh and gpu.state is GpuState.OK
    families.gauge("up", "1 if the GPU could be read just now; 0 if it was lost or its source fails.", who, float(up))
    _add_counters(families, gpu, who, full)
    if up:
        _add_state(families, gpu, who, full)
        _add_profile(families, gpu, who, full)
        text = "1 if several ranks use the GPU, so that its figures belong to none alone."
        families.gauge("shared", text, who, float(gpu.uuid in status.shared))


def _add_counters(families: _Families, gpu: GpuReading, who: Mapping[str, str], full: bool) -> None:
    """These hold even when the GPU does not answer any more."""
    for reason in ALL_REASONS if full else STANDARD_REASONS:
        text = "Time the GPU's clocks were held down, by reason; several reasons may hold at once."
        families.counter("throttled_seconds", text, {**who, "reason": reason}, gpu.throttled_seconds.get(reason))
    for xid, count in sorted((gpu.xid_errors or {}).items())[:XIDS_SHOWN]:
        text = "XID errors the driver reported since the daemon started, by number."
        families.counter("xid_errors", text, {**who, "xid": str(xid)}, count)
    for counter in ("volatile", "aggregate") if full else ("volatile",):
        for kind in ("corrected", "uncorrected") if full else ("uncorrected",):
            text = "ECC memory errors: volatile since the driver was loaded, aggregate over the GPU's life."
            labels = {**who, "counter": counter, "kind": kind}
            families.counter("ecc_errors", text, labels, gpu.ecc_errors.get((counter, kind)))
    if full:
        text = "Energy the GPU used since the driver was loaded."
        families.counter("energy_joules", text, who, gpu.energy_joules)


def _add_state(families: _Families, gpu: GpuReading, who: Mapping[str, str], full: bool) -> None:
    for name, text, value in (
        ("utilization_ratio", "Share of the time in which any kernel ran, however small.", gpu.utilization_ratio),
        ("power_watts", "Power the GPU draws.", gpu.power_watts),
        ("power_limit_watts", "Power the GPU is allowed to draw.", gpu.power_limit_watts),
        ("temperature_celsius", "Temperature of the GPU.", gpu.temperature_celsius),
        ("remapping_pending", "1 if rows of memory wait for a reset to be remapped.", _number(gpu.remapping_pending)),
        ("remapping_failed", "1 if remapping a row of memory has failed.", _number(gpu.remapping_failed)),
    ):
        families.gauge(name, text, who, value)
    for kind, amount in (("used", gpu.memory_used_bytes), ("total", gpu.memory_total_bytes)):
        families.gauge(
            "memory_bytes", "Memory of the GPU, used by all processes and total.", {**who, "kind": kind}, amount
        )
    clocks = [("sm", gpu.sm_clock_hertz, gpu.sm_clock_max_hertz)]
    clocks += [("memory", gpu.memory_clock_hertz, gpu.memory_clock_max_hertz)] if full else []
    for clock, now, highest in clocks:
        families.gauge("clock_hertz", "Clock of the GPU at present.", {**who, "clock": clock}, now)
        families.gauge("clock_max_hertz", "Highest clock of the GPU.", {**who, "clock": clock}, highest)
    for kind in ("correctable", "uncorrectable") if full else ("uncorrectable",):
        text = "Rows of memory that were remapped, by the kind of error that made it necessary."
        families.gauge("remapped_rows", text, {**who, "kind": kind}, gpu.remapped_rows.get(kind))
    for kind in ("single_bit", "double_bit") if full else ("double_bit",):
        text = "Pages of memory that were retired, on GPUs before Ampere."
        families.gauge("retired_pages", text, {**who, "kind": kind}, gpu.retired_pages.get(kind))
    if full:
        for direction in ("transmit", "receive"):
            labels = {**who, "direction": direction}
            value = getattr(gpu, f"pcie_{direction}_bytes_per_second")
            families.gauge("pcie_bytes_per_second", "Traffic over PCIe at present.", labels, value)
            value = getattr(gpu, f"nvlink_{direction}_bytes_per_second")
            families.gauge("nvlink_bytes_per_second", "Traffic over all NVLinks at present.", labels, value)


def _add_profile(families: _Families, gpu: GpuReading, who: Mapping[str, str], full: bool) -> None:
    text = "Share of the time and of the multiprocessors in which a warp was resident."
    families.gauge("sm_active_ratio", text, who, gpu.sm_active_ratio)
    text = "Share of the time in which the memory interface was busy."
    families.gauge("dram_active_ratio", text, who, gpu.dram_active_ratio)
    for pipe in (ANY, "hmma", "imma", "dfma") if full else (ANY,):
        text = "Share of the cycles in which a tensor pipe was busy. It is no share of the peak: the clock may be low."
        families.gauge("tensor_active_ratio", text, {**who, "pipe": pipe}, gpu.tensor_active_ratio.get(pipe))
    if full:
        text = "Resident warps as a share of those the GPU could hold."
        families.gauge("sm_occupancy_ratio", text, who, gpu.sm_occupancy_ratio)
        for pipe in ("fp64", "fp32", "fp16"):
            text = "Share of the cycles in which an arithmetic pipe was busy."
            families.gauge("pipe_active_ratio", text, {**who, "pipe": pipe}, gpu.pipe_active_ratio.get(pipe))
    text = (
        "Estimate of achieved FLOP/s: utilisation of the floating-point tensor pipes × their dense peaks × SM clock ÷ "
        "maximum SM clock. Recomputation counts."
    )
    families.gauge("estimated_flops_per_second", text, who, estimate_of(gpu))
    hfu = estimated_hfu_ratio(gpu.tensor_active_ratio, gpu.sm_clock_hertz, gpu.sm_clock_max_hertz)
    families.gauge("estimated_hfu_ratio", "The same estimate as a share of the peak; not MFU.", who, hfu)


def _number(flag: bool | None) -> float | None:
    return None if flag is None else float(flag)
