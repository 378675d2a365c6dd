"""The table in which a daemon sends the figures of its windows: a row per rank, a column per figure.

A figure has one name (figures.py) from the daemon to the rules. Columns are found by name, so that a newer operator
reads an older daemon and the reverse. What is out of bounds is dropped here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.analysis.verdicts import figures
from rankscope.analysis.verdicts.figures import MAX_COUNT, MAX_STEP_SECONDS, OF_RULES, WindowFigures

# Process groups of a rank that are sent, and what is sent of each.
GROUPS = 8
GROUP_FIGURES = {"number": MAX_COUNT, **dict.fromkeys(("kind", "seconds", "step_seconds"), MAX_STEP_SECONDS)}
_MAXIMUM = {name: figure.maximum for name, figure in figures.FIGURES.items()} | {
    f"group{number}_{name}": maximum for number in range(GROUPS) for name, maximum in GROUP_FIGURES.items()
}
FIGURES = tuple(_MAXIMUM)

MIN_STEP_SECONDS = 1e-9
MAX_NAMES_CHARACTERS = 16 << 10
_MAXIMA = np.array([[maximum] for maximum in _MAXIMUM.values()])
_PLACE = {name: place for place, name in enumerate(FIGURES)}
_OF_STEPS = [_PLACE[name] for name in OF_RULES if name != "steps"]
_ROW_BYTES = 8 * len(FIGURES)


def plausible_seconds(seconds: Floats) -> Floats:
    """The column with NaN in place of what cannot be a duration."""
    with np.errstate(invalid="ignore"):
        return np.where((seconds >= 0) & (seconds <= MAX_STEP_SECONDS), seconds, np.nan)


def pack(rows: Sequence[Mapping[str, float]]) -> tuple[str, bytes]:
    """Names and values of the columns that any row has."""
    table = np.array([[row.get(name, np.nan) for name in FIGURES] for row in rows]).reshape(len(rows), len(FIGURES))
    sent = np.flatnonzero(~np.isnan(table).all(axis=0)) if rows else np.arange(0)
    return " ".join(FIGURES[place] for place in sent.tolist()), table[:, sent].astype("<f8").tobytes()


def is_table(names: str, values: bytes, rows: int) -> bool:
    """Whether it is one of so many rows."""
    return len(names) <= MAX_NAMES_CHARACTERS and len(values) == 8 * rows * len(names.split())


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
        table[~((table >= 0) & (table <= _MAXIMA))] = np.nan
        has_steps = (table[_PLACE["steps"]] > 0) & (table[_PLACE["step_seconds"]] >= MIN_STEP_SECONDS)
    table[np.ix_(_OF_STEPS, ~has_steps)] = np.nan
    return table


def by_name(table: Floats) -> WindowFigures:
    """The figures of what `columns` returned, as views: to set a value in one sets it in the table."""
    return WindowFigures(*table[: len(figures.FIGURES)])


def of_groups(table: Floats) -> Floats:
    """The same, of process groups: by group, figure and rank."""
    return table[len(figures.FIGURES) :].reshape(GROUPS, len(GROUP_FIGURES), table.shape[1])
