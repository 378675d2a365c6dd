"""One GPU and its MIG instances, read through NVML."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from rankscope.daemon.gpu import nvml_calls
from rankscope.daemon.gpu.nvml_calls import Asker, GpuLostError
from rankscope.daemon.gpu.nvml_counters import COUNTERS, EnergyMeter, GpmWindow, ThrottleClock, running_processes
from rankscope.daemon.gpu.readings import GpuReading, GpuState

Value = TypeVar("Value")

ALL_LINKS: Final = 0xFFFFFFFF
# Counters of KiB over NVLink, where GPM does not measure it.
NVLINK_FIELDS: Final[Mapping[int, str]] = {
    138: "nvlink_transmit_bytes_per_second",
    139: "nvlink_receive_bytes_per_second",
}
_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG = 1, 2, 3
_GPU_SENSOR: Final = 0
_SM, _MEMORY = 1, 2  # clocks
_CORRECTED, _UNCORRECTED = 0, 1
_VOLATILE, _AGGREGATE = 0, 1
_SINGLE_BIT, _DOUBLE_BIT = 0, 1
_PCIE_TRANSMIT, _PCIE_RECEIVE = 0, 1


class FieldCounters:
    """Field values: many counters in one call, each with an error of its own. Those that are not supported are left out
    from the second reading on."""

    def __init__(self, asker: Asker, fields: Sequence[tuple[int, int]]) -> None:
        self._asker = asker
        self._fields = list(fields)

    def read(self) -> Mapping[int, int]:
        """By field id."""
        if not self._fields:
            return {}
        values = self._asker.ask("nvmlDeviceGetFieldValues", tuple(self._fields))
        if values is None:
            return {}
        found: dict[int, int] = {}
        for value in values:
            if value.nvmlReturn in nvml_calls.UNSUPPORTED:
                self._fields = [field for field in self._fields if field[0] != value.fieldId]
            elif value.nvmlReturn == 0 and value.valueType in (_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG):
                wide = value.valueType != _UNSIGNED_INT
                found[value.fieldId] = int(value.value.ullVal if wide else value.value.uiVal)
        return found


class Rate:
    """How fast a counter grows."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def per_second(self, count: int | None, at_seconds: float) -> float | None:
        before, self._last = self._last, None if count is None else (count, at_seconds)
        if before is None or count is None or count < before[0] or at_seconds <= before[1]:
            return None
        return (count - before[0]) / (at_seconds - before[1])


@dataclass(frozen=True)
class _Instance:
    uuid: str
    name: str
    asker: Asker
    # Of the GPU instance: compute instances inside the same one share its figures.
    gpm: GpmWindow | None


class MigInstances:
    """The MIG instances of a GPU. Each has memory, processes and GPM figures of its own; clocks, power, temperature and
    errors are those of the whole GPU."""

    def __init__(self, asker: Asker, parent: GpuReading) -> None:
        self._asker = asker
        self._parent = parent
        self._instances: dict[str, _Instance] = {}

    def find(self) -> bool:
        """Find the instances there are now. Returns whether the GPU is in MIG mode."""
        mode = self._asker.ask("nvmlDeviceGetMigMode")
        if mode is None or mode[0] == 0:
            self.close()
            return False
        supports_gpm = self._asker.ask("nvmlGpmQueryDeviceSupport")
        found: dict[str, _Instance] = {}
        for index in range(self._asker.ask("nvmlDeviceGetMaxMigDeviceCount") or 0):
            # Places may be empty: not found, which is no failure.
            handle = self._asker.ask("nvmlDeviceGetMigDeviceHandleByIndex", index)
            if handle is None:
                continue
            asker = Asker(self._asker.nvml, handle, self._asker.watch)
            uuid = asker.ask("nvmlDeviceGetUUID")
            if uuid is None:
                continue
            known = self._instances.pop(uuid, None)
            # The handle of an instance that was removed and created again is another one.
            found[uuid] = known or self._instance(uuid, asker, supports_gpm)
        self.close()
        self._instances = found
        return True

    def read(self) -> tuple[GpuReading, ...]:
        readings = (self._reading(instance) for instance in self._instances.values())
        # An instance that was removed since `find` gives nothing.
        return tuple(reading for reading in readings if reading.memory_total_bytes is not None)

    def close(self) -> None:
        instances, self._instances = self._instances, {}
        for instance in instances.values():
            if instance.gpm is not None:
                instance.gpm.close()

    def _instance(self, uuid: str, asker: Asker, supports_gpm: Any) -> _Instance:
        gpu_instance = asker.ask("nvmlDeviceGetGpuInstanceId")
        gpm = None
        if gpu_instance is not None and supports_gpm is not None and supports_gpm.isSupportedDevice:
            # Samples are taken of the whole GPU's handle, for one instance.
            gpm = GpmWindow(Asker(self._asker.nvml, self._asker.handle, self._asker.watch), gpu_instance)
        return _Instance(uuid, asker.ask("nvmlDeviceGetName") or "MIG instance", asker, gpm)

    def _reading(self, instance: _Instance) -> GpuReading:
        memory = instance.asker.ask("nvmlDeviceGetMemoryInfo", instance.asker.nvml.nvmlMemory_v2)
        return GpuReading(
            uuid=instance.uuid,
            index=self._parent.index,
            name=instance.name,
            parent_uuid=self._parent.uuid,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            processes=running_processes(instance.asker),
            **({} if instance.gpm is None else instance.gpm.read()),
        )


