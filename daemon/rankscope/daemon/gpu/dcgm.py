"""A dcgm-exporter as a source of GPU counters: a thread reads its /metrics. Size and time of the answer are bounded,
and every value is checked, since it is another program's text.

Its names follow DCGM's fields, of which many were renamed: 4.6 gave temperatures, power and profiling figures names
with their unit, 4.7 (exporter 4.9) base units to the rest, and an exporter with a list of its own may still use the old
ones. Both are read; where a GPU has both, the newer counts.

Left out: XID errors (a gauge that holds the last one cannot be counted) and PCIe and NVLink traffic, whose fields are a
counter in one release and a rate in another."""

from __future__ import annotations

import http.client
import math
import re
import threading
import time
import urllib.parse
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, Final

from rankscope.common.text import printable
from rankscope.daemon.gpu.readings import GpuReading, GpuSnapshot, SourceState

ANSWER_BYTES: Final = 8 << 20
ANSWER_SECONDS: Final = 5.0
CHUNK_BYTES: Final = 64 << 10
KEPT: Final = 64
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

# Metric, field of a reading, key where that is a mapping, what one of it is in our unit, and the most it may be.
_Row = tuple[str, str, object, float, float]
_OLD: Final[tuple[_Row, ...]] = (
    ("DCGM_FI_DEV_GPU_UTIL", "utilization_ratio", None, 0.01, 1),
    ("DCGM_FI_DEV_FB_USED", "memory_used_bytes", None, MEBIBYTE, 1e15),
    ("DCGM_FI_DEV_FB_TOTAL", "memory_total_bytes", None, MEBIBYTE, 1e15),
    ("DCGM_FI_DEV_POWER_USAGE", "power_watts", None, 1, 1e5),
    ("DCGM_FI_DEV_POWER_MGMT_LIMIT", "power_limit_watts", None, 1, 1e5),
    ("DCGM_FI_DEV_ENFORCED_POWER_LIMIT", "power_limit_watts", None, 1, 1e5),
    ("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", "energy_joules", None, 1e-3, 1e15),
    ("DCGM_FI_DEV_GPU_TEMP", "temperature_celsius", None, 1, 1000),
    ("DCGM_FI_DEV_SM_CLOCK", "sm_clock_hertz", None, 1e6, 1e11),
    ("DCGM_FI_DEV_MEM_CLOCK", "memory_clock_hertz", None, 1e6, 1e11),
    ("DCGM_FI_DEV_MAX_SM_CLOCK", "sm_clock_max_hertz", None, 1e6, 1e11),
    ("DCGM_FI_DEV_MAX_MEM_CLOCK", "memory_clock_max_hertz", None, 1e6, 1e11),
    ("DCGM_FI_DEV_POWER_VIOLATION", "throttled_seconds", "power_cap", 1e-9, 1e10),
    ("DCGM_FI_DEV_THERMAL_VIOLATION", "throttled_seconds", "sw_thermal", 1e-9, 1e10),
    ("DCGM_FI_DEV_SYNC_BOOST_VIOLATION", "throttled_seconds", "sync_boost", 1e-9, 1e10),
    ("DCGM_FI_DEV_ECC_SBE_VOL_TOTAL", "ecc_errors", ("volatile", "corrected"), 1, 1e15),
    ("DCGM_FI_DEV_ECC_DBE_VOL_TOTAL", "ecc_errors", ("volatile", "uncorrected"), 1, 1e15),
    ("DCGM_FI_DEV_ECC_SBE_AGG_TOTAL", "ecc_errors", ("aggregate", "corrected"), 1, 1e15),
    ("DCGM_FI_DEV_ECC_DBE_AGG_TOTAL", "ecc_errors", ("aggregate", "uncorrected"), 1, 1e15),
    ("DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS", "remapped_rows", "correctable", 1, 1e9),
    ("DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS", "remapped_rows", "uncorrectable", 1, 1e9),
    ("DCGM_FI_DEV_ROW_REMAP_PENDING", "remapping_pending", None, 1, 1e9),
    ("DCGM_FI_DEV_ROW_REMAP_FAILURE", "remapping_failed", None, 1, 1e9),
    ("DCGM_FI_DEV_RETIRED_SBE", "retired_pages", "single_bit", 1, 1e9),
    ("DCGM_FI_DEV_RETIRED_DBE", "retired_pages", "double_bit", 1, 1e9),
    ("DCGM_FI_PROF_SM_ACTIVE", "sm_active_ratio", None, 1, 1),
    ("DCGM_FI_PROF_SM_OCCUPANCY", "sm_occupancy_ratio", None, 1, 1),
    ("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", "tensor_active_ratio", "any", 1, 1),
    ("DCGM_FI_PROF_PIPE_TENSOR_HMMA_ACTIVE", "tensor_active_ratio", "hmma", 1, 1),
    ("DCGM_FI_PROF_PIPE_TENSOR_IMMA_ACTIVE", "tensor_active_ratio", "imma", 1, 1),
    ("DCGM_FI_PROF_PIPE_TENSOR_DFMA_ACTIVE", "tensor_active_ratio", "dfma", 1, 1),
    ("DCGM_FI_PROF_PIPE_FP64_ACTIVE", "pipe_active_ratio", "fp64", 1, 1),
    ("DCGM_FI_PROF_PIPE_FP32_ACTIVE", "pipe_active_ratio", "fp32", 1, 1),
    ("DCGM_FI_PROF_PIPE_FP16_ACTIVE", "pipe_active_ratio", "fp16", 1, 1),
    ("DCGM_FI_PROF_DRAM_ACTIVE", "dram_active_ratio", None, 1, 1),
)
_NEW: Final[tuple[_Row, ...]] = (
    ("DCGM_FI_DEV_GPU_UTIL_RATIO", "utilization_ratio", None, 1, 1),
    ("DCGM_FI_DEV_FB_USED_BYTES", "memory_used_bytes", None, 1, 1e15),
    ("DCGM_FI_DEV_FB_CAPACITY_BYTES", "memory_total_bytes", None, 1, 1e15),
    ("DCGM_FI_DEV_BOARD_POWER_WATTS", "power_watts", None, 1, 1e5),
    ("DCGM_FI_DEV_GPU_ENERGY_JOULES_TOTAL", "energy_joules", None, 1, 1e15),
    ("DCGM_FI_DEV_GPU_TEMP_CELSIUS", "temperature_celsius", None, 1, 1000),
    ("DCGM_FI_DEV_SM_CLOCK_HERTZ", "sm_clock_hertz", None, 1, 1e11),
    ("DCGM_FI_DEV_MEMORY_CLOCK_HERTZ", "memory_clock_hertz", None, 1, 1e11),
    ("DCGM_FI_DEV_SM_MAX_CLOCK_HERTZ", "sm_clock_max_hertz", None, 1, 1e11),
    ("DCGM_FI_DEV_MEMORY_MAX_CLOCK_HERTZ", "memory_clock_max_hertz", None, 1, 1e11),
    ("DCGM_FI_DEV_GPU_POWER_THROTTLE_SECONDS_TOTAL", "throttled_seconds", "power_cap", 1, 1e10),
    ("DCGM_FI_DEV_GPU_THERMAL_THROTTLE_SECONDS_TOTAL", "throttled_seconds", "sw_thermal", 1, 1e10),
    ("DCGM_FI_DEV_GPU_SYNC_BOOST_THROTTLE_SECONDS_TOTAL", "throttled_seconds", "sync_boost", 1, 1e10),
    ("DCGM_FI_DEV_ROW_REMAP_CORRECTABLE_TOTAL", "remapped_rows", "correctable", 1, 1e9),
    ("DCGM_FI_DEV_ROW_REMAP_UNCORRECTABLE_TOTAL", "remapped_rows", "uncorrectable", 1, 1e9),
    ("DCGM_FI_DEV_ROW_REMAP_FAILED", "remapping_failed", None, 1, 1e9),
    ("DCGM_FI_DEV_PAGE_RETIRED_SBE_TOTAL", "retired_pages", "single_bit", 1, 1e9),
    ("DCGM_FI_DEV_PAGE_RETIRED_DBE_TOTAL", "retired_pages", "double_bit", 1, 1e9),
    ("DCGM_FI_PROF_SM_UTIL_RATIO", "sm_active_ratio", None, 1, 1),
    ("DCGM_FI_PROF_SM_OCCUPANCY_RATIO", "sm_occupancy_ratio", None, 1, 1),
    ("DCGM_FI_PROF_TENSOR_UTIL_RATIO", "tensor_active_ratio", "any", 1, 1),
    ("DCGM_FI_PROF_HMMA_UTIL_RATIO", "tensor_active_ratio", "hmma", 1, 1),
    ("DCGM_FI_PROF_IMMA_UTIL_RATIO", "tensor_active_ratio", "imma", 1, 1),
    ("DCGM_FI_PROF_DFMA_UTIL_RATIO", "tensor_active_ratio", "dfma", 1, 1),
    ("DCGM_FI_PROF_FP64_UTIL_RATIO", "pipe_active_ratio", "fp64", 1, 1),
    ("DCGM_FI_PROF_FP32_UTIL_RATIO", "pipe_active_ratio", "fp32", 1, 1),
    ("DCGM_FI_PROF_FP16_UTIL_RATIO", "pipe_active_ratio", "fp16", 1, 1),
    ("DCGM_FI_PROF_DRAM_UTIL_RATIO", "dram_active_ratio", None, 1, 1),
)
_ROWS: Final[Mapping[str, tuple[int, _Row]]] = {
    row[0]: (newness, row) for newness, rows in enumerate((_OLD, _NEW)) for row in rows
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
    newness_of: dict[tuple[str, str, object], int] = {}
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
        newness, (_, field, key, scale, most) = _ROWS[name]
        if value * scale > most * 1.001 or newness < newness_of.get((uuid, field, key), 0):
            continue
        newness_of[uuid, field, key] = newness
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
        self._kept: deque[GpuSnapshot] = deque(maxlen=KEPT)
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
    """The body of a GET, straight from the host that is named: no proxy, no redirection."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise DcgmError(f"dcgm_url = {url!r}: must be like http://127.0.0.1:9400/metrics")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    give_up_at = time.monotonic() + ANSWER_SECONDS
    try:
        connection = kind(parts.hostname, parts.port, timeout=ANSWER_SECONDS)
        try:
            path = parts.path or "/metrics"
            connection.request("GET", f"{path}?{parts.query}" if parts.query else path)
            answer = connection.getresponse()
            if answer.status != 200:
                raise DcgmError(f"{url}: status {answer.status}; {NEXT_STEP}")
            return _body(answer, url, give_up_at).decode("utf-8", "replace")
        finally:
            connection.close()
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise DcgmError(f"{url}: {error or type(error).__name__}; {NEXT_STEP}") from error


def _body(answer: http.client.HTTPResponse, url: str, give_up_at: float) -> bytes:
    body = bytearray()
    # read1 gives what has come, so that one byte now and then does not outlast the deadline.
    while chunk := answer.read1(CHUNK_BYTES):
        body += chunk
        if len(body) > ANSWER_BYTES:
            raise DcgmError(f"{url}: more than {ANSWER_BYTES >> 20} MiB; give it fewer fields")
        if time.monotonic() > give_up_at:
            raise DcgmError(f"{url}: took longer than {ANSWER_SECONDS:g} s; {NEXT_STEP}")
    return bytes(body)
