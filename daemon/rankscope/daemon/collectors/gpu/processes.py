"""Which processes compute on a GPU."""

from __future__ import annotations

from rankscope.daemon.collectors.gpu.asking import Asker
from rankscope.daemon.collectors.gpu.readings import GpuProcess


def running_processes(asker: Asker) -> tuple[GpuProcess, ...] | None:
    """With clients of MPS, which the driver lists apart. None where the driver does not tell."""
    plain = asker.ask("nvmlDeviceGetComputeRunningProcesses")
    shared = asker.ask("nvmlDeviceGetMPSComputeRunningProcesses")
    if plain is None and shared is None:
        return None
    by_pid = {
        process.pid: GpuProcess(process.pid, process.usedGpuMemory) for process in (*(plain or ()), *(shared or ()))
    }
    return tuple(by_pid[pid] for pid in sorted(by_pid))
