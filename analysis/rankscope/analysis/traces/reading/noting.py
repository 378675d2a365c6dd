"""What events note about communication: operation, group, size and order, from whichever field tells it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import ABSENT
from rankscope.analysis.traces.reading.decoding import DECODE_ERRORS, Arguments
from rankscope.analysis.traces.reading.describing import Membership
from rankscope.analysis.traces.reading.naming import COMMUNICATION_CALL, NameTable
from rankscope.analysis.traces.reading.numbering import identifiers, integers

_NO_TENSOR = ("", "Scalar", "ScalarList", "GenericList", "int", "bool")
_LONGEST_DIMS_BYTES = 1 << 20


def notes_of(arguments: list[Arguments], name: Ints, names: NameTable) -> tuple[dict[str, Ints], list[Membership]]:
    """Columns of CollectiveColumns for those events that note anything, `row` counting from the first one given."""
    noted = [row for row, each in enumerate(arguments) if each.collective is not None or each.group is not None]
    columns: dict[str, list[Any]] = {key: [] for key in _FIELDS}
    members: dict[tuple[str, str], Membership] = {}
    for row in noted:
        each = arguments[row]
        columns["row"].append(row)
        columns["collective"].append(_index(each.collective, names))
        columns["group"].append(_index(each.group, names))
        columns["group_description"].append(_index(each.group_description, names))
        columns["element_type"].append(_index(each.element_type, names))
        columns["group_size"].append(each.group_size)
        columns["sequence"].append(each.sequence)
        columns["in_elements"].append(each.in_elements)
        columns["out_elements"].append(each.out_elements)
        columns["peer"].append(each.destination if each.destination != ABSENT else each.source)
        columns["asynchronous"].append(_switch(each.asynchronous))
        place = (str(each.group), str(each.group_ranks))
        if each.group is not None and place not in members:
            members[place] = _membership(each)
    for row in np.flatnonzero(names.communication_calls()[name]).tolist():
        each = arguments[row]
        call = COMMUNICATION_CALL.match(names.texts[name[row]])
        if call and len(each.input_dims) and each.collective is None and each.group is None:
            elements, element_type = _size_of_inputs(each)
            told = {
                "row": row,
                "collective": names[call[1]],
                "in_elements": elements,
                "element_type": _index(element_type, names),
            }
            for key in _FIELDS:
                columns[key].append(told.get(key, ABSENT))
    return {key: _column(key, values) for key, values in columns.items()}, list(members.values())


_FIELDS = (
    "row",
    "collective",
    "group",
    "group_description",
    "group_size",
    "sequence",
    "element_type",
    "in_elements",
    "out_elements",
    "peer",
    "asynchronous",
)


def _column(key: str, values: list[Any]) -> Ints:
    column = identifiers(values) if key == "peer" else integers(values)
    return np.maximum(column, ABSENT)


def _index(text: Any, names: NameTable) -> int:
    return ABSENT if text is None or text == "" else names[str(text)]


def _switch(value: Any) -> int:
    if isinstance(value, str):
        return {"true": 1, "1": 1, "false": 0, "0": 0}.get(value.lower(), ABSENT)
    return int(value) if value in (0, 1) else ABSENT


def _membership(each: Arguments) -> Membership:
    size, start, stride, place = integers([each.group_size, each.group_start, each.group_stride, each.group_rank])
    return Membership(
        name=str(each.group),
        description=str(each.group_description or ""),
        ranks=str(each.group_ranks or ""),
        size=int(size),
        start=int(start),
        stride=int(stride),
        place=int(place),
    )


def _size_of_inputs(each: Arguments) -> tuple[int, str | None]:
    """Elements of all tensors among the inputs, and the type of the first."""
    if len(each.input_dims) > _LONGEST_DIMS_BYTES:
        return ABSENT, None
    try:
        dims = msgspec.json.decode(each.input_dims)
        types = msgspec.json.decode(each.input_type) if each.input_type else []
    except DECODE_ERRORS:
        return ABSENT, None
    if not isinstance(dims, list) or not isinstance(types, list):
        return ABSENT, None
    total, first = 0, None
    for place, shape in enumerate(dims):
        kind = types[place] if place < len(types) and isinstance(types[place], str) else ""
        if shape == [] and kind in _NO_TENSOR:
            continue
        total += _elements(shape)
        first = first or kind or None
    return (total if 0 < total < 1 << 62 else ABSENT), first


def _elements(shape: Any) -> int:
    if not isinstance(shape, list):
        return 0
    if all(isinstance(size, int) for size in shape):
        return math.prod(shape)
    return sum(_elements(inner) for inner in shape)
