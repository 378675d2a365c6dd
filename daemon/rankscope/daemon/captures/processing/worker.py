"""Processes recordings: checks them, cuts them to the requested steps, annotates, compresses and summarizes them.

Runs in a separate process (`python -m rankscope.daemon.captures.processing.worker FOLDER`): it takes seconds of CPU
and hundreds of megabytes, which must not delay the daemon's ticks, and it reads what a container wrote. The
directory holds the job; the process writes an answer for every rank, and one for all together. One trace's events
are in memory at a time."""

from __future__ import annotations

import gzip
import math
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from rankscope.analysis.models.device_peaks import peak_flops_per_second
from rankscope.analysis.models.mfu import step_mfu_ratio
from rankscope.analysis.replay.graph import ReplayError
from rankscope.analysis.replay.prediction import forecast, gain_sentence
from rankscope.analysis.traces.breakdown import Breakdown, StepParts, break_down
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.cut import Stretch, WholeSteps, common_run, cut
from rankscope.analysis.traces.diagnosis import diagnose
from rankscope.analysis.traces.joins.join import Join, join_traces, keep_essentials
from rankscope.analysis.traces.reader.events import DECODE_ERRORS
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import CUT_AT_A_STEP
from rankscope.analysis.traces.summary import summarize
from rankscope.analysis.traces.summary_records import RankSummary, TraceSummary
from rankscope.analysis.traces.trace import Category, Trace, TraceError
from rankscope.common.text import printable
from rankscope.daemon.captures.probe_commands import window_file
from rankscope.daemon.captures.processing.messages import (
    Excess,
    Job,
    Joined,
    RankJob,
    RankResult,
    WindowResult,
    job_file,
    join_file,
    leave,
    result_file,
)
from rankscope.daemon.captures.processing.sandbox import confine
from rankscope.daemon.captures.processing.trace_check import (
    SURPRISES,
    Checked,
    EmptyTraceError,
    RefusedError,
    blocks,
    check,
)

_SUMS = (
    "span_seconds",
    "compute_seconds",
    "communication_seconds",
    "exposed_communication_seconds",
    "memory_copy_seconds",
    "idle_seconds",
    "events",
)
_EACH = ("each_step_seconds", "each_communication_seconds", "each_exposed_communication_seconds")
TOP_KERNELS = 5
MAX_FINDINGS = 8
MAX_NAME_CHARACTERS, MAX_SENTENCE_CHARACTERS = 160, 400
# A replay takes about 2 µs for each, and there are some thirty.
MAX_ADVICE_KERNELS = 200_000
_MAX_COUNT = (1 << 32) - 1
MAX_MEMORY_BYTES: Final = 6 << 30
MAX_CPU_SECONDS: Final = 600
MAX_FILE_BYTES: Final = 4 << 30
NOTES_BYTES: Final = 1 << 20
COMPRESSION: Final = 5
MAX_NOTES: Final = 8
# Relative to the shortest recording: a smaller overlap does not describe what each recorded.
COMMON_TIME_RATIO: Final = 0.5
MAX_STEP_VALUES: Final = 100
MAX_EXCESSES: Final = 64


# Combines several windows of one rank: recorded intervals add up; the time between them is unknown and counts for
# nothing.


def together(summaries: Sequence[tuple[int, TraceSummary]]) -> TraceSummary:
    """Steps and summary of each window, first window first: kernels and findings come from the first."""
    first = summaries[0][1]
    sums = {name: sum(getattr(summary, name) for _, summary in summaries) for name in _SUMS}
    each = {name: [value for _, summary in summaries for value in getattr(summary, name)] for name in _EACH}
    timed = [
        (steps, summary.step_seconds) for steps, summary in summaries if steps and summary.step_seconds is not None
    ]
    count = sum(steps for steps, _ in timed)
    step_seconds = sum(steps * seconds for steps, seconds in timed) / count if count else None
    communication, exposed = sums["communication_seconds"], sums["exposed_communication_seconds"]
    collectives: Counter[str] = Counter()
    for _, summary in summaries:
        collectives.update(summary.collectives)
    mfu_ratio = None
    if first.mfu_ratio is not None and first.step_seconds and step_seconds:
        mfu_ratio = first.mfu_ratio * first.step_seconds / step_seconds  # as many FLOPs in every step
    return msgspec.structs.replace(
        first,
        **sums,
        **each,
        step_seconds=step_seconds,
        overlap_ratio=1 - exposed / communication if communication > 0 else None,
        mfu_ratio=mfu_ratio,
        collectives=dict(collectives),
    )


