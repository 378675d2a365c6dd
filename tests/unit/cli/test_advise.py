"""`rankscope advise`: what would help, why, where, and what is in use already."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.shared_data import H200, ROOT
from tests.support.commands import Command

LAUNCH_BOUND = H200 / "launch_bound.json.gz"
MATRIX_BOUND = H200 / "matrix_bound.json.gz"
STRAGGLER = sorted(H200.glob("ddp_straggler_rank*.json.gz"))


@pytest.fixture
def advise(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "advise")


def test_remedies_are_ranked_with_evidence_and_price(advise: Command) -> None:
    out = advise.answer(LAUNCH_BOUND, "--step-ms", "14.75")
    graph, fused = out.index("1. graph: 59.9 % of the step"), out.index("2. fused: 6.6 % of the step")
    assert "why: in a step: the host 14.6 ms → 30 µs" in out[graph:fused]
    assert "do: fused=True for the optimizer" in out[fused:] and "costs: nothing" in out[fused:]
    assert "together: graph+fused 62.2 %" in out
    assert "other batches or updates: batch2 50.0 % per sample" in out
    # What was predicted to bring nothing is not advised by another name.
    assert "tensor cores:" not in out


def test_the_checklist_is_answered(advise: Command) -> None:
    checks = {one["question"]: one for one in advise.json(*STRAGGLER)["checks"]}
    assert [(name, one["answer"]) for name, one in checks.items()] == [
        ("low MFU", True),
        ("exposed communication", True),
        ("slow input", False),
        ("memory pressure", None),
    ]
    assert "profile_memory=True" in checks["memory pressure"]["evidence"]


def test_a_slow_rank_is_among_the_reasons(advise: Command) -> None:
    out = advise.answer(*STRAGGLER, "--step-ms", "27.26")
    assert "even: 17.9 % of the step" in out
    assert "why: rank 2: " in out


def test_what_is_in_use_is_named(advise: Command) -> None:
    assert "In use: fused attention\n" in advise.answer(MATRIX_BOUND)


def test_what_cannot_be_replayed_is_still_diagnosed(advise: Command) -> None:
    out = advise.answer(H200 / "nccl_world1_3steps.json.gz", status=3)
    assert "No gain can be predicted: no step was recorded as a whole." in out
    assert "kernels that only move data: " in out and "In use: matrix products in 16 bits or fewer" in out


def test_every_key_is_documented(advise: Command) -> None:
    page = (ROOT / "docs" / "advise.md").read_text()
    read = advise.json(STRAGGLER[0])
    keys = {*read, "evidence", "lines", *read["checks"][0]}
    assert [key for key in sorted(keys) if f"`{key}`" not in page] == []


def test_broken_files_are_named(advise: Command, tmp_path: Path) -> None:
    broken = tmp_path / "trace.json"
    broken.write_text("not a trace")
    err = advise.complaint(broken)
    assert str(broken) in err and "next step: " in err
