"""Charts as SVG text: bars, stacked bars, lines, scatter. Values that are None or not finite are not
drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rankscope.analysis.plots import svg
from rankscope.analysis.plots.svg import (
    Axis,
    Scale,
    base_line,
    drawing,
    element,
    frame,
    heading,
    hover,
    label,
    scale,
    text_pixels,
    x_axis,
    y_axis,
)
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
class Cloud:
    """Points of one colour; `notes` are their tooltips."""

    name: str
    x: Values
    y: Values
    colour: str | None = None
    notes: Sequence[str] = ()


def bars(
    labels: Sequence[str],
    values: Values,
    *,
    axis: Axis,
    title: str = "",
    marked: Sequence[int] = (),
    row_title: str = "",
) -> str:
    """One horizontal bar per label, from the top. `marked` rows are highlighted."""
    plain = Series(axis.title, values, svg.BLUE)
    return _horizontal_bars(labels, (plain,), axis, title, row_title, frozenset(marked), legend=False)


def stacked_bars(
    labels: Sequence[str], series: Sequence[Series], *, axis: Axis, title: str = "", row_title: str = ""
) -> str:
    """One horizontal bar per label, stacked from each series' value. Values below zero are not drawn."""
    return _horizontal_bars(labels, series, axis, title, row_title, frozenset(), legend=True)


def lines(
    positions: Sequence[float],
    series: Sequence[Series],
    *,
    across: Axis,
    up: Axis,
    title: str = "",
) -> str:
    """One line per series over common positions. A missing value breaks the line."""
    clouds = [Cloud(one.name, positions, one.values, one.colour) for one in series]
    return _plot(clouds, (), across, up, title, joined=True, diagonal=False)


def scatter(
    clouds: Sequence[Cloud],
    *,
    across: Axis,
    up: Axis,
    title: str = "",
    curves: Sequence[Cloud] = (),
    diagonal: bool = False,
) -> str:
    """Points, with fitted `curves` on top; `diagonal` draws y = x (predicted against actual)."""
    return _plot(clouds, curves, across, up, title, joined=False, diagonal=diagonal)


def _horizontal_bars(
    labels: Sequence[str],
    series: Sequence[Series],
    axis: Axis,
    title: str,
    row_title: str,
    marked: frozenset[int],
    *,
    legend: bool,
) -> str:
    row = min(_ROW_PIXELS, max(1.5, _BARS_PIXELS / max(len(labels), 1)))
    shown = shorten_all(labels, _LABEL_CHARACTERS)
    left = min(max((text_pixels(text) for text in shown), default=40.0) + 34, 340.0)
    inside = frame(
        row * max(len(labels), 1) + 4, left=left, title=title, names=[one.name for one in series] if legend else ()
    )
    fills = [one.colour or svg.category(index) for index, one in enumerate(series)]
    drawn = [[_positive(value) for value in one.values] for one in series]
    totals = [sum(column) for column in zip(*drawn, strict=True)] if legend else _known(series[0].values)
    across = scale(axis, totals, inside.left, inside.right, from_zero=True, most=8)
    parts = [heading(title, [one.name for one in series] if legend else (), fills if legend else ())]
    parts.append(x_axis(inside, across))
    every = max(1, math.ceil(13 / row))  # a name needs 13 pixels
    for index, text in enumerate(labels):
        y = inside.top + 2 + index * row
        if index % every == 0:
            tip = text if shown[index] != text else ""
            parts.append(label(inside.left - 7, y + row / 2 + 4, shown[index], anchor="end", tooltip=tip))
        thick = row - min(4.0, row * 0.2)
        at = 0.0
        for one, fill in zip(series, fills, strict=True):
            value = one.values[index]
            if value is None or not math.isfinite(value) or (legend and value <= 0):
                continue
            start, end = sorted((across.place(at), across.place(at + value)))
            note = (
                f"{text}: {one.name} {quantity(value, axis.unit)}"
                if legend
                else f"{text}: {quantity(value, axis.unit)}"
            )
            colour = svg.VERMILION if index in marked else fill
            parts.append(_block(start, y, max(end - start, 0.4), thick, colour, note))
            at = at + value if legend else 0.0
    parts.append(base_line(inside, across.place(0.0)))
    if row_title:
        parts.append(label(16, (inside.top + inside.bottom) / 2, row_title, anchor="middle", muted=True, rotated=True))
    return drawing(inside.width, inside.height, title or axis.title, "".join(parts))


