"""What was said about a job with a known fault, held against what the job knows about itself."""

from __future__ import annotations

import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.statistics import Ratio, median_of_ratios
from rankscope.v1 import job_service_pb2
from tools.jobs.alternation import is_on
from tools.jobs.launcher import Steps

ALARM_SECONDS = 15.0
# Of a fault that comes every few seconds: until it came often enough to be no chance.
RARE_ALARM_SECONDS = 60.0
STEP_ERROR_RATIO = 0.03
IMPACT_ERROR_RATIO = 0.10
# With the first steps of a job, and of its fault, come compilation, allocation and queues that fill.
SETTLING_SECONDS = 3.0
# The first part of a block of steps with a small fault, or without it, in which queues from before it are worked off.
DROPPED_RATIO = 0.4
# A fault that costs more must be found; one that costs less must not be raised; between the two, either is right.
FOUND_FROM_RATIO, HIDDEN_UP_TO_RATIO = 0.05, 0.02
# The share of steps that a fault is in. A stall may end in the step after its own.
IN_FEW_STEPS = {"tenth": 0.1, "hundredth": 0.01, "moving": 0.05, "together": 0.02}
# What is said of faults that are in no rank in particular.
UNNAMED = {"moving": "jitter", "uneven": "data_imbalance"}
SAYS_NOTHING = ("healthy", "insufficient_data")
# What a cause must say about each fault, somewhere in its text.
_DEVICE = r"(?i)device|gpu|kernel"
CAUSES = {
    **dict.fromkeys(("host", "tenth", "hundredth", "moving"), r"slow_host"),
    **dict.fromkeys(("gpu", "tail"), _DEVICE),
    "input": r"(?i)input|slow_read",
}
# What it must not name when the host is not to blame; where the device is the CPU, `busy_device` is to blame.
NOT_CAUSES = dict.fromkeys(("gpu", "tail"), r"^(?!.*busy_device).*(framework_job\.py|frameworks\.py)")
# Each stage is one rank: slow stage and slow rank are the same.
PIPELINES = ("pp",)

HEADINGS = ("job", "fault", "said", "right", "cause", "alarm after", "said before", "step", "impact", "stacks", "met")


@dataclass(frozen=True)
class Said:
    """One evaluation of a job, as it was received."""

    unix_seconds: float
    status: job_service_pb2.JobStatus

    @property
    def kind(self) -> str:
        return job_service_pb2.VerdictKind.Name(self.status.verdict.kind).removeprefix("VERDICT_KIND_").lower()

    @property
    def severity(self) -> str:
        return job_service_pb2.Severity.Name(self.status.verdict.severity).removeprefix("SEVERITY_").lower()

    @property
    def gist(self) -> str:
        """Verdict, severity and whom it names; what differs between two evaluations is a change."""
        verdict = self.status.verdict
        if self.kind in SAYS_NOTHING:
            return self.kind
        named = f" stage {verdict.stage}" if verdict.HasField("stage") else ""
        named += f" rank {','.join(map(str, verdict.culprits))}" if verdict.culprits else ""
        return f"{self.kind}{named} ({self.severity})"

    @property
    def cause(self) -> str:
        """All that is said about the cause, whatever fields it has."""
        cause = self.status.verdict.cause
        parts = [f"{name.name} {value}" for name, value in cause.ListFields() if name.name != "frames" and value]
        parts += [f"{one.function} ({one.file.rpartition('/')[2]}:{one.line})" for one in list(cause.frames)[:2]]
        return ", ".join(parts)

    @property
    def spans(self) -> list[tuple[float, float]]:
        return [(one.start_unix_nanos / 1e9, one.end_unix_nanos / 1e9) for one in self.status.ranks]


