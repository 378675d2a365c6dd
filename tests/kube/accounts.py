"""The service accounts of the chart with their roles, and people: users with a token."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.kube.api_server import ApiServer
from tests.support.waiting import wait_until

ROLES = Path(__file__).parents[2] / "deploy" / "helm" / "rankscope" / "files" / "roles"
NAMESPACE = "rankscope"
OPERATOR = f"system:serviceaccount:{NAMESPACE}:rankscope-operator"
DAEMON = f"system:serviceaccount:{NAMESPACE}:rankscope-daemon"
# UserApi: one who may look, one who may ask for captures.
VIEWER = "viewer"
RESEARCHER = "researcher"

ACCOUNTS = {VIEWER: ("system:authenticated",), RESEARCHER: ("system:authenticated",)}

_RBAC = "/apis/rbac.authorization.k8s.io/v1"
# The operator's roles: in the whole cluster, and in its own namespace. The chart binds them so, and binds the daemon to
# none. What is optional there is granted by the tests that need it.
CLUSTER_ROLES = ("operator", "webhooks")
NAMESPACE_ROLES = ("operator-leases", "hang-reports", "webhooks-secrets", "certificates")
PEOPLES_ROLES = ("view", "capture", "policy")


def install_roles(server: ApiServer) -> None:
    """The chart's roles. Nothing aggregates roles here, so people are bound to theirs directly."""
    server.admin.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    for account in (OPERATOR, DAEMON):
        name = account.rpartition(":")[2]
        server.admin.create(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts", {"metadata": {"name": name}})
    for name in CLUSTER_ROLES:
        _grant(server, name, "Cluster", _RBAC)
    for name in NAMESPACE_ROLES:
        _grant(server, name, "", f"{_RBAC}/namespaces/{NAMESPACE}")
    for name in PEOPLES_ROLES:
        server.admin.create(f"{_RBAC}/clusterroles", _role(name))
    for user, roles in {VIEWER: ("view",), RESEARCHER: ("view", "capture")}.items():
        for role in roles:
            bind(server, user, f"rankscope-{role}")
            wait_until_allowed(server, user, _role(role)["rules"])


@contextmanager
def granted(server: ApiServer, name: str) -> Iterator[None]:
    """For a while the operator also has this role of the chart's, in the whole cluster."""
    made = _grant(server, name, "Cluster", _RBAC)
    try:
        yield
    finally:
        for path in made:
            server.admin.delete(path)


def _grant(server: ApiServer, name: str, scope: str, root: str) -> list[str]:
    role = _role(name)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": f"{scope}Role", "name": role["metadata"]["name"]}
    subject = {"kind": "ServiceAccount", "name": "rankscope-operator", "namespace": NAMESPACE}
    binding = {"metadata": role["metadata"], "roleRef": reference, "subjects": [subject]}
    made = []
    for kind, document in (("roles", role), ("rolebindings", binding)):
        collection = f"{root}/{scope.lower()}{kind}"
        server.admin.create(collection, document)
        made.append(f"{collection}/{role['metadata']['name']}")
    wait_until_allowed(server, OPERATOR, role["rules"], "" if scope else NAMESPACE)
    return made


def wait_until_allowed(server: ApiServer, user: str, rules: Sequence[dict[str, Any]], namespace: str = "") -> None:
    """The API server hears of roles and bindings a moment after they were written."""
    for rule in rules:
        for verb, wanted in itertools.product(rule["verbs"], rule.get("resources") or rule["nonResourceURLs"]):
            attributes = {"verb": verb, "path": wanted}
            if "resources" in rule:
                resource, _, subresource = wanted.partition("/")
                attributes = {"verb": verb, "group": rule["apiGroups"][0], "resource": resource}
                attributes |= {"subresource": subresource, "namespace": namespace}
                attributes["name"] = rule.get("resourceNames", ("",))[0]
            wait_until(lambda attributes=attributes: _is_allowed(server, user, attributes))


def _is_allowed(server: ApiServer, user: str, attributes: dict[str, str]) -> bool:
    kind = "nonResourceAttributes" if "path" in attributes else "resourceAttributes"
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview"}
    path = "/apis/authorization.k8s.io/v1/subjectaccessreviews"
    answer = server.admin.create(path, {**body, "spec": {"user": user, kind: attributes}})
    return answer["status"]["allowed"] is True


def _role(name: str) -> dict[str, Any]:
    return {"metadata": {"name": f"rankscope-{name}"}, **yaml.safe_load((ROLES / f"{name}.yaml").read_text())}


def bind(server: ApiServer, user: str, role: str) -> None:
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}
    body = {"metadata": {"name": f"{user}-{role}"}, "roleRef": reference, "subjects": [subject]}
    server.admin.create(f"{_RBAC}/clusterrolebindings", body)
