"""A heat map as a small PNG: a palette and zlib, no imaging library. For places that cannot show SVG."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import numpy.typing as npt

from rankscope.analysis.plots import svg
from rankscope.analysis.plots.heat_map import shares
from rankscope.analysis.stats.robust import Floats

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
# Palette: one entry for missing, one for the paper between cells, the rest for the scale.
_MISSING, _PAPER, _FIRST, _STEPS = 0, 1, 2, 254
_LONGEST_SIDE = 2048


def heat_map_png(
    values: Floats, *, cell_pixels: int = 24, low: float | None = None, high: float | None = None
) -> bytes:
    """Cells without text, in the colours of `heat_map`: dark is low, bright is high, grey was not measured. Cells
    shrink where the picture would pass 2048 pixels; beyond one pixel a cell, the largest of its neighbours is kept."""
    grid = _fit(np.atleast_2d(np.asarray(values, dtype=np.float64)))
    share, _, _ = shares(grid, low, high)
    index = np.where(np.isnan(share), _MISSING, _FIRST + np.round(np.nan_to_num(share) * (_STEPS - 1))).astype(np.uint8)
    cell = max(1, min(cell_pixels, _LONGEST_SIDE // max(*grid.shape, 1)))
    pixels = index.repeat(cell, axis=0).repeat(cell, axis=1)
    if cell >= 8:
        pixels[cell - 1 :: cell, :] = _PAPER
        pixels[:, cell - 1 :: cell] = _PAPER
    return encode(pixels, palette())


def palette() -> npt.NDArray[np.uint8]:
    scale = svg.scale_rgb(np.linspace(0.0, 1.0, _STEPS))
    fixed = np.array([svg.rgb(svg.MISSING), svg.rgb(svg.PAPER)], dtype=np.uint8)
    return np.concatenate((fixed, scale))


def encode(pixels: npt.NDArray[np.uint8], colour_table: npt.NDArray[np.uint8]) -> bytes:
    """An indexed PNG of (rows, columns) palette numbers."""
    height, width = pixels.shape
    rows = np.zeros((height, width + 1), dtype=np.uint8)  # each row starts with its filter: none
    rows[:, 1:] = pixels
    header = struct.pack(">IIBBBBB", width, height, 8, 3, 0, 0, 0)
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", colour_table.tobytes()),
            _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def _fit(grid: Floats) -> Floats:
    for axis in (0, 1):
        every = -(-grid.shape[axis] // _LONGEST_SIDE)
        if every > 1:
            starts = np.arange(0, grid.shape[axis], every)
            grid = np.fmax.reduceat(grid, starts, axis=axis)
    return grid
