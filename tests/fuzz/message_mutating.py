"""Changing protobuf messages field by field: what their readers hold against each other is in the values."""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from tests.fuzz.mutating import NUMBER_TEXTS, TEXTS, WHOLE_NUMBERS, Mutator

FLOATS = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    1e-320,
    1e-9,
    1e9,
    1e18,
    1e300,
    -1e300,
    1.7e308,
    float("inf"),
    float("-inf"),
    float("nan"),
)
_BOUNDS = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
}


class MessageMutator:
    """Of the messages of one type; bytes, now and then."""

    def __init__(self, plain: Mutator, kind: type[Message], words: tuple[str, ...] = ()) -> None:
        self._plain = plain
        self._random = plain.random
        self._kind = kind
        self._words = words

    def mutate(self, data: bytes, other: bytes) -> bytes:
        message, donor = self._parsed(data), self._parsed(other)
        if message is None or self._random.random() < 0.1:
            return self._plain.mutate(data, other)
        for _ in range(min(1 + int(self._random.expovariate(0.5)), 10)):
            self._change(message, donor)
        return message.SerializeToString()

    def _parsed(self, data: bytes) -> Message | None:
        try:
            return self._kind.FromString(data)
        except DecodeError:
            return None

    def _change(self, message: Message, donor: Message | None) -> None:
        held = message
        for _ in range(6):  # some way down
            inner = _inner(held)
            if not inner or self._random.random() < 0.25:
                break
            held = self._random.choice(inner)
        field = self._random.choice(held.DESCRIPTOR.fields)
        if self._random.random() < 0.1:
            held.ClearField(field.name)
        elif field.message_type is not None and field.message_type.GetOptions().map_entry:
            self._change_map(held, field)
        elif field.is_repeated:
            self._change_list(held, field)
        elif field.message_type is not None:
            getattr(held, field.name).SetInParent()
        else:
            old = getattr(held, field.name)
            setattr(held, field.name, self._value(field, old))

    def _change_map(self, held: Message, field: FieldDescriptor) -> None:
        entries = getattr(held, field.name)
        key_field, value_field = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        key: Any = self._value(key_field, "")
        if entries and self._random.random() < 0.6:
            key = self._random.choice(sorted(entries))
        entries[key] = self._value(value_field, 0)

    def _change_list(self, held: Message, field: FieldDescriptor) -> None:
        values = getattr(held, field.name)
        kind = self._random.randrange(4)
        if kind == 0 and len(values):
            del values[self._random.randrange(len(values))]
        elif field.message_type is not None:
            copied = self._random.choice(values) if len(values) and kind < 3 else None
            made = values.add()
            if copied is not None:
                made.CopyFrom(copied)
        elif len(values) and kind == 2:
            values[:] = [self._value(field, values[0])] * len(values)
        elif len(values) and kind == 1:
            values[self._random.randrange(len(values))] = self._value(field, values[0])
        else:
            values.append(self._value(field, values[0] if len(values) else 0))

    def _value(self, field: FieldDescriptor, old: Any) -> Any:
        kind = field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return self._random.random() < 0.5
        if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
            if isinstance(old, float) and old and self._random.random() < 0.5:
                return old * self._random.choice((-1.0, 0.5, 1.5, 10.0, 1e6))
            return self._random.choice(FLOATS)
        if kind == FieldDescriptor.CPPTYPE_STRING:
            if field.type == FieldDescriptor.TYPE_BYTES:
                return self._plain.token()
            known = self._words if self._words and self._random.random() < 0.6 else (*TEXTS, *NUMBER_TEXTS)
            return self._random.choice(known)
        low, high = _BOUNDS[kind]
        if isinstance(old, int) and self._random.random() < 0.5:
            value = old + self._random.choice((-1, 1, 2, 10, 10**9, -(10**9)))
        else:
            value = self._random.choice(WHOLE_NUMBERS)
        if field.enum_type is not None and self._random.random() < 0.8:
            value = self._random.choice(field.enum_type.values).number
        return min(max(value, low), high)


def _inner(message: Message) -> list[Message]:
    found: list[Message] = []
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        found.extend(value if field.is_repeated else [value])
    return found