@dataclass(frozen=True)
class Cell:
    framework: str
    fault: str  # as in framework_job.py; with a number, so many per cent of a step: gpu10
    repeat: int = 1
    rank: int = 2

    @property
    def kind(self) -> str:
        return self.fault.rstrip("0123456789")

    @property
    def slow_ratio(self) -> float | None:
        digits = self.fault[len(self.kind) :]
        return int(digits) / 100 if digits else None

    @property
    def name(self) -> str:
        return f"{self.framework}-{self.fault}-{self.repeat}"

    def is_blamed(self, said: Said) -> bool:
        verdict = said.status.verdict
        if self.fault in UNNAMED:
            return said.kind == UNNAMED[self.fault]
        if said.kind == "slow_rank":
            return list(verdict.culprits) == [self.rank]
        return (
            said.kind == "slow_stage"
            and self.framework in PIPELINES
            and (list(verdict.culprits) == [self.rank] or (verdict.HasField("stage") and verdict.stage == self.rank))
        )


@dataclass(frozen=True)
class Facts:
    """What the job recorded about itself, and the daemon about its own cost."""

    steps: Sequence[Steps]  # of every rank
    fault_unix_seconds: float | None
    fault_milliseconds: float | None = None
    costs: Sequence[dict[str, float]] = ()  # of the daemon, one scrape after the other
    turns_unix_seconds: float | None = None  # when steps with the fault and without it began to take turns
    first_steps: Sequence[int] = ()  # of the blocks that took turns


@dataclass
class Row:
    framework: str
    fault: str
    repeat: int
    said: str = ""
    expected: str = ""
    is_right: bool | None = None
    cause: str = ""
    is_cause_right: bool | None = None
    alarm_seconds: float | None = None
    before: list[str] = field(default_factory=list)
    changes: list[str] = field(default_factory=list)
    healthy_milliseconds: float | None = None
    faulty_milliseconds: float | None = None
    fault_milliseconds: float | None = None
    step_milliseconds: float | None = None  # as reported
    step_error_ratio: float | None = None
    impact_ratio: float | None = None  # as reported
    true_impact_ratio: float | None = None
    true_impact_low: float | None = None  # where it is known from blocks that took turns
    true_impact_high: float | None = None
    stack_hertz: float | None = None
    stack_rate_hertz: float | None = None
    budget_ratio: float | None = None
    costs: list[dict[str, float]] = field(default_factory=list)
    failure: str = ""

    @property
    def misses(self) -> list[str]:
        found = []
        if self.failure:
            return ["failed"]
        if not self.is_right:
            found.append("verdict")
        if self.is_cause_right is False:
            found.append("cause")
        limit = RARE_ALARM_SECONDS if self.fault in ("hundredth", "moving") else ALARM_SECONDS
        if self.alarm_seconds is not None and self.alarm_seconds > limit:
            found.append("late")
        if self.before:
            found.append("said before")
        if self.step_error_ratio is None or abs(self.step_error_ratio) > STEP_ERROR_RATIO:
            found.append("step")
        said, true = self.impact_ratio, self.true_impact_ratio
        if said is not None and true is not None and abs(said - true) > IMPACT_ERROR_RATIO:
            found.append("impact")
        return found

    def cells(self) -> tuple[str, ...]:
        if self.failure:
            return (self.framework, self.fault, "failed; see the log", *[""] * (len(HEADINGS) - 4), "NO: failed")
        right = {None: "", True: "yes", False: f"NO, expected {self.expected}"}[self.is_right]
        step = f"{_shown(self.step_milliseconds, 1)} ms"
        step += "" if self.step_error_ratio is None else f" ({100 * self.step_error_ratio:+.1f} %)"
        impact = ""
        if self.true_impact_ratio is not None:
            impact = f"{_shown(self.impact_ratio, 0, 100)} %, true {_shown(self.true_impact_ratio, 0, 100)} %"
            if self.true_impact_low is not None:
                low, high = _shown(self.true_impact_low, 1, 100), _shown(self.true_impact_high, 1, 100)
                impact += f" ({low} to {high})"
        stacks = f"{_shown(self.stack_hertz, 1)} Hz, {_shown(self.budget_ratio, 0, 100)} % of the budget"
        alarm = "" if self.alarm_seconds is None else f"{self.alarm_seconds:.1f} s"
        met = f"NO: {', '.join(self.misses)}" if self.misses else "yes"
        before = "; ".join(self.before)
        return (self.framework, self.fault, self.said, right, self.cause, alarm, before, step, impact, stacks, met)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "misses": self.misses}


