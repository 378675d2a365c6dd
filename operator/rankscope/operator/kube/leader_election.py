"""Leader election: every shard of the fleet has a Lease, and the replica that holds it acts for the runs in it.

One shard is plain leader election. A lease counts as abandoned when it was not seen to change for its whole duration by
this replica's own monotonic clock, so replicas need not agree on the time. A replica that cannot renew stops acting
before another one may begin."""

from __future__ import annotations

import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Protocol

from rankscope.operator.kube.api_client import Api, ApiError, ConflictError, Document, MissingError, UnreachableError

log = logging.getLogger(__name__)

PREFIX = "rankscope-operator"  # of the names of leases
DURATION_SECONDS = 9.0
RENEW_SECONDS = 2.0
# Well before others may take over: calls under way when a replica loses its lease need time to end.
ACT_SECONDS = 6.0
# After a replica takes a shard, its daemons need several windows to report: until then a missing finding means nothing.
SETTLING_SECONDS = 45.0


@dataclass
class _Seen:
    """A lease as it was last read, and when it last changed by our own clock."""

    holder: str
    mark: str  # holder, time and version as the API server has them
    changed_at: float
    document: Document = field(repr=False)


def shard_of(key: str, shards: int) -> int:
    return int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % shards


class Leases(Protocol):
    """The runs that this replica acts for."""

    @property
    def held(self) -> frozenset[int]: ...

    def holds(self, key: str) -> bool: ...

    def is_settling(self, key: str) -> bool: ...


class SoleReplica:
    """Acts for every run: without Kubernetes there are no other replicas."""

    held = frozenset({0})

    def __init__(self, settling_seconds: float = SETTLING_SECONDS) -> None:
        self._settled_at = time.monotonic() + settling_seconds

    def holds(self, key: str) -> bool:
        return True

    def is_settling(self, key: str) -> bool:
        return time.monotonic() < self._settled_at


