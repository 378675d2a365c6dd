"""Traces that differ from a real one in what breakdowns stumble over, and small random ones."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

Event: TypeAlias = dict[str, Any]
Content: TypeAlias = dict[str, Any]

DEVICE_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
NCCL = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
RCCL = "ncclKernel_Generic_4(ncclDevComm*, unsigned long, ncclWork*)"


def load(path: Path) -> Content:
    content: Content = json.loads(gzip.decompress(path.read_bytes()), strict=False)
    return content


def thinned(content: Content) -> Content:
    """Without what breakdowns do not look at: HTA takes its time with every event."""
    events = [
        event
        for event in content["traceEvents"]
        if event.get("cat") not in ("cpu_op", "ac2g", "fwdbwd") and event.get("ph") != "M"
    ]
    return {**content, "traceEvents": events}


def spans(content: Content, *categories: str) -> list[Event]:
    return [event for event in content["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories]


def in_microseconds(content: Content) -> None:
    for event in content["traceEvents"]:
        for key in ("ts", "dur"):
            if key in event:
                event[key] = int(event[key])


def in_nanoseconds(content: Content) -> None:
    dice = random.Random(1)
    for event in content["traceEvents"]:
        if "ts" in event:
            event["ts"] = event["ts"] % 10**10 + dice.randrange(1000) / 1000
        if "dur" in event:
            event["dur"] = event["dur"] + dice.randrange(1000) / 1000


def on_several_streams(content: Content) -> None:
    for index, event in enumerate(spans(content, *DEVICE_CATEGORIES)):
        event["args"]["stream"] = event["tid"] = 7 + index % 4
        event["ts"] -= 3.25 * (index % 4) * event["dur"]


def with_short_kernels(content: Content) -> None:
    # Waits of the host start whenever they like, also in the same microsecond as a kernel: see random_traces.
    content["traceEvents"] = [event for event in content["traceEvents"] if event.get("cat") != "cuda_sync"]
    for index, event in enumerate(spans(content, *DEVICE_CATEGORIES)):
        event["dur"] = (0, 0.001, 0.5, 0.999, 1.0, event["dur"])[index % 6]


def _communicating(content: Content, name: str) -> None:
    for index, event in enumerate(spans(content, "kernel")):
        if index % 5 == 0:
            event["name"] = name
            event["args"]["stream"] = event["tid"] = 20
            event["dur"] *= 1.75


def with_nccl(content: Content) -> None:
    _communicating(content, NCCL)


def with_rccl(content: Content) -> None:
    _communicating(content, RCCL)


def with_copies_only(content: Content) -> None:
    content["traceEvents"] = [
        event for event in content["traceEvents"] if event.get("cat") not in ("kernel", "cuda_sync")
    ]


def on_two_devices(content: Content) -> None:
    for index, event in enumerate(spans(content, *DEVICE_CATEGORIES)):
        event["pid"] = event["args"]["device"] = index % 2
        event["ts"] += 40.125 * (index % 2)


def without_launches(content: Content) -> None:
    calls = [event for event in content["traceEvents"] if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    gone = {id(event) for event in calls[::3]}
    content["traceEvents"] = [event for event in content["traceEvents"] if id(event) not in gone]


def without_steps(content: Content) -> None:
    content["traceEvents"] = [
        event for event in content["traceEvents"] if not str(event.get("name")).startswith("ProfilerStep")
    ]


def with_profiler_steps(count: int) -> Callable[[Content], None]:
    def change(content: Content) -> None:
        calls = spans(content, "cuda_runtime")
        first, last = min(event["ts"] for event in calls), max(event["ts"] for event in calls)
        length = (last - first) / count
        for number in range(count):
            step = {"ph": "X", "name": f"ProfilerStep#{number + 4}", "ts": first + number * length, "dur": length}
            host = {
                "cat": "user_annotation",
                "pid": calls[0]["pid"],
                "tid": calls[0]["tid"],
                "args": {"Ev Idx": number},
            }
            content["traceEvents"].append(step | host)
            # The profiler shows the step on the device, too, later than on the host.
            device = {"cat": "gpu_user_annotation", "pid": 0, "tid": 7, "ts": step["ts"] + 211.5}
            content["traceEvents"].append(step | device)

    return change


def with_misleading_names(content: Content) -> None:
    names = (
        "void SyncBatchNorm<float>()",
        "my_Memcpy_kernel",
        "Memset_like",
        "dma_engine",
        "ncclMemOp",
        "void ncclKernel",
    )
    for index, event in enumerate(spans(content, "kernel")):
        if index % 3 == 0:
            event["name"] = names[index % len(names)]


def with_marks_on_streams(content: Content) -> None:
    for event in spans(content, "gpu_user_annotation"):
        event.setdefault("args", {})["stream"] = event["tid"]


VARIANTS: tuple[tuple[Callable[[Content], None], ...], ...] = (
    (in_microseconds,),
    (on_several_streams,),
    (with_short_kernels,),
    (with_nccl,),
    (with_rccl, on_several_streams),
    (with_copies_only,),
    (on_two_devices, with_nccl),
    (with_profiler_steps(1),),
    (with_profiler_steps(3), with_nccl),
    (with_profiler_steps(3), without_launches, on_several_streams),
    (with_misleading_names,),
    (with_marks_on_streams,),
)
MICROSECOND_VARIANTS: tuple[tuple[Callable[[Content], None], ...], ...] = (
    (without_steps,),
    (in_nanoseconds,),
    (in_nanoseconds, without_steps, on_several_streams),
)


def varied(content: Content, changes: tuple[Callable[[Content], None], ...]) -> Content:
    changed = copy.deepcopy(content)
    for change in changes:
        change(changed)
    return changed


def random_traces(count: int) -> Iterator[Content]:
    """A few kernels each, on few streams, often touching, overlapping or empty. None that is shorter than a microsecond
    starts in the same one as another: HTA's result then hangs on how an unstable sort happens to put them."""
    names = (
        "gemm",
        "elementwise",
        NCCL,
        RCCL,
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        "Stream Wait Event",
    )
    for seed in range(count):
        dice = random.Random(seed)
        fine, steps = seed % 3 > 0, seed % 4
        events = [
            _span("user_annotation", f"ProfilerStep#{number}", number * 60_000, 59_000, fine) for number in range(steps)
        ]
        for correlation, slot in enumerate(dice.sample(range(100), dice.randrange(3, 60))):
            start = 2000 * slot + dice.choice((0, 0, 1, 345, 999))
            duration = dice.choice((0, 300, 999, 1000, 2000, 4321, 9000, 30_001))
            launch = _span("cuda_runtime", "cudaLaunchKernel", max(start - dice.randrange(30_000), 0), 700, fine)
            launch["args"] = {"correlation": correlation}
            kernel = _span("kernel", dice.choice(names), start, duration, fine)
            kernel["args"] = {"correlation": correlation, "stream": dice.choice((7, 7, 13, 20)), "device": 0}
            events += [kernel] if dice.random() < 0.1 else [launch, kernel]
            if duration >= 2000:
                events.append({**kernel, "name": dice.choice(names), "dur": 2 * kernel["dur"]})
        yield {"schemaVersion": 1, "distributedInfo": {"rank": 0, "world_size": 1}, "traceEvents": events}


def _span(category: str, name: str, start_ns: int, duration_ns: int, fine: bool) -> Event:
    start, duration = (
        (1000 + start_ns / 1000, duration_ns / 1000) if fine else (1000 + start_ns // 1000, duration_ns // 1000)
    )
    return {"ph": "X", "cat": category, "name": name, "pid": 1, "tid": 1, "ts": start, "dur": duration}
