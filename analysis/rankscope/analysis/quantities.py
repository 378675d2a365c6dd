"""Numbers with units as text. The only place that formats numbers for plots and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NOT_MEASURED = "–"
# Per unit of the data: display units by increasing size.
_LADDERS: dict[str, tuple[tuple[float, str], ...]] = {
    "us": ((1e-3, "ns"), (1.0, "µs"), (1e3, "ms"), (1e6, "s"), (6e7, "min"), (3.6e9, "h")),
    "s": ((1e-9, "ns"), (1e-6, "µs"), (1e-3, "ms"), (1.0, "s"), (60.0, "min"), (3600.0, "h")),
    "B": ((1.0, "B"), (2.0**10, "KiB"), (2.0**20, "MiB"), (2.0**30, "GiB"), (2.0**40, "TiB")),
    "B/s": ((1.0, "B/s"), (1e3, "kB/s"), (1e6, "MB/s"), (1e9, "GB/s"), (1e12, "TB/s")),
    "FLOP": ((1.0, "FLOP"), (1e6, "MFLOP"), (1e9, "GFLOP"), (1e12, "TFLOP"), (1e15, "PFLOP"), (1e18, "EFLOP")),
    "FLOP/s": ((1.0, "FLOP/s"), (1e6, "MFLOP/s"), (1e9, "GFLOP/s"), (1e12, "TFLOP/s"), (1e15, "PFLOP/s")),
    "ratio": ((0.01, "%"),),
    "x": ((1.0, "×"),),
}
# Minutes and hours only when the smaller unit would be hard to read.
_SWITCH_AT = {"min": 10.0, "h": 3.0}


@dataclass(frozen=True)
class Display:
    """How the numbers of one plot or column are shown: divided by `factor`, followed by `symbol`."""

    factor: float
    symbol: str

    def text(self, value: float | None) -> str:
        if value is None or not math.isfinite(value):
            return NOT_MEASURED
        return f"{number(value / self.factor)} {self.symbol}".rstrip()


def display(unit: str, values: Iterable[float | None]) -> Display:
    """One unit for all values: the one that suits the largest."""
    ladder = _LADDERS.get(unit)
    if ladder is None:
        return Display(1.0, unit)
    largest = max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    # If all are zero, the unit itself: "0 µs", not "0 ns".
    chosen = next((step for step in ladder if step[0] == 1.0), ladder[0]) if largest == 0 else ladder[0]
    for factor, symbol in ladder:
        if largest >= factor * _SWITCH_AT.get(symbol, 1.0):
            chosen = (factor, symbol)
    return Display(*chosen)


def quantity(value: float | None, unit: str) -> str:
    """`1.24 ms`, `87.5 %`, `25.0 MiB`; `–` if not measured."""
    return display(unit, (value,)).text(value)


def number(value: float) -> str:
    """Three significant digits, no exponent between 10⁻³ and 10¹²: `0.0123`, `1.24`, `12,345`"""
    if not math.isfinite(value):
        return NOT_MEASURED
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3 or size >= 1e12:
        return f"{value:.3g}"
    decimals = min(max(2 - math.floor(math.log10(size)), 0), 5)
    return f"{value:,.0f}" if value == int(value) else f"{value:,.{decimals}f}"


def count(value: int, one: str, many: str = "") -> str:
    """`1 rank`, `61 ranks`"""
    return f"{value:,} {one if value == 1 else many or one + 's'}"


def shorten(text: str, most: int) -> str:
    """Removes the middle of a long name: kernel names differ at both ends."""
    if len(text) <= most:
        return text
    head = (most - 1) * 3 // 5
    return f"{text[:head]}…{text[len(text) - (most - 1 - head) :]}"


# Names of kernels repeat these; they are left out of those that do not fit.
_BOILERPLATE = re.compile(r"^void |\(anonymous namespace\)::|\b(?:at::native|at|c10|std)::")
_LAST_WORD = re.compile(r"(?<!\w)\w{1,15}$")
_MIN_CHARACTERS = 12


def shorten_all(texts: Sequence[str], most: int) -> list[str]:
    """As `shorten`, but texts that differ stay different: what they have in common is cut first."""
    plain = {text: text if len(text) <= most else _BOILERPLATE.sub("", text) for text in texts}
    if len(set(plain.values())) < len(plain):  # they differ in nothing else
        plain = {text: text for text in texts}
    short = _distinct(sorted(plain.values()), most)
    return [short[plain[text]] for text in texts]


def _distinct(texts: Sequence[str], most: int) -> dict[str, str]:
    alike: dict[str, list[str]] = {}
    for text in texts:
        alike.setdefault(shorten(text, most), []).append(text)  # each group is sorted as the texts are
    found: dict[str, str] = {}
    for short, group in alike.items():
        head = most // 3
        room = most - head - 1
        if len(group) == 1:
            found[group[0]] = short
        elif room < _MIN_CHARACTERS:
            found |= {text: f"{shorten(text, most - 4)} #{index}" for index, text in enumerate(group, 1)}
        else:
            common = _common_prefix(group[0], group[-1])
            # From the beginning of the word in which they begin to differ, unless it is long.
            word = _LAST_WORD.search(common)
            common = common[: word.start()] if word else common
            rest = _distinct([text[len(common) :] for text in group], room)
            found |= {text: f"{text[:head]}…{rest[text[len(common) :]]}" for text in group}
    return found


def _common_prefix(first: str, last: str) -> str:
    """Of sorted texts, by the first and the last."""
    pairs = zip(first, last, strict=False)
    return first[: next((at for at, (one, other) in enumerate(pairs) if one != other), min(len(first), len(last)))]