def judge(cell: Cell, said: Sequence[Said], facts: Facts) -> Row:
    """`said` are the evaluations of this job alone, in order."""
    row = Row(cell.framework, cell.fault, cell.repeat, changes=list(_changes(said)))
    turns_at = facts.turns_unix_seconds
    judged = [one for one in said if turns_at is None or one.unix_seconds <= turns_at]
    _compare_impact(row, facts)
    _compare_verdicts(row, cell, judged, facts)
    _compare_steps(row, judged, facts)
    row.stack_hertz = _stack_hertz(said, _first(facts) + SETTLING_SECONDS)
    row.costs = list(facts.costs)
    row.stack_rate_hertz = min((one["stack_rate_hertz"] for one in facts.costs), default=None)
    budgets = [one["budget_ratio"] for one in facts.costs if "budget_ratio" in one]
    row.budget_ratio = statistics.median(budgets) if budgets else None
    return row


def _compare_verdicts(row: Row, cell: Cell, said: Sequence[Said], facts: Facts) -> None:
    findings = [one for one in said if one.kind not in SAYS_NOTHING]
    alarm = next((one for one in findings if cell.is_blamed(one) and one.severity == "alarm"), None)
    since = facts.fault_unix_seconds
    if alarm is not None and since is not None and alarm.unix_seconds < since:
        alarm = None  # said too early, so it cannot be about the fault
    until = alarm.unix_seconds if alarm else float("inf")
    is_early = [since is None or one.unix_seconds < since or not cell.is_blamed(one) for one in findings]
    earlier = (one.gist for one, early in zip(findings, is_early, strict=True) if early and one.unix_seconds < until)
    row.before = list(dict.fromkeys(earlier))
    last = said[-1] if said else None
    shown = alarm or last
    row.said = shown.gist if shown else "nothing"
    true = row.true_impact_ratio
    # A host that runs far ahead may hide short stalls.
    is_small = cell.slow_ratio is not None or cell.fault == "moving"
    must_find = cell.kind not in ("none", "together") and (
        not is_small or (true is not None and true >= FOUND_FROM_RATIO)
    )
    may_find = must_find or (is_small and true is not None and true > HIDDEN_UP_TO_RATIO)
    row.expected = f"slow_rank rank {cell.rank} (alarm)" if must_find else "healthy"
    if cell.fault in UNNAMED and must_find:
        row.expected = f"{UNNAMED[cell.fault]} (alarm)"
    if must_find:
        row.is_right = alarm is not None
    else:
        row.is_right = (may_find and alarm is not None) or (last is not None and last.kind == "healthy")
        row.is_right &= not row.before
    if cell.fault == "together" and last is not None:
        row.cause, row.is_cause_right = last.cause, "together" in last.cause
    if alarm is None or since is None:
        return
    row.alarm_seconds = alarm.unix_seconds - since
    standing = [one for one in said if one.unix_seconds >= until and cell.is_blamed(one)]
    row.cause = standing[-1].cause
    if must_find and cell.kind in CAUSES:
        row.is_cause_right = bool(re.search(CAUSES[cell.kind], row.cause)) and not (
            cell.kind in NOT_CAUSES and re.search(NOT_CAUSES[cell.kind], row.cause)
        )
    impacts = [one.status.verdict.impact_ratio for one in standing if one.status.verdict.HasField("impact_ratio")]
    row.impact_ratio = statistics.median(impacts) if impacts else None


def _compare_impact(row: Row, facts: Facts) -> None:
    since = facts.fault_unix_seconds
    begun = _first(facts) + SETTLING_SECONDS
    row.healthy_milliseconds = _mean(facts, begun, since if since is not None else float("inf"))
    row.fault_milliseconds = facts.fault_milliseconds
    if since is None or row.fault == "uneven":  # evenly spread, the same work would take part of that time too
        return
    until = float("inf") if facts.turns_unix_seconds is None else facts.turns_unix_seconds
    row.faulty_milliseconds = _mean(facts, since + SETTLING_SECONDS, until)
    if row.fault in IN_FEW_STEPS:
        # Against the other steps of the same time: a job wanders by more than some stalls cost.
        kept = 1 - 2 * IN_FEW_STEPS[row.fault]
        row.healthy_milliseconds = _mean(facts, since + SETTLING_SECONDS, until, lambda steps: _shortest(steps, kept))
    if row.healthy_milliseconds and row.faulty_milliseconds:
        row.true_impact_ratio = max(0.0, 1 - row.healthy_milliseconds / row.faulty_milliseconds)
    turns = _slowdown_in_turns(facts)
    if turns is not None:
        row.true_impact_ratio = max(0.0, 1 - 1 / turns.ratio)
        row.true_impact_low, row.true_impact_high = 1 - 1 / turns.low, 1 - 1 / turns.high


