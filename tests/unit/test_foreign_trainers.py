"""The benchmark of trainers that are not ours: its cells, the trainers' logs, and how a trainer is slowed and ended."""

from __future__ import annotations

import argparse
import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.gpu.foreign_cells import FAULTS, LAYOUTS, TRAINERS, Cell, all_cells, batches
from benchmarks.gpu.foreign_rows import iterations
from benchmarks.running import ROOT

CELLS = {cell.name: cell for cell in all_cells()}
LOGS = {
    "megatron": " [2026-11-19 10:00:00] iteration       10/  100000 | consumed samples: 160 | "
    "elapsed time per iteration (ms): 213.4 | learning rate: 1.0E-04 |\n",
    "nanogpt": "step 9: train loss 10.8, val loss 10.8\niter 9: loss 10.8204, time 213.40ms, mfu 1.20%\n",
    "deepspeed": "steps: 10 loss: 2.3026 iter time (s): 0.213 samples/sec: 600.939\n",
}


@pytest.fixture
def fault_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """foreign_fault.py, which finds its neighbours as a script does."""
    pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks/gpu"))
    return importlib.import_module("foreign_fault")


def asked(folder: Path, trainer: str, every: int = 1) -> argparse.Namespace:
    return argparse.Namespace(
        folder=folder, trainer=trainer, fault="host", rank=0, every=every, after=22.0, seconds=50.0, pairs=0
    )


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("trainer", TRAINERS)
def test_iteration_times_are_read_from_each_log(trainer: str) -> None:
    [(steps, millis)] = iterations(TRAINERS[trainer], LOGS[trainer])
    assert steps == 10
    assert millis == pytest.approx(213.4, abs=0.5)


def test_cells_of_a_batch_take_equally_long() -> None:
    for parallel in (1, 2, 3):
        made = batches(list(CELLS.values()), max(2, parallel))
        assert sorted(cell.name for batch in made for cell in batch) == sorted(CELLS)
        assert all(len({cell.fault.more_seconds for cell in batch}) == 1 for batch in made)


def test_faults_in_few_steps_get_more_time() -> None:
    assert all((fault.more_seconds > 0) is (fault.every > 1) for fault in FAULTS)


def test_each_layout_runs_once_before_any_runs_twice() -> None:
    first_round = [cell.layout for cell in all_cells()[: len(LAYOUTS)]]
    assert first_round == list(LAYOUTS)


@pytest.mark.parametrize(
    ("name", "culprits", "is_right"),
    [
        ("deepspeed-pp4-host", [2], True),
        ("pp4-interleaved-host", [2], True),
        ("pp4-host", [1], False),
        ("deepspeed-pp2-dp2-host", [2], False),
    ],
)
def test_a_stage_is_as_right_as_its_only_rank(name: str, culprits: list[int], is_right: bool) -> None:
    cell: Cell = CELLS[name]
    assert cell.is_blamed("slow_stage", culprits, None) is is_right
    assert cell.is_blamed("slow_rank", culprits, None) is (culprits == [2])


def test_the_training_loop_ends_at_the_agreed_step(
    fault_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setattr(fault_module, "time", argparse.Namespace(monotonic=clock, time=clock, monotonic_ns=lambda: 0))
    session = fault_module.Session(asked(tmp_path, "deepspeed", every=10))
    optimizer, slow = object(), []
    for step in session.steps(100_000):
        if session.is_slow:
            slow.append(step)
        clock.now += 0.5
        session.step_ended(optimizer)
    last = int((tmp_path / "last-step").read_text())
    assert step + 1 == last
    assert clock.now - 1000.0 == pytest.approx(50, abs=4)
    assert slow == list(range(50, last, 10))  # from 22 s after the first step on
    assert re.search(r'"step": 45\b', (tmp_path / "fault.json").read_text())


def test_stand_in_pictures_are_the_same_in_each_process(fault_module: ModuleType) -> None:
    parts = importlib.import_module("foreign_stand_ins")
    scale = parts.Normalize(mean=[0.485, 0.456, 0.406], std=[0.229, 0.224, 0.225])
    transform = parts.Compose([parts.Resize(256), parts.CenterCrop(224), parts.ToTensor(), scale])
    sets = [parts.RandomPictures(root="", train=True, download=True, transform=transform) for _ in range(2)]
    (picture, label), (same, same_label) = (pictures[17] for pictures in sets)
    assert (label, same_label) == (7, 7)
    assert tuple(picture.shape) == (3, 224, 224)
    assert picture.equal(same) and not picture.equal(sets[0][18][0])
    assert picture.is_floating_point() and abs(float(picture.mean())) < 1
