"""A heat map as SVG: one value per row and column (ranks by steps, stages by data-parallel ranks). Missing values
are hatched."""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence

import numpy as np

from rankscope.analysis.plots import svg
from rankscope.analysis.plots.svg import WIDTH, Axis, drawing, element, heading, hover, label, scale, text_pixels
from rankscope.analysis.quantities import NOT_MEASURED, display, number, quantity, shorten_all
from rankscope.analysis.stats.robust import Floats

_CELL_PIXELS = 34.0
_MIN_PIXELS = 2.0
_HEIGHT_PIXELS = 720.0
# Numbers are written into cells only if there is room and not too many of them.
_WRITTEN_CELLS = 400
_COLOUR_BAR_PIXELS = 84.0


def heat_map(
    values: Floats,
    *,
    row_labels: Sequence[str],
    column_labels: Sequence[str],
    title: str = "",
    unit: str = "",
    column_title: str = "",
    value_title: str = "",
    low: float | None = None,
    high: float | None = None,
) -> str:
    """Dark is low, bright is high, perceptually uniform. `low` and `high` fix the scale; otherwise the data does."""
    grid = np.atleast_2d(np.asarray(values, dtype=np.float64))
    rows, columns = grid.shape
    share, bottom, top = shares(grid, low, high)
    names = shorten_all(row_labels, 30)
    left = max((text_pixels(text) for text in names), default=20.0) + 20
    head = 14.0 + (26 if title else 0)
    wide = min(_CELL_PIXELS * 1.6, max(_MIN_PIXELS, (WIDTH - left - _COLOUR_BAR_PIXELS - 20) / max(columns, 1)))
    tall = min(_CELL_PIXELS, max(_MIN_PIXELS, _HEIGHT_PIXELS / max(rows, 1)))
    inner_width, inner_height = wide * columns, tall * rows
    width = max(left + inner_width + _COLOUR_BAR_PIXELS + 20, 32 + text_pixels(title) * 1.35, 320.0)
    shown = display(unit, [bottom, top])
    written = rows * columns <= _WRITTEN_CELLS and wide >= 34 and tall >= 15
    # A unique name per drawing: a pattern inside a collapsed part of a page cannot be used by other drawings.
    hatch = f"missing-{zlib.crc32(grid.tobytes() + title.encode('utf-8', 'replace')):08x}"
    parts = [heading(title)]
    fills = svg.scale_hex(np.nan_to_num(share).ravel())
    cells = zip(grid.ravel().tolist(), share.ravel().tolist(), fills, strict=True)
    for index, (value, part, fill) in enumerate(cells):
        row, column = divmod(index, columns)
        x, y = left + column * wide, head + row * tall
        known = math.isfinite(value)
        note = f"{row_labels[row]}, {column_labels[column]}: {quantity(value, unit) if known else 'not measured'}"
        # A thin gap between cells, unless the cells themselves are thin.
        gap = 1.0 if min(wide, tall) > 6 else 0.0
        box = {"x": x, "y": y, "width": max(wide - gap, 0.5), "height": max(tall - gap, 0.5)}
        parts.append(element("rect", hover(note), **box, fill=fill if known else f"url(#{hatch})"))
        if written:
            text = number(value / shown.factor) if known else NOT_MEASURED
            ink = svg.ink_on(part) if known else svg.INK
            if text_pixels(text) * 0.8 < wide:
                parts.append(label(x + wide / 2, y + tall / 2 + 3.5, text, anchor="middle", fill=ink, pixels=10))
    parts += svg.row_names(row_labels, names, left - 6, head, tall)
    parts += _column_names(column_labels, left, head + inner_height + 15, wide)
    if column_title:
        parts.append(label(left + inner_width / 2, head + inner_height + 34, column_title, anchor="middle", muted=True))
    bar_height = max(inner_height, 60.0)
    parts.append(_colour_bar(left + inner_width + 18, head, bar_height, Axis(value_title, unit), bottom, top))
    height = head + bar_height + 46
    return drawing(width, height, title, _hatching(hatch) + "".join(parts))


def shares(grid: Floats, low: float | None = None, high: float | None = None) -> tuple[Floats, float, float]:
    """The position of each value between the ends of the colour scale, and those ends. Missing values stay NaN."""
    with np.errstate(invalid="ignore"):
        finite = np.where(np.isfinite(grid), grid, np.nan)
    known = finite[~np.isnan(finite)]
    bottom = low if low is not None else float(known.min()) if len(known) else 0.0
    top = high if high is not None else float(known.max()) if len(known) else 1.0
    if not top > bottom:
        # All values equal: the low end of the scale, which does not look like an alarm.
        return np.where(np.isnan(finite), np.nan, 0.0), bottom, bottom + (abs(bottom) * 0.1 or 1.0)
    return np.clip((finite - bottom) / (top - bottom), 0.0, 1.0), bottom, top


def _hatching(name: str) -> str:
    return (
        f'<defs><pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse">'
        f'<rect width="6" height="6" fill="{svg.MISSING}" fill-opacity="0.18"/>'
        f'<path d="M0 6L6 0" stroke="{svg.MISSING}" stroke-width="1"/></pattern></defs>'
    )


def _column_names(labels: Sequence[str], left: float, y: float, wide: float) -> list[str]:
    short = shorten_all(labels, 16)
    every = max(1, math.ceil((max((text_pixels(text) for text in short), default=0.0) + 8) / wide))
    return [
        label(left + (column + 0.5) * wide, y, short[column], anchor="middle", muted=True)
        for column in range(0, len(short), every)
    ]


def _colour_bar(x: float, y: float, height: float, axis: Axis, low: float, high: float) -> str:
    drawn = scale(axis, [low, high], y + height, y, most=5).cut(low, high)
    stops = svg.scale_hex(np.linspace(0.0, 1.0, 32))
    piece = height / len(stops)
    parts = [
        element("rect", x=x, y=y + height - (index + 1) * piece, width=12, height=piece + 0.5, fill=fill)
        for index, fill in enumerate(stops)
    ]
    for tick in drawn.ticks:
        text = f"{drawn.tick_text(tick)} {drawn.shown.symbol}".rstrip()
        parts.append(label(x + 17, drawn.place(tick) + 4, text, muted=True, pixels=11))
    return "".join(parts) + (hover(axis.title) if axis.title else "")
