"""Whatever is asked for: a name that the API server can have, or a refusal."""

from __future__ import annotations

import math
import re
from urllib.parse import quote

import grpc
from hypothesis import example, given
from hypothesis import strategies as st

from rankscope.operator.access.guard import RefusedError
from rankscope.operator.access.requests import (
    Place,
    capture_name,
    place_of_capture,
    place_of_run,
    places_to_list,
    spec_document,
)
from rankscope.operator.kube.crds import KINDS, definition
from rankscope.v1 import capture_service_pb2 as pb

NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
PIECES = st.sampled_from(["lab", "/", "..", ".", "a", "#", "2", "%2f", "\n", "\0", "-", "A", "ä", "?", "٣", " "])
TEXTS = st.one_of(st.text(max_size=300), st.lists(PIECES, max_size=12).map("".join))
RUN = Place("lab", "llama")


@given(TEXTS)
@example("lab/llama#2")
@example("lab/llama#٣")
@example("lab/llama\n")
@example("lab/a..b")
def test_no_text_names_anything_outside_a_namespace(text: str) -> None:
    for read in (place_of_run, place_of_capture, places_to_list):
        try:
            place = read(text)
        except RefusedError as refused:
            assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
            assert str(refused).startswith("name a ")  # and nothing of what was sent
            continue
        assert (not place.namespace and not text) or NAMESPACE.fullmatch(place.namespace)
        assert not place.name or NAME.fullmatch(place.name)
        assert quote(place.name, safe="") == place.name
        assert 1 <= place.job_number < 10_000


@given(TEXTS)
def test_an_id_is_a_name_or_refused(text: str) -> None:
    try:
        name = capture_name(pb.StartCaptureRequest(id=text.replace("\ud800", "")), 0.0)
    except (RefusedError, UnicodeEncodeError):
        return
    assert len(name) <= 63 and NAMESPACE.fullmatch(name)


@given(
    TEXTS,
    st.text(max_size=3000),
    st.one_of(st.integers(0, 2**32 - 1), st.floats()),
    st.one_of(st.none(), st.floats()),
    st.booleans(),
)
def test_a_spec_keeps_to_the_schema_or_is_refused(
    ranks: str, reason: str, length: float, patience: float | None, stacks: bool
) -> None:
    try:
        request = pb.StartCaptureRequest(job="lab/llama", ranks=ranks, reason=reason)
    except UnicodeEncodeError:
        return  # no protobuf message can hold it
    if isinstance(length, int):
        request.steps = length
    else:
        request.seconds = length
    if patience is not None:
        request.patience_seconds = patience
    request.options.stacks = stacks
    try:
        spec = spec_document(request, RUN)
    except RefusedError as refused:
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        return
    (kind,) = [kind for kind in KINDS if kind.plural == "captures"]
    versions = definition(kind)["spec"]["versions"]
    known = versions[0]["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"]
    assert spec.keys() <= known.keys()
    assert re.fullmatch(known["ranks"]["pattern"].strip("^$"), spec["ranks"])
    assert len(spec.get("reason", "")) <= 1024
    assert ("steps" in spec) != ("seconds" in spec)
    assert 1 <= spec.get("steps", 1) <= 100 and 0 < spec.get("seconds", 1.0) <= 60
    assert math.isfinite(spec.get("patienceSeconds", 0.0)) and 0 <= spec.get("patienceSeconds", 0.0) <= 600
