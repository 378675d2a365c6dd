"""SVG as text: elements, colours, axes, frames and legends. All text from outside is untrusted and must pass through
`clean`."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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

    low: float
    high: float
    first: float
    last: float
    log: bool
    unit: str
    shown: Display  # of a linear axis; ticks of a log axis have a unit each
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
    """A scale that contains all finite values (on a log axis all positive ones) and ends at round numbers."""
    known = [float(value) for value in values if value is not None and math.isfinite(value) and abs(value) < 1e300]
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
    return Scale(ticks[0], ticks[-1], first, last, False, axis.unit, shown, ticks, axis.title)


def round_step(spread: float, most: int) -> float:
    """The smallest of 1, 2, 5 × 10ⁿ that needs at most `most` steps for the spread."""
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
    """Message sizes are powers of two, so ticks are at 1, 4, 16, … of the unit."""
    start, end = math.floor(math.log2(low) + 1e-9), math.ceil(math.log2(high) - 1e-9)
    end = min(max(end, start + 1), 1000)
    stride = max(1, math.ceil((end - start) / most))
    ticks = tuple(2.0**power for power in range(start, end + 1, stride))
    return Scale(2.0**start, 2.0**end, first, last, True, axis.unit, Display(1.0, "B"), ticks, axis.title)


@dataclass(frozen=True)
class Frame:
    """The rectangle that data is drawn in, and the size of the drawing around it."""

    left: float
    right: float
    top: float
    bottom: float
    width: float
    height: float


def frame(inner_height: float, *, left: float, title: str, names: Sequence[str] = ()) -> Frame:
    """`names` are those of the legend; space is reserved for as many lines as it needs."""
    lines = max((line for line, _ in _legend_places(names)), default=-1) + 1
    top = 12.0 + (_TITLE_PIXELS if title else 0.0) + lines * _LEGEND_PIXELS
    bottom = top + inner_height
    return Frame(left, WIDTH - 34.0, top, bottom, WIDTH, bottom + _AXIS_PIXELS)


def heading(title: str, names: Sequence[str] = (), colours: Sequence[str] = ()) -> str:
    """The title, and below it the legend of colours."""
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
    parts.append(label(18, middle, scale.caption, anchor="middle", muted=True, rotated=True))
    return "".join(parts)


def base_line(inside: Frame, x: float) -> str:
    return element("line", x1=x, y1=inside.top, x2=x, y2=inside.bottom, stroke=MUTED, stroke_width=1, class_="base")


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, stroke=GRID, stroke_width=1, class_="grid")
