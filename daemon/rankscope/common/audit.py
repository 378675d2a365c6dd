"""One line of JSON for what happened to a capture, and for who read profiles and stacks: who, what, why, result. Pure;
daemon and operator write the same.

What people and containers wrote is bounded and escaped: nobody can end the line, or make it endless."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Literal

# The logger that takes these lines, and nothing else.
LOGGER = "rankscope.audit"

Event = Literal["asked", "refused", "begun", "cancelled", "deleted", "downloaded", "ended"]
What = Literal["", "profile", "stacks", "hang"]
Via = Literal["api", "kubectl", "policy", "alert", "hang", "local", "operator", "loopback", "duty cycle"]

NAME_CHARACTERS = 256
TEXT_CHARACTERS = 1024
TEXTS_SHOWN = 32  # groups or options


@dataclass(frozen=True)
class AuditRecord:
    """What is not known is left empty, and left out of the line. `verified` says that `user` is vouched for, by a token
    that the API server accepted, by a webhook, a certificate or the kernel, and is not merely what somebody wrote."""

    event: Event
    via: Via
    user: str = ""
    groups: Sequence[str] = ()
    verified: bool = False
    address: str = ""
    node: str = ""
    namespace: str = ""
    run: str = ""
    job: str = ""
    capture: str = ""  # the object's name
    id: str = ""  # as the daemons know it
    ranks: str = ""
    steps: int | None = None
    seconds: float | None = None
    options: Sequence[str] = ()
    reason: str = ""
    result: str = ""
    message: str = ""
    what: What = ""  # not a capture


def audit_line(record: AuditRecord, unix_seconds: float) -> str:
    when = datetime.fromtimestamp(unix_seconds, timezone.utc).isoformat(timespec="milliseconds")
    head = {"time": when.replace("+00:00", "Z"), "event": record.event, "via": record.via, "what": record.what}
    parts = head | {field.name: _bounded(field.name, getattr(record, field.name)) for field in fields(record)}
    # ASCII alone: some readers end lines at U+2028, and letters that turn the writing direction hide the rest.
    return json.dumps({name: value for name, value in parts.items() if value not in ("", [], None)}, ensure_ascii=True)


def _bounded(name: str, value: str | Sequence[str] | float | None) -> object:
    if isinstance(value, str):
        return _cut(value, TEXT_CHARACTERS if name in ("reason", "message") else NAME_CHARACTERS)
    if value is None or isinstance(value, int | float):
        return value if value is None or math.isfinite(value) else None
    return [_cut(text, NAME_CHARACTERS) for text in value[:TEXTS_SHOWN]]


def _cut(text: str, characters: int) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"
