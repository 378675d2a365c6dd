"""Who may read the operator's /metrics: whoever has a token of the cluster that may `get` that path."""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass

from rankscope.operator.kube.people.reviewing import NoAnswerError, PathAccess, Reviews

log = logging.getLogger(__name__)

ACCESS = PathAccess("/metrics")
CALLERS_REMEMBERED = 256
# While the API server thinks, probes of the kubelet need room on the same port.
AT_ONCE = 24


@dataclass(frozen=True)
class Refusal:
    status: int
    text: str


class MetricsGuard:
    """May be asked from any thread. Every caller that is refused is logged once."""

    def __init__(self, reviews: Reviews) -> None:
        self._reviews = reviews
        self._turns = threading.BoundedSemaphore(AT_ONCE)
        self._told: set[tuple[str, str]] = set()

    def refusal(self, authorization: str, address: str) -> Refusal | None:
        """None: they may."""
        if not self._turns.acquire(blocking=False):
            return Refusal(503, "too many ask at once")
        try:
            return self._refusal(authorization, address)
        finally:
            self._turns.release()

    def _refusal(self, authorization: str, address: str) -> Refusal | None:
        scheme, _, token = authorization.partition(" ")
        try:
            caller = self._reviews.caller(token.strip()) if scheme.lower() == "bearer" else None
            if caller is None:
                self._tell(address, "nobody that the cluster knows")
                return Refusal(401, "a bearer token is needed")
            if not self._reviews.allows(caller, ACCESS):
                self._tell(address, caller.name)
                return Refusal(403, "this token may not get /metrics")
        except NoAnswerError:
            return Refusal(503, "the API server does not answer")
        return None

    def _tell(self, address: str, name: str) -> None:
        if (address, name) not in self._told and len(self._told) < CALLERS_REMEMBERED:
            self._told.add((address, name))
            log.warning("refused /metrics to %s: %r may not get it", address, name[:200])
