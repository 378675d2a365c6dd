"""Colours that survive colour blindness, print, and both a light and a dark page."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from rankscope.analysis.robust import Floats

Bytes3 = npt.NDArray[np.uint8]

# Okabe and Ito's set, the yellow left out: it vanishes on white.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#b8609a", "#9a9a9a",
)  # fmt: skip
CATEGORIES: tuple[str, ...] = (BLUE, ORANGE, GREEN, SKY, PURPLE, VERMILION, GREY)
MISSING = "#8f8f8f"
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"

# The scale in Oklab (lightness, green–red, blue–yellow), from end to end by way of green: lightness rises evenly, so
# the order survives any colour blindness and a grey print, and nothing on the way is grey: that stands for "missing".
_DARK = np.array((0.26, 0.01, -0.11))
_BRIGHT = np.array((0.94, -0.02, 0.16))
_BEND = np.array((0.0, -0.11, 0.0))
_TO_CONE = np.array(
    ((1.0, 0.3963377774, 0.2158037573), (1.0, -0.1055613458, -0.0638541728), (1.0, -0.0894841775, -1.2914855480))
)
_TO_LINEAR_RGB = np.array(
    (
        (4.0767416621, -3.3077115913, 0.2309699292),
        (-1.2684380046, 2.6097574011, -0.3413193965),
        (-0.0041960863, -0.7034186147, 1.7076147010),
    )
)


def category(index: int) -> str:
    return CATEGORIES[index % len(CATEGORIES)]


def scale_rgb(share: Floats) -> Bytes3:
    """Colours (…, 3) of shares from 0 (dark blue) to 1 (bright yellow); lightness rises evenly."""
    place = np.clip(np.asarray(share, dtype=np.float64), 0.0, 1.0)[..., None]
    lab = _DARK + (_BRIGHT - _DARK) * place + _BEND * 4 * place * (1 - place)
    linear = np.clip((lab @ _TO_CONE.T) ** 3 @ _TO_LINEAR_RGB.T, 0.0, 1.0)
    encoded = np.where(linear <= 0.0031308, 12.92 * linear, 1.055 * linear ** (1 / 2.4) - 0.055)
    return np.asarray(np.round(encoded * 255), dtype=np.uint8)


def scale_hex(share: Sequence[float] | Floats) -> list[str]:
    flat = scale_rgb(np.asarray(share, dtype=np.float64)).reshape(-1, 3).tolist()
    return [f"#{red:02x}{green:02x}{blue:02x}" for red, green, blue in flat]


def rgb(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)


def ink_on(share: float) -> str:
    """What can be read on the scale's colour at `share`."""
    return INK if share > 0.55 else "#ffffff"
