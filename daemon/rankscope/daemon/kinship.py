"""Which of the processes that carry a rank's variables is the rank: not its launcher, not its helpers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from typing import Final

GENERATIONS_LIMIT: Final = 64


@dataclass(frozen=True)
class Bearer:
    """A process that carries an identity. Only one that loaded torch can be a rank or have helpers."""

    pid: int
    identity: Hashable
    has_torch: bool


@dataclass(frozen=True)
class Kinship:
    helpers: frozenset[int]  # below a process of the same identity: data-loader workers, forks
    launchers: frozenset[int]  # above a process of another identity: torchrun under SLURM


def sort_out(bearers: Collection[Bearer], parent_of: Callable[[int], int | None]) -> Kinship:
    by_pid: Mapping[int, Bearer] = {bearer.pid: bearer for bearer in bearers}
    helpers: set[int] = set()
    launchers: set[int] = set()
    for bearer in bearers:
        ancestor = parent_of(bearer.pid)
        for _ in range(GENERATIONS_LIMIT):
            if not ancestor:
                break
            elder = by_pid.get(ancestor)
            if elder is not None and elder.identity != bearer.identity:
                # A child shows whom it serves from its first instant, long before it has loaded torch.
                launchers.add(elder.pid)
            elif elder is not None and elder.has_torch:
                helpers.add(bearer.pid)
            ancestor = parent_of(ancestor)
    return Kinship(frozenset(helpers), frozenset(launchers))
