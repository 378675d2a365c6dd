from __future__ import annotations

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.profiles.comparison import FrameExcess, compare, sentence
from rankscope.analysis.profiles.frames import Frame, Stack
from rankscope.analysis.profiles.profile import Profile, SampledStack, merge

PERIOD_NANOS = 100_000_000  # 10 Hz
MAIN = Frame("main", "/app/train.py", 10)
LOOP = Frame("train", "/app/train.py", 55)
FETCH = Frame("fetch", "/x/site-packages/torch/utils/data/fetch.py", 50)
LOAD = Frame("load_image", "/app/dataset.py", 88)
DECODE = Frame("decode", "/x/site-packages/PIL/Image.py", 7)
BACKWARD = Frame("backward", "/x/site-packages/torch/_tensor.py", 3)
LOADING: Stack = (DECODE, LOAD, FETCH, LOOP, MAIN)
TRAINING: Stack = (BACKWARD, LOOP._replace(line=57), MAIN)


def profile(stacks: dict[Stack, int], rank: int = 0) -> Profile:
    phases = {LOADING: "input", TRAINING: "backward"}
    return Profile.of(
        SampledStack(stack, count, count * PERIOD_NANOS, rank, "MainThread", phases.get(stack, "forward"))
        for stack, count in stacks.items()
        if count
    )


def mixed(loading_share: float, samples: int, rank: int = 0) -> Profile:
    loading = round(loading_share * samples)
    return profile({LOADING: loading, TRAINING: samples - loading}, rank)


def job(chosen: random.Random, samples: int, rank: int, slow: float = 0.0) -> Profile:
    """Sixty functions of very different weight; the program stays in one for two seconds on average."""
    counts: Counter[Stack] = Counter()
    while counts.total() < samples:
        part = min(int(chosen.paretovariate(0.6)), 60)
        stack = (Frame(f"f{part}", "/app/model.py", part), Frame(f"g{part % 7}", "/app/model.py", 1), MAIN)
        if chosen.random() < slow:
            stack = LOADING
        counts[stack] += min(1 + int(chosen.expovariate(1 / 20)), samples - counts.total())
    return profile(dict(counts), rank)


def test_the_users_line_comes_before_its_callers_and_libraries() -> None:
    peers = merge([mixed(0.02, 2000, rank) for rank in (0, 1, 2)])
    found = compare(mixed(0.41, 2000, rank=3), peers).excesses
    assert [one.frame for one in found] == [LOAD, LOOP, DECODE, FETCH]
    assert found[0].phase == "input"
    assert sentence("rank 3", found[0]) == (
        "rank 3 spends 41 % of its time in `load_image (dataset.py:88)`, its peers 2 %"
    )


def test_a_hostile_name_stays_one_quoted_line() -> None:
    found = FrameExcess(Frame("f`\n\x1b[2J" + "x" * 1000, "a.py", 1), 0.5, 0.0, 0.5, "input")
    text = sentence("rank 3", found)
    assert text.isprintable() and text.count("`") == 2 and len(text) < 300


def test_ten_samples_prove_nothing() -> None:
    few = compare(mixed(1.0, 10), mixed(0.0, 6000))
    assert few.excesses == () and few.reason == "10 samples of the profile are too few to compare"
    assert compare(mixed(1.0, 6000), mixed(0.0, 10)).reason == "10 samples of the reference are too few to compare"


def test_a_rank_matched_by_one_peer_is_not_in_excess() -> None:
    quiet = [mixed(0.02, 6000, rank) for rank in (0, 1, 2)]
    assert compare(mixed(0.3, 6000, rank=3), merge(quiet)).excesses
    assert not compare(mixed(0.3, 6000, rank=3), merge([*quiet, mixed(0.31, 6000, rank=4)])).excesses


def test_time_counts_and_not_samples() -> None:
    """Half of the samples at a tenth of the rate are most of the time."""
    loading = SampledStack(LOADING, 3000, 3000 * 10 * PERIOD_NANOS)
    slow = Profile.of([loading, SampledStack(TRAINING, 3000, 3000 * PERIOD_NANOS)])
    assert round(compare(slow, mixed(0.5, 6000)).excesses[0].share, 2) == 0.91


def test_equal_jobs_are_seldom_told_apart() -> None:
    chosen = random.Random(17)
    findings = 0
    for _ in range(100):
        samples = chosen.choice([600, 3000, 6000])
        peers = merge([job(chosen, samples, rank) for rank in (0, 1, 2)])
        findings += bool(compare(job(chosen, samples, 3), peers).excesses)
        findings += bool(compare(job(chosen, samples, 3), job(chosen, samples, 3)).excesses)
    assert findings <= 2  # of 200


@given(st.integers(0, 1 << 32), st.sampled_from([6000, 12000]), st.floats(0.4, 0.9))
def test_a_clear_difference_is_always_found(seed: int, samples: int, slow: float) -> None:
    chosen = random.Random(seed)
    peers = merge([job(chosen, samples, rank) for rank in (0, 1, 2)])
    found = compare(job(chosen, samples, 3, slow), peers).excesses
    assert found and found[0].frame == LOAD and found[0].reference_share == 0.0


@given(st.integers(0, 1 << 32), st.integers(1, 3000))
def test_a_profile_has_nothing_in_excess_of_itself(seed: int, samples: int) -> None:
    one = job(random.Random(seed), samples, 0)
    assert compare(one, one).excesses == ()


def test_profiles_without_samples_are_no_error() -> None:
    assert compare(Profile.of(()), Profile.of(())).excesses == ()
    stackless = profile({(): 6000})
    assert compare(stackless, stackless).excesses == ()
