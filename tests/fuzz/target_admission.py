"""The webhooks: HTTP heads and AdmissionReviews from any client that reaches the port, and pods as anybody writes
them. What is injected into a pod must be a patch that applies, changes nothing else, and is not made twice."""

from __future__ import annotations

import base64
import http.client
import io
from typing import Any

import msgspec

from rankscope.common.http_server import RequestError, body_length
from rankscope.operator.webhooks.admission import INJECT_PATH, STAMP_PATH, VALIDATE_PATH, Admission
from tests.fuzz.checking import silence
from tests.fuzz.json_mutating import JsonMutator
from tests.fuzz.mutating import Mutator
from tests.fuzz.targets import recorded

SEEDS = recorded("admission")
TOKENS = [b"POST /inject HTTP/1.1\r\n", b"Content-Length: ", b"\r\n\r\n", b"Transfer-Encoding: chunked", b"\r\n", b": "]
PATHS = (INJECT_PATH, f"{INJECT_PATH}/true", f"{INJECT_PATH}/kineto", f"{INJECT_PATH}/probe", STAMP_PATH, VALIDATE_PATH)
_WORDS = (
    *(
        "request",
        "object",
        "oldObject",
        "operation",
        "CREATE",
        "UPDATE",
        "resource",
        "group",
        "pods",
        "captures",
        "userInfo",
    ),
    *("username", "spec", "containers", "initContainers", "env", "envFrom", "name", "value", "valueFrom", "PYTHONPATH"),
    *(
        "volumeMounts",
        "mountPath",
        "volumes",
        "emptyDir",
        "rankscope-probe",
        "rankscope.dev/inject",
        "true",
        "kineto",
        "full",
    ),
    *(
        "annotations",
        "labels",
        "metadata",
        "KINETO_USE_DAEMON",
        "TEARDOWN_CUPTI",
        "resources",
        "limits",
        "nvidia.com/gpu",
    ),
    *("securityContext", "ranks", "steps", "seconds", "5-3", "matchLabels", "rankscope.dev", "profilingpolicies", "on"),
    *(
        "rankscope.dev/requested-by",
        "rankscope.dev/image-pythonpath",
        "trainingruns",
        "workload",
        "thresholds",
        "prefix",
    ),
)
BODY_LIMIT = 3 << 20


def run(data: bytes) -> None:
    _check_head(data)
    admission = Admission(probe_image="registry/probe:1")
    for path in PATHS:
        with silence():  # what failed shows by its status
            status, body = admission.answer(path, data)
        assert status in (200, 400), (path, status, body[:200])
        if status == 200:
            _check_answer(admission, path, data, msgspec.json.decode(body))
        else:
            assert len(body) < 1000, len(body)


def _check_head(data: bytes) -> None:
    """As the HTTP server reads it: the standard library's parser, and our own rules for the length."""
    try:
        headers = http.client.parse_headers(io.BytesIO(data[:8192].partition(b"\r\n\r\n")[0] + b"\r\n\r\n"))
    except http.client.HTTPException:
        return
    try:
        length = body_length(headers, BODY_LIMIT)
    except RequestError as error:
        assert error.status in (400, 411, 413) and len(str(error)) < 200
        return
    assert 0 <= length <= BODY_LIMIT


def _check_answer(admission: Admission, path: str, data: bytes, answer: dict[str, Any]) -> None:
    try:
        review = msgspec.json.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        return  # broken where nobody looks: no API server sends that
    response = answer["response"]
    assert response["uid"] == review["request"]["uid"]
    assert all(len(text) <= 256 for text in response.get("warnings", ()))
    if not response["allowed"]:
        assert 0 < len(response["status"]["message"]) <= 1024 and "patch" not in response
        return
    if "patch" not in response:
        return
    patch = msgspec.json.decode(base64.b64decode(response["patch"]))
    before = review["request"]["object"]
    after = _patched(before, patch)
    if path.startswith(INJECT_PATH):
        _check_injected(before, after)
        again = {**review, "request": {**review["request"], "object": after}}
        _, body = admission.answer(path, msgspec.json.encode(again))
        assert "patch" not in msgspec.json.decode(body)["response"], "the same pod is changed again"


def _check_injected(before: dict[str, Any], after: dict[str, Any]) -> None:
    """Containers keep their names, images and commands; what was there is still there."""
    for old, new in zip(before["spec"]["containers"], after["spec"]["containers"], strict=True):
        if isinstance(old, dict):
            kept = {key: value for key, value in old.items() if key not in ("env", "volumeMounts")}
            assert {key: new[key] for key in kept} == kept
    assert {k: v for k, v in before.items() if k not in ("spec", "metadata")} == {
        k: v for k, v in after.items() if k not in ("spec", "metadata")
    }


def _patched(document: Any, patch: list[dict[str, Any]]) -> Any:
    """JSON Patch, as far as it is used; raises where the API server would refuse."""
    made = msgspec.json.decode(msgspec.json.encode(document))
    for change in patch:
        assert change["op"] in ("add", "replace", "remove"), change
        *way, last = [part.replace("~1", "/").replace("~0", "~") for part in change["path"].split("/")[1:]]
        holder = made
        for part in way:
            holder = holder[int(part)] if isinstance(holder, list) else holder[part]
        if isinstance(holder, list):
            place = len(holder) if last == "-" else int(last)
            assert place <= len(holder) - (change["op"] != "add"), change
            holder[place : place + (change["op"] != "add")] = [] if change["op"] == "remove" else [change["value"]]
        else:
            assert isinstance(holder, dict), change
            assert change["op"] == "add" or last in holder, change
            if change["op"] == "remove":
                del holder[last]
            else:
                holder[last] = change["value"]
    return made


def mutator(plain: Mutator) -> JsonMutator:
    return JsonMutator(plain, _WORDS)
