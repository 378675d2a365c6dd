"""What a driver really answers: each NVML call with its cost, each GPM metric, and what GPM says over windows of
different lengths. Needs nvidia-ml-py and nothing of Rankscope's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import pynvml

REPEATS = 7
# Highest first: what a driver does not know is answered per metric.
METRIC_IDS = range(1, 334)
BATCH = 40
WINDOWS_SECONDS = (0.05, 0.05, 0.1, 0.1, 0.25, 0.25, 0.5, 0.5, 1.0, 1.0, 2.0)
WATCHED = {
    "sm": pynvml.NVML_GPM_METRIC_SM_UTIL,
    "occupancy": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
    "any_tensor": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
    "hmma": pynvml.NVML_GPM_METRIC_HMMA_TENSOR_UTIL,
    "dram": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    "fp32": pynvml.NVML_GPM_METRIC_FP32_UTIL,
}
FIELDS = (
    *("TOTAL_ENERGY_CONSUMPTION", "POWER_INSTANT", "POWER_AVERAGE", "MEMORY_TEMP", "PCIE_REPLAY_COUNTER"),
    *("PERF_POLICY_POWER", "PERF_POLICY_THERMAL", "PERF_POLICY_SYNC_BOOST", "PERF_POLICY_BOARD_LIMIT"),
    *("CLOCKS_EVENT_REASON_SW_POWER_CAP", "CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN"),
    *("CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN", "CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN"),
    *("CLOCKS_EVENT_REASON_SYNC_BOOST", "ECC_DBE_VOL_TOTAL", "ECC_SBE_VOL_TOTAL", "REMAPPED_COR", "REMAPPED_UNC"),
    *("NVLINK_THROUGHPUT_DATA_TX", "NVLINK_THROUGHPUT_DATA_RX", "PCIE_COUNT_TX_BYTES", "PCIE_COUNT_RX_BYTES"),
)
SAMPLE_KINDS = ("TOTAL_POWER", "GPU_UTILIZATION", "MEMORY_UTILIZATION", "PROCESSOR_CLK", "MEMORY_CLK", "MODULE_POWER")


def calls(handle: Any) -> dict[str, Callable[[], Any]]:
    n = pynvml
    corrected, uncorrected = n.NVML_MEMORY_ERROR_TYPE_CORRECTED, n.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    return {
        "driver version": n.nvmlSystemGetDriverVersion,
        "name": lambda: n.nvmlDeviceGetName(handle),
        "utilisation": lambda: n.nvmlDeviceGetUtilizationRates(handle),
        "memory": lambda: n.nvmlDeviceGetMemoryInfo(handle),
        "memory v2": lambda: n.nvmlDeviceGetMemoryInfo(handle, n.nvmlMemory_v2),
        "power": lambda: n.nvmlDeviceGetPowerUsage(handle),
        "power limit": lambda: n.nvmlDeviceGetPowerManagementLimit(handle),
        "enforced power limit": lambda: n.nvmlDeviceGetEnforcedPowerLimit(handle),
        "energy": lambda: n.nvmlDeviceGetTotalEnergyConsumption(handle),
        "temperature": lambda: n.nvmlDeviceGetTemperature(handle, n.NVML_TEMPERATURE_GPU),
        "temperature v": lambda: n.nvmlDeviceGetTemperatureV(handle, n.NVML_TEMPERATURE_GPU),
        "SM clock": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_SM),
        "memory clock": lambda: n.nvmlDeviceGetClockInfo(handle, n.NVML_CLOCK_MEM),
        "max SM clock": lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_SM),
        "max memory clock": lambda: n.nvmlDeviceGetMaxClockInfo(handle, n.NVML_CLOCK_MEM),
        "event reasons": lambda: hex(n.nvmlDeviceGetCurrentClocksEventReasons(handle)),
        "violation, power": lambda: n.nvmlDeviceGetViolationStatus(handle, n.NVML_PERF_POLICY_POWER),
        "PCIe transmit": lambda: n.nvmlDeviceGetPcieThroughput(handle, n.NVML_PCIE_UTIL_TX_BYTES),
        "PCIe receive": lambda: n.nvmlDeviceGetPcieThroughput(handle, n.NVML_PCIE_UTIL_RX_BYTES),
        "NVLink 0 state": lambda: n.nvmlDeviceGetNvLinkState(handle, 0),
        "ECC volatile corrected": lambda: n.nvmlDeviceGetTotalEccErrors(handle, corrected, n.NVML_VOLATILE_ECC),
        "ECC aggregate uncorrected": lambda: n.nvmlDeviceGetTotalEccErrors(handle, uncorrected, n.NVML_AGGREGATE_ECC),
        "remapped rows": lambda: n.nvmlDeviceGetRemappedRows(handle),
        "retired pages": lambda: list(
            n.nvmlDeviceGetRetiredPages(handle, n.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR)
        ),
        "compute processes": lambda: [
            (one.pid, one.usedGpuMemory) for one in n.nvmlDeviceGetComputeRunningProcesses(handle)
        ],
        "process utilisation": lambda: [(one.pid, one.smUtil) for one in n.nvmlDeviceGetProcessUtilization(handle, 0)],
        "MIG mode": lambda: n.nvmlDeviceGetMigMode(handle),
        "virtualisation mode": lambda: n.nvmlDeviceGetVirtualizationMode(handle),
        "supported events": lambda: hex(n.nvmlDeviceGetSupportedEventTypes(handle)),
        "GPM support": lambda: n.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice,
        **{f"samples {kind}": _sampling(handle, kind) for kind in SAMPLE_KINDS},
        **{f"field {name}": _field(handle, name) for name in FIELDS},
    }


def _sampling(handle: Any, kind: str) -> Callable[[], Any]:
    number = getattr(pynvml, f"NVML_{kind}_SAMPLES")

    def take() -> Any:
        value_type, found = pynvml.nvmlDeviceGetSamples(handle, number, 0)
        wide = value_type == pynvml.NVML_VALUE_TYPE_UNSIGNED_LONG_LONG
        values = [one.sampleValue.ullVal if wide else one.sampleValue.uiVal for one in found]
        span = (found[-1].timeStamp - found[0].timeStamp) / 1e6 if found else 0.0
        return {"count": len(values), "span_seconds": span, "mean": statistics.fmean(values) if values else None}

    return take


def _field(handle: Any, name: str) -> Callable[[], Any]:
    number = getattr(pynvml, f"NVML_FI_DEV_{name}")

    def take() -> Any:
        value = pynvml.nvmlDeviceGetFieldValues(handle, [(number, 0)])[0]
        if value.nvmlReturn:
            raise pynvml.NVMLError(value.nvmlReturn)
        by_type = {0: "dVal", 1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
        return getattr(value.value, by_type[value.valueType])

    return take


def ask_all(handle: Any) -> dict[str, dict[str, Any]]:
    """Cost and answer, or the error's name, of each call."""
    found: dict[str, dict[str, Any]] = {}
    for name, call in calls(handle).items():
        seconds, answer = [], ""
        for _ in range(REPEATS):
            began = time.perf_counter()
            try:
                answer = _shown(call())
            except (pynvml.NVMLError, AttributeError, KeyError, TypeError, ValueError) as error:
                answer = f"{type(error).__name__}: {error}"
            seconds.append(time.perf_counter() - began)
        found[name] = {
            "median_us": round(statistics.median(seconds) * 1e6, 1),
            "first_us": round(seconds[0] * 1e6, 1),
            "most_us": round(max(seconds) * 1e6, 1),
            "answer": answer,
        }
    return found


