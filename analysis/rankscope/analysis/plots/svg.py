"""SVG as text: elements, colours, axes, frames and legends. All text from outside is untrusted and must pass through
`clean`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeGuard

import numpy as np
import numpy.typing as npt

from rankscope.analysis.quantities import Display, display, number, quantity, shorten
from rankscope.analysis.stats.robust import Floats
from rankscope.common.text import printable

Bytes3 = npt.NDArray[np.uint8]
# The palette of Okabe and Ito without yellow, which is invisible on white.
BLUE, ORANGE, GREEN, VERMILION, SKY, PURPLE, GREY = (
    "#0072b2", "#e69f00", "#009e73", "#d55e00", "#56b4e9", "#b8609a", "#9a9a9a",
)  # fmt: skip
CATEGORIES: tuple[str, ...] = (BLUE, ORANGE, GREEN, SKY, PURPLE, VERMILION, GREY)
MISSING = "#8f8f8f"
INK, MUTED, GRID, PAPER = "#1f2328", "#59636e", "#d8dee4", "#ffffff"
# The scale in Oklab (lightness, green–red, blue–yellow), from end to end via green. Lightness rises evenly, so the
# order survives colour blindness and greyscale print. No colour on the way is grey, which means "missing".
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
FONT_PIXELS = 12
# Average width in common sans-serif fonts at that size; enough to reserve space.
CHARACTER_PIXELS = 6.6
WIDTH = 860.0
_TITLE_PIXELS = 30.0
_LEGEND_PIXELS = 22.0
_AXIS_PIXELS = 44.0
_NAME_CHARACTERS = 40


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


def ink_on(share: float) -> str:
    """A text colour that is readable on the scale's colour at `share`."""
    return INK if share > 0.55 else "#ffffff"


def clean(text: str) -> str:
    """Escaped for element content and attributes."""
    return html.escape(printable(text))


def element(tag: str, content: str = "", **attributes: str | float | None) -> str:
    """`content` is markup. `class_` becomes class, `stroke_width` becomes stroke-width; None omits an attribute."""
    parts = [
        f' {name.rstrip("_").replace("_", "-")}="{clean(_plain(value))}"'
        for name, value in attributes.items()
        if value is not None
    ]
    return f"<{tag}{''.join(parts)}>{content}</{tag}>" if content else f"<{tag}{''.join(parts)}/>"


def label(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    muted: bool = False,
    bold: bool = False,
    rotated: bool = False,
    fill: str | None = None,
    tooltip: str = "",
    pixels: float | None = None,
) -> str:
    content = clean(text) + (hover(tooltip) if tooltip else "")
    return element(
        "text",
        content,
        x=x,
        y=y,
        text_anchor=None if anchor == "start" else anchor,
        # Attributes apply in a standalone SVG; a page's style sheet overrides them by class.
        class_=None if fill else ("muted" if muted else "ink"),
        fill=fill or (MUTED if muted else INK),
        font_weight="600" if bold else None,
        font_size=pixels,
        transform=f"rotate(-90 {_plain(x)} {_plain(y)})" if rotated else None,
    )


def hover(text: str) -> str:
    return f"<title>{clean(text)}</title>"


def drawing(width: float, height: float, title: str, content: str) -> str:
    """A drawing, standalone or for a page."""
    background = element("rect", width=width, height=height, fill=PAPER, class_="paper")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_plain(width)} {_plain(height)}" '
        f'width="{_plain(width)}" height="{_plain(height)}" role="img" aria-label="{clean(title)}" '
        f"font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\" "
        f'font-size="{FONT_PIXELS}">{background}{content}</svg>'
    )


def text_pixels(text: str) -> float:
    return len(text) * CHARACTER_PIXELS


def _plain(value: str | float) -> str:
    if isinstance(value, str):
        return value
    text = f"{value:.2f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True)
class Axis:
    """What an axis shows. `unit` is that of the data: us, s, B, B/s, ratio, … (see quantities)."""

    title: str
    unit: str = ""
    log: bool = False


@dataclass(frozen=True)
class Scale:
    """A drawn axis: maps values from `low` to `high` to pixels from `first` to `last`."""

    axis: Axis
    low: float
    high: float
    first: float
    last: float
    ticks: tuple[float, ...]
    shown: Display  # of a linear axis; ticks of a log axis have a unit each

    def cut(self, low: float, high: float) -> Scale:
        """With these ends instead of round numbers."""
        ticks = tuple(tick for tick in self.ticks if low <= tick <= high * (1 + 1e-9))
        return replace(self, low=low, high=high, ticks=ticks)

    def can_place(self, value: float | None) -> TypeGuard[float]:
        return is_finite(value) and (value > 0 or not self.axis.log)

    def place(self, value: float) -> float:
        low, high, here = self.low, self.high, value
        if self.axis.log:
            low, high, here = math.log10(low), math.log10(high), math.log10(max(value, self.low * 1e-3))
        return self.first + (self.last - self.first) * (here - low) / (high - low)

    def tick_text(self, tick: float) -> str:
        text, symbol = number(tick / self.shown.factor), ""
        if self.axis.log:
            text, _, symbol = quantity(tick, self.axis.unit).partition(" ")
        text = text.rstrip("0").rstrip(".") if "." in text and "e" not in text else text
        return f"{text} {symbol}".rstrip()

    @property
    def caption(self) -> str:
        has_unit = self.shown.symbol and not self.axis.log
        return f"{self.axis.title} ({self.shown.symbol})" if has_unit else self.axis.title


