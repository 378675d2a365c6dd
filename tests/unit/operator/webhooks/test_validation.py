from __future__ import annotations

import time

import pytest

from rankscope.operator.webhooks.validation import capture_mistakes
from tests.support.measuring import Measured


@pytest.mark.parametrize("ranks", ["9" * 5000 + "-" + "9" * 5000, "9" * 1_000_000, "1-" * 200_000])
def test_ranks_of_any_length_pass_quickly_to_the_schema(ranks: str, measured: Measured) -> None:
    # The CPU time of a pattern that tries every beginning would be minutes.
    started = time.process_time()
    assert capture_mistakes({"spec": {"steps": 3, "ranks": ranks}}, None) == []
    measured("CPU time of a check of long ranks", time.process_time() - started, "s", at_most=10)


def test_an_empty_range_is_turned_round_in_words() -> None:
    assert capture_mistakes({"spec": {"steps": 3, "ranks": "0,5-3"}}, None) == [
        "spec.ranks: 5-3 is empty: write 3-5",
    ]
