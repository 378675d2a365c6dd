from __future__ import annotations

import pytest

from rankscope.cli.demo_job.faults import DEFAULT_DELAY_MS, KINDS, Fault, FaultError, parse_fault
from rankscope.cli.main import main


def test_reads_rank_and_delay() -> None:
    assert parse_fault("slow-rank:rank=3,delay=30") == Fault("slow-rank", rank=3, delay_ms=30.0)
    assert parse_fault("hang:rank=0") == Fault("hang", rank=0)


@pytest.mark.parametrize("kind", KINDS)
def test_every_fault_stands_without_options_and_survives_being_written_down(kind: str) -> None:
    fault = parse_fault(kind).for_ranks(4)

    assert parse_fault(fault.spec) == fault


def test_defaults_to_rank_two_or_last_and_a_delay() -> None:
    assert parse_fault("slow-rank").for_ranks(4) == Fault("slow-rank", rank=2, delay_ms=DEFAULT_DELAY_MS)
    assert parse_fault("slow-input").for_ranks(2) == Fault("slow-input", rank=1)
    assert parse_fault("slow-network").for_ranks(4) == Fault("slow-network")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("slow-rnak", "unknown fault 'slow-rnak'; choose one of none, slow-rank,"),
        ("", "unknown fault ''"),
        ("slow-network:rank=1", "unknown option 'rank'; slow-network takes no options"),
        ("slow-input:delay=3", "unknown option 'delay'; slow-input takes 'rank='"),
        ("slow-rank:rank", "'rank' needs a value"),
        ("slow-rank:rank=1,rank=2", "'rank' is given twice"),
        ("slow-rank:rank=-1", "rank '-1' is not a whole number"),
        ("slow-rank:rank=²", "rank '²' is not a whole number"),
        ("slow-rank:delay=fast", "delay 'fast' is not a number of milliseconds"),
        ("slow-rank:delay=0", "delay must be above 0"),
        ("slow-rank:delay=nan", "delay must be above 0"),
        ("slow-rank:delay=1e9", "at most 1000 milliseconds"),
    ],
)
def test_says_what_is_wrong_with_a_spec(spec: str, words: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(spec)

    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("spec", "ranks", "words"),
    [
        ("hang:rank=4", 4, "the job has ranks 0 to 3"),
        ("none", 1, "--world-size 1: the demo runs 2 to 16"),
        ("none", 17, "--world-size 17: the demo runs 2 to 16"),
        ("stage-imbalance", 2, "take an even number from 4"),
        ("stage-imbalance", 5, "take an even number from 4"),
    ],
)
def test_says_when_a_fault_does_not_fit_the_job(spec: str, ranks: int, words: str) -> None:
    with pytest.raises(FaultError) as caught:
        parse_fault(spec).for_ranks(ranks)

    assert words in str(caught.value)


def test_without_torch_the_demo_names_its_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["demo"]) == 2
    said = capsys.readouterr().err
    assert said == "error: rankscope demo needs the demo extra: pip install 'rankscope[demo]' (there is no torch)\n"
