"""Operations, groups and source lines that the records of a job name again and again."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind, kind_of_note
from rankscope.analysis.stats.robust import Ints
from rankscope.common.text import printable

MAX_RANKS = 1 << 31
_TEXT_CHARACTERS = 200
_SHAPES_CHARACTERS = 120
_MAX_DIMENSIONS = 64
_MAX_INTERNED = 1_000_000
_RANK_LIST = re.compile(r"\[?[\d,\s]*\]?", re.ASCII)
_PEERS = re.compile(r"(?:send|recv) (\d{1,9})(->|<-)(\d{1,9})", re.ASCII)


class DumpError(Exception):
    """Why a dump cannot be used, and what to do."""


@dataclass(frozen=True)
class Operation:
    """What all ranks of a collective must agree on."""

    name: str  # without the backend: all_reduce
    kind: CollectiveKind
    inputs: tuple[int, ...] = ()  # elements of each tensor
    outputs: tuple[int, ...] = ()
    input_types: tuple[str, ...] = ()
    output_types: tuple[str, ...] = ()
    shapes: str = ""  # as text, for people
    source: int = -1  # of a send or recv, as ranks of the group
    destination: int = -1

    @property
    def ends_coalescing(self) -> bool:
        """A record without tensors that follows the records of a batch and has the state of all of them."""
        return self.name == "coalesced" or (self.name.endswith("_coalesced") and not self.inputs and not self.outputs)


@dataclass(frozen=True)
class Group:
    name: str
    description: str
    members: tuple[int, ...] | None  # sorted; None where the dump does not say

    @property
    def label(self) -> str:
        described = self.description and self.description != "undefined"
        return f"{self.name} ({self.description})" if described else self.name


@dataclass
class Catalog:
    """Operations, groups and source lines of all dumps of a job, by number."""

    operations: list[Operation] = field(default_factory=list)
    groups: list[Group] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)  # train_step (train.py:88)
    _operation_numbers: dict[Any, int] = field(default_factory=dict)
    _group_numbers: dict[tuple[str, tuple[int, ...] | None], int] = field(default_factory=dict)
    _line_numbers: dict[str, int] = field(default_factory=dict)
    _members: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def number_of_group(self, name: str, description: str, members: tuple[int, ...] | None) -> int:
        return _intern(self._group_numbers, (name, members), self.groups, lambda: Group(name, description, members))

    def number_of_line(self, text: str) -> int:
        return _intern(self._line_numbers, text, self.lines, lambda: text)

    def number_of_operation(self, key: Any) -> int:
        """The key is what a record says: name, sizes and types of inputs, sizes and types of outputs."""
        return _intern(self._operation_numbers, key, self.operations, lambda: _operation(*key))

    def number_of_batch(self, parts: tuple[int, ...]) -> int:
        """Of several operations that were issued as one."""
        return _intern(self._operation_numbers, parts, self.operations, lambda: _batch(self.operations, parts))

    def members(self, value: Any) -> tuple[int, ...] | None:
        """Of a group: "[0, 1]", or a list of numbers."""
        if isinstance(value, list):
            value = str(value) if all(type(one) is int for one in value) else None
        if not isinstance(value, str) or not _RANK_LIST.fullmatch(value):
            return None
        if value not in self._members:
            if len(self._members) >= _MAX_INTERNED:
                raise DumpError("the dumps have too many different groups; give the dumps of one job only")
            numbers = sorted({int(word) for word in re.findall(r"\d{1,10}", value)})
            self._members[value] = tuple(number for number in numbers if number < MAX_RANKS)
        return self._members[value] or None

    def adopt(self, other: Catalog) -> tuple[Ints, Ints, Ints]:
        """The numbers here of the other's groups, operations and lines. The last line is for those without one."""
        groups = [self.number_of_group(one.name, one.description, one.members) for one in other.groups]
        operations = [self.number_of_operation(key) for key in other._operation_numbers]
        lines = [*(self.number_of_line(line) for line in other.lines), -1]
        return np.array(groups, dtype=np.int64), np.array(operations, dtype=np.int64), np.array(lines, dtype=np.int64)


def _intern(numbers: dict[Any, int], key: Any, values: list[Any], make: Any) -> int:
    number = numbers.get(key)
    if number is None:
        if len(values) >= _MAX_INTERNED:
            raise DumpError("the dumps have too many different records; give the dumps of one job only")
        value = make()
        number = numbers[key] = len(values)
        values.append(value)
    return number


def _operation(
    name: str,
    inputs: tuple[tuple[int, ...], ...],
    input_types: tuple[str, ...],
    outputs: tuple[tuple[int, ...], ...],
    output_types: tuple[str, ...],
) -> Operation:
    """Raises TypeError or ValueError for anything that torch does not write."""
    short = text_of(name.partition(":")[2] or name)
    peers = _PEERS.fullmatch(short)
    source, destination = -1, -1
    if peers:
        source, destination = int(peers[1]), int(peers[3])
        if peers[2] == "<-":
            source, destination = destination, source
    return Operation(
        name=short,
        kind=kind_of_note(short) or CollectiveKind.OTHER,
        inputs=tuple(map(_elements, inputs)),
        outputs=tuple(map(_elements, outputs)),
        input_types=_types(input_types),
        output_types=_types(output_types),
        shapes=_shapes(inputs or outputs, _types(input_types or output_types)),
        source=source,
        destination=destination,
    )


def _batch(operations: Sequence[Operation], parts: tuple[int, ...]) -> Operation:
    one = [operations[part] for part in parts]
    names = list(dict.fromkeys(operation.name for operation in one))
    named = [f"{sum(operation.name == name for operation in one)} {name}" for name in names[:4]]
    return Operation(
        name=text_of(f"coalesced {', '.join(named)}{' …' if len(names) > 4 else ''}"),
        kind=one[0].kind if len({operation.kind for operation in one}) == 1 else CollectiveKind.COALESCED,
        inputs=tuple(size for operation in one for size in operation.inputs),
        outputs=tuple(size for operation in one for size in operation.outputs),
        input_types=_types(kind for operation in one for kind in operation.input_types),
        output_types=_types(kind for operation in one for kind in operation.output_types),
        shapes=printable(", ".join(operation.shapes for operation in one[:4]), _SHAPES_CHARACTERS),
    )


def _elements(shape: tuple[int, ...]) -> int:
    if len(shape) > _MAX_DIMENSIONS or not all(type(length) is int for length in shape):
        raise ValueError
    return math.prod(shape)


def _types(names: Any) -> tuple[str, ...]:
    return tuple(sorted({text_of(name) for name in names}))


def _shapes(sizes: tuple[tuple[int, ...], ...], types: tuple[str, ...]) -> str:
    """[1024, 8] Float"""
    listed = " ".join(str(list(shape)) for shape in sizes[:4]) + (" …" if len(sizes) > 4 else "")
    return printable(f"{listed} {'/'.join(types)}".strip(), _SHAPES_CHARACTERS)


def text_of(value: str) -> str:
    if type(value) is not str:
        raise TypeError
    return printable(value, _TEXT_CHARACTERS)
