"""A dcgm-exporter as a source of GPU counters: a thread reads its /metrics. Size and time of the answer are bounded,
and every value is checked, since it is another program's text.

Its names follow DCGM's fields, of which many were renamed: 4.6 gave temperatures, power and profiling figures names
with their unit, 4.7 (exporter 4.9) base units to the rest, and an exporter with a list of its own may still use the old
ones. Both are read; where a GPU has both, the newer counts.

Left out: XID errors (a gauge that holds the last one cannot be counted) and PCIe and NVLink traffic, whose fields are a
counter in one release and a rate in another."""

from __future__ import annotations

import math
import re
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rankscope.common.http_client import REQUEST_FAILURES, body_of, requested
from rankscope.common.text import printable
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, SourceState

ANSWER_BYTES: Final = 8 << 20
ANSWER_SECONDS: Final = 5.0
MAX_KEPT: Final = 64
NEXT_STEP: Final = "see that dcgm-exporter runs on this node and that dcgm_url is right"
GPUS_READ: Final = 256
LINES_READ: Final = 200_000
LINE_CHARACTERS: Final = 8192
NAME_CHARACTERS: Final = 128
MEBIBYTE: Final = float(1 << 20)
# DCGM marks values as not known with numbers near the top of their types.
BLANK: Final = 9e15

_SAMPLE = re.compile(r"([A-Za-z_:][A-Za-z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?\s*")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
_ESCAPES: Final = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}

