from __future__ import annotations

import pytest

from rankscope.common.run_names import run_labels, run_name


@pytest.mark.parametrize(
    ("name", "namespace", "run"),
    [
        ("team/pytorchjob-llama", "team", "pytorchjob-llama"),
        ("llama-4711", "", "llama-4711"),
        ("10.0.0.1:29500", "", "10.0.0.1:29500"),
        ("", "", ""),
    ],
)
def test_a_name_and_its_labels_stand_for_each_other(name: str, namespace: str, run: str) -> None:
    assert run_labels(name) == {"run_namespace": namespace, "run": run}
    assert run_name(namespace, run) == name