# Findings of the analysis engine as a short summary message.


def summary_of(
    summary: RankSummary,
    step_seconds: float | None,
    job: RankJob,
    steps: Sequence[StepParts] = (),
    events: int = 0,
    advice: Sequence[str] = (),
) -> TraceSummary:
    """`steps` counts the whole steps of the artifact."""
    counts: dict[str, int] = {}
    for collective in summary.collectives:
        kind = printable(collective.kind, MAX_NAME_CHARACTERS)
        counts[kind] = min(_MAX_COUNT, counts.get(kind, 0) + collective.count)
    diagnosis = diagnose([summary])
    findings = [diagnosis.sentence, *(f"{finding.title}: {finding.evidence}" for finding in diagnosis.findings)]
    return TraceSummary(
        span_seconds=summary.span_us / 1e6,
        compute_seconds=summary.compute_us / 1e6,
        communication_seconds=summary.communication_us / 1e6,
        exposed_communication_seconds=summary.exposed_communication_us / 1e6,
        memory_copy_seconds=summary.memory_copy_us / 1e6,
        idle_seconds=summary.idle_us / 1e6,
        step_seconds=step_seconds,
        overlap_ratio=summary.overlap_ratio,
        mfu_ratio=_mfu_ratio(summary.device, step_seconds, job),
        collectives=counts,
        top_kernels=[printable(kernel.name, MAX_NAME_CHARACTERS) for kernel in summary.top_kernels[:TOP_KERNELS]],
        findings=[printable(finding, MAX_SENTENCE_CHARACTERS) for finding in findings[:MAX_FINDINGS]],
        advice=[printable(one, MAX_SENTENCE_CHARACTERS) for one in advice[:MAX_FINDINGS]],
        each_step_seconds=[step.span_ns / 1e9 for step in steps],
        each_communication_seconds=[step.communication_ns / 1e9 for step in steps],
        each_exposed_communication_seconds=[step.exposed_communication_ns / 1e9 for step in steps],
        events=events,
    )


def joined_of(join: Join) -> Joined:
    return Joined(
        clock_residual_micros=join.clock_residual_us or 0.0,
        collectives_matched=min(_MAX_COUNT, join.collectives_matched),
        last_arrivals={rank: min(_MAX_COUNT, count) for rank, count in join.last_arrivals.items()},
        verdict=join.verdict.value,
        culprits=list(join.culprits),
        reason=printable(join.reason, MAX_SENTENCE_CHARACTERS),
        confidence=join.confidence.value,
        impact_ratio=join.impact_ratio,
        excesses=[Excess(**asdict(excess)) for excess in join.excesses[:MAX_EXCESSES]],
    )


def _mfu_ratio(device: str, step_seconds: float | None, job: RankJob) -> float | None:
    """Of the declared FLOPs; None if they, the step time or the device's peak are unknown."""
    peak = job.peak_flops_per_second or peak_flops_per_second(device)
    ratio = step_mfu_ratio(job.flops_per_step or None, step_seconds, peak)
    return ratio if ratio is not None and 0 <= ratio < math.inf else None


@dataclass(frozen=True)
class _Essence:
    """What a join needs of an artifact."""

    trace: Trace
    collectives: Collectives
    breakdown: Breakdown


def main(folder: Path) -> None:
    confine(memory_bytes=MAX_MEMORY_BYTES, cpu_seconds=MAX_CPU_SECONDS, file_bytes=MAX_FILE_BYTES)
    job = msgspec.json.decode(job_file(folder).read_bytes(), type=Job)
    checked: dict[int, Checked] = {}
    for one in job.ranks:
        try:
            if one.is_trace:
                checked[one.rank] = check(one)
                continue
            answer = _keep_stacks(one)
        except RefusedError as refusal:
            answer = _refused(one, refusal)
        leave(result_file(folder, one.rank), answer)
    plan = _plan(job, checked)
    essences: dict[int, _Essence] = {}
    for one in job.ranks:
        if one.rank not in checked:
            continue
        try:
            answer, essence = _keep_trace(one, checked[one.rank], plan, job.steps)
            if essence is not None:
                essences[one.rank] = essence
        except RefusedError as refusal:
            answer = _refused(one, refusal)
        leave(result_file(folder, one.rank), answer)
    joined = _join(essences)
    if joined is not None:
        leave(join_file(folder), joined)


def _refused(one: RankJob, refusal: RefusedError) -> RankResult:
    return RankResult(one.rank, error=str(refusal), is_empty=isinstance(refusal, EmptyTraceError))


