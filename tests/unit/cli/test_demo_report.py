from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from rankscope.analysis.verdicts.verdict import Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.cli import demo_report
from rankscope.cli.demo_job.faults import Fault, parse_fault
from rankscope.cli.demo_report import CAUSE_TICKS, Watch
from rankscope.operator.correlation.correlator import JobState

LINE = FrameSeen("normalize_features", "model.py", 105, 0.5, 0.5, "forward")


class Job:
    """Trains without end."""

    job_name, ranks, probe = "demo", 4, True

    def __init__(self, fault: Fault) -> None:
        self.fault = fault

    def poll(self) -> list[tuple[int, int]]:
        return []

    def steps_done(self) -> list[int]:
        return [100] * self.ranks


class Verdicts:
    """Plays the correlator: one verdict of the slow rank at each look."""

    def __init__(self) -> None:
        self.told = 0
        self._next: Iterator[tuple[FrameSeen, ...]] = iter(())
        self._listener: Callable[[tuple[JobState, ...]], None] = lambda states: None

    def listen(self, listener: Callable[[tuple[JobState, ...]], None]) -> None:
        self._listener = listener

    def follow(self, *frames: tuple[FrameSeen, ...]) -> None:
        self._next = iter(frames)

    def tell(self, _: str) -> None:
        verdict = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,), cause=Cause("forward", next(self._next)))
        self.told += 1
        self._listener((JobState("demo", 4, verdict, 0, 0, 4, 0.1, None, None, ()),))


@pytest.mark.parametrize(
    ("fault", "without_line", "ticks"),
    [
        ("slow-rank", 0, CAUSE_TICKS),
        ("slow-rank", 7, 8),  # stacks come late on a busy machine
        ("slow-input", 7, 8),
        ("starved", 7, CAUSE_TICKS),  # has no line
    ],
)
def test_the_demo_waits_for_the_line_where_there_is_one(
    fault: str, without_line: int, ticks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo_report, "POLL_SECONDS", 0.0)
    verdicts = Verdicts()
    watch = Watch(cast(Any, verdicts), cast(Any, Job(parse_fault(fault).for_ranks(4))), verdicts.tell)
    verdicts.follow(*[()] * without_line, *[(LINE,)] * 10)
    watch.until_cause_settles(None)
    assert verdicts.told == ticks
