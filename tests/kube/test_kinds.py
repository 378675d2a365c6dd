from __future__ import annotations

from typing import Any

import pytest

from tests.kube.api_server import ApiError, ApiServer

BASE = "/apis/rankscope.dev/v1alpha1/namespaces"


def capture(**spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "Capture",
        "metadata": {"name": "c"},
        "spec": {"run": "job-a", **spec},
    }


def test_a_good_capture_is_taken_and_gets_its_defaults(server: ApiServer, namespace: str) -> None:
    made = server.admin.create(f"{BASE}/{namespace}/captures", capture(steps=3))
    assert made["spec"]["ranks"] == "straggler+peer"
    assert made["spec"]["patienceSeconds"] == 60


def test_a_capture_without_a_length_is_accepted(server: ApiServer, namespace: str) -> None:
    made = server.admin.create(f"{BASE}/{namespace}/captures", capture())
    assert "steps" not in made["spec"] and "seconds" not in made["spec"]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"steps": 3, "seconds": 2.0}, "must not validate"),
        ({"steps": 0}, "steps"),
        ({"steps": 101}, "steps"),
        ({"steps": "three"}, "steps"),
        ({"seconds": 0}, "seconds"),
        ({"steps": 3, "ranks": "../../etc/passwd"}, "ranks"),
        ({"steps": 3, "run": "Not A Name"}, "run"),
        ({"steps": 3, "patienceSeconds": 1e9}, "patienceSeconds"),
    ],
)
def test_the_api_server_refuses_a_capture_that_cannot_be_had(
    server: ApiServer, namespace: str, spec: dict[str, Any], says: str
) -> None:
    with pytest.raises(ApiError, match=says) as refused:
        server.admin.create(f"{BASE}/{namespace}/captures", capture(**spec))
    assert refused.value.status == 422


def test_status_is_a_subresource_untouched_by_plain_writes(server: ApiServer, namespace: str) -> None:
    body = {**capture(steps=1), "status": {"phase": "Succeeded"}}
    path = f"{BASE}/{namespace}/captures"
    assert "status" not in server.admin.create(path, body)
    server.admin.merge(f"{path}/c/status", {"status": {"phase": "Running"}, "spec": {"steps": 9}})
    read = server.admin.get(f"{path}/c")
    assert (read["status"]["phase"], read["spec"]["steps"]) == ("Running", 1)
    with pytest.raises(ApiError, match="phase"):
        server.admin.merge(f"{path}/c/status", {"status": {"phase": "Dancing"}})


def test_a_policy_with_an_impossible_threshold_is_refused(server: ApiServer, namespace: str) -> None:
    policy = {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "ProfilingPolicy",
        "metadata": {"name": "p"},
        "spec": {"thresholds": {"ratio": 0.9}},
    }
    with pytest.raises(ApiError, match="ratio"):
        server.admin.create(f"{BASE}/{namespace}/profilingpolicies", policy)
