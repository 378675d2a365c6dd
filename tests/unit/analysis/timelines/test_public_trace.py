"""The published numbers of a public production trace (pp4 dp2, a long last stage) are ours, too."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from rankscope.analysis.timelines.report import TimelineReport, analyze
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.cli.analyze_timeline import read_sizes, read_timeline
from tests.shared_data import shared

# Timestamps are stored as float32: that is the difference, and all of it.
ROUNDING = 1e-6


@cache
def report() -> TimelineReport:
    folder = shared("stage_imbalance")
    return analyze(read_timeline(folder / "trace-ST.parquet", "s"), read_sizes(folder / "meta-ST.yaml"))


@cache
def published(name: str) -> dict[str, Any]:
    return dict(json.loads((shared("stage_imbalance") / name).read_text()))


def test_the_long_last_stage_is_named_and_no_rank() -> None:
    verdict = report().judgement.verdict
    assert (verdict.kind, verdict.stage, verdict.culprits) == (Kind.SLOW_STAGE, 3, ())
    assert report().judgement.outliers.ratio.max() < 1.01
    assert report().notes == ()


def test_slowdown_and_its_shares_agree() -> None:
    found = report().decomposition
    assert found.slowdown == pytest.approx(published("result-ST.json")["blocking_slowdown"], abs=ROUNDING)
    assert found.m_w == pytest.approx(published("mw-ST.json")["Mw"], abs=ROUNDING)
    assert found.m_s == pytest.approx(published("ms-ST.json")["Ms"], abs=ROUNDING)
    assert report().launch_slowdown == pytest.approx(published("result-ST.json")["launch_slowdown"], abs=ROUNDING)


def test_slowdowns_of_ranks_stages_and_operations_agree() -> None:
    found, expected = report().decomposition, published("result-ST.json")
    stages = {str(stage): value for stage, value in enumerate(found.stage_slowdown)}
    assert stages == pytest.approx(expected["blocking_decompose_by_stage"], abs=ROUNDING)
    replicas = dict(zip(map(str, report().data_ranks), found.replica_slowdown, strict=True))
    assert replicas == pytest.approx(expected["blocking_decompose_by_dp_rank"], abs=ROUNDING)
    families = dict(zip(report().families, found.family_slowdown, strict=True))
    assert families == pytest.approx(expected["blocking_decompose_by_optype"], abs=ROUNDING)


def test_recorded_replayed_and_ideal_step_times_match_the_published() -> None:
    found, expected = report().decomposition, published("result-ST.json")
    for key, seconds in (
        ("step_t_base", report().recorded_step_seconds),
        ("step_t_nodelay", found.step_seconds),
        ("step_t_noblk", found.typical_seconds),
    ):
        ours = dict(zip(map(str, report().steps), seconds, strict=True))
        assert ours == pytest.approx(expected[key], abs=ROUNDING)
