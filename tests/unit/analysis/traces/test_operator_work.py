"""FLOPs and bytes of operators, from shapes that the profiler writes and from malformed ones."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from rankscope.analysis.traces.reader import operator_work
from rankscope.analysis.traces.reader.operator_work import work_of
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import ABSENT, Trace
from tests.shared_data import H200

QUERY = [8, 24, 512, 64]
SCORES = 8 * 24 * 512 * 512


def work(name: str, dims: Any, types: Any, concrete: Any = ()) -> tuple[int, int, str | None]:
    return work_of(name, *(json.dumps(one).encode() for one in (dims, types, concrete)))


def floats(count: int) -> list[str]:
    return ["float"] * count


def convolution(*, transposed: str = "False", stride: str = "[2, 2]") -> tuple[int, int, str | None]:
    return work(
        "aten::convolution",
        [[4, 3, 224, 224], [64, 3, 7, 7], [64], [], [], [], [], [], []],
        [*["c10::Half"] * 3, *["ScalarList"] * 3, "Scalar", "ScalarList", "Scalar"],
        ["", "", "", stride, "[3, 3]", "[1, 1]", transposed, "[0, 0]", "1"],
    )


@pytest.mark.parametrize(
    ("name", "dims", "flops", "size_bytes"),
    [
        ("aten::mm", [[64, 32], [32, 16]], 2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16 + 64 * 16)),
        ("aten::addmm", [[16], [64, 32], [32, 16]], 2 * 64 * 32 * 16, 4 * (16 + 64 * 32 + 32 * 16 + 64 * 16)),
        ("aten::bmm", [[5, 64, 32], [5, 32, 16]], 5 * 2 * 64 * 32 * 16, 4 * 5 * (64 * 32 + 32 * 16 + 64 * 16)),
        ("aten::baddbmm", [[5, 64, 16], [5, 64, 32], [5, 32, 16]], 5 * 2 * 64 * 32 * 16, 4 * 5 * (2048 + 512 + 2048)),
    ],
)
def test_matrix_products_are_counted(name: str, dims: Any, flops: int, size_bytes: int) -> None:
    assert work(name, dims, floats(len(dims))) == (flops, size_bytes, "float")


@pytest.mark.parametrize(("causal", "share"), [("False", 1), ("True", 2)])
def test_attention_is_two_products_and_five_backward(causal: str, share: int) -> None:
    kinds = ["c10::BFloat16"] * 3 + ["", "Scalar", "Scalar", "Scalar", ""]
    forward = work(
        "aten::_scaled_dot_product_efficient_attention",
        [QUERY, QUERY, QUERY, [], [], [], [], []],
        kinds,
        ["", "", "", "", "True", "0.", causal, ""],
    )
    assert forward == (2 * SCORES * 128 // share, 2 * 4 * 8 * 24 * 512 * 64, "c10::BFloat16")
    flash = work("aten::_scaled_dot_product_flash_attention", [QUERY] * 3, kinds, ["", "", "", "0.", causal])
    assert flash[0] == forward[0]
    backward = work(
        "aten::_scaled_dot_product_flash_attention_backward",
        [QUERY] * 5,
        ["c10::BFloat16"] * 5,
        [*[""] * 11, causal],
    )
    assert backward[0] == 2 * SCORES * 5 * 64 // share


def test_keys_of_grouped_heads_are_shared() -> None:
    key = [8, 6, 512, 64]
    found = work("aten::_scaled_dot_product_flash_attention", [QUERY, key, key], ["c10::Half"] * 3)
    assert found[0] == 2 * SCORES * 128


def test_a_convolution_is_counted_at_its_output() -> None:
    out = 4 * 64 * 112 * 112
    assert convolution() == (2 * out * 3 * 49, 2 * (4 * 3 * 224 * 224 + 64 * 3 * 49 + 64 + out), "c10::Half")
    assert convolution(transposed="True")[0] == 2 * 4 * 3 * 224 * 224 * 3 * 49


def test_a_convolution_backward_counts_the_gradients_asked_for() -> None:
    dims = [[4, 64, 112, 112], [4, 3, 224, 224], [64, 3, 7, 7]]
    one = 2 * 4 * 64 * 112 * 112 * 3 * 49
    for mask, gradients in (("[True, True, False]", 2), ("[False, True, False]", 1)):
        concrete = ["", "", "", "[64]", "[2, 2]", "[3, 3]", "[1, 1]", "False", "[0, 0]", "1", mask]
        assert work("aten::convolution_backward", dims, floats(3), concrete)[0] == gradients * one


@pytest.mark.parametrize(
    ("name", "dims", "size_bytes"),
    [
        ("aten::add", [[64, 32], [32], []], 4 * (64 * 32 + 32 + 64 * 32)),
        ("aten::add_", [[64, 32], [64, 32], []], 4 * 3 * 64 * 32),
        ("aten::copy_", [[64, 32], [64, 32], []], 4 * 2 * 64 * 32),
        ("aten::fill_", [[64, 32], []], 4 * 64 * 32),
        ("aten::sum", [[64, 32], []], 4 * 64 * 32),
    ],
)
def test_bytes_are_inputs_and_the_result_that_follows(name: str, dims: Any, size_bytes: int) -> None:
    kinds = ["Scalar" if shape == [] else "float" for shape in dims]
    assert work(name, dims, kinds) == (ABSENT, size_bytes, "float")


def test_a_table_of_which_rows_are_read_has_no_bytes() -> None:
    assert work("aten::index_select", [[50_000, 1024], [], [8]], ["float", "Scalar", "long int"])[1] == ABSENT


@pytest.mark.parametrize(
    ("dims", "kinds"),
    [
        ([[64, 32], [31, 16]], floats(2)),
        ([[-64, 32], [32, 16]], floats(2)),
        ([[1 << 47] * 60, [1 << 47] * 60], floats(2)),
        ([[10**40, 2], [2, 10**40]], floats(2)),
        ([[1] * 5000, [1] * 5000], floats(2)),
        ([["a", 1], [True, 1]], floats(2)),
        ([[1.5, 2], [2, 2]], floats(2)),
        ("text", floats(2)),
        ([[2, 2], [2, 2]], ["", "nonsense"]),
        ([], []),
        ([[]], ["float"]),
        ({"a": 1}, None),
    ],
)
def test_shapes_that_cannot_be_have_no_flops(dims: Any, kinds: Any) -> None:
    assert work("aten::mm", dims, kinds)[0] == ABSENT


@pytest.mark.parametrize("stride", ["[0, 0]", "[1, 1, 1]", "[-1, 2]", "text", "[[[", "9" * 400])
def test_strides_that_cannot_be_have_no_flops(stride: str) -> None:
    assert convolution(stride=stride)[0] == ABSENT


@pytest.mark.parametrize("text", [b"", b"[", b"[" * 100_000, b"\xff", b'["'])
def test_text_that_is_not_json_says_nothing(text: bytes) -> None:
    assert work_of("aten::mm", text, text, text) == (ABSENT, ABSENT, None)


def written(events: list[dict[str, Any]]) -> Trace:
    return read_trace(json.dumps({"traceEvents": events}).encode())


def product(start: int, rows: Any, **other: Any) -> dict[str, Any]:
    arguments = {"Input Dims": [[rows, 8], [8, 4]], "Input type": floats(2)}
    return {
        "ph": "X",
        "cat": "cpu_op",
        "name": "aten::mm",
        "pid": 1,
        "tid": 1,
        "ts": start,
        "dur": 5,
        "args": arguments,
    } | other


def test_work_belongs_to_its_row_of_the_trace() -> None:
    late, early = product(100, 2), product(50, 3)
    trace = written([late, {**late, "ts": None}, {**late, "cat": "user_annotation", "ts": 70}, early])
    assert trace.operators.row.tolist() == [0, 2]
    assert trace.operators.flops.tolist() == [2 * 3 * 8 * 4, 2 * 2 * 8 * 4]
    assert [trace.names[one] for one in trace.operators.element_type] == ["float", "float"]


def test_a_trace_without_shapes_has_no_operators() -> None:
    assert len(read_trace((H200 / "gloo_2ranks_rank0.json.gz").read_bytes()).operators.row) == 0
    assert len(written([product(1, 2, args={})]).operators.row) == 0


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(operator_work, "_MAX_HELD_BYTES", 300)
    trace = written([product(start, start + 1) for start in range(200)])
    assert trace.operators.flops.tolist() == [2 * 8 * 4 * (start + 1) for start in range(200)]


def test_a_real_step_has_the_flops_of_its_model() -> None:
    """12 layers of width 256, 1,024 tokens of 8 sequences: 6 FLOPs a weight and token, and causal attention."""
    trace = read_trace((H200 / "launch_bound.json.gz").read_bytes())
    weights, attention = 12 * 12 * 256**2, 12 * 7 * 8 * 4 * 128 * 128 * 64
    assert np.maximum(trace.operators.flops, 0).sum() == 5 * (6 * weights * 1024 + attention)