def _plot(
    clouds: Sequence[Cloud],
    curves: Sequence[Cloud],
    x: Axis,
    y: Axis,
    title: str,
    *,
    joined: bool,
    diagonal: bool,
) -> str:
    everything = [*clouds, *curves]
    named = [one for one in everything if one.name]
    fills = {id(one): one.colour or svg.category(index) for index, one in enumerate(everything)}
    legend = len(named) > 1
    inside = frame(_PLOT_PIXELS, left=84, title=title, names=[one.name for one in named] if legend else ())
    xs = [value for one in everything for value in one.x]
    ys = [value for one in everything for value in one.y]
    across = scale(x, xs, inside.left, inside.right, most=8)
    up = scale(y, ys, inside.bottom, inside.top, from_zero=joined)
    parts = [heading(title, *(([c.name for c in named], [fills[id(c)] for c in named]) if legend else ()))]
    parts += [x_axis(inside, across), y_axis(inside, up)]
    if diagonal:
        low, high = max(across.low, up.low), min(across.high, up.high)
        if low < high:
            ends = [(across.place(value), up.place(value)) for value in (low, high)]
            parts.append(_path(ends, svg.MUTED, dashed=True))
    for one in curves:
        parts += [_path(piece, fills[id(one)]) for piece in _pieces(one, across, up)]
    for one in clouds:
        pieces = _pieces(one, across, up)
        if joined:
            parts += [_path(piece, fills[id(one)]) for piece in pieces]
        parts.append(_points(one, across, up, fills[id(one)], x.unit, y.unit, small=joined))
    return drawing(inside.width, inside.height, title or y.title, "".join(parts))


def _pieces(cloud: Cloud, across: Scale, up: Scale) -> list[list[tuple[float, float]]]:
    """Runs of points without a gap."""
    pieces: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(cloud.x, cloud.y, strict=True):
        if not (_drawable(x, across) and _drawable(y, up)):
            pieces.append([])
        elif x is not None and y is not None:
            pieces[-1].append((across.place(x), up.place(y)))
    return [piece for piece in pieces if len(piece) > 1]


def _points(cloud: Cloud, across: Scale, up: Scale, colour: str, x_unit: str, y_unit: str, *, small: bool) -> str:
    parts = []
    for index, (x, y) in enumerate(zip(cloud.x, cloud.y, strict=True)):
        if x is None or y is None or not (_drawable(x, across) and _drawable(y, up)):
            continue
        note = cloud.notes[index] if index < len(cloud.notes) else f"{quantity(x, x_unit)}, {quantity(y, y_unit)}"
        text = f"{cloud.name}: {note}" if cloud.name else note
        place = {"cx": across.place(x), "cy": up.place(y)}
        parts.append(element("circle", hover(text), **place, r=2.5 if small else 3.5, fill=colour, fill_opacity=0.75))
    return "".join(parts)


def _path(points: Sequence[tuple[float, float]], colour: str, *, dashed: bool = False) -> str:
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = "5 4" if dashed else None
    return element("polyline", points=text, fill="none", stroke=colour, stroke_width=1.6, stroke_dasharray=dash)


def _block(x: float, y: float, width: float, height: float, colour: str, note: str) -> str:
    return element("rect", hover(note), x=x, y=y, width=width, height=height, fill=colour)


def _drawable(value: float | None, on: Scale) -> bool:
    return value is not None and math.isfinite(value) and not (on.log and value <= 0)


def _positive(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) and value > 0 else 0.0


def _known(values: Values) -> list[float]:
    return [value for value in values if value is not None and math.isfinite(value)]
