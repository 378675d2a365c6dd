"""The outcome of the demo, as text and as a JSON object."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from rich.padding import Padding
from rich.text import Text

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict, evidence, headline, loss, source_line
from rankscope.cli.demo_job import faults
from rankscope.cli.demo_job.faults import Fault
from rankscope.cli.demo_job.launcher import DemoJob, DemoJobError
from rankscope.cli.job_tables import MARKS, rank_table
from rankscope.cli.terminal import Terminal
from rankscope.operator.correlation.correlator import Correlator, JobState

_EXPECTED = {
    faults.NONE: Kind.HEALTHY,
    faults.SLOW_RANK: Kind.SLOW_RANK,
    faults.SLOW_INPUT: Kind.SLOW_RANK,
    faults.STARVED: Kind.SLOW_RANK,
    faults.SLOW_NETWORK: Kind.SLOW_COMMUNICATION,
    faults.STAGE_IMBALANCE: Kind.SLOW_STAGE,
    faults.HANG: Kind.HANG,
}
POLL_SECONDS = 0.1
# Enough healthy windows for a baseline from which a slow network can be detected.
SETTLING_TICKS = 7
SETTLING_TIMEOUT_SECONDS = 90.0
# After the alarm: more stacks confirm the source line.
CAUSE_TICKS = 2
CAUSE_SECONDS = 20.0


def expects(fault: Fault, verdict: Verdict, ranks: int) -> bool:
    """Whether this verdict is right about the fault."""
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


def print_verdict(console: Terminal, outcome: Outcome) -> None:
    """Print the verdict as soon as it is raised."""
    verdict = outcome.verdict
    console.print(f"\n✗ {headline(verdict)}", style="bold red")
    console.print(Padding(verdict.reason, (0, 0, 0, 2), expand=False))
    if outcome.seconds_to_verdict is not None:
        console.print(f"  found {outcome.seconds_to_verdict:.1f} s after the fault began\n")


def print_summary(console: Terminal, outcome: Outcome) -> None:
    verdict, state = outcome.verdict, outcome.state
    if state is not None and state.windows:
        console.print(rank_table(state.windows, verdict.culprits, stacks=False, columns=console.columns))
        console.print()
    colour = "green" if outcome.is_right else "yellow"
    console.print(Text.assemble(("verdict", f"bold {colour}"), f"  {headline(verdict)}"))
    if why := evidence(verdict):
        console.print(Text.assemble(("why", "bold"), f"      {why}"))
    for frame in verdict.cause.frames:
        console.print(f"         {source_line(frame)} in {frame.function}, {frame.share:.0%} of its time")
    if lost := loss(verdict):
        console.print(Text.assemble(("loss", "bold"), f"     {lost}"))
    if state is not None and state.step_seconds is not None:
        exposed = state.exposed_communication_ratio
        shown = f", exposed communication {exposed:.0%}" if exposed is not None else ""
        mfu = f", MFU {state.mfu_ratio:.1%} of a measured matmul" if state.mfu_ratio is not None else ""
        step = f"      step {state.step_seconds * 1000:.0f} ms on every rank{shown}{mfu}"
        console.print(Text.assemble(("job", "bold"), step))
    if outcome.fault.kind != faults.NONE and not outcome.is_right:
        console.print(f"the fault was {outcome.fault.spec}: this verdict is not right", style="yellow")
    for alarm in outcome.false_alarms:
        console.print(Text.assemble(("false alarm:", "yellow"), f" {headline(alarm)}: {alarm.reason}"))


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
    return {
        "rank": window.identity.rank,
        "pid": window.identity.pid,
        # The mean, as for self and wait: then step = self + wait, and a median of a few uneven steps cannot differ
        # between ranks that took the same steps.
        **{
            name: getattr(window, name).mean if window.HasField(name) else None
            for name in ("step_seconds", "self_seconds", "wait_seconds")
        },
    }


# Follows the verdicts on the demo's job, from before its fault to the end.


@dataclass(frozen=True)
class Alarm:
    verdict: Verdict
    at_monotonic: float


class Watch:
    """Not thread-safe except for the listener, which the correlator calls from its own thread."""

    def __init__(self, correlator: Correlator, job: DemoJob, show: Callable[[str], None]) -> None:
        self._job = job
        self._show = show
        self._lock = threading.Lock()
        self._state: JobState | None = None
        self._ticks = 0
        self._judged_ticks = 0
        self._alarms: list[Alarm] = []
        self._fault_at: float | None = None
        correlator.listen(self._note)

    def _note(self, states: tuple[JobState, ...]) -> None:
        now = time.monotonic()
        for state in states:
            if state.job != self._job.job_name:
                continue
            with self._lock:
                self._state = state
                self._ticks += 1
                self._judged_ticks += state.verdict.kind is not Kind.INSUFFICIENT_DATA
                before = self._alarms[-1].verdict if self._alarms else None
                if state.verdict.is_alarm and (
                    before is None or (before.kind, before.culprits) != (state.verdict.kind, state.verdict.culprits)
                ):
                    self._alarms.append(Alarm(state.verdict, now))

    def start_fault(self) -> None:
        self._fault_at = self._job.start_fault()

    def until_settled(self) -> None:
        """Wait until the healthy job has been judged for a while; at level 0 all verdicts may abstain."""
        enough = SETTLING_TICKS
        self._wait(SETTLING_TIMEOUT_SECONDS, lambda: self._judged_ticks >= enough or self._ticks >= 3 * enough)

    def for_seconds(self, seconds: float) -> None:
        self._wait(seconds, lambda: False)

    def until_alarm(self, timeout: float) -> bool:
        """Wait for the alarm that the fault should raise; True if it came."""
        return self._wait(timeout, lambda: self._found() is not None)

    def until_cause_settles(self, seconds: float | None) -> None:
        """Wait a little longer for the source line, which needs stacks, or as long as the caller requested."""
        if seconds is not None and self._fault_at is not None:
            self.for_seconds(max(0.0, self._fault_at + seconds - time.monotonic()))
            return
        target = self._ticks + CAUSE_TICKS
        has_line = self._job.fault.kind in (faults.SLOW_RANK, faults.SLOW_INPUT)

        def is_settled() -> bool:
            is_named = self._state is not None and bool(self._state.verdict.cause.frames)
            return self._ticks >= target and (is_named or not has_line)

        self._wait(CAUSE_SECONDS, is_settled)

    def _found(self) -> Alarm | None:
        with self._lock:
            return next((alarm for alarm in self._alarms if self._is_right(alarm)), None)

    def _is_right(self, alarm: Alarm) -> bool:
        after = self._fault_at is not None and alarm.at_monotonic >= self._fault_at
        return after and expects(self._job.fault, alarm.verdict, self._job.ranks)

    def _wait(self, timeout: float, condition: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + timeout
        while not condition():
            if gone := self._job.poll():
                rank, code = gone[0]
                raise DemoJobError(f"rank {rank} of the demo job ended with {code}:\n{self._job.log_tail(rank)}")
            if time.monotonic() >= deadline:
                return False
            self._show(self._progress(deadline - time.monotonic()))
            time.sleep(POLL_SECONDS)
        return True

    def _progress(self, remaining: float) -> str:
        state = self._state
        steps = min(self._job.steps_done())
        if state is None:
            return f"step {steps}; waiting for the first window"
        pace = f", {state.step_seconds * 1000:.0f} ms each" if state.step_seconds else ""
        return f"step {steps}{pace}; {MARKS[state.verdict.severity]} {headline(state.verdict)}; {remaining:.0f} s left"

    def outcome(self) -> Outcome:
        found = self._found()
        with self._lock:
            state, alarms = self._state, list(self._alarms)
        verdict = state.verdict if state else Verdict(Kind.INSUFFICIENT_DATA, "no window was seen")
        if found is not None and not expects(self._job.fault, verdict, self._job.ranks):
            verdict = found.verdict  # the job continued after the verdict
        false_alarms = [alarm.verdict for alarm in alarms if not self._is_right(alarm)]
        return Outcome(
            fault=self._job.fault,
            ranks=self._job.ranks,
            verdict=verdict,
            seconds_to_verdict=found.at_monotonic - self._fault_at if found and self._fault_at else None,
            false_alarms=tuple(false_alarms),
            state=state,
            probe=self._job.probe,
        )
