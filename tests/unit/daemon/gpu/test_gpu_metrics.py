from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.daemon.gpu.collector import GpuStatus
from rankscope.daemon.gpu.readings import GpuState
from tests.unit.daemon import gpu_makers
from tests.unit.daemon import test_metrics as exporting
from tools.daemon_samples import full_gpu, gpu_status


def told(status: GpuStatus, detail: str = "full") -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    text = exporting.scrape(status=replace(exporting.STATUS, gpu=status, metrics_detail=detail))
    return {key: value for key, value in exporting.series(text).items() if key[0].startswith("rankscope_gpu_")}


def names(status: GpuStatus) -> set[str]:
    return {name.removeprefix("rankscope_gpu_") for name, labels in told(status) if "gpu" in dict(labels)}


def test_a_lost_gpu_keeps_its_counters_but_no_gauges() -> None:
    lost = replace(full_gpu(), state=GpuState.LOST)
    kept = {"info", "up", "throttled_seconds_total", "xid_errors_total", "ecc_errors_total", "energy_joules_total"}
    assert names(gpu_status(lost)) == kept
    up = [value for (name, _), value in told(gpu_status(lost, full_gpu(1))).items() if name.endswith("_up")]
    assert sorted(up) == [0, 1]
    assert names(gpu_status(full_gpu(), fresh=False)) == kept


def test_what_a_gpu_does_not_tell_has_no_series() -> None:
    assert names(gpu_status(gpu_makers.gpu(0))) == {"info", "up", "shared"}


def test_two_gpus_with_one_name_do_not_spoil_the_scrape() -> None:
    assert told(gpu_status(full_gpu(), full_gpu()))


def test_a_hostile_name_stays_a_short_label() -> None:
    gpu = replace(full_gpu(), uuid='x"} 1\nfake 7' + "y" * 9999, name="\x1b[31m" * 999)
    assert max(len(value) for _, labels in told(gpu_status(gpu)) for _, value in labels) <= 128


def test_no_number_is_no_series() -> None:
    gpu = gpu_makers.gpu(0, power_watts=float("nan"), energy_joules=-1.0, temperature_celsius=float("inf"))
    assert names(gpu_status(gpu)) == {"info", "up", "shared"}


def test_the_estimate_is_exported_and_smaller_than_the_utilisation() -> None:
    values = {name: value for (name, labels), value in told(gpu_status(full_gpu()), "standard").items()}
    assert values["rankscope_gpu_tensor_active_ratio"] == 0.574
    assert values["rankscope_gpu_estimated_hfu_ratio"] == pytest.approx(0.574 * 1755 / 1980)
    assert values["rankscope_gpu_estimated_flops_per_second"] == pytest.approx(525e12, rel=0.05)


def test_the_state_of_the_source_is_one_series() -> None:
    states = [dict(labels) for name, labels in told(gpu_status()) if name == "rankscope_gpu_source_state"]
    assert states == [{"source": "nvml", "state": "ok"}]
