"""FLOPs and bytes of operators, from the shapes that a profiler with record_shapes=True writes. Each distinct operator
with its shapes is worked out once: a step repeats the same few hundred."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec
import numpy as np

from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.traces.reader.column_types import NameTable
from rankscope.analysis.traces.reader.events import DECODE_ERRORS, Arguments
from rankscope.analysis.traces.trace import ABSENT

TOO_MANY_ELEMENTS = 1 << 62
NO_TENSOR = ("", "Scalar", "ScalarList", "GenericList", "int", "bool")
_MAX_DIMENSIONS = 64  # as in torch; the product of thousands of numbers would take minutes
_MAX_SHAPES_BYTES = 64 << 10  # torch shortens lists of tensors to 30
_MAX_HELD_BYTES = 8 << 20
_ITEM_BYTES = {
    "double": 8,
    "float": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "c10::Float8_e4m3fn": 1,
    "c10::Float8_e5m2": 1,
    "c10::Float8_e4m3fnuz": 1,
    "c10::Float8_e5m2fnuz": 1,
    "long int": 8,
    "long": 8,
    "int": 4,
    "short int": 2,
    "short": 2,
    "signed char": 1,
    "unsigned char": 1,
    "bool": 1,
}
# They launch nothing themselves, and are most of all operators: views, allocations, nodes of autograd, and operators
# that call one of another name.
_NO_WORK = re.compile(
    r"aten::(_?(unsafe_)?view|_?reshape\w*|as_strided|transpose|t|permute|expand\w*|select|slice|narrow|unbind|split\w*|chunk"
    r"|squeeze|unsqueeze|flatten|detach_?|alias|empty\w*|result_type|lift_fresh|linear|matmul|to|contiguous|clone|item"
    r"|_local_scalar_dense|layer_norm|scaled_dot_product_attention|conv[123]d)|detach_?|torch::autograd::(?!AccumulateGrad)\w+|\w+Backward\d*"
)
# The result has the shape of the largest input.
_LIKE_INPUT = re.compile(
    r"aten::(add|sub|rsub|mul|div|pow|sqrt|rsqrt|exp|log|neg|abs|reciprocal|clamp\w*|where|maximum|minimum|sigmoid|tanh"
    r"|relu|gelu|silu|elu|leaky_relu|hardtanh|softplus|square|sin|cos|erf|dropout|native_dropout|masked_fill"
    r"|native_layer_norm|native_group_norm|native_batch_norm|cudnn_batch_norm|_fused_rms_norm|_softmax|_log_softmax"
    r"|_softmax_backward_data|_log_softmax_backward_data"
    r"|(gelu|silu|relu|elu|tanh|sigmoid|threshold|leaky_relu|hardtanh|softplus|native_dropout|native_layer_norm"
    r"|native_group_norm|native_batch_norm|cudnn_batch_norm)_backward)"
)
# They read some rows of their first input.
_PARTLY_READ = re.compile(r"aten::(_?embedding\w*|_?index\w*|gather\w*|take\w*|scatter\w*|masked_select|nll_loss\w*)")
# They write their first input without reading it.
_WRITES_ONLY = frozenset(("aten::copy_", "aten::fill_", "aten::zero_", "aten::normal_", "aten::uniform_"))

Shape: TypeAlias = list[int]


class _UnknownError(Exception):
    """The shapes are not those of such an operator."""


@dataclass(frozen=True)
class _Inputs:
    shapes: list[Shape | None]  # by argument; None for what is no tensor
    concrete: list[Any]

    def tensor(self, place: int, least: int = 1) -> Shape:
        shape = self.shapes[place] if place < len(self.shapes) else None
        if shape is None or len(shape) < least:
            raise _UnknownError
        return shape

    def flag(self, place: int) -> bool:
        return place < len(self.concrete) and self.concrete[place] == "True"

    def numbers(self, place: int, count: int) -> list[int]:
        text = self.concrete[place] if place < len(self.concrete) else None
        try:
            found = msgspec.json.decode(text if isinstance(text, str) else "")
        except DECODE_ERRORS:
            raise _UnknownError from None
        if not isinstance(found, list) or not all(type(one) is int and 0 <= one < 1 << 31 for one in found):
            raise _UnknownError
        found = found * count if len(found) == 1 else found
        if len(found) != count:
            raise _UnknownError
        return found


# FLOPs and the elements of the result.
_Work: TypeAlias = Callable[[_Inputs], tuple[int, int]]


def _product(left: int, right: int) -> _Work:
    def work(inputs: _Inputs) -> tuple[int, int]:
        a, b = inputs.tensor(left, 2), inputs.tensor(right, 2)
        if a[-1] != b[-2] or len(a) != len(b):
            raise _UnknownError
        out = math.prod(a[:-1]) * b[-1]
        return 2 * out * a[-1], out

    return work


def _attention(first: int, causal: int, *, backward: bool = False) -> _Work:
    """Batch, heads, sequence, head size. A causal mask leaves out half. The backward pass has five products, the
    first of which makes the scores again."""

    def work(inputs: _Inputs) -> tuple[int, int]:
        query, key, value = (inputs.tensor(first + place, 4) for place in range(3))
        if not len(query) == len(key) == len(value) == 4:
            raise _UnknownError
        scores = math.prod(query[:3]) * key[2]
        widths = 3 * query[3] + 2 * value[3] if backward else query[3] + value[3]
        out = math.prod(query) + math.prod(key) + math.prod(value) if backward else math.prod(query[:3]) * value[3]
        return 2 * scores * widths // (2 if inputs.flag(causal) else 1), out

    return work


def _convolution(inputs: _Inputs) -> tuple[int, int]:
    data, weight = inputs.tensor(0, 3), inputs.tensor(1, 3)
    sizes, kernel = data[2:], weight[2:]
    if len(sizes) != len(kernel):
        raise _UnknownError
    if inputs.flag(6):  # transposed: every input element meets the whole kernel
        flops = 2 * math.prod(data) * math.prod(weight[1:])
        return flops, 0
    stride, padding, dilation = (inputs.numbers(place, len(sizes)) for place in (3, 4, 5))
    if 0 in stride:
        raise _UnknownError
    each = zip(sizes, kernel, stride, padding, dilation, strict=True)
    out_sizes = [max((size + 2 * pad - wide * (width - 1) - 1) // by + 1, 0) for size, width, by, pad, wide in each]
    out = data[0] * weight[0] * math.prod(out_sizes)
    return 2 * out * math.prod(weight[1:]), out


def _convolution_backward(inputs: _Inputs) -> tuple[int, int]:
    grad, data, weight = inputs.tensor(0, 3), inputs.tensor(1, 3), inputs.tensor(2, 3)
    mask = str(inputs.concrete[10]) if len(inputs.concrete) > 10 else "[True, True, True]"
    wanted = [word.strip(" []") == "True" for word in mask.split(",")][:2]
    met = data if inputs.flag(7) else grad
    flops = 2 * math.prod(met) * math.prod(weight[1:])
    sizes = math.prod(data), math.prod(weight)
    return flops * sum(wanted), sum(size for size, is_wanted in zip(sizes, wanted, strict=False) if is_wanted)


_DENSE: dict[str, _Work] = {
    "aten::mm": _product(0, 1),
    "aten::bmm": _product(0, 1),
    "aten::_scaled_mm": _product(0, 1),
    "aten::_int_mm": _product(0, 1),
    "aten::addmm": _product(1, 2),
    "aten::_addmm_activation": _product(1, 2),
    "aten::baddbmm": _product(1, 2),
    "aten::_scaled_dot_product_flash_attention": _attention(0, 4),
    "aten::_scaled_dot_product_efficient_attention": _attention(0, 6),
    "aten::_scaled_dot_product_cudnn_attention": _attention(0, 6),
    "aten::_scaled_dot_product_flash_attention_backward": _attention(1, 11, backward=True),
    "aten::_scaled_dot_product_efficient_attention_backward": _attention(1, 11, backward=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _attention(1, 14, backward=True),
    "aten::convolution": _convolution,
    "aten::_convolution": _convolution,
    "aten::convolution_backward": _convolution_backward,
}


class OperatorWork:
    """Looks up the work of operators. Memory is bounded, however many shapes a trace has."""

    def __init__(self, names: NameTable) -> None:
        self._names = names
        self._known: dict[tuple[int, bytes, bytes, bytes], tuple[int, int, int]] = {}
        self._held_bytes = 0
        self._works = np.zeros(0, dtype=bool)  # by name

    def columns(self, rows: Ints, arguments: list[Arguments], name: Ints) -> dict[str, Ints]:
        """The columns of OperatorColumns for those of the rows whose shapes say something."""
        texts = self._names.texts
        fresh = [_NO_WORK.fullmatch(text) is None for text in texts[len(self._works) :]]
        self._works = np.concatenate((self._works, np.array(fresh, dtype=bool)))
        works = self._works[name]
        found: list[tuple[int, int, int, int]] = []
        for row, number in zip(rows[works].tolist(), name[works].tolist(), strict=True):
            each = arguments[row]
            if not len(each.input_dims):
                continue
            concrete = bytes(each.concrete_inputs) if texts[number] in _DENSE else b""
            key = (number, bytes(each.input_dims), bytes(each.input_type), concrete)
            work = self._known.get(key)
            if work is None:
                work = self._work_out(key)
            if work[0] >= 0 or work[1] > 0:
                found.append((row, *work))
        table = np.array(found, dtype=np.int64).reshape(-1, 4)
        return dict(zip(("row", "flops", "size_bytes", "element_type"), table.T, strict=True))

    def _work_out(self, key: tuple[int, bytes, bytes, bytes]) -> tuple[int, int, int]:
        size = sum(map(len, key[1:]))
        if size > _MAX_SHAPES_BYTES:
            return ABSENT, ABSENT, ABSENT
        flops, size_bytes, element_type = work_of(self._names.texts[key[0]], *key[1:])
        work = flops, size_bytes, ABSENT if element_type is None else self._names[element_type]
        if self._held_bytes + size > _MAX_HELD_BYTES:
            self._known.clear()
            self._held_bytes = 0
        self._known[key] = work
        self._held_bytes += size
        return work


def work_of(name: str, dims: bytes, types: bytes, concrete: bytes) -> tuple[int, int, str | None]:
    """FLOPs, bytes read and written, and the type of the first tensor; ABSENT and None where the shapes do not tell."""
    try:
        shapes, kinds = msgspec.json.decode(dims), msgspec.json.decode(types or b"[]")
        said = msgspec.json.decode(concrete or b"[]")
    except DECODE_ERRORS:
        return ABSENT, ABSENT, None
    if not isinstance(shapes, list) or not isinstance(kinds, list) or not isinstance(said, list):
        return ABSENT, ABSENT, None
    kinds = [kind if isinstance(kind, str) else "" for kind in kinds]
    kinds += [""] * (len(shapes) - len(kinds))
    tensors = [_shape(shape) if kind in _ITEM_BYTES else None for shape, kind in zip(shapes, kinds, strict=False)]
    sizes = [
        (math.prod(shape), _ITEM_BYTES[kind]) for shape, kind in zip(tensors, kinds, strict=False) if shape is not None
    ]
    if not sizes:
        return ABSENT, ABSENT, None
    flops, out = ABSENT, None
    if name in _DENSE:
        try:
            flops, out = _DENSE[name](_Inputs(tensors, said))
        except _UnknownError:
            flops, out = ABSENT, None
    element_type = next(kind for shape, kind in zip(tensors, kinds, strict=False) if shape is not None)
    # A list of tensors does not name its type.
    has_lists = "TensorList" in kinds or any(_is_nested(shape) for shape in shapes)
    size_bytes = ABSENT if has_lists or _PARTLY_READ.fullmatch(name) else _bytes(name, sizes, out)
    return _bounded(flops), _bounded(size_bytes), element_type


def _bytes(name: str, sizes: list[tuple[int, int]], out_elements: int | None) -> int:
    total = sum(count * item for count, item in sizes)
    if out_elements is not None:
        return total + out_elements * sizes[0][1]
    if name.endswith("_") and not name.endswith("__"):
        return total if name in _WRITES_ONLY else total + sizes[0][0] * sizes[0][1]
    if _LIKE_INPUT.fullmatch(name):
        return total + max(count for count, _ in sizes) * sizes[0][1]
    return total


def _bounded(value: int) -> int:
    return value if 0 <= value < TOO_MANY_ELEMENTS else ABSENT


def _is_nested(shape: Any) -> bool:
    return isinstance(shape, list) and any(isinstance(size, list) for size in shape)


def _shape(shape: Any) -> Shape | None:
    if not isinstance(shape, list) or len(shape) > _MAX_DIMENSIONS:
        return None
    return shape if all(type(size) is int and 0 <= size < 1 << 48 for size in shape) else None


def elements_of(shape: Any) -> int:
    """Of a tensor or of a list of tensors; TOO_MANY_ELEMENTS if it cannot be."""
    if not isinstance(shape, list):
        return 0
    if not all(isinstance(size, int) for size in shape):
        return sum(elements_of(inner) for inner in shape)
    if 0 in shape:
        return 0
    if len(shape) > _MAX_DIMENSIONS:
        return TOO_MANY_ELEMENTS
    return math.prod(shape)