@dataclass(frozen=True)
class Cadence:
    """How often to read what is expensive or changes slowly; everything else is read with every poll. Measured on an
    H200: energy 4.3 ms of CPU a call, maximum clocks 1.4 ms, MIG mode 0.16 ms, PCIe throughput without GPM 20 ms of
    waiting for each direction. With these periods a poll takes 0.8 ms on average."""

    energy_seconds: float = 30.0
    maxima_seconds: float = 600.0
    health_seconds: float = 10.0  # ECC, remapped rows, retired pages, power limit, MIG instances
    processes_seconds: float = 5.0
    pcie_seconds: float = 10.0


class DeviceReader:
    """One GPU. `read` belongs to one thread. It raises DriverGoneError; any other failure is in the reading."""

    def __init__(
        self, asker: Asker, identity: GpuReading, throttle: ThrottleClock, meter: EnergyMeter, cadence: Cadence
    ) -> None:
        self.identity = identity
        self.problems: tuple[str, ...] = ()
        self._asker = asker
        self._throttle = throttle
        self._meter = meter
        self._cadence = cadence
        self._kept: dict[str, tuple[float, Any]] = {}
        self._gpm: GpmWindow | None = None
        self._throttle_fields = FieldCounters(asker, [(field, 0) for field in COUNTERS])
        self._link_fields = FieldCounters(asker, [(field, ALL_LINKS) for field in NVLINK_FIELDS])
        self._link_rates = {field: Rate() for field in NVLINK_FIELDS}
        self._instances = MigInstances(asker, identity)
        throttle.forget_last()

    def read(self) -> tuple[GpuReading, ...]:
        """The GPU, then its MIG instances."""
        self._asker.begin()
        try:
            readings = self._read()
        except GpuLostError as error:
            self._throttle.forget_last()
            self.problems = (f"GPU {self.identity.index} ({self.identity.uuid}): {error}; see docs/gpu.md, lost GPUs",)
            return (replace(self.identity, state=GpuState.LOST, throttled_seconds=self._throttle.seconds),)
        failures = self._asker.failures
        self.problems = tuple(f"GPU {self.identity.index} ({self.identity.uuid}): {text}" for text in failures.values())
        if self._asker.nothing_works:
            return (replace(self.identity, state=GpuState.FAILED, throttled_seconds=self._throttle.seconds),)
        return readings

    def close(self) -> None:
        """Free the driver's samples."""
        if self._gpm is not None:
            self._gpm.close()
        self._instances.close()

    def _read(self) -> tuple[GpuReading, ...]:
        ask, every, cadence = self._asker.ask, self._every, self._cadence
        utilization = ask("nvmlDeviceGetUtilizationRates")
        # The second version leaves out what the driver keeps for itself, as nvidia-smi does.
        memory = ask("nvmlDeviceGetMemoryInfo", self._asker.nvml.nvmlMemory_v2) or ask("nvmlDeviceGetMemoryInfo")
        power_milliwatts = ask("nvmlDeviceGetPowerUsage")
        limit_milliwatts = every(cadence.health_seconds, "limit", lambda: ask("nvmlDeviceGetEnforcedPowerLimit"))
        # Power first: what it adds belongs to the time before the counter is read.
        self._meter.draw(_scaled(power_milliwatts, 1e-3), time.monotonic())
        every(cadence.energy_seconds, "energy", self._count_energy)
        maxima = every(
            cadence.maxima_seconds,
            "maxima",
            lambda: {clock: ask("nvmlDeviceGetMaxClockInfo", clock) for clock in (_SM, _MEMORY)},
        )
        self._count_throttling()
        remapped = every(cadence.health_seconds, "remapped", lambda: ask("nvmlDeviceGetRemappedRows"))
        has_instances = every(cadence.health_seconds, "mig", self._instances.find)
        figures = {} if has_instances else self._gpm_figures()
        self._add_links_and_bus(figures, has_instances)
        whole = replace(
            self.identity,
            utilization_ratio=None if utilization is None else utilization.gpu / 100,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            power_watts=_scaled(power_milliwatts, 1e-3),
            power_limit_watts=_scaled(limit_milliwatts, 1e-3),
            energy_joules=self._meter.total_joules(),
            temperature_celsius=_scaled(self._temperature(), 1.0),
            sm_clock_hertz=_scaled(ask("nvmlDeviceGetClockInfo", _SM), 1e6),
            sm_clock_max_hertz=_scaled(maxima[_SM], 1e6),
            memory_clock_hertz=_scaled(ask("nvmlDeviceGetClockInfo", _MEMORY), 1e6),
            memory_clock_max_hertz=_scaled(maxima[_MEMORY], 1e6),
            throttled_seconds=self._throttle.seconds,
            ecc_errors=every(cadence.health_seconds, "ecc", self._ecc_errors),
            remapped_rows={} if remapped is None else {"correctable": remapped[0], "uncorrectable": remapped[1]},
            remapping_pending=None if remapped is None else bool(remapped[2]),
            remapping_failed=None if remapped is None else bool(remapped[3]),
            retired_pages=every(cadence.health_seconds, "retired", self._retired_pages),
            processes=None
            if has_instances
            else every(cadence.processes_seconds, "processes", lambda: running_processes(self._asker)),
            **figures,
        )
        return (whole, *self._instances.read())

    def _every(self, seconds: float, key: str, read: Callable[[], Value]) -> Value:
        """The value read less than `seconds` ago, or read now."""
        now = time.monotonic()
        kept = self._kept.get(key)
        if kept is None or now >= kept[0]:
            kept = self._kept[key] = (now + seconds, read())
        value: Value = kept[1]
        return value

    def _temperature(self) -> int | None:
        found: int | None = self._asker.ask("nvmlDeviceGetTemperatureV", _GPU_SENSOR)
        return self._asker.ask("nvmlDeviceGetTemperature", _GPU_SENSOR) if found is None else found

    def _count_energy(self) -> None:
        self._meter.count(_scaled(self._asker.ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3))

    def _count_throttling(self) -> None:
        mask = self._asker.ask("nvmlDeviceGetCurrentClocksEventReasons")
        if mask is None:
            mask = self._asker.ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        counted = {COUNTERS[field]: nanos for field, nanos in self._throttle_fields.read().items()}
        self._throttle.add(mask, counted, time.monotonic())

    def _gpm_figures(self) -> dict[str, Any]:
        if self._gpm is None:
            support = self._asker.ask("nvmlGpmQueryDeviceSupport")
            if support is None or not support.isSupportedDevice:
                return {}
            self._gpm = GpmWindow(self._asker)
        return self._gpm.read()

    def _add_links_and_bus(self, figures: dict[str, Any], has_instances: bool) -> None:
        """Traffic that GPM does not measure."""
        if any(name not in figures for name in NVLINK_FIELDS.values()):
            now, counts = time.monotonic(), self._link_fields.read()
            for field, name in NVLINK_FIELDS.items():
                figures.setdefault(name, _scaled(self._link_rates[field].per_second(counts.get(field), now), 1024))
        if self._gpm is None and not has_instances:
            figures.update(self._every(self._cadence.pcie_seconds, "pcie", self._pcie_rates))

    def _pcie_rates(self) -> dict[str, float | None]:
        return {
            f"pcie_{name}_bytes_per_second": _scaled(self._asker.ask("nvmlDeviceGetPcieThroughput", direction), 1e3)
            for name, direction in (("transmit", _PCIE_TRANSMIT), ("receive", _PCIE_RECEIVE))
        }

    def _ecc_errors(self) -> Mapping[tuple[str, str], int]:
        found = {
            (counter, kind): self._asker.ask("nvmlDeviceGetTotalEccErrors", kind_id, counter_id)
            for counter, counter_id in (("volatile", _VOLATILE), ("aggregate", _AGGREGATE))
            for kind, kind_id in (("corrected", _CORRECTED), ("uncorrected", _UNCORRECTED))
        }
        return {key: count for key, count in found.items() if count is not None}

    def _retired_pages(self) -> Mapping[str, int]:
        causes = (("single_bit", _SINGLE_BIT), ("double_bit", _DOUBLE_BIT))
        found = {name: self._asker.ask("nvmlDeviceGetRetiredPages", cause) for name, cause in causes}
        return {name: len(pages) for name, pages in found.items() if pages is not None}


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
