"""MIG: the instances that a GPU is split into. Each has memory, processes and GPM figures of its own; clocks, power,
temperature and errors are the whole GPU's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rankscope.daemon.collectors.gpu.asking import Asker
from rankscope.daemon.collectors.gpu.gpm import GpmFigures, GpmWindow
from rankscope.daemon.collectors.gpu.processes import running_processes
from rankscope.daemon.collectors.gpu.readings import GpuReading


@dataclass(frozen=True)
class _Instance:
    uuid: str
    name: str
    asker: Asker
    # Of the GPU instance: compute instances inside the same one share its figures.
    gpm: GpmWindow | None


class MigInstances:
    def __init__(self, asker: Asker, parent: GpuReading) -> None:
        self._asker = asker
        self._parent = parent
        self._instances: dict[str, _Instance] = {}

    def find(self) -> bool:
        """Looks which there are now; whether the GPU is in MIG mode."""
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
            # The handle of an instance that was taken down and made again is another one.
            found[uuid] = known or self._instance(uuid, asker, supports_gpm)
        self.close()
        self._instances = found
        return True

    def read(self) -> tuple[GpuReading, ...]:
        readings = (self._reading(instance) for instance in self._instances.values())
        # One that was taken down since `find` answers nothing.
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
        figures = GpmFigures() if instance.gpm is None else instance.gpm.read()
        return GpuReading(
            uuid=instance.uuid,
            index=self._parent.index,
            name=instance.name,
            parent_uuid=self._parent.uuid,
            memory_used_bytes=None if memory is None else memory.used,
            memory_total_bytes=None if memory is None else memory.total,
            processes=running_processes(instance.asker),
            **vars(figures),
        )