# Field of a reading, key where that is a mapping, the most it may be, the metric's old name, what one of it is in our
# unit, and the new name, which has our unit; names without DCGM_FI_.
_FIELDS: Final[tuple[tuple[str, object, float, str, float, str], ...]] = (
    ("utilization_ratio", None, 1, "DEV_GPU_UTIL", 0.01, "DEV_GPU_UTIL_RATIO"),
    ("memory_used_bytes", None, 1e15, "DEV_FB_USED", MEBIBYTE, "DEV_FB_USED_BYTES"),
    ("memory_total_bytes", None, 1e15, "DEV_FB_TOTAL", MEBIBYTE, "DEV_FB_CAPACITY_BYTES"),
    ("power_watts", None, 1e5, "DEV_POWER_USAGE", 1, "DEV_BOARD_POWER_WATTS"),
    ("power_limit_watts", None, 1e5, "DEV_POWER_MGMT_LIMIT", 1, ""),
    ("power_limit_watts", None, 1e5, "DEV_ENFORCED_POWER_LIMIT", 1, ""),
    ("energy_joules", None, 1e15, "DEV_TOTAL_ENERGY_CONSUMPTION", 1e-3, "DEV_GPU_ENERGY_JOULES_TOTAL"),
    ("temperature_celsius", None, 1000, "DEV_GPU_TEMP", 1, "DEV_GPU_TEMP_CELSIUS"),
    ("sm_clock_hertz", None, 1e11, "DEV_SM_CLOCK", 1e6, "DEV_SM_CLOCK_HERTZ"),
    ("memory_clock_hertz", None, 1e11, "DEV_MEM_CLOCK", 1e6, "DEV_MEMORY_CLOCK_HERTZ"),
    ("sm_clock_max_hertz", None, 1e11, "DEV_MAX_SM_CLOCK", 1e6, "DEV_SM_MAX_CLOCK_HERTZ"),
    ("memory_clock_max_hertz", None, 1e11, "DEV_MAX_MEM_CLOCK", 1e6, "DEV_MEMORY_MAX_CLOCK_HERTZ"),
    ("throttled_seconds", "power_cap", 1e10, "DEV_POWER_VIOLATION", 1e-9, "DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL"),
    ("throttled_seconds", "sw_thermal", 1e10, "DEV_THERMAL_VIOLATION", 1e-9, "DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL"),
    (
        "throttled_seconds",
        "sync_boost",
        1e10,
        "DEV_SYNC_BOOST_VIOLATION",
        1e-9,
        "DEV_GPU_SYNC_BOOST_THROTTLE_SECONDS_TOTAL",
    ),
    ("ecc_errors", ("volatile", "corrected"), 1e15, "DEV_ECC_SBE_VOL_TOTAL", 1, ""),
    ("ecc_errors", ("volatile", "uncorrected"), 1e15, "DEV_ECC_DBE_VOL_TOTAL", 1, ""),
    ("ecc_errors", ("aggregate", "corrected"), 1e15, "DEV_ECC_SBE_AGG_TOTAL", 1, ""),
    ("ecc_errors", ("aggregate", "uncorrected"), 1e15, "DEV_ECC_DBE_AGG_TOTAL", 1, ""),
    ("remapped_rows", "correctable", 1e9, "DEV_CORRECTABLE_REMAPPED_ROWS", 1, "DEV_ROW_REMAP_CORRECTABLE_TOTAL"),
    ("remapped_rows", "uncorrectable", 1e9, "DEV_UNCORRECTABLE_REMAPPED_ROWS", 1, "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL"),
    ("remapping_pending", None, 1e9, "DEV_ROW_REMAP_PENDING", 1, ""),
    ("remapping_failed", None, 1e9, "DEV_ROW_REMAP_FAILURE", 1, "DEV_ROW_REMAP_FAILED"),
    ("retired_pages", "single_bit", 1e9, "DEV_RETIRED_SBE", 1, "DEV_PAGE_RETIRED_SBE_TOTAL"),
    ("retired_pages", "double_bit", 1e9, "DEV_RETIRED_DBE", 1, "DEV_PAGE_RETIRED_DBE_TOTAL"),
    ("sm_active_ratio", None, 1, "PROF_SM_ACTIVE", 1, "PROF_SM_UTIL_RATIO"),
    ("sm_occupancy_ratio", None, 1, "PROF_SM_OCCUPANCY", 1, "PROF_SM_OCCUPANCY_RATIO"),
    ("tensor_active_ratio", "any", 1, "PROF_PIPE_TENSOR_ACTIVE", 1, "PROF_TENSOR_UTIL_RATIO"),
    ("tensor_active_ratio", "hmma", 1, "PROF_PIPE_TENSOR_HMMA_ACTIVE", 1, "PROF_HMMA_UTIL_RATIO"),
    ("tensor_active_ratio", "imma", 1, "PROF_PIPE_TENSOR_IMMA_ACTIVE", 1, "PROF_IMMA_UTIL_RATIO"),
    ("tensor_active_ratio", "dfma", 1, "PROF_PIPE_TENSOR_DFMA_ACTIVE", 1, "PROF_DFMA_UTIL_RATIO"),
    ("pipe_active_ratio", "fp64", 1, "PROF_PIPE_FP64_ACTIVE", 1, "PROF_FP64_UTIL_RATIO"),
    ("pipe_active_ratio", "fp32", 1, "PROF_PIPE_FP32_ACTIVE", 1, "PROF_FP32_UTIL_RATIO"),
    ("pipe_active_ratio", "fp16", 1, "PROF_PIPE_FP16_ACTIVE", 1, "PROF_FP16_UTIL_RATIO"),
    ("dram_active_ratio", None, 1, "PROF_DRAM_ACTIVE", 1, "PROF_DRAM_UTIL_RATIO"),
)
# By metric: whether its name is new, field, key, scale, and the most.
_ROWS: Final[Mapping[str, tuple[bool, str, object, float, float]]] = {
    f"DCGM_FI_{name}": (is_new, field, key, scale, most)
    for field, key, most, old_name, old_scale, new_name in _FIELDS
    for is_new, name, scale in ((False, old_name, old_scale), (True, new_name, 1.0))
    if name
}
# Of the memory, beside what is used: the total is not among the fields that old exporters give by default.
_PARTS: Final = {
    "DCGM_FI_DEV_FB_FREE": MEBIBYTE,
    "DCGM_FI_DEV_FB_RESERVED": MEBIBYTE,
    "DCGM_FI_DEV_FB_FREE_BYTES": 1.0,
    "DCGM_FI_DEV_FB_RESERVED_BYTES": 1.0,
}
_MADE: Final[Mapping[str, Callable[[float], object]]] = {
    "memory_used_bytes": int,
    "memory_total_bytes": int,
    "remapping_pending": bool,
    "remapping_failed": bool,
    "ecc_errors": int,
    "remapped_rows": int,
    "retired_pages": int,
}


def parse_readings(text: str) -> tuple[GpuReading, ...]:
    """Whole GPUs by index. MIG instances are left out: the exporter gives them no UUID of their own."""
    found: dict[str, dict[str, Any]] = {}
    read_by_new_name: set[tuple[str, str, object]] = set()
    for name, labels, value in samples(text):
        uuid = labels.get("UUID") or labels.get("uuid") or ""
        if not uuid.startswith("GPU-") or labels.get("GPU_I_ID") or not 0 <= value < BLANK:
            continue
        if len(found) >= GPUS_READ and uuid not in found:
            continue
        fields = found.setdefault(uuid, _identity(uuid, labels))
        if name in _PARTS:
            fields[name] = value * _PARTS[name]
        if name not in _ROWS:
            continue
        is_new, field, key, scale, most = _ROWS[name]
        if value * scale > most * 1.001 or (not is_new and (uuid, field, key) in read_by_new_name):
            continue
        if is_new:
            read_by_new_name.add((uuid, field, key))
        number = min(value * scale, most)
        made = _MADE.get(field, float)(number)
        if key is None:
            fields[field] = made
        else:
            fields.setdefault(field, {})[key] = made
    return tuple(sorted((_reading(fields) for fields in found.values()), key=lambda gpu: (gpu.index, gpu.uuid)))


