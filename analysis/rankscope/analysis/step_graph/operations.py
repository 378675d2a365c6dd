"""The operations of all ranks in some steps, as columns: what NCCL's records, traces and recordings have in common."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.collectives.kinds import CollectiveKind
from rankscope.analysis.stats.robust import Ints

UNKNOWN = -1
MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECV)


@dataclass(frozen=True)
class Group:
    """A communicator."""

    name: str
    ranks: tuple[int, ...]  # its members that were recorded


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
    groups: tuple[Group, ...]

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def ranks(self) -> list[int]:
        return [int(rank) for rank in np.unique(self.rank)]
