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
    key = _one_key(keys)
    if key is None:
        order = np.lexsort(keys[::-1])
        changed = np.zeros(len(order), dtype=bool)
        for each in keys:
            ordered = each[order]
            changed[1:] |= ordered[1:] != ordered[:-1]
    else:
        order = np.argsort(key, kind="stable")
        changed = np.diff(key[order], prepend=key[order[0]]) != 0
    numbers = np.empty(len(order), dtype=np.int64)
    numbers[order] = np.cumsum(changed)
    return numbers, int(numbers[order[-1]]) + 1


def _one_key(keys: Sequence[Ints]) -> Ints | None:
    """One key that sorts as all of them, several times as fast; None if it has too few bits."""
    combined, size = np.zeros(len(keys[0]), dtype=np.int64), 1
    for key in keys:
        low, high = int(key.min()), int(key.max())
        if high - low >= 1 << 24 and len(keys) > 1:
            key, count = number_groups(key)
            low, high = 0, count - 1
        size *= high - low + 1
        if size >= 1 << 62:
            return None
        combined = combined * (high - low + 1) + (key - low)
    return combined


def order_by_group(numbers: Ints, count: int) -> Ints:
    """The rows sorted by a number from -1 to `count` - 1, equal ones in their order: 16 bits sort in linear time."""
    if count >= (1 << 32) - 1:
        return np.argsort(numbers, kind="stable")
    order = np.argsort((numbers + 1).astype(np.uint16), kind="stable")
    if count < (1 << 16) - 1:
        return order
    return order[np.argsort(((numbers[order] + 1) >> 16).astype(np.uint16), kind="stable")]


def order_within_groups(values: Floats, group: Ints, count: int) -> Ints:
    """The rows sorted by group, and by value in each. NaN is last."""
    by_value = np.argsort(values)
    return by_value[order_by_group(group[by_value], count)]


def is_one_of(values: Ints, few: Sequence[int]) -> Bools:
    """Return the same as `np.isin`, several times as fast for a few values to look for."""
    return np.asarray(np.logical_or.reduce([values == value for value in few]))


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
    order = order_by_group(numbers, count)
    borders = np.searchsorted(numbers[order], np.arange(count + 1))
    return [order[start:end] for start, end in itertools.pairwise(borders.tolist())]


def occurrence(groups: Ints) -> Ints:
    """0 for the first row of each group, 1 for the second, …"""
    order = np.argsort(groups, kind="stable")
    ordered = groups[order]
    place = np.arange(len(groups))
    is_first = np.ones(len(groups), dtype=bool)
    is_first[1:] = ordered[1:] != ordered[:-1]
    occurrence = np.empty(len(groups), dtype=np.int64)
    occurrence[order] = place - np.maximum.accumulate(np.where(is_first, place, 0))
    return occurrence


def grouped_median(values: Floats, group: Ints, group_count: int) -> Floats:
    """The median of each group's values. NaN values are ignored; NaN for a group without values."""
    order = order_within_groups(values, group, group_count)
    sizes = np.bincount(group, minlength=group_count)
    starts = np.cumsum(sizes) - sizes
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