@dataclass(frozen=True)
class _Plan:
    first: Mapping[int, int]  # position of the first step to keep, for ranks that are cut
    common_steps: int  # whole steps shared by the ranks that are cut
    common_ns: tuple[int, int] | None = None  # unix time that all ranks recorded, if a duration was requested
    note: str = ""


def _plan(job: Job, checked: Mapping[int, Checked]) -> _Plan:
    to_cut = [one.rank for one in job.ranks if one.rank in checked and one.steps is None]
    if job.steps is None:
        return _common_time([checked[rank] for rank in to_cut])
    if not to_cut:
        return _Plan({}, 0)
    # A rank that recorded too few steps must not reduce the common steps of the others.
    enough = {rank: checked[rank].whole for rank in to_cut if len(checked[rank].whole) >= job.steps}
    for count in range(job.steps if enough else 0, 0, -1):
        run = common_run(enough, count)
        if run is not None:
            return _Plan(run if count == job.steps else {}, count)
    return _Plan({}, 0)


def _common_time(recordings: Sequence[Checked]) -> _Plan:
    if len(recordings) < 2:
        return _Plan({}, 0)
    start = max(one.start_unix_ns for one in recordings)
    end = min(one.end_unix_ns for one in recordings)
    shortest = min(one.end_unix_ns - one.start_unix_ns for one in recordings)
    if end - start < COMMON_TIME_RATIO * shortest:
        common_seconds = max(0, end - start) / 1e9
        return _Plan({}, 0, note=f"the ranks recorded {common_seconds:.1f} s in common; nothing was cut")
    return _Plan({}, 0, (start, end))


def _keep_trace(one: RankJob, checked: Checked, plan: _Plan, asked: int | None) -> tuple[RankResult, _Essence | None]:
    result = RankResult(one.rank, notes=list(checked.notes[:MAX_NOTES]), step_seconds=checked.step_seconds)
    whole, stretch, first = checked.whole, None, plan.first.get(one.rank)
    result.start_unix_millis = _millis(checked.start_unix_ns)
    result.whole_steps = result.steps = len(whole) if one.steps is None else one.steps
    if first is not None and asked is not None:
        whole = whole.run(first, asked)
        stretch = checked.outline.stretch(int(whole.start_ns[0]), int(whole.end_ns[-1]))
        result.start_unix_millis, result.steps = _millis(stretch.start_ns), asked
    elif plan.common_ns is not None and one.steps is None:
        start_ns, end_ns = (moment - checked.outline.base_ns for moment in plan.common_ns)
        stretch = checked.outline.stretch(start_ns, end_ns)
        inside = np.flatnonzero((whole.start_ns >= start_ns) & (whole.end_ns <= end_ns))
        whole = whole.run(int(inside[0]) if len(inside) else 0, len(inside))
        # The start stays that of the recording: it shows how far apart ranks started.
        result.whole_steps = result.steps = len(whole)
    elif plan.note and one.steps is None:
        result.notes.append(plan.note)
    elif asked is not None and one.steps is None:
        if len(whole) >= asked:
            result.whole_steps = plan.common_steps
            result.notes.append(f"the ranks recorded {plan.common_steps} steps in common, of {asked}; nothing was cut")
        else:
            result.notes.append(f"{len(whole)} whole steps were recorded, of {asked}; nothing was cut")
    _write_trace(one, stretch, result.steps if not one.more_windows else len(whole), result, marked=first is not None)
    essence = _sum_up(one, result, whole)
    _keep_more_windows(one, len(whole), result)
    return result, essence


def _keep_more_windows(one: RankJob, first_steps: int, result: RankResult) -> None:
    """Each window is a separate artifact; one that cannot be kept is noted, the others are kept."""
    summaries = [] if result.summary is None else [(first_steps, result.summary)]
    for number, recording in enumerate(one.more_windows, 1):
        artifact = str(window_file(Path(one.artifact), number))
        window = msgspec.structs.replace(one, recording=recording, artifact=artifact, more_windows=[])
        told = RankResult(one.rank)
        try:
            checked = check(window)
            told.start_unix_millis = _millis(checked.start_unix_ns)
            _write_trace(window, None, len(checked.whole), told)
            _sum_up(window, told, checked.whole)
        except RefusedError as refusal:
            result.notes.append(f"window {number + 1} is not kept: {refusal}")
            continue
        result.more_windows.append(WindowResult(number, told.start_unix_millis, len(checked.whole)))
        if told.summary is not None:
            summaries.append((len(checked.whole), told.summary))
    if one.more_windows:
        result.steps = result.whole_steps = first_steps + sum(window.steps for window in result.more_windows)
        result.summary = together(summaries) if summaries else None


