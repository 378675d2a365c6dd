"""Why a GPU's clock is lower than it could be, as seconds per reason."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from rankscope.daemon.gpu.nvml_calls import Asker
from rankscope.daemon.gpu.readings import GpuProcess

# Bits of the clocks event (throttle) reasons. hw_slowdown is set together with hw_thermal or hw_power_brake.
REASONS: Final[Mapping[str, int]] = {
    "idle": 0x1,
    "application_clocks": 0x2,
    "power_cap": 0x4,
    "hw_slowdown": 0x8,
    "sync_boost": 0x10,
    "sw_thermal": 0x20,
    "hw_thermal": 0x40,
    "hw_power_brake": 0x80,
    "display_clocks": 0x100,
}
# Fields in which newer drivers count nanoseconds themselves: nothing between two polls is missed. Those for hw_thermal
# and hw_power_brake exist too (270, 271) but cost 0.3 ms each on an H200; their bits must do.
COUNTERS: Final[Mapping[int, str]] = {74: "power_cap", 76: "sync_boost", 269: "sw_thermal"}
# The driver counts in steps of 0.1 s.
COUNTER_STEP_SECONDS: Final = 0.2


class ThrottleClock:
    """Sums up over the daemon's life. Reasons without a counter are taken to have held since the reading before when
    both readings show them, and for half of that time when one does."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._mask: int | None = None
        self._counters: dict[str, int] = {}
        self._at_seconds: float | None = None

    @property
    def seconds(self) -> Mapping[str, float]:
        return dict(self._seconds)

    def forget_last(self) -> None:
        """After a gap: nobody knows what held in it."""
        self._mask = self._at_seconds = None
        self._counters = {}

    def add(self, mask: int | None, counters_nanos: Mapping[str, int], at_seconds: float) -> None:
        if mask is None:
            self.forget_last()
            return
        elapsed = None if self._at_seconds is None else at_seconds - self._at_seconds
        for reason, bit in REASONS.items():
            held = 0.0
            if elapsed is not None and self._mask is not None:
                grown = self._growth_seconds(reason, counters_nanos)
                if grown is None:
                    held = elapsed * (bool(mask & bit) + bool(self._mask & bit)) / 2
                else:
                    held = min(grown, elapsed + COUNTER_STEP_SECONDS)
            self._seconds[reason] = self._seconds.get(reason, 0.0) + held
        self._mask, self._at_seconds, self._counters = mask, at_seconds, dict(counters_nanos)

    def _growth_seconds(self, reason: str, counters_nanos: Mapping[str, int]) -> float | None:
        """None where nothing is counted, or the count began anew."""
        before, now = self._counters.get(reason), counters_nanos.get(reason)
        return None if before is None or now is None or now < before else (now - before) / 1e9


# Energy that a GPU used, between the driver's own readings too: those are dear and so seldom made.

# Nobody knows what was drawn in a longer gap; the driver's next figure has it.
GAP_SECONDS: Final = 10.0


class EnergyMeter:
    """The driver's counter, and since its last reading power × time. Never goes down but where the counter itself began
    anew: where the sum was too high it stands still until the counter has caught up. Outlives the opening of the
    library, for a counter that goes back by a few joules reads like one that lost all it had."""

    def __init__(self) -> None:
        self._counted: float | None = None
        self._added = 0.0
        self._told: float | None = None
        self._last: tuple[float, float] | None = None  # watts, and when

    def total_joules(self) -> float | None:
        """None where the driver has no counter."""
        if self._counted is not None:
            self._told = max(self._told or 0.0, self._counted + self._added)
        return self._told

    def count(self, joules: float | None) -> None:
        """What the driver's counter reads now."""
        if joules is None:
            return
        if self._counted is not None and joules < self._counted:
            self._told = None
        self._counted, self._added = joules, 0.0

    def draw(self, watts: float | None, at_seconds: float) -> None:
        """The power at that time of a clock that does not go back."""
        before, self._last = self._last, None if watts is None else (watts, at_seconds)
        if before is None or watts is None:
            return
        elapsed = at_seconds - before[1]
        if 0 < elapsed <= GAP_SECONDS:
            self._added += elapsed * (watts + before[0]) / 2


# Which processes compute on a GPU.


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
