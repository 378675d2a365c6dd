"""The metadata of a trace file: base time, rank, devices and process groups, in all formats that profilers have
used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from rankscope.analysis.traces.reader.column_types import COMMUNICATION_CALL
from rankscope.analysis.traces.reader.events import DECODE_ERRORS, explain, repair_json
from rankscope.analysis.traces.trace import ABSENT, Device, ProcessGroup, Repairs
from rankscope.common.text import printable

# Of all groups together: two numbers in an event can describe a group of a million ranks, and a trace has many events.
MAX_MEMBERS = 1 << 21
MAX_RANK = 1 << 40
# The year 2116. Sums with it still fit 64 bits.
FURTHEST_NS = 1 << 62
_UNKNOWN_BACKENDS = ("", "undefined", "unknown", "none")


class Description(msgspec.Struct):
    base_time: Any = msgspec.field(default=None, name="baseTimeNanoseconds")
    distributed: Any = msgspec.field(default=None, name="distributedInfo")
    devices: Any = msgspec.field(default=None, name="deviceProperties")
    second: msgspec.Raw | None = msgspec.field(default=None, name="traceEvents")

    def joined(self, later: Description) -> Description:
        return Description(
            base_time=later.base_time if self.base_time is None else self.base_time,
            distributed=self.distributed or later.distributed,
            devices=self.devices or later.devices,
            second=later.second,
        )


_DECODER = msgspec.json.Decoder(Description)


def describe(text: bytes, repairs: Repairs, *, offset: int) -> Description:
    """Decode a JSON object; raises one of DECODE_ERRORS."""
    try:
        return _DECODER.decode(text)
    except DECODE_ERRORS:
        fixes = Repairs()
        description = _DECODER.decode(repair_json(text, fixes, offset=offset))
        repairs.add(fixes)
        return description


def describe_rest(text: bytes, repairs: Repairs, *, offset: int) -> Description:
    """Decode what follows traceEvents, up to the closing brace. Errors there cost no events."""
    rest = text.strip()
    if rest == b"}":
        return Description()
    if not rest:
        repairs.note("the closing brace of the file is missing", byte=offset + len(text))
        return Description()
    for begin, end in ((b'{"":0', b""), (b'{"":0', b"}")):
        try:
            description = describe(begin + rest + end, repairs, offset=offset)
        except DECODE_ERRORS as error:
            reason = explain(error)
        else:
            if end:
                repairs.note("the closing brace of the file is missing", byte=offset + len(text))
            return description
    repairs.note(f"metadata after traceEvents cannot be read: {reason}", byte=offset)
    return Description()


@dataclass(frozen=True)
class Membership:
    """One event's description of its process group and of this rank's position in it."""

    name: str
    description: str
    ranks: str
    size: int
    start: int
    stride: int
    place: int

    def members(self) -> Sequence[int]:
        """Kineto shortens long lists; regular groups also have a start and a stride."""
        listed = rank_list(self.ranks)
        if listed and len(listed) == (self.size if self.size > 0 else len(listed)):
            return listed
        end = self.start + self.size * self.stride
        if self.size > 0 and self.start >= 0 and self.stride > 0 and self.size < 1 << 20 and end < MAX_RANK:
            return range(self.start, end, self.stride)
        return ()


def base_time_ns(description: Description, repairs: Repairs) -> int:
    if description.base_time is None:
        return 0
    number = whole(description.base_time)
    if number is None or abs(number) > FURTHEST_NS:
        repairs.note("baseTimeNanoseconds is invalid; times are relative")
        return 0
    return number


def rank_and_world(description: Description, memberships: list[Membership]) -> tuple[int | None, int | None]:
    distributed = description.distributed if isinstance(description.distributed, dict) else {}
    rank, world = whole(distributed.get("rank")), whole(distributed.get("world_size"))
    for member in memberships:
        default = member.description == "default_pg"
        ranks = member.members()
        if rank is None and 0 <= member.place < len(ranks):
            rank = ranks[member.place]
        if rank is None and default and member.place >= 0:
            rank = member.place
        if world is None and default and member.size > 0:
            world = member.size
    return (
        rank if rank is not None and 0 <= rank < MAX_RANK else None,
        world if world is not None and 0 < world <= MAX_RANK else None,
    )


def backend_of(description: Description, names: list[str]) -> str:
    distributed = description.distributed if isinstance(description.distributed, dict) else {}
    backend = distributed.get("backend")
    if isinstance(backend, str) and backend.lower() not in _UNKNOWN_BACKENDS:
        return printable(backend)
    prefixes = {text.split(":", 1)[0] for text in names if COMMUNICATION_CALL.match(text)}
    return min(prefixes) if len(prefixes) == 1 else "nccl" if "nccl" in prefixes else ""


def devices_of(description: Description) -> tuple[Device, ...]:
    listed = description.devices if isinstance(description.devices, list) else []
    return tuple(
        Device(
            index=number if (number := whole(each.get("id"))) is not None else ABSENT,
            name=printable(str(each.get("name", ""))),
            memory_bytes=whole(each.get("totalGlobalMem")),
        )
        for each in listed
        if isinstance(each, dict)
    )


def groups_of(description: Description, memberships: list[Membership]) -> tuple[ProcessGroup, ...]:
    distributed = description.distributed if isinstance(description.distributed, dict) else {}
    groups: dict[str, ProcessGroup] = {}
    for name, each in _configured(distributed.get("pg_config")):
        ranks = rank_list(each.get("ranks", each.get("pg_ranks", each.get("global_ranks"))))
        description_text = printable(str(each.get("pg_desc", each.get("desc", "")) or ""))
        groups[name] = ProcessGroup(name, description_text, ranks)
    left = MAX_MEMBERS
    for member in memberships:
        known = groups.get(member.name)
        members = member.members()
        if known is None or (not known.ranks and members):
            description_text = member.description or (known.description if known else "")
            ranks = tuple(members) if len(members) <= left else ()
            left -= len(ranks)
            groups[member.name] = ProcessGroup(member.name, description_text, ranks)
    return tuple(groups.values())


def _configured(config: Any) -> list[tuple[str, dict[str, Any]]]:
    """pg_config has been a list of objects, an object of objects, and either of them as a string."""
    if isinstance(config, str):
        try:
            config = msgspec.json.decode(config)
        except DECODE_ERRORS:
            return []
    if isinstance(config, dict):
        config = [{"pg_name": name, **each} for name, each in config.items() if isinstance(each, dict)]
    if not isinstance(config, list):
        return []
    objects = [each for each in config if isinstance(each, dict)]
    return [(printable(str(each["pg_name"])), each) for each in objects if each.get("pg_name") is not None]


def rank_list(value: Any) -> tuple[int, ...]:
    """Ranks from a list or a text such as "[0, 1]"; empty if it is shortened or invalid."""
    if isinstance(value, str):
        words = value.strip().strip("[]()").replace(",", " ").split()
        value = words if all(word.lstrip("-").isdigit() for word in words) else []
    if not isinstance(value, list):
        return ()
    ranks = [whole(each) for each in value]
    return tuple(rank for rank in ranks if rank is not None) if None not in ranks else ()


def whole(value: Any) -> int | None:
    """An integer, also from a string or a float; None for anything else."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if -(1 << 63) <= number < 1 << 63 else None
