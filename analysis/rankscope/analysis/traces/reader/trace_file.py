"""Reads a Kineto trace into columns: `read_trace`. Text is read in blocks and released when its events are in
columns, so that memory use is the columns plus a few megabytes."""

from __future__ import annotations

import re
from collections.abc import Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Ints
from rankscope.analysis.traces.reader import metadata
from rankscope.analysis.traces.reader.event_columns import Gatherer
from rankscope.analysis.traces.reader.events import DECODE_ERRORS, UNREADABLE, correct_by_name, explain, pair, place_of
from rankscope.analysis.traces.reader.json_stream import TEXT_LIMIT_BYTES, Ending, Text, batches, blocks_of, inflate
from rankscope.analysis.traces.reader.metadata import Description
from rankscope.analysis.traces.trace import CollectiveColumns, MemoryColumns, Repairs, Trace, TraceError

__all__ = ["TraceError", "read_trace"]
_SECOND_NS = 1_000_000_000
_HEAD_BYTES = 256 << 10
# Metadata before or after the events is small, except if a tool stores all its stacks there.
_DESCRIPTION_LIMIT_BYTES = 512 << 20
_EVENTS_KEY = re.compile(rb'"traceEvents"\s*:\s*')
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
    name: str = "",
    salvage: bool = True,
    text_limit_bytes: int = TEXT_LIMIT_BYTES,
) -> Trace:
    """Read a trace from the bytes of a file or from an iterable of blocks; gzip is detected.

    Damage is repaired if possible and listed in `Trace.repairs`. With `salvage`, a truncated text yields the events
    before the cut; without, it is rejected. Raises TraceError with a message that starts with `name`."""
    blocks = blocks_of(data) if isinstance(data, bytes | bytearray | memoryview) else data
    try:
        return _read(blocks, salvage=salvage, text_limit_bytes=text_limit_bytes)
    except TraceError as error:
        error.name_file(name)
        raise


def _read(blocks: Iterable[bytes | memoryview], *, salvage: bool, text_limit_bytes: int) -> Trace:
    repairs = Repairs()
    text = Text(inflate(blocks, limit_bytes=text_limit_bytes), repairs)
    description, in_object = _open(text)
    gatherer, ending = Gatherer(repairs), Ending()
    for batch in batches(text, ending):
        gatherer.add(batch)
    if not gatherer.events and repairs.total(UNREADABLE):
        raise TraceError(f"nothing in traceEvents can be read: {repairs.in_words()[0]}")
    if ending.cut:
        _judge_cut(text, gatherer, salvage=salvage)
    elif in_object:
        description = description.joined(_rest(text))
        if description.second is not None:
            repairs.note("a second traceEvents is ignored")
    return _finish(gatherer, description)


def _open(text: Text) -> tuple[Description, bool]:
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
    while True:
        for found in _EVENTS_KEY.finditer(bytes(text.held)):
            before = bytes(text.held[: found.start()]) + b'"":0}'
            try:
                description = metadata.describe(before, text.repairs, offset=text.offset)
            except DECODE_ERRORS:
                continue  # a key of that name inside another object
            if text.held[found.end() : found.end() + 1] != b"[":
                raise TraceError("traceEvents is not an array", byte=text.offset + found.end())
            text.drop(found.end() + 1)
            return description, True
        if text.ended or len(text.held) > _DESCRIPTION_LIMIT_BYTES:
            raise _without_events(text)
        text.hold(4 * len(text.held))


def _not_json(beginning: bytes) -> str:
    if re.match(rb"<(!doctype|html|\?xml|!--)", beginning, re.IGNORECASE):
        return "this is a web page or XML, not a trace: a download that asked for a login?"
    return f"this is no JSON object or array: it begins with {beginning[:16].decode(errors='replace')!r}"


def _without_events(text: Text) -> TraceError:
    try:
        keys = list(msgspec.json.decode(bytes(text.held), type=dict[str, msgspec.Raw]))
    except DECODE_ERRORS as error:
        reason = "it was cut off before its events" if "truncated" in str(error) else explain(error)
        place = text.offset + (place_of(error) or len(text.held))
        return TraceError(f"no traceEvents found, and what is there is not valid JSON: {reason}", byte=place)
    listed = ", ".join(key[:40] for key in keys[:5]) + (", …" if len(keys) > 5 else "")
    return TraceError(f"JSON without traceEvents (its keys: {listed or 'none'}): not a Kineto trace")