def _shown(answer: Any) -> str:
    fields = getattr(answer, "_fields_", None)
    if fields is None:
        return str(answer)[:160]
    return str({name: getattr(answer, name) for name, *_ in fields})[:160]


class Gpm:
    def __init__(self, handle: Any) -> None:
        self.handle = handle
        self._samples = [pynvml.nvmlGpmSampleAlloc(), pynvml.nvmlGpmSampleAlloc()]
        self.sample_seconds: list[float] = []
        self.metrics_seconds: list[float] = []

    def take(self, which: int) -> float:
        began = time.perf_counter()
        pynvml.nvmlGpmSampleGet(self.handle, self._samples[which])
        self.sample_seconds.append(time.perf_counter() - began)
        return began

    def read(self, metrics: list[int]) -> dict[int, float | str]:
        request = pynvml.c_nvmlGpmMetricsGet_t()
        request.version = pynvml.NVML_GPM_METRICS_GET_VERSION
        request.numMetrics = len(metrics)
        request.sample1, request.sample2 = self._samples
        for position, metric in enumerate(metrics):
            request.metrics[position].metricId = metric
        began = time.perf_counter()
        pynvml.nvmlGpmMetricsGet(request)
        self.metrics_seconds.append(time.perf_counter() - began)
        found: dict[int, float | str] = {}
        for position, metric in enumerate(metrics):
            one = request.metrics[position]
            found[metric] = one.value if one.nvmlReturn == 0 else f"error {one.nvmlReturn}"
        return found

    def window(self, seconds: float, metrics: list[int]) -> tuple[float, dict[int, float | str]]:
        began = self.take(0)
        time.sleep(seconds)
        ended = self.take(1)
        return ended - began, self.read(metrics)

    def close(self) -> None:
        for sample in self._samples:
            pynvml.nvmlGpmSampleFree(sample)


