"""SVG as text. Every name that comes in is hostile until it went through `clean`."""

from __future__ import annotations

import html
import re

from rankscope.analysis.drawing.colours import INK, MUTED, PAPER

FONT_PIXELS = 12
# Of the common sans-serif faces at that size; enough to leave room by.
CHARACTER_PIXELS = 6.6
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def clean(text: str) -> str:
    """Escaped for element content and attributes."""
    return html.escape(printable(text))


def printable(text: str) -> str:
    """What XML forbids, what a terminal would obey and what turns text around is shown as �."""
    return _UNPRINTABLE.sub("\ufffd", text)


def element(tag: str, content: str = "", **attributes: str | float | None) -> str:
    """`content` is markup. `class_` gives class, `stroke_width` gives stroke-width; None leaves an attribute out."""
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
    turned: bool = False,
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
        # Attributes are what a bare SVG shows; a page's style sheet goes over them by class.
        class_=None if fill else ("muted" if muted else "ink"),
        fill=fill or (MUTED if muted else INK),
        font_weight="600" if bold else None,
        font_size=pixels,
        transform=f"rotate(-90 {_plain(x)} {_plain(y)})" if turned else None,
    )


def hover(text: str) -> str:
    return f"<title>{clean(text)}</title>"


def drawing(width: float, height: float, title: str, content: str) -> str:
    """One picture that stands alone or inside a page."""
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
