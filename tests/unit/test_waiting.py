from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support import waiting
from tests.support.waiting import wait_until


def test_what_the_condition_found_is_returned() -> None:
    found = iter(["", [], 0, "it"])
    assert wait_until(lambda: next(found)) == "it"


def test_in_vain_is_told_with_the_explanation() -> None:
    with pytest.raises(AssertionError, match=r"^waited 0\.01 s in vain\nthe reason$"):
        wait_until(lambda: False, lambda: "the reason", seconds=0.01)


def test_a_condition_that_becomes_true_during_a_stall_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([0.0, 1.0, 1000.0])
    monkeypatch.setattr(waiting, "time", SimpleNamespace(monotonic=lambda: next(clock), sleep=lambda seconds: None))
    answers = iter([False, True])
    assert wait_until(lambda: next(answers))
