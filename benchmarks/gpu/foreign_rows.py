"""The results of foreign.py: the verdicts on a cell, the truth, and a table of both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from benchmarks.gpu.foreign_cells import TRAINERS, Cell, Trainer
from benchmarks.gpu.verdict_rows import FOUND_FROM_RATIO, IMPACT_ERROR_RATIO, SAYS_NOTHING, Said
from tools.jobs.launcher import JobError

SETTLING_STEPS = 15


@dataclass(frozen=True)
class Change:
    """A verdict that differs from the one before it."""

    seconds: float  # since the first step
    verdict: str
    kind: str
    severity: str
    culprits: list[int]
    stage: int | None
    impact_ratio: float | None
    bound: str
    cause: str
    reason: str

    @classmethod
    def of(cls, said: Said, seconds: float) -> Change:
        verdict = said.status.verdict
        return cls(
            round(seconds, 1),
            said.gist,
            said.kind,
            said.severity,
            list(verdict.culprits),
            verdict.stage if verdict.HasField("stage") else None,
            round(verdict.impact_ratio, 4) if verdict.HasField("impact_ratio") else None,
            verdict.cause.bound,
            said.cause,
            verdict.reason,
        )


@dataclass
class Row:
    """The result of a cell. `misses` says what was wrong; `failure`, why it could not be judged."""

    name: str
    flags: str
    ranks: int
    fault: dict[str, Any]
    truth: str
    failure: str = ""
    misses: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)  # cells that ran at the same time
    fault_seconds: float | None = None  # after the first step
    verdict: str = ""
    culprits: list[int] = field(default_factory=list)
    headline: str = ""
    cause: str = ""
    is_cause_right: bool | None = None
    impact_ratio: float | None = None
    true_impact_ratio: float | None = None
    alarm_after_seconds: float | None = None
    before_milliseconds: float | None = None
    after_milliseconds: float | None = None
    steps: int = 0
    start_seconds: float | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[float, str, float | None]] = field(default_factory=list)  # all: seconds, verdict, impact
    iterations: list[tuple[int, float]] = field(default_factory=list)
    recording: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not self.misses and not self.failure


@dataclass(frozen=True)
class Facts:
    """The job's own records."""

    started_unix_seconds: float
    fault: dict[str, Any] | None
    iterations: list[tuple[int, float]]  # the number of steps done, and milliseconds of the last ones


def iterations(trainer: Trainer, log: str) -> list[tuple[int, float]]:
    steps = ((int(number), float(units) * trainer.unit_milliseconds) for number, units in trainer.step.findall(log))
    return [(number + 1 - trainer.first_number, millis) for number, millis in steps]