class ShardLeases:
    """Holds shards from `start` to `stop`. `holds(key)` is checked before every action for a run."""

    def __init__(
        self,
        api: Api,
        namespace: str,
        identity: str,
        shards: int = 1,
        on_change: Callable[[frozenset[int]], None] | None = None,
        owners: Sequence[Document] = (),
        settling_seconds: float = SETTLING_SECONDS,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.identity = identity
        self.shards = shards
        self._api = api
        self._path = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._namespace = namespace
        self._on_change = on_change
        self._owners = list(owners)
        self._settling_seconds = settling_seconds
        self._monotonic = monotonic
        self._renewed: dict[int, float] = {}  # shard to the moment before its last renewal was sent
        self._kept: dict[int, float] = {}  # shard to the moment since when it is ours without a break
        self._seen: dict[str, _Seen] = {}
        self._reported: frozenset[int] = frozenset()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def held(self) -> frozenset[int]:
        deadline = self._monotonic() - ACT_SECONDS
        return frozenset(shard for shard, renewed in list(self._renewed.items()) if renewed > deadline)

    def leads(self) -> bool:
        """Whether this replica does what is done once for the whole fleet."""
        return 0 in self.held

    def shard_of(self, key: str) -> int:
        return shard_of(key, self.shards)

    def holds(self, key: str) -> bool:
        return self.shard_of(key) in self.held

    def keeps(self, key: str) -> bool:
        """Whether to keep receiving windows: also while no lease can be renewed, until another replica holds it."""
        return self.shard_of(key) in self._kept

    def holder_of(self, key: str) -> str:
        """The replica that has the shard, as it was last read; empty if none."""
        seen = self._seen.get(self._name(self.shard_of(key)))
        return "" if seen is None else seen.holder

    def is_settling(self, key: str) -> bool:
        since = self._kept.get(self.shard_of(key))
        return since is None or self._monotonic() - since < self._settling_seconds

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-leases", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Releases everything, so that others need not wait."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(DURATION_SECONDS)
        for shard in list(self._renewed):
            self._release(shard)
        # Nor is it counted any longer when shards are shared.
        self._hand_over(self._own_name)
        self._report()

    def round(self) -> None:
        """Renews held shards, takes free ones, releases more than our share."""
        leases = self._read()
        self._announce(leases)
        share = math.ceil(self.shards / max(1, self._replicas(leases)))
        for shard in sorted(self._renewed):
            seen = leases.get(self._name(shard))
            if seen is not None and seen.holder not in ("", self.identity):
                del self._renewed[shard]  # we were away for too long, and another replica acts for it
            elif len(self._renewed) > share:
                self._release(shard)
            else:
                self._renew(shard, seen)
        # In a different order on each replica, or all of them compete for the same shard.
        free = [shard for shard in range(self.shards) if shard not in self._renewed]
        random.shuffle(free)
        for shard in free:
            if len(self._renewed) >= share:
                break
            seen = leases.get(self._name(shard))
            if seen is None or not seen.holder or seen.holder == self.identity or self._is_abandoned(seen):
                self._renew(shard, seen)
        now = self._monotonic()
        self._kept = {shard: self._kept.get(shard, now) for shard in self._renewed}
        self._report()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = self._monotonic()
            try:
                self.round()
            except (UnreachableError, ApiError) as error:
                log.warning("leases cannot be renewed: %s", error)
                self._report()
            except Exception:
                log.exception("a round of leases failed")
            spent = self._monotonic() - began
            self._stopping.wait(max(0.2, RENEW_SECONDS * random.uniform(0.8, 1.0) - spent))

    def _read(self) -> Mapping[str, _Seen]:
        now = self._monotonic()
        found: dict[str, _Seen] = {}
        for page in self._api.pages(self._path, labelSelector=f"rankscope.dev/leases={PREFIX}"):
            for document in page.get("items") or ():
                name, spec = document["metadata"]["name"], document.get("spec") or {}
                holder = spec.get("holderIdentity") or ""
                mark = f"{holder} {spec.get('renewTime')} {document['metadata']['resourceVersion']}"
                before = self._seen.get(name)
                changed_at = before.changed_at if before is not None and before.mark == mark else now
                found[name] = _Seen(holder, mark, changed_at, document)
        self._seen = found
        return found

    def _is_abandoned(self, seen: _Seen) -> bool:
        return self._monotonic() - seen.changed_at > DURATION_SECONDS

    def _replicas(self, leases: Mapping[str, _Seen]) -> int:
        """The live replicas, this one included: each renews a lease of its own."""
        prefix = f"{PREFIX}-replica-"
        members = [seen for name, seen in leases.items() if name.startswith(prefix)]
        others = {seen.holder for seen in members if seen.holder and not self._is_abandoned(seen)}
        return len(others | {self.identity})

    def _announce(self, leases: Mapping[str, _Seen]) -> None:
        name = self._own_name
        self._write(name, leases.get(name), self.identity)
        for other, seen in leases.items():
            # Replicas come and go under new names; the live ones delete the leases of the others.
            is_member = other.startswith(f"{PREFIX}-replica-") and other != name
            if is_member and self._monotonic() - seen.changed_at > 20 * DURATION_SECONDS:
                self._delete(other)

    def _renew(self, shard: int, seen: _Seen | None) -> None:
        sent_at = self._monotonic()
        if self._write(self._name(shard), seen, self.identity):
            self._renewed[shard] = sent_at
        else:
            self._renewed.pop(shard, None)

    def _release(self, shard: int) -> None:
        # First we stop acting, then others may begin.
        self._renewed.pop(shard, None)
        self._kept.pop(shard, None)
        self._report()
        self._hand_over(self._name(shard))

    def _hand_over(self, name: str) -> None:
        seen = self._seen.get(name)
        try:
            if seen is not None and seen.holder == self.identity:
                self._write(name, seen, "")
        except UnreachableError as error:
            log.info("lease %s could not be released, it expires: %s", name, error)

    def _write(self, name: str, seen: _Seen | None, holder: str) -> bool:
        """False if another replica was first."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        before = {} if seen is None else (seen.document.get("spec") or {})
        taken = before.get("holderIdentity") != holder
        spec = {
            "holderIdentity": holder,
            "leaseDurationSeconds": math.ceil(DURATION_SECONDS),
            "renewTime": now,
            "acquireTime": now if taken else before.get("acquireTime") or now,
            "leaseTransitions": int(before.get("leaseTransitions") or 0) + (1 if taken and seen is not None else 0),
        }
        labels = {"rankscope.dev/leases": PREFIX}
        metadata: Document = {"name": name, "namespace": self._namespace, "labels": labels}
        if self._owners:
            metadata["ownerReferences"] = self._owners
        body: Document = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
        try:
            if seen is None:
                written = self._api.create(self._path, body)
            else:
                metadata["resourceVersion"] = seen.document["metadata"]["resourceVersion"]
                written = self._api.replace(f"{self._path}/{name}", body)
        except (ConflictError, MissingError):
            return False
        except ApiError as error:
            if error.status >= 500:  # its store is away, and all leases with it
                raise UnreachableError(str(error)) from error
            log.warning("lease %s cannot be written: %s", name, error)
            return False
        self._seen[name] = _Seen(holder, "", self._monotonic(), written)
        return True

    def _delete(self, name: str) -> None:
        try:
            self._api.delete(f"{self._path}/{name}")
        except ApiError as error:
            log.debug("lease %s cannot be deleted: %s", name, error)

    @property
    def _own_name(self) -> str:
        return f"{PREFIX}-replica-{hashlib.sha256(self.identity.encode()).hexdigest()[:12]}"

    def _name(self, shard: int) -> str:
        return f"{PREFIX}-shard-{shard}"

    def _report(self) -> None:
        held = self.held
        if held == self._reported:
            return
        log.info("shards held: %s of %d", ", ".join(map(str, sorted(held))) or "none", self.shards)
        self._reported = held
        if self._on_change is not None:
            self._on_change(held)
