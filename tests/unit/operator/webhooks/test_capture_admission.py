from __future__ import annotations

import base64
import json
from typing import Any, cast

import pytest

from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.kube.api_client import Api, MissingError, OwnName, UnreachableError, account_in
from rankscope.operator.webhooks.admission import Admission
from tests.support.audit_records import Audited

OPERATOR = "system:serviceaccount:rankscope:rankscope-operator"
BY, VIA, TRIGGER = "rankscope.dev/requested-by", "rankscope.dev/via", "rankscope.dev/trigger"
SPEC = {"run": "llama", "steps": 3, "reason": "why not"}


def review(user: str, annotations: dict[str, str] | None, old: dict[str, str] | None = None, **request: Any) -> bytes:
    def document(held: dict[str, str] | None) -> dict[str, Any]:
        metadata = {"name": "c", "uid": "u-9", **({} if held is None else {"annotations": held})}
        return {"metadata": metadata, "spec": SPEC}

    content = {
        "uid": "1",
        "operation": "CREATE" if old is None else "UPDATE",
        "resource": {"group": "rankscope.dev", "version": "v1alpha1", "resource": "captures"},
        "namespace": "lab",
        "userInfo": {"username": user, "groups": ["team"]},
        "object": document(annotations),
        "oldObject": None if old is None else document(old),
        **request,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": content}).encode()


def admission(own: str | None = OPERATOR) -> Admission:
    return Admission(None, lambda: own, CaptureAudit())


def stamped(made: Admission, user: str, annotations: dict[str, str] | None, old: dict[str, str] | None = None) -> Any:
    """The annotations as they are after the patch."""
    response = json.loads(made.answer("/stamp", review(user, annotations, old))[1])["response"]
    assert response["allowed"]
    held = dict(annotations or {})
    for step in json.loads(base64.b64decode(response.get("patch", "W10="))):
        if step["path"] == "/metadata/annotations":
            held = dict(step["value"])
            continue
        name = step["path"].removeprefix("/metadata/annotations/").replace("~1", "/")
        if step["op"] == "remove":
            del held[name]
        else:
            held[name] = step["value"]
    # The API server asks `validate` about the outcome, and whether it is asked twice must not matter.
    assert json.loads(made.answer("/validate", review(user, held, old))[1])["response"]["allowed"]
    return held


def test_only_the_operator_names_another_requester() -> None:
    claims = {BY: "ada", VIA: "api"}
    assert stamped(admission(), OPERATOR, claims) == claims
    assert stamped(admission(), "mallory", claims) == {BY: "mallory"}
    assert stamped(admission(), "mallory", {TRIGGER: "policy", "own": "stays"}) == {BY: "mallory", "own": "stays"}
    assert stamped(admission(), OPERATOR, {TRIGGER: "policy"}) == {BY: OPERATOR, TRIGGER: "policy"}
    assert stamped(admission(), "mallory", None) == {BY: "mallory"}


def test_an_operator_without_known_name_cannot_name_another_requester() -> None:
    assert stamped(admission(None), OPERATOR, {BY: "ada", TRIGGER: "policy"}) == {BY: OPERATOR, TRIGGER: "policy"}


def test_the_origin_stays_as_it_was_in_later_writes() -> None:
    held = {BY: "ada", VIA: "api"}
    for user in ("mallory", OPERATOR):
        assert stamped(admission(), user, {BY: "mallory", TRIGGER: "alert"}, held) == held
        assert stamped(admission(), user, {}, held) == held


def test_an_unstamped_object_that_claims_an_origin_is_refused() -> None:
    response = json.loads(admission().answer("/validate", review("mallory", {VIA: "api"}))[1])["response"]
    assert not response["allowed"] and f"{VIA} is set by Rankscope" in response["status"]["message"]


def test_a_review_that_passes_leaves_no_record(audited: Audited) -> None:
    stamped(admission(), "ada", None)
    assert not audited()


@pytest.mark.parametrize("resource", ["captures", "trainingruns", "profilingpolicies"])
def test_only_the_operator_writes_a_status(resource: str) -> None:
    place = {"resource": {"group": "rankscope.dev", "version": "v1alpha1", "resource": resource}}

    def is_allowed(made: Admission, user: str, subresource: str = "status") -> bool:
        body = review(user, {}, {}, subResource=subresource, **place)
        return bool(json.loads(made.answer("/status", body)[1])["response"]["allowed"])

    assert is_allowed(admission(), OPERATOR)
    assert not is_allowed(admission(), "mallory")
    assert is_allowed(admission(), "mallory", "scale")
    # An operator that does not know its own name must not refuse itself.
    assert is_allowed(admission(None), OPERATOR)


def test_a_refused_capture_is_recorded_with_the_mistake(audited: Audited) -> None:
    body = review("ada", None, object={"metadata": {"name": "c"}, "spec": {"run": "llama", "steps": 1, "seconds": 2}})
    made = admission()
    for _ in range(3):
        assert not json.loads(made.answer("/stamp", body)[1])["response"]["allowed"]
    (record,) = audited()
    assert (record["event"], record["user"], record["result"]) == ("refused", "ada", "Invalid")
    assert "exclude each other" in record["message"]


class _Api:
    def __init__(self, token: str | None, answer: Any) -> None:
        self._token, self.answer, self.asked = token, answer, 0
        self.self_review: str | None = None

    def token(self) -> str | None:
        return self._token

    def create(self, path: str, body: Any) -> Any:
        if body["kind"] == "SelfSubjectReview":
            if self.self_review is None:
                raise MissingError(404, "NotFound", "an older API server")
            return {"status": {"userInfo": {"username": self.self_review}}}
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def _account_token(subject: object) -> str:
    part = base64.urlsafe_b64encode(json.dumps({"sub": subject}).encode()).decode().rstrip("=")
    return f"e30.{part}.c2ln"


def test_an_account_is_read_from_its_own_token() -> None:
    api = _Api(_account_token(OPERATOR), None)
    assert OwnName(cast(Api, api))() == OPERATOR
    assert api.asked == 0
    for token in ("abc", "a.b.c", "e30..x", _account_token("ada"), _account_token(7), "e30.W10.x"):
        assert account_in(token) is None


def test_another_token_is_asked_about_again_until_it_is_known() -> None:
    now = [0.0]
    api = _Api("static", UnreachableError("away"))
    own = OwnName(cast(Api, api), lambda: now[0])
    assert own() is None and own() is None and api.asked == 1
    now[0] = 11.0
    api.answer = {"status": {"authenticated": True, "user": {"username": "op"}}}
    assert own() == "op" and own() == "op" and api.asked == 2
    assert OwnName(cast(Api, _Api(None, None)))() is None
    newer = _Api(None, None)
    newer.self_review = "kubernetes-admin"  # by a certificate
    assert OwnName(cast(Api, newer))() == "kubernetes-admin" and newer.asked == 0
    assert OwnName(cast(Api, _Api("x", {"status": {"user": {"username": "op"}}})))() is None
