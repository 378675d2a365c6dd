"""What becomes of recorded traces: checked, cut to the steps that were asked for, annotated, compressed and summed up.

Runs in a process of its own (`python -m rankscope.daemon.captures.processing FOLDER`), at low priority: it takes
seconds of CPU and hundreds of megabytes, which the daemon's ticks must not feel, and it reads what a container wrote.
The folder holds job.json and the recordings; results.json is left in it, and the artifacts."""

from __future__ import annotations

import gzip
import mmap
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from rankscope.analysis.traces.breakdown import Breakdown, break_down
from rankscope.analysis.traces.collectives import Collectives, find_collectives
from rankscope.analysis.traces.columns import Category, Trace
from rankscope.analysis.traces.cutting import common_steps, cut_events, stretch_of
from rankscope.analysis.traces.diagnosing import diagnose
from rankscope.analysis.traces.joining import Join, join_traces
from rankscope.analysis.traces.reading import TraceError, read_trace
from rankscope.analysis.traces.steps import Steps, find_steps
from rankscope.analysis.traces.summarizing import summarize
from rankscope.analysis.traces.summarizing_records import RankSummary

JOB = "job.json"
RESULTS = "results.json"
NICENESS = 10
TOP_KERNELS = 5
COMPRESSION = 5


class RankJob(msgspec.Struct):
    """One recording. `pid` is what the process calls itself, and what its trace must say."""

    rank: int
    world_size: int
    pid: int
    recording: str
    artifact: str
    notes: dict[str, str]


class Job(msgspec.Struct):
    steps: int | None
    ranks: list[RankJob]


class RankResult(msgspec.Struct):
    rank: int
    error: str = ""
    notes: list[str] = []
    start_unix_millis: int | None = None
    steps: int | None = None
    step_seconds: float | None = None
    summary: dict[str, Any] | None = None


class Results(msgspec.Struct):
    ranks: list[RankResult]
    join: dict[str, Any] | None = None
    bound_by: str = ""


class _RefusedError(Exception):
    pass


def main(folder: Path) -> None:
    os.nice(NICENESS)
    job = msgspec.json.decode((folder / JOB).read_bytes(), type=Job)
    results = {one.rank: RankResult(one.rank) for one in job.ranks}
    traces: dict[int, Trace] = {}
    for one in job.ranks:
        try:
            traces[one.rank] = _read_checked(folder, one)
        except _RefusedError as refusal:
            results[one.rank].error = str(refusal)
    steps = {rank: find_steps(trace) for rank, trace in traces.items()}
    for one in job.ranks:
        if one.rank in traces:
            results[one.rank].step_seconds = _step_seconds(steps[one.rank])
    first = _first_steps(job, traces, steps, results)
    for one in job.ranks:
        if one.rank in traces:
            cut = _window(steps[one.rank], first.get(one.rank), job.steps)
            _write_artifact(folder, one, traces[one.rank], cut)
    done = _reread(folder, job, traces, results)
    text = msgspec.json.encode(done)
    (folder / (RESULTS + ".part")).write_bytes(text)
    (folder / (RESULTS + ".part")).rename(folder / RESULTS)


def _read_checked(folder: Path, one: RankJob) -> Trace:
    try:
        trace = read_trace(_blocks(folder / one.recording), salvage=False)
    except TraceError as error:
        raise _RefusedError(f"the process wrote no complete trace: {error}") from error
    on_host = trace.of(Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON)
    processes = np.unique(trace.process[on_host])
    if len(processes) == 0:
        raise _RefusedError("the trace is empty: the process ran no torch operator meanwhile; is it training?")
    if one.pid not in processes:
        raise _RefusedError(f"the file is a trace of process {processes[0]}, not of {one.pid}; it is not kept")
    return trace


def _first_steps(
    job: Job, traces: Mapping[int, Trace], steps: Mapping[int, Steps], results: Mapping[int, RankResult]
) -> dict[int, int]:
    """Where each rank's whole steps begin, the same step on all. Where there are too few, everything is kept."""
    if job.steps is None or not traces:
        return {}
    found = common_steps(steps, {rank: trace.base_ns for rank, trace in traces.items()}, job.steps)
    if found is not None:
        return found
    for rank in traces:
        whole = max(0, len(steps[rank]) - 1)
        results[rank].notes.append(f"{whole} whole steps were recorded, of {job.steps}; all that was recorded is kept")
    return {}


