"""What a table of metrics guarantees, whatever a row reads."""

from __future__ import annotations

import math
from collections.abc import Mapping

from rankscope.common.metric_table import ANY, FULL_ONLY, LABEL_CHARACTERS, Counter, Gauge, Section
from tools.exported_metrics import exported_metrics

Values = Mapping[str, float | None]


def series(section: Section[Values], *subjects: tuple[str, Values], full: bool = True) -> dict[tuple[str, ...], float]:
    families = section.families((((name,), values) for name, values in subjects), full=full)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_unknown_non_finite_and_unlisted_values_have_no_series() -> None:
    row: Gauge[Values] = Gauge("a_ratio", "Help.", lambda values: values, {"kind": ("x", "y", "z")})
    assert series(Section(("who",), (row,)), ("s", {"x": None, "y": math.nan, "z": 2, "forged": 3})) == {
        ("a_ratio", "s", "z"): 2.0
    }


def test_a_counter_does_not_go_below_zero() -> None:
    row: Counter[Values] = Counter("a_seconds_total", "Help.", lambda values: values, {"kind": ANY})
    assert series(Section(("who",), (row,)), ("s", {"x": -1.0, "y": 1.0})) == {("a_seconds_total", "s", "y"): 1.0}


def test_labels_are_bounded_and_the_first_duplicate_wins() -> None:
    row: Gauge[Values] = Gauge("a_ratio", "Help.", lambda values: values, {"kind": ANY})
    long = "x" * LABEL_CHARACTERS
    found = series(Section(("who",), (row,)), ("s\n", {long + "1": 1, long + "2": 2}), ("s ", {"x": 3}))
    assert found == {("a_ratio", "s ", "x" * (LABEL_CHARACTERS - 1) + "…"): 1.0}


def test_the_standard_detail_shows_only_what_a_row_lists() -> None:
    some: Gauge[Values] = Gauge("a_ratio", "Help.", lambda values: values, {"kind": ANY}, standard=["x"])
    none: Gauge[Values] = Gauge("b_ratio", "Help.", lambda values: values["x"], standard=FULL_ONLY)
    section = Section(("who",), (some, none))
    assert series(section, ("s", {"x": 1, "y": 2}), full=False) == {("a_ratio", "s", "x"): 1.0}
    assert len(series(section, ("s", {"x": 1, "y": 2}))) == 3


def test_names_follow_the_conventions_of_prometheus() -> None:
    for name, metric in exported_metrics().items():
        assert name.startswith("rankscope_")
        assert (metric.type == "counter") == name.endswith("_total"), name
        assert metric.help.endswith("."), name
