"""Captures at the webhooks: whose name they carry, and a record of who asked.

What a Capture says of its origin is true: people's own words are replaced by the API server's. The operator alone may
speak for others, for whom it has seen a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import msgspec

from rankscope.analysis.audit_lines import AuditRecord
from rankscope.operator.kube.captures.auditing import VIA, CaptureAudit, asked_for
from rankscope.operator.kube.captures.automatic import TRIGGER
from rankscope.operator.kube.resources import CaptureSpec
from rankscope.operator.kube.webhooks.checking import capture_mistakes
from rankscope.operator.kube.webhooks.reviews import Answer, Document, Request

REQUESTED_BY = "rankscope.dev/requested-by"
ORIGIN = (REQUESTED_BY, VIA, TRIGGER)


class CaptureAdmission:
    """`own_name` is ours to the API server; while it is not known, nobody speaks for others."""

    def __init__(self, own_name: Callable[[], str | None], audit: CaptureAudit | None) -> None:
        self._own_name = own_name
        self._audit = audit

    def stamp(self, request: Request) -> Answer:
        """Who asked, as the API server knows them: not what the asker wrote, and not changed afterwards."""
        assert request.object is not None
        # Here too, and not only in `validate`: the schema's own refusal, in a schema's words, comes between the two.
        mistakes = capture_mistakes(request.object, _old(request))
        if mistakes:
            return self._refused(request, mistakes)
        metadata = request.object.get("metadata")
        if not isinstance(metadata, Mapping):
            return Answer(refusal="it has no metadata")
        given, truth = _origin(request.object), self._truth(request)
        if given == truth:
            return Answer()
        if not isinstance(metadata.get("annotations"), Mapping):
            return Answer(patch=[{"op": "add", "path": "/metadata/annotations", "value": truth}])
        return Answer(patch=[_step(name, truth.get(name)) for name in ORIGIN if given.get(name) != truth.get(name)])

    def validate(self, request: Request) -> Answer:
        assert request.object is not None
        mistakes = capture_mistakes(request.object, _old(request))
        given, truth = _origin(request.object), self._truth(request)
        mistakes += [f"{name} is set by Rankscope" for name, value in given.items() if value != truth.get(name)]
        if mistakes:
            return self._refused(request, mistakes)
        if self._audit is not None and self._is_news(request):
            self._audit.say(_record(request))
        return Answer()

    def _truth(self, request: Request) -> dict[str, str]:
        if request.operation != "CREATE":
            return _origin(_old(request))
        asker, own = request.user_info.username, self._own_name()
        written = _origin(request.object)
        if own is not None and asker == own:
            return {REQUESTED_BY: asker, **written}
        # While we do not know who we are, this may be ourselves: what we made by a policy has to stay so.
        claims = {} if own is not None else {name: value for name, value in written.items() if name != REQUESTED_BY}
        return {REQUESTED_BY: asker, **claims}

    def _refused(self, request: Request, mistakes: list[str]) -> Answer:
        refusal = "; ".join(mistakes)[:1024]
        if self._audit is not None and self._is_news(request):
            self._audit.refused(replace(_record(request), result="Invalid", message=refusal))
        return Answer(refusal=refusal)

    def _is_news(self, request: Request) -> bool:
        """What we make ourselves is recorded where it is decided."""
        is_ours = request.user_info.username == self._own_name()
        return request.operation == "CREATE" and not request.dry_run and not is_ours


def _record(request: Request) -> AuditRecord:
    metadata = _mapping((request.object or {}).get("metadata"))
    uid = metadata.get("uid")
    record = AuditRecord(
        "asked",
        "kubectl",
        request.user_info.username,
        request.user_info.groups,
        verified=True,
        namespace=request.namespace,
        capture=str(metadata.get("name") or request.name or ""),
        id=f"k-{uid}" if uid else "",
    )
    try:
        return asked_for(record, msgspec.convert((request.object or {}).get("spec"), CaptureSpec))
    except msgspec.ValidationError:
        return record


def _step(name: str, value: str | None) -> Document:
    place = f"/metadata/annotations/{name.replace('/', '~1')}"
    return {"op": "remove", "path": place} if value is None else {"op": "add", "path": place, "value": value}


def _old(request: Request) -> dict[str, Any] | None:
    return request.old_object if request.operation == "UPDATE" else None


def _origin(document: Mapping[str, Any] | None) -> dict[str, str]:
    annotations = _mapping(_mapping((document or {}).get("metadata")).get("annotations"))
    return {name: str(annotations[name]) for name in ORIGIN if annotations.get(name) is not None}


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
