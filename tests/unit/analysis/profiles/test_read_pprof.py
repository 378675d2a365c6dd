from __future__ import annotations

import gzip
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from rankscope.analysis.profiles.frames import KERNEL, Frame
from rankscope.analysis.profiles.pprof import PprofError, pprof, read_pprof
from rankscope.analysis.profiles.profile import Profile, SampledStack, merge
from rankscope.pprof import profile_pb2 as pb

MAIN = Frame("main", "/app/train.py", 10)
LOAD = Frame("load_image", "/app/dataset.py", 88)
GEMM = Frame("sm90_gemm", "", 0, KERNEL)
SAMPLED = [
    SampledStack((LOAD, MAIN), 41, 4_100_000_000, 3, "MainThread", "input"),
    SampledStack((LOAD, LOAD, MAIN), 2, 200_000_000, 1, "pin", "input"),
    SampledStack((GEMM, MAIN), 7, 700_000_000, 3, "MainThread", ""),
    SampledStack((), 1, 100_000_000, 0, "", ""),
]


def message() -> pb.Profile:
    return pb.Profile.FromString(gzip.decompress(pprof(Profile.of(SAMPLED))))


def packed(profile: pb.Profile) -> bytes:
    return gzip.compress(profile.SerializeToString())


def test_what_is_written_is_read_back() -> None:
    assert Counter(read_pprof(pprof(Profile.of(SAMPLED)))) == Counter(SAMPLED)
    assert read_pprof(pprof(Profile.of(()))).samples_total == 0


def test_profiles_of_several_nodes_can_be_merged_after_reading() -> None:
    parts = [read_pprof(pprof(Profile.of([one]))) for one in SAMPLED]
    assert Counter(merge(parts)) == Counter(SAMPLED)
    doubled = merge([*parts, *parts])
    assert doubled.samples_total == 2 * Profile.of(SAMPLED).samples_total


def test_bytes_that_are_no_profile_are_refused() -> None:
    whole = pprof(Profile.of(SAMPLED))
    for content in (b"", b"x", whole[:-9], gzip.compress(b"\xff" * 99), gzip.compress(b"")):
        with pytest.raises(PprofError):
            read_pprof(content)


@pytest.mark.parametrize(
    "break_it",
    [
        lambda one: one.sample[0].location_id.append(99),
        lambda one: one.sample[0].value.pop(),
        lambda one: one.sample[0].label.pop(0),
        lambda one: one.sample[0].value.__setitem__(0, -1),
        lambda one: [sample.value.__setitem__(1, (1 << 62) - 1) for sample in one.sample],
        lambda one: setattr(one.sample[0].label[0], "num", -3),
        lambda one: setattr(one.sample[0].label[0], "key", -1),
        lambda one: setattr(one.function[0], "name", 1 << 40),
        lambda one: setattr(one.location[0].line[0], "line", -1),
        lambda one: one.sample[0].location_id.extend([1] * 5000),
        lambda one: one.ClearField("sample_type"),
    ],
)
def test_numbers_that_cannot_be_are_refused(break_it: Callable[[Any], object]) -> None:
    broken = message()
    break_it(broken)
    with pytest.raises(PprofError):
        read_pprof(packed(broken))


def test_a_profile_that_expands_beyond_the_limit_is_refused() -> None:
    with pytest.raises(PprofError, match="larger than"):
        read_pprof(gzip.compress(bytes(65 << 20), 1))


def test_names_are_made_printable_and_cut() -> None:
    hostile = message()
    hostile.string_table[:] = [text and text + "\x1b[2J" * 999 for text in hostile.string_table]
    for kind, (name, unit) in zip(hostile.sample_type, (("samples", "count"), ("wall", "nanoseconds")), strict=True):
        hostile.string_table.extend([name, unit])
        kind.type, kind.unit = len(hostile.string_table) - 2, len(hostile.string_table) - 1
    hostile.string_table.append("rank")
    for sample in hostile.sample:
        sample.label[0].key = len(hostile.string_table) - 1
    read = read_pprof(packed(hostile))
    assert read.frames and all(frame.function.isprintable() and len(frame.function) <= 512 for frame in read.frames)
