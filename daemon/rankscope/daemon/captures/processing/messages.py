"""Messages between the daemon and its trace worker. The worker reads what a container wrote: its answers are checked
against these types and bounded in length."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

import msgspec

from rankscope.analysis.traces.summary_records import TraceSummary

Answer = TypeVar("Answer", bound=msgspec.Struct)
MAX_ANSWER_BYTES = 1 << 20


class RankJob(msgspec.Struct, frozen=True):
    """One recording. `pid` is the process' own pid, which its trace must contain."""

    rank: int
    world_size: int
    pid: int
    recording: str
    artifact: str
    is_trace: bool
    notes: dict[str, Any]  # to be written into the artifact
    steps: int | None = None  # the recording starts and ends at boundaries and holds this many steps: do not cut
    more_windows: list[str] = []  # further recordings like the first; `steps` counts all together
    flops_per_step: float | None = None  # of this rank
    peak_flops_per_second: float | None = None  # declared; else by the device's name
    step_seconds: float | None = None  # before the capture, without a profiler


class Job(msgspec.Struct, frozen=True):
    steps: int | None  # to cut to; None: keep everything
    ranks: list[RankJob]


class Excess(msgspec.Struct, frozen=True):
    rank: int
    steps: int
    excess_seconds: float
    low_seconds: float
    high_seconds: float


class Joined(msgspec.Struct, frozen=True):
    clock_residual_micros: float
    collectives_matched: int
    last_arrivals: dict[int, int]
    verdict: str
    culprits: list[int]
    reason: str
    confidence: str = ""
    impact_ratio: float | None = None
    excesses: list[Excess] = []


class WindowResult(msgspec.Struct, frozen=True):
    """A further window, stored beside the first."""

    number: int  # 1 is the second
    start_unix_millis: int
    steps: int


class RankResult(msgspec.Struct):
    rank: int
    error: str = ""
    is_empty: bool = False  # the error is that the process ran nothing
    notes: list[str] = msgspec.field(default_factory=list)
    start_unix_millis: int | None = None
    steps: int | None = None  # in the artifact
    whole_steps: int | None = None  # in the recording
    step_seconds: float | None = None
    summary: TraceSummary | None = None
    more_windows: list[WindowResult] = msgspec.field(default_factory=list)


# msgspec reads the annotations of a Struct when the first one is decoded. Two threads that do so at the same time crash
# the process, and every capture has a thread: here there is one.
for _kind in (Job, Joined, RankResult):
    msgspec.json.Decoder(_kind)


def job_file(folder: Path) -> Path:
    return folder / "job.json"


def result_file(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.result.json"


def join_file(folder: Path) -> Path:
    return folder / "join.json"


def leave(path: Path, answer: msgspec.Struct) -> None:
    """Write atomically: the process may be killed at any time."""
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(answer))
    part.replace(path)


def find(path: Path, kind: type[Answer]) -> Answer | None:
    """None if there is none, or none that can be used."""
    try:
        if path.stat().st_size > MAX_ANSWER_BYTES:
            return None
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError):
        return None