def _write_trace(
    one: RankJob, stretch: Stretch | None, steps: int | None, result: RankResult, marked: bool = False
) -> None:
    head = {"rankscope": {**one.notes, "steps": steps, "start_unix_millis": result.start_unix_millis}}
    mark = {"ph": "X", "cat": "user_annotation", "name": CUT_AT_A_STEP, "pid": one.pid, "tid": one.pid, "dur": 0}
    distributed = {"rank": one.rank, "world_size": one.world_size}
    try:
        _compress(
            one, cut(blocks(Path(one.recording)), stretch, head, distributed=distributed, mark=mark if marked else None)
        )
    except (TraceError, *DECODE_ERRORS) as error:
        raise RefusedError(f"the trace cannot be cut: {error}") from error


def _keep_stacks(one: RankJob) -> RankResult:
    _compress(one, blocks(Path(one.recording)))
    Path(f"{one.artifact}.notes").write_bytes(msgspec.json.encode(one.notes))
    return RankResult(one.rank, steps=one.steps, whole_steps=one.steps)


def _compress(one: RankJob, pieces: Iterable[bytes]) -> None:
    """Room is reserved for an artifact as large as its recording."""
    limit_bytes = Path(one.recording).stat().st_size + NOTES_BYTES
    try:
        with Path(one.artifact).open("wb") as file, gzip.GzipFile("", "wb", COMPRESSION, file, mtime=0) as artifact:
            for piece in pieces:
                artifact.write(piece)
                if file.tell() > limit_bytes:
                    raise OSError(f"it is larger than the recording, by more than {NOTES_BYTES} bytes")
    except OSError as error:
        Path(one.artifact).unlink(missing_ok=True)
        raise RefusedError(f"the artifact cannot be written: {error.strerror or error}") from error
    except MemoryError:
        raise RefusedError("the trace is too large to be cut; capture fewer steps, or without stacks") from None
    Path(one.recording).unlink(missing_ok=True)


def _sum_up(one: RankJob, result: RankResult, whole: WholeSteps) -> _Essence | None:
    """From the artifact itself, so that the summary matches it. A trace that cannot be summarized is kept."""
    try:
        trace = read_trace(blocks(Path(one.artifact)), salvage=False)
        breakdown = break_down(trace)
        if breakdown is None:
            result.notes.append("nothing ran in what was recorded")
            return None
        collectives = find_collectives(trace)
        summary = summarize(trace, breakdown, collectives, rank=one.rank, file="", top=TOP_KERNELS)
        # A first or last step that the recording cut says nothing about a step.
        steps = breakdown.steps if len(breakdown.steps) == result.steps else ()
        advice = _advice(trace, one)
        result.summary = summary_of(summary, whole.seconds, one, steps[:MAX_STEP_VALUES], len(trace), advice)
        return _Essence(*keep_essentials(trace, collectives), breakdown)
    except TraceError as error:
        result.notes.append(f"the artifact cannot be read again: {error}; please report this")
    except MemoryError:
        result.notes.append("the trace is too large to be summed up here; `rankscope analyze trace` may be able to")
    except SURPRISES as error:
        result.notes.append(f"the trace cannot be summed up ({type(error).__name__}: {error}); please report this")
    return None


def _advice(trace: Trace, one: RankJob) -> list[str]:
    """What to change; nothing if the trace cannot be replayed, or is so large that it would take long."""
    if int(trace.of(Category.KERNEL, Category.MEMCPY, Category.MEMSET).sum()) > MAX_ADVICE_KERNELS:
        return []
    try:
        found = forecast({one.rank: trace}, true_step_ns=None if one.step_seconds is None else one.step_seconds * 1e9)
    except ReplayError:
        return []
    return [gain_sentence(prediction) for prediction in found.worthwhile]


def _join(essences: Mapping[int, _Essence]) -> Joined | None:
    if len(essences) < 2:
        return None
    try:
        join = join_traces(
            {rank: one.trace for rank, one in essences.items()},
            {rank: one.collectives for rank, one in essences.items()},
            breakdowns={rank: one.breakdown for rank, one in essences.items()},
        )
    except (*SURPRISES, MemoryError):
        return None  # caused by one of the traces; their own summaries remain
    return joined_of(join)


def _millis(unix_ns: int) -> int:
    return round(unix_ns / 1e6)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