def is_finite(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)


def scale(
    axis: Axis, values: Iterable[float | None], first: float, last: float, *, from_zero: bool = False, most: int = 6
) -> Scale:
    """A scale that contains all finite values (on a log axis all positive ones) and ends at round numbers. A log axis
    does not begin at zero."""
    known = [float(value) for value in values if is_finite(value) and abs(value) < 1e300]
    if axis.log:
        return _log_scale(axis, [value for value in known if value > 0], first, last, most)
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    if from_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    shown = display(axis.unit, (low, high))
    # A spread so small that steps between its ends are lost in rounding is drawn as one value.
    if not high - low > abs(high) * 1e-9:
        spread = abs(high) * 0.1 or shown.factor
        low, high = (low - spread if not from_zero else min(low, 0.0)), high + spread
    step = round_step((high - low) / shown.factor, most) * shown.factor
    start, end = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(index * step for index in range(start, end + 1))
    return Scale(axis, ticks[0], ticks[-1], first, last, ticks, shown)


def round_step(spread: float, most: int) -> float:
    """The smallest of 1, 2, 5 × 10ⁿ that needs at most `most` steps for the spread."""
    raw = spread / most
    power = 10.0 ** math.floor(math.log10(raw))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw * (1 - 1e-9))


def _log_scale(axis: Axis, known: list[float], first: float, last: float, most: int) -> Scale:
    """Ticks at powers of ten; of two for message sizes: at 1, 4, 16, … of the unit."""
    base, log, most_power = (2.0, math.log2, 1000) if axis.unit == "B" else (10.0, math.log10, 300)
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    start = max(math.floor(log(low) + 1e-9), -most_power)
    end = max(min(math.ceil(log(high) - 1e-9), most_power), start + 1)
    ticks = tuple(base**power for power in range(start, end + 1, math.ceil((end - start) / most)))
    if base == 10.0 and end - start == 1:
        ticks = tuple(factor * 10.0**start for factor in (1, 2, 5, 10))
    return Scale(axis, base**start, base**end, first, last, ticks, display(axis.unit, ()))


@dataclass(frozen=True)
class Frame:
    """The rectangle that data is drawn in, below a title and a legend."""

    left: float
    top: float
    bottom: float
    title: str
    head: str
    right: ClassVar = WIDTH - 34.0

    def drawing(self, parts: Iterable[str], name: str = "") -> str:
        """`name` is for readers of the screen, where there is no title."""
        return drawing(WIDTH, self.bottom + _AXIS_PIXELS, self.title or name, self.head + "".join(parts))


def frame(inner_height: float, *, left: float, title: str, legend: Sequence[tuple[str, str]] = ()) -> Frame:
    """`legend`: names with their colours, in as many lines as they need."""
    parts = [heading(title)]
    x, top = 16.0, 12.0 + (_TITLE_PIXELS if title else 0.0)
    for name, colour in legend:
        short = shorten(name, _NAME_CHARACTERS)
        wide = 15 + text_pixels(short)
        if x > 16 and x + wide > WIDTH - 16:
            x, top = 16.0, top + _LEGEND_PIXELS
        parts.append(element("rect", x=x, y=top - 1, width=10, height=10, rx=2, fill=colour))
        parts.append(label(x + 15, top + 8, short, muted=True, tooltip=name if short != name else ""))
        x += wide + 18
    top += _LEGEND_PIXELS if legend else 0.0
    return Frame(left, top, top + inner_height, title, "".join(parts))


def heading(title: str) -> str:
    return label(16, 26, title, bold=True, pixels=14) if title else ""


def row_names(names: Sequence[str], shown: Sequence[str], right: float, top: float, row_pixels: float) -> list[str]:
    """As many names as there is room for; those that are shown shortened have a tooltip."""
    parts = []
    for row in range(0, len(names), max(1, math.ceil(13 / row_pixels))):
        tip = names[row] if shown[row] != names[row] else ""
        parts.append(label(right, top + (row + 0.5) * row_pixels + 4, shown[row], anchor="end", tooltip=tip))
    return parts


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
    parts.append(label(18, middle, scale.caption, anchor="middle", muted=True, rotated=True))
    return "".join(parts)


def base_line(inside: Frame, x: float, pixels: float = 1) -> str:
    return element(
        "line", x1=x, y1=inside.top, x2=x, y2=inside.bottom, stroke=MUTED, stroke_width=pixels, class_="base"
    )


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=GRID, stroke_width=1, class_="grid")
