"""When a restarted operator may replace the verdict that it finds in a status."""

from __future__ import annotations

import pytest

from rankscope.analysis.verdicts.verdict import Kind, Severity, Verdict
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.runs.status import is_premature, run_verdict

HEALTHY = Verdict(Kind.HEALTHY, "")
INCOMPLETE = Verdict(Kind.INSUFFICIENT_DATA, "")
SLOW = Verdict(Kind.SLOW_RANK, "", Severity.ALARM, culprits=(2,))
SUSPECTED = Verdict(Kind.SLOW_RANK, "", Severity.WARNING, culprits=(2,))


def state(verdict: Verdict) -> JobState:
    return JobState("t/r", 6, verdict, 0.0, 0.0, 6, None, None, None, ())


@pytest.mark.parametrize(
    ("standing", "found", "expected"),
    [
        (SLOW, HEALTHY, True),
        (SLOW, INCOMPLETE, True),
        (SLOW, SUSPECTED, True),
        (SLOW, None, True),
        (HEALTHY, INCOMPLETE, True),
        (HEALTHY, None, True),
        (SLOW, SLOW, False),
        (HEALTHY, SLOW, False),
        # The first status of a new run has few windows behind it; the next one is written at once.
        (INCOMPLETE, HEALTHY, False),
        (INCOMPLETE, SUSPECTED, False),
        (INCOMPLETE, INCOMPLETE, False),
        (HEALTHY, SUSPECTED, False),
    ],
)
def test_windows_that_are_still_missing_clear_no_verdict(
    standing: Verdict, found: Verdict | None, expected: bool
) -> None:
    assert is_premature(None if found is None else state(found), run_verdict(state(standing))) is expected
