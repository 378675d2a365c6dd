"""Reads pickles of plain values from untrusted files: dicts with text keys, lists, tuples of scalars, text, numbers,
True, False and None.

Python's own unpickler is not used: besides calling what a pickle names, it can be made to take all memory (an index of
the memo), all time (the hash of nested tuples) or the stack. Here opcodes that import, call, build or refer to
anything outside do not exist, each opcode makes at most one small object, and their number is limited."""

from __future__ import annotations

import struct
from typing import Any

# An entry of a flight recorder takes about 100 opcodes, and one more for each frame of its stack.
MAX_OPCODES = 8_000_000
_MAX_TEXT_BYTES = 4 << 20
_MAX_INTEGER_BYTES = 16
_MAX_OPEN_CONTAINERS = 64
_MAX_TUPLE_ITEMS = 16
_NEWEST_PROTOCOL = 5

_TEXT = frozenset({str})
_SCALARS = frozenset({str, int, float, bool, type(None)})
_UINT16 = struct.Struct("<H").unpack_from
_INT32 = struct.Struct("<i").unpack_from
_UINT32 = struct.Struct("<I").unpack_from
_DOUBLE = struct.Struct(">d").unpack_from

_REFUSED = {
    **dict.fromkeys(b"ci\x93", "the name of a function or class"),
    **dict.fromkeys(b"Rbo\x81\x92", "a call or an object"),
    **dict.fromkeys(b"PQ", "a reference to something outside the file"),
    **dict.fromkeys(b"\x82\x83\x84", "an extension code"),
    **dict.fromkeys(b"BCTU\x8e\x96\x97\x98", "bytes or a buffer"),
    **dict.fromkeys(b"\x8f\x90\x91", "a set"),
    **dict.fromkeys(b"FILSVdglp", "a value in the text form of protocol 0"),
}


class PlainPickleError(Exception):
    """Why the bytes are refused."""


def load_plain(data: bytes) -> Any:
    """Raises PlainPickleError. The value may be nested deeply, or contain itself: walk it to a known depth only."""
    try:
        return _load(data)
    except (IndexError, KeyError, struct.error):
        raise PlainPickleError("it is damaged or cut off") from None


