"""Alertmanager notifications (webhook, version 4), which are hostile input, and the ranks that they concern."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from rankscope.analysis.verdicts.verdict import Kind
from rankscope.common.metric_table import label
from rankscope.operator.correlation.correlator import JobState, suspects

ALERTS_MOST = 1024
LABELS_MOST = 64
TEXT_CHARACTERS = 1024

NAME_LABEL = "alertname"
CAPTURE_LABEL = "capture"


class MalformedError(ValueError):
    """Not an Alertmanager notification; the message says where."""


@dataclass(frozen=True)
class Alert:
    labels: Mapping[str, str]
    is_firing: bool
    starts_at: str
    fingerprint: str

    @property
    def name(self) -> str:
        return self.labels.get(NAME_LABEL, "")

    @property
    def wants_capture(self) -> bool:
        return self.is_firing and self.labels.get(CAPTURE_LABEL) == "true"

    @property
    def occasion(self) -> tuple[str, str]:
        """The same for every notification of one firing; it ends when the alert resolves."""
        return self.fingerprint, self.starts_at


def read_notification(body: bytes) -> tuple[Alert, ...]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise MalformedError(f"the body is not JSON: {type(error).__name__}") from error
    if not isinstance(document, dict) or not isinstance(document.get("alerts"), list):
        raise MalformedError("the body is no notification: an object with a list 'alerts' is expected")
    entries = document["alerts"]
    if len(entries) > ALERTS_MOST:
        raise MalformedError(f"{len(entries)} alerts in one notification; at most {ALERTS_MOST} are read")
    return tuple(_alert(entry, f"alerts[{number}]") for number, entry in enumerate(entries))


def _alert(entry: object, where: str) -> Alert:
    if not isinstance(entry, dict):
        raise MalformedError(f"{where} is not an object")
    labels = entry.get("labels")
    if not isinstance(labels, dict) or len(labels) > LABELS_MOST:
        raise MalformedError(f"{where}.labels is not an object of at most {LABELS_MOST} labels")
    status = _text(entry.get("status"), f"{where}.status")
    if status not in ("firing", "resolved"):
        raise MalformedError(f"{where}.status is neither firing nor resolved")
    return Alert(
        {_text(name, f"{where}.labels"): _text(value, f"{where}.labels") for name, value in labels.items()},
        status == "firing",
        # Without these two, all firings would look the same.
        _needed_text(entry.get("startsAt"), f"{where}.startsAt"),
        _needed_text(entry.get("fingerprint"), f"{where}.fingerprint"),
    )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS:
        raise MalformedError(f"{where} is not a text of at most {TEXT_CHARACTERS} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Half a surrogate pair is valid JSON but cannot be encoded.
        raise MalformedError(f"{where} is not Unicode") from error
    return value


def _needed_text(value: object, where: str) -> str:
    text = _text(value, where)
    if not text:
        raise MalformedError(f"{where} is empty")
    return text


# Which ranks a capture for alerts records: those that the alerts or the verdict name, and a healthy one beside them.

JOB_LABEL = "job"
RANK_LABEL = "rank"
# A few ranks are enough; hundreds of accused ranks are a job-wide problem, of which these are samples.
ACCUSED_MOST = 7
# If no rank is accused, this many typical ranks are recorded, so that their traces can be joined.
SAMPLES = 2


class RefusedError(Exception):
    """No capture is possible for this alert now; the message says why."""


@dataclass(frozen=True)
class Wanted:
    """A capture that alerts request."""

    job: str  # the correlation's name
    ranks: tuple[int, ...]  # sorted
    accused: frozenset[int]  # those that an alert or the verdict blames
    steps_are_known: bool
    reason: str
    occasion: str = ""  # the same for every notification of one firing


@dataclass(frozen=True)
class Concern:
    """The subject of an alert: a job, and a rank if the alert names one."""

    alert: Alert
    state: JobState
    rank: int | None


def find_concern(alert: Alert, states: Iterable[JobState]) -> Concern:
    name = alert.labels.get(JOB_LABEL, "")
    if not name:
        raise RefusedError(f"the alert has no label '{JOB_LABEL}'")
    # An alert has the job's label, which may be shorter than its name.
    state = next((state for state in states if name in (state.job, label(state.job))), None)
    if state is None:
        raise RefusedError(f"no job {label(name)!r} is known here; has it ended?")
    if state.verdict.kind is Kind.HANG:
        raise RefusedError("the job stands still: there are no steps to record; its stacks are in the verdict")
    return Concern(alert, state, _rank(alert, state) if RANK_LABEL in alert.labels else None)


def choose(state: JobState, concerns: Sequence[Concern]) -> Wanted:
    """One capture for all alerts of a job in a notification."""
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
