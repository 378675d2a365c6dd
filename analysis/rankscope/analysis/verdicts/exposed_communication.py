"""Exposed communication of ranks that are timed on a device, from their time in collectives by process group.

All members of a group leave a collective together, and each enters it when it arrives. The member that the others wait
for has the shortest time in it: what it spends is the transfer, and what others spend beyond that is waiting."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints, grouped_max, grouped_median, grouped_min, number_groups
from rankscope.analysis.verdicts.thresholds import FIXED

# Kinds of groups in the probe's ring (rankscope/probe/ring_layout.py).
EXPOSED, OVERLAPPED, POINT_TO_POINT, DDP, RECORDER, NCCL = 1, 2, 3, 4, 5, 6
# Time in these is time in which the step's own stream stood still.
_EXPOSED_KINDS = (EXPOSED, DDP)
_COMPARED_KINDS = (EXPOSED, OVERLAPPED, DDP, RECORDER, NCCL)
_MAX_NUMBER = 2.0**53


@dataclass(frozen=True)
class GroupSpans:
    """A row per group (slot) and a column per rank; NaN where a rank has fewer groups."""

    number: Floats
    kind: Floats
    seconds: Floats  # in collectives, per sampled step
    step_seconds: Floats  # of the sampled steps


@dataclass(frozen=True)
class Waits:
    """Seconds per step of each rank; NaN where it reports no group."""

    wait_seconds: Floats  # on others, and in transfers that nothing can hide
    transfer_seconds: Floats
    self_seconds: Floats


def group_waits(spans: GroupSpans, job: Ints, step_seconds: Floats) -> Waits:
    """`job` and `step_seconds` have a value per rank. Point-to-point traffic is not compared: its two ends have
    different roles, and a stage that waits for another does nothing wrong. All of it counts as waiting."""
    ranks = spans.number.shape[1]
    has_nccl = (spans.kind == NCCL).any(axis=0)
    with np.errstate(all="ignore"):
        # Sampled steps cost a little more than others, and DDP's are not those of the spans. NCCL tells of all steps,
        # and beside it the others tell what usual steps spend in transfers.
        is_sampled = ~(has_nccl & np.isin(spans.kind, _EXPOSED_KINDS))
        own = np.where(is_sampled, spans.seconds * (step_seconds / spans.step_seconds), spans.seconds)
        good = (own >= 0) & np.isfinite(own) & (spans.step_seconds > 0)
        good &= (spans.number >= 0) & (spans.number < _MAX_NUMBER) & (spans.number % 1 == 0)
        good &= np.isin(spans.kind, (*_COMPARED_KINDS, POINT_TO_POINT))
        is_exposed = np.isin(spans.kind, _EXPOSED_KINDS)
        # A stream cannot stand still for longer than the step.
        own = np.where(is_exposed | (spans.kind == POINT_TO_POINT), np.minimum(own, step_seconds), own)
    slot, rank = np.nonzero(good)
    number, kind = spans.number[slot, rank].astype(np.int64), spans.kind[slot, rank].astype(np.int64)
    group, count = number_groups(job[rank], number, kind)
    values = own[slot, rank]
    least = grouped_min(values, group, count)[group]
    # Of two members, the median would be half of what one waits.
    is_pair = np.bincount(group, minlength=count)[group] == 2
    usual = np.where(is_pair, grouped_max(values, group, count)[group], grouped_median(values, group, count)[group])
    is_noise = usual - least < FIXED.transfer_noise_ratio * least
    waiting = np.where(kind == POINT_TO_POINT, values, np.where(is_noise, 0.0, values - least))
    waiting[has_nccl[rank] & is_exposed[slot, rank]] = 0.0  # NCCL's times hold all of it
    transfer = np.where(is_exposed[slot, rank], least, 0.0)
    waited = np.bincount(rank, weights=waiting, minlength=ranks)
    transferred = np.bincount(rank, weights=transfer, minlength=ranks)
    in_nccl = np.bincount(rank, weights=np.where(kind == NCCL, least, 0.0), minlength=ranks)
    transferred = np.where(has_nccl, np.minimum(transferred, in_nccl), transferred)
    known = np.bincount(rank, minlength=ranks) > 0
    total = np.minimum(waited + transferred, step_seconds)
    return Waits(
        np.where(known, total, np.nan),
        np.where(known, np.minimum(transferred, total), np.nan),
        np.where(known, step_seconds - total, np.nan),
    )
