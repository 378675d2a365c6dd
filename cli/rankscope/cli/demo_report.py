"""What the demo shows of its outcome: to people, and as one JSON object."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.console import Console
from rich.padding import Padding

from rankscope.analysis.verdict import Kind, Severity, Verdict
from rankscope.cli.demo_job import faults
from rankscope.cli.demo_job.faults import Fault
from rankscope.cli.sentences import headline, loss, source_line
from rankscope.cli.tables import rank_table
from rankscope.operator.correlation.correlator import JobState

_EXPECTED = {
    faults.NONE: Kind.HEALTHY,
    faults.SLOW_RANK: Kind.SLOW_RANK,
    faults.SLOW_INPUT: Kind.SLOW_RANK,
    faults.STARVED: Kind.SLOW_RANK,
    faults.SLOW_NETWORK: Kind.SLOW_COMMUNICATION,
    faults.STAGE_IMBALANCE: Kind.SLOW_STAGE,
    faults.HANG: Kind.HANG,
}


def expects(fault: Fault, verdict: Verdict, ranks: int) -> bool:
    """Is this the truth about that fault?"""
    if verdict.kind is not _EXPECTED[fault.kind]:
        return False
    if fault.kind == faults.STAGE_IMBALANCE:
        return verdict.stage == 1 and verdict.culprits == tuple(range(ranks // 2, ranks))
    return verdict.culprits == (() if fault.rank is None else (fault.rank,))


@dataclass(frozen=True)
class Outcome:
    fault: Fault
    ranks: int
    verdict: Verdict
    seconds_to_verdict: float | None
    false_alarms: tuple[Verdict, ...]
    state: JobState | None
    probe: bool = True

    @property
    def is_right(self) -> bool:
        if self.false_alarms:
            return False
        if self.fault.kind == faults.NONE:
            return self.verdict.severity is not Severity.ALARM
        if not self.probe and self.verdict.kind is Kind.INSUFFICIENT_DATA:
            return True  # without step records it may abstain, but not guess
        return self.seconds_to_verdict is not None and expects(self.fault, self.verdict, self.ranks)


def print_verdict(console: Console, outcome: Outcome) -> None:
    """The moment it stands."""
    verdict = outcome.verdict
    console.print(f"\n[bold red]✗ {headline(verdict)}[/]")
    console.print(Padding(verdict.reason, (0, 0, 0, 2)))
    if outcome.seconds_to_verdict is not None:
        console.print(f"  found {outcome.seconds_to_verdict:.1f} s after the fault began\n")


def print_summary(console: Console, outcome: Outcome) -> None:
    verdict, state = outcome.verdict, outcome.state
    if state is not None and state.windows:
        console.print(rank_table(state.windows, verdict.culprits, stacks=False))
        console.print()
    colour = "green" if outcome.is_right else "yellow"
    console.print(f"[bold {colour}]verdict[/]  {headline(verdict)}")
    if verdict.cause.evidence:
        console.print(f"[bold]why[/]      {verdict.cause.evidence}")
    for frame in verdict.cause.frames:
        console.print(f"         {source_line(frame)} in {frame.function}, {frame.share:.0%} of its time")
    if lost := loss(verdict):
        console.print(f"[bold]loss[/]     {lost}")
    if state is not None and state.step_seconds is not None:
        exposed = state.exposed_communication_ratio
        shown = f", exposed communication {exposed:.0%}" if exposed is not None else ""
        mfu = f", MFU {state.mfu_ratio:.1%} of a measured matmul" if state.mfu_ratio is not None else ""
        console.print(f"[bold]job[/]      step {state.step_seconds * 1000:.0f} ms on every rank{shown}{mfu}")
    if outcome.fault.kind != faults.NONE and not outcome.is_right:
        console.print(f"[yellow]the fault was {outcome.fault.spec}: this verdict is not right[/]")
    for alarm in outcome.false_alarms:
        console.print(f"[yellow]false alarm:[/] {headline(alarm)}: {alarm.reason}")


def to_json(outcome: Outcome) -> dict[str, Any]:
    verdict, state = outcome.verdict, outcome.state
    return {
        "verdict": verdict.kind.value,
        "culprits": list(verdict.culprits),
        "stage": verdict.stage,
        "severity": verdict.severity.value,
        "confidence": verdict.confidence.value,
        "impact_ratio": verdict.impact_ratio,
        "lost_gpu_seconds": verdict.lost_gpu_seconds,
        "cause": {
            "phase": verdict.cause.phase,
            "bound": verdict.cause.bound,
            "frames": [
                {"function": f.function, "file": PurePath(f.file).name, "line": f.line, "share": round(f.share, 3)}
                for f in verdict.cause.frames
            ],
            "evidence": verdict.cause.evidence,
        },
        "reason": verdict.reason,
        "seconds_to_verdict": outcome.seconds_to_verdict,
        "false_alarms": len(outcome.false_alarms),
        "false_alarm_texts": [
            f"{alarm.kind.value} {list(alarm.culprits)}: {alarm.reason}" for alarm in outcome.false_alarms
        ],
        "mfu_ratio": state.mfu_ratio if state else None,
        "exposed_communication_ratio": state.exposed_communication_ratio if state else None,
        "step_seconds": state.step_seconds if state else None,
        "ranks": [_rank(window) for window in state.windows] if state else [],
        "fault": outcome.fault.spec,
        "right": outcome.is_right,
    }


def _rank(window: Any) -> dict[str, Any]:
    steps = window.steps if window.HasField("steps") else 0
    per_step = {field.name: seconds / steps for field, seconds in window.causes.ListFields()} if steps else {}
    return {
        "rank": window.identity.rank,
        "pid": window.identity.pid,
        # The mean, as for self and wait: then step = self + wait, and a median of few uneven steps cannot differ
        # between ranks that took the same steps.
        "step_seconds": window.step.mean_seconds if window.HasField("step") else None,
        "self_seconds": per_step.get("self"),
        "wait_seconds": per_step.get("wait"),
    }
