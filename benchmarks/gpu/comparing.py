"""What the daemon exported against what nvidia-smi said, and against work that is known."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.gpu.observing import Observed, Smi

MEBIBYTE = 1 << 20
# A reading is a second old at most when the daemon's window closes, and a window and a half when it is scraped.
LAG_SECONDS = 3.2
SM_CLOCK = "clocks.sm"


@dataclass(frozen=True)
class Load:
    """Known work: when, and in chunks (began, ended, FLOPs)."""

    kind: str
    start: float
    end: float
    chunks: Sequence[tuple[float, float, float]] = ()

    @property
    def steady(self) -> tuple[float, float]:
        """When what is scraped is sure to be of this load alone."""
        return self.start + LAG_SECONDS, self.end

    @property
    def flops_per_second(self) -> float | None:
        kept = [chunk for chunk in self.chunks if chunk[0] >= self.start + 0.3]
        return sum(chunk[2] for chunk in kept) / (kept[-1][1] - kept[0][0]) if kept else None


@dataclass(frozen=True)
class Quantity:
    """The same thing in both. `allowed` of None asks for equality, where nvidia-smi itself holds still."""

    name: str
    metric: str
    labels: dict[str, str]
    smi: str
    scale: float  # nvidia-smi's unit in ours
    allowed: Callable[[float], float] | None
    target: str


QUANTITIES = (
    Quantity("memory used", "rankscope_gpu_memory_bytes", {"kind": "used"}, "memory.used", MEBIBYTE, None, "equal"),
    Quantity("memory total", "rankscope_gpu_memory_bytes", {"kind": "total"}, "memory.total", MEBIBYTE, None, "equal"),
    Quantity("SM clock", "rankscope_gpu_clock_hertz", {"clock": "sm"}, SM_CLOCK, 1e6, None, "equal"),
    Quantity("memory clock", "rankscope_gpu_clock_hertz", {"clock": "memory"}, "clocks.mem", 1e6, None, "equal"),
    Quantity("SM clock, most", "rankscope_gpu_clock_max_hertz", {"clock": "sm"}, "clocks.max.sm", 1e6, None, "equal"),
    Quantity(
        "memory clock, most", "rankscope_gpu_clock_max_hertz", {"clock": "memory"}, "clocks.max.mem", 1e6, None, "equal"
    ),
    Quantity("power", "rankscope_gpu_power_watts", {}, "power.draw", 1, lambda watts: 0.05 * watts, "within 5 %"),
    Quantity("power limit", "rankscope_gpu_power_limit_watts", {}, "enforced.power.limit", 1, None, "equal"),
    Quantity("temperature", "rankscope_gpu_temperature_celsius", {}, "temperature.gpu", 1, lambda _: 2, "within 2 °C"),
    Quantity(
        "utilisation", "rankscope_gpu_utilization_ratio", {}, "utilization.gpu", 0.01, lambda _: 0.1, "within 10 points"
    ),
    Quantity(
        "ECC, uncorrected, volatile",
        "rankscope_gpu_ecc_errors_total",
        {"counter": "volatile", "kind": "uncorrected"},
        "ecc.errors.uncorrected.volatile.total",
        1,
        None,
        "equal",
    ),
    Quantity(
        "rows remapped, uncorrectable",
        "rankscope_gpu_remapped_rows",
        {"kind": "uncorrectable"},
        "remapped_rows.uncorrectable",
        1,
        None,
        "equal",
    ),
)


@dataclass(frozen=True)
class Comparison:
    compared: int
    agreed: int
    moving: int  # left out: it had another value shortly before or after
    largest: float  # difference, in our unit
    example: str


def compare(quantity: Quantity, observed: Observed, loads: Sequence[Load]) -> Comparison:
    compared = agreed = moving = 0
    largest, example = 0.0, ""
    for number, smi in enumerate(observed.smis):
        if not any(load.steady[0] <= smi.unix_seconds <= load.end - 0.2 for load in loads):
            continue
        said = smi.number(quantity.smi)
        if said is None:
            continue
        # The daemon read within a second of this, and shows it until the next window.
        load = next(one for one in loads if one.steady[0] <= smi.unix_seconds <= one.end)
        ours = observed.values(
            quantity.metric, smi.unix_seconds, min(smi.unix_seconds + 2.0, load.end + 0.2), **quantity.labels
        )
        if not ours:
            continue
        still = _holds_still(observed.smis, number, quantity.smi, load)
        if still and quantity.smi == SM_CLOCK and observed.clocks:
            # From when the daemon may have read to when it was scraped; a second between two looks hides a lot.
            seen = observed.clocks_between(smi.unix_seconds - 1.5, min(smi.unix_seconds + 2.0, load.end + 0.2))
            still = len(set(seen)) == 1
        if quantity.allowed is None and not still:
            moving += 1
            continue
        compared += 1
        wanted = said * quantity.scale
        # nvidia-smi shows whole MiB, MHz and hundredths of watts.
        slack = quantity.allowed(wanted) if quantity.allowed else 0.999 * quantity.scale if quantity.scale > 1 else 0.01
        difference = min(abs(value - wanted) for value in ours)
        agreed += difference <= slack
        if difference >= largest:
            largest = difference
            example = f"{ours[0] / quantity.scale:g} / {said:g} in {load.kind}"
    return Comparison(compared, agreed, moving, largest, example)


def _holds_still(smis: Sequence[Smi], number: int, name: str, load: Load) -> bool:
    near = [one for one in smis[max(0, number - 2) : number + 3] if load.start + 0.5 <= one.unix_seconds <= load.end]
    return len({one.values.get(name) for one in near}) == 1


@dataclass(frozen=True)
class MovingClock:
    """The SM clock where it does not hold still."""

    bracketed: int  # calls of nvidia-smi with one and the same NVML clock just before and just after
    same: int  # of those, how often nvidia-smi said that too
    shown: int  # values that the daemon showed under load
    among: int  # of those, how many NVML had had in the time before
    jitter_mhz: tuple[float, float]  # median and largest range of NVML's own within a second


def compare_moving_clock(observed: Observed, loads: Sequence[Load]) -> MovingClock:
    bracketed = same = shown = among = 0
    for smi in observed.smis:
        if smi.clocks_mhz is not None and smi.clocks_mhz[0] == smi.clocks_mhz[1]:
            bracketed += 1
            same += smi.number(SM_CLOCK) == smi.clocks_mhz[0]
    ranges = [0.0]
    for load in loads:
        for scrape in observed.scrapes_between(*load.steady):
            value = scrape.value("rankscope_gpu_clock_hertz", clock="sm")
            had = observed.clocks_between(scrape.unix_seconds - LAG_SECONDS, scrape.unix_seconds)
            if value is not None and had:
                shown += 1
                among += value / 1e6 in had
        second = load.steady[0]
        while second + 1 <= load.end:
            if seen := observed.clocks_between(second, second + 1):
                ranges.append(max(seen) - min(seen))
            second += 1
    kept = ranges[1:] or ranges
    return MovingClock(bracketed, same, shown, among, (statistics.median(kept), max(kept)))


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def integral(points: Sequence[tuple[float, float]]) -> float:
    """Of a value over time, by trapezoids."""
    return sum((b[0] - a[0]) * (a[1] + b[1]) / 2 for a, b in itertools.pairwise(points))
