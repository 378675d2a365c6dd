from __future__ import annotations

import base64
import json
import time
from typing import Any

import pytest

from rankscope.operator.webhooks.admission import REQUESTED_BY, Admission
from rankscope.operator.webhooks.configuration import Address, configurations
from rankscope.operator.webhooks.validation import capture_mistakes
from tests.support.measuring import Measured

CAPTURE = {"run": "llama", "steps": 3}


def review(
    document: Any, resource: str = "pods", operation: str = "CREATE", old: Any = None, user: str = "ada"
) -> bytes:
    request = {
        "uid": "u-1",
        "operation": operation,
        "resource": {"group": "" if resource == "pods" else "rankscope.dev", "version": "v1", "resource": resource},
        "userInfo": {"username": user, "groups": ["system:authenticated"]},
        "object": document,
        "oldObject": old,
        "dryRun": False,
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def ask(path: str, body: bytes) -> dict[str, Any]:
    status, answer = Admission("image").answer(path, body)
    assert status == 200, answer
    document = json.loads(answer)
    assert (document["apiVersion"], document["kind"]) == ("admission.k8s.io/v1", "AdmissionReview")
    assert document["response"]["uid"] == "u-1"
    return dict(document["response"])


def patch(response: dict[str, Any]) -> Any:
    assert response["allowed"]
    return json.loads(base64.b64decode(response["patch"])) if "patch" in response else []


def pod(label: str | None) -> dict[str, Any]:
    labels = {} if label is None else {"rankscope.dev/inject": label}
    return {"metadata": {"name": "p", "labels": labels}, "spec": {"containers": [{"name": "c"}]}}


def ours(spec: dict[str, Any], requested_by: str | None = None) -> dict[str, Any]:
    metadata: dict[str, Any] = {"name": "c"}
    if requested_by is not None:
        metadata["annotations"] = {REQUESTED_BY: requested_by}
    return {"metadata": metadata, "spec": spec}


def test_a_pods_label_says_what_it_gets() -> None:
    paths = {wish: {op["path"] for op in patch(ask("/inject", review(pod(wish))))} for wish in ("kineto", "probe")}
    assert "/spec/containers/0/env" in paths["kineto"]
    assert "/spec/initContainers" not in paths["kineto"]
    assert "/spec/initContainers" in paths["probe"]
    for label in (None, "false"):
        assert patch(ask("/inject", review(pod(label)))) == []


def test_an_unknown_label_is_reported_and_the_pod_passes() -> None:
    response = ask("/inject", review(pod("yes")))
    assert patch(response) == []
    assert "'yes' is none of true, kineto, probe, false" in response["warnings"][0]


def test_the_namespaces_label_comes_by_the_path() -> None:
    assert "/spec/initContainers" in {op["path"] for op in patch(ask("/inject/probe", review(pod(None))))}


def test_only_a_pods_creation_is_changed() -> None:
    assert patch(ask("/inject/probe", review(pod(None), operation="UPDATE", old=pod(None)))) == []
    assert patch(ask("/inject/probe", review(None))) == []
    assert patch(ask("/inject/probe", review(pod(None), resource="captures"))) == []


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xff\xfe",
        b"null",
        b"[]",
        b'{"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview"}',
        b'{"apiVersion": "admission.k8s.io/v1beta1", "kind": "AdmissionReview", "request": '
        b'{"uid": "u", "operation": "CREATE", "resource": {}}}',
        b"[" * 200_000,
        b'{"request":' * 100_000,
        review([1, 2]),
        review("pod"),
    ],
)
def test_what_is_no_review_is_refused_and_nothing_breaks(body: bytes) -> None:
    status, text = Admission().answer("/inject", body)
    assert (status, b"{" in text[:1]) == (400, False)


def test_an_unknown_path_is_not_found() -> None:
    assert "/inject/everything" not in Admission().paths


@pytest.mark.parametrize("claimed", [None, "root", ""])
def test_a_capture_tells_who_asked_whatever_they_claim(claimed: str | None) -> None:
    (operation,) = patch(ask("/stamp", review(ours(CAPTURE, claimed), "captures")))
    assert operation["op"] == "add"
    said = operation["value"] if claimed is not None else operation["value"][REQUESTED_BY]
    assert said == "ada"
    assert patch(ask("/stamp", review(ours(CAPTURE, "ada"), "captures"))) == []


