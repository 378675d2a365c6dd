"""Files as libkineto writes them, of a process whose steps are known: bytes, not columns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

BASE_NS = 1_790_857_026_000_000_000
# Some weeks after the base, as on a machine that has been up for long.
FIRST_NS = 3_844_102_483_692_633
UNIX_NS = BASE_NS + FIRST_NS

Event = dict[str, Any]


@dataclass(frozen=True)
class StepFile:
    """A step begins where the one before ended its optimizer. Times in ms from a moment (UNIX_NS) that ranks share."""

    pid: int = 494
    boundaries_ms: Sequence[float] = tuple(100.0 * number for number in range(-1, 12))
    begin_ms: float = 30.0
    end_ms: float = 730.0
    idle_ms: float = 20.0  # of every step, at its beginning: no operator runs
    lag_ms: float | None = None  # by which a device is behind the host; None: no device
    frames: bool = False
    head: dict[str, Any] = field(default_factory=dict)

    def but(self, **changes: Any) -> StepFile:
        return replace(self, **changes)

    def text(self) -> bytes:
        devices = [] if self.lag_ms is None else [{"id": 0, "name": "NVIDIA H200"}]
        head = {
            "schemaVersion": 1,
            "deviceProperties": devices,
            "cupti_version": 130001,
            "baseTimeNanoseconds": BASE_NS,
        }
        opening = json.dumps({**head, **self.head})[:-1]
        events = ",\n".join(map(json.dumps, self.events()))
        return f'{opening},\n "traceEvents": [\n{events}\n],\n"traceName": "t.json"\n}}'.encode()

    def events(self) -> list[Event]:
        found = [event for number in range(len(self.boundaries_ms) - 1) for event in self._step(number)]
        recorded = [event for event in found if self.begin_ms <= _ms(event) <= self.end_ms - _lasted(event)]
        span = {"cat": "Trace", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "PyTorch Profiler"}
        frame = self._host("python_function", "train.py(7): main", -500.0, 5000.0)
        return [
            _timed(span, self.begin_ms, self.end_ms - self.begin_ms),
            {"ph": "M", "name": "process_name", "pid": self.pid, "tid": 0, "ts": 0, "args": {"name": "python3"}},
            *recorded,
            *([frame] if self.frames else []),
            {"ph": "i", "name": "Record Window End", "pid": "", "tid": "", "s": "g", "ts": _ts(self.end_ms)},
        ]

    def _step(self, number: int) -> list[Event]:
        start, end = self.boundaries_ms[number], self.boundaries_ms[number + 1]
        work = start + self.idle_ms
        length = end - work
        ids = {"External id": 1000 + number}
        events = [
            self._host("cpu_op", f"aten::forward_{number}", work, 0.3 * length),
            self._host("cpu_op", "autograd::engine::evaluate_function: Mm", work + 0.4 * length, 0.2 * length),
            self._host("user_annotation", "gloo:all_reduce", work + 0.6 * length, 0.2 * length),
            self._host("user_annotation", "Optimizer.step#SGD.step", end - 0.1 * length, 0.1 * length, ids),
        ]
        if self.lag_ms is not None:
            calls = [(work + 0.1 * length, 0.3 * length), (end - 0.05 * length, 0.04 * length)]
            for place, (at, lasts) in enumerate(calls):
                events += self._launch(10 * number + place + 1, at, at + self.lag_ms, lasts)
            mark = {"cat": "gpu_user_annotation", "name": "Optimizer.step#SGD.step", "pid": 0, "tid": 7, "args": ids}
            events.append(_timed(mark, end - 0.05 * length + self.lag_ms, 0.04 * length))
        return events

    def _launch(self, correlation: int, at: float, runs: float, lasts: float) -> list[Event]:
        ties = {"correlation": correlation, "device": 0, "stream": 7}
        arrow = {"cat": "ac2g", "name": "ac2g", "id": correlation}
        return [
            self._host("cuda_runtime", "cudaLaunchKernel", at, 0.01, {"correlation": correlation}),
            _timed({"cat": "kernel", "name": f"gemm_{correlation}", "pid": 0, "tid": 7, "args": ties}, runs, lasts),
            {"ph": "s", **arrow, "pid": self.pid, "tid": self.pid, "ts": _ts(at)},
            {"ph": "f", "bp": "e", **arrow, "pid": 0, "tid": 7, "ts": _ts(runs)},
        ]

    def _host(self, category: str, name: str, at: float, lasts: float, args: dict[str, Any] | None = None) -> Event:
        event = {"cat": category, "name": name, "pid": self.pid, "tid": self.pid, "args": args or {}}
        return _timed(event, at, lasts)


def _timed(event: Event, at: float, lasts: float) -> Event:
    return {"ph": "X", **event, "ts": _ts(at), "dur": round(lasts * 1000, 3)}


def _ts(ms: float) -> float:
    return round((FIRST_NS + round(ms * 1e6)) / 1000, 3)


def _ms(event: Event) -> float:
    return float(event["ts"] * 1000 - FIRST_NS) / 1e6


def _lasted(event: Event) -> float:
    return float(event.get("dur", 0.0)) / 1000