def _judge_cut(text: Text, gatherer: Gatherer, *, salvage: bool) -> None:
    count = f"{gatherer.events} complete events before the cut"
    if not gatherer.events:
        raise TraceError("the file is cut off before its first event is complete", byte=text.offset)
    if not salvage:
        raise TraceError(f"the file is cut off inside traceEvents; {count} could be salvaged", byte=text.offset)
    text.repairs.note(
        f"the file is cut off inside traceEvents: {count} were read, what followed is missing", byte=text.offset
    )


def _rest(text: Text) -> Description:
    text.hold(_DESCRIPTION_LIMIT_BYTES)
    if not text.ended:
        text.repairs.note("too much stands after traceEvents to be read", byte=text.offset)
        return Description()
    return metadata.describe_rest(bytes(text.held), text.repairs, offset=text.offset)


def _finish(gatherer: Gatherer, description: Description) -> Trace:
    _complete_halves(gatherer)
    names = gatherer.names.texts
    memberships = list(gatherer.memberships)
    rank, world_size = metadata.rank_and_world(description, memberships)
    start = gatherer.spans.take("start_ns")
    columns: dict[str, npt.NDArray[np.int64]] = {key: gatherer.spans.take(key) for key in _SPAN_COLUMNS}
    order = np.lexsort((-columns["duration_ns"], start))
    columns = {key: columns.pop(key)[order] for key in _SPAN_COLUMNS}
    memory_time = gatherer.memory.take("time_ns")
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
        base_ns=metadata.base_time_ns(description, gatherer.repairs) + shift,
        rank=rank,
        world_size=world_size,
        backend=metadata.backend_of(description, names),
        devices=metadata.devices_of(description),
        groups=metadata.groups_of(description, memberships),
        collectives=_collectives(gatherer, order),
        memory=_memory(gatherer, memory_time - shift),
        repairs=gatherer.repairs.in_words(),
    )


def _complete_halves(gatherer: Gatherer) -> None:
    halves = gatherer.halves
    if not halves.length:
        return
    start, key, begins = halves.take("start_ns"), halves.take("key"), halves.take("begins")
    pairs = pair(key, start, begins.astype(bool))
    gatherer.repairs.note("beginning or end of an event without its other half left out", pairs.alone)
    columns = {name: halves.take(name)[pairs.begin] for name in _SPAN_COLUMNS if name != "duration_ns"}
    begin, end = start[pairs.begin], start[pairs.end]
    gatherer.spans.add(start_ns=begin, duration_ns=end - begin, **columns)


def _collectives(gatherer: Gatherer, order: Ints) -> CollectiveColumns:
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    notes = gatherer.notes
    row = place[notes.take("row")]
    by_row = np.argsort(row, kind="stable")
    return CollectiveColumns(
        row=row[by_row],
        collective=notes.take("collective")[by_row],
        group=notes.take("group")[by_row],
        group_description=notes.take("group_description")[by_row],
        group_size=notes.take("group_size")[by_row],
        sequence=notes.take("sequence")[by_row],
        element_type=notes.take("element_type")[by_row],
        in_elements=notes.take("in_elements")[by_row],
        out_elements=notes.take("out_elements")[by_row],
        peer=notes.take("peer")[by_row],
        asynchronous=notes.take("asynchronous")[by_row],
    )


def _memory(gatherer: Gatherer, time_ns: Ints) -> MemoryColumns:
    memory = gatherer.memory
    order = np.argsort(time_ns, kind="stable")
    return MemoryColumns(
        time_ns=time_ns[order],
        change_bytes=memory.take("change_bytes")[order],
        allocated_bytes=memory.take("allocated_bytes")[order],
        reserved_bytes=memory.take("reserved_bytes")[order],
        on_device=memory.take("on_device")[order].astype(bool),
        device=memory.take("device")[order],
    )
