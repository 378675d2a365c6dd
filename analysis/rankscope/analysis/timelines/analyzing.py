"""A timeline in, a report out."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rankscope.analysis.policy import DEFAULT_POLICY, Policy
from rankscope.analysis.robust import Floats, Ints
from rankscope.analysis.timelines.columns import JobSizes, Timeline, TimelineError
from rankscope.analysis.timelines.decomposing import Decomposition, decompose
from rankscope.analysis.timelines.judging import Judgement, judge
from rankscope.analysis.timelines.laying import lay_out
from rankscope.analysis.timelines.modelling import Model, build_model
from rankscope.analysis.wording import percent

# Gaps that the replay leaves out are worth a word from here on.
DELAY_NOTED_RATIO = 1.05
NOT_DECLARED = JobSizes()


@dataclass(frozen=True)
class TimelineReport:
    judgement: Judgement
    decomposition: Decomposition
    rank: Ints  # [stage, data, tensor]
    data_ranks: Ints
    families: tuple[str, ...]
    steps: Ints
    steps_recorded: int
    recorded_step_seconds: Floats  # first start to last end
    notes: tuple[str, ...]

    @property
    def launch_slowdown(self) -> float:
        """Recorded steps against their replay without delays before operations."""
        return float(self.recorded_step_seconds.mean() / self.decomposition.step_seconds.mean())

    @property
    def lost_ratio(self) -> float:
        """Share of the step that typical durations everywhere would give back."""
        return 1 - 1 / self.decomposition.slowdown


def analyze(timeline: Timeline, sizes: JobSizes = NOT_DECLARED, policy: Policy = DEFAULT_POLICY) -> TimelineReport:
    """Raises TimelineError where there is nothing to replay or nobody to compare with."""
    layout = lay_out(timeline, sizes)
    if layout.lanes.rank.size < 2:
        raise TimelineError("one rank only: there is nobody to compare it with; record the other ranks, too")
    model = build_model(layout)
    decomposition = decompose(model)
    judgement = judge(model, policy)
    report = TimelineReport(
        judgement,
        decomposition,
        layout.lanes.rank,
        layout.lanes.data_ranks,
        model.families,
        model.steps,
        layout.steps_recorded,
        _recorded(model),
        (*layout.notes, *model.notes, *judgement.notes),
    )
    return _with_notes(report, sizes)


def _recorded(model: Model) -> Floats:
    made = []
    for part in model.parts:
        start, duration = part.table.start_seconds, part.table.duration_seconds
        made.append((start + duration).max(axis=(0, 2, 3)) - start.min(axis=(0, 2, 3)))
    return np.concatenate(made)


def _with_notes(report: TimelineReport, sizes: JobSizes) -> TimelineReport:
    notes = list(report.notes)
    if report.launch_slowdown >= DELAY_NOTED_RATIO:
        gaps = percent(1 - 1 / report.launch_slowdown)
        notes.append(f"{gaps} of the recorded step are delays before operations start, which the replay leaves out")
    declared = (sizes.tensor or 1) if report.rank.shape[2] == 1 else 1
    if declared > 1:
        notes.append(f"a row stands for {declared} tensor-parallel ranks: those of one group are not told apart")
    return replace(report, notes=tuple(notes))
