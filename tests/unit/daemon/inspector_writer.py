"""Writes the file of NCCL Inspector as the plugin does, for a process of which this one's descriptors are shown."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PID = os.getpid()
US, MS = 1_000, 1_000_000
CHOSEN = {
    "NCCL_PROFILER_PLUGIN": "/opt/nccl/libnccl-profiler-inspector.so",
    "NCCL_INSPECTOR_ENABLE": "1",
    "NCCL_INSPECTOR_DUMP_THREAD_INTERVAL_MICROSECONDS": "500",
}


def make_process(root: Path, environment: Mapping[str, str] = CHOSEN) -> str:
    """A folder of /proc: the descriptors are ours, the environment is another."""
    process = root / str(PID)
    process.mkdir(parents=True, exist_ok=True)
    (process / "fd").symlink_to("/proc/self/fd")
    (process / "status").write_bytes(Path("/proc/self/status").read_bytes())
    (process / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environment.items()))
    return str(process)


def operation(
    stop_us: int,
    lasted_us: int,
    sequence: int,
    *,
    function: str = "AllReduce",
    size_bytes: int = 1 << 20,
    communicator: str = "0xf9aa123456789a",
    ranks: int = 8,
    is_verbose: bool = True,
    lag_us: int = 80,
    kind: str = "coll",
    channels: int = 2,
) -> dict[str, Any]:
    """A line, by the wall clock."""
    told: dict[str, Any] = {
        kind: function,
        f"{kind}_sn": sequence,
        **({"p2p_peer": 1} if kind == "p2p" else {}),
        f"{kind}_msg_size_bytes": size_bytes,
        f"{kind}_exec_time_us": lasted_us,
        f"{kind}_timing_source": "kernel_gpu",
        f"{kind}_algobw_gbs": 4.015609,
        f"{kind}_busbw_gbs": 7.027316,
    }
    if is_verbose:
        starts, stops = stop_us - lasted_us - 20, stop_us
        told["event_trace_sn"] = {f"{kind}_start_sn": 1, f"{kind}_stop_sn": 2, "kernel_events": []}
        told["event_trace_ts"] = {
            f"{kind}_start_ts": starts - 30,
            f"{kind}_stop_ts": starts - 25,
            "kernel_events": [
                {
                    "channel_id": channel,
                    "kernel_start_ts": starts + channel,
                    "kernel_stop_ts": stops - (channels - 1 - channel),
                    "kernel_record_ts": stops - 5,
                }
                for channel in range(channels)
            ],
        }
    return {
        "header": {"id": communicator, "rank": 2, "n_ranks": ranks, "nnodes": 1},
        "metadata": {
            "inspector_output_format_version": "v4.0",
            "git_rev": "v2.28.9-1",
            "rec_mechanism": "nccl_profiler_interface",
            "dump_timestamp_us": stop_us + lag_us,
            "hostname": "node",
            "pid": PID,
        },
        f"{kind}_perf": told,
    }


def text_of(line: Mapping[str, Any]) -> bytes:
    return json.dumps(line, separators=(",", ":")).encode() + b"\n"


class InspectorWriter:
    """The plugin's side, in this process."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / f"node-pid{PID}.log"
        self.file = self.path.open("wb", buffering=0)

    def write(self, *lines: Mapping[str, Any]) -> None:
        self.file.write(b"".join(map(text_of, lines)))
