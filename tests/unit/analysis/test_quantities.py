from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rankscope.analysis.plots.svg import Axis, scale
from rankscope.analysis.quantities import number, quantity, shorten, shorten_all


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (1234.5, "us", "1.23 ms"),
        (0.25, "us", "250 ns"),
        (0, "us", "0 µs"),
        (59e6, "us", "59 s"),
        (2e9, "us", "33.3 min"),
        (26214400, "B", "25 MiB"),
        (485.1191e9, "B/s", "485 GB/s"),
        (0.875, "ratio", "87.5 %"),
        (1.97, "x", "1.97 ×"),
        (None, "us", "–"),
        (math.nan, "B", "–"),
        (math.inf, "ratio", "–"),
    ],
)
def test_a_number_reads_in_the_unit_that_suits_its_size(value: float | None, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_three_digits_are_kept_whatever_the_size() -> None:
    assert [number(value) for value in (0.012345, 1.2345, 12345.6, -0.5, 1e15)] == [
        "0.0123", "1.23", "12,346", "-0.500", "1e+15",
    ]  # fmt: skip


def test_a_long_kernel_name_keeps_both_ends() -> None:
    assert shorten("a" * 50 + "end", 12) == "aaaaaa…aaend"


@pytest.mark.parametrize(
    ("values", "ticks"),
    [
        ([0, 0.93], ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0, 7300.0], ["0", "2", "4", "6", "8"]),  # of milliseconds: round in what is shown, not in what is stored
        ([5.0, 5.0], ["4.4", "4.6", "4.8", "5", "5.2", "5.4", "5.6"]),
        ([-2.5, 1.0], ["-3", "-2", "-1", "0", "1"]),
    ],
)
def test_ticks_stand_at_round_numbers_of_the_unit_shown(values: list[float], ticks: list[str]) -> None:
    unit = "us" if max(values) > 10 else ""
    drawn = scale(Axis("time", unit), values, 0, 100)
    assert [drawn.tick_text(tick) for tick in drawn.ticks] == ticks
    assert drawn.low <= min(values) and max(values) <= drawn.high


def test_log_axis_ticks_have_units_and_unplottable_values_are_skipped() -> None:
    drawn = scale(Axis("size", "B", log=True), [0.0, -3.0, 1024.0, 2.0**20, math.nan], 0, 100, most=5)
    assert [drawn.tick_text(tick) for tick in drawn.ticks] == ["1 KiB", "4 KiB", "16 KiB", "64 KiB", "256 KiB", "1 MiB"]
    assert (drawn.place(1024), drawn.place(2**15), drawn.place(2**20)) == pytest.approx((0, 50, 100))


@pytest.mark.parametrize("values", [[], [math.nan], [1e308, -1e308], [1e-300, 2e-300], [1.0, 1.0 + 1e-15], [1e17]])
@pytest.mark.parametrize("log", [False, True])
def test_no_values_break_an_axis(values: list[float], log: bool) -> None:
    drawn = scale(Axis("any", "us", log=log), values, 0, 100)
    assert 2 <= len(drawn.ticks) <= 14
    assert all(math.isfinite(drawn.place(tick)) for tick in drawn.ticks)


def test_kernels_that_differ_in_the_middle_only_keep_different_labels() -> None:
    kernel = (
        "void at::native::vectorized_elementwise_kernel<4, at::native::{0}<float>, std::array<char*, 3ul> >"
        "(int, at::native::{0}<float>, std::array<char*, 3ul>)"
    )
    names = [kernel.replace("{0}", functor) for functor in ("CUDAFunctor_add", "CUDAFunctor_mul", "CosFunctor")]
    assert len({shorten(name, 46) for name in names}) == 1
    short = shorten_all([*names, names[0]], 46)
    assert short[3] == short[0] and len(set(short)) == 3
    for functor, text in zip(("add", "mul", "Cos"), short, strict=False):
        assert len(text) <= 46 and functor in text and text.startswith("vectorized"), text


@given(st.lists(st.text("abv:", max_size=40), unique=True, max_size=12), st.integers(12, 30))
def test_different_texts_stay_different_and_fit(texts: list[str], most: int) -> None:
    short = shorten_all(texts, most)
    assert len(set(short)) == len(texts)
    assert all(len(text) <= most for text in short)
    assert all(kept == text for kept, text in zip(short, texts, strict=True) if len(text) <= most)
