"""Bus bandwidth and bytes of a rank's collectives, by communicator and function, from the records of the NCCL plugin.

The time of a collective on one rank includes waiting for late peers. The rank that waits least shows the link: each
rank takes its usual operations of each size, and the largest value among the members of a group is the group's.

Sizes and factors are those of nccl-tests. NCCL counts what one rank gives to an all-gather or takes from a
reduce-scatter; the size is that of the whole array."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from rankscope.analysis.collective_kinds import CollectiveKind, bus_gbps, kind_of_note, size_bytes
from rankscope.daemon.samples import CollectiveRate
from rankscope.daemon.steps.nccl_reader import Table
from rankscope.daemon.steps.ring_reader import Records
from rankscope.daemon.steps.step_columns import MAX_GROUP_NUMBER, Mask
from rankscope.probe import nccl_layout, ring_layout

if TYPE_CHECKING:
    from rankscope.daemon.steps.nccl_times import Operations

Ints: TypeAlias = npt.NDArray[np.int64]
Floats: TypeAlias = npt.NDArray[np.float64]

# By the number in a record; 0 is another.
KINDS: Final = (CollectiveKind.OTHER, *(kind_of_note(name) or CollectiveKind.OTHER for name in nccl_layout.FUNCTIONS))
FUNCTIONS: Final = tuple(kind.label for kind in KINDS)
ALGORITHMS: Final = ("other", *(name.lower() for name in nccl_layout.ALGORITHMS))
PROTOCOLS: Final = ("other", *(name.lower() for name in nccl_layout.PROTOCOLS))
VARIANTS: Final = len(ALGORITHMS) * len(PROTOCOLS)
_KIND = np.array(KINDS, dtype=np.int64)
# NCCL counts what the rank receives; of the others, what it sends.
_IS_RECEIVED = np.isin(_KIND, [CollectiveKind.REDUCE_SCATTER, CollectiveKind.SCATTER])
# Both ends wait for each other, and many run at once: the time of a message says nothing about the link.
_IS_MESSAGE = np.isin(_KIND, [CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.SEND_RECV])

# The operation of a size that counts: as many are faster as slower. nccl-tests take the mean, of ranks that have met.
USUAL_QUANTILE: Final = 0.5
# A training process writes the records. No GPU holds as much, and no sum over the records overflows.
MAX_RECORD_BYTES: Final = 1 << 40
MAX_ARRAY_BYTES: Final = 1 << 48
MAX_RANKS: Final = 1 << 20
# Ten times what the fastest link carries.
MAX_BYTES_PER_NANOSECOND: Final = 10_000


@dataclass(frozen=True)
class _Transfers:
    """A row per operation, or per run of operations that overlap."""

    communicator: Ints
    function: Ints
    bytes: Ints  # of the whole array
    start_ns: Ints
    stop_ns: Ints

    def take(self, rows: object) -> _Transfers:
        return _Transfers(*(column[rows] for column in vars(self).values()))

    @property
    def key(self) -> Ints:
        return self.communicator * len(FUNCTIONS) + self.function


def collective_rates(
    found: Operations, records: Table, communicators: Table, steps: Records, known: Mask, share: float
) -> tuple[CollectiveRate, ...]:
    """One per communicator and function, of those with the most bytes. `share` of the operations in the `known` steps
    is there."""
    ends = np.maximum.accumulate(steps["end_ns"])
    found = found.take(known[np.minimum(np.searchsorted(ends, found.stop_ns), len(ends) - 1)])
    records = records[found.record]
    transfers = _transfers(found, records, communicators)
    is_good = transfers.bytes > 0
    keys, place = np.unique(transfers.key[is_good], return_inverse=True)
    if not len(keys):
        return ()
    moved = transfers.bytes[is_good]
    total, operations = np.bincount(place, moved), np.bincount(place)
    algorithm, protocol = _number(records["algorithm"], ALGORITHMS), _number(records["protocol"], PROTOCOLS)
    variant = place * VARIANTS + (algorithm * len(PROTOCOLS) + protocol)[is_good]
    commonest = np.bincount(variant, moved, len(keys) * VARIANTS).reshape(-1, VARIANTS).argmax(axis=1)
    bus = _bus_bytes_per_second(_runs(transfers), keys, communicators)
    count = int(steps["steps"][known].sum()) * share
    rates = []
    for index in np.argsort(-total, kind="stable")[: ring_layout.MAX_GROUPS].tolist():
        row, function = divmod(int(keys[index]), len(FUNCTIONS))
        rates.append(
            CollectiveRate(
                number=int(communicators["hash"][row]) % MAX_GROUP_NUMBER,
                size=int(communicators["ranks"][row]),
                function=FUNCTIONS[function],
                algorithm=ALGORITHMS[commonest[index] // len(PROTOCOLS)],
                protocol=PROTOCOLS[commonest[index] % len(PROTOCOLS)],
                operations=int(operations[index]),
                bytes_per_step=float(total[index]) / count,
                bus_bytes_per_second=float(bus[index]) if np.isfinite(bus[index]) else None,
            )
        )
    return tuple(rates)


def _transfers(found: Operations, records: Table, communicators: Table) -> _Transfers:
    """Bytes that cannot be right are 0."""
    function = _number(records["function"], FUNCTIONS)
    kind, is_received = _KIND[function], _IS_RECEIVED[function]
    ranks = communicators["ranks"][found.communicator].astype(np.int64)
    is_plausible = (records["bytes"] <= MAX_RECORD_BYTES) & (ranks >= 2) & (ranks <= MAX_RANKS)
    ranks = np.where(is_plausible, ranks, 1)
    given = np.where(is_plausible, records["bytes"], 0).astype(np.int64)
    sent = given * np.where(kind == CollectiveKind.ALL_TO_ALL, ranks, 1)  # counted for one peer
    size = size_bytes(kind, np.where(is_received, -1, sent), np.where(is_received, given, -1), ranks)
    size = np.where(size <= MAX_ARRAY_BYTES, size, 0)
    return _Transfers(found.communicator, function, size, found.start_ns, found.stop_ns)


def _runs(transfers: _Transfers) -> _Transfers:
    """Operations that overlap in a communicator as one: NCCL runs a group of them together, and their times say little
    one by one. A run of several functions, or of unknown bytes, is left out."""
    told = transfers.take(np.lexsort((transfers.start_ns, transfers.communicator)))
    is_first = np.ones(len(told.bytes), dtype=np.bool_)
    for row in np.unique(told.communicator):
        own = np.flatnonzero(told.communicator == row)
        is_first[own[1:]] = told.start_ns[own[1:]] >= np.maximum.accumulate(told.stop_ns[own])[:-1]
    first = np.flatnonzero(is_first)
    stop_ns = np.maximum.reduceat(told.stop_ns, first)
    runs = replace(told.take(first), bytes=np.add.reduceat(told.bytes, first), stop_ns=stop_ns)
    lasted = stop_ns - runs.start_ns
    is_whole = (np.minimum.reduceat(told.bytes, first) > 0) & (lasted > 0)
    is_whole &= np.minimum.reduceat(told.function, first) == np.maximum.reduceat(told.function, first)
    return runs.take(is_whole & (runs.bytes // MAX_BYTES_PER_NANOSECOND <= lasted))


def _bus_bytes_per_second(runs: _Transfers, keys: Ints, communicators: Table) -> Floats:
    """Of each key; NaN where it is not known. All bytes over the time that they take if every run takes as long
    as is usual for its size."""
    lasted = runs.stop_ns - runs.start_ns
    order = np.lexsort((lasted, runs.bytes, runs.key))
    runs, lasted = runs.take(order), lasted[order]
    is_first = np.ones(len(lasted), dtype=np.bool_)
    is_first[1:] = (np.diff(runs.key) != 0) | (np.diff(runs.bytes) != 0)
    first = np.flatnonzero(is_first)
    count = np.diff(first, append=len(lasted))
    usual = lasted[first + ((count - 1) * USUAL_QUANTILE).astype(np.int64)]
    place = np.searchsorted(keys, runs.key[first])
    size, nanos = np.zeros(len(keys), dtype=np.int64), np.zeros(len(keys), dtype=np.int64)
    np.add.at(size, place, count * runs.bytes[first])
    np.add.at(nanos, place, count * usual)
    row, function = np.divmod(keys, len(FUNCTIONS))
    bus = 1e9 * bus_gbps(_KIND[function], size, nanos, communicators["ranks"][row].astype(np.int64))
    return np.where(_IS_MESSAGE[function], np.nan, bus)


def _number(column: npt.NDArray[np.uint8], names: tuple[str, ...]) -> Ints:
    return np.where(column < len(names), column, 0).astype(np.int64)
