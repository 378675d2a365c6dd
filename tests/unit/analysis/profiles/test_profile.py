from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.profiles.frames import NATIVE, PYTHON, Frame, is_user_code
from rankscope.analysis.profiles.profile import FrameTotal, Profile, SampledStack, merge

MAIN = Frame("main", "train.py", 10)
LOAD = Frame("load_image", "/app/dataset.py", 88)
READ = Frame("read", "/usr/lib/python3.11/io.py", 5)
STEP = Frame("step", "train.py", 20)

FRAMES = st.builds(Frame, st.sampled_from("abc"), st.sampled_from(["x.py", "y.py"]), st.integers(0, 2), st.just(PYTHON))
SAMPLED = st.lists(
    st.builds(
        SampledStack,
        st.lists(FRAMES, max_size=6).map(tuple),
        samples=st.integers(1, 100),
        nanos=st.integers(0, 10**12),
        rank=st.integers(0, 3),
        thread=st.sampled_from(["MainThread", "pin"]),
        phase=st.sampled_from(["input", "forward", ""]),
    ),
    max_size=30,
)


def counted(sampled: list[SampledStack] | Profile) -> tuple[Counter[object], Counter[object]]:
    samples: Counter[object] = Counter()
    nanos: Counter[object] = Counter()
    for one in sampled:
        samples[one.stack, one.rank, one.thread, one.phase] += one.samples
        nanos[one.stack, one.rank, one.thread, one.phase] += one.nanos
    return samples, nanos


@given(SAMPLED)
def test_a_profile_holds_what_was_sampled_and_each_row_once(sampled: list[SampledStack]) -> None:
    profile = Profile.of(sampled)
    assert counted(profile) == counted(sampled)
    assert len(profile.stack) == len(counted(sampled)[0])
    assert profile.samples_total == sum(one.samples for one in sampled)


@given(st.lists(SAMPLED, max_size=4))
def test_a_merged_profile_is_the_sum_of_its_parts(parts: list[list[SampledStack]]) -> None:
    merged = merge([Profile.of(part) for part in parts])
    assert counted(merged) == counted([one for part in parts for one in part])
    assert len(set(merged.frames)) == len(merged.frames)


@given(SAMPLED, st.sets(st.integers(0, 3)), st.sets(st.sampled_from(["input", "forward", ""])))
def test_a_filter_keeps_rows_of_its_ranks_threads_and_phases(
    sampled: list[SampledStack], ranks: set[int], phases: set[str]
) -> None:
    kept = Profile.of(sampled).filter(ranks=ranks, threads={"pin"}, phases=phases)
    expected = [one for one in sampled if one.rank in ranks and one.thread == "pin" and one.phase in phases]
    assert counted(kept) == counted(expected)


@given(SAMPLED)
def test_the_top_table_counts_a_recursive_frame_once_per_sample(sampled: list[SampledStack]) -> None:
    totals = {one.frame: one for one in Profile.of(sampled).top()}
    for frame in {frame for one in sampled for frame in one.stack}:
        samples = sum(one.samples for one in sampled if frame in one.stack)
        leaf = sum(one.samples for one in sampled if one.stack and one.stack[0] == frame)
        assert totals[frame] == FrameTotal(frame, leaf, samples)


def test_the_top_table_starts_with_the_largest_own_sample_count() -> None:
    profile = Profile.of([SampledStack((READ, LOAD, MAIN), 3, 300), SampledStack((STEP, MAIN), 5, 500)])
    assert profile.top(2) == [FrameTotal(STEP, 5, 5), FrameTotal(READ, 3, 3)]


def test_a_frame_is_shown_with_its_file_and_line() -> None:
    assert str(LOAD) == "load_image (dataset.py:88)"
    assert str(Frame("ncclAllReduce", "libnccl.so.2", 0, NATIVE)) == "ncclAllReduce (libnccl.so.2)"
    assert str(Frame("sgemm", "", 0)) == "sgemm"


def test_native_frames_are_not_the_users_own_code() -> None:
    assert is_user_code(LOAD) and not is_user_code(READ)
    assert not is_user_code(LOAD._replace(kind=NATIVE))
