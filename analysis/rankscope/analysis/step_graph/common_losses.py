"""Losses of a window of steps that are no rank's: those of a stage, of a link, of uneven work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Bools, Floats, Ints
from rankscope.analysis.step_graph.graph import StepGraph
from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.links import PastLinks, SlowLink, SuspectedLink, WindowLinks
from rankscope.analysis.step_graph.own_work import (
    MIN_UNEVEN_SHARE,
    Pace,
    PastPace,
    Spread,
    StageWork,
    SuspectedStage,
    UnevenWork,
    suspect_stage,
)

# A window in which a stage, a link or a rank costs more is not what is usual.
REMARKABLE_LOSS_SHARE = 0.05


@dataclass(frozen=True)
class CommonLosses:
    """None where too little may come back for a replay."""

    stage: StageWork | None = None
    link: SlowLink | None = None
    uneven: UnevenWork | None = None

    def among(self, ranks: Ints, place: Ints, stages: Mapping[int, int]) -> CommonLosses:
        """The same with columns for all ranks of the job, of which those seen are in these places. A stage that is slow
        in a few replicas is slow in all: others are looked at in the next windows."""
        stage, uneven = self.stage, self.uneven
        if stage is not None:
            number = stage.stage
            inside = [rank for rank in ranks.tolist() if stages.get(rank) == number]
            stage = replace(stage, ranks=np.array(inside, dtype=np.int64))
        if uneven is not None:
            held = np.zeros(len(ranks))
            held[place] = uneven.held_ns
            uneven = replace(uneven, held_ns=held)
        return CommonLosses(stage, self.link, uneven)


class WindowRows(NamedTuple):
    """The places of a graph's rows in a window."""

    step: Ints  # of each row, by position; those outside have the number of steps
    position: Ints  # of each row's rank
    path: Ints  # rows
    path_shares: Floats  # of own work on the path, by rank
    ranks: Ints
    stages: Ints  # by rank
    step_ns: Floats
    is_sample: bool  # of the job's ranks


class Question(NamedTuple):
    """Other times of work or of transfers, to be replayed; None for the recorded ones."""

    own_ns: Ints | None = None
    transfer_ns: Ints | None = None


class Suspicion:
    """The losses that a window may have, and the questions that show whether it does."""

    def __init__(self, graph: StepGraph, rows: WindowRows, usual: Pace | None, links: WindowLinks | None) -> None:
        count, steps = len(rows.stages), len(rows.step_ns)
        cell = rows.step * count + rows.position
        sums = np.bincount(cell, graph.own_ns, (steps + 1) * count).astype(np.float64)
        own = sums[: steps * count].reshape(steps, count)
        self.rows = rows
        self._cell = cell
        self.pace, self.links = Pace.of(rows.ranks, own, rows.step_ns), links
        self._growth = (1.0, 1.0)
        if usual is not None:
            job, by_rank = self.pace.growth_since(usual)
            self._growth = job, float(np.median(by_rank))
        self.spread: Spread | None = Spread.of(own, rows.stages)
        if self.spread.share(own, rows.step_ns) < MIN_UNEVEN_SHARE:
            self.spread = None
        self.stage: SuspectedStage | None = suspect_stage(self.pace, usual, rows.stages, rows.path_shares)
        self.link: SuspectedLink | None = None

    def questions(self, graph: StepGraph) -> list[Question]:
        asked = []
        if self.spread is not None:
            even = np.append(self.spread.even, np.ones((1, len(self.rows.stages))), axis=0).ravel()
            asked.append(Question(own_ns=(graph.own_ns * even[self._cell]).astype(np.int64)))
        if self.stage is not None:
            asked.append(Question(own_ns=(graph.own_ns * self.stage.factor[self.rows.position]).astype(np.int64)))
        if self.link is not None and self.links is not None:
            asked.append(Question(transfer_ns=self.link.usual_transfer_ns(self.links, graph.transfer_ns)))
        return asked

    def conclude(self, graph: StepGraph, losses_ns: Sequence[Floats]) -> CommonLosses:
        """`losses_ns`: by step, an answer for each question."""
        answers = iter(losses_ns)
        uneven = None if self.spread is None else UnevenWork(next(answers), self.spread.held_ns)
        stage = None
        if self.stage is not None:
            inside = self.rows.ranks[self.rows.stages == self.stage.stage]
            stage = StageWork.of(self.stage, inside, next(answers))
        link = None
        if self.link is not None and self.links is not None:
            link = self.link.slow(self.links, graph.operations, self._growth, next(answers))
        return CommonLosses(stage, link, uneven)


class CommonPast:
    """The usual pace and the usual transfers of a job, from its earlier windows."""

    def __init__(self) -> None:
        self._pace = PastPace()
        self._links = PastLinks()

    def suspect(self, graph: StepGraph, rows: WindowRows, inside: Bools, kinds: Sequence[GroupKind]) -> Suspicion:
        links = self._links.see(graph, np.flatnonzero(inside), kinds, rows.path)
        usual = self._pace.usual(np.unique(rows.stages) if rows.is_sample else rows.ranks)
        if usual is not None and rows.is_sample:
            usual = usual.of_ranks(rows.ranks, rows.stages)
        suspicion = Suspicion(graph, rows, usual, links)
        suspicion.link = None if links is None else self._links.suspect(links)
        return suspicion

    def learn(self, suspicion: Suspicion, found: CommonLosses, step_ns: Floats, returns: Floats) -> None:
        """Take the window for usual, unless a stage, a link or a rank costs much in it."""
        known = (one for one in (found.stage, found.link) if one is not None and one.is_against_past)
        losses = [float(one.loss_ns.sum()) for one in known]
        largest = max([float(returns.max(initial=0.0)), *(loss / float(step_ns.sum()) for loss in losses)])
        if largest < REMARKABLE_LOSS_SHARE:
            rows, pace = suspicion.rows, suspicion.pace
            self._pace.learn(pace.by_stage(rows.stages) if rows.is_sample else pace)
            if suspicion.links is not None:
                self._links.learn(suspicion.links)
