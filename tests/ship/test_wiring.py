"""How the chart's objects fit together: what selects selects something, and nothing opens more than is needed."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ship.combinations import COMBINATIONS
from tests.ship.conftest import NEW, OLD, Rendered
from tests.ship.helm import NAMESPACE

Document = dict[str, Any]

# An account with these permissions may become somebody else, or look into what is not ours.
NOT_OURS = {"pods/exec", "pods/log", "pods/attach", "pods/ephemeralcontainers", "serviceaccounts/token", "nodes/proxy"}
# Of the node, in the daemon's pod; /proc is there by hostPID.
READ_ONLY_PATHS = {"/sys/fs/cgroup", "/sys/class", "/sys/devices", "/var/lib/kubelet/pod-resources"}


def pods(found: Rendered) -> list[Document]:
    services = [each["spec"]["template"] for kind in ("DaemonSet", "Deployment") for each in found.all(kind)]
    return services + [each["spec"]["jobTemplate"]["spec"]["template"] for each in found.all("CronJob")]


def selected(labels: dict[str, str], documents: list[Document]) -> list[Document]:
    return [each for each in documents if labels.items() <= each["metadata"]["labels"].items()]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_whatever_selects_selects_something(rendered: dict[str, Rendered], name: str) -> None:
    found = rendered[name]
    for service in found.all("Service"):
        (pod,) = selected(service["spec"]["selector"], pods(found))
        names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names
    for kind, where in (("NetworkPolicy", "podSelector"), ("PodDisruptionBudget", "selector")):
        for document in found.all(kind):
            assert selected(document["spec"][where]["matchLabels"], pods(found)), document["metadata"]["name"]
    for monitor in found.all("PodMonitor"):
        (pod,) = selected(monitor["spec"]["selector"]["matchLabels"], pods(found))
        names = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]} <= names
    for monitor in found.all("ServiceMonitor"):
        (service,) = selected(monitor["spec"]["selector"]["matchLabels"], found.all("Service"))
        names = {port["name"] for port in service["spec"]["ports"]}
        assert {endpoint["port"] for endpoint in monitor["spec"]["endpoints"]} <= names


@pytest.mark.parametrize("name", COMBINATIONS)
def test_objects_have_unique_names_and_the_standard_labels(rendered: dict[str, Rendered], name: str) -> None:
    documents = rendered[name].documents
    places = [(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in documents]
    assert len(places) == len(set(places))
    for each in documents:
        labels = each["metadata"]["labels"]
        assert labels["app.kubernetes.io/part-of"] == "rankscope" and labels["app.kubernetes.io/managed-by"] == "Helm"
        assert labels["app.kubernetes.io/name"] == COMBINATIONS[name].get("nameOverride", "rankscope")
        assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE
        if name == "everything":
            assert labels["team"] == "platform", f"{each['kind']} {each['metadata']['name']} lacks commonLabels"


@pytest.mark.parametrize("name", COMBINATIONS)
def test_roles_open_neither_other_secrets_nor_other_pods(rendered: dict[str, Rendered], name: str) -> None:
    for role in [*rendered[name].all("ClusterRole"), *rendered[name].all("Role")]:
        for rule in role["rules"]:
            assert not NOT_OURS & set(rule["resources"]), role["metadata"]["name"]
            assert not {"escalate", "bind", "impersonate"} & set(rule["verbs"]), role["metadata"]["name"]
            if "secrets" in rule["resources"]:
                assert role["kind"] == "Role" and rule.get("resourceNames"), role["metadata"]["name"]
                assert not {"list", "watch", "create"} & set(rule["verbs"]), role["metadata"]["name"]


def test_the_daemon_writes_only_to_our_folders_on_its_node(rendered: dict[str, Rendered]) -> None:
    spec = rendered["everything"].one("DaemonSet", "rankscope-daemon")["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount for mount in spec["containers"][0]["volumeMounts"]}
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    read_only = {path for name, path in paths.items() if mounts[name].get("readOnly")}
    assert read_only == READ_ONLY_PATHS
    assert set(paths.values()) - read_only == {
        "/run/rankscope",
        "/run/rankscope/kineto",
        "/var/lib/rankscope/captures",
        "/var/lib/rankscope/profiles",
    }


def test_daemons_are_reached_by_the_operator_alone_and_reach_nobody(rendered: dict[str, Rendered]) -> None:
    policy = rendered["default"].one("NetworkPolicy", "rankscope-daemon")["spec"]
    assert policy["policyTypes"] == ["Ingress", "Egress"] and not policy.get("egress")
    (grpc,) = [rule for rule in policy["ingress"] if {"protocol": "TCP", "port": 9465} in rule["ports"]]
    (peer,) = grpc["from"]
    (pod,) = selected(peer["podSelector"]["matchLabels"], pods(rendered["default"]))
    assert pod["spec"]["serviceAccountName"] == "rankscope-operator"


def test_budgets_are_of_the_version_that_the_cluster_has(all_rendered: dict[tuple[str, str], Rendered]) -> None:
    def version(kubernetes: str) -> str:
        return str(all_rendered["default", kubernetes].one("PodDisruptionBudget", "rankscope-operator")["apiVersion"])

    assert (version(OLD), version(NEW)) == ("policy/v1beta1", "policy/v1")


def test_helm_test_has_a_pod_that_asks_the_operator(rendered: dict[str, Rendered]) -> None:
    (pod,) = rendered["default"].all("Pod")
    assert pod["metadata"]["annotations"]["helm.sh/hook"] == "test"
    (container,) = pod["spec"]["containers"]
    program = "".join(container["args"])
    compile(program, "helm test", "exec")
    assert f"rankscope-operator.{NAMESPACE}.svc" in program
    assert not rendered["minimal"].all("Pod")
