"""Medians and deviations by group, over columns: a fleet of ranks is screened in a handful of numpy calls."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]

# Makes the median absolute deviation of normal noise equal to its standard deviation.
MAD_TO_SIGMA = 1.4826
# Of so many np.median takes longer to begin than sorting takes, and a fleet asks thousands of times a second.
FEW_VALUES = 1000


def number_groups(*keys: Ints) -> tuple[Ints, int]:
    """A number from 0 for each distinct combination of keys, per row, and how many there are."""
    if len(keys[0]) == 0:
        return np.zeros(0, dtype=np.int64), 0
    order = np.lexsort(keys[::-1])
    changed = np.zeros(len(order), dtype=bool)
    for key in keys:
        ordered = key[order]
        changed[1:] |= ordered[1:] != ordered[:-1]
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(changed)
    return numbers, int(numbers[order[-1]]) + 1


def grouped_median(values: Floats, group: Ints, group_count: int) -> Floats:
    """Median of the values of each group; NaN values do not count, a group without values gets NaN."""
    order = np.lexsort((values, group))  # NaN sorts last within its group
    starts = np.searchsorted(group[order], np.arange(group_count))
    counts = np.bincount(group[~np.isnan(values)], minlength=group_count)
    ordered = values[order]
    last = max(len(ordered) - 1, 0)
    low = ordered[np.minimum(starts + np.maximum(counts - 1, 0) // 2, last)] if len(ordered) else np.zeros(group_count)
    high = ordered[np.minimum(starts + counts // 2, last)] if len(ordered) else np.zeros(group_count)
    return np.where(counts > 0, (low + high) / 2, np.nan)


def grouped_max(values: Floats, group: Ints, group_count: int) -> Floats:
    """Largest value of each group, NaN where it has none."""
    result = np.full(group_count, -np.inf)
    known = ~np.isnan(values)
    np.maximum.at(result, group[known], values[known])
    return np.where(np.isneginf(result), np.nan, result)


def grouped_min(values: Floats, group: Ints, group_count: int) -> Floats:
    return -grouped_max(-values, group, group_count)


def median_or_nan(values: Floats) -> float:
    """Of the values that are known."""
    known = values[~np.isnan(values)]
    if len(known) > FEW_VALUES:
        return float(np.median(known))
    if not len(known):
        return float("nan")
    known.sort()
    middle = len(known) // 2
    return float(known[middle]) if len(known) % 2 else float((known[middle - 1] + known[middle]) / 2)
