"""`rankscope demo`, from the command line to the verdict: real ranks, real faults, a daemon that is told nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.e2e.playing import Played, play
from tests.support.measuring import Measured

# Targets on an idle machine. A hang is detected later than a slow rank, because it may be a long step.
VERDICT_SECONDS, HANG_SECONDS = 15.0, 60.0
# So slow that it is found also where others use the CPU.
VERY_SLOW = "slow-rank:rank=2,delay=300"
# Every fault that blames one rank of a data-parallel job which goes on training. That it may be another rank is played
# by an installed wheel, in tests/integration/test_installing.py.
STRAGGLERS = {"slow-rank": 2, "slow-input": 2, "starved": 2}


def test_a_very_slow_rank_is_named_with_its_slow_function() -> None:
    played = play(VERY_SLOW)
    report = played.report
    assert (report["verdict"], report["culprits"]) == ("slow_rank", [2]), str(played)
    assert report["cause"]["phase"] == "forward", str(played)
    assert first_frame(report, played) == ("model.py", "normalize_features"), str(played)
    assert report["step_seconds"] > 0 and report["mfu_ratio"] > 0 and report["impact_ratio"] > 0, str(played)


def test_a_hang_names_the_rank_that_never_entered_the_collective(measured: Measured) -> None:
    played = play("hang")
    report = played.report
    assert (report["verdict"], report["culprits"]) == ("hang", [2]), str(played)
    assert first_frame(report, played)[0] == "model.py", str(played)
    measured("demo, hang: verdict after the fault", report["seconds_to_verdict"], "s", at_most=HANG_SECONDS)


@pytest.mark.parametrize("fault", [VERY_SLOW, "hang"])
def test_no_rank_outlives_the_demo(fault: str) -> None:
    played = play(fault)
    assert len(played.ranks) == 4, str(played)
    assert not [rank["pid"] for rank in played.ranks if Path(f"/proc/{rank['pid']}").exists()], str(played)


def found(fault: str, *flags: str) -> dict[str, Any]:
    """The report of a run that must be right by its own account."""
    played = play(fault, *flags)
    report = played.report
    assert played.status == 0, str(played)
    assert report["right"] is True, str(played)
    assert report["false_alarms"] == 0, str(played)
    return report


def found_fault(fault: str, verdict: str, culprits: list[int], measured: Measured) -> dict[str, Any]:
    report = found(fault)
    assert (report["verdict"], report["culprits"]) == (verdict, culprits), str(play(fault))
    assert report["severity"] == "alarm", str(play(fault))
    assert report["confidence"] == "high", str(play(fault))
    measured(f"demo, {fault}: verdict after the fault", report["seconds_to_verdict"], "s", at_most=VERDICT_SECONDS)
    return report


def first_frame(report: dict[str, Any], played: Played) -> tuple[str, str]:
    frames = report["cause"]["frames"]
    assert frames, str(played)
    return frames[0]["file"], frames[0]["function"]


@pytest.mark.acceptance
def test_a_healthy_job_raises_nothing() -> None:
    for_a_minute = ("none", "--seconds", "60")
    report, played = found(*for_a_minute), play(*for_a_minute)
    assert report["verdict"] in ("healthy", "insufficient_data"), str(played)
    assert report["culprits"] == [], str(played)
    assert report["seconds_to_verdict"] is None, str(played)
    assert 0 < report["step_seconds"] < 60, str(played)
    assert 0 < report["mfu_ratio"] < 1, str(played)
    assert 0 <= report["exposed_communication_ratio"] < 1, str(played)
    assert len(report["ranks"]) == 4, str(played)


@pytest.mark.acceptance
def test_a_slow_rank_is_named_with_its_phase_and_file(measured: Measured) -> None:
    report = found_fault("slow-rank", "slow_rank", [2], measured)
    played = play("slow-rank")
    assert report["cause"]["phase"] == "forward", str(played)
    assert first_frame(report, played)[0] == "model.py", str(played)
    # 40 ms of sleep in every step: what is lost cannot be little, nor more than there is.
    assert 0.05 < report["impact_ratio"] < 1, str(played)


@pytest.mark.acceptance
def test_a_slow_dataset_is_named_as_input(measured: Measured) -> None:
    report = found_fault("slow-input", "slow_rank", [2], measured)
    assert report["cause"]["phase"] == "input", str(play("slow-input"))
    assert first_frame(report, play("slow-input"))[0] == "dataset.py", str(play("slow-input"))


@pytest.mark.acceptance
def test_a_starved_rank_is_named_as_starved(measured: Measured) -> None:
    report = found_fault("starved", "slow_rank", [2], measured)
    assert report["cause"]["phase"] == "starved", str(play("starved"))


@pytest.mark.acceptance
def test_a_slow_network_blames_no_rank(measured: Measured) -> None:
    report = found_fault("slow-network", "slow_communication", [], measured)
    assert report["impact_ratio"] > 0, str(play("slow-network"))


@pytest.mark.acceptance
def test_a_heavy_stage_is_reported_as_one_slow_stage(measured: Measured) -> None:
    report = found_fault("stage-imbalance", "slow_stage", [2, 3], measured)
    assert report["stage"] == 1, str(play("stage-imbalance"))


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", STRAGGLERS)
def test_only_self_time_and_wait_distinguish_the_straggler(fault: str) -> None:
    found(fault)
    played, straggler = play(fault), STRAGGLERS[fault]
    steps = [rank["step_seconds"] for rank in played.ranks]
    assert max(steps) <= 1.1 * min(steps), str(played)
    by_self = max(played.ranks, key=lambda rank: float(rank["self_seconds"]))
    by_wait = min(played.ranks, key=lambda rank: float(rank["wait_seconds"]))
    assert (by_self["rank"], by_wait["rank"]) == (straggler, straggler), str(played)


@pytest.mark.acceptance
@pytest.mark.parametrize("fault", STRAGGLERS)
def test_the_victim_that_waits_most_is_not_accused(fault: str) -> None:
    """The naive rule: the rank that spends most time in collectives is in trouble."""
    played = play(fault)
    worst = max(played.ranks, key=lambda rank: float(rank["wait_seconds"]))
    assert worst["rank"] not in found(fault)["culprits"], str(played)


@pytest.mark.acceptance
def test_without_the_probe_a_verdict_has_low_confidence_or_abstains() -> None:
    played = play("slow-rank", "--no-probe")
    report = found("slow-rank", "--no-probe")
    if report["verdict"] == "insufficient_data":
        assert report["culprits"] == [], str(played)
        assert report["reason"], str(played)
    else:
        assert (report["verdict"], report["culprits"]) == ("slow_rank", [2]), str(played)
        assert report["confidence"] == "low", str(played)
    assert all(rank["step_seconds"] is None for rank in played.ranks), str(played)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("earthquake",), "unknown fault 'earthquake'; choose one of none, slow-rank"),
        (("slow-rank:rank=4",), "the job has ranks 0 to 3"),
        (("slow-rank:delay=-1",), "delay must be above 0"),
        (("hang", "--world-size", "1"), "--world-size 1: the demo runs 2 to 16"),
        (("none", "--seconds", "nan"), "--seconds"),
    ],
)
def test_impossible_demo_settings_are_refused_before_anything_starts(flags: tuple[str, ...], words: str) -> None:
    played = play(*flags)
    assert played.status == 2, str(played)
    assert words in played.errors, str(played)
    assert played.lines == (), str(played)
