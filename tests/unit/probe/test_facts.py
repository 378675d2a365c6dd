from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import rankscope.probe as api
from rankscope.probe.facts import Facts


@pytest.fixture
def facts() -> Iterator[Facts]:
    distributed = SimpleNamespace(is_available=lambda: False)
    cuda = SimpleNamespace(is_initialized=lambda: False)
    yield Facts(SimpleNamespace(__version__="2.11", distributed=distributed, cuda=cuda))
    api._tokens = None


def test_tokens_are_unknown_until_the_program_counts_them(facts: Facts) -> None:
    assert "tokens_per_step" not in facts.gather(10)
    api.count_tokens(0)
    assert facts.gather(10)["tokens_per_step"] == 0.0


def test_tokens_are_counted_per_step_since_the_last_look(facts: Facts) -> None:
    for _ in range(10):
        api.count_tokens(64)
        api.count_tokens(32)
    assert facts.gather(10)["tokens_per_step"] == 96.0
    api.count_tokens(50)
    assert facts.gather(1)["tokens_per_step"] == 50.0
    assert facts.gather(0)["tokens_per_step"] == 50.0  # no step has ended


def test_what_is_no_number_of_tokens_is_left_out(facts: Facts) -> None:
    api.count_tokens(10)
    given: list[Any] = [-5, float("nan"), "many", None, object()]
    for wrong in given:
        api.count_tokens(wrong)
    assert facts.gather(1)["tokens_per_step"] == 10.0
