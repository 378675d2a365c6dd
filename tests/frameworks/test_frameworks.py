"""Frameworks tried, not assumed: real jobs of every row of the matrix, healthy and with one slow rank.

`make test` plays one of them, `make acceptance SUITE=frameworks` all."""

from __future__ import annotations

import functools
import subprocess
import sys
from pathlib import Path, PurePath

import pytest

from rankscope.analysis.verdicts.verdict import Confidence, Kind, Severity, Verdict
from tests.frameworks.job_process import SLOW_RANK, faulty_line
from tests.frameworks.matrix import (
    ALARM,
    HOST,
    IMPACT,
    JOB,
    MATRIX,
    NONE,
    ROOT,
    STEP_TIME,
    Framework,
    cells,
    name_of,
)
from tests.frameworks.played_cell import PlayedCell, Stretch, play
from tests.support.measuring import Measured

# Made by tools/setup_frameworks.sh. The environment of the tests itself has torch and no framework on top of it.
FRAMEWORKS_PYTHON = ROOT / ".venv-frameworks" / "bin" / "python"
STEP_TOLERANCE = 0.03
IMPACT_TOLERANCE = 0.10
ALARM_SECONDS = 15.0


@functools.cache
def python_with(package: str) -> Path:
    if not package:
        return Path(sys.executable)
    if not FRAMEWORKS_PYTHON.exists():
        pytest.skip(f"{package} is not installed; next step: make acceptance SUITE=frameworks")
    found = subprocess.run([FRAMEWORKS_PYTHON, "-c", f"import {package}"], capture_output=True, text=True)
    if found.returncode:
        pytest.skip(f"{package} cannot be imported: {found.stderr.strip().splitlines()[-1]}")
    return FRAMEWORKS_PYTHON


def parameters(*, blind: bool) -> list[object]:
    made = []
    for framework, fault in cells():
        if bool(framework.blind) is not blind:
            continue
        made.append(pytest.param(framework, fault, id=f"{framework.key}-{fault}"))
    return made


def test_the_slow_rank_of_an_fsdp2_job_is_named() -> None:
    (framework,) = (each for each in MATRIX if each.key == "fsdp2")
    python = python_with(framework.package)
    played = play(python, JOB, framework.arguments, HOST, is_complete=lambda verdict: verdict.culprits == (SLOW_RANK,))
    accused = {tick.verdict.culprits for tick in played.heard if tick.verdict.is_alarm}
    assert (SLOW_RANK,) in accused, str(played)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("framework", "fault"), parameters(blind=False))
def test_only_the_slow_rank_of_a_real_job_is_named(framework: Framework, fault: str, measured: Measured) -> None:
    python = python_with(framework.package)
    names_line = framework.names_line and fault != NONE
    line = faulty_line(JOB, fault) if names_line else None
    played = play(
        python,
        JOB,
        framework.arguments,
        fault,
        is_complete=lambda verdict: not names_line or line_of(verdict) == line,
    )
    print(played)
    check_wait_is_measured(framework, played)
    measured(name_of(framework, fault, STEP_TIME), step_time_error(played), "of a step", at_most=STEP_TOLERANCE)
    if fault == NONE:
        assert not findings(played), str(played)
        return
    assert played.faulty is not None
    assert played.seconds_to_alarm is not None, f"no alarm\n{played}"
    check_verdict(framework, played)
    measured(name_of(framework, fault, IMPACT), impact_error(played), "of the time", at_most=IMPACT_TOLERANCE)
    measured(name_of(framework, fault, ALARM), played.seconds_to_alarm, "s", at_most=ALARM_SECONDS)
    check_the_slow_rank_waits_least(framework, played.faulty, played)
    if names_line:
        assert line_of(played.last) == line, str(played)


@pytest.mark.acceptance
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("framework", "fault"), parameters(blind=True))
def test_unmeasurable_waiting_is_reported_and_causes_no_wrong_verdict(
    framework: Framework, fault: str, measured: Measured
) -> None:
    played = play(python_with(framework.package), JOB, framework.arguments, fault, is_blind=True)
    print(played)
    measured(name_of(framework, fault, STEP_TIME), step_time_error(played), "of a step", at_most=STEP_TOLERANCE)
    # The probe needs a few windows to know that collectives pass it by.
    for window in played.heard[-1].windows:
        assert not window.HasField("wait_seconds") and not window.HasField("self_seconds"), str(played)
        assert any("waiting is not measured" in problem for problem in window.problems), str(played)
    for verdict in findings(played):
        # By stacks alone, then.
        assert fault != NONE and (verdict.kind, verdict.culprits) == (framework.kind, (SLOW_RANK,)), str(played)
        assert verdict.confidence is Confidence.LOW, str(played)
    assert fault == NONE or played.last.kind is not Kind.HEALTHY, f"a slow job is called healthy\n{played}"


def findings(played: PlayedCell) -> list[Verdict]:
    return [tick.verdict for tick in played.heard if tick.verdict.kind.is_finding]


def check_verdict(framework: Framework, played: PlayedCell) -> None:
    """From the first finding to the last, the truth and nothing else."""
    expected = (framework.kind, (SLOW_RANK,), framework.stage)
    for verdict in findings(played):
        assert (verdict.kind, verdict.culprits, verdict.stage) == expected, str(played)
        assert verdict.impact_ratio is not None and 0 < verdict.impact_ratio < 1, str(played)
    assert (played.last.severity, played.last.confidence) == (Severity.ALARM, Confidence.HIGH), str(played)


def impact_error(played: PlayedCell) -> float:
    assert played.true_impact_ratios is not None and played.last.impact_ratio is not None, str(played)
    low, high = played.true_impact_ratios
    return max(0.0, low - played.last.impact_ratio, played.last.impact_ratio - high)


def step_time_error(played: PlayedCell) -> float:
    """The largest of all ranks, healthy and with the fault."""
    errors = []
    for stretch in (played.healthy, played.faulty):
        for rank, own in enumerate(stretch.own_seconds if stretch else ()):
            assert own, str(played)
            step_seconds = stretch.step_seconds(rank) if stretch else None
            assert step_seconds is not None, f"rank {rank}\n{played}"
            errors.append(abs(step_seconds / own - 1))
    return max(errors)


def check_wait_is_measured(framework: Framework, played: PlayedCell) -> None:
    for figures in played.healthy.ranks:
        assert figures.wait_seconds, f"rank {figures.rank}: no wait\n{played}"
        assert figures.self_seconds, f"rank {figures.rank}: no self time\n{played}"
    assert any(framework.source in source for source in played.wait_sources), str(played)


def check_the_slow_rank_waits_least(framework: Framework, stretch: Stretch, played: PlayedCell) -> None:
    slow = stretch.ranks[SLOW_RANK]
    for peer in framework.peers:
        figures = stretch.ranks[peer]
        assert figures.wait_seconds is not None and slow.wait_seconds is not None, str(played)
        assert figures.self_seconds is not None and slow.self_seconds is not None, str(played)
        assert slow.wait_seconds < figures.wait_seconds, f"rank {peer} waits less\n{played}"
        assert slow.self_seconds > figures.self_seconds, f"rank {peer} works longer\n{played}"


def line_of(verdict: Verdict) -> tuple[str, int] | None:
    """File and number of the line that is named first."""
    frames = verdict.cause.frames
    return (PurePath(frames[0].file).name, frames[0].line) if frames else None


def test_every_framework_has_a_key_of_its_own() -> None:
    assert len({framework.key for framework in MATRIX}) == len(MATRIX)
