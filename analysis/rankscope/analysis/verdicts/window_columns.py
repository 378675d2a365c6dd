"""The table in which a daemon sends the figures of its windows: a row per rank, a column per figure.

A figure has one name, that of `RankColumns`, from the daemon to the rules. Columns are found by name, so that a newer
operator reads an older daemon and the reverse. Numbers of containers and daemons are bounded here and nowhere else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import lru_cache

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.analysis.verdicts.windows import RankColumns

# Process groups of a rank that are sent, and what is sent of each.
GROUPS = 8
GROUP_FIGURES = ("number", "kind", "seconds", "step_seconds")
RANK_FIGURES = tuple(column.name for column in fields(RankColumns))[4:]  # after the keys
# Shown to people; no rule reads them. Those of a GPU are there for ranks that use exactly one.
SHOWN_FIGURES = (
    *("communication_seconds", "cpu_ratio", "resident_bytes", "memory_allocated_bytes"),
    *("gpu_utilization_ratio", "gpu_tensor_active_ratio", "gpu_sm_clock_hertz", "gpu_power_watts"),
    *("gpu_temperature_celsius", "gpu_throttled_ratio", "gpu_memory_used_bytes"),
)
FIGURES = (
    *RANK_FIGURES,
    *("steps_total", "last_step_unix_seconds", "is_captured", "host_quick_seconds", "host_gained_steps"),
    *SHOWN_FIGURES,
    *(f"group{number}_{name}" for number in range(GROUPS) for name in GROUP_FIGURES),
)

# What a container or a daemon claims beyond these is no measurement, and would become infinite in a ratio or a sum. No
# step lasts longer than a day.
LONGEST_SECONDS = 86_400.0
LARGEST_COUNT = 2.0**53
SHORTEST_STEP_SECONDS = 1e-9
NAMES_LIMIT_CHARACTERS = 16 << 10
_COUNTS = {
    "steps",
    "self_steps",
    "tokens_per_step",
    "steps_total",
    "last_step_unix_seconds",
    *(name for name in SHOWN_FIGURES if name.endswith(("_bytes", "_hertz"))),
    *(f"group{number}_number" for number in range(GROUPS)),
}
_LARGEST = np.array([[LARGEST_COUNT if name in _COUNTS else LONGEST_SECONDS] for name in FIGURES])
_PLACE = {name: place for place, name in enumerate(FIGURES)}
_ROW_BYTES = 8 * len(FIGURES)


def plausible_seconds(seconds: Floats) -> Floats:
    """The column with NaN in place of what cannot be a duration."""
    with np.errstate(invalid="ignore"):
        return np.where((seconds >= 0) & (seconds <= LONGEST_SECONDS), seconds, np.nan)


def pack(rows: Sequence[Mapping[str, float]]) -> tuple[str, bytes]:
    """Names and values of the columns that any row has."""
    table = np.array([[row.get(name, np.nan) for name in FIGURES] for row in rows]).reshape(len(rows), len(FIGURES))
    sent = np.flatnonzero(~np.isnan(table).all(axis=0)) if rows else np.arange(0)
    return " ".join(FIGURES[place] for place in sent.tolist()), table[:, sent].astype("<f8").tobytes()


def is_table(names: str, values: bytes, rows: int) -> bool:
    """Whether it is one of so many rows."""
    return len(names) <= NAMES_LIMIT_CHARACTERS and len(values) == 8 * rows * len(names.split())


def unpack(names: str, values: bytes, rows: int) -> list[bytes]:
    """The first `rows` rows, each with all of FIGURES, to be read by `columns` with those of other tables."""
    width, places = _places(names)
    table = np.empty((rows, width + 1))
    table[:, :width] = np.frombuffer(values[: 8 * rows * width], "<f8").reshape(rows, width)
    table[:, width] = np.nan
    packed = table.take(places, axis=1).tobytes()
    return [packed[start : start + _ROW_BYTES] for start in range(0, len(packed), _ROW_BYTES)]


@lru_cache(maxsize=256)
def _places(names: str) -> tuple[int, Ints]:
    """How many columns there are, and where each of FIGURES is; behind the last one where it was not sent."""
    sent = {name: place for place, name in enumerate(names.split())}
    width = len(names.split())
    return width, np.array([sent.get(name, width) for name in FIGURES])


def columns(rows: Sequence[bytes]) -> Floats:
    """A row for each of FIGURES, a column per rank. NaN where it was not measured, cannot be, or has no step to belong
    to."""
    table: Floats = np.frombuffer(b"".join(rows), dtype="<f8").reshape(len(rows), len(FIGURES)).T.copy()
    with np.errstate(invalid="ignore"):
        table[~((table >= 0) & (table <= _LARGEST))] = np.nan
        has_steps = (table[_PLACE["steps"]] > 0) & (table[_PLACE["step_seconds"]] >= SHORTEST_STEP_SECONDS)
    table[1 : len(RANK_FIGURES), ~has_steps] = np.nan
    return table
