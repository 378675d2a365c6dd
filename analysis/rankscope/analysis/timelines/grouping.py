"""Number the combinations of several columns, in time that grows with the rows only: a timeline has few of them."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.robust import number_groups as number_by_sorting

_LARGEST_KEY = 2**62
# A table of flags may be so many times larger than the rows are many.
_ROOM = 8
_LEAST_ROOM = 1 << 20


def pack(*keys: Ints) -> tuple[Ints, int] | None:
    """One number per row that sorts as the keys do, and how many there could be; None where it would not fit."""
    packed = np.zeros(len(keys[0]), dtype=np.int64)
    count = 1
    for key in keys:
        low, high = int(key.min()), int(key.max())
        count *= high - low + 1
        if count > _LARGEST_KEY:
            return None
        packed *= high - low + 1
        packed += key - low
    return packed, count


def number_groups(*keys: Ints) -> tuple[Ints, int]:
    """A number from 0 for each combination that occurs, in the order of the keys, per row; and how many there are."""
    packed = pack(*keys) if len(keys[0]) else None
    if packed is None or packed[1] > max(_ROOM * len(packed[0]), _LEAST_ROOM):
        return number_by_sorting(*keys)
    seen = np.zeros(packed[1], dtype=bool)
    seen[packed[0]] = True
    numbers = np.cumsum(seen) - 1
    return numbers[packed[0]], int(numbers[-1]) + 1
