"""What the chart's roles allow, and what they do not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.operator.correlation.hang_store import HangStore
from rankscope.operator.kube.api_client import Api
from rankscope.operator.kube.report_maps import ReportMaps
from tests.kube.accounts import NAMESPACE, RESEARCHER, VIEWER
from tests.kube.api_server import ApiError, ApiServer, User

OURS = "/apis/rankscope.dev/v1alpha1"
POD = {"metadata": {"name": "p"}, "spec": {"containers": [{"name": "main", "image": "registry.example/x:1"}]}}
LEASE = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": "l"}, "spec": {}}


def capture(name: str = "c") -> dict[str, Any]:
    spec = {"run": "job-a", "steps": 3}
    return {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": name}, "spec": spec}


def refuses(user: User, method: str, path: str, body: Any = None) -> None:
    with pytest.raises(ApiError) as refused:
        user.request(method, path, body)
    assert refused.value.status == 403, (method, path, refused.value)


def test_the_operator_may_not_do_more_than_it_does(server: ApiServer, namespace: str, operator_user: User) -> None:
    server.admin.create(f"/api/v1/namespaces/{namespace}/pods", POD)
    assert operator_user.get("/api/v1/pods")["items"]
    pods = f"/api/v1/namespaces/{namespace}/pods"
    leases = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
    operator_user.create(leases.format(NAMESPACE), LEASE)
    operator_user.delete(f"{leases.format(NAMESPACE)}/l")
    for method, path, body in (
        ("GET", "/api/v1/secrets", None),
        ("GET", f"/api/v1/namespaces/{namespace}/secrets", None),
        ("GET", "/api/v1/configmaps", None),
        ("POST", pods, POD),
        ("DELETE", f"{pods}/p", None),
        ("GET", f"{pods}/p/log", None),
        ("POST", f"{pods}/p/exec", None),
        ("POST", leases.format(namespace), LEASE),
        ("GET", leases.format("kube-system"), None),
        ("GET", "/api/v1/nodes", None),
        ("POST", f"{OURS}/namespaces/{namespace}/profilingpolicies", {}),
        ("GET", "/apis/rbac.authorization.k8s.io/v1/clusterroles", None),
    ):
        refuses(operator_user, method, path, body)


def test_operator_replicas_share_hang_reports_in_their_own_namespace(
    namespace: str, operator_user: User, tmp_path: Path
) -> None:
    api = Api(operator_user.kubeconfig(tmp_path / "kubeconfig"))
    one, other = (HangStore(ReportMaps(api, NAMESPACE)) for _ in range(2))
    report = HangReport(
        id=f"{namespace}/h-20260301-101500-0a1b2c",
        run=f"{namespace}/llama",
        headline="rank 1 in save",
        verdict="it hangs",
        world_size=2,
        began_unix_seconds=time.time(),
        made_unix_seconds=time.time(),
    )
    one.keep(report)
    ended = msgspec.structs.replace(report, ended_unix_seconds=time.time())
    one.keep(ended)
    assert other.find(report.id) == ended
    for files in (ReportMaps(api, NAMESPACE), ReportMaps(api, NAMESPACE)):
        files.remove("h-20260301-101500-0a1b2c")
    assert one.find(report.id) is None
    with pytest.raises(OSError, match="403"):
        HangStore(ReportMaps(api, namespace)).keep(report)


def test_the_daemon_may_do_nothing_at_all(server: ApiServer, namespace: str, daemon_user: User) -> None:
    for path in (
        "/api/v1/pods",
        f"/api/v1/namespaces/{NAMESPACE}/pods",
        f"/api/v1/namespaces/{NAMESPACE}/secrets",
        f"{OURS}/trainingruns",
        f"{OURS}/captures",
    ):
        refuses(daemon_user, "GET", path)
    refuses(daemon_user, "POST", f"{OURS}/namespaces/{namespace}/captures", capture())


def test_a_viewer_cannot_have_a_job_captured(server: ApiServer, namespace: str) -> None:
    viewer, researcher = server.user(VIEWER), server.user(RESEARCHER)
    captures = f"{OURS}/namespaces/{namespace}/captures"
    assert viewer.get(captures)["items"] == []
    refuses(viewer, "POST", captures, capture())
    researcher.create(captures, capture())
    refuses(viewer, "DELETE", f"{captures}/c")
    # Nor may anybody but the operator say how a capture ended, or what a run is like.
    for user in (viewer, researcher):
        with pytest.raises(ApiError) as refused:
            user.merge(f"{captures}/c/status", {"status": {"phase": "Succeeded"}})
        assert refused.value.status == 403
    refuses(researcher, "POST", f"{OURS}/namespaces/{namespace}/profilingpolicies", {})
    researcher.delete(f"{captures}/c")
