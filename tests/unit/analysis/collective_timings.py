"""Timed collectives with planted latency and bandwidth."""

from __future__ import annotations

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import Algorithm, Observations, predicted_seconds
from rankscope.analysis.stats.robust import Ints


def sizes(rng: np.random.Generator, count: int) -> Ints:
    """From 1 KiB to 8 GiB, evenly by magnitude: some of latency alone, some of bandwidth alone."""
    return (2 ** rng.uniform(10, 33, count)).astype(np.int64)


def observe(
    size: Ints,
    *,
    kind: CollectiveKind = CollectiveKind.ALL_REDUCE,
    ranks: int = 8,
    alpha_us: float = 5.0,
    beta_gbps: float = 100.0,
    rng: np.random.Generator,
    noise: float = 0.08,
    outliers: float = 0.0,
    algorithm: Algorithm = Algorithm.RING,
    group: str = "",
) -> Observations:
    count = len(size)
    members = np.full(count, ranks)
    seconds = predicted_seconds(kind, members, size, alpha_us * 1e-6, beta_gbps * 1e9, algorithm)
    seconds = seconds * np.exp(rng.normal(0, noise, count))
    late = rng.random(count) < outliers
    seconds[late] *= rng.uniform(3, 20, int(late.sum()))
    return Observations(
        group=np.zeros(count, dtype=np.int64),
        kind=np.full(count, int(kind)),
        ranks=members,
        bytes=size,
        seconds=seconds,
        time_seconds=np.arange(count, dtype=np.float64),
        groups=(group,),
    )


def together(*parts: Observations) -> Observations:
    """One group per part."""
    columns = ("kind", "ranks", "bytes", "seconds", "time_seconds")
    return Observations(
        group=np.repeat(np.arange(len(parts)), [len(part) for part in parts]),
        **{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns},
        groups=tuple(part.groups[0] for part in parts),
        in_order=parts[0].in_order,
    )
