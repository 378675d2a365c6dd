"""How long a collective should take: T = α·steps + bytes/β, with the steps and the bytes over the busiest link that a
ring or a tree needs. β is then the bus bandwidth that large messages approach."""

from __future__ import annotations

from enum import Enum

import numpy as np

from rankscope.analysis.robust import Floats, Ints
from rankscope.analysis.traces.communication.bandwidth import bus_factor
from rankscope.analysis.traces.communication.kinds import CollectiveKind


class Algorithm(str, Enum):
    RING = "ring"
    TREE = "tree"


# A tree goes up and down again; the others of these go one way.
_TREES = {
    CollectiveKind.ALL_REDUCE: 2.0,
    CollectiveKind.REDUCE: 1.0,
    CollectiveKind.BROADCAST: 1.0,
}
_AROUND = (
    *(CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER, CollectiveKind.ALL_TO_ALL, CollectiveKind.GATHER),
    *(CollectiveKind.SCATTER, CollectiveKind.BROADCAST, CollectiveKind.REDUCE),
)


def has_tree(kind: int) -> bool:
    return kind in _TREES


def has_model(kind: int) -> bool:
    return kind in (CollectiveKind.ALL_REDUCE, CollectiveKind.SEND, CollectiveKind.RECV, *_AROUND)


def steps(kind: int, ranks: Ints | Floats, algorithm: Algorithm) -> Floats:
    """Messages that have to follow one another. What knows no tree goes around a ring."""
    count = np.asarray(ranks, dtype=np.float64)
    if algorithm is Algorithm.TREE and kind in _TREES:
        return _TREES[CollectiveKind(kind)] * np.log2(np.maximum(count, 1))
    if kind == CollectiveKind.ALL_REDUCE:
        return 2 * (count - 1)
    if kind in _AROUND:
        return count - 1
    return np.ones_like(count)


def moved_bytes(kind: int, ranks: Ints | Floats, size: Ints | Floats, algorithm: Algorithm) -> Floats:
    """Bytes over the busiest link. Two binary trees share the work, and in them a rank sends the whole array each
    way; a ring leaves out the rank's own part."""
    count = np.asarray(ranks, dtype=np.float64)
    array = np.asarray(size, dtype=np.float64)
    if algorithm is Algorithm.TREE and kind in _TREES:
        return _TREES[CollectiveKind(kind)] * array
    factor = bus_factor(np.full(count.shape, int(kind)), count.astype(np.int64))
    return np.where(np.isnan(factor), 1.0, factor) * array


def predicted_seconds(
    kind: int,
    ranks: Ints | Floats,
    size: Ints | Floats,
    alpha_seconds: float,
    beta_bytes_per_second: float,
    algorithm: Algorithm = Algorithm.RING,
) -> Floats:
    latency = alpha_seconds * steps(kind, ranks, algorithm)
    return latency + moved_bytes(kind, ranks, size, algorithm) / beta_bytes_per_second


def crossover_bytes(kind: int, ranks: int, alpha_seconds: float, beta_bytes_per_second: float) -> float | None:
    """Below this size a tree is faster than a ring; None where one of them always is."""
    if kind not in _TREES or ranks < 2:
        return None
    count, one = np.array([ranks]), np.ones(1)
    saved_steps = float((steps(kind, count, Algorithm.RING) - steps(kind, count, Algorithm.TREE))[0])
    more_bytes = float(
        (moved_bytes(kind, count, one, Algorithm.TREE) - moved_bytes(kind, count, one, Algorithm.RING))[0]
    )
    if saved_steps <= 0 or more_bytes <= 0 or alpha_seconds <= 0:
        return None
    return alpha_seconds * saved_steps * beta_bytes_per_second / more_bytes
