"""Authentication and authorization by the API server: TokenReview and SubjectAccessReview.

While the API server does not answer, nothing is allowed. Answers are cached for seconds only, so that a revoked token
is refused soon. Tokens themselves are never stored, only their digests."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from rankscope.common.http_server import Request, Response
from rankscope.operator.kube.api_client import TOKEN_REVIEWS, Api, ApiError, Document, UnreachableError

log = logging.getLogger(__name__)

ACCESS_REVIEWS = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
YES_SECONDS = 10.0
NO_SECONDS = 2.0
MAX_REMEMBERED = 4096
TOKEN_CHARACTERS = 12 * 1024
# More at a time could overload the API server; callers that wait longer than this are refused.
AT_ONCE = 16
TURN_SECONDS = 2.0
# Characters of a bearer token (RFC 6750).
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")

Kept = TypeVar("Kept")


class NoAnswerError(Exception):
    """The API server could not be asked: access is denied, and trying again may help."""


SERVICE_ACCOUNT_PREFIX = "system:serviceaccount:"


@dataclass(frozen=True)
class Caller:
    """As the API server knows it, or by its certificate."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    is_verified: bool = True  # not where nothing but the address is known

    @property
    def tenant(self) -> str:
        """Who limits apply to: the service accounts of a namespace count as one, since anybody there may make more."""
        return self.name.rpartition(":")[0] if self.name.startswith(SERVICE_ACCOUNT_PREFIX) else self.name


@dataclass(frozen=True)
class Access:
    """On our own kinds."""

    verb: str
    namespace: str  # empty: all of them
    resource: str = "captures"
    subresource: str = ""
    group: str = "rankscope.dev"

    @property
    def attributes(self) -> Document:
        parts = {
            "group": self.group,
            "resource": self.resource,
            "subresource": self.subresource,
            "namespace": self.namespace,
            "verb": self.verb,
        }
        return {"resourceAttributes": {name: value for name, value in parts.items() if value}}


@dataclass(frozen=True)
class PathAccess:
    """On a path of HTTP, as in `/metrics`."""

    path: str
    verb: str = "get"

    @property
    def attributes(self) -> Document:
        return {"nonResourceAttributes": {"path": self.path, "verb": self.verb}}


class Reviews:
    """May be called from any thread; blocks for as long as the API server takes. An empty audience is the API server's
    own, which Prometheus' token has."""

    def __init__(self, api: Api, audience: str, monotonic_seconds: Callable[[], float] = time.monotonic) -> None:
        self._api = api
        self.audience = audience
        self._callers: _Remembered[Caller | None] = _Remembered(monotonic_seconds)
        self._allowed: _Remembered[bool] = _Remembered(monotonic_seconds)
        self._turns = threading.BoundedSemaphore(AT_ONCE)

    def caller(self, token: str) -> Caller | None:
        """None: not a valid token for our audience."""
        if len(token) > TOKEN_CHARACTERS or _TOKEN.fullmatch(token) is None:
            return None
        key = hashlib.sha256(token.encode()).digest()
        known = self._callers.get(key)
        if known is not None:
            return known.value
        spec: Document = {"token": token}
        if self.audience:
            spec["audiences"] = [self.audience]
        caller = _caller(self._ask(TOKEN_REVIEWS, "TokenReview", spec), self.audience)
        self._callers.keep(key, caller, YES_SECONDS if caller is not None else NO_SECONDS)
        return caller

    def knows(self, token: str) -> bool:
        """Whether its review is cached, so that the API server need not be asked."""
        return self._callers.get(hashlib.sha256(token.encode(errors="replace")).digest()) is not None

    def allows(self, caller: Caller, access: Access | PathAccess) -> bool:
        key = (caller.name, caller.uid, caller.groups, tuple(sorted(caller.extra.items())), access)
        known = self._allowed.get(key)
        if known is not None:
            return known.value
        spec: Document = {"user": caller.name, "groups": list(caller.groups), **access.attributes}
        if caller.uid:
            spec["uid"] = caller.uid
        if caller.extra:
            spec["extra"] = {name: list(values) for name, values in caller.extra.items()}
        status = self._ask(ACCESS_REVIEWS, "SubjectAccessReview", spec)
        # `denied` beside `allowed` is an authorizer's veto.
        allowed = status.get("allowed") is True and status.get("denied") is not True
        self._allowed.keep(key, allowed, YES_SECONDS if allowed else NO_SECONDS)
        return allowed

    def _ask(self, path: str, kind: str, spec: Document) -> Document:
        group_version = path.removeprefix("/apis/").rpartition("/")[0]
        if not self._turns.acquire(timeout=TURN_SECONDS):
            raise NoAnswerError("too many are asked about at once")
        try:
            answer = self._api.create(path, {"apiVersion": group_version, "kind": kind, "spec": spec})
        except UnreachableError as error:
            raise NoAnswerError("the API server does not answer") from error
        except ApiError as error:
            # Its text goes only to our log, and contains no token: the API server does not repeat the request.
            log.warning("%s: %s; is the role rankscope-api bound to the operator?", kind, error)
            raise NoAnswerError("the operator may not ask the API server about it") from error
        finally:
            self._turns.release()
        status = answer.get("status")
        return status if isinstance(status, dict) else {}


