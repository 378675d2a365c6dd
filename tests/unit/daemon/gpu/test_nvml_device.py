"""What the driver says, in base units, through pynvml and ctypes against the stub."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rankscope.daemon.gpu import nvml
from rankscope.daemon.gpu.nvml_device import Cadence, Rate
from rankscope.daemon.gpu.readings import GpuProcess, GpuState
from tests.unit.daemon.gpu.stubbed_source import Stubbed
from tools.nvml_stub import Script

Start = Callable[..., Stubbed]
MEBIBYTE = 1024 * 1024


def test_reads_every_value_in_base_units(stubbed: Start, script: Script) -> None:
    script.set(
        {
            "gpus": 2,
            "gpu.1.utilization": 97,
            "gpu.1.memory_used": 5 * MEBIBYTE,
            "gpu.1.memory_total": 100 * MEBIBYTE,
            "gpu.1.power": 512_250,
            "gpu.1.power_limit": 600_000,
            "gpu.1.energy": 1_500,
            "gpu.1.temperature": 71,
            "gpu.1.sm_clock": 1755,
            "gpu.1.memory_clock": 3100,
            "gpu.1.memory_clock_max": 3201,
            "gpu.1.ecc.aggregate.uncorrected": 3,
            "gpu.1.remapped.correctable": 2,
            "gpu.1.remapped.pending": 1,
            "gpu.1.retired.double_bit": 4,
            "gpu.1.processes": "412:1048576,7",
            "gpu.1.mps_processes": "7:2048",
        }
    )
    snapshot = stubbed().until_ok()
    first, gpu = snapshot.gpus
    assert snapshot.driver_version == "580.159.04"
    assert (first.index, gpu.index, gpu.name, gpu.parent_uuid) == (0, 1, "NVIDIA H200", None)
    assert first.uuid != gpu.uuid
    assert gpu.utilization_ratio == 0.97
    assert (gpu.memory_used_bytes, gpu.memory_total_bytes) == (5 * MEBIBYTE, 100 * MEBIBYTE)
    assert (gpu.power_watts, gpu.power_limit_watts, gpu.energy_joules) == (pytest.approx(512.25), 600.0, 1.5)
    assert (gpu.temperature_celsius, first.temperature_celsius) == (71.0, 65.0)
    assert (gpu.sm_clock_hertz, gpu.sm_clock_max_hertz) == (1755e6, 1980e6)
    assert (gpu.memory_clock_hertz, gpu.memory_clock_max_hertz) == (3100e6, 3201e6)
    assert gpu.ecc_errors == {
        ("volatile", "corrected"): 0,
        ("volatile", "uncorrected"): 0,
        ("aggregate", "corrected"): 0,
        ("aggregate", "uncorrected"): 3,
    }
    assert gpu.remapped_rows == {"correctable": 2, "uncorrectable": 0}
    assert (gpu.remapping_pending, gpu.remapping_failed) == (True, False)
    assert gpu.retired_pages == {"double_bit": 4}
    assert gpu.processes == (GpuProcess(7, 2048), GpuProcess(412, MEBIBYTE))


def test_gpm_tells_what_the_chip_did_since_the_reading_before(stubbed: Start, script: Script) -> None:
    values = {2: 90.7, 3: 29.7, 5: 57.4, 7: 57.0, 9: 0.4, 6: 0, 10: 28.3, 11: 1, 12: 2, 13: 3, 20: 10, 21: 20, 60: 30}
    script.set({f"gpu.gpm.{metric}": value for metric, value in values.items()} | {"gpu.gpm.61": "unsupported"})
    gpu = stubbed().until(lambda now: bool(now.gpus and now.gpus[0].tensor_active_ratio)).gpus[0]
    assert (gpu.sm_active_ratio, gpu.sm_occupancy_ratio) == (pytest.approx(0.907), pytest.approx(0.297))
    assert gpu.tensor_active_ratio == pytest.approx({"any": 0.574, "hmma": 0.57, "imma": 0.004, "dfma": 0.0})
    assert gpu.pipe_active_ratio == pytest.approx({"fp64": 0.01, "fp32": 0.02, "fp16": 0.03})
    assert gpu.dram_active_ratio == pytest.approx(0.283)
    assert gpu.pcie_transmit_bytes_per_second == 10 * MEBIBYTE
    assert gpu.pcie_receive_bytes_per_second == 20 * MEBIBYTE
    assert gpu.nvlink_receive_bytes_per_second == 30 * MEBIBYTE
    assert gpu.nvlink_transmit_bytes_per_second is None


def test_a_nan_from_gpm_is_not_measured(stubbed: Start, script: Script) -> None:
    """So the first DRAM figure of an H200 comes out now and then."""
    script.set({"gpu.gpm.5": 57.4, "gpu.gpm.10": "nan"})
    gpu = stubbed().until(lambda now: bool(now.gpus and now.gpus[0].tensor_active_ratio)).gpus[0]
    assert (gpu.tensor_active_ratio["any"], gpu.dram_active_ratio) == (pytest.approx(0.574), None)


def test_a_gpu_without_gpm_has_link_rates_but_no_activity(stubbed: Start, script: Script) -> None:
    script.set({"gpu.gpm": 0, "gpu.pcie_transmit": 1500, "gpu.pcie_receive": 2500, "gpu.field.138": 1000})
    started = stubbed(interval_seconds=0.25)  # PCIe takes 20 ms for each direction
    gpu = started.until_ok().gpus[0]
    assert (gpu.sm_active_ratio, gpu.tensor_active_ratio, gpu.dram_active_ratio) == (None, {}, None)
    assert (gpu.pcie_transmit_bytes_per_second, gpu.pcie_receive_bytes_per_second) == (1.5e6, 2.5e6)
    assert gpu.nvlink_receive_bytes_per_second is None  # that counter is not there
    script.set({"gpu.field.138": 2000})
    started.until(lambda now: (now.gpus[0].nvlink_transmit_bytes_per_second or 0) > 0)


def test_a_rate_needs_two_counts_of_a_counter_that_grows() -> None:
    rate = Rate()
    assert rate.per_second(1000, 10.0) is None
    assert rate.per_second(4000, 12.0) == 1500.0
    assert rate.per_second(10, 13.0) is None  # it restarted
    assert rate.per_second(None, 14.0) is None
    assert rate.per_second(30, 15.0) is None
    assert rate.per_second(30, 16.0) == 0.0


def test_unsupported_values_are_asked_again_only_after_a_reload(stubbed: Start, script: Script) -> None:
    script.set({"gpu.error.nvmlDeviceGetPowerUsage": 3})
    started = stubbed()
    gpu = started.until_ok(5).gpus[0]
    assert gpu.power_watts is None
    assert gpu.state is GpuState.OK
    assert started.source.latest().problems == ()
    assert started.calls("nvmlDeviceGetPowerUsage") == 1
    script.set({"gpu.error.nvmlDeviceGetPowerUsage": None, "reload": 1})
    assert started.until(lambda now: bool(now.gpus and now.gpus[0].power_watts)).gpus[0].power_watts


def test_an_older_driver_is_asked_with_older_functions(stubbed: Start, script: Script) -> None:
    newer = ("nvmlDeviceGetTemperatureV", "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetCurrentClocksEventReasons")
    script.set({f"error.{name}": 13 for name in newer} | {"gpu.temperature": 44, "gpu.reasons": 0})
    gpu = stubbed().until_ok().gpus[0]
    assert gpu.temperature_celsius == 44.0
    assert gpu.memory_used_bytes == 1267531776 + 644939776  # the first version counts the driver's own
    assert gpu.throttled_seconds["power_cap"] == 0.0


def test_a_transient_error_costs_one_value_and_is_reported(stubbed: Start, script: Script) -> None:
    script.set({"gpu.error.nvmlDeviceGetPowerUsage": 999})
    started = stubbed()
    snapshot = started.until_ok()
    assert snapshot.gpus[0].power_watts is None
    assert snapshot.gpus[0].temperature_celsius == 65.0
    assert "nvmlDeviceGetPowerUsage" in snapshot.problems[0]
    script.set({"gpu.error.nvmlDeviceGetPowerUsage": None})
    started.until(lambda now: now.gpus[0].power_watts is not None and not now.problems)


def test_costly_values_are_not_read_with_every_poll(stubbed: Start) -> None:
    started = stubbed(cadence=Cadence(energy_seconds=600.0))
    started.until(lambda _: started.calls("nvmlDeviceGetUtilizationRates") >= 10)
    assert started.calls("nvmlDeviceGetTotalEnergyConsumption") == 1
    assert started.calls("nvmlDeviceGetMaxClockInfo") == 2
    assert started.calls("nvmlDeviceGetPcieThroughput") == 0  # GPM tells
    assert started.until_ok().gpus[0].energy_joules is not None


def test_energy_goes_on_between_readings_of_its_counter(stubbed: Start, script: Script) -> None:
    script.set({"gpu.energy": 1_000_000, "gpu.power": 600_000})
    started = stubbed(cadence=Cadence())
    started.until_ok()
    later = started.until(lambda now: (now.gpus[0].energy_joules or 0) > 1000 + 300)
    assert started.calls("nvmlDeviceGetTotalEnergyConsumption") == 1
    # The library is reopened, and the counter is behind what was told by then: it waits.
    script.set({"reload": 1, "gpu.energy": 1_000_100})
    started.until(lambda _: started.calls("nvmlDeviceGetTotalEnergyConsumption") > 1)
    again = started.until_ok()
    assert (again.gpus[0].energy_joules or 0) >= (later.gpus[0].energy_joules or 0)


def test_mig_instances_have_memory_processes_and_gpm_of_their_own(stubbed: Start, script: Script) -> None:
    script.set({"mig.0": 2, "gpu.0.mig.1.memory_used": 77, "gpu.0.mig.1.processes": "9:77", "gpu.0.mig.1.gpm.5": 12})
    started = stubbed()
    whole, idle, busy = started.until(lambda now: len(now.gpus) == 3 and bool(now.gpus[2].tensor_active_ratio)).gpus
    assert (whole.processes, whole.sm_active_ratio, whole.temperature_celsius) == (None, None, 65.0)
    assert busy.uuid.startswith("MIG-")
    assert (busy.parent_uuid, busy.index, busy.name) == (whole.uuid, 0, "NVIDIA H200 MIG 1g.18gb")
    assert (busy.memory_used_bytes, busy.processes, busy.power_watts) == (77, (GpuProcess(9, 77),), None)
    assert (busy.tensor_active_ratio["any"], idle.tensor_active_ratio["any"]) == (0.12, 0.0)
    # Errors are the whole GPU's.
    assert started.until(lambda now: now.gpus[0].xid_errors == {}).gpus[2].xid_errors is None
    script.set({"mig.0": 1})
    started.until(lambda now: [gpu.uuid for gpu in now.gpus] == [whole.uuid, idle.uuid])
    script.set({"mig.0": 0})
    alone = started.until(lambda now: len(now.gpus) == 1 and now.gpus[0].sm_active_ratio is not None).gpus[0]
    assert alone.processes == ()


def test_keeps_what_was_read_for_a_while(stubbed: Start) -> None:
    started = stubbed()
    started.until_ok(6)
    taken = [snapshot.taken_unix_nanos for snapshot in started.source.since(0) if snapshot.gpus]
    assert taken == sorted(taken)
    assert len(taken) >= 6
    later = started.source.since(taken[2])
    assert all(snapshot.taken_unix_nanos > taken[2] for snapshot in later)
    assert later[-1].poll_seconds_total > 0


def test_closing_gives_everything_back(stubbed: Start, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "CLOSING_SECONDS", 180.0)
    script.set({"mig.0": 2, "gpus": 2})
    started = stubbed()
    started.until(lambda now: len(now.gpus) == 4 and bool(now.gpus[1].sm_active_ratio is not None))
    started.until(lambda _: started.library.stub_live_samples() == 6)
    started.source.close()
    assert started.library.stub_live_samples() == 0
    assert started.library.stub_live_event_sets() == 0
    assert started.library.stub_initialized() == 0
