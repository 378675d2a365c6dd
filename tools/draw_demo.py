"""Runs the real demo and draws what it printed: docs/images/demo.svg (the README's picture) and demo.txt (the same
words, which tests/unit/test_docs.py holds the README against).

    .venv/bin/python tools/draw_demo.py

Refuses to draw a run whose verdict was wrong. The numbers are those of the machine it runs on: take an idle one."""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from unittest.mock import patch

from rich.terminal_theme import TerminalTheme
from rich.text import Text

from rankscope.cli import demo
from rankscope.cli.terminal import Terminal

IMAGES = Path(__file__).resolve().parent.parent / "docs" / "images"
COLUMNS = 92
CHARACTER_WIDTH = 12.2  # in the units of rich's SVG template
# Fonts of the reader's machine only: a picture in a README must not fetch anything.
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def _rgb(name: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(name)
    return red, green, blue


COLOURS = "484f58 ff7b72 3fb950 d29922 58a6ff bc8cff 39c5cf b1bac4"
THEME = TerminalTheme((22, 27, 34), (201, 209, 217), [_rgb(name) for name in COLOURS.split()])


def main() -> int:
    recorder = Terminal(record=True, width=COLUMNS)
    recorder.print(Text.assemble(("$ ", "dim"), "make demo"))

    parser = argparse.ArgumentParser()
    demo.add_arguments(parser)
    with patch.object(demo, "Terminal", lambda **_: recorder):
        status = demo.run(parser.parse_args([]))
    if status != 0:
        print("error: the demo's verdict was not right, so nothing was drawn; try again on an idle machine")
        return status
    IMAGES.mkdir(exist_ok=True)
    words = recorder.export_text(clear=False)
    (IMAGES / "demo.txt").write_text("".join(f"{line.rstrip()}\n" for line in words.splitlines()))
    (IMAGES / "demo.svg").write_text(portable(recorder.export_svg(title="rankscope demo", theme=THEME)))
    print(f"drawn: {IMAGES / 'demo.svg'}")
    return 0


def portable(svg: str) -> str:
    """The same picture for every renderer, fetching nothing."""
    svg = re.sub(r"@font-face\s*\{[^}]*\}", "", svg)
    svg = re.sub(r"<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    svg = re.sub(r"font-family:\s*Fira Code[^;]*;", f"font-family: {FONTS};", svg)
    # Some renderers drop spaces at the beginning of a text, and the columns with them.
    svg = re.sub(r'x="([\d.]+)"( y="[\d.]+") textLength="([\d.]+)"([^>]*)>((?:&#160;)+)', _moved, svg)
    svg = re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE)
    if "@import" in svg or re.search(r"(url\(|href=)[\"']?\s*(https?:)?//", svg):
        raise SystemExit(f"error: the picture would fetch something; rich's template has changed, see {__file__}")
    return svg.strip() + "\n"


def _moved(text: re.Match[str]) -> str:
    shift = CHARACTER_WIDTH * text[5].count("&")
    x, length = float(text[1]) + shift, max(0.0, float(text[3]) - shift)
    return f'x="{x:.1f}"{text[2]} textLength="{length:.1f}"{text[4]}>'


if __name__ == "__main__":
    sys.exit(main())
