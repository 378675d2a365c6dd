"""Who a rank belongs to, and how limited places are shared between tenants: nobody loses a place to a tenant that has
more of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import TypeVar

from rankscope.daemon import procfs
from rankscope.daemon.samples import RankProcess

Item = TypeVar("Item", bound=Hashable)


def tenant_of(rank: RankProcess, proc_root: Path = Path("/proc")) -> str:
    """Its pod, else its user. The job's name is the process' own choice: it counts only for a process that has just
    ended."""
    if rank.pod is not None:
        return f"pod {rank.pod}"
    try:
        uid = procfs.real_uid(f"{proc_root}/{rank.pid}")
    except OSError:
        uid = None
    return f"job {rank.job}" if uid is None else f"uid {uid}"


def surplus(oldest_first: Sequence[Item], tenant: Callable[[Item], str], limit: int) -> list[Item]:
    """What goes so that no more than `limit` stay: each time the oldest of the tenant that has the most."""
    of_tenant: dict[str, deque[Item]] = {}
    for item in oldest_first:
        of_tenant.setdefault(tenant(item), deque()).append(item)
    return [max(of_tenant.values(), key=len).popleft() for _ in range(len(oldest_first) - max(0, limit))]


def fair_choice(items: Mapping[Item, str], limit: int, incumbents: Collection[object]) -> set[Item]:
    """At most `limit` of the items, which have tenants: the first of each tenant, then the second of each, and so on.
    Incumbents come first, among those of a tenant and among tenants."""
    of_tenant: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: item not in incumbents):
        of_tenant.setdefault(items[item], []).append(item)
    place = {item: number for own in of_tenant.values() for number, item in enumerate(own)}
    return set(islice(sorted(place, key=lambda item: (place[item], item not in incumbents)), limit))
