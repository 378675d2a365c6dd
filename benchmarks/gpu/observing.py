"""Views of the same GPU at the same time: the daemon's /metrics four times a second, nvidia-smi every second, and the
SM clock fifty times a second, for under a power cap it moves within milliseconds."""

from __future__ import annotations

import contextlib
import re
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from benchmarks.running import RunningDaemon

SCRAPE_SECONDS = 0.25
SMI_SECONDS = 1.0
CLOCK_SECONDS = 0.02
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
BASIC = (
    *("uuid", "memory.used", "memory.total", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem"),
    *("power.draw", "temperature.gpu", "utilization.gpu"),
)
# Drivers differ in these; each is tried once.
OPTIONAL = (
    *("power.draw.instant", "power.draw.average", "power.limit", "enforced.power.limit", "clocks_event_reasons.active"),
    *("clocks_event_reasons_counters.sw_power_cap", "ecc.errors.corrected.volatile.total"),
    *("ecc.errors.uncorrected.volatile.total", "ecc.errors.uncorrected.aggregate.total"),
    *("remapped_rows.correctable", "remapped_rows.uncorrectable", "memory.reserved", "temperature.memory"),
)


@dataclass(frozen=True)
class Scrape:
    unix_seconds: float
    series: dict[str, float]

    def value(self, name: str, **labels: str) -> float | None:
        """Of the first series of that name with those labels."""
        for one, value in self.series.items():
            if one.partition("{")[0] == name and labels.items() <= labels_of(one).items():
                return value
        return None

    def all(self, name: str) -> list[tuple[dict[str, str], float]]:
        return [(labels_of(one), value) for one, value in self.series.items() if one.partition("{")[0] == name]


@dataclass(frozen=True)
class Smi:
    unix_seconds: float
    took_seconds: float
    values: dict[str, str]
    clocks_mhz: tuple[float, float] | None = None  # of the SMs, just before and just after

    def number(self, name: str) -> float | None:
        text = self.values.get(name, "")
        try:
            return float(int(text, 16)) if text.startswith("0x") else float(text)
        except ValueError:
            return None


def labels_of(series: str) -> dict[str, str]:
    return dict(_LABEL.findall(series))


def scrape(watching: RunningDaemon) -> Scrape:
    began = time.time()
    found = watching.metrics()
    wanted = ("rankscope_gpu", "rankscope_rank_info", "rankscope_rank_gpu", "rankscope_daemon")
    return Scrape(began, {name: value for name, value in found.items() if name.startswith(wanted)})


def smi_fields() -> tuple[str, ...]:
    """Those that this nvidia-smi knows; none where there is none."""
    if _ask(BASIC) is None:
        return ()
    return (*BASIC, *(name for name in OPTIONAL if _ask((name,)) is not None))


def ask_smi(fields: tuple[str, ...], clock: Callable[[], float | None] = lambda: None) -> Smi | None:
    before, began = clock(), time.time()
    values = _ask(fields)
    ended, after = time.time(), clock()
    clocks = None if before is None or after is None else (before, after)
    return None if values is None else Smi((began + ended) / 2, ended - began, values, clocks)


def clock_of_nvml() -> Callable[[], float | None]:
    """The SM clock of the first GPU in MHz at the moment of the call; None where NVML does not tell."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM)
    except Exception as error:  # noqa: BLE001  no driver, or one that will not: compared without it
        print(f"the SM clock is not sampled: {error}", flush=True)
        return lambda: None
    return lambda: float(pynvml.nvmlDeviceGetClockInfo(handle, pynvml.NVML_CLOCK_SM))


def _ask(fields: tuple[str, ...]) -> dict[str, str] | None:
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    values = [text.strip() for text in done.stdout.strip().splitlines()[0].split(",")]
    return dict(zip(fields, values, strict=True)) if len(values) == len(fields) else None


@dataclass
class Observed:
    scrapes: list[Scrape] = field(default_factory=list)
    smis: list[Smi] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    clocks: list[tuple[float, float]] = field(default_factory=list)  # unix seconds, MHz of the SMs by NVML

    def scrapes_between(self, start: float, end: float) -> list[Scrape]:
        return [one for one in self.scrapes if start <= one.unix_seconds <= end]

    def values(self, name: str, start: float, end: float, **labels: str) -> list[float]:
        found = (one.value(name, **labels) for one in self.scrapes_between(start, end))
        return [value for value in found if value is not None]

    def clocks_between(self, start: float, end: float) -> list[float]:
        return [mhz for at, mhz in self.clocks if start <= at <= end]


@contextlib.contextmanager
def observing(watching: RunningDaemon, fields: tuple[str, ...]) -> Iterator[Observed]:
    observed, over = Observed(), threading.Event()
    clock = clock_of_nvml() if fields else lambda: None

    def scrape_on() -> None:
        while not over.wait(SCRAPE_SECONDS):
            try:
                observed.scrapes.append(scrape(watching))
            except (OSError, ValueError) as error:
                observed.problems.append(f"scrape: {error}")

    def ask_on() -> None:
        while fields and not over.wait(SMI_SECONDS):
            found = ask_smi(fields, clock)
            if found is None:
                observed.problems.append("nvidia-smi did not answer")
            else:
                observed.smis.append(found)

    def watch_clock() -> None:
        while not over.wait(CLOCK_SECONDS) and (mhz := clock()) is not None:
            observed.clocks.append((time.time(), mhz))

    threads = [threading.Thread(target=one, daemon=True) for one in (scrape_on, ask_on, watch_clock)]
    for thread in threads:
        thread.start()
    try:
        yield observed
    finally:
        over.set()
        for thread in threads:
            thread.join(25)
