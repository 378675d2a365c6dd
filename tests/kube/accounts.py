"""The service accounts of the chart, as users with a token: RBAC sees a name and groups, and no difference."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.kube.api_server import ApiServer

ROLES = Path(__file__).parents[2] / "deploy" / "rbac"
NAMESPACE = "rankscope"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:rankscope-operator"
DAEMON = f"system:serviceaccount:{NAMESPACE}:rankscope-daemon"
# People: one who may look, one who may ask for captures.
VIEWER = "viewer"
RESEARCHER = "researcher"

_ACCOUNT_GROUPS = ("system:serviceaccounts", f"system:serviceaccounts:{NAMESPACE}", "system:authenticated")
ACCOUNTS = {
    OPERATOR: _ACCOUNT_GROUPS,
    DAEMON: _ACCOUNT_GROUPS,
    VIEWER: ("system:authenticated",),
    RESEARCHER: ("system:authenticated",),
}

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
_COLLECTIONS = {
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
    "ClusterRole": f"{_RBAC}/clusterroles",
    "ClusterRoleBinding": f"{_RBAC}/clusterrolebindings",
    "Role": f"{_RBAC}/namespaces/{{namespace}}/roles",
    "RoleBinding": f"{_RBAC}/namespaces/{{namespace}}/rolebindings",
}


def install_roles(server: ApiServer) -> None:
    """All that deploy/rbac holds. Nothing aggregates roles here, so people are bound to theirs directly."""
    server.admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for document in documents():
        server.admin.create(_collection(document), document)
    for user, roles in {VIEWER: ("rankscope-view",), RESEARCHER: ("rankscope-view", "rankscope-capture")}.items():
        for role in roles:
            bind(server, user, role)


@contextmanager
def granted(server: ApiServer, name: str) -> Iterator[None]:
    """For a while also what deploy/rbac/optional/NAME.yaml allows."""
    parts = list(yaml.safe_load_all((ROLES / "optional" / f"{name}.yaml").read_text()))
    for part in parts:
        server.admin.create(_collection(part), part)
    try:
        yield
    finally:
        for part in parts:
            server.admin.delete(f"{_collection(part)}/{part['metadata']['name']}")


def documents() -> list[dict[str, Any]]:
    return [part for path in sorted(ROLES.glob("*.yaml")) for part in yaml.safe_load_all(path.read_text()) if part]


def _collection(document: dict[str, Any]) -> str:
    return _COLLECTIONS[document["kind"]].format(namespace=document["metadata"].get("namespace", ""))


def bind(server: ApiServer, user: str, role: str) -> None:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
    body = {"metadata": {"name": f"{user}-{role}"}, "roleRef": reference, "subjects": [subject]}
    server.admin.create(f"{_RBAC}/clusterrolebindings", body)
