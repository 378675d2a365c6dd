"""Axes: where a value lies on the picture, and where its ticks stand."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from rankscope.analysis.drawing.quantities import Display, display, number, quantity


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `unit` is that of the data: us, s, B, B/s, ratio, … (see quantities)."""

    title: str
    unit: str = ""
    log: bool = False


@dataclass(frozen=True)
class Scale:
    """A drawn axis: values from `low` to `high` onto pixels from `first` to `last`."""

    low: float
    high: float
    first: float
    last: float
    log: bool
    unit: str
    shown: Display  # of a linear axis; ticks of a log axis carry a unit each
    ticks: tuple[float, ...]
    title: str

    def place(self, value: float) -> float:
        low, high, here = self.low, self.high, value
        if self.log:
            low, high, here = math.log10(low), math.log10(high), math.log10(max(value, self.low * 1e-3))
        return self.first + (self.last - self.first) * (here - low) / (high - low)

    def tick_text(self, tick: float) -> str:
        text, _, symbol = (
            quantity(tick, self.unit).partition(" ") if self.log else (number(tick / self.shown.factor), "", "")
        )
        text = text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
        return f"{text} {symbol}".rstrip()

    @property
    def caption(self) -> str:
        return f"{self.title} ({self.shown.symbol})" if self.shown.symbol and not self.log else self.title


def scale(
    axis: Axis, values: Iterable[float | None], first: float, last: float, *, from_zero: bool = False, most: int = 6
) -> Scale:
    """A scale that holds every finite value (on a log axis every positive one), with its ends on round numbers."""
    known = [float(value) for value in values if value is not None and math.isfinite(value) and abs(value) < 1e300]
    if axis.log:
        return _log_scale(axis, [value for value in known if value > 0], first, last, most)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    shown = display(axis.unit, (low, high))
    # So small a spread that steps between its ends are lost in rounding is drawn as one value.
    if not high - low > abs(high) * 1e-9:
        spread = abs(high) * 0.1 or shown.factor
        low, high = (low - spread if not from_zero else min(low, 0.0)), high + spread
    step = round_step((high - low) / shown.factor, most) * shown.factor
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(start, end + 1))
    return Scale(ticks[0], ticks[-1], first, last, False, axis.unit, shown, ticks, axis.title)


def round_step(spread: float, most: int) -> float:
    """The smallest of 1, 2, 5 × 10ⁿ that needs no more than `most` steps over the spread."""
    raw = spread / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _log_scale(axis: Axis, known: list[float], first: float, last: float, most: int) -> Scale:
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    if axis.unit == "B":
        return _binary_scale(axis, low, high, first, last, most)
    start, end = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    start, end = max(start, -300), min(end, 300)
    end = max(end, start + 1)
    stride = max(1, math.ceil((end - start) / most))
    ticks = tuple(10.0**power for power in range(start, end + 1, stride))
    if end - start == 1:
        ticks = tuple(factor * 10.0**start for factor in (1, 2, 5, 10))
    return Scale(10.0**start, 10.0**end, first, last, True, axis.unit, display(axis.unit, ()), ticks, axis.title)


def _binary_scale(axis: Axis, low: float, high: float, first: float, last: float, most: int) -> Scale:
    """Message sizes are powers of two; ticks at 1, 4, 16, … of the unit say so."""
    start, end = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
    end = min(max(end, start + 1), 1000)
    stride = max(1, math.ceil((end - start) / most))
    ticks = tuple(2.0**power for power in range(start, end + 1, stride))
    return Scale(2.0**start, 2.0**end, first, last, True, axis.unit, Display(1.0, "B"), ticks, axis.title)