def _window(steps: Steps, first: int | None, count: int | None) -> tuple[int, int] | None:
    if first is None or count is None:
        return None
    return int(steps.start_ns[first]), int(steps.end_ns[first + count - 1])


def _write_artifact(folder: Path, one: RankJob, trace: Trace, window: tuple[int, int] | None) -> None:
    start, end = window or (np.iinfo(np.int64).min, np.iinfo(np.int64).max)
    head = {
        "schemaVersion": 1,
        "baseTimeNanoseconds": trace.base_ns,
        "displayTimeUnit": "ms",
        "distributedInfo": {"rank": one.rank, "world_size": one.world_size, "backend": trace.backend},
        "deviceProperties": [
            {"id": d.index, "name": d.name, "totalGlobalMem": d.memory_bytes, "numSms": d.multiprocessors}
            for d in trace.devices
        ],
        "rankscope": one.notes,
    }
    stretch = stretch_of(trace, int(start), int(end))
    with (folder / one.recording).open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        view = memoryview(data)
        try:
            with gzip.open(folder / one.artifact, "wb", compresslevel=COMPRESSION) as artifact:
                for piece in cut_events(view, stretch, head):
                    artifact.write(piece)
        finally:
            view.release()
    (folder / one.recording).unlink()


def _reread(folder: Path, job: Job, traces: dict[int, Trace], results: dict[int, RankResult]) -> Results:
    """Summed up from the artifacts themselves: what is told is what is kept."""
    summaries: dict[int, RankSummary] = {}
    breakdowns: dict[int, Breakdown | None] = {}
    collectives: dict[int, Collectives] = {}
    for one in job.ranks:
        if traces.pop(one.rank, None) is None:
            continue
        result = results[one.rank]
        trace = read_trace(_blocks(folder / one.artifact), salvage=False)
        breakdown = break_down(trace)
        if breakdown is None:
            result.error = "nothing ran in the steps that were recorded"
            continue
        traces[one.rank] = trace
        breakdowns[one.rank], collectives[one.rank] = breakdown, find_collectives(trace)
        summaries[one.rank] = summarize(
            trace, breakdown, collectives[one.rank], rank=one.rank, file=one.artifact, top=TOP_KERNELS
        )
        steps = find_steps(trace)
        host = trace.of(Category.CPU_OP, Category.USER_ANNOTATION)
        result.start_unix_millis = round((trace.base_ns + int(trace.start_ns[host].min())) / 1e6)
        result.steps = len(steps)
    join = join_traces(traces, collectives, breakdowns=breakdowns) if len(traces) > 1 else None
    diagnosis = diagnose(list(summaries.values()), join)
    for rank, summary in summaries.items():
        results[rank].summary = _summary(
            summary, [f"{finding.title}: {finding.evidence}" for finding in diagnose([summary]).findings]
        )
    return Results(list(results.values()), None if join is None else _join(join), diagnosis.sentence)


def _summary(summary: RankSummary, findings: list[str]) -> dict[str, Any]:
    durations = [step.duration_us for step in summary.steps]
    counts: dict[str, int] = {}
    for collective in summary.collectives:
        counts[collective.kind] = counts.get(collective.kind, 0) + collective.count
    return {
        "span_seconds": summary.span_us / 1e6,
        "compute_seconds": summary.compute_us / 1e6,
        "communication_seconds": summary.communication_us / 1e6,
        "exposed_communication_seconds": summary.exposed_communication_us / 1e6,
        "memory_copy_seconds": summary.memory_copy_us / 1e6,
        "idle_seconds": summary.idle_us / 1e6,
        "step_seconds": float(np.median(durations)) / 1e6 if durations else None,
        "overlap_ratio": summary.overlap_ratio,
        "collectives": counts,
        "top_kernels": [kernel.name[:200] for kernel in summary.top_kernels],
        "findings": findings,
    }


def _join(join: Join) -> dict[str, Any]:
    return {
        "clock_residual_micros": join.clock_residual_us or 0.0,
        "collectives_matched": join.collectives_matched,
        "last_arrivals": {str(rank): count for rank, count in join.last_arrivals.items()},
        "verdict": join.verdict.value,
        "culprits": list(join.culprits),
        "reason": join.reason,
    }


def _step_seconds(steps: Steps) -> float | None:
    """Of whole steps; the first is cut by the beginning of the trace."""
    durations = (steps.end_ns - steps.start_ns)[1:]
    return float(np.median(durations)) / 1e9 if len(durations) else None


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            yield block


if __name__ == "__main__":
    main(Path(sys.argv[1]))
