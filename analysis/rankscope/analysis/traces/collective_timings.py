"""Timed collectives from traces, for the alpha-beta fit. From many ranks: the transfer alone. From one rank: what it
saw, including waiting."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import Observations
from rankscope.analysis.stats.robust import Ints, take_rows
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.joins.channels import Channel
from rankscope.analysis.traces.joins.join import join_traces
from rankscope.analysis.traces.trace import ProcessGroup, Trace


@dataclass(frozen=True)
class Observed:
    observations: Observations
    notes: tuple[str, ...]


def observe_traces(traces: Mapping[int, Trace], *, ranks: int | None = None) -> Observed:
    """`ranks` is used for groups of unknown size."""
    collectives = {rank: find_collectives(trace) for rank, trace in traces.items()}
    if len(traces) > 1:
        observed = _observe_joined(traces, collectives, ranks)
        if len(observed.observations):
            return observed
    return _observe_single(collectives, ranks)


def _observe_joined(traces: Mapping[int, Trace], collectives: Mapping[int, Collectives], ranks: int | None) -> Observed:
    joined = join_traces(traces, collectives)
    matched, arrivals = joined.matched, joined.arrivals
    count = matched.count
    heads = np.searchsorted(matched.collective, np.arange(count))
    rank, row = matched.calls.rank[heads], matched.calls.row[heads]
    size, members = np.full(count, -1), np.full(count, -1)
    for each, rows in collectives.items():
        mine = np.flatnonzero(rank == each)
        size[mine], members[mine] = rows.bytes[row[mine]], rows.group_size[row[mine]]
    seen = np.diff(np.append(heads, len(matched.collective)))
    chosen = np.flatnonzero(arrivals.possible & (arrivals.transfer_ns > 0))
    labels = [_channel_label(channel) for channel in matched.channels]
    names, group = np.unique([labels[number] for number in matched.channel[chosen].tolist()], return_inverse=True)
    start = np.minimum.reduceat(arrivals.start_ns, heads) if count else np.zeros(0, dtype=np.int64)
    notes = [f"{count} collectives matched over {len(traces)} ranks: times are transfers without waiting"]
    if len(chosen) < count:
        notes.append(f"{count - len(chosen)} excluded: no transfer time at the resolution of the clocks")
    # If no trace gives the world size, a collective over all given ranks has their number.
    world_size = max((trace.world_size or 0 for trace in traces.values()), default=0)
    whole = ranks or (len(traces) if world_size <= len(traces) else -1)
    observations = Observations(
        group=group.astype(np.int64),
        kind=np.where(matched.kind == CollectiveKind.SEND_RECV, CollectiveKind.SEND, matched.kind)[chosen],
        ranks=np.where(members > 0, members, np.where(seen == len(traces), whole, ranks or -1))[chosen],
        bytes=size[chosen],
        seconds=arrivals.transfer_ns[chosen] / 1e9,
        time_seconds=start[chosen] / 1e9,
        groups=tuple(names.tolist()),
    )
    return Observed(observations, tuple(notes))


def _observe_single(collectives: Mapping[int, Collectives], ranks: int | None) -> Observed:
    labels: dict[str, int] = {}
    parts: list[tuple[Ints, Collectives]] = []
    for rows in collectives.values():
        numbers = np.array([labels.setdefault(label(each), len(labels)) for each in rows.groups], dtype=np.int64)
        kept = take_rows(rows, rows.measured)
        parts.append((numbers[kept.group] if len(kept) else kept.group, kept))

    def column(name: str) -> Ints:
        return np.concatenate([getattr(rows, name) for _, rows in parts])

    members = column("group_size")
    observations = Observations(
        group=np.concatenate([group for group, _ in parts]),
        kind=column("kind"),
        ranks=np.where(members > 0, members, ranks or -1),
        bytes=column("bytes"),
        seconds=column("duration_ns") / 1e9,
        time_seconds=column("start_ns") / 1e9,
        groups=tuple(labels) or ("",),
    )
    grouped = int((column("calls") > 1).sum())
    notes = ["times are from one rank and include waiting for later ranks"]
    if grouped:
        notes.append(f"{grouped} kernels served several calls each that NCCL grouped; their bytes are the sum")
    return Observed(observations, tuple(notes))


def _channel_label(channel: Channel) -> str:
    words = [channel.group] if channel.group else []
    words += [f"stream {channel.stream}"] if channel.stream >= 0 else []
    words += [f"{channel.pair[0]}→{channel.pair[1]}"] if channel.pair else []
    return " ".join(words)


def label(group: ProcessGroup) -> str:
    """A group's name, preceded by its description if it has one."""
    described = group.description if group.description not in ("", "undefined", "default_pg") else ""
    return " ".join(word for word in (described, group.name) if word)
