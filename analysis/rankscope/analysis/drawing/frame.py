"""The plain parts of a plot: margins, title, grid, ticks, axis titles, legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.drawing.axes import Scale
from rankscope.analysis.drawing.colours import GRID, MUTED
from rankscope.analysis.drawing.quantities import shorten
from rankscope.analysis.drawing.svg import element, label, text_pixels

WIDTH = 860.0
_TITLE_PIXELS = 30.0
_LEGEND_PIXELS = 22.0
_AXIS_PIXELS = 44.0
_NAME_CHARACTERS = 40


@dataclass(frozen=True)
class Frame:
    """The rectangle that data is drawn in, and the picture around it."""

    left: float
    right: float
    top: float
    bottom: float
    width: float
    height: float


def frame(inner_height: float, *, left: float, title: str, names: Sequence[str] = (), width: float = WIDTH) -> Frame:
    """`names` are those of the legend: as many lines are left free as it takes."""
    lines = max((line for line, _ in _legend_places(names)), default=-1) + 1
    top = 12.0 + (_TITLE_PIXELS if title else 0.0) + lines * _LEGEND_PIXELS
    bottom = top + inner_height
    return Frame(left, width - 34.0, top, bottom, width, bottom + _AXIS_PIXELS)


def heading(title: str, names: Sequence[str] = (), colours: Sequence[str] = ()) -> str:
    """The title at the left, and below it what each colour stands for."""
    parts = [label(16, 26, title, bold=True, pixels=14)] if title else []
    first = 12.0 + (_TITLE_PIXELS if title else 0.0) + 8.0
    for name, colour, (line, x) in zip(names, colours, _legend_places(names), strict=True):
        short, y = shorten(name, _NAME_CHARACTERS), first + line * _LEGEND_PIXELS
        parts.append(element("rect", x=x, y=y - 9, width=10, height=10, rx=2, fill=colour))
        parts.append(label(x + 15, y, short, muted=True, tooltip=name if short != name else ""))
    return "".join(parts)


def _legend_places(names: Sequence[str]) -> list[tuple[int, float]]:
    """Line and position of each name."""
    places = []
    line, x = 0, 16.0
    for name in names:
        wide = 15 + text_pixels(shorten(name, _NAME_CHARACTERS))
        if x > 16 and x + wide > WIDTH - 16:
            line, x = line + 1, 16.0
        places.append((line, x))
        x += wide + 18
    return places


def x_axis(inside: Frame, scale: Scale) -> str:
    parts = []
    for tick in scale.ticks:
        x = scale.place(tick)
        parts.append(_rule(x, inside.top, x, inside.bottom))
        parts.append(label(x, inside.bottom + 16, scale.tick_text(tick), anchor="middle", muted=True))
    middle = (inside.left + inside.right) / 2
    parts.append(label(middle, inside.bottom + 35, scale.caption, anchor="middle", muted=True))
    return "".join(parts)


def y_axis(inside: Frame, scale: Scale) -> str:
    parts = []
    for tick in scale.ticks:
        y = scale.place(tick)
        parts.append(_rule(inside.left, y, inside.right, y))
        parts.append(label(inside.left - 7, y + 4, scale.tick_text(tick), anchor="end", muted=True))
    middle = (inside.top + inside.bottom) / 2
    parts.append(label(18, middle, scale.caption, anchor="middle", muted=True, turned=True))
    return "".join(parts)


def base_line(inside: Frame, x: float) -> str:
    return element("line", x1=x, y1=inside.top, x2=x, y2=inside.bottom, stroke=MUTED, stroke_width=1, class_="base")


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=GRID, stroke_width=1, class_="grid")
