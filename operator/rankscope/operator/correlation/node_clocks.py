"""Clocks of nodes, compared by when their windows arrive: a node whose clock is far off, or was set, is judged with the
others. Smaller differences are left to the detector, which reports them."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field

log = logging.getLogger(__name__)

# Up to so many windows, a difference may be a delay.
TOLERATED_WINDOWS = 2.0
WINDOWS_REMEMBERED = 16
COMPARED_EVERY_SECONDS = 1.0
FORGET_AFTER_SECONDS = 60.0


@dataclass
class _Node:
    # The end of each window on the node's clock less its arrival on ours. A delay makes it smaller: the largest counts.
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=WINDOWS_REMEMBERED))
    end_unix_seconds: float = 0.0
    heard_monotonic: float = 0.0
    shift_seconds: float = 0.0


class NodeClocks:
    """`now` is our monotonic clock: whether our own wall clock is right does not matter."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._usual_seconds: float | None = None
        self._compared_monotonic = 0.0
        self.epoch = 0  # changes when most nodes have moved to another time

    @property
    def shifts(self) -> dict[str, float]:
        """By how many seconds the clocks of nodes are ahead of most others', for those that are far off."""
        return {name: self._ahead(node) for name, node in self._nodes.items() if node.shift_seconds}

    def shift(self, name: str, end_unix_seconds: float, window_seconds: float, now: float) -> float:
        """What to subtract from times of this node: whole windows, 0 for a clock that is about right."""
        node = self._nodes.setdefault(name, _Node())
        if end_unix_seconds < node.end_unix_seconds - window_seconds / 2:
            node.recent.clear()  # set back: a delay never changes the order of windows
        node.recent.append(end_unix_seconds - now)
        node.end_unix_seconds, node.heard_monotonic = end_unix_seconds, now
        if self._usual_seconds is None or now - self._compared_monotonic >= COMPARED_EVERY_SECONDS:
            self._compare(window_seconds, now)
        ahead = self._ahead(node)
        if abs(ahead - node.shift_seconds) > TOLERATED_WINDOWS * window_seconds:
            before = node.shift_seconds
            is_off = abs(ahead) > TOLERATED_WINDOWS * window_seconds and window_seconds > 0
            node.shift_seconds = round(ahead / window_seconds) * window_seconds if is_off else 0.0
            if node.shift_seconds != before:
                log.warning("the clock of node %s is %+.1f s from most others; check NTP or chrony there", name, ahead)
        return node.shift_seconds

    def _ahead(self, node: _Node) -> float:
        assert self._usual_seconds is not None
        return max(node.recent) - self._usual_seconds

    def _compare(self, window_seconds: float, now: float) -> None:
        gone = [name for name, node in self._nodes.items() if now - node.heard_monotonic > FORGET_AFTER_SECONDS]
        for name in gone:
            del self._nodes[name]
        # The middle one, and not a mean of two: it is somebody's time.
        ordered = sorted(max(node.recent) for node in self._nodes.values())
        usual, before = ordered[len(ordered) // 2], self._usual_seconds
        if before is not None and abs(usual - before) > TOLERATED_WINDOWS * window_seconds:
            self.epoch += 1
        self._usual_seconds, self._compared_monotonic = usual, now
