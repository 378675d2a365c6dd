"""The end of a flight recorder, small enough to send: the last records of each process group as JSON in torch's layout,
without stacks. Made on the node of a rank that hangs, and matched with those of the other ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import numpy as np

from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, DumpError, Group
from rankscope.analysis.collectives.flight_recorder.dump import Dump, State, load_dump, read_content, read_dump
from rankscope.analysis.collectives.flight_recorder.matching import analyze_dumps
from rankscope.analysis.collectives.flight_recorder.report import Report, make_report

MAX_TAIL_BYTES: Final = 64 << 10
MAX_GROUPS: Final = 64
# Of each group. Fewer where the tail would be too large.
_RECORDS_OF_A_GROUP: Final = (64, 32, 16, 8, 4, 2)
_MAX_MEMBERS_BYTES: Final = 16 << 10


def make_tail(data: bytes) -> bytes:
    """Of a dump. Raises DumpError, for any bytes."""
    content = load_dump(data)
    catalog = Catalog()
    dump = read_content(content, catalog)
    if not dump.has_records:
        raise DumpError("it was written without collectives, or with those in flight only; dump all records")
    writer = _Writer(content.get("entries") or [], dump, catalog)
    for count in _RECORDS_OF_A_GROUP:
        tail = writer.write(*_kept(dump, count))
        if tail is not None:
            return tail
    raise DumpError("its records are too large; they name too many tensors")


def match_tails(tails: Mapping[int, bytes]) -> Report:
    """Who waits for whom, from the tails of the ranks of a job. A rank whose tail cannot be read counts as a rank
    without one. Never raises."""
    catalog = Catalog()
    dumps: dict[int, Dump] = {}
    for rank, tail in tails.items():
        try:
            if len(tail) <= MAX_TAIL_BYTES:
                dumps[rank] = read_dump(tail, catalog)
        except DumpError:
            continue
    return make_report(analyze_dumps(dumps, catalog))


def _kept(dump: Dump, count: int) -> tuple[list[int], bool]:
    """The records to keep, in their order, and whether they are the newest of their groups. What a group waits for is
    the first record that is not finished: it is kept, even if that leaves no room for the newest."""
    by_group: dict[int, list[int]] = defaultdict(list)
    for row, group in enumerate(dump.group.tolist()):
        by_group[group].append(row)
    recent = sorted(by_group.values(), key=lambda rows: rows[-1])[-MAX_GROUPS:]
    kept: list[int] = []
    is_newest = True
    for rows in recent:
        waiting = np.flatnonzero(dump.state[rows] == State.PENDING)
        first = int(waiting[0]) if len(waiting) else len(rows)
        start = max(0, min(len(rows) - count, first - count // 4))
        is_newest &= start + count >= len(rows)
        kept += rows[start : start + count]
    return sorted(kept), is_newest


class _Writer:
    """What has been checked and cleaned by the reader is written, and of the records themselves only shapes."""

    def __init__(self, entries: list[dict[str, Any]], dump: Dump, catalog: Catalog) -> None:
        self._entries = entries
        self._dump = dump
        self._catalog = catalog
        self._encoded: dict[int, bytes] = {}

    def write(self, kept: list[int], is_newest: bool) -> bytes | None:
        """None if it is too large."""
        # The reader takes consecutive numbers as a sign that nothing newer is missing, and the number 0 that nothing
        # older is. Records are left out by group, so the others get new numbers, with gaps where they are incomplete.
        dump = self._dump
        step = 1 if dump.is_gapless and is_newest else 2
        first = 0 if dump.is_from_start and len(kept) == len(dump) else 1
        size = 0
        parts = []
        for place, row in enumerate(kept):
            part = b'{"record_id":%d,' % (first + place * step) + self._record(row)
            size += len(part)
            if size > MAX_TAIL_BYTES:
                return None
            parts.append(part)
        head = {"version": dump.layout, "pg_config": self._groups(set(dump.group[kept].tolist()))}
        tail = msgspec.json.encode(head)[:-1] + b',"entries":[' + b",".join(parts) + b"]}"
        return tail if len(tail) <= MAX_TAIL_BYTES else None

    def _record(self, row: int) -> bytes:
        """Without its opening brace."""
        if row not in self._encoded:
            dump, entry = self._dump, self._entries[row]
            group = self._catalog.groups[int(dump.group[row])]
            operation = self._catalog.operations[int(dump.operation[row])]
            backend, colon, _ = entry["profiling_name"].partition(":")
            is_p2p, state = bool(dump.is_p2p[row]), int(dump.state[row])
            record = {
                "process_group": [group.name, group.description],
                "p2p_seq_id" if is_p2p else "collective_seq_id": int(dump.sequence[row]),
                "is_p2p": is_p2p,
                "profiling_name": f"{backend}:{operation.name}" if colon else operation.name,
                "state": "completed" if state == State.COMPLETED else "scheduled",
                "retired": state != State.PENDING,
                "input_sizes": entry["input_sizes"],
                "input_dtypes": operation.input_types,
                "output_sizes": entry["output_sizes"],
                "output_dtypes": operation.output_types,
            }
            try:
                self._encoded[row] = msgspec.json.encode(record)[1:]
            except (TypeError, ValueError, OverflowError, RecursionError):
                raise DumpError(f"its record {row} is not what torch writes") from None
        return self._encoded[row]

    def _groups(self, used: set[int]) -> dict[str, dict[str, str]]:
        """Members that take too much room are left out: the default group has all ranks anyway."""
        room = _MAX_MEMBERS_BYTES
        described = [(self._catalog.groups[number], number in used) for number in self._dump.groups]
        unnamed = Group("", "undefined", self._dump.mentioned or None)
        found = {}
        for group in (unnamed, *(group for group, is_used in described if is_used)):
            ranks = str(list(group.members or ()))
            room -= len(ranks)
            if group.members and room >= 0:
                found[group.name] = {"name": group.name, "desc": group.description, "ranks": ranks}
        return found
