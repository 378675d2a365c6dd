"""The operations of all ranks in some steps, as columns: what NCCL's records, traces and recordings have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.stats.robust import Ints, number_groups

UNKNOWN = -1
MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECV)
# The index is the number of NCCL's function in the plugin's records (nccl_layout.py of the probe).
KIND_OF_NCCL = np.array(
    [
        CollectiveKind.OTHER,
        CollectiveKind.ALL_REDUCE,
        CollectiveKind.ALL_GATHER,
        CollectiveKind.REDUCE_SCATTER,
        CollectiveKind.BROADCAST,
        CollectiveKind.REDUCE,
        CollectiveKind.ALL_TO_ALL,
        CollectiveKind.GATHER,
        CollectiveKind.SCATTER,
        CollectiveKind.SEND_RECV,
        CollectiveKind.SEND,
        CollectiveKind.RECV,
    ],
    dtype=np.int64,
)


@dataclass(frozen=True)
class Group:
    """A communicator."""

    name: str
    ranks: tuple[int, ...]  # its members that were recorded; of a trace, all that it lists
    description: str = ""  # by the framework, if it gives one


@dataclass(frozen=True)
class Operations:
    """One row per collective or message and rank, in the order in which each rank issued them. Start and stop are on
    one clock for all ranks."""

    rank: Ints
    step: Ints  # of the run, by the rank's own count
    group: Ints  # index into `groups`
    kind: Ints  # of CollectiveKind
    sequence: Ints  # of the collective in its group; of messages, UNKNOWN
    peer: Ints  # the other rank of a message; of collectives, UNKNOWN
    bytes: Ints
    start_ns: Ints
    stop_ns: Ints
    queued_ns: Ints  # from its issue by the host to its start
    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.rank)]


def since_issued(rank: Ints, queued_ns: Ints) -> Ints:
    """The host's clock and the GPU's differ, and an operation starts no earlier than it is issued: the shortest
    difference of a rank counts as none."""
    numbers, count = number_groups(rank)
    least = np.full(count, np.iinfo(np.int64).max)
    np.minimum.at(least, numbers, queued_ns)
    return np.asarray(queued_ns - least[numbers])