def _slowdown_in_turns(facts: Facts) -> Ratio | None:
    """Steps with the fault against those without it next to them: a job wanders by more than a small fault costs."""
    made: dict[bool, list[float]] = {True: [], False: []}
    starts = facts.first_steps
    for block in range(len(starts) - 1 - (len(starts) - 1) % 2):
        # Line 0 of a record is step 2.
        start, end = starts[block] - 2, starts[block + 1] - 2
        kept = slice(start + round(DROPPED_RATIO * (end - start)), end)
        means = [float(np.mean(steps.millis[kept])) for steps in facts.steps if len(steps.millis[kept])]
        if not means:
            return None
        made[is_on(block)].append(statistics.median(means))
    return median_of_ratios(made[True], made[False]) if made[True] else None


def _compare_steps(row: Row, said: Sequence[Said], facts: Facts) -> None:
    """Each evaluation against the job's own steps in the same seconds, once the fault has settled."""
    since = facts.fault_unix_seconds
    begin = (_first(facts) if since is None else since) + SETTLING_SECONDS
    end = min((float(steps.device_end[-1]) for steps in facts.steps if len(steps.device_end)), default=0.0)
    reported, errors = [], []
    for one in said:
        spans = one.spans
        if not one.status.HasField("step_seconds") or not spans or spans[0][0] < begin or spans[0][1] > end:
            continue
        own = _mean(facts, *spans[0])
        if own:
            reported.append(one.status.step_seconds * 1e3)
            errors.append(one.status.step_seconds * 1e3 / own - 1)
    row.step_milliseconds = statistics.median(reported) if reported else None
    row.step_error_ratio = statistics.median(errors) if errors else None


def _stack_hertz(said: Sequence[Said], since: float) -> float | None:
    """Samples that were taken of a rank, per second, breaks between recordings included; the median of the ranks."""
    summaries: dict[int, dict[int, Any]] = {}
    for window in (window for one in said for window in one.status.ranks):
        if window.HasField("stacks") and window.stacks.start_unix_nanos / 1e9 > since:
            summaries.setdefault(window.identity.rank, {})[window.stacks.start_unix_nanos] = window.stacks
    hertz = []
    for by_start in summaries.values():
        seconds = (max(one.end_unix_nanos for one in by_start.values()) - min(by_start)) / 1e9
        if seconds > 0:
            hertz.append(sum(one.samples for one in by_start.values()) / seconds)
    return statistics.median(hertz) if hertz else None


def _first(facts: Facts) -> float:
    return min((float(steps.device_end[0]) for steps in facts.steps if len(steps.device_end)), default=0.0)


def _mean(facts: Facts, start: float, end: float, of: Callable[[np.ndarray], Any] = np.mean) -> float | None:
    """Milliseconds of a step in that time: the mean of a rank, the median of the ranks."""
    means = [float(of(kept)) for steps in facts.steps if len(kept := steps.between(start, end))]
    return statistics.median(means) if means else None


def _shortest(steps: np.ndarray, share: float) -> float:
    """The mean of that share of the steps."""
    return float(np.mean(np.sort(steps)[: max(1, round(share * len(steps)))]))


def _changes(said: Sequence[Said]) -> Iterator[str]:
    before = ""
    for one in said:
        if one.gist != before:
            before = one.gist
            yield f"{one.unix_seconds:.1f} {before}"


def _shown(value: float | None, digits: int, factor: float = 1.0) -> str:
    return "–" if value is None else f"{value * factor:.{digits}f}"


def table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in rows:
        lines.append("| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in row.cells()) + " |")
    return "\n".join(lines)
