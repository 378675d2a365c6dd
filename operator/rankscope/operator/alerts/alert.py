"""Alertmanager notifications (webhook, version 4), which are hostile input, and the ranks that they concern."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

from msgspec import Meta, Struct, json

from rankscope.analysis.verdicts.verdict import Kind
from rankscope.common.metric_table import label
from rankscope.common.run_names import run_labels, run_name
from rankscope.common.text import one_line
from rankscope.operator.correlation.correlator import JobState, ranks_to_capture

MAX_ALERTS = 1024
MAX_LABELS = 64
TEXT_CHARACTERS = 1024
ERROR_CHARACTERS = 200

NAME_LABEL = "alertname"
RUN_LABEL, NAMESPACE_LABEL = "run", "run_namespace"
CAPTURE_LABEL = "capture"


class MalformedError(ValueError):
    """Not an Alertmanager notification; the message says where."""


Text = Annotated[str, Meta(max_length=TEXT_CHARACTERS)]
NeededText = Annotated[str, Meta(min_length=1, max_length=TEXT_CHARACTERS)]


class Alert(Struct, frozen=True, rename="camel"):
    labels: Annotated[dict[Text, Text], Meta(max_length=MAX_LABELS)]
    status: Literal["firing", "resolved"]
    # Without these two, all firings would look the same.
    starts_at: NeededText
    fingerprint: NeededText

    @property
    def name(self) -> str:
        return self.labels.get(NAME_LABEL, "")

    @property
    def run(self) -> str:
        """The name of the run, or as much of it as its labels have; empty if the alert is not about a run."""
        run = self.labels.get(RUN_LABEL, "")
        return run_name(self.labels.get(NAMESPACE_LABEL, ""), run) if run else ""

    def is_about(self, job: str) -> bool:
        # Labels may be shorter than the name.
        return bool(self.run) and self.run in (job, run_name(*map(label, run_labels(job).values())))

    @property
    def wants_capture(self) -> bool:
        return self.status == "firing" and self.labels.get(CAPTURE_LABEL) == "true"

    @property
    def occasion(self) -> tuple[str, str]:
        """The same for every notification of one firing; it ends when the alert resolves."""
        return self.fingerprint, self.starts_at


class _Notification(Struct):
    alerts: Annotated[list[Alert], Meta(max_length=MAX_ALERTS)]


_NOTIFICATIONS = json.Decoder(_Notification)  # on import: two threads that are the first to decode one would crash


def read_notification(body: bytes) -> tuple[Alert, ...]:
    try:
        return tuple(_NOTIFICATIONS.decode(body).alerts)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is no notification: {one_line(str(error), ERROR_CHARACTERS)}") from error


# Which ranks a capture for alerts records: those that the alerts or the verdict name, and a healthy one beside them.

RANK_LABEL = "rank"


class RefusedError(Exception):
    """No capture is possible for this alert now; the message says why."""


@dataclass(frozen=True)
class Wanted:
    """A capture that alerts request."""

    job: str  # the correlation's name
    ranks: tuple[int, ...]  # sorted
    accused: frozenset[int]  # those that an alert or the verdict blames
    reason: str
    occasion: str = ""  # the same for every notification of one firing


@dataclass(frozen=True)
class Concern:
    """The subject of an alert: a job, and a rank if the alert names one."""

    alert: Alert
    state: JobState
    rank: int | None


def find_concern(alert: Alert, states: Iterable[JobState]) -> Concern:
    if not alert.run:
        raise RefusedError(f"the alert has no label '{RUN_LABEL}'")
    state = next((state for state in states if alert.is_about(state.job)), None)
    if state is None:
        raise RefusedError(f"no run {label(alert.run)!r} is known here; has it ended?")
    if state.verdict.kind is Kind.HANG:
        raise RefusedError("the job stands still: there are no steps to record; its stacks are in the verdict")
    return Concern(alert, state, _rank(alert, state) if RANK_LABEL in alert.labels else None)


def choose(state: JobState, concerns: Sequence[Concern]) -> Wanted:
    """One capture for all alerts of a job in a notification."""
    named = sorted({concern.rank for concern in concerns if concern.rank is not None})
    accused, ranks = ranks_to_capture(state, named)
    if not ranks:
        raise RefusedError("no rank of the job reports")
    names = ", ".join(dict.fromkeys(concern.alert.name or "without a name" for concern in concerns))
    occasion = " ".join(min(concern.alert.occasion for concern in concerns))
    return Wanted(state.job, ranks, frozenset(accused), f"alert {names}", occasion)


def _rank(alert: Alert, state: JobState) -> int:
    text = alert.labels[RANK_LABEL]
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise RefusedError(f"label '{RANK_LABEL}' is no rank: {text[:40]!r}")
    rank = int(text)
    if rank >= state.world_size:
        raise RefusedError(f"the job has ranks 0 to {state.world_size - 1}, not {rank}")
    if rank not in state.identities:
        raise RefusedError(f"rank {rank} does not report; has it ended?")
    return rank
