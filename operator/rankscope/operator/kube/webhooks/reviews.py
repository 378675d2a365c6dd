"""AdmissionReview v1, read and answered. Whoever reaches the port may send anything: what cannot be read is refused."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

Document = dict[str, Any]

API_VERSION = "admission.k8s.io/v1"
# The API server cuts longer ones, and all of them together at 4096.
WARNING_CHARACTERS = 256
WARNINGS_KEPT = 12


class ReviewError(Exception):
    """It is no AdmissionReview."""


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
    """`refusal` empty lets it pass, with the patch and the warnings."""

    refusal: str = ""
    patch: Sequence[Document] = ()
    warnings: Sequence[str] = ()


_DECODER = msgspec.json.Decoder(_Review)


def read_review(body: bytes) -> Request:
    try:
        review = _DECODER.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReviewError(f"no AdmissionReview: {error}") from error
    if (review.api_version, review.kind) != (API_VERSION, "AdmissionReview"):
        raise ReviewError(f"this webhook speaks AdmissionReview of {API_VERSION} only")
    return review.request


def write_answer(request: Request, answer: Answer) -> bytes:
    response: Document = {"uid": request.uid, "allowed": not answer.refusal}
    if answer.refusal:
        response["status"] = {"code": 422, "reason": "Invalid", "message": answer.refusal}
    elif answer.patch:
        response["patchType"] = "JSONPatch"
        response["patch"] = base64.b64encode(msgspec.json.encode(list(answer.patch))).decode()
    if answer.warnings:
        response["warnings"] = [_line(text) for text in answer.warnings[:WARNINGS_KEPT]]
    return msgspec.json.encode({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response})


def _line(text: str) -> str:
    return " ".join(text.split())[:WARNING_CHARACTERS]
