"""Field values: many counters in one call, each with an error of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from rankscope.daemon.collectors.gpu import failing
from rankscope.daemon.collectors.gpu.asking import Asker

ALL_LINKS: Final = 0xFFFFFFFF
NVLINK_TRANSMITTED_KIBIBYTES: Final = 138
NVLINK_RECEIVED_KIBIBYTES: Final = 139
_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG = 1, 2, 3


class FieldCounters:
    """Those that are not supported are left out from the second reading on."""

    def __init__(self, asker: Asker, fields: Sequence[tuple[int, int]]) -> None:
        self._asker = asker
        self._fields = list(fields)

    def read(self) -> Mapping[int, int]:
        """By field id."""
        if not self._fields:
            return {}
        values = self._asker.ask("nvmlDeviceGetFieldValues", tuple(self._fields))
        if values is None:
            return {}
        found: dict[int, int] = {}
        for value in values:
            if value.nvmlReturn in failing.UNSUPPORTED:
                self._fields = [field for field in self._fields if field[0] != value.fieldId]
            elif value.nvmlReturn == 0 and value.valueType in (_UNSIGNED_INT, _UNSIGNED_LONG, _UNSIGNED_LONG_LONG):
                wide = value.valueType != _UNSIGNED_INT
                found[value.fieldId] = int(value.value.ullVal if wide else value.value.uiVal)
        return found


class Rate:
    """Of a counter, per second."""

    def __init__(self) -> None:
        self._last: tuple[int, float] | None = None

    def per_second(self, count: int | None, at_seconds: float) -> float | None:
        before, self._last = self._last, None if count is None else (count, at_seconds)
        if before is None or count is None or count < before[0] or at_seconds <= before[1]:
            return None
        return (count - before[0]) / (at_seconds - before[1])
