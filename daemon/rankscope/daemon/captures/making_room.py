"""Which captures go when there is not enough room: too old ones, too many, and the oldest until the rest fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

CAPTURES_LIMIT = 2000


@dataclass(frozen=True)
class Quota:
    total_bytes: int = 10 << 30
    age_seconds: float = 7 * 86400.0
    # Left free on the disk whatever the quota says: others live on it too.
    free_ratio: float = 0.05


@dataclass(frozen=True)
class Kept:
    name: str
    begun_unix_seconds: float
    size_bytes: int
    is_active: bool  # never goes


@dataclass(frozen=True)
class Usage:
    used_bytes: int  # by all that is kept
    disk_bytes: int
    free_bytes: int
    now_unix_seconds: float


def choose_to_go(kept: Sequence[Kept], usage: Usage, needed_bytes: int, quota: Quota) -> tuple[list[Kept], str | None]:
    """Those that go, and why there is still no room for `needed_bytes` more, which lie on this disk already; None if
    there is."""
    reserve = quota.free_ratio * usage.disk_bytes
    used, free = usage.used_bytes, usage.free_bytes
    going: list[Kept] = []
    # What does not fit even alone takes nothing else with it.
    at_least = needed_bytes + sum(one.size_bytes for one in kept if one.is_active)
    oldest_first = sorted(
        (one for one in kept if not one.is_active), key=lambda one: (one.begun_unix_seconds, one.name)
    )
    for one in oldest_first:
        is_old = usage.now_unix_seconds - one.begun_unix_seconds > quota.age_seconds
        too_many = len(kept) - len(going) > CAPTURES_LIMIT
        too_much = used + needed_bytes > quota.total_bytes and at_least <= quota.total_bytes
        if is_old or too_many or too_much or free < reserve:
            going.append(one)
            used, free = used - one.size_bytes, free + one.size_bytes
    if used + needed_bytes > quota.total_bytes:
        return going, (
            f"{needed_bytes} bytes more do not fit into the quota of {quota.total_bytes} bytes; capture fewer steps or "
            "ranks, or raise --capture-quota-bytes"
        )
    if free < reserve:
        return going, (
            f"the disk is almost full ({free} of {usage.disk_bytes} bytes are free, {reserve:.0f} are left to others); "
            "make room on it, or pass another --capture-dir"
        )
    return going, None
