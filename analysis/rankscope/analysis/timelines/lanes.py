"""Where each rank stands: pipeline stage × data-parallel rank × tensor-parallel lane."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.timelines.columns import JobSizes, Timeline, TimelineError
from rankscope.analysis.timelines.grouping import number_groups
from rankscope.analysis.wording import ranks as name_ranks


@dataclass(frozen=True)
class Lanes:
    """Every stage of every lane is there: a lane without one of its stages is no pipeline and was left out."""

    data_ranks: Ints
    rank: Ints  # [stage, data, tensor]
    ranks_seen: int
    ranks_expected: int
    notes: tuple[str, ...]

    @property
    def stages(self) -> int:
        return int(self.rank.shape[0])

    @property
    def tensors(self) -> int:
        return int(self.rank.shape[2])


def find_lanes(timeline: Timeline, sizes: JobSizes) -> tuple[Timeline, Lanes, Ints, Ints]:
    """The timeline without incomplete lanes, the lanes, and per row its data and tensor index."""
    stages = _count_stages(timeline, sizes)
    timeline, notes = _trustworthy_ranks(timeline)
    place, places = _places(timeline)
    worker_starts = np.flatnonzero(np.r_[True, np.any(places[1:, :2] != places[:-1, :2], axis=1)])
    sizes_of_workers = np.diff(np.r_[worker_starts, len(places)])
    tensor_of_place = np.arange(len(places)) - np.repeat(worker_starts, sizes_of_workers)
    tensors = int(np.median(sizes_of_workers))
    data_ranks, data_of_place = np.unique(places[:, 0], return_inverse=True)
    stages_of = np.zeros(len(data_ranks), dtype=np.int64)
    usable = tensor_of_place < tensors
    np.add.at(stages_of, data_of_place[usable], 1)
    complete = stages_of == stages * tensors
    if not complete.any():
        raise TimelineError(f"no data-parallel rank has rows for all of its {stages} stages; record every rank")
    if not complete.all():
        lost = ", ".join(map(str, data_ranks[~complete][:8]))
        notes.append(f"data-parallel ranks without all their stages left out: {lost}")
    renumbered = np.cumsum(complete) - 1
    kept_place = usable & complete[data_of_place]
    rank = np.full((stages, int(complete.sum()), tensors), -1, dtype=np.int64)
    rank[places[kept_place, 1], renumbered[data_of_place[kept_place]], tensor_of_place[kept_place]] = places[
        kept_place, 2
    ]
    rows = kept_place[place]
    expected = stages * (sizes.data or len(data_ranks)) * tensors
    lanes = Lanes(data_ranks[complete], rank, int(kept_place.sum()), max(expected, len(places)), tuple(notes))
    kept = take(timeline, rows)
    return kept, lanes, renumbered[data_of_place[place[rows]]], tensor_of_place[place[rows]]


def _places(timeline: Timeline) -> tuple[Ints, Ints]:
    """Per row the number of its place, and the places in order: data-parallel rank, stage, rank."""
    keys = (timeline.data_rank, timeline.stage, timeline.rank)
    place, count = number_groups(*keys)
    row = np.zeros(count, dtype=np.int64)
    row[place] = np.arange(len(place))
    return place, np.stack([key[row] for key in keys], axis=1)


def take(timeline: Timeline, rows: Bools | Ints) -> Timeline:
    if rows.dtype == np.bool_ and rows.all():
        return timeline
    columns = ("data_rank", "stage", "rank", "step", "operation", "start_seconds", "duration_seconds", "order", "chunk")
    return replace(timeline, **{name: getattr(timeline, name)[rows] for name in columns})


def _count_stages(timeline: Timeline, sizes: JobSizes) -> int:
    stages = int(timeline.stage.max()) + 1
    if sizes.pipeline is not None:
        if stages > sizes.pipeline:
            raise TimelineError(f"the metadata says pp_size {sizes.pipeline}, but there is a stage {stages - 1}")
        stages = sizes.pipeline
    data = int(timeline.data_rank.max()) + 1
    if sizes.data is not None and data > sizes.data:
        raise TimelineError(f"the metadata says dp_size {sizes.data}, but there is a dp_rank {data - 1}")
    if stages > len(timeline) or (np.bincount(timeline.stage, minlength=stages) == 0).any():
        raise TimelineError(f"a stage of 0 … {stages - 1} has no rows; record every stage")
    return stages


def _trustworthy_ranks(timeline: Timeline) -> tuple[Timeline, list[str]]:
    """A rank number that stands in two places does not name a rank."""
    _, places = _places(timeline)
    numbers, counts = np.unique(places[:, 2], return_counts=True)
    if (counts == 1).all():
        return timeline, []
    replicas, number = np.unique(timeline.data_rank, return_inverse=True)
    made = timeline.stage * len(replicas) + number
    twice = tuple(numbers[counts > 1][:3].tolist())
    note = f"the rank column gives several places to {name_ranks(twice)}: ranks numbered by stage and dp_rank instead"
    return replace(timeline, rank=made), [note]