def test_who_asked_cannot_be_changed_afterwards() -> None:
    old = ours(CAPTURE, "ada")
    forged = review(ours(CAPTURE, "bob"), "captures", "UPDATE", old, user="bob")
    assert patch(ask("/stamp", forged))[0]["value"] == "ada"
    removed = review(ours(CAPTURE), "captures", "UPDATE", old, user="bob")
    assert patch(ask("/stamp", removed)) == [
        {"op": "add", "path": "/metadata/annotations", "value": {REQUESTED_BY: "ada"}}
    ]
    never_had = review(ours(CAPTURE, "bob"), "captures", "UPDATE", ours(CAPTURE), user="bob")
    assert patch(ask("/stamp", never_had)) == [
        {"op": "remove", "path": "/metadata/annotations/rankscope.dev~1requested-by"}
    ]
    # If another webhook changes it after us, the last look finds it.
    assert not ask("/validate", forged)["allowed"]
    assert not ask("/validate", review(ours(CAPTURE, "bob"), "captures"))["allowed"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"run": "a", "steps": 1, "seconds": 2.0}, "exclude each other"),
        ({"run": "a", "steps": 1, "ranks": "0,5-3"}, "5-3 is empty: write 3-5"),
    ],
)
def test_a_capture_that_makes_no_sense_is_refused_in_words(spec: dict[str, Any], says: str) -> None:
    for path in ("/stamp", "/validate"):
        response = ask(path, review(ours(spec), "captures"))
        assert not response["allowed"]
        assert says in response["status"]["message"]


def test_a_capture_cannot_be_changed_but_its_finalizer_comes_off() -> None:
    old = ours(CAPTURE, "ada")
    changed = ask("/validate", review(ours({**CAPTURE, "steps": 9}, "ada"), "captures", "UPDATE", old))
    assert "make another" in changed["status"]["message"]
    freed = {**old, "metadata": {**old["metadata"], "finalizers": []}}
    assert ask("/validate", review(freed, "captures", "UPDATE", old))["allowed"]


def test_a_run_stays_its_workloads() -> None:
    old = ours({"workload": {"kind": "Job", "name": "a"}})
    other = ours({"workload": {"kind": "Job", "name": "b"}})
    target = ours({"workload": {"kind": "Job", "name": "a"}, "mfuTarget": 0.4})
    assert "workload" in ask("/validate", review(other, "trainingruns", "UPDATE", old))["status"]["message"]
    assert ask("/validate", review(target, "trainingruns", "UPDATE", old))["allowed"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"automaticCaptures": {"on": ["slow_rank", "healthy"]}}, "healthy is no reason"),
        ({"automaticCaptures": {"on": ["hang", "hang"]}}, "twice"),
        ({"selector": {"matchLabels": {"team": "not a label"}}}, "no pod can have it"),
        ({"selector": {"matchLabels": {"/team": "a"}}}, "no pod can have it"),
        ({"thresholds": {"mfuTarget": 0}}, "no run is below 0"),
    ],
)
def test_a_policy_that_makes_no_sense_is_refused_in_words(spec: dict[str, Any], says: str) -> None:
    response = ask("/validate", review(ours(spec), "profilingpolicies"))
    assert not response["allowed"]
    assert says in response["status"]["message"]


def test_a_policy_that_sets_nothing_passes_with_a_warning() -> None:
    response = ask("/validate", review(ours({"priority": 3}), "profilingpolicies"))
    assert response["allowed"]
    assert "sets nothing" in response["warnings"][0]
    sensible = {"selector": {"matchLabels": {"example.com/team": "a"}}, "automaticCaptures": {"on": ["hang"]}}
    assert "warnings" not in ask("/validate", review(ours(sensible), "profilingpolicies"))


def test_reviews_are_counted_by_webhook_and_result() -> None:
    admission = Admission("image")
    for path, body in (
        ("/inject/probe", review(pod(None))),
        ("/inject", review(pod("false"))),
        ("/stamp", review(ours({"run": "a", "steps": 1, "seconds": 2.0}), "captures")),
        ("/validate", b"garbage"),
    ):
        admission.answer(path, body)
    assert admission.counts == {
        ("inject", "changed"): 1,
        ("inject", "passed"): 1,
        ("stamp", "refused"): 1,
        ("validate", "unreadable"): 1,
    }


def test_only_stamps_and_statuses_fail_closed_and_names_are_unique() -> None:
    webhooks = [webhook for document in configurations(Address(url="https://x")) for webhook in document["webhooks"]]
    failing = {webhook["name"] for webhook in webhooks if webhook["failurePolicy"] == "Fail"}
    assert failing == {"stamp.captures.rankscope.dev", "status.rankscope.dev"}
    assert len({webhook["name"] for webhook in webhooks}) == len(webhooks)
    for webhook in webhooks:
        assert webhook["sideEffects"] == "None"
        pods = "pods" in webhook["rules"][0]["resources"]
        # Of pods, only those that asked: the others must not even wait.
        assert ("objectSelector" in webhook) == pods
        assert not pods or webhook["timeoutSeconds"] <= 3


@pytest.mark.parametrize("ranks", ["9" * 5000 + "-" + "9" * 5000, "9" * 1_000_000, "1-" * 200_000])
def test_ranks_of_any_length_pass_quickly_to_the_schema(ranks: str, measured: Measured) -> None:
    # The CPU time of a pattern that tries every beginning would be minutes.
    started = time.process_time()
    assert capture_mistakes({"spec": {"steps": 3, "ranks": ranks}}, None) == []
    measured("CPU time of a check of long ranks", time.process_time() - started, "s", at_most=10)


def test_an_empty_range_is_turned_round_in_words() -> None:
    assert capture_mistakes({"spec": {"steps": 3, "ranks": "0,5-3"}}, None) == [
        "spec.ranks: 5-3 is empty: write 3-5",
    ]