def _caller(status: Mapping[str, Any], audience: str) -> Caller | None:
    audiences = status.get("audiences") if audience else [""]
    # A server without support for audiences leaves them out: then the token is for the API server, not for us.
    if status.get("authenticated") is not True or not isinstance(audiences, list) or audience not in audiences:
        return None
    user = status.get("user")
    if not isinstance(user, Mapping) or not isinstance(user.get("username"), str) or not user["username"]:
        return None
    extra = user.get("extra") or {}
    return Caller(
        user["username"],
        str(user.get("uid") or ""),
        tuple(map(str, user.get("groups") or ())),
        {str(name): tuple(map(str, values)) for name, values in extra.items()},
    )


@dataclass(frozen=True)
class _Answer(Generic[Kept]):
    value: Kept
    until_seconds: float


class _Remembered(Generic[Kept]):
    def __init__(self, monotonic_seconds: Callable[[], float]) -> None:
        self._monotonic_seconds = monotonic_seconds
        self._lock = threading.Lock()
        self._answers: OrderedDict[Hashable, _Answer[Kept]] = OrderedDict()

    def get(self, key: Hashable) -> _Answer[Kept] | None:
        with self._lock:
            answer = self._answers.get(key)
            if answer is not None and answer.until_seconds <= self._monotonic_seconds():
                del self._answers[key]
                return None
            return answer

    def keep(self, key: Hashable, value: Kept, seconds: float) -> None:
        with self._lock:
            self._answers[key] = _Answer(value, self._monotonic_seconds() + seconds)
            self._answers.move_to_end(key)
            while len(self._answers) > MAX_REMEMBERED:
                self._answers.popitem(last=False)


METRICS = PathAccess("/metrics")
MAX_CALLERS = 256
# While the API server is asked, probes of the kubelet need room on the same port.
METRICS_REVIEWS_AT_ONCE = 24


class MetricsGuard:
    """Decides who may read the operator's /metrics: tokens of the cluster that may `get` that path. Thread-safe. A
    caller that is refused is logged once."""

    def __init__(self, reviews: Reviews) -> None:
        self._reviews = reviews
        self._turns = threading.BoundedSemaphore(METRICS_REVIEWS_AT_ONCE)
        self._logged: set[tuple[str, str]] = set()

    def check(self, request: Request) -> Response | None:
        return self.refusal(request.headers.get("Authorization", ""), request.address)

    def refusal(self, authorization: str, address: str) -> Response | None:
        """None: the caller may."""
        if not self._turns.acquire(blocking=False):
            return Response(503, b"too many requests at once\n")
        try:
            return self._refusal(authorization, address)
        finally:
            self._turns.release()

    def _refusal(self, authorization: str, address: str) -> Response | None:
        scheme, _, token = authorization.partition(" ")
        try:
            caller = self._reviews.caller(token.strip()) if scheme.lower() == "bearer" else None
            if caller is None:
                self._log(address, "nobody that the cluster knows")
                return Response(401, b"a bearer token is needed\n", headers={"WWW-Authenticate": "Bearer"})
            if not self._reviews.allows(caller, METRICS):
                self._log(address, caller.name)
                return Response(403, b"this token may not get /metrics\n")
        except NoAnswerError:
            return Response(503, b"the API server does not answer\n")
        return None

    def _log(self, address: str, name: str) -> None:
        if (address, name) not in self._logged and len(self._logged) < MAX_CALLERS:
            self._logged.add((address, name))
            log.warning("refused /metrics to %s: %r may not get it", address, name[:200])
