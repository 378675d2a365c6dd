"""The daemon of one node as a speaker: how much of it is listened to, and the processes that it speaks of."""

from __future__ import annotations

from dataclasses import dataclass, field

from google.protobuf.message import DecodeError

from rankscope.operator.correlation.held_windows import RankSeen
from rankscope.v1.identity_pb2 import RankIdentity

# Ranks of a node that raise its allowance, and processes of it that are known at a time: more GPUs than any node has.
RANKS_PER_NODE = 1024
# Windows a daemon may send per rank and second, on average over the bucket: the shortest window is half a second long.
WINDOWS_PER_RANK_SECOND = 4.0
BURST_SECONDS = 15.0
# A process that was not spoken of for so long makes room for others, which is looked for so often.
SILENT_SECONDS = 30.0
FORGETTING_SECONDS = 1.0

Names = tuple[str, str, str, str]  # job, node, namespace and name of the pod


@dataclass
class Refusals:
    """By reason, for the metric: bounded words."""

    counts: dict[str, int] = field(default_factory=dict)

    def add(self, reason: str, number: int = 1) -> None:
        self.counts[reason] = self.counts.get(reason, 0) + number


class Known:
    """A process of a node by the very bytes of its identity, which are the same in each of its windows: what they say
    is read once."""

    __slots__ = ("heard_at", "identity", "is_possible", "key", "names", "rank", "seen", "sought")

    def __init__(self, identity: RankIdentity) -> None:
        self.identity = identity  # as the daemon has it
        self.sought = (identity.pod, identity.job)
        self.rank = identity.rank
        self.key = (identity.pod, identity.rank)
        self.is_possible = 0 <= identity.rank < identity.world_size
        self.seen: RankSeen | None = None  # under `names`
        self.names: Names = ("", "", "", "")
        self.heard_at = 0.0

    def under(self, names: Names) -> RankSeen:
        if self.seen is None or self.names != names:
            renamed = RankIdentity()
            renamed.CopyFrom(self.identity)
            renamed.job, renamed.node, renamed.namespace, renamed.pod_name = names
            self.names, self.seen = names, RankSeen(renamed)
        return self.seen


class Speaker:
    def __init__(self, refusals: Refusals, now: float) -> None:
        self._refusals = refusals
        self._allowance = 0.0
        self._seen_at = now - BURST_SECONDS
        self._forgot_at = 0.0
        # Of the present message: ranks come and go, and none may raise the allowance for ever.
        self.ranks = 0
        self.known: dict[bytes, Known] = {}

    def allow(self, sent: int, now: float) -> int:
        """How many of so many are listened to; the others are counted."""
        rate = WINDOWS_PER_RANK_SECOND * min(max(1, self.ranks or sent), RANKS_PER_NODE)
        self._allowance = min(rate * BURST_SECONDS, self._allowance + rate * (now - self._seen_at))
        self._seen_at = now
        allowed = min(sent, int(self._allowance))
        self._allowance -= allowed
        if allowed < sent:
            self._refusals.add("rate", sent - allowed)
        return allowed

    def meet(self, identity: bytes, now: float) -> Known | None:
        """None where there are too many already, or where it is no identity."""
        if len(self.known) >= RANKS_PER_NODE:
            if now - self._forgot_at > FORGETTING_SECONDS:
                self._forgot_at = now
                self.known = {key: k for key, k in self.known.items() if now - k.heard_at < SILENT_SECONDS}
            if len(self.known) >= RANKS_PER_NODE:
                self._refusals.add("ranks")
                return None
        try:
            known = self.known[identity] = Known(RankIdentity.FromString(identity))
        except DecodeError:
            self._refusals.add("unreadable")
            return None
        return known

    def part(self, identity: bytes) -> Known | None:
        """One that is spoken of for the last time."""
        try:
            return self.known.pop(identity, None) or Known(RankIdentity.FromString(identity))
        except DecodeError:
            self._refusals.add("unreadable")
            return None
