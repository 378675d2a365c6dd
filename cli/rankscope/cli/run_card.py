"""What `rankscope run` shows of a command's jobs at their end: a card, a page, and JSON."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rankscope.analysis.quantities import count
from rankscope.analysis.verdicts.verdict import (
    DEVICE,
    NETWORK,
    Kind,
    Severity,
    Verdict,
    explanation,
    headline,
    loss,
    milliseconds,
    percent,
    ranks,
    source_line,
)
from rankscope.cli.job_summary import Finding, JobSummary
from rankscope.cli.job_tables import breakdown_table, rank_table
from rankscope.cli.run_end import CommandEnd, Failure, clock
from rankscope.cli.terminal import Terminal
from rankscope.common.text import one_line
from rankscope.daemon.windows.window import INSPECTOR
from rankscope.operator.console.answers import breakdown_answer
from rankscope.v1.window_pb2 import CollectiveRate, RankWindow

# A verdict needs several windows.
SHORT_SECONDS = 20.0
FINDINGS_SHOWN = 4
RANKS_SHOWN = 32
GROUPS_SHOWN = 3
UNKNOWN = "other"  # an algorithm or a protocol
PAGE_COLUMNS = 110
MAX_LINE = 300
FAILED = "failed"  # in place of the kind of a verdict
_COLOURS = {Severity.NONE: "green", Severity.WARNING: "yellow", Severity.ALARM: "red"}

RECORD = "record it"  # begins advice that a capture follows
_ADVICE = {
    Kind.SLOW_STAGE: "move layers from the slow stage to the others",
    Kind.DATA_IMBALANCE: "give every rank as much work in a step: sort or pack samples by length",
    Kind.JITTER: (
        "collect garbage on all ranks in the same step (gc.disable(), then gc.collect() every few hundred steps) or "
        "gc.freeze() after start-up; prefetch input; keep other work off these cores"
    ),
    Kind.SLOW_SERVER: "divide the weights among several servers, exchange less often, or make updates cheaper",
    Kind.SLOW_COMMUNICATION: "check the links (NCCL_DEBUG=INFO, link errors), and what else uses them",
    Kind.INPUT_BOUND: "add DataLoader workers, prefetch, or move the data to faster storage",
    Kind.LOW_MFU: f"{RECORD} while it runs: rankscope capture --output traces/, then rankscope analyze trace traces/",
    Kind.HANG: "run it again, and while it hangs: rankscope stacks",
}


def advice(verdict: Verdict) -> str:
    """What to try next, now that the job has ended; empty if nothing is wrong."""
    if verdict.kind is Kind.SLOW_COMMUNICATION and verdict.cause.phase == NETWORK:
        return "look at the port that is named, its cable and its switch; drain the node if it persists"
    cause, is_one = verdict.cause, len(verdict.culprits) == 1
    who = ranks(verdict.culprits) if verdict.culprits else ""
    line = source_line(cause.frames[0]) if cause.frames else ""
    if verdict.kind is Kind.HANG and line and who:
        return f"look at {line}: {who} {'was' if is_one else 'were'} there while the others waited"
    if verdict.kind is not Kind.SLOW_RANK:
        return _ADVICE.get(verdict.kind, "")
    if cause.phase == "starved":
        return f"give {who} its own cores: check CPU limits, pinning, and what else runs on the node"
    if cause.bound == DEVICE or cause.phase == "throttled":
        return f"check the GPU of {who}: nvidia-smi -q -d CLOCK,PERFORMANCE,ECC; replace the node if it persists"
    if cause.phase == "input":
        return f"load the data of {who} faster{f': look at {line}' if line else ''}; compare its storage and its shard"
    if line:
        return f"look at {line}, where {who} {'spends' if is_one else 'spend'} the additional time"
    return f"{RECORD}: rankscope run --capture-when-slow -- COMMAND"


def card(jobs: Sequence[JobSummary], end: CommandEnd, *, probe: bool, columns: int | None = None) -> RenderableType:
    """`columns`: of the terminal; None without one."""
    if not jobs:
        return Group(Text(), _rows(_lines_without_rank(end)))
    parts: list[RenderableType] = [Text()]
    for job in jobs:
        if len(job.windows) > 1:
            shown, culprits = job.windows[:RANKS_SHOWN], job.verdict.culprits
            parts += [rank_table(shown, culprits, stacks=False, columns=columns), Text()]
        if (breakdown := breakdown_answer(job.breakdown, job.verdict)) is not None:
            parts += [breakdown_table(breakdown, columns), Text()]
        parts.append(_rows(_lines(job, end, probe=probe)))
    return Group(*parts)


def _lines_without_rank(end: CommandEnd) -> list[tuple[str, Text]]:
    lines = [("ended", Text(str(end)))] if str(end) else []
    failure = end.failure_of_command()
    if failure is not None:
        lines += [_failed(failure), ("try", Text(failure.advice))]
    return [*lines, ("rankscope", Text(_no_rank(end.seconds)))]


def _failed(failure: Failure) -> tuple[str, Text]:
    return "verdict", Text(one_line(f"failed: {failure}", MAX_LINE), style=f"bold {_COLOURS[Severity.ALARM]}")


def _no_rank(seconds: float) -> str:
    if seconds < SHORT_SECONDS:
        return (
            f"no rank was seen in {seconds:.0f} s; a verdict needs a job that trains for {SHORT_SECONDS:.0f} s or more"
        )
    return (
        "no rank was seen; a rank is a process that steps a torch optimizer with the probe loaded, or has RANK and "
        "WORLD_SIZE in its environment (next step: rankscope doctor while it runs; python -I and -E load no probe)"
    )


def _lines(job: JobSummary, end: CommandEnd, *, probe: bool) -> list[tuple[str, Text]]:
    title = f"{one_line(job.job, 100)}: {count(job.ranks, 'rank')}, {count(job.steps, 'step')} in {end.seconds:.0f} s"
    lines = [("job", Text(title)), ("step", Text(_step(job, probe=probe)))]
    if job.mfu_ratio.value is not None:
        lines.append(("MFU", Text(percent(job.mfu_ratio.value))))
    if job.exposed_ratio.value is not None and job.ranks > 1:
        lines.append(
            ("exposed", Text(f"{percent(job.exposed_ratio.value)} of a step is communication that nothing hides"))
        )
    if links := _links(job.windows):
        lines.append(("links", Text(one_line(links, MAX_LINE))))
    if any(window.wait_source == INSPECTOR for window in job.windows):
        lines.append(("NCCL", Text(f"its times are read from {INSPECTOR}'s files, as your NCCL_PROFILER_PLUGIN stays")))
    if str(end):
        lines.append(("ended", Text(str(end))))
    failure = end.failure(job.pids)
    if failure is None:
        lines += _verdict_lines(job, end)
    else:
        lines.append(_failed(failure))
        lines.append(("when", Text(f"at {clock(failure.unix_seconds - end.began_unix_seconds)}")))
        if job.verdict.kind is not Kind.INSUFFICIENT_DATA:
            lines.append(("before", Text(one_line(headline(job.verdict), MAX_LINE))))
        lines.append(("try", Text(one_line(failure.advice, MAX_LINE))))
    return [*lines, *(("note", Text(one_line(problem, MAX_LINE), style="yellow")) for problem in job.problems.values())]


def _verdict_lines(job: JobSummary, end: CommandEnd) -> list[tuple[str, Text]]:
    verdict, leading = job.verdict, job.leading
    mark = "warning: " if verdict.severity is Severity.WARNING else ""
    style = f"bold {_COLOURS[verdict.severity]}"
    lines = [("verdict", Text(one_line(mark + headline(verdict), MAX_LINE), style=style))]
    optional = (
        ("run", verdict.asynchronous),
        ("when", "" if leading is None else _when(leading, end)),
        ("why", explanation(verdict)),
        ("loss", loss(verdict)),
        ("try", advice(verdict)),
    )
    lines += [(name, Text(one_line(text, MAX_LINE))) for name, text in optional if text]
    others = [finding for finding in job.findings if finding is not leading]
    for finding in others[:FINDINGS_SHOWN]:
        severity = finding.verdict.severity
        name = "also" if severity is Severity.ALARM else "brief warning"
        text = f"{headline(finding.verdict)}; {_when(finding, end)}"
        lines.append((name, Text(one_line(text, MAX_LINE), style="" if severity is Severity.ALARM else "dim")))
    if len(others) > FINDINGS_SHOWN:
        lines.append(("also", Text(f"{len(others) - FINDINGS_SHOWN} more; --summary FILE has all")))
    return lines


def _when(finding: Finding, end: CommandEnd) -> str:
    first, last = (
        clock(moment - end.began_unix_seconds) for moment in (finding.first_unix_seconds, finding.last_unix_seconds)
    )
    if first == last:
        return f"at {first} of {clock(end.seconds)}"
    share = f"{finding.seconds:.0f} s"
    return f"from {first} to {last} of {clock(end.seconds)}, for {share} in all"


def _step(job: JobSummary, *, probe: bool) -> str:
    median = job.median_step_seconds
    if median is None:
        return "not measured" + ("" if probe else " without the probe")
    parts = {"self time": job.self_seconds, "waiting for others": job.wait_seconds, "input": job.input_seconds}
    shown = [f"{name} {milliseconds(mean.value)}" for name, mean in parts.items() if mean.value is not None]
    return f"{milliseconds(median)} (median of steps)" + (f": {', '.join(shown)}" if shown else "")


def _links(windows: Sequence[RankWindow]) -> str:
    """Bus bandwidth of the groups and functions with the most bytes. The member that waits least shows the link."""
    best: dict[tuple[int, str], CollectiveRate] = {}
    for rate in (rate for window in windows for rate in window.collectives if rate.HasField("bus_bytes_per_second")):
        kept = best.setdefault((rate.number, rate.function), rate)
        if rate.bus_bytes_per_second > kept.bus_bytes_per_second:
            best[rate.number, rate.function] = rate
    busiest = sorted(best.values(), key=lambda rate: -rate.bytes_per_step)[:GROUPS_SHOWN]
    shown = []
    for rate in busiest:
        known = [f"{rate.size} ranks", *(name for name in (rate.algorithm, rate.protocol) if name != UNKNOWN)]
        shown.append(f"{rate.function} {rate.bus_bytes_per_second / 1e9:.3g} GB/s ({', '.join(known)})")
    return f"bus bandwidth of {', '.join(shown)}" if busiest else ""


def _rows(lines: Sequence[tuple[str, Text]]) -> Group:
    """A table for each line: in one, every line of a log would be padded to the longest."""
    tables = []
    for name, text in lines:
        table = Table(box=None, pad_edge=False, show_header=False)
        table.add_column(style="bold", no_wrap=True, width=max(len(name) for name, _ in lines))
        table.add_column(overflow="fold")
        table.add_row(name, text)
        tables.append(table)
    return Group(*tables)


def as_html(jobs: Sequence[JobSummary], end: CommandEnd, *, probe: bool) -> str:
    console = Terminal(record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    console.print(card(jobs, end, probe=probe, columns=console.columns))
    return console.export_html()


def to_json(jobs: Sequence[JobSummary], command: Sequence[str], end: CommandEnd) -> dict[str, Any]:
    """`step_seconds` is what `rankscope compare` reads."""
    return {
        "command": list(command),
        "exit_status": end.status,
        "interrupted": end.is_interrupted,
        "seconds": round(end.seconds, 3),
        "failure": _failure_json(end.failure_of_command(), end),
        "step_seconds": jobs[0].step_times.rounded() if jobs else [],
        "jobs": [_job_json(job, end) for job in jobs],
    }


def _failure_json(failure: Failure | None, end: CommandEnd) -> dict[str, Any] | None:
    if failure is None:
        return None
    raised = failure.raised
    frame = None if raised is None else raised.frame
    return {
        "text": str(failure),
        "rank": failure.rank,
        "after_seconds": round(failure.unix_seconds - end.began_unix_seconds, 3),
        "exit_status": failure.status,
        "memory": failure.memory or None,
        "exception": None if raised is None else raised.text,
        "frame": None if frame is None else {"file": frame.file, "line": frame.line, "function": frame.function},
    }


def _job_json(job: JobSummary, end: CommandEnd) -> dict[str, Any]:
    failure = end.failure(job.pids)
    return {
        "job": job.job,
        "world_size": job.ranks,
        "steps": job.steps,
        "restarts": job.restarts,
        "median_step_seconds": job.median_step_seconds,
        "self_seconds": job.self_seconds.value,
        "wait_seconds": job.wait_seconds.value,
        "input_seconds": job.input_seconds.value,
        "mfu_ratio": job.mfu_ratio.value,
        "exposed_communication_ratio": job.exposed_ratio.value,
        "breakdown": msgspec.to_builtins(breakdown_answer(job.breakdown, job.verdict)),
        "failure": _failure_json(failure, end),
        **_verdict_json(job.verdict),
        **({} if failure is None else {"verdict": FAILED, "severity": Severity.ALARM.value}),
        "advice": advice(job.verdict) if failure is None else failure.advice,
        "findings": [_finding_json(finding, end) for finding in job.findings],
        "problems": list(job.problems.values()),
    }


def _finding_json(finding: Finding, end: CommandEnd) -> dict[str, Any]:
    return {
        **_verdict_json(finding.total),
        "first_seconds": round(finding.first_unix_seconds - end.began_unix_seconds, 3),
        "last_seconds": round(finding.last_unix_seconds - end.began_unix_seconds, 3),
        "seconds": round(finding.seconds, 3),
    }


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict.kind.value,
        "severity": verdict.severity.value,
        "confidence": verdict.confidence.value,
        "culprits": list(verdict.culprits),
        "headline": headline(verdict),
        "reason": verdict.reason,
        "asynchronous": verdict.asynchronous or None,
        "evidence": verdict.cause.evidence,
        "frames": [{"file": f.file, "line": f.line, "function": f.function} for f in verdict.cause.frames],
        "impact_ratio": verdict.impact_ratio,
        "lost_gpu_seconds": verdict.lost_gpu_seconds,
    }
