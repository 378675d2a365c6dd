"""Which ranks a capture for alerts should be of: those that they or the verdict name, and a healthy one beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rankscope.analysis.verdict import Kind
from rankscope.operator.alerts.reading import Alert
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.correlation.exporting import label
from rankscope.operator.correlation.suspecting import suspects

JOB_LABEL = "job"
RANK_LABEL = "rank"
# What a capture is about fits on a few ranks; a list of hundreds is a job-wide trouble, of which these are samples.
ACCUSED_MOST = 7
# Where nobody is accused, so many typical ranks, so that their traces can be joined.
SAMPLES = 2


class RefusedError(Exception):
    """No capture can come of this alert now; says why."""


@dataclass(frozen=True)
class Wanted:
    """A capture that alerts ask for."""

    job: str  # as the correlation calls it
    ranks: tuple[int, ...]  # sorted
    accused: frozenset[int]  # those of them that somebody blames
    steps_are_known: bool
    reason: str
    occasion: str = ""  # the same for every notification of the same firing


@dataclass(frozen=True)
class Concern:
    """What one alert is about: a job, and a rank of it if it names one."""

    alert: Alert
    state: JobState
    rank: int | None


def find_concern(alert: Alert, states: Iterable[JobState]) -> Concern:
    name = alert.labels.get(JOB_LABEL, "")
    if not name:
        raise RefusedError(f"the alert has no label '{JOB_LABEL}'")
    # Alerts know a job by its label, which may be shorter than its name.
    state = next((state for state in states if name in (state.job, label(state.job))), None)
    if state is None:
        raise RefusedError(f"no job {label(name)!r} is known here; has it ended?")
    if state.verdict.kind is Kind.HANG:
        raise RefusedError("the job stands still: there are no steps to record; its stacks are in the verdict")
    return Concern(alert, state, _rank(alert, state) if RANK_LABEL in alert.labels else None)


def choose(state: JobState, concerns: Sequence[Concern]) -> Wanted:
    """One capture for all alerts of a job that came together."""
    suspected = suspects(state)
    known = _reporting(state)
    named = sorted({concern.rank for concern in concerns if concern.rank is not None})
    accused = named or [rank for rank in suspected.culprits if rank in known]
    if accused:
        accused = accused[:ACCUSED_MOST]
        ranks = [*accused, *[rank for rank in suspected.peers if rank not in accused][:1]]
    else:
        ranks = list(suspected.peers[:SAMPLES])
    if not ranks:
        raise RefusedError("no rank of the job reports")
    names = ", ".join(dict.fromkeys(concern.alert.name or "without a name" for concern in concerns))
    steps_are_known = state.step_seconds is not None
    occasion = " ".join(min(concern.alert.occasion for concern in concerns))
    return Wanted(state.job, tuple(sorted(ranks)), frozenset(accused), steps_are_known, f"alert {names}", occasion)


def _reporting(state: JobState) -> set[int]:
    return set(state.identities)


def _rank(alert: Alert, state: JobState) -> int:
    text = alert.labels[RANK_LABEL]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RefusedError(f"label '{RANK_LABEL}' is no rank: {text[:40]!r}")
    rank = int(text)
    if rank >= state.world_size:
        raise RefusedError(f"the job has ranks 0 to {state.world_size - 1}, not {rank}")
    if rank not in _reporting(state):
        raise RefusedError(f"rank {rank} does not report; has it ended?")
    return rank
