from __future__ import annotations

import math
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from rankscope.analysis.plots import charts
from rankscope.analysis.plots import svg as colours
from rankscope.analysis.plots.charts import Curve, Series
from rankscope.analysis.plots.heat_map import heat_map
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis

SVG = "{http://www.w3.org/2000/svg}"
HOSTILE = "</title><script>alert(1)</script>\x00\x1b[31m\ud800\u202e\"'&"
TIME = Axis("time", "us")


def _blocks(svg: str) -> dict[str, tuple[float, float, str]]:
    """What each bar says, where it starts, how long it is, and its colour."""
    found = {}
    for block in ElementTree.fromstring(svg).iter(f"{SVG}rect"):
        title = block.find(f"{SVG}title")
        if title is not None and title.text:
            found[title.text] = (float(block.attrib["x"]), float(block.attrib["width"]), block.attrib["fill"])
    return found


def test_bar_lengths_match_values_and_the_marked_bar_stands_out() -> None:
    blocks = _blocks(charts.bars(["a", "b", "c"], [Series("", [100.0, 50.0, None])], axis=TIME, marked=[1]))
    assert list(blocks) == ["a: 100 µs", "b: 50 µs"]
    assert blocks["b: 50 µs"][1] == pytest.approx(blocks["a: 100 µs"][1] / 2, abs=0.02)
    assert blocks["b: 50 µs"][2] == colours.VERMILION != blocks["a: 100 µs"][2]


def test_stacked_parts_follow_each_other_without_gap_or_overlap() -> None:
    series = [Series("compute", [60.0, 10.0]), Series("idle", [40.0, math.nan]), Series("copy", [20.0, 5.0])]
    blocks = list(_blocks(charts.bars(["0", "1"], series, axis=TIME)).values())
    for before, after in ((blocks[0], blocks[1]), (blocks[1], blocks[2]), (blocks[3], blocks[4])):
        assert before[0] + before[1] == pytest.approx(after[0], abs=0.02)
    assert len({colour for _, _, colour in blocks}) == 3


def test_missing_values_break_lines_and_log_axes_omit_zero() -> None:
    svg = charts.plot([Curve("r", range(5), [1.0, 2.0, None, 1.0, 3.0])], across=Axis("step"), up=TIME)
    assert len(list(ElementTree.fromstring(svg).iter(f"{SVG}polyline"))) == 2
    clouds = [Curve("ops", [0.0, 10.0, 1000.0], [1.0, 10.0, math.inf], has_line=False)]
    svg = charts.plot(clouds, across=Axis("size", "B", log=True), up=Axis("time", "us", log=True))
    assert [title.text for title in ElementTree.fromstring(svg).iter(f"{SVG}title")] == ["ops: 10 B, 10 µs"]


def test_a_heat_map_tells_every_cell_and_hatches_the_missing() -> None:
    values = np.array([[1.0, 2.0], [np.nan, 3.0]])
    blocks = _blocks(heat_map(values, row_labels=["s0", "s1"], column_labels=["d0", "d1"], unit="x"))
    assert list(blocks) == ["s0, d0: 1 ×", "s0, d1: 2 ×", "s1, d0: not measured", "s1, d1: 3 ×"]
    fills = [colour for _, _, colour in blocks.values()]
    assert fills[2].startswith("url(#missing")
    assert [fills[0], fills[3]] == colours.scale_hex([0.0, 1.0])


def test_equal_cells_are_not_painted_as_an_alarm() -> None:
    blocks = _blocks(heat_map(np.ones((2, 2)), row_labels=["a", "b"], column_labels=["c", "d"]))
    assert {colour for _, _, colour in blocks.values()} == set(colours.scale_hex([0.0]))


def test_scale_lightness_rises_evenly_and_no_colour_is_grey() -> None:
    rgb = colours.scale_rgb(np.linspace(0, 1, 64)).astype(float) / 255
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    lightness = np.cbrt(linear @ (0.2126, 0.7152, 0.0722))
    steps = np.diff(lightness)
    assert steps.min() > 0 and steps.max() < 3 * np.median(steps)
    assert (rgb.max(axis=1) - rgb.min(axis=1)).min() > 0.15


def test_names_from_a_hostile_file_are_shown_and_never_run() -> None:
    plots = [
        charts.bars([HOSTILE], [Series("", [1.0])], axis=TIME, title=HOSTILE, row_title=HOSTILE),
        charts.bars([HOSTILE], [Series(HOSTILE, [1.0])], axis=Axis(HOSTILE, HOSTILE)),
        charts.plot([Curve(HOSTILE, [1.0], [1.0])], across=Axis(HOSTILE, HOSTILE), up=TIME, diagonal=True),
        heat_map(np.ones((1, 1)), row_labels=[HOSTILE], column_labels=[HOSTILE], title=HOSTILE),
    ]
    for plot in plots:
        tags = {node.tag.removeprefix(SVG) for node in ElementTree.fromstring(plot).iter()}
        assert "script" not in tags
    text = page(HOSTILE, [Section(HOSTILE, [HOSTILE], [Table([HOSTILE], [[HOSTILE]])], plots)], lead=HOSTILE)
    text.encode("utf-8")
    assert "<script" not in text and "\x00" not in text and "http:" not in text and "https:" not in text


def test_a_table_breaks_only_words_too_long_for_a_page() -> None:
    kernel = "void_at_native_vectorized_elementwise_kernel<4,CUDAFunctor_add<float>>"
    rows = [["kernels launched one by one", "1 ms", f"{kernel} is first"]]
    drawn = page("t", [Section("s", tables=[Table(["loss", "per step", "evidence"], rows, [False, True, False])])])
    assert "<td>kernels launched one by one</td>" in drawn and '<td class="w">void_at' in drawn
    styles = [line for line in drawn.splitlines() if "overflow-wrap" in line]
    assert {line.partition(" ")[0] for line in styles} == {"p", "td.w"}


def test_bar_labels_differ_and_tooltips_have_the_full_names() -> None:
    names = [
        f"void at::native::reduce_kernel<512, 1, at::native::{name}<float>, {'x' * 60}>" for name in ("Max", "Min")
    ]
    drawn = ElementTree.fromstring(charts.bars(names, [Series("", [2.0, 1.0])], axis=TIME))
    found = {
        (text.text, title.text) for text in drawn.iter(f"{SVG}text") if (title := text.find(f"{SVG}title")) is not None
    }
    assert len({shown for shown, _ in found}) == 2 and {full for _, full in found} == set(names)
