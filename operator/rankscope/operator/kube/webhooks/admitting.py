"""What the webhooks answer: pods that asked for it get the injection, Captures get the name of who asked, and objects
of ours that make no sense are refused in words. The API server's schema has the rest."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from rankscope.operator.kube.captures.auditing import CaptureAudit
from rankscope.operator.kube.resources import GROUP
from rankscope.operator.kube.webhooks.capture_admitting import CaptureAdmission
from rankscope.operator.kube.webhooks.checking import policy_advice, policy_mistakes, run_mistakes
from rankscope.operator.kube.webhooks.injecting import INJECT, WISHES, Wish, inject, wish_of
from rankscope.operator.kube.webhooks.reviews import Answer, Request, ReviewError, read_review, write_answer

log = logging.getLogger(__name__)

INJECT_PATH = "/inject"  # by the pod's label; INJECT_PATH/WISH by its namespace's
STAMP_PATH = "/stamp"
VALIDATE_PATH = "/validate"


class Admission:
    """Knows nothing of HTTP, TLS or the API server."""

    def __init__(
        self,
        probe_image: str | None = None,
        own_name: Callable[[], str | None] = lambda: None,
        audit: CaptureAudit | None = None,
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # webhook and result
        self._probe_image = probe_image
        self._captures = CaptureAdmission(own_name, audit)
        self._routes: dict[str, Callable[[Request], Answer]] = {
            INJECT_PATH: self._inject_by_label,
            STAMP_PATH: self._stamp,
            VALIDATE_PATH: lambda request: validate(request, self._captures),
            **{f"{INJECT_PATH}/{wish}": self._injector(wish) for wish in WISHES},
        }

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """HTTP status and body. The API server appends a query to the path."""
        path = path.partition("?")[0]
        route = self._routes.get(path)
        if route is None:
            return 404, b"rankscope: no such webhook\n"
        webhook = path.split("/")[1]
        try:
            request = read_review(body)
        except ReviewError as error:
            self.counts[webhook, "unreadable"] += 1
            return 400, f"{error}\n".encode(errors="replace")
        try:
            answer = route(request)
        except Exception:
            # The API server then does what the webhook's failurePolicy says: a pod passes as it is.
            log.exception("the review of %s by %s failed", request.resource.resource, path)
            self.counts[webhook, "failed"] += 1
            return 500, b"rankscope: the review failed; the operator's log has the reason\n"
        result = "refused" if answer.refusal else "changed" if answer.patch else "passed"
        self.counts[webhook, result] += 1
        return 200, write_answer(request, answer)

    def _injector(self, wish: Wish) -> Callable[[Request], Answer]:
        return lambda request: self._inject(request, wish)

    def _stamp(self, request: Request) -> Answer:
        place = (request.resource.group, request.resource.resource, request.sub_resource)
        return Answer() if place != (GROUP, "captures", "") or request.object is None else self._captures.stamp(request)

    def _inject_by_label(self, request: Request) -> Answer:
        labels = _mapping(_mapping((request.object or {}).get("metadata")).get("labels"))
        text = str(labels.get(INJECT, ""))
        if text in ("", "false"):
            return Answer()
        wish = wish_of(text)
        if wish is None:
            return Answer(
                warnings=[f"{INJECT}: {text[:63]!r} is none of {', '.join(WISHES)}, false: nothing is injected"]
            )
        return self._inject(request, wish)

    def _inject(self, request: Request, wish: Wish) -> Answer:
        is_pod = (request.resource.group, request.resource.resource, request.sub_resource) == ("", "pods", "")
        if request.operation != "CREATE" or not is_pod or request.object is None:
            return Answer()
        injection = inject(request.object, wish, self._probe_image)
        return Answer(patch=injection.patch, warnings=[f"rankscope: {note}" for note in injection.notes])


def validate(request: Request, captures: CaptureAdmission) -> Answer:
    if request.object is None or request.resource.group != GROUP or request.sub_resource:
        return Answer()
    if request.resource.resource == "captures":
        return captures.validate(request)
    if request.resource.resource == "trainingruns":
        old = request.old_object if request.operation == "UPDATE" else None
        return Answer(refusal=_refusal(run_mistakes(request.object, old)))
    if request.resource.resource == "profilingpolicies":
        refusal = _refusal(policy_mistakes(request.object))
        return Answer(refusal=refusal, warnings=() if refusal else policy_advice(request.object))
    return Answer()


def _refusal(mistakes: list[str]) -> str:
    return "; ".join(mistakes)[:1024]


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
