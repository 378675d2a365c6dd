"""Medians and deviations by group, over columns: a fleet of ranks is screened in a few numpy calls."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Ints: TypeAlias = npt.NDArray[np.int64]
Bools: TypeAlias = npt.NDArray[np.bool_]
if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Table = TypeVar("Table", bound="DataclassInstance")  # a dataclass with a column per field
# Scales the median absolute deviation of normal noise to its standard deviation.
MAD_TO_SIGMA = 1.4826
# Up to this many values, sorting is faster than the overhead of np.median, which matters at thousands of calls per
# second.
FEW_VALUES = 1000


def number_groups(*keys: Ints) -> tuple[Ints, int]:
    """Per row, a number from 0 for its distinct combination of keys; and the number of combinations."""
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


def take_rows(table: Table, rows: Ints | Bools | slice) -> Table:
    """A selection of the rows, by mask, index or slice. Fields that are no columns stay."""
    columns = {field.name: getattr(table, field.name) for field in fields(table)}
    chosen: dict[str, Any] = {name: each[rows] for name, each in columns.items() if isinstance(each, np.ndarray)}
    return replace(table, **chosen)


def join_rows(tables: Sequence[Table]) -> Table:
    """The rows of all tables, in order. Fields that are no columns are those of the first."""
    names = [field.name for field in fields(tables[0]) if isinstance(getattr(tables[0], field.name), np.ndarray)]
    joined: dict[str, Any] = {name: np.concatenate([getattr(table, name) for table in tables]) for name in names}
    return replace(tables[0], **joined)


def rows_of_groups(numbers: Ints, count: int) -> list[Ints]:
    """The rows of each group from 0 to `count` - 1, in order. One sort: a comparison per group would be quadratic in a
    file with as many groups as rows. Negative numbers are in no group."""
    order = np.argsort(numbers, kind="stable")
    borders = np.searchsorted(numbers[order], np.arange(count + 1))
    return [order[start:end] for start, end in itertools.pairwise(borders.tolist())]


def occurrence(groups: Ints) -> Ints:
    """0 for the first row of each group, 1 for the second, …"""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    first = np.searchsorted(ordered, ordered)
    occurrence = np.empty(len(groups), dtype=np.int64)
    occurrence[order] = np.arange(len(groups)) - first
    return occurrence


def grouped_median(values: Floats, group: Ints, group_count: int) -> Floats:
    """The median of each group's values. NaN values are ignored; NaN for a group without values."""
    order = np.lexsort((values, group))  # NaN sorts last within its group
    starts = np.searchsorted(group[order], np.arange(group_count))
    counts = np.bincount(group[~np.isnan(values)], minlength=group_count)
    ordered = values[order]
    last = max(len(ordered) - 1, 0)
    low = ordered[np.minimum(starts + np.maximum(counts - 1, 0) // 2, last)] if len(ordered) else np.zeros(group_count)
    high = ordered[np.minimum(starts + counts // 2, last)] if len(ordered) else np.zeros(group_count)
    return np.where(counts > 0, (low + high) / 2, np.nan)


def grouped_max(values: Floats, group: Ints, group_count: int) -> Floats:
    """The largest value of each group; NaN if it has none."""
    result = np.full(group_count, -np.inf)
    known = ~np.isnan(values)
    np.maximum.at(result, group[known], values[known])
    return np.where(np.isneginf(result), np.nan, result)


def grouped_min(values: Floats, group: Ints, group_count: int) -> Floats:
    return -grouped_max(-values, group, group_count)


def median_or_nan(values: Floats) -> float:
    """The median of the values that are not NaN."""
    known = values[~np.isnan(values)]
    if len(known) > FEW_VALUES:
        return float(np.median(known))
    if not len(known):
        return float("nan")
    known.sort()
    middle = len(known) // 2
    return float(known[middle]) if len(known) % 2 else float((known[middle - 1] + known[middle]) / 2)
