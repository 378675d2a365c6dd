"""Builds the columns of a trace batch by batch. Only a few integers of each event are kept."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.reader.column_types import (
    COMMUNICATION_CALL,
    CategoryTable,
    NameTable,
    identifiers,
    integers,
    times_ns,
)
from rankscope.analysis.traces.reader.events import DECODE_ERRORS, Arguments, Batch, Event
from rankscope.analysis.traces.reader.metadata import Membership, whole
from rankscope.analysis.traces.reader.operator_work import NO_TENSOR, TOO_MANY_ELEMENTS, OperatorWork, elements_of
from rankscope.analysis.traces.trace import ABSENT, Category, CollectiveColumns, Repairs
from rankscope.common.text import printable

_MAX_DIMS_BYTES = 1 << 20
_COLLECTIVE_COLUMNS = tuple(field.name for field in fields(CollectiveColumns))
_NO_ARGUMENTS = Arguments()
# These always run on the host, whatever arguments they have; they are most of a trace.
_HOST_ONLY = (Category.CPU_OP, Category.PYTHON, Category.USER_ANNOTATION)
_DEVICE_WORK = (Category.KERNEL, Category.MEMCPY, Category.MEMSET, Category.DEVICE_EVENT)
_ALLOCATION = "[memory]"
_BACKWARD_FLOW = "fwdbwd"


class ColumnBuilder:
    def __init__(self, repairs: Repairs) -> None:
        self.repairs = repairs
        self.names = NameTable()
        self.spans = GrowingColumns()
        self.halves = GrowingColumns()  # events written as separate begin and end events
        self.notes = GrowingColumns()
        self.memory = GrowingColumns()
        self.flows = GrowingColumns()
        self.operators = GrowingColumns()
        self.memberships: dict[Membership, None] = {}
        self.events = 0
        self._categories = CategoryTable()
        self._threads = NameTable()
        self._operator_work = OperatorWork(self.names)

    def add(self, batch: Batch) -> None:
        events = batch.events
        self.events += len(events)
        spans = [event for event in events if event.ph == "X"]
        if len(spans) < len(events):
            others = [
                event for event in events if event.ph in ("B", "E", "i", "I", None) or event.cat == _BACKWARD_FLOW
            ]
            if others:
                spans += self._add_others(batch, others)
        if spans:
            self._add_spans(batch, spans)

    def _add_spans(self, batch: Batch, events: list[Event]) -> None:
        arguments = _arguments(events)
        columns, kept = self._columns(batch, events, arguments)
        duration, measured = self._times(batch, events, "dur")
        negative = measured & (duration < 0)
        self.repairs.note("event without a valid duration taken as 0", int(np.sum(~measured & kept)))
        self.repairs.note("negative duration taken as 0", int(np.sum(negative & kept)))
        columns["duration_ns"] = np.where(measured & ~negative, duration, 0)
        notes, memberships = read_metadata(arguments, columns["name"], self.names)
        self.memberships.update(dict.fromkeys(memberships))
        operators = np.flatnonzero(columns["category"] == Category.CPU_OP)
        work = self._operator_work.columns(operators, arguments, columns["name"][operators])
        for part, about in ((self.notes, notes), (self.operators, work)):
            if len(about["row"]):
                noted = kept[about["row"]]
                about["row"] = self.spans.length + np.cumsum(kept)[about["row"]] - 1
                part.add(**{key: column[noted] for key, column in about.items()})
        if not kept.all():
            columns = {key: column[kept] for key, column in columns.items()}
        self.spans.add(**columns)

    def _columns(
        self, batch: Batch, events: list[Event], arguments: list[Arguments]
    ) -> tuple[dict[str, npt.NDArray[Any]], Bools]:
        """All columns except the duration, and which events have a valid time."""
        start, timed = self._times(batch, events, "ts")
        self.repairs.note("event without a valid time dropped", int(np.sum(~timed)))
        category = np.array(_look_up(self._categories, [event.cat for event in events]), dtype=np.int8)
        columns: dict[str, npt.NDArray[Any]] = {
            "start_ns": start,
            "category": category,
            "name": np.array(_look_up(self.names, [event.name for event in events]), dtype=np.int64),
            "process": integers([event.pid for event in events]),
            "thread": integers([event.tid for event in events]),
            "external_id": _external_ids(arguments),
            **_device_columns(arguments, category),
        }
        _place_on_device(columns)
        return columns, timed

    def _times(self, batch: Batch, events: list[Event], field: str) -> tuple[Ints, Bools]:
        def written() -> list[bytes]:
            times = {id(event): each for event, each in zip(batch.events, batch.written_times(), strict=True)}
            return [bytes(getattr(times[id(event)], field)) for event in events]

        values = [event.ts for event in events] if field == "ts" else [event.dur for event in events]
        return times_ns(values, written)

    def _add_others(self, batch: Batch, events: list[Event]) -> list[Event]:
        """Add allocations, begin/end events and flows. Returns complete events that lack `ph`."""
        allocations = [event for event in events if event.name == _ALLOCATION and event.ph in ("i", "I")]
        if allocations:
            self._add_allocations(batch, allocations)
        halves = [event for event in events if event.ph in ("B", "E")]
        if halves:
            columns, kept = self._columns(batch, halves, _arguments(halves))
            columns["begins"] = np.array([event.ph == "B" for event in halves], dtype=bool)
            columns["key"] = np.array([self._threads[f"{event.pid}\n{event.tid}"] for event in halves], dtype=np.int64)
            self.halves.add(**{key: column[kept] for key, column in columns.items()})
        flows = [event for event in events if event.cat == _BACKWARD_FLOW and event.ph in ("s", "f")]
        if flows:
            self._add_flows(batch, flows)
        complete = [event for event in events if event.ph is None and event.dur is not None]
        self.repairs.note("event with a duration but no ph read as complete", len(complete))
        return complete

    def _add_flows(self, batch: Batch, events: list[Event]) -> None:
        time, timed = self._times(batch, events, "ts")
        columns: dict[str, npt.NDArray[Any]] = {
            "number": integers([event.id for event in events]),
            "time_ns": time,
            "process": integers([event.pid for event in events]),
            "thread": integers([event.tid for event in events]),
            "is_forward": np.array([event.ph == "s" for event in events], dtype=bool),
        }
        self.flows.add(**{key: column[timed] for key, column in columns.items()})

    def _add_allocations(self, batch: Batch, events: list[Event]) -> None:
        time, timed = self._times(batch, events, "ts")
        arguments = _arguments(events)
        # Frees are negative, so 0 stands for a missing value.
        change = np.array([whole(each.change_bytes) or 0 for each in arguments], dtype=np.int64)
        device = identifiers([each.memory_device for each in arguments])
        kind = integers([each.device_type for each in arguments])
        columns = {
            "time_ns": time,
            "change_bytes": change,
            "allocated_bytes": integers([each.allocated_bytes for each in arguments]),
            "reserved_bytes": integers([each.reserved_bytes for each in arguments]),
            "on_device": np.where(kind >= 0, kind > 0, device >= 0),  # c10's DeviceType: 0 is the CPU
            "device": device,
            "process": integers([event.pid for event in events]),
            "thread": integers([event.tid for event in events]),
            "address": integers([each.address for each in arguments]),
        }
        self.memory.add(**{key: column[timed] for key, column in columns.items()})


class GrowingColumns:
    """Columns that grow in pieces."""

    def __init__(self) -> None:
        self._pieces: dict[str, list[npt.NDArray[Any]]] = {}
        self.length = 0

    def add(self, **columns: npt.NDArray[Any]) -> None:
        for key, column in columns.items():
            self._pieces.setdefault(key, []).append(column)
        self.length += len(next(iter(columns.values())))

    def take(self, key: str) -> Ints:
        """The whole column. Its pieces are released, so that a trace is never held twice."""
        pieces = self._pieces.pop(key, [])
        return np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)


def read_metadata(arguments: list[Arguments], name: Ints, names: NameTable) -> tuple[dict[str, Ints], list[Membership]]:
    """The columns of CollectiveColumns for events that have communication metadata. `row` counts from the first
    event given."""
    noted = [row for row, each in enumerate(arguments) if each.collective is not None or each.group is not None]
    columns: dict[str, list[Any]] = {key: [] for key in _COLLECTIVE_COLUMNS}
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
        place = (str(each.group), str(each.group_ranks))
        if each.group is not None and place not in members:
            members[place] = _membership(each)
    for row in np.flatnonzero(names.communication_calls()[name]).tolist():
        each = arguments[row]
        call = COMMUNICATION_CALL.match(names.texts[name[row]])
        if call and len(each.input_dims) and each.collective is None and each.group is None:
            elements, element_type = _size_of_inputs(each)
            known = {
                "row": row,
                "collective": names[call[1]],
                "in_elements": elements,
                "element_type": _index(element_type, names),
            }
            for key in _COLLECTIVE_COLUMNS:
                columns[key].append(known.get(key, ABSENT))
    return {key: _column(key, values) for key, values in columns.items()}, list(members.values())


def _column(key: str, values: list[Any]) -> Ints:
    column = identifiers(values) if key == "peer" else integers(values)
    return np.maximum(column, ABSENT)


def _index(text: Any, names: NameTable) -> int:
    return ABSENT if text is None or text == "" else names[str(text)]


def _membership(each: Arguments) -> Membership:
    size, start, stride, place = integers([each.group_size, each.group_start, each.group_stride, each.group_rank])
    return Membership(
        name=printable(str(each.group)),
        description=printable(str(each.group_description or "")),
        ranks=str(each.group_ranks or ""),
        size=int(size),
        start=int(start),
        stride=int(stride),
        place=int(place),
    )


def _size_of_inputs(each: Arguments) -> tuple[int, str | None]:
    """The number of elements of all input tensors, and the type of the first."""
    if len(each.input_dims) > _MAX_DIMS_BYTES:
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
        if shape == [] and kind in NO_TENSOR:
            continue
        total += elements_of(shape)
        first = first or kind or None
    return (total if 0 < total < TOO_MANY_ELEMENTS else ABSENT), first


def _arguments(events: list[Event]) -> list[Arguments]:
    return [event.args if type(event.args) is Arguments else _NO_ARGUMENTS for event in events]


def _look_up(table: dict[Any, int], values: list[Any]) -> list[int]:
    try:
        return [table[value] for value in values]
    except TypeError:  # a list or an object instead of a string
        return [table[value if isinstance(value, str) or value is None else str(value)] for value in values]


def _external_ids(arguments: list[Arguments]) -> Ints:
    external = identifiers([each.external_id for each in arguments])
    missing = np.flatnonzero(external == ABSENT)
    external[missing] = identifiers([arguments[row].old_external_id for row in missing.tolist()])
    return external


def _device_columns(arguments: list[Arguments], category: npt.NDArray[np.int8]) -> dict[str, Ints]:
    rows = np.flatnonzero(~np.isin(category, _HOST_ONLY))
    on_device = [arguments[row] for row in rows.tolist()]
    columns = {}
    for key in ("device", "stream", "correlation", "size_bytes"):
        values = list(map(attrgetter(key), on_device))
        columns[key] = np.full(len(arguments), ABSENT, dtype=np.int64)
        columns[key][rows] = integers(values) if key == "size_bytes" else identifiers(values)
    return columns


def _place_on_device(columns: dict[str, npt.NDArray[Any]]) -> None:
    """Old profilers give a kernel's device and stream only as process and thread; new ones also as arguments."""
    category = columns["category"]
    work = np.isin(category, _DEVICE_WORK)
    annotation = category == Category.GPU_ANNOTATION
    device, stream = columns["device"], columns["stream"]
    device[:] = np.where((work | annotation) & (device == ABSENT), columns["process"], device)
    # Annotations keep "no stream", which distinguishes them from work. Their stream is the thread.
    stream[:] = np.where(work & (stream == ABSENT), columns["thread"], stream)
    columns["process"] = np.where(work & (device != ABSENT), device, columns["process"])
    columns["thread"] = np.where(work & (stream != ABSENT), stream, columns["thread"])
