"""An Alertmanager notification (webhook, version 4), read with suspicion."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

ALERTS_MOST = 1024
LABELS_MOST = 64
TEXT_CHARACTERS = 1024

NAME_LABEL = "alertname"
CAPTURE_LABEL = "capture"


class MalformedError(ValueError):
    """Not a notification of Alertmanager's; says where."""


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
        """The same for every notification of one firing: it ends when the alert resolves."""
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
        # Without these two, all firings would look like one.
        _needed_text(entry.get("startsAt"), f"{where}.startsAt"),
        _needed_text(entry.get("fingerprint"), f"{where}.fingerprint"),
    )


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > TEXT_CHARACTERS:
        raise MalformedError(f"{where} is not a text of at most {TEXT_CHARACTERS} characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        # Half a surrogate pair is valid JSON, and cannot be sent on to anybody.
        raise MalformedError(f"{where} is not Unicode") from error
    return value


def _needed_text(value: object, where: str) -> str:
    text = _text(value, where)
    if not text:
        raise MalformedError(f"{where} is empty")
    return text