def gpm_windows(handle: Any) -> dict[str, Any]:
    """Under a steady load: does the length of a window matter, and what does the clock do meanwhile?"""
    gpm = Gpm(handle)
    names = {number: name for name, number in WATCHED.items()}
    windows = []
    for seconds in WINDOWS_SECONDS:
        try:
            lasted, values = gpm.window(seconds, list(names))
            told = {names[number]: value for number, value in values.items()}
            windows.append({"asked": seconds, "lasted": round(lasted, 4), **told})
        except pynvml.NVMLError as error:
            windows.append({"asked": seconds, "error": str(error)})
    supported: dict[int, float | str] = {}
    try:
        gpm.take(0)
        time.sleep(1)
        gpm.take(1)
        for first in range(METRIC_IDS.start, METRIC_IDS.stop, BATCH):
            try:
                supported |= gpm.read(list(range(first, min(first + BATCH, METRIC_IDS.stop))))
            except pynvml.NVMLError as error:
                supported[first] = f"batch of {BATCH}: {error}"
    except pynvml.NVMLError as error:
        supported[0] = str(error)
    constants = {
        value: name.removeprefix("NVML_GPM_METRIC_")
        for name, value in vars(pynvml).items()
        if name.startswith("NVML_GPM_METRIC_") and isinstance(value, int)
    }
    clocks = []
    for _ in range(60):
        clocks.append(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))
        time.sleep(0.03)
    found = {
        "windows": windows,
        "metrics_over_1s": {
            f"{number} {constants.get(number, '?')}": value
            for number, value in supported.items()
            if not isinstance(value, str)
        },
        "metrics_refused": _refused(supported),
        "sample_get_us": round(statistics.median(gpm.sample_seconds) * 1e6, 1),
        "metrics_get_us": round(statistics.median(gpm.metrics_seconds) * 1e6, 1),
        "sm_clock_mhz": {"least": min(clocks), "mean": statistics.fmean(clocks), "most": max(clocks), "samples": 60},
    }
    gpm.close()
    return found


def _refused(values: dict[int, float | str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in values.values():
        if isinstance(value, str):
            counts[value] = counts.get(value, 0) + 1
    return counts
