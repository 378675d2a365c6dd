"""What NVML's errors mean for the reading: of a call, of a GPU, or of everything."""

from __future__ import annotations

from typing import Final

# NVML's numbers, so that nothing but the reading itself needs pynvml.
NOT_FOUND: Final = 6  # no failure: an empty place
TIMEOUT: Final = 10
UNSUPPORTED: Final = frozenset(
    {
        3,  # not supported
        4,  # no permission
        13,  # the driver is older than the function
        22,  # not on a vGPU
        25,  # the driver knows another version of the structure
        26,  # deprecated
    }
)
LOST: Final = frozenset({15, 16, 28})  # fell off the bus; needs a reset; not found
DRIVER_GONE: Final = frozenset({1, 9, 12, 18})  # not initialized; not loaded; no library; another version was loaded
NO_DRIVER: Final = frozenset({9, 12})
VERSION_MISMATCH: Final = 18


class GpuLostError(Exception):
    """One GPU does not answer any more."""


class DriverGoneError(Exception):
    """No call will work until the library is opened again."""


def explain_opening(code: int, text: str) -> str:
    """Why the library could not be opened, and the next step."""
    if code in NO_DRIVER:
        return f"NVML: {text} (error {code}); load the NVIDIA driver, or set gpu = false on nodes without a GPU"
    if code == VERSION_MISMATCH:
        return (
            f"NVML: {text} (error {code}); the driver was updated under its library: load the new kernel module "
            "or reboot, and in a container restart the daemon so that it gets the new library"
        )
    return (
        f"NVML: {text} (error {code}); does nvidia-smi work where the daemon runs? A container may have lost its "
        "access to /dev/nvidia*: restart it (see docs/gpu.md)"
    )
