"""What the chart promises of what it renders: programs that understand their flags, no more rights than needed, and one
source for what it takes from elsewhere."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rankscope.cli import daemon, operator, report_captures, report_fleet
from rankscope.operator.kube.crds import KINDS, definition
from rankscope.operator.runs.daemon_streams import SELECTOR, read_daemon_pod
from rankscope.operator.webhooks.configuration import MADE_BY, Address, configurations
from rankscope.operator.webhooks.webhooks import WebhookSettings
from tests.kube.accounts import CLUSTER_ROLES, NAMESPACE_ROLES, PEOPLES_ROLES
from tests.ship.combinations import COMBINATIONS
from tests.ship.conftest import NEW, OLD, Rendered
from tests.ship.helm import NAMESPACE, ROOT, Document

# What a kubelet fills in.
FILLED = {"$(NODE_NAME)": "node-a", "$(POD_NAME)": "operator-0", "$(HOST_IP)": "10.0.0.1", "$(JOB_NAME)": "report-1"}


def pod_specs(rendered: Rendered) -> Iterator[tuple[str, Document]]:
    """By component: daemon, operator, capture-report, fleet-report, test."""
    for document in rendered.documents:
        component = document["metadata"]["labels"]["app.kubernetes.io/component"]
        if document["kind"] in ("DaemonSet", "Deployment"):
            yield component, document["spec"]["template"]["spec"]
        elif document["kind"] == "CronJob":
            yield component, document["spec"]["jobTemplate"]["spec"]["template"]["spec"]
        elif document["kind"] == "Pod":
            yield component, document["spec"]


def arguments(spec: Document) -> list[str]:
    (container,) = spec["containers"]
    texts = list(container["args"])
    for variable, value in FILLED.items():
        texts = [text.replace(variable, value) for text in texts]
    assert not [text for text in texts if "$(" in text]
    return texts


@pytest.mark.parametrize("name", COMBINATIONS)
def test_the_programs_understand_every_flag_they_are_started_with(rendered: dict[str, Rendered], name: str) -> None:
    specs = dict(pod_specs(rendered[name]))
    if "daemon" in specs:
        parser = argparse.ArgumentParser(exit_on_error=False)
        daemon.add_arguments(parser)
        config = daemon.read_settings(parser.parse_args(arguments(specs["daemon"]))).config
        assert config.node == "node-a"
        assert specs["daemon"]["containers"][0]["command"] == ["rankscope", "daemon"]
    if "operator" in specs:
        parser = argparse.ArgumentParser(exit_on_error=False)
        operator.add_arguments(parser)
        parsed = parser.parse_args(arguments(specs["operator"]))
        assert (parsed.namespace, parsed.identity) == (NAMESPACE, "operator-0")
        assert parsed.fleet_certificates or parsed.tls_certificate
        assert specs["operator"]["containers"][0]["command"] == ["rankscope", "operator"]
    if "capture-report" in specs:
        parser = argparse.ArgumentParser(exit_on_error=False)
        report_captures.add_arguments(parser)
        parsed = parser.parse_args(arguments(specs["capture-report"]))
        assert (parsed.paths, parsed.shards, parsed.shard) == (["/captures"], 16, None)
        assert str(parsed.parts) == "/reports/report-1/parts"
        assert specs["capture-report"]["containers"][0]["command"] == ["rankscope", "report", "captures"]

    if "fleet-report" in specs:
        parser = argparse.ArgumentParser(exit_on_error=False)
        report_fleet.add_arguments(parser)
        parsed = parser.parse_args(arguments(specs["fleet-report"]))
        assert (parsed.prometheus, parsed.since) == ("https://mimir.monitoring/prometheus", "30d")
        assert (parsed.upload, parsed.tenant, str(parsed.token_file)) == (
            "s3://reports/fleet",
            "ml",
            "/etc/rankscope/token/token",
        )
        (container,) = specs["fleet-report"]["containers"]
        assert container["command"] == ["rankscope", "report", "fleet"]
        assert container["envFrom"] == [{"secretRef": {"name": "reports-s3"}}]
        assert "rankscope-daemon-s3" in container["image"]


@pytest.mark.parametrize("name", COMBINATIONS)
def test_every_file_that_a_program_is_told_of_is_mounted(rendered: dict[str, Rendered], name: str) -> None:
    for who, spec in pod_specs(rendered[name]):
        (container,) = spec["containers"]
        mounts = [mount["mountPath"] for mount in container.get("volumeMounts", [])]
        named = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert named == {volume["name"] for volume in spec.get("volumes", [])}, who
        for text in container["args"]:
            _, _, value = text.partition("=")
            if value.startswith("/"):
                # Or a folder of which parts are mounted.
                assert any(f"{value}/".startswith(f"{m}/") or m.startswith(f"{value}/") for m in mounts), text


@pytest.mark.parametrize("name", COMBINATIONS)
def test_no_pod_has_more_rights_than_it_needs(rendered: dict[str, Rendered], name: str) -> None:
    for who, spec in pod_specs(rendered[name]):
        (container,) = spec["containers"]
        security: dict[str, Any] = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, who
        assert security["allowPrivilegeEscalation"] is False, who
        assert not security.get("privileged"), who
        assert security["capabilities"]["drop"] == ["ALL"], who
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, who
        assert not spec.get("hostNetwork") and not spec.get("hostIPC"), who
        assert container["resources"]["requests"] and container["resources"]["limits"]["memory"], who
        if who == "daemon":
            assert set(security["capabilities"]["add"]) <= {"SYS_PTRACE", "DAC_READ_SEARCH", "SYS_ADMIN"}
            assert spec["hostPID"] is True
            assert spec["automountServiceAccountToken"] is False
        else:
            assert "add" not in security["capabilities"] and not spec.get("hostPID"), who
            assert spec["securityContext"]["runAsNonRoot"] is True and spec["securityContext"]["runAsUser"] > 0, who
            assert spec["automountServiceAccountToken"] is (who == "operator")
    for account in rendered[name].all("ServiceAccount"):
        assert account["automountServiceAccountToken"] is False


def test_sys_admin_is_for_entering_namespaces_alone(rendered: dict[str, Rendered]) -> None:
    def added(name: str) -> list[str]:
        (container,) = dict(pod_specs(rendered[name]))["daemon"]["containers"]
        return list(container["securityContext"]["capabilities"]["add"])

    assert "SYS_ADMIN" in added("default")
    assert "SYS_ADMIN" not in added("no-namespace-entry") and "SYS_ADMIN" not in added("no-captures")


@pytest.mark.parametrize("name", COMBINATIONS)
def test_only_the_operator_is_bound_to_the_tested_roles(rendered: dict[str, Rendered], name: str) -> None:
    roles = {(role["kind"], role["metadata"]["name"]) for role in rendered[name].all("ClusterRole")}
    roles |= {(role["kind"], role["metadata"]["name"]) for role in rendered[name].all("Role")}
    known = {
        ("ClusterRole", f"rankscope-{each}") for each in (*CLUSTER_ROLES, *PEOPLES_ROLES, "api", "node-conditions")
    }
    known |= {("Role", f"rankscope-{each}") for each in (*NAMESPACE_ROLES, "certificates")}
    assert roles <= known
    for role in (*rendered[name].all("ClusterRole"), *rendered[name].all("Role")):
        file = (
            ROOT / "deploy/helm/rankscope/files/roles" / f"{role['metadata']['name'].removeprefix('rankscope-')}.yaml"
        )
        assert role["rules"] == yaml.safe_load(file.read_text())["rules"]
        assert "*" not in json.dumps(role["rules"])
    for binding in (*rendered[name].all("ClusterRoleBinding"), *rendered[name].all("RoleBinding")):
        assert (binding["roleRef"]["kind"], binding["roleRef"]["name"]) in roles
        (account,) = {spec["serviceAccountName"] for who, spec in pod_specs(rendered[name]) if who == "operator"}
        assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": NAMESPACE}]


def test_newer_api_servers_skip_the_webhook_for_the_operators_status(
    all_rendered: dict[tuple[str, str], Rendered],
) -> None:
    conditions = {}
    for version in (OLD, NEW):
        made = all_rendered["default", version].one("ValidatingWebhookConfiguration", "rankscope")
        conditions[version] = {webhook["name"]: webhook.get("matchConditions") for webhook in made["webhooks"]}
    operator = f"system:serviceaccount:{NAMESPACE}:rankscope-operator"
    (condition,) = conditions[NEW].pop("status.rankscope.dev")
    assert condition["expression"] == f'request.userInfo.username != "{operator}"'
    assert {*conditions[NEW].values(), *conditions[OLD].values()} == {None}


def test_kinds_webhooks_and_rules_are_those_of_the_code(rendered: dict[str, Rendered]) -> None:
    for kind in KINDS:
        made = rendered["default"].one("CustomResourceDefinition", kind.name)
        assert made["spec"] == definition(kind)["spec"]
        assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    settings = WebhookSettings("0.0.0.0", 9443, namespace=NAMESPACE)
    for wanted in configurations(Address(settings.namespace, settings.service)):
        held = rendered["default"].one(wanted["kind"], settings.configuration)
        # Also that there is no caBundle: what helm does not know it does not take away.
        assert held["webhooks"] == wanted["webhooks"]
        # Else the operator would rewrite all of it, and not only the authority.
        assert not MADE_BY.items() <= held["metadata"]["labels"].items()
    groups = [group for name in ("recording", "alerts") for group in read(ROOT / f"rules/{name}.yaml")["groups"]]
    (made,) = rendered["monitored"].all("PrometheusRule")
    assert [group["name"] for group in made["spec"]["groups"]] == [group["name"] for group in groups]
    rules = [
        (mine, given)
        for group, theirs in zip(made["spec"]["groups"], groups, strict=True)
        for mine, given in zip(group["rules"], theirs["rules"], strict=True)
    ]
    changed = [mine for mine, given in rules if mine["expr"] != given["expr"]]
    assert changed == [{"record": "rankscope:threshold:exposed_communication_ratio", "expr": "vector(0.45)"}]


def test_alerts_link_to_what_has_an_address_only(rendered: dict[str, Rendered]) -> None:
    (linking,) = rendered["monitored"].all("PrometheusRule")
    alerts = [rule["annotations"] for group in linking["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    linked = [each for each in alerts if "var-run=" in each["dashboard_url"]]
    assert linked == [each for each in alerts if "console_url" in each] != []
    assert all(each["console_url"].startswith("https://console.internal/rankscope/?run=") for each in linked)
    assert all(each["dashboard_url"].startswith("https://grafana.internal/d/rankscope-") for each in alerts)
    assert all(re.fullmatch(r"https://wiki.example/runbooks/Rankscope\w+.md", each["runbook_url"]) for each in alerts)
    (unlinked,) = rendered["everything"].all("PrometheusRule")
    assert not re.search("runbook_url|dashboard_url|console_url|://", json.dumps(unlinked["spec"]))


def test_dashboards_are_those_of_the_repository(rendered: dict[str, Rendered]) -> None:
    made = {name: text for each in rendered["monitored"].all("ConfigMap") for name, text in each["data"].items()}
    given = {path.name: json.loads(path.read_text()) for path in (ROOT / "deploy/grafana/json").glob("*.json")}
    assert {name: json.loads(text) for name, text in made.items()} == given


def test_the_operator_finds_daemons_by_their_labels_and_port(
    rendered: dict[str, Rendered],
) -> None:
    template = rendered["default"].one("DaemonSet", "rankscope-daemon")["spec"]["template"]
    status = {"podIP": "10.0.0.7", "phase": "Running"}
    metadata = {**template["metadata"], "name": "d", "namespace": NAMESPACE, "uid": "u", "creationTimestamp": "x"}
    pod = read_daemon_pod({"metadata": metadata, "spec": {**template["spec"], "nodeName": "n"}, "status": status})
    assert pod is not None and pod.address == "10.0.0.7:9465"
    for name in ("default", "sharded"):  # also under another name
        (daemons,) = rendered[name].all("DaemonSet")
        labels = daemons["spec"]["template"]["metadata"]["labels"]
        assert set(SELECTOR.split(",")) <= {f"{key}={value}" for key, value in labels.items()}


def test_scrapes_work_where_nobody_may_keep_labels(rendered: dict[str, Rendered]) -> None:
    (daemons,) = rendered["monitored"].all("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
    (operators,) = rendered["monitored"].all("ServiceMonitor")[0]["spec"]["endpoints"]
    for endpoint in (daemons, operators):
        assert "honorLabels" not in endpoint


def test_rules_know_daemons_under_any_release_name(rendered: dict[str, Rendered]) -> None:
    (daemons,) = rendered["monitored"].all("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
    (operators,) = rendered["monitored"].all("ServiceMonitor")[0]["spec"]["endpoints"]
    named = [each["relabelings"] for each in (daemons, operators)]
    assert named == [[{"targetLabel": "job", "replacement": f"rankscope-{name}"}] for name in ("daemon", "operator")]


def test_names_can_be_overridden_and_everything_still_finds_each_other(rendered: dict[str, Rendered]) -> None:
    found = rendered["sharded"]
    assert found.one("DaemonSet", "ml-profiler-daemon")["spec"]["selector"]["matchLabels"] == {
        "app.kubernetes.io/name": "profiler",
        "app.kubernetes.io/component": "daemon",
    }
    spec = dict(pod_specs(found))["operator"]
    assert {account["metadata"]["name"] for account in found.all("ServiceAccount")} == {
        "ml-profiler-operator",
        "ml-profiler-daemon",
    }
    services = {service["metadata"]["name"] for service in found.all("Service")}
    assert services == {"ml-profiler-operator", "ml-profiler-webhook"}
    # The certificates that the operator issues are for these Services.
    assert {
        f"--api-name=ml-profiler-operator.{NAMESPACE}.svc",
        "--webhook-service=ml-profiler-webhook",
    } <= set(arguments(spec))
    called = {
        webhook["clientConfig"]["service"]["name"]
        for kind in ("MutatingWebhookConfiguration", "ValidatingWebhookConfiguration")
        for webhook in found.one(kind, "rankscope")["webhooks"]
    }
    assert called == {"ml-profiler-webhook"}


def test_monitors_have_the_scrape_settings_of_their_values(rendered: dict[str, Rendered]) -> None:
    metrics = COMBINATIONS["monitored"]["metrics"]
    (daemons,) = rendered["monitored"].all("PodMonitor")[0]["spec"]["podMetricsEndpoints"]
    (operators,) = rendered["monitored"].all("ServiceMonitor")[0]["spec"]["endpoints"]
    for endpoint, values in ((daemons, metrics["podMonitor"]), (operators, metrics["serviceMonitor"])):
        for setting in ("interval", "scrapeTimeout", "metricRelabelings"):
            assert endpoint[setting] == values[setting]


@pytest.mark.parametrize("component", ["daemon", "operator"])
def test_a_pod_has_the_extra_volumes_of_its_values(rendered: dict[str, Rendered], component: str) -> None:
    values = COMBINATIONS["everything"][component]
    spec = dict(pod_specs(rendered["everything"]))[component]
    assert values["extraVolumes"][0] in spec["volumes"]
    assert values["extraVolumeMounts"][0] in spec["containers"][0]["volumeMounts"]


@pytest.mark.parametrize("component", ["daemon", "operator"])
def test_openshifts_constraints_allow_only_what_the_pod_requests(rendered: dict[str, Rendered], component: str) -> None:
    allowed = rendered["everything"].one("SecurityContextConstraints", f"rankscope-{component}")
    spec = dict(pod_specs(rendered["everything"]))[component]
    assert allowed["users"] == [f"system:serviceaccount:{NAMESPACE}:{spec['serviceAccountName']}"]
    security = spec["containers"][0]["securityContext"]
    assert allowed["allowedCapabilities"] == security["capabilities"].get("add", [])
    assert allowed["allowHostPID"] is bool(spec.get("hostPID"))
    assert allowed["allowHostDirVolumePlugin"] is any("hostPath" in volume for volume in spec["volumes"])
    kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
    assert kinds <= set(allowed["volumes"])
    if component == "daemon":
        assert spec["securityContext"]["seLinuxOptions"] == {"type": "spc_t"}
    assert not rendered["default"].all("SecurityContextConstraints")


def read(path: Path) -> Any:
    return yaml.safe_load(path.read_text())
