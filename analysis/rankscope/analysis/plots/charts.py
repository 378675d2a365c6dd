"""Charts as SVG text: bars, and curves over two axes. Values that are None or not finite are not drawn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.plots import svg
from rankscope.analysis.plots.svg import Axis, Scale, element, frame, hover, is_finite, label, scale
from rankscope.analysis.quantities import quantity, shorten_all

Values = Sequence[float | None]
_ROW_PIXELS = 22.0
_BARS_PIXELS = 720.0
_PLOT_PIXELS = 300.0
_LABEL_CHARACTERS = 46


@dataclass(frozen=True)
class Series:
    """Values of one colour. By default colours are taken in turn from a palette for colour-blind readers."""

    name: str
    values: Values
    colour: str | None = None


@dataclass(frozen=True)
class Curve:
    """Points of one colour, with a line through them, with dots, or with both. A missing value breaks the line."""

    name: str
    x: Values
    y: Values
    colour: str | None = None
    has_line: bool = True
    dot_pixels: float = 2.5


def bars(
    labels: Sequence[str],
    series: Sequence[Series],
    *,
    axis: Axis,
    title: str = "",
    marked: Sequence[int] = (),
    row_title: str = "",
) -> str:
    """One horizontal bar per label, from the top. Bars of series with names are stacked, without values below zero, and
    have a legend. `marked` rows are highlighted."""
    is_stacked = any(one.name for one in series)
    fills = [one.colour or svg.category(index) for index, one in enumerate(series)]
    row = min(_ROW_PIXELS, max(1.5, _BARS_PIXELS / max(len(labels), 1)))
    shown = shorten_all(labels, _LABEL_CHARACTERS)
    left = min(max((svg.text_pixels(text) for text in shown), default=40.0) + 34, 340.0)
    legend = [(one.name, fill) for one, fill in zip(series, fills, strict=True)] if is_stacked else []
    inside = frame(row * max(len(labels), 1) + 4, left=left, title=title, legend=legend)
    drawn = [
        [
            (one.name, value, fill)
            for one, fill in zip(series, fills, strict=True)
            if is_finite(value := one.values[index]) and (value > 0 or not is_stacked)
        ]
        for index in range(len(labels))
    ]
    totals = [sum(value for _, value, _ in bar) for bar in drawn]
    across = scale(axis, totals, inside.left, inside.right, from_zero=True, most=8)
    parts = [svg.x_axis(inside, across), *svg.row_names(labels, shown, inside.left - 7, inside.top + 2, row)]
    thick = row - min(4.0, row * 0.2)
    for index, bar in enumerate(drawn):
        at = 0.0
        for name, value, fill in bar:
            start, end = sorted((across.place(at), across.place(at + value)))
            what = f"{labels[index]}: {name}" if name else f"{labels[index]}:"
            place = {"x": start, "y": inside.top + 2 + index * row, "width": max(end - start, 0.4), "height": thick}
            colour = svg.VERMILION if index in marked else fill
            parts.append(element("rect", hover(f"{what} {quantity(value, axis.unit)}"), **place, fill=colour))
            at += value
    parts.append(svg.base_line(inside, across.place(0.0)))
    if row_title:
        parts.append(label(16, (inside.top + inside.bottom) / 2, row_title, anchor="middle", muted=True, rotated=True))
    return inside.drawing(parts, axis.title)


def plot(curves: Sequence[Curve], *, across: Axis, up: Axis, title: str = "", diagonal: bool = False) -> str:
    """`diagonal` draws y = x (predicted against actual)."""
    fills = [one.colour or svg.category(index) for index, one in enumerate(curves)]
    named = [(one.name, fill) for one, fill in zip(curves, fills, strict=True) if one.name]
    inside = frame(_PLOT_PIXELS, left=84, title=title, legend=named if len(named) > 1 else ())
    x = scale(across, [value for one in curves for value in one.x], inside.left, inside.right, most=8)
    y = scale(up, [value for one in curves for value in one.y], inside.bottom, inside.top, from_zero=True)
    parts, dots = [svg.x_axis(inside, x), svg.y_axis(inside, y)], []
    low, high = max(x.low, y.low), min(x.high, y.high)
    if diagonal and low < high:
        parts.append(_path([(value, value) for value in (low, high)], x, y, svg.MUTED, dash="5 4"))
    for one, fill in zip(curves, fills, strict=True):
        for piece in _pieces(one, x, y):
            if one.has_line and len(piece) > 1:
                parts.append(_path(piece, x, y, fill))
            for at in piece if one.dot_pixels else ():
                note = f"{quantity(at[0], across.unit)}, {quantity(at[1], up.unit)}"
                place = {"cx": x.place(at[0]), "cy": y.place(at[1]), "r": one.dot_pixels}
                said = hover(f"{one.name}: {note}" if one.name else note)
                dots.append(element("circle", said, **place, fill=fill, fill_opacity=0.75))
    return inside.drawing([*parts, *dots], up.title)


def _pieces(curve: Curve, across: Scale, up: Scale) -> list[list[tuple[float, float]]]:
    """Runs of points without a gap."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.x, curve.y, strict=True):
        if across.can_place(x) and up.can_place(y):
            pieces[-1].append((x, y))
        else:
            pieces.append([])
    return pieces


def _path(points: Sequence[tuple[float, float]], across: Scale, up: Scale, colour: str, dash: str | None = None) -> str:
    text = " ".join(f"{across.place(x):.1f},{up.place(y):.1f}" for x, y in points)
    return element("polyline", points=text, fill="none", stroke=colour, stroke_width=1.6, stroke_dasharray=dash)
