"""The detector on the cases that it shares with the Prometheus rules (tests/integration/test_rules.py)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.analysis.verdicts.windows import JobWindow, columns_of
from tests.verdict_cases import CASES, Case, Phase

WINDOWS = 8


def window(phase: Phase, number: int) -> JobWindow:
    step = phase.step_seconds
    rows = [
        {
            "rank": rank,
            "stage": one.stage,
            "steps": 20,
            "step_seconds": step,
            "self_seconds": one.self_seconds,
            "wait_seconds": step - one.self_seconds,
            "transfer_seconds": phase.transfer,
            "self_spread_ratio": 1.0,
            "input_seconds": one.input,
            "starved_seconds": one.starved,
        }
        | ({"host_seconds": step, "run_ahead_seconds": 0.1 * step} if one.on_device else {})
        | ({} if one.mfu is None else {"mfu_ratio": one.mfu})
        for rank, one in enumerate(phase.ranks)
    ]
    return JobWindow(1000.0 + 2 * number, 2.0, len(rows), columns_of(rows))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_detector_finds_what_the_rules_find(case: Case) -> None:
    fleet = FleetDetector(replace(DEFAULT_POLICY, mfu_target_ratio=case.mfu_target))
    phases = [*([case.before] * WINDOWS if case.before else []), *[case.now] * WINDOWS]
    for number, phase in enumerate(phases):
        verdict = fleet.evaluate({"job": window(phase, number)})["job"]
    assert verdict.kind is (case.finding or Kind.HEALTHY), verdict.reason
    if case.finding is not None:
        assert verdict.is_alarm
    if case.culprits or case.finding is None:
        assert verdict.culprits == case.culprits
    assert verdict.stage == case.stage
