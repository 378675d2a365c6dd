"""A slow rank's line is named at once; shares are given when the samples prove them."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.profiles.comparison import compare
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.profile import Profile, SampledStack, merge
from rankscope.analysis.verdicts.detector import FleetDetector
from rankscope.analysis.verdicts.stack_profiles import HISTORY_SECONDS, StackHistory, compare_stacks
from rankscope.analysis.verdicts.verdict import HOST, Cause, Kind
from rankscope.analysis.verdicts.windows import FrameSeen, RankColumns, RankEvidence, StackProfile
from tests.unit.analysis.device_jobs import DeviceJob
from tests.unit.analysis.synthetic import SyntheticJob

SLOW = SyntheticJob(slow_ranks={3: 1.7}, excess_phase="input")
SENTENCE = "rank 3 spends 41 % of its time in `load_image (dataset.py:88)`, its peers 2 %"
ODD = (0.0, float("nan"), float("inf"), float("-inf"), -1.0, 5e-324, 1e300)


def stacks(loading: float, line: int = 88, samples: int = 20) -> StackProfile:
    """Of one window: the library that loads is called by the user's line, and that by the loop."""
    frames = (
        FrameSeen("train", "/app/train.py", 55, loading, 0.0, "input"),
        FrameSeen("load_image", "/app/dataset.py", line, loading, loading, "input"),
        FrameSeen("read", "/x/site-packages/PIL/Image.py", 7, loading, loading, "input"),
        FrameSeen("backward", "/x/site-packages/torch/_tensor.py", 600, 1 - loading, 1 - loading, "backward"),
    )
    return StackProfile(samples, {"input": loading, "backward": 1 - loading}, frames, samples / 10)


def causes(job: SyntheticJob | DeviceJob, windows: list[dict[int, StackProfile]], warm_up: int = 6) -> list[Cause]:
    random, fleet = np.random.default_rng(0), FleetDetector()
    found = []
    for number, seen in enumerate(windows):
        evidence = {rank: RankEvidence(stacks=profile) for rank, profile in seen.items()}
        verdict = fleet.evaluate({"job": job.window(random, number, evidence)})["job"]
        assert number < warm_up or (verdict.kind, verdict.culprits) == (Kind.SLOW_RANK, (3,))
        found.append(verdict.cause)
    return found


def ranks(culprit: StackProfile, usual: StackProfile) -> dict[int, StackProfile]:
    return {0: usual, 1: usual, 2: usual, 3: culprit}


def test_after_a_minute_the_cause_has_rank_and_peer_shares() -> None:
    found = causes(SLOW, 45 * [ranks(stacks(0.41), stacks(0.02))])
    assert all((cause.phase, cause.frames[0].line) == ("input", 88) for cause in found[6:])
    is_told = [SENTENCE in cause.evidence for cause in found]
    assert not any(is_told[:28]) and all(is_told[-5:])  # 12 observations of 5 s, in windows of 2 s
    assert found[-1].evidence.endswith(f" ms a step more input than its peers; {SENTENCE}")


def test_a_late_host_is_explained_in_the_same_words() -> None:
    cause = causes(DeviceJob(late={3: 0.030}), 40 * [ranks(stacks(0.41), stacks(0.02))])[-1]
    assert cause.bound == HOST
    assert cause.evidence.startswith("its host is late by ") and cause.evidence.endswith(f" in input; {SENTENCE}")


def test_without_steps_stacks_explain_a_rank_in_the_same_words() -> None:
    unknown = {f.name: np.nan for f in fields(RankColumns) if f.name not in ("job", "rank", "stage", "place")}
    job = SLOW.but(extra=dict.fromkeys(range(4), unknown))
    found = causes(job, 60 * [ranks(stacks(0.41), stacks(0.02))], warm_up=12)
    assert found[15].evidence == "seen in load_image 39% of the time more than any peer"
    assert found[-1].evidence == f"{found[15].evidence}; {SENTENCE}"


@pytest.mark.parametrize("samples", [1, 4])
def test_few_samples_name_the_line_and_no_shares(samples: int) -> None:
    found = causes(SLOW, 40 * [ranks(stacks(0.41, samples=samples), stacks(0.02, samples=samples))])
    assert found[-1].frames[0].line == 88
    assert "spends" not in found[-1].evidence


