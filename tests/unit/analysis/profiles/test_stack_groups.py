"""Stacks of many ranks in groups: the odd rank first, and a place that its author can change."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.stack_groups import frame_of, frame_text, group_stacks

TORCH = "/venv/lib/python3.12/site-packages/torch"
STEP = "train_step (/app/train.py:40)"
MAIN = "<module> (/app/train.py:80)"


def in_all_reduce(line: int = 2810) -> list[str]:
    return [
        f"all_reduce ({TORCH}/distributed/distributed_c10d.py:{line})",
        f"wrapper ({TORCH}/distributed/c10d_logger.py:81)",
        STEP,
        MAIN,
    ]


IN_CHECKPOINT = [
    f"__init__ ({TORCH}/serialization.py:700)",
    f"save ({TORCH}/serialization.py:900)",
    "save_checkpoint (/app/ckpt.py:51)",
    MAIN,
]


def test_the_odd_rank_comes_first_and_both_places_are_named() -> None:
    stacks = {rank: in_all_reduce() for rank in range(64)} | {17: IN_CHECKPOINT}
    odd, rest = group_stacks(stacks)
    assert (odd.ranks, odd.phase, odd.frame) == ((17,), "checkpoint", Frame("save_checkpoint", "/app/ckpt.py", 51))
    assert (len(rest.ranks), rest.phase) == (63, "communication")
    assert [str(odd), str(rest)] == ["rank 17 in save_checkpoint (ckpt.py:51)", "63 ranks in all_reduce (train.py:40)"]


def test_of_two_ranks_the_non_waiting_one_comes_first() -> None:
    assert [group.ranks for group in group_stacks({0: in_all_reduce(), 1: IN_CHECKPOINT})] == [(1,), (0,)]


def test_only_lines_of_the_program_separate_ranks() -> None:
    assert [group.ranks for group in group_stacks({0: in_all_reduce(1), 1: in_all_reduce(2)})] == [(0, 1)]
    elsewhere = [line.replace("train.py:40", "train.py:44") for line in in_all_reduce()]
    assert [group.ranks for group in group_stacks({0: in_all_reduce(), 1: elsewhere})] == [(0,), (1,)]


def test_ranks_without_a_stack_or_program_lines_get_groups() -> None:
    unknown, library = group_stacks({0: [], 1: in_all_reduce()[:1]})
    assert (str(unknown), unknown.phase) == ("rank 0 in an unknown place", "")
    assert str(library) == "rank 1 in all_reduce (distributed_c10d.py:2810)"


def test_few_ranks_are_named_and_many_are_counted() -> None:
    assert [str(group) for group in group_stacks(dict.fromkeys((0, 1, 2, 5), in_all_reduce()))] == [
        "ranks 0-2,5 in all_reduce (train.py:40)"
    ]
    assert group_stacks({}) == []


@pytest.mark.parametrize(
    "frame",
    [
        Frame("main", "/app/train.py", 10),
        Frame("f", "", 0),
        Frame("<lambda>", "/a (b)/c.py", 0),
        Frame("f", "/a b/x.py", 3),
    ],
)
def test_a_frame_is_read_back_from_its_text(frame: Frame) -> None:
    assert frame_of(frame_text(frame)) == frame


def test_any_text_is_a_frame_that_can_be_printed() -> None:
    for text in ("", "f (", "f ()", "f (:9)", "\x1b[2J (x\n:3)", "f (a.py:99999999999999)", "f (x.py:²)", "(" * 9999):
        frame = frame_of(text)
        assert str(frame).isprintable() and len(str(frame)) <= 700


@given(st.dictionaries(st.integers(0, 99), st.lists(st.sampled_from([*in_all_reduce(), *IN_CHECKPOINT, "?"]))))
def test_every_rank_is_in_one_group(stacks: dict[int, list[str]]) -> None:
    groups = group_stacks(stacks)
    assert sorted(rank for group in groups for rank in group.ranks) == sorted(stacks)
    assert [len(group.ranks) for group in groups] == sorted(len(group.ranks) for group in groups)
