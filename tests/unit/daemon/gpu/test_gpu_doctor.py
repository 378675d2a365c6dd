from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from rankscope.daemon.doctor_checks import Finding, Level, dcgm_answers, gpus_are_readable
from rankscope.daemon.gpu.readings import GpuSnapshot, GpuState, SourceState
from tests.unit.daemon import gpu_makers
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.gpu.test_dcgm import LABELS, NEW, served
from tools.daemon_samples import full_gpu


def found(snapshot: GpuSnapshot, driver_folder: Path) -> Finding:
    source = gpu_makers.FakeGpus(snapshot)
    (finding,) = gpus_are_readable(make.config(), lambda: source, driver_folder)
    assert (source.started, source.closed) == (1, 1)
    return finding


@pytest.mark.parametrize(
    ("snapshot", "level", "words"),
    [
        (gpu_makers.snapshot(full_gpu(), driver_version="580.1"), Level.OK, "1 × NVIDIA H200, driver 580.1"),
        (gpu_makers.snapshot(gpu_makers.gpu(0)), Level.WARNING, "without GPM"),
        (gpu_makers.snapshot(full_gpu(), gpu_makers.gpu(1, state=GpuState.LOST)), Level.PROBLEM, "1 of 2"),
        (GpuSnapshot("nvml", SourceState.NO_GPU), Level.OK, "no GPU"),
        (GpuSnapshot("nvml", SourceState.NO_DRIVER, "missing"), Level.WARNING, "missing"),
        (GpuSnapshot("nvml", SourceState.HANGING, "opening NVML hangs"), Level.WARNING, "opening NVML hangs"),
        (GpuSnapshot("nvml", SourceState.FAILED, "version mismatch"), Level.WARNING, "version mismatch"),
    ],
)
def test_each_driver_state_is_reported_with_a_next_step(
    snapshot: GpuSnapshot, level: Level, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rankscope.daemon.doctor_checks.PROFILE_SECONDS", 0.0)
    finding = found(snapshot, tmp_path)
    assert finding.level is level and words in finding.text
    assert finding.level is Level.OK or finding.next_step


def test_a_machine_without_a_driver_has_nothing_to_repair(tmp_path: Path) -> None:
    assert found(GpuSnapshot("nvml", SourceState.NO_DRIVER), tmp_path / "none").level is Level.OK


def test_gpus_that_are_turned_off_are_not_looked_for() -> None:
    (finding,) = gpus_are_readable(replace(make.config(), gpu=False), lambda: pytest.fail("looked"))
    assert finding.level is Level.OK


def test_an_exporter_is_examined_when_it_is_named() -> None:
    assert list(dcgm_answers(make.config())) == []
    bare = f"DCGM_FI_DEV_GPU_TEMP{{{LABELS}}} 50"
    for body, level in ((NEW, Level.OK), (bare, Level.WARNING), ("", Level.PROBLEM)):
        with served(body.encode()) as url:
            (finding,) = dcgm_answers(make.config(dcgm_url=url))
        assert finding.level is level
    (gone,) = dcgm_answers(make.config(dcgm_url=url))
    assert gone.level is Level.PROBLEM and gone.next_step
