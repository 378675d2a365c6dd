"""What a person reads of a verdict: who is slow, and whether a host, a GPU, an input or a missing CPU is to blame."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.verdicts.verdict import (
    DEVICE,
    ENDED,
    HOST,
    STOPPED,
    Cause,
    Confidence,
    Kind,
    Severity,
    Verdict,
    explanation,
    gist,
    headline,
    loss,
)
from rankscope.analysis.verdicts.windows import FrameSeen

SLOW = Verdict(Kind.SLOW_RANK, "reason", Severity.ALARM, culprits=(2,), impact_ratio=0.41)
LINE = FrameSeen("normalize", "/job/model.py", 88, 0.6, 0.6, "forward")
READ = FrameSeen("__getitem__", "/job/dataset.py", 9, 0.6, 0.6, "input")
CLOCK = "50.0 ms a step more on its device; same clock as its peers (1,755 MHz), longer kernels"
THROTTLED = "GPU at 900 of 1,980 MHz; peers at 1,755 MHz"


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        (Cause("forward", (LINE,), "", HOST), "because its host is late, at model.py:88 (normalize, forward)"),
        (Cause("unknown", (LINE,), "", HOST), "because its host is late, at model.py:88 (normalize)"),
        (Cause("forward", (), "", HOST), "because its host is late in its forward phase"),
        (Cause("unknown", (), "", HOST), "because its host is late"),
        (Cause("device", (), CLOCK, DEVICE), f"because its GPU is slow ({CLOCK})"),
        (Cause("throttled", (), THROTTLED, DEVICE), f"because its GPU is throttled ({THROTTLED})"),
        (Cause("throttled", (), THROTTLED), f"because its GPU is throttled ({THROTTLED})"),
        (Cause("input", (READ,), "", HOST), "because its input is late, at dataset.py:9 (__getitem__, input)"),
        (Cause("input", (), "", HOST), "because its input is late"),
        (Cause("starved", (LINE,), "", HOST), "because it is starved of CPU"),
        # By the host's clock it is not told apart.
        (Cause("forward", (LINE,)), "because of model.py:88 (normalize, forward)"),
        (Cause("unknown", (LINE,)), "because of model.py:88 (normalize)"),
        (Cause("input", ()), "in its input phase"),
        (Cause("other", ()), "in other code of its loop"),
        (Cause("other", (), "", HOST), "because its host is late in other code of its loop"),
    ],
)
def test_a_slow_rank_and_why(cause: Cause, sentence: str) -> None:
    assert headline(replace(SLOW, cause=cause)) == f"rank 2 is slow {sentence}"


@pytest.mark.parametrize(
    ("verdict", "expected"),
    [
        (replace(SLOW, cause=Cause("device", (), CLOCK, DEVICE)), "reason"),
        (replace(SLOW, cause=Cause("throttled", (), THROTTLED)), "reason"),
        (replace(SLOW, reason=THROTTLED, cause=Cause("throttled", (), THROTTLED)), ""),
        (replace(SLOW, cause=Cause("forward", (LINE,), "40 ms more forward")), "40 ms more forward"),
        (Verdict(Kind.INPUT_BOUND, "60 % of each step", cause=Cause("input", (), "loader")), "60 % of each step"),
        (Verdict(Kind.HEALTHY, "nothing stands out"), ""),
    ],
)
def test_an_explanation_does_not_repeat_the_headline(verdict: Verdict, expected: str) -> None:
    assert explanation(verdict) == expected


def test_the_gist_changes_with_the_cause_and_not_with_figures() -> None:
    slow = replace(SLOW, cause=Cause("device", (), CLOCK, DEVICE))
    moved = replace(slow, reason="other", confidence=Confidence.LOW, cause=Cause("device", (), "51.0 ms", DEVICE))
    assert gist(slow) == gist(moved)
    others = [
        SLOW,
        replace(slow, culprits=(3,)),
        replace(slow, cause=Cause("throttled", (), THROTTLED, DEVICE)),
        replace(slow, cause=Cause("forward", (LINE,), "", HOST)),
        replace(slow, cause=Cause("forward", (LINE._replace(line=90),), "", HOST)),
        Verdict(Kind.HEALTHY, "reason"),
    ]
    assert len({gist(verdict) for verdict in (slow, *others)}) == 7


def test_a_slow_rank_without_a_cause() -> None:
    assert headline(SLOW) == "rank 2 is slow"
    assert headline(replace(SLOW, confidence=Confidence.LOW)) == "rank 2 is slow (low confidence)"


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        (Cause("input", (READ,)), "never entered the collective because of dataset.py:9 (__getitem__, input)"),
        (Cause(STOPPED, (LINE,)), "is stopped by a signal at model.py:88 (normalize)"),
        (Cause(STOPPED), "is stopped by a signal"),
        (Cause(ENDED), "is no longer running"),
    ],
)
def test_a_rank_that_others_wait_for(cause: Cause, sentence: str) -> None:
    verdict = Verdict(Kind.HANG, "reason", Severity.ALARM, culprits=(2,), cause=cause)
    assert headline(verdict) == f"the job hangs: rank 2 {sentence}"


def test_what_is_not_known_yet_says_how_far_it_is() -> None:
    verdict = Verdict(Kind.INSUFFICIENT_DATA, "2 of 3 windows compared")
    assert headline(verdict) == "not enough to judge yet: 2 of 3 windows compared"
    assert loss(verdict) == ""


def test_a_loss_is_never_more_than_the_job() -> None:
    assert loss(SLOW) == "costs 41% of the job"
    assert loss(replace(SLOW, impact_ratio=2.85)) == "costs 100% of the job"
