"""Reads a Kineto trace into columns: `read_trace`. Text is read in blocks and released when its events are in
columns, so that memory use is the columns plus a few megabytes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields

import msgspec
import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.reader import metadata
from rankscope.analysis.traces.reader.column_types import correct_by_name
from rankscope.analysis.traces.reader.event_columns import ColumnBuilder, GrowingColumns
from rankscope.analysis.traces.reader.events import DECODE_ERRORS, UNREADABLE, explain, place_of
from rankscope.analysis.traces.reader.json_stream import (
    MAX_TEXT_BYTES,
    Ending,
    Text,
    batches,
    blocks_of,
    find_events,
    inflate,
)
from rankscope.analysis.traces.reader.metadata import Description
from rankscope.analysis.traces.trace import (
    CollectiveColumns,
    FlowColumns,
    MemoryColumns,
    OperatorColumns,
    Repairs,
    Trace,
    TraceError,
)
from rankscope.common.text import printable

_SECOND_NS = 1_000_000_000
_HEAD_BYTES = 256 << 10
# Metadata before or after the events is small, except if a tool stores all its stacks there.
_MAX_DESCRIPTION_BYTES = 512 << 20
_SPAN_COLUMNS = (
    "duration_ns",
    "category",
    "name",
    "process",
    "thread",
    "device",
    "stream",
    "correlation",
    "external_id",
    "size_bytes",
)


def read_trace(
    data: bytes | bytearray | memoryview | Iterable[bytes],
    *,
    salvage: bool = True,
    text_limit_bytes: int = MAX_TEXT_BYTES,
) -> Trace:
    """Read a trace from the bytes of a file or from an iterable of blocks; gzip is detected.

    Damage is repaired if possible and listed in `Trace.repairs`. With `salvage`, a truncated text yields the events
    before the cut; without, it is rejected. Raises TraceError."""
    blocks = blocks_of(data) if isinstance(data, bytes | bytearray | memoryview) else data
    repairs = Repairs()
    text = Text(inflate(blocks, limit_bytes=text_limit_bytes), repairs)
    description, in_object = skip_to_events(text)
    builder, ending = ColumnBuilder(repairs), Ending()
    for batch in batches(text, ending):
        builder.add(batch)
    if not builder.events and repairs.total(UNREADABLE):
        raise TraceError(f"nothing in traceEvents can be read: {repairs.messages()[0]}")
    if ending.cut:
        _check_truncation(text, builder, salvage=salvage)
    elif in_object:
        description = description.joined(_rest(text))
        if description.second is not None:
            repairs.note("a second traceEvents is ignored")
    return _build_trace(builder, description)


def skip_to_events(text: Text) -> tuple[Description, bool]:
    """Advance to the first event. Returns the metadata before it and whether the array is the value of an object."""
    text.hold(_HEAD_BYTES)
    if text.held.startswith(b"\xef\xbb\xbf"):
        text.drop(3)
    while not text.ended and not text.held.strip():
        text.drop(len(text.held))
        text.hold(_HEAD_BYTES)
    start = len(text.held) - len(text.held.lstrip())
    if start == len(text.held):
        raise TraceError("the file is empty")
    if text.held[start : start + 1] == b"[":
        text.drop(start + 1)
        return Description(), False
    if text.held[start : start + 1] != b"{":
        raise TraceError(_not_json(bytes(text.held[start : start + 64])), byte=text.offset + start)
    found = find_events(text, limit_bytes=_MAX_DESCRIPTION_BYTES)
    if found is None:
        raise _without_events(text)
    head, place = found
    try:
        description = metadata.describe(head, text.repairs, offset=text.offset)
    except DECODE_ERRORS as error:
        where = text.offset + (place_of(error) or 0)
        raise TraceError(f"the metadata before traceEvents is not valid JSON: {explain(error)}", byte=where) from None
    if text.held[place : place + 1] != b"[":
        raise TraceError("traceEvents is not an array", byte=text.offset + place)
    text.drop(place + 1)
    return description, True


def _not_json(beginning: bytes) -> str:
    if re.match(rb"<(!doctype|html|\?xml|!--)", beginning, re.IGNORECASE):
        return "this is HTML or XML, not a trace (a download that required a login?)"
    return f"not a JSON object or array; it begins with {beginning[:16].decode(errors='replace')!r}"


def _without_events(text: Text) -> TraceError:
    try:
        keys = list(msgspec.json.decode(bytes(text.held), type=dict[str, msgspec.Raw]))
    except DECODE_ERRORS as error:
        reason = "it was cut off before its events" if "truncated" in str(error) else explain(error)
        place = text.offset + (place_of(error) or len(text.held))
        return TraceError(f"no traceEvents found, and what is there is not valid JSON: {reason}", byte=place)
    listed = ", ".join(printable(key, 40) for key in keys[:5]) + (", …" if len(keys) > 5 else "")
    return TraceError(f"JSON without traceEvents (its keys: {listed or 'none'}): not a Kineto trace")


def _check_truncation(text: Text, builder: ColumnBuilder, *, salvage: bool) -> None:
    count = f"{builder.events} complete events before the cut"
    if not builder.events:
        raise TraceError("the file is cut off before its first event is complete", byte=text.offset)
    if not salvage:
        raise TraceError(f"the file is cut off inside traceEvents; {count} could be salvaged", byte=text.offset)
    text.repairs.note(
        f"the file is cut off inside traceEvents: {count} were read, the rest is missing", byte=text.offset
    )


def _rest(text: Text) -> Description:
    text.hold(_MAX_DESCRIPTION_BYTES)
    if not text.ended:
        text.repairs.note("metadata after traceEvents is too large to read", byte=text.offset)
        return Description()
    return metadata.describe_rest(bytes(text.held), text.repairs, offset=text.offset)


def _build_trace(builder: ColumnBuilder, description: Description) -> Trace:
    _complete_halves(builder)
    names = builder.names.texts
    memberships = list(builder.memberships)
    rank, world_size = metadata.rank_and_world(description, memberships)
    start = builder.spans.take("start_ns")
    columns: dict[str, npt.NDArray[np.int64]] = {key: builder.spans.take(key) for key in _SPAN_COLUMNS}
    order = np.lexsort((-columns["duration_ns"], start))
    columns = {key: columns.pop(key)[order] for key in _SPAN_COLUMNS}
    memory_time = builder.memory.take("time_ns")
    first = min((int(times.min()) for times in (start, memory_time) if len(times)), default=0)
    # Whole seconds, so that fractions of microseconds do not change.
    shift = first // _SECOND_NS * _SECOND_NS
    start = start[order] - shift
    category = columns.pop("category").astype(np.int8)
    correct_by_name(category, columns["name"], names)
    return Trace(
        start_ns=start,
        category=category,
        **columns,
        names=tuple(names),
        base_ns=metadata.base_time_ns(description, builder.repairs) + shift,
        rank=rank,
        world_size=world_size,
        backend=metadata.backend_of(description, names),
        devices=metadata.devices_of(description),
        groups=metadata.groups_of(description, memberships),
        collectives=_collectives(builder, order),
        memory=_memory(builder, memory_time - shift),
        flows=_flows(builder, shift),
        repairs=builder.repairs.messages(),
        operators=_operators(builder, order),
    )


def _complete_halves(builder: ColumnBuilder) -> None:
    halves = builder.halves
    if not halves.length:
        return
    start, key, begins = halves.take("start_ns"), halves.take("key"), halves.take("begins")
    first, last = _pair(key, start, begins.astype(bool))
    builder.repairs.note("begin or end event without its counterpart dropped", len(key) - 2 * len(first))
    columns = {name: halves.take(name)[first] for name in _SPAN_COLUMNS if name != "duration_ns"}
    builder.spans.add(start_ns=start[first], duration_ns=start[last] - start[first], **columns)


def _pair(thread: Ints, time_ns: Ints, begins: Bools) -> tuple[Ints, Ints]:
    """Rows of begin events and of their end events. Rows must be in file order, which decides between events of the
    same thread and time. A begin event raises its thread's level and an end event lowers it, so that they alternate
    on each level and neighbours belong together, even if the file starts inside a stack."""
    order = np.lexsort((np.arange(len(thread)), time_ns, thread))
    step = np.where(begins[order], 1, -1)
    level = np.cumsum(step) + (step < 0)
    ranked = np.lexsort((np.arange(len(order)), level, thread[order]))
    rows, levels = order[ranked], level[ranked]
    together = (
        begins[rows[:-1]] & ~begins[rows[1:]] & (thread[rows[:-1]] == thread[rows[1:]]) & (levels[:-1] == levels[1:])
    )
    first = np.flatnonzero(together)
    return rows[first], rows[first + 1]


def _collectives(builder: ColumnBuilder, order: Ints) -> CollectiveColumns:
    names = [field.name for field in fields(CollectiveColumns)]
    return CollectiveColumns(**_by_row(builder.notes, names, order))


def _operators(builder: ColumnBuilder, order: Ints) -> OperatorColumns:
    return OperatorColumns(**_by_row(builder.operators, [field.name for field in fields(OperatorColumns)], order))


def _by_row(columns: GrowingColumns, names: list[str], order: Ints) -> dict[str, Ints]:
    """Columns about rows of the file, for the rows of the trace."""
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    row = place[columns.take("row")]
    by_row = np.argsort(row, kind="stable")
    return {name: (row if name == "row" else columns.take(name))[by_row] for name in names}


def _memory(builder: ColumnBuilder, time_ns: Ints) -> MemoryColumns:
    memory = builder.memory
    order = np.argsort(time_ns, kind="stable")
    names = ("change_bytes", "allocated_bytes", "reserved_bytes", "device", "process", "thread", "address")
    columns = {name: memory.take(name)[order] for name in names}
    return MemoryColumns(time_ns[order], on_device=memory.take("on_device")[order].astype(bool), **columns)


def _flows(builder: ColumnBuilder, shift_ns: int) -> FlowColumns:
    flows = builder.flows
    time = flows.take("time_ns") - shift_ns
    is_forward = flows.take("is_forward").astype(bool)
    return FlowColumns(flows.take("number"), time, flows.take("process"), flows.take("thread"), is_forward)
