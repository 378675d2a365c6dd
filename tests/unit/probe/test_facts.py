from __future__ import annotations

import os
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


def facts_of_group(store: Any) -> dict[str, Any]:
    distributed = SimpleNamespace(
        is_available=lambda: True,
        is_initialized=lambda: True,
        get_rank=lambda: 1,
        get_world_size=lambda: 2,
        distributed_c10d=SimpleNamespace(_get_default_store=lambda: store),
    )
    cuda = SimpleNamespace(is_initialized=lambda: True, current_device=lambda: 3, get_device_name=lambda: "H200")
    return Facts(SimpleNamespace(__version__="2.11", distributed=distributed, cuda=cuda)).gather()


def test_a_group_has_the_name_of_its_store() -> None:
    tcp = SimpleNamespace(host="localhost", port=29500)
    for wrapped in (tcp, SimpleNamespace(underlying_store=SimpleNamespace(underlying_store=tcp))):
        found = facts_of_group(wrapped)
        assert (found["rank"], found["world_size"], found["store"]) == (1, 2, "localhost:29500")
    assert facts_of_group(SimpleNamespace(path="/tmp/a/../store"))["store"] == "file:/tmp/store"
    assert facts_of_group(SimpleNamespace())["store"] == f"pid:{os.getpid()}"


def test_without_a_launcher_the_gpu_is_the_local_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert facts_of_group(SimpleNamespace())["local_rank"] == 3
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert facts_of_group(SimpleNamespace())["local_rank"] == 1


def test_without_a_group_no_store_is_named(facts: Facts) -> None:
    assert "store" not in facts.gather()
