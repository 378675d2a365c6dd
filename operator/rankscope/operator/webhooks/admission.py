"""Admission reviews: labelled pods get the injection, Captures get the name of their requester, and objects of our
kinds that make no sense are refused with a reason. The API server's schema checks the rest.

Everybody who reaches the port may send anything: a review that cannot be read is refused."""

from __future__ import annotations

import base64
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from rankscope.common.audit import AuditRecord
from rankscope.common.text import one_line
from rankscope.operator.captures.audit import VIA, CaptureAudit, asked_for
from rankscope.operator.captures.automatic import TRIGGER
from rankscope.operator.kube.resources import GROUP, CaptureSpec
from rankscope.operator.webhooks.pod_injection import INJECT, MODES, Mode, inject, mode_of
from rankscope.operator.webhooks.validation import capture_mistakes, policy_advice, policy_mistakes, run_mistakes

log = logging.getLogger(__name__)

Document = dict[str, Any]

INJECT_PATH = "/inject"  # by the pod's label; INJECT_PATH/MODE by its namespace's
STAMP_PATH = "/stamp"
VALIDATE_PATH = "/validate"
STATUS_PATH = "/status"
# Annotations with the origin of a Capture.
REQUESTED_BY = "rankscope.dev/requested-by"
ORIGIN = (REQUESTED_BY, VIA, TRIGGER)

API_VERSION = "admission.k8s.io/v1"
# The API server truncates longer warnings, and all of them together at 4096.
WARNING_CHARACTERS = 256
MAX_WARNINGS = 12


class ReviewError(Exception):
    """Not an AdmissionReview."""


class UserInfo(msgspec.Struct):
    username: str = ""
    groups: list[str] = msgspec.field(default_factory=list)


class GroupResource(msgspec.Struct):
    group: str = ""
    version: str = ""
    resource: str = ""


class Request(msgspec.Struct, rename="camel"):
    uid: str
    operation: str
    resource: GroupResource
    user_info: UserInfo = msgspec.field(default_factory=UserInfo)
    namespace: str = ""
    name: str = ""
    sub_resource: str = ""
    dry_run: bool = False
    object: Document | None = None
    old_object: Document | None = None


class _Review(msgspec.Struct, rename="camel"):
    api_version: str
    kind: str
    request: Request


@dataclass(frozen=True)
class Answer:
    """An empty `refusal` lets the object pass, with the patch and the warnings."""

    refusal: str = ""
    patch: Sequence[Document] = ()
    warnings: Sequence[str] = ()


_DECODER = msgspec.json.Decoder(_Review)


def read_review(body: bytes) -> Request:
    try:
        review = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReviewError(f"not an AdmissionReview: {error}") from error
    if (review.api_version, review.kind) != (API_VERSION, "AdmissionReview"):
        raise ReviewError(f"this webhook reads AdmissionReview of {API_VERSION} only")
    return review.request


def write_answer(request: Request, answer: Answer) -> bytes:
    response: Document = {"uid": request.uid, "allowed": not answer.refusal}
    if answer.refusal:
        response["status"] = {"code": 422, "reason": "Invalid", "message": answer.refusal}
    elif answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(list(answer.patch))).decode()
    if answer.warnings:
        response["warnings"] = [one_line(text, WARNING_CHARACTERS) for text in answer.warnings[:MAX_WARNINGS]]
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


class CaptureAdmission:
    """Sees to it that the origin in a Capture is true: it is replaced by the name that the API server knows. Only the
    operator may create Captures for others, after it has seen their token. `own_name` is the operator's own; while it
    is not known, nobody may. `audit` records refusals; it is given only if all reviews are the API server's."""

    def __init__(self, own_name: Callable[[], str | None], audit: CaptureAudit | None) -> None:
        self._own_name = own_name
        self._audit = audit

    def stamp(self, request: Request) -> Answer:
        """Sets the requester as the API server knows it; it cannot be changed afterwards."""
        assert request.object is not None
        # Here too, and not only in `validate`: the schema's own refusal, which is harder to read, comes between them.
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
        return Answer()

    def _truth(self, request: Request) -> dict[str, str]:
        if request.operation != "CREATE":
            return _origin(_old(request))
        asker, own = request.user_info.username, self._own_name()
        written = _origin(request.object)
        if own is not None and asker == own:
            return {REQUESTED_BY: asker, **written}
        # While our own name is not known, this may be us: a Capture that we made for a policy has to stay one.
        claims = {} if own is not None else {name: value for name, value in written.items() if name != REQUESTED_BY}
        return {REQUESTED_BY: asker, **claims}

    def _refused(self, request: Request, mistakes: list[str]) -> Answer:
        refusal = "; ".join(mistakes)[:1024]
        if self._audit is not None and self._is_news(request):
            self._audit.refused(replace(_record(request), result="Invalid", message=refusal))
        return Answer(refusal=refusal)

    def _is_news(self, request: Request) -> bool:
        """Captures of our own are recorded where they are decided."""
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


