"""Requests of users, read and checked: which capture, of which run, and the Capture's spec."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Collection
from dataclasses import dataclass

import grpc
import msgspec

from rankscope.common.rank_selection import rank_ranges
from rankscope.common.run_names import run_name
from rankscope.common.text import printable
from rankscope.operator.access.guard import RefusedError
from rankscope.operator.access.token_review import Caller
from rankscope.operator.captures.audit import BY_API, VIA
from rankscope.operator.captures.automatic import capture_document
from rankscope.operator.kube.api_client import Document
from rankscope.operator.kube.objects import RunObject
from rankscope.operator.kube.resources import NAME_PATTERN, CaptureSpec
from rankscope.operator.webhooks.admission import REQUESTED_BY
from rankscope.operator.webhooks.validation import capture_mistakes
from rankscope.v1 import capture_service_pb2 as pb

# The traces are deleted with the object: nobody else cleans up after users.
KEPT_SECONDS = 7 * 86400
REASON_CHARACTERS = 1024
MAX_RANKS = 4096
MAX_RANK = 1 << 31
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_NAME = re.compile(NAME_PATTERN.strip("^$"))
_ID = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


@dataclass(frozen=True)
class Place:
    """A namespace, empty without Kubernetes, and a name in it: of a run, or of a capture."""

    namespace: str
    name: str
    job_number: int = 1

    def __str__(self) -> str:
        return f"{self.name} in namespace {self.namespace}" if self.namespace else self.name

    @property
    def job(self) -> str:
        """The job of this number of the run, as daemons and correlation call it."""
        name = run_name(self.namespace, self.name)
        return f"{name}#{self.job_number}" if self.job_number > 1 else name


def bad(text: str) -> RefusedError:
    return RefusedError(grpc.StatusCode.INVALID_ARGUMENT, text)


def no_run(place: Place) -> RefusedError:
    """For callers that may know it."""
    next_step = f"kubectl get trainingruns -n {place.namespace}" if place.namespace else "rankscope top"
    return RefusedError(grpc.StatusCode.NOT_FOUND, f"no run {place}; next: {next_step}")


def check_ranks(ranks: Collection[int]) -> None:
    if len(ranks) > MAX_RANKS:
        raise bad(f"{len(ranks)} ranks; name at most {MAX_RANKS}, or none for all")
    if max(ranks, default=0) >= MAX_RANK:
        raise bad(f"ranks are below {MAX_RANK}")


def audited(what: str, place: Place, ranks: Collection[int]) -> dict[str, str]:
    """Fields of an audit record."""
    named = rank_ranges(set(ranks)) or "all"
    return {"what": what, "namespace": place.namespace, "run": place.name, "job": place.job, "ranks": named}


def starting() -> RefusedError:
    text = "the operator is starting and has not seen everything yet; try again"
    return RefusedError(grpc.StatusCode.UNAVAILABLE, text)


def place_of_capture(text: str, has_namespaces: bool = True) -> Place:
    return _place_of(text, has_namespaces, "a capture", "rankscope captures ls")


def place_of_hang(text: str, has_namespaces: bool = True) -> Place:
    return _place_of(text, has_namespaces, "a hang", "rankscope hangs")


def _place_of(text: str, has_namespaces: bool, what: str, lists: str) -> Place:
    if not has_namespaces:
        if not _is_name(text):
            raise bad(f"name {what} by its id; `{lists}` lists them")
        return Place("", text)
    namespace, _, name = text.partition("/")
    if not _is_namespace(namespace) or not _is_name(name):
        raise bad(f"name {what} as NAMESPACE/NAME; `{lists}` lists them")
    return Place(namespace, name)


def place_of_run(text: str, has_namespaces: bool = True, runs: Collection[str] = ()) -> Place:
    """Without Kubernetes, the only one of the `runs` need not be named."""
    if not has_namespaces:
        text = next(iter(runs)) if not text and len(runs) == 1 else text
        if not 1 <= len(text) <= 253 or "/" in text:
            raise bad("name a run with --run, as `rankscope top` shows it")
        return Place("", text)
    namespace, _, run = text.partition("/")
    name, hash_sign, number = run.partition("#")
    is_number = number.isascii() and number.isdigit() and 1 <= len(number) <= 4 and int(number) >= 1
    if not _is_namespace(namespace) or not _is_name(name) or (hash_sign and not is_number):
        raise bad("name a run as NAMESPACE/RUN; `kubectl get trainingruns -A` lists them")
    return Place(namespace, name, int(number) if hash_sign else 1)


def places_to_list(text: str, has_namespaces: bool = True) -> Place:
    """`NAMESPACE/` for all runs of one; nothing for all runs."""
    if not text:
        return Place("", "")
    if text.endswith("/") and _is_namespace(text[:-1]):
        return Place(text[:-1], "")
    return place_of_run(text, has_namespaces)


def capture_name(request: pb.StartCaptureRequest, now_unix_seconds: float) -> str:
    """The caller's id, which makes a repeated request harmless; or one with the time."""
    if not request.id:
        return f"c-{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now_unix_seconds))}-{secrets.token_hex(3)}"
    if _ID.fullmatch(request.id) is None:
        raise bad("id: up to 63 lower-case letters, digits and dashes")
    return request.id


def spec_document(request: pb.StartCaptureRequest, run: Place) -> Document:
    options = request.options
    if options.wait_steps or options.repeat > 1 or options.HasField("warmup_steps"):
        raise bad("--wait, --warmup and --repeat are for a daemon alone; leave them out")
    if request.HasField("start_unix_millis"):
        raise bad("the operator chooses the start")
    names = ("shapes", "stacks", "memory", "flops", "modules")
    chosen: Document = {name: True for name in names if getattr(options, name)}
    if options.allow_slowdown:
        chosen["allowSlowdown"] = True
    spec: Document = {
        "run": run.name,
        "ranks": "".join(request.ranks.split()) or "straggler+peer",
        "options": chosen,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "deleteArtifacts": True,
    }
    length = request.WhichOneof("length")
    if length is not None:
        spec[length] = getattr(request, length)
    if request.HasField("patience_seconds"):
        spec["patienceSeconds"] = request.patience_seconds
    if run.job_number > 1:
        spec["jobNumber"] = run.job_number
    reason = printable(request.reason, REASON_CHARACTERS).strip()
    if reason:
        spec["reason"] = reason
    mistakes = capture_mistakes({"spec": spec}, None)
    if mistakes:
        raise bad("; ".join(mistakes))
    read_spec(spec)
    return spec


def read_spec(spec: Document) -> CaptureSpec:
    try:
        return msgspec.convert(spec, CaptureSpec)
    except msgspec.ValidationError as error:
        raise bad(f"{error}"[:500]) from error


def document(name: str, run: RunObject, spec: Document, caller: Caller) -> Document:
    annotations = {VIA: BY_API, REQUESTED_BY: caller.name[:256]}
    return capture_document(name, run, spec, annotations)


def _is_namespace(text: str) -> bool:
    return _NAMESPACE.fullmatch(text) is not None


def _is_name(text: str) -> bool:
    return len(text) <= 253 and _NAME.fullmatch(text) is not None