def samples(text: str) -> Iterator[tuple[str, Mapping[str, str], float]]:
    """DCGM's samples of an exposition; a line that cannot be read is passed over."""
    for line in text.split("\n", LINES_READ)[:LINES_READ]:
        if not line.startswith("DCGM_") or len(line) > LINE_CHARACTERS:
            continue
        match = _SAMPLE.fullmatch(line)
        if match is None:
            continue
        labels = _labels(match[2] or "")
        try:
            value = float(match[3])
        except ValueError:
            continue
        if labels is not None and math.isfinite(value):
            yield match[1], labels, value


def _labels(text: str) -> Mapping[str, str] | None:
    labels = {}
    at = 0
    while at < len(text):
        match = _LABEL.match(text, at)
        if match is None:
            return None
        labels[match[1]] = re.sub(r"\\.", lambda found: _ESCAPES.get(found[0], found[0]), match[2])
        at = match.end()
    return labels


def _identity(uuid: str, labels: Mapping[str, str]) -> dict[str, Any]:
    index = labels.get("gpu", "")
    return {
        "uuid": printable(uuid, NAME_CHARACTERS),
        "index": int(index) if index.isascii() and index.isdigit() and len(index) <= 4 else -1,
        "name": printable(labels.get("modelName", ""), NAME_CHARACTERS),
    }


def _reading(fields: MutableMapping[str, Any]) -> GpuReading:
    parts = {name: fields.pop(name, None) for name in _PARTS}
    free = parts["DCGM_FI_DEV_FB_FREE_BYTES"] or parts["DCGM_FI_DEV_FB_FREE"]
    reserved = parts["DCGM_FI_DEV_FB_RESERVED_BYTES"] or parts["DCGM_FI_DEV_FB_RESERVED"] or 0.0
    if "memory_total_bytes" not in fields and free is not None and "memory_used_bytes" in fields:
        fields["memory_total_bytes"] = int(fields["memory_used_bytes"] + free + reserved)
    return GpuReading(**fields)


class DcgmError(Exception):
    """The exporter cannot be read: the reason and the next step."""


class DcgmSource:
    """Has no counters of its own: the exporter's last answer is all there is."""

    def __init__(self, url: str, interval_seconds: float = 1.0) -> None:
        self._url = url
        self._interval_seconds = interval_seconds
        self._latest = GpuSnapshot("dcgm", SourceState.STARTING)
        self._kept: deque[GpuSnapshot] = deque(maxlen=MAX_KEPT)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-dcgm", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()

    def latest(self) -> GpuSnapshot:
        return self._latest

    def since(self, unix_nanos: int) -> Sequence[GpuSnapshot]:
        return [snapshot for snapshot in tuple(self._kept) if snapshot.taken_unix_nanos > unix_nanos]

    def poll(self) -> None:
        started = time.monotonic()
        try:
            gpus = parse_readings(fetch(self._url))
            state = SourceState.OK if gpus else SourceState.NO_GPU
            reason = "" if gpus else f"{self._url}: no GPU in it; {NEXT_STEP}"
            snapshot = GpuSnapshot("dcgm", state, reason, gpus=gpus)
        except DcgmError as error:
            snapshot = GpuSnapshot("dcgm", SourceState.FAILED, str(error))
        except Exception as error:  # noqa: BLE001 - foreign text must not end the thread
            snapshot = GpuSnapshot("dcgm", SourceState.FAILED, f"{self._url}: {type(error).__name__}: {error}")
        self._latest = replace(
            snapshot,
            taken_unix_nanos=time.time_ns(),
            polls_total=self._latest.polls_total + 1,
            poll_seconds_total=self._latest.poll_seconds_total + time.monotonic() - started,
        )
        self._kept.append(self._latest)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self.poll()
            self._stopping.wait(self._interval_seconds)


def fetch(url: str) -> str:
    """The body of a GET."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DcgmError(f"dcgm_url = {url!r}: must be like http://127.0.0.1:9400/metrics")
    wanted = parts._replace(path=parts.path or "/metrics")
    try:
        with requested("GET", wanted, {}, seconds=ANSWER_SECONDS, answer_bytes=ANSWER_BYTES) as answer:
            if answer.status != 200:
                raise DcgmError(f"{url}: status {answer.status}; {NEXT_STEP}")
            return body_of(answer).decode("utf-8", "replace")
    except REQUEST_FAILURES as error:
        raise DcgmError(f"{url}: {error or type(error).__name__}; {NEXT_STEP}") from error