class Admission:
    """Answers reviews, independent of HTTP and TLS."""

    def __init__(
        self,
        probe_image: str | None = None,
        own_name: Callable[[], str | None] = lambda: None,
        audit: CaptureAudit | None = None,
    ) -> None:
        self.counts: Counter[tuple[str, str]] = Counter()  # webhook and result
        self._probe_image = probe_image
        self._own_name = own_name
        self._captures = CaptureAdmission(own_name, audit)
        self._routes: dict[str, Callable[[Request], Answer]] = {
            INJECT_PATH: self._inject_by_label,
            STAMP_PATH: self._stamp,
            VALIDATE_PATH: lambda request: validate(request, self._captures),
            STATUS_PATH: self._guard_status,
            **{f"{INJECT_PATH}/{mode}": self._injector(mode) for mode in MODES},
        }

    @property
    def paths(self) -> Iterable[str]:
        return self._routes

    def answer(self, path: str, body: bytes) -> tuple[int, bytes]:
        """HTTP status and body; `path` is one of `paths`."""
        webhook = path.split("/")[1]
        try:
            request = read_review(body)
        except ReviewError as error:
            self.counts[webhook, "unreadable"] += 1
            return 400, f"{error}\n".encode(errors="replace")
        try:
            answer = self._routes[path](request)
        except Exception:
            # The API server then follows the webhook's failurePolicy: a pod passes as it is.
            log.exception("the review of %s by %s failed", request.resource.resource, path)
            self.counts[webhook, "failed"] += 1
            return 500, b"rankscope: the review failed; the operator's log has the reason\n"
        result = "refused" if answer.refusal else "changed" if answer.patch else "passed"
        self.counts[webhook, result] += 1
        return 200, write_answer(request, answer)

    def _injector(self, mode: Mode) -> Callable[[Request], Answer]:
        return lambda request: self._inject(request, mode)

    def _stamp(self, request: Request) -> Answer:
        place = (request.resource.group, request.resource.resource, request.sub_resource)
        return Answer() if place != (GROUP, "captures", "") or request.object is None else self._captures.stamp(request)

    def _guard_status(self, request: Request) -> Answer:
        """Only the operator writes what became of a run, capture or policy. Everybody may if it does not know its own
        name."""
        if request.resource.group != GROUP or request.sub_resource != "status":
            return Answer()
        if self._own_name() in (None, request.user_info.username):
            return Answer()
        return Answer(refusal=f"the status of {request.resource.resource} is written by the operator")

    def _inject_by_label(self, request: Request) -> Answer:
        labels = _mapping(_mapping((request.object or {}).get("metadata")).get("labels"))
        text = str(labels.get(INJECT, ""))
        if text in ("", "false"):
            return Answer()
        mode = mode_of(text)
        if mode is None:
            return Answer(
                warnings=[f"{INJECT}: {text[:63]!r} is none of {', '.join(MODES)}, false: nothing is injected"]
            )
        return self._inject(request, mode)

    def _inject(self, request: Request, mode: Mode) -> Answer:
        is_pod = (request.resource.group, request.resource.resource, request.sub_resource) == ("", "pods", "")
        if request.operation != "CREATE" or not is_pod or request.object is None:
            return Answer()
        injection = inject(request.object, mode, self._probe_image)
        return Answer(patch=injection.patch, warnings=[f"rankscope: {note}" for note in injection.notes])


def validate(request: Request, captures: CaptureAdmission) -> Answer:
    if request.object is None or request.resource.group != GROUP or request.sub_resource:
        return Answer()
    if request.resource.resource == "captures":
        return captures.validate(request)
    if request.resource.resource == "trainingruns":
        return Answer(refusal=_refusal(run_mistakes(request.object, _old(request))))
    if request.resource.resource == "profilingpolicies":
        refusal = _refusal(policy_mistakes(request.object))
        return Answer(refusal=refusal, warnings=() if refusal else policy_advice(request.object))
    return Answer()


def _refusal(mistakes: list[str]) -> str:
    return "; ".join(mistakes)[:1024]
