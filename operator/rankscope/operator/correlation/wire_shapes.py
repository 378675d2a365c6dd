"""The daemons' messages with less in them: what is always read as numbers, the rest as the bytes it came in.

A fleet sends thousands of windows a second, and most of a window is stacks that nobody asks for. Field numbers are
taken from the contract itself, so that these shapes cannot drift from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, cast

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, ProcessUsage, RankWindow

# Stands for a submessage that is not there: one double in a field that none of them has. In its place nothing has to be
# asked (`HasField`) and everything that is made of doubles has the same stride.
ABSENT = b"\x79" + bytes(8)
ABSENT_COUNT = (1 << 64) - 1
ABSENT_NANOS = -(1 << 63)

# The entry of `sources` that says that steps come from a capture.
CAPTURED_STEPS = RankWindow(sources={"steps": SOURCE_CAPTURE}).SerializeToString()[3:]

_Kind = descriptor_pb2.FieldDescriptorProto
_PACKAGE = "rankscope.reading"


class Said(Protocol):
    """A WatchRanksResponse whose parts are still bytes."""

    windows: Sequence[bytes]
    departed: Sequence[bytes]


class Message(NamedTuple):
    """Of the daemon of `node`, as *we* know it."""

    node: str
    said: Said


class Process(Protocol):
    """NaN where not measured."""

    run_delay_seconds: float
    throttled_seconds: float
    stopped_seconds: float


class Figures(Protocol):
    """A RankWindow; ABSENT…, or NaN, where a field is not there."""

    identity: bytes
    start_unix_nanos: int
    end_unix_nanos: int
    steps: int
    steps_total: int
    last_step_unix_nanos: int
    step: bytes
    self: bytes
    wait: bytes
    causes: bytes
    mfu_ratio: float
    host_seconds: float
    run_ahead_seconds: float
    groups: bytes  # packed doubles
    process: Process
    sources: Sequence[bytes]


def _made() -> tuple[Any, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="rankscope/reading.proto", package=_PACKAGE, syntax="proto2")
    said = file.message_type.add(name="Said")
    for name in ("windows", "departed"):
        _add(said, WatchRanksResponse, name, _Kind.TYPE_BYTES).label = _Kind.LABEL_REPEATED
    process = file.message_type.add(name="Process")
    for name in ("run_delay_seconds", "throttled_seconds", "stopped_seconds"):
        _add(process, ProcessUsage, name, _Kind.TYPE_DOUBLE, "nan")
    figures = file.message_type.add(name="Figures")
    _add(figures, RankWindow, "identity", _Kind.TYPE_BYTES)
    for name in ("start_unix_nanos", "end_unix_nanos"):
        _add(figures, RankWindow, name, _Kind.TYPE_INT64)
    for name in ("steps", "steps_total"):
        _add(figures, RankWindow, name, _Kind.TYPE_UINT64, str(ABSENT_COUNT))
    _add(figures, RankWindow, "last_step_unix_nanos", _Kind.TYPE_INT64, str(ABSENT_NANOS))
    escaped = "".join(f"\\{byte:03o}" for byte in ABSENT)
    for name in ("step", "self", "wait", "causes"):
        _add(figures, RankWindow, name, _Kind.TYPE_BYTES, escaped)
    for name in ("mfu_ratio", "host_seconds", "run_ahead_seconds"):
        _add(figures, RankWindow, name, _Kind.TYPE_DOUBLE, "nan")
    _add(figures, RankWindow, "groups", _Kind.TYPE_BYTES)
    _add(figures, RankWindow, "process", _Kind.TYPE_MESSAGE).type_name = f".{_PACKAGE}.Process"
    _add(figures, RankWindow, "sources", _Kind.TYPE_BYTES).label = _Kind.LABEL_REPEATED
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = (pool.FindMessageTypeByName(f"{_PACKAGE}.{name}") for name in ("Said", "Figures"))
    said_class, figures_class = map(message_factory.GetMessageClass, found)
    return said_class, figures_class


def _add(
    message: descriptor_pb2.DescriptorProto, contract: Any, name: str, kind: _Kind.Type.ValueType, default: str = ""
) -> descriptor_pb2.FieldDescriptorProto:
    number = contract.DESCRIPTOR.fields_by_name[name].number
    field = message.field.add(name=name, number=number, type=kind, label=_Kind.LABEL_OPTIONAL)
    if default:
        field.default_value = default
    return field


_SAID, _FIGURES = _made()


def read_said(message: bytes) -> Said:
    """Raises DecodeError for what is no message."""
    return cast(Said, _SAID.FromString(message))


def read_figures(window: bytes) -> Figures:
    """Raises DecodeError for what is no message."""
    return cast(Figures, _FIGURES.FromString(window))
