"""The summary of a command's job: collected over its whole life, shown as a card, a page, and JSON."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rankscope.analysis.quantities import count
from rankscope.analysis.stats.step_time_comparison import StepTimes
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
from rankscope.cli.job_tables import rank_table
from rankscope.cli.terminal import Terminal
from rankscope.common.text import one_line
from rankscope.daemon.windows.window import INSPECTOR
from rankscope.operator.console.answers import measured
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.window_pb2 import CollectiveRate, RankWindow

# A verdict needs several windows.
SHORT_SECONDS = 20.0
PROBLEMS_SHOWN = 3
RANKS_SHOWN = 32
GROUPS_SHOWN = 3
UNKNOWN = "other"  # an algorithm or a protocol
PAGE_COLUMNS = 110
_COLOURS = {Severity.NONE: "green", Severity.WARNING: "yellow", Severity.ALARM: "red"}

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
    Kind.LOW_MFU: "record it: rankscope capture --ranks 0 --steps 3 --output traces/, rankscope analyze trace traces/",
    Kind.HANG: "see where every rank stands: rankscope stacks",
}


def advice(verdict: Verdict) -> str:
    """What to try next; empty if nothing is wrong."""
    if verdict.kind is Kind.SLOW_COMMUNICATION and verdict.cause.phase == NETWORK:
        return "look at the port that is named, its cable and its switch; drain the node if it persists"
    if verdict.kind is not Kind.SLOW_RANK:
        return _ADVICE.get(verdict.kind, "")
    who, cause = ranks(verdict.culprits), verdict.cause
    line = source_line(cause.frames[0]) if cause.frames else ""
    if cause.phase == "starved":
        return f"give {who} its own cores: check CPU limits, pinning, and what else runs on the node"
    if cause.bound == DEVICE or cause.phase == "throttled":
        return f"check the GPU of {who}: nvidia-smi -q -d CLOCK,PERFORMANCE,ECC; replace the node if it persists"
    if cause.phase == "input":
        return f"load the data of {who} faster{f': look at {line}' if line else ''}; compare its storage and its shard"
    if line:
        return f"look at {line}: why does {who} spend more time there than its peers?"
    return "record it: rankscope capture --ranks straggler+peer --steps 3 --output traces/"


@dataclass
class Mean:
    total: float = 0.0
    count: int = 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass
class JobSummary:
    """`add` takes every state of the job."""

    job: str
    step_times: StepTimes = field(default_factory=StepTimes)
    ranks: int = 0
    steps: int = 0
    self_seconds: Mean = field(default_factory=Mean)
    wait_seconds: Mean = field(default_factory=Mean)
    input_seconds: Mean = field(default_factory=Mean)
    mfu_ratio: Mean = field(default_factory=Mean)
    exposed_ratio: Mean = field(default_factory=Mean)
    windows: Sequence[RankWindow] = ()  # the last in which steps ended
    problems: dict[str, None] = field(default_factory=dict)
    last: Verdict = field(default_factory=lambda: Verdict(Kind.INSUFFICIENT_DATA, "no window was seen"))
    _findings: dict[object, Verdict] = field(default_factory=dict)
    _evaluated: float = 0.0

    @property
    def verdict(self) -> Verdict:
        """The finding that cost most. A job that ends recovers from nothing: the last windows do not decide."""
        found = self._findings.values()
        return max(
            found, key=lambda v: (v.is_alarm, v.lost_gpu_seconds or 0.0, v.impact_ratio or 0.0), default=self.last
        )

    def add(self, state: JobState) -> bool:
        """False if it was added before: an evaluation of other jobs brings the same state again."""
        if state.evaluated_unix_seconds == self._evaluated:
            return False
        self._evaluated = state.evaluated_unix_seconds
        self.ranks = max(self.ranks, state.world_size)
        verdict = state.verdict
        if verdict.kind.is_finding:
            self._findings[verdict.kind, verdict.culprits, verdict.stage] = verdict
        if verdict.kind is not Kind.INSUFFICIENT_DATA or self.last.kind is Kind.INSUFFICIENT_DATA:
            self.last = verdict
        windows = list(state.windows)
        for window in windows:
            self.steps = max(self.steps, window.steps_total)
            for problem in window.problems:
                if len(self.problems) < PROBLEMS_SHOWN:
                    self.problems[problem] = None
        timed = [window for window in windows if window.HasField("step_seconds")]
        if not timed:
            return True
        self.windows = timed
        for window in timed:
            self.self_seconds.add(measured(window, "self_seconds"))
            self.wait_seconds.add(measured(window, "wait_seconds"))
            self.input_seconds.add(measured(window, "input_seconds"))
        self.mfu_ratio.add(state.mfu_ratio)
        self.exposed_ratio.add(state.exposed_communication_ratio)
        return True

    @property
    def median_step_seconds(self) -> float | None:
        return self.step_times.median_seconds


def card(jobs: Sequence[JobSummary], seconds: float, *, probe: bool, columns: int | None = None) -> RenderableType:
    """`columns`: of the terminal; None without one."""
    if not jobs:
        return Group(Text(), _rows([("rankscope", Text(_no_rank(seconds)))]))
    parts: list[RenderableType] = [Text()]
    for job in jobs:
        if len(job.windows) > 1:
            shown, culprits = job.windows[:RANKS_SHOWN], job.verdict.culprits
            parts += [rank_table(shown, culprits, stacks=False, columns=columns), Text()]
        parts.append(_rows(_lines(job, seconds, probe=probe)))
    return Group(*parts)


def _no_rank(seconds: float) -> str:
    if seconds < SHORT_SECONDS:
        return (
            f"no rank was seen in {seconds:.0f} s; a verdict needs a job that trains for {SHORT_SECONDS:.0f} s or more"
        )
    return (
        "no rank was seen; a rank is a Python process with RANK and WORLD_SIZE in its environment, as torchrun, "
        "mpirun and srun set them (next step: rankscope doctor while it runs)"
    )


def _lines(job: JobSummary, seconds: float, *, probe: bool) -> list[tuple[str, Text]]:
    verdict = job.verdict
    title = f"{one_line(job.job, 100)}: {count(job.ranks, 'rank')}, {count(job.steps, 'step')} in {seconds:.0f} s"
    lines = [("job", Text(title)), ("step", Text(_step(job, probe=probe)))]
    if job.mfu_ratio.value is not None:
        lines.append(("MFU", Text(percent(job.mfu_ratio.value))))
    if job.exposed_ratio.value is not None:
        lines.append(
            ("exposed", Text(f"{percent(job.exposed_ratio.value)} of a step is communication that nothing hides"))
        )
    if links := _links(job.windows):
        lines.append(("links", Text(one_line(links, 300))))
    if any(window.wait_source == INSPECTOR for window in job.windows):
        lines.append(("NCCL", Text(f"its times are read from {INSPECTOR}'s files, as your NCCL_PROFILER_PLUGIN stays")))
    lines.append(("verdict", Text(one_line(headline(verdict), 300), style=f"bold {_COLOURS[verdict.severity]}")))
    optional: tuple[tuple[str, Callable[[Verdict], str]], ...] = (
        ("run", attrgetter("asynchronous")),
        ("why", explanation),
        ("loss", loss),
        ("try", advice),
    )
    lines += [(name, Text(one_line(text, 300))) for name, make in optional if (text := make(verdict))]
    lines += [("note", Text(one_line(problem, 300), style="yellow")) for problem in job.problems]
    return lines


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


def as_html(jobs: Sequence[JobSummary], seconds: float, *, probe: bool) -> str:
    console = Terminal(record=True, file=io.StringIO(), width=PAGE_COLUMNS)
    console.print(card(jobs, seconds, probe=probe, columns=console.columns))
    return console.export_html()


def to_json(jobs: Sequence[JobSummary], command: Sequence[str], status: int, seconds: float) -> dict[str, Any]:
    """`step_seconds` is what `rankscope compare` reads."""
    return {
        "command": list(command),
        "exit_status": status,
        "seconds": round(seconds, 3),
        "step_seconds": jobs[0].step_times.rounded() if jobs else [],
        "jobs": [_job_json(job) for job in jobs],
    }


def _job_json(job: JobSummary) -> dict[str, Any]:
    verdict = job.verdict
    return {
        "job": job.job,
        "world_size": job.ranks,
        "steps": job.steps,
        "median_step_seconds": job.median_step_seconds,
        "self_seconds": job.self_seconds.value,
        "wait_seconds": job.wait_seconds.value,
        "input_seconds": job.input_seconds.value,
        "mfu_ratio": job.mfu_ratio.value,
        "exposed_communication_ratio": job.exposed_ratio.value,
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
        "advice": advice(verdict),
        "problems": list(job.problems),
    }
