"""Whatever was measured: no warning of numpy, impacts that are shares, culprits that are ranks of the job."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.thresholds import Policy
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.analysis.verdicts.windows import (
    FrameSeen,
    GpuEvidence,
    JobWindow,
    RankColumns,
    RankEvidence,
    StackProfile,
    columns_of,
)
from tests.unit.analysis.device_jobs import DeviceJob
from tests.unit.analysis.synthetic import SyntheticJob

MEASURED = [f.name for f in fields(RankColumns) if f.name not in ("job", "rank", "stage", "place")]
ODD = [0.0, float("nan"), float("inf"), float("-inf"), -1.0, 5e-324, 1e-300, 1e-9, 1e6, 1e300, 1.7e308]
NUMBERS = st.one_of(st.sampled_from(ODD), st.floats(0.0, 0.2), st.floats())
LINE = FrameSeen("spin", "train.py", 7, 0.9, 0.9, "forward")


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def evidence_of(ranks: int) -> dict[int, RankEvidence]:
    """The last rank is seen in a line of its own, on a GPU of its own kind."""
    usual = StackProfile(40, {"forward": 0.2, "communication": 0.8}, ())
    odd = StackProfile(40, {"forward": 0.9, "backward": 0.1}, (LINE,))
    return {
        rank: RankEvidence(
            stacks=odd if rank == ranks - 1 else usual,
            starved_share=0.1,
            window_seconds=2.0,
            gpu=GpuEvidence(1e9 if rank == ranks - 1 else 1.7e9, 2e9, 1.0),
        )
        for rank in range(ranks)
    }


def window_of(columns: RankColumns, number: int) -> JobWindow:
    ranks = len(columns)
    return JobWindow(1000.0 + 2 * number, 2.0, ranks, columns, evidence=lambda: evidence_of(ranks))


def check(verdict: Verdict, ranks: int) -> None:
    assert verdict.impact_ratio is None or 0.0 <= verdict.impact_ratio <= 1.0
    assert verdict.lost_gpu_seconds is None or 0.0 <= verdict.lost_gpu_seconds < float("inf")
    assert set(verdict.culprits) <= set(range(ranks))


@st.composite
def tables(draw: st.DrawFn) -> list[RankColumns]:
    """Some windows of one job: each column odd for some ranks, plausible for the others."""
    ranks = draw(st.integers(1, 6))
    stages = draw(st.sampled_from([1, 1, 2, 3]))
    on_device = draw(st.booleans())
    plausible: dict[str, float] = {"steps": 20.0, "step_seconds": 0.06, "self_seconds": 0.05, "wait_seconds": 0.01}
    plausible |= {"transfer_seconds": 0.005, "self_spread_ratio": 1.3, "input_seconds": 0.001, "starved_seconds": 0.0}
    if on_device:
        plausible |= {"host_seconds": 0.06, "run_ahead_seconds": 0.05}
    rows = []
    for rank in range(ranks):
        row = {**plausible, "rank": rank, "stage": rank % stages if stages > 1 else -1, "place": rank // 2}
        for name in draw(st.sets(st.sampled_from(MEASURED), max_size=6)):
            row[name] = draw(NUMBERS)
        rows.append(row)
    odd = columns_of(rows)
    usual = columns_of([{**plausible, "rank": rank, "stage": int(odd.stage[rank])} for rank in range(ranks)])
    return [odd if is_odd else usual for is_odd in draw(st.lists(st.booleans(), min_size=4, max_size=12))]


@given(windows=tables(), target=st.sampled_from([None, 0.4]))
def test_odd_columns_make_no_warning_and_no_odd_number(windows: list[RankColumns], target: float | None) -> None:
    # The rest is no measurement: the correlation leaves it out.
    is_sent = all(_can_be_sent(getattr(columns, name)) for columns in windows for name in MEASURED)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fleet = FleetDetector(Policy(mfu_target_ratio=target))
        for number, columns in enumerate(windows):
            verdict = fleet.evaluate({"job": window_of(columns, number)})["job"]
            check(verdict, len(columns))
            words = f"{verdict.reason} {verdict.cause.evidence}".split()
            assert not (is_sent and {"nan", "inf", "-inf"}.intersection(words))


def _can_be_sent(values: np.ndarray) -> bool:
    return bool(np.all(np.isnan(values) | ((values >= 0) & (values <= 1e6))))


@pytest.mark.parametrize("value", ODD, ids=str)
@pytest.mark.parametrize("on_device", [False, True])
def test_a_column_of_nothing_but_one_number(value: float, on_device: bool) -> None:
    """A job for each column."""
    job = DeviceJob() if on_device else SyntheticJob()
    fleet, random = FleetDetector(Policy(mfu_target_ratio=0.4)), np.random.default_rng(0)
    for number in range(8):
        window = job.window(random, number, evidence_of(4))
        windows = dict.fromkeys(MEASURED, window)
        if number > 3:
            odd = np.full(4, value)
            windows = {name: replace(window, columns=replace(window.columns, **{name: odd})) for name in MEASURED}
        for verdict in fleet.evaluate(windows).values():
            check(verdict, 4)


@pytest.mark.parametrize("victims", [0.0, 1e-12])
def test_peers_without_work_of_their_own(victims: float) -> None:
    """Victims that only wait: every ratio to them is infinite."""
    rows = [{"rank": rank, "steps": 20, "step_seconds": 0.06, "wait_seconds": 0.06 - own, "self_seconds": own}
            for rank, own in enumerate((victims, victims, 0.055, victims))]  # fmt: skip
    fleet = FleetDetector()
    for number in range(6):
        verdict = fleet.evaluate({"job": window_of(columns_of(rows), number)})["job"]
        check(verdict, 4)
    assert (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (2,))


def test_waits_longer_than_the_step_are_not_uneven_data() -> None:
    """As they were when waiting was a device's time and the step was its host's: 285 % of the job."""
    rows = [
        {
            "rank": rank,
            "steps": 400,
            "step_seconds": 0.004,
            "self_seconds": 0.004,
            "wait_seconds": 0.0114 + rank * 1e-4,
            "transfer_seconds": 0.0,
            "self_spread_ratio": 3.0,
        }
        for rank in range(4)
    ]
    fleet = FleetDetector()
    verdicts = [fleet.evaluate({"job": window_of(columns_of(rows), number)})["job"] for number in range(8)]
    assert not any(verdict.kind.is_finding for verdict in verdicts)


def test_a_job_without_ranks() -> None:
    fleet = FleetDetector()
    for number in range(4):
        verdict = fleet.evaluate({"job": window_of(columns_of([]), number)})["job"]
        assert not verdict.kind.is_finding


def test_an_impact_is_a_share_whatever_a_verdict_is_given() -> None:
    given_and_kept = {2.85: 1.0, -0.1: 0.0, 0.4: 0.4, float("inf"): 1.0, 0.0: 0.0}
    for given_ratio, kept in given_and_kept.items():
        assert Verdict(Kind.SLOW_RANK, "", impact_ratio=given_ratio).impact_ratio == kept
    assert Verdict(Kind.SLOW_RANK, "", impact_ratio=float("nan")).impact_ratio is None
