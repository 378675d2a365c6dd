from __future__ import annotations

import pytest

from rankscope.common.rank_selection import Suspected, rank_ranges
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.captures.request import choose_ranks, choose_run

SLOW = Suspected((2,), (3, 0), "rank 2 is slow")


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        ("all", [0, 1, 2, 3]),
        ("", [0, 1, 2, 3]),
        ("1", [1]),
        ("0,3", [0, 3]),
        (" 5 - 7".replace(" ", ""), [5, 6, 7]),
        ("3,1-2,2", [1, 2, 3]),
        ("straggler", [2]),
        ("straggler+peer", [2, 3]),
    ],
)
def test_ranks_are_chosen_by_words_numbers_and_ranges(text: str, ranks: list[int]) -> None:
    assert choose_ranks(text, "job", [3, 1, 0, 2], 8, lambda job: SLOW) == ranks


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("8", "the job has ranks 0 to 7"),
        ("3-1", "as in 1-3"),
        ("0-99999999999", "numbers and ranges"),
        ("1;rm -rf", "numbers and ranges"),
        ("-1", "numbers and ranges"),
        ("0," * 3000, "characters"),
    ],
)
def test_what_is_no_rank_is_refused_with_what_is_one(text: str, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        choose_ranks(text, "job", [0], 8, lambda job: None)


def test_a_straggler_can_only_be_captured_while_there_is_one() -> None:
    with pytest.raises(CaptureError, match="run 'job': no rank is slow now: all is well; name ranks"):
        choose_ranks("straggler", "job", [0, 1], 2, lambda job: Suspected((), (), "all is well"))


def test_a_straggler_without_a_healthy_peer_is_refused() -> None:
    with pytest.raises(CaptureError, match="no healthy rank of the same role"):
        choose_ranks("straggler+peer", "job", [0], 1, lambda job: Suspected((0,), ()))


def test_the_job_may_be_left_out_where_there_is_one() -> None:
    assert choose_run("", {"only"}) == "only"
    assert choose_run("b", {"a", "b"}) == "b"


@pytest.mark.parametrize(
    ("wanted", "jobs", "words"),
    [
        ("", set(), "no run is seen now; `rankscope top` shows"),
        ("", {"a", "b"}, "several runs are seen: a, b; name one with --run"),
        ("c", {"a"}, "no run 'c' is seen now; there is a"),
    ],
)
def test_a_job_that_is_not_clear_is_asked_for(wanted: str, jobs: set[str], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        choose_run(wanted, jobs)


@pytest.mark.parametrize("wanted", ["", "c", "c" * 60_000])
def test_a_remote_caller_never_sees_other_jobs_names(wanted: str) -> None:
    with pytest.raises(CaptureError) as raised:
        choose_run(wanted, {"secret-a", "secret-b"}, names_others=False)
    assert "secret" not in str(raised.value)
    assert len(str(raised.value)) < 300


def test_a_selection_from_millions_of_ranks_is_bounded() -> None:
    with pytest.raises(CaptureError, match="131072 at most"):
        choose_ranks("0-9999999", "job", [0, 1], 10_000_000, lambda job: None)
    assert len(choose_ranks("0-131071", "job", [0, 1], 10_000_000, lambda job: None)) == 131_072


@pytest.mark.parametrize(("numbers", "text"), [([], ""), ([4], "4"), ([3, 0, 1, 2, 7, 9, 8], "0-3,7-9")])
def test_ranks_are_written_as_ranges(numbers: list[int], text: str) -> None:
    assert rank_ranges(numbers) == text
