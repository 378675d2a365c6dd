"""One line of JSON for what happened to a capture: who, what, why, result. Pure; daemon and operator write the same.

What people and containers wrote is bounded and escaped: nobody can end the line, or make it endless."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Literal

# The logger that takes these lines, and nothing else.
LOGGER = "rankscope.audit"

Event = Literal["asked", "refused", "begun", "cancelled", "deleted", "downloaded", "ended"]
Via = Literal["api", "kubectl", "policy", "alert", "local", "operator", "loopback", "duty cycle"]

NAME_CHARACTERS = 256
TEXT_CHARACTERS = 1024
GROUPS_SHOWN = 32


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


def audit_line(record: AuditRecord, unix_seconds: float) -> str:
    when = datetime.fromtimestamp(unix_seconds, timezone.utc).isoformat(timespec="milliseconds")
    parts: dict[str, object] = {
        "time": when.replace("+00:00", "Z"),
        "event": record.event,
        "via": record.via,
        "user": _cut(record.user),
        "groups": [_cut(group) for group in record.groups[:GROUPS_SHOWN]],
        "verified": record.verified,
        "address": _cut(record.address),
        "node": _cut(record.node),
        "namespace": _cut(record.namespace),
        "run": _cut(record.run),
        "job": _cut(record.job),
        "capture": _cut(record.capture),
        "id": _cut(record.id),
        "ranks": _cut(record.ranks),
        "steps": record.steps,
        "seconds": record.seconds if record.seconds is None or math.isfinite(record.seconds) else None,
        "options": list(record.options),
        "reason": _cut(record.reason, TEXT_CHARACTERS),
        "result": _cut(record.result),
        "message": _cut(record.message, TEXT_CHARACTERS),
    }
    # ASCII alone: some readers end lines at U+2028, and letters that turn the writing direction hide the rest.
    return json.dumps({name: value for name, value in parts.items() if value not in ("", [], None)}, ensure_ascii=True)


def _cut(text: str, characters: int = NAME_CHARACTERS) -> str:
    return text if len(text) <= characters else text[: characters - 1] + "…"