def test_a_line_as_frequent_on_a_peer_has_no_shares() -> None:
    seen = {**ranks(stacks(0.41), stacks(0.02)), 1: stacks(0.42)}
    cause = causes(SLOW, 40 * [seen])[-1]
    assert cause.frames[0].line == 88 and "spends" not in cause.evidence


def test_the_caller_of_many_short_lines_has_no_shares() -> None:
    def spread(share: float) -> StackProfile:
        """Over ten lines of one function, which the loop calls."""
        lines = tuple(
            FrameSeen("augment", "/app/dataset.py", 100 + n, share / 10, share / 10, "input") for n in range(10)
        )
        return replace(stacks(share), frames=(*stacks(share).frames[:1], *lines))

    cause = causes(SLOW, 45 * [ranks(spread(0.41), spread(0.02))])[-1]
    assert [frame.line for frame in cause.frames] == [55] and "spends" not in cause.evidence


def test_a_newly_slow_line_replaces_the_old_one() -> None:
    before, after = ranks(stacks(0.41), stacks(0.02)), ranks(stacks(0.41, line=99), stacks(0.02))
    found = causes(SLOW, [*(60 * [before]), *(80 * [after])])
    assert SENTENCE in found[59].evidence
    assert all("dataset.py:88" not in cause.evidence for cause in found[70:])
    assert "in `load_image (dataset.py:99)`, its peers 0 %" in found[-1].evidence


def test_stacks_of_windows_are_compared_as_profiles_are() -> None:
    loop, line = Frame("train", "/app/train.py", 55), Frame("load_image", "/app/dataset.py", 88)
    read = Frame("read", "/x/site-packages/PIL/Image.py", 7)
    backward = Frame("backward", "/x/site-packages/torch/_tensor.py", 600)

    def profile(loading: int, rank: int) -> Profile:
        rows = ((read, line, loop), loading, "input"), ((backward,), 1200 - loading, "backward")
        return Profile.of(SampledStack(stack, n, n * 10**8, rank, "", phase) for stack, n, phase in rows)

    by_profile = compare(profile(492, 3), merge([profile(24, rank) for rank in range(3)]))
    by_windows = compare_stacks(stacks(0.41, samples=1200), [stacks(0.02, samples=1200)] * 3)
    assert [one.frame for one in by_profile.excesses] == [line, loop, read]
    for mine, theirs in zip(by_windows.excesses, by_profile.excesses, strict=True):
        assert (mine.frame, mine.phase) == (theirs.frame, theirs.phase)
        assert mine[1:4] == pytest.approx(theirs[1:4])


def test_the_history_of_a_rank_is_bounded() -> None:
    history = StackHistory()
    for number in range(200):
        window = stacks(0.41, samples=100)
        names = tuple(FrameSeen(f"f{number}.{n}", "a.py", n, 0.01, 0.01, "forward") for n in range(60))
        history.add({0: replace(window, frames=(*window.frames, *names))})
    known = history.ranks[0]
    assert known.seconds <= HISTORY_SECONDS and len(known.frames) <= 128
    assert any(frame.line == 88 and frame.share == pytest.approx(0.41) for frame in known.frames)


@given(
    st.lists(st.one_of(st.sampled_from(ODD), st.floats()), min_size=4, max_size=4),
    st.integers(0, 2**32 - 1),
    st.one_of(st.just(0.0), st.floats(0.0, 1e10)),
)
def test_whatever_a_daemon_sends_can_be_compared(shares: list[float], samples: int, seconds: float) -> None:
    odd = replace(stacks(0.4), samples=samples, seconds=seconds)
    odd = replace(odd, frames=tuple(f._replace(share=s, own_share=s) for f, s in zip(odd.frames, shares, strict=True)))
    for mine, other in ((odd, stacks(0.02, samples=600)), (stacks(0.4, samples=600), odd)):
        history = StackHistory()
        for _ in range(2):
            history.add({0: mine, 1: other})
        history.proven(0, [1], {Frame("load_image", "/app/dataset.py", 88)})