def _load(data: bytes) -> Any:
    stack: list[Any] = []
    below: list[list[Any]] = []  # the stacks under the open marks
    memo: dict[int, Any] = {}
    at = 0
    for _ in range(MAX_OPCODES):
        code = data[at]
        at += 1
        # Frequent ones first, in three ranges of codes: most opcodes are found after a few comparisons.
        if code == 0x68:  # BINGET, which come in runs: the frames of a stack
            stack.append(memo[data[at]])
            at += 1
            while data[at] == 0x68:
                stack.append(memo[data[at + 1]])
                at += 2
        elif code < 0x60:
            if code == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif code == 0x4B:  # BININT1
                stack.append(data[at])
                at += 1
            elif code == 0x28:  # MARK
                below.append(stack)
                stack = []
                if len(below) > _MAX_OPEN_CONTAINERS:
                    raise PlainPickleError(f"it nests more than {_MAX_OPEN_CONTAINERS} containers")
            elif code == 0x4D:  # BININT2
                stack.append(_UINT16(data, at)[0])
                at += 2
            elif code == 0x4A:  # BININT
                stack.append(_INT32(data, at)[0])
                at += 4
            elif code == 0x4E:  # NONE
                stack.append(None)
            elif code == 0x47:  # BINFLOAT
                stack.append(_DOUBLE(data, at)[0])
                at += 8
            elif code == 0x58:  # BINUNICODE
                at += 4
                at += _text(data, at, _UINT32(data, at - 4)[0], stack)
            elif code == 0x29:  # EMPTY_TUPLE
                stack.append(())
            elif code == 0x2E:  # STOP
                if len(stack) != 1 or below:
                    raise IndexError
                return stack[0]
            else:
                raise _refusal(code)
        elif code < 0x80:
            if code == 0x6A:  # LONG_BINGET
                stack.append(memo[_UINT32(data, at)[0]])
                at += 4
            elif code == 0x72:  # LONG_BINPUT
                memo[_UINT32(data, at)[0]] = stack[-1]
                at += 4
            elif code == 0x61:  # APPEND
                item = stack.pop()
                _list(stack).append(item)
            elif code == 0x65:  # APPENDS
                items, stack = stack, below.pop()
                _list(stack).extend(items)
            elif code == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif code == 0x75:  # SETITEMS
                items, stack = stack, below.pop()
                _set_items(stack, items)
            elif code == 0x71:  # BINPUT
                memo[data[at]] = stack[-1]
                at += 1
            elif code == 0x73:  # SETITEM
                items = stack[-2:]
                del stack[-2:]
                _set_items(stack, items)
            elif code == 0x74:  # TUPLE
                items, stack = stack, below.pop()
                stack.append(_tuple(items, len(items)))
            else:
                raise _refusal(code)
        elif code == 0x8A:  # LONG1
            length = data[at]
            at += 1 + length
            if length > _MAX_INTEGER_BYTES or at > len(data):
                raise PlainPickleError(f"it has an integer of {length} bytes")
            stack.append(int.from_bytes(data[at - length : at], "little", signed=True))
        elif code == 0x89:  # NEWFALSE
            stack.append(False)
        elif code == 0x88:  # NEWTRUE
            stack.append(True)
        elif code == 0x8C:  # SHORT_BINUNICODE
            at += 1
            at += _text(data, at, data[at - 1], stack)
        elif code == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif 0x85 <= code <= 0x87:  # TUPLE1, TUPLE2, TUPLE3
            count = code - 0x84
            stack[-count:] = [_tuple(stack, count)]
        elif code == 0x80:  # PROTO
            if data[at] > _NEWEST_PROTOCOL:
                raise PlainPickleError(f"protocol {data[at]} is unknown")
            at += 1
        elif code == 0x95:  # FRAME: the length of a part, for readers of a stream
            at += 8
        else:
            raise _refusal(code)
    raise PlainPickleError(f"it holds more than {MAX_OPCODES:,} values")


def _refusal(code: int) -> PlainPickleError:
    return PlainPickleError(f"it holds {_REFUSED.get(code, f'the opcode {code:#04x}')}")


def _text(data: bytes, at: int, length: int, stack: list[Any]) -> int:
    if length > _MAX_TEXT_BYTES:
        raise PlainPickleError(f"it has a text of {length} bytes")
    if at + length > len(data):
        raise IndexError
    stack.append(data[at : at + length].decode("utf-8", "replace"))
    return length


def _list(stack: list[Any]) -> list[Any]:
    target = stack[-1]
    if type(target) is not list:
        raise PlainPickleError("it is damaged: it appends to something else than a list")
    return target


def _set_items(stack: list[Any], items: list[Any]) -> None:
    target, keys = stack[-1], items[::2]
    if type(target) is not dict or len(items) % 2:
        raise PlainPickleError("it is damaged: it sets items of something else than a dict")
    # Texts are hashed with a secret of this process; other keys could be chosen so that they all collide.
    if not _TEXT.issuperset(map(type, keys)):
        raise PlainPickleError("it has a dict whose keys are not text")
    target.update(zip(keys, items[1::2], strict=True))


def _tuple(stack: list[Any], count: int) -> tuple[Any, ...]:
    if len(stack) < count:
        raise IndexError
    items = stack[len(stack) - count :]
    # Nested tuples that share their parts take exponential time to hash or to compare, and long ones are not cached.
    if count > _MAX_TUPLE_ITEMS or not _SCALARS.issuperset(map(type, items)):
        raise PlainPickleError(f"it has a tuple of containers, or of more than {_MAX_TUPLE_ITEMS} values")
    return tuple(items)