def judge(cell: Cell, row: Row, said: Sequence[Said], summary: dict[str, Any], facts: Facts) -> None:
    """Fill in what was said, what was true, and whether they agree."""
    everything = [Change.of(response, response.unix_seconds - facts.started_unix_seconds) for response in said]
    pairs = zip([None, *everything], everything, strict=False)
    changes = [change for before, change in pairs if before is None or before.verdict != change.verdict]
    row.changes = [asdict(change) for change in changes]
    row.evaluations = [(change.seconds, change.verdict, change.impact_ratio) for change in everything]
    row.iterations, row.summary = facts.iterations, summary
    jobs = summary.get("jobs") or []
    if not jobs:
        raise JobError("`rankscope run` saw no job")
    final = jobs[0]
    row.steps, row.verdict, row.culprits = final["steps"], final["verdict"], final["culprits"]
    row.headline, row.impact_ratio = final["headline"], final["impact_ratio"]
    findings = [change for change in changes if change.kind not in SAYS_NOTHING]
    if cell.is_healthy:
        row.misses += [f"{change.verdict} at {change.seconds:.0f} s" for change in findings]
        if row.verdict != "healthy":
            row.misses.append(f"ends as {row.verdict}")
        times = [millis for steps, millis in facts.iterations if steps > SETTLING_STEPS]
        row.before_milliseconds = statistics.median(times) if times else None
        return
    if facts.fault is None:
        raise JobError("the fault never began")
    row.fault_seconds = round(facts.fault["unix_seconds"] - facts.started_unix_seconds, 1)
    _measure_truth(cell, row, facts)
    early = [change for change in findings if change.seconds < row.fault_seconds]
    late = [change for change in findings if change.seconds >= row.fault_seconds]
    blames = [change for change in late if cell.is_blamed(change.kind, change.culprits, change.stage)]
    row.misses += [f"before the fault: {change.verdict} at {change.seconds:.0f} s" for change in early]
    wrong = [change for change in late if change.severity == "alarm" and change not in blames]
    row.misses += [f"also {change.verdict} at {change.seconds:.0f} s" for change in wrong]
    alarms = [change for change in blames if change.severity == "alarm"]
    is_small = row.true_impact_ratio is not None and row.true_impact_ratio < FOUND_FROM_RATIO
    if alarms:
        row.alarm_after_seconds = round(alarms[0].seconds - row.fault_seconds, 1)
    if blames:
        last = next(response for response in reversed(said) if response.gist == blames[-1].verdict)
        row.cause = last.cause
        row.is_cause_right = _is_cause_right(cell.fault.kind, last)
    if is_small and not late:
        return
    if not cell.is_blamed(row.verdict, row.culprits, None):
        row.misses.append(f"names {row.verdict} {row.culprits or ''}".strip())
    elif final["severity"] != "alarm":
        row.misses.append(f"a {final['severity']} only")
    elif row.impact_ratio is None or row.true_impact_ratio is None:
        row.misses.append("the impact is not known")
    elif abs(row.impact_ratio - row.true_impact_ratio) > IMPACT_ERROR_RATIO:
        row.misses.append("the impact is wrong")


def _is_cause_right(kind: str, said: Said) -> bool | None:
    """None where neither host nor GPU was blamed."""
    bound = said.status.verdict.cause.bound
    if kind == "host":
        is_right = bound == "host" or "hold_up_host" in said.cause
        return is_right if is_right or bound else None
    return bound == "device" if bound else None


def _measure_truth(cell: Cell, row: Row, facts: Facts) -> None:
    """Compare the job's own iteration times: medians, or means for a fault in few steps."""
    assert facts.fault is not None
    step, interval = facts.fault["step"], TRAINERS[cell.layout.trainer].log_interval
    before = [millis for steps, millis in facts.iterations if SETTLING_STEPS < steps <= step]
    after = [millis for steps, millis in facts.iterations if steps - interval >= step]
    if not before or not after:
        raise JobError(f"{len(before)} intervals before the fault and {len(after)} after it")
    row.before_milliseconds = statistics.median(before)
    row.after_milliseconds = statistics.mean(after) if cell.fault.every > 1 else statistics.median(after)
    row.true_impact_ratio = 1 - row.before_milliseconds / row.after_milliseconds


HEADINGS = ("job", "fault", "said", "alarm after", "cause", "impact said / true", "step", "recording", "right")


def table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in rows:
        cells = (" ".join(text.split()).replace("|", "\\|") for text in texts(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def texts(row: Row) -> tuple[str, ...]:
    if row.failure:
        return (row.name, row.truth, row.failure[-300:], *[""] * (len(HEADINGS) - 4), "not judged")
    cause = {None: "", True: " (right)", False: " (WRONG)"}[row.is_cause_right]
    impacts = [row.impact_ratio, row.true_impact_ratio]
    impact = " / ".join("–" if ratio is None else f"{ratio:.0%}" for ratio in impacts)
    times = [millis for millis in (row.before_milliseconds, row.after_milliseconds) if millis is not None]
    operations = row.recording.get("operations", 0)
    return (
        row.name,
        row.truth,
        row.headline,
        "" if row.alarm_after_seconds is None else f"{row.alarm_after_seconds:.0f} s",
        f"{row.cause[:160]}{cause}",
        "" if row.fault["kind"] == "none" else impact,
        " → ".join(f"{millis:.0f}" for millis in times) + " ms" if times else "",
        f"{operations:,}",
        "yes" if row.is_right else f"NO: {'; '.join(row.misses)}",
    )
