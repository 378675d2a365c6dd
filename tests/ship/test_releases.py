"""A release from its first day to its last on a real API server, with the real operator and a real daemon running as
installed: the rendered arguments, the service account's own token, and the certificates from the release's Secrets."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube.api_server import ApiError, ApiServer, User
from tests.kube.fleet import make_pod
from tests.ship import cluster
from tests.ship.combinations import COMBINATIONS
from tests.ship.helm import CHART, Helm
from tests.ship.pod_running import PodProcess, ServiceProxy, with_token
from tests.support.waiting import wait_until

# Neither is the chart's name: nothing may depend on it.
RELEASE, NAMESPACE = "fleet", "profiling"
TEAM = "team"
CAPTURES = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/captures.rankscope.dev"
WEBHOOKS = "/apis/admissionregistration.k8s.io/v1"
HOLDS = "rankscope_operator_shards_held 1.0"

Document = dict[str, Any]

# Many calls of helm, each by an emulator.


@dataclass
class Life:
    """What was seen on the way."""

    server: ApiServer
    helm: Helm
    before: set[str] = field(default_factory=set)
    kept: dict[str, dict[str, str]] = field(default_factory=dict)  # certificates after install, upgrade, rollback
    schemas: dict[str, Document] = field(default_factory=dict)  # of captures
    objects: dict[str, set[str]] = field(default_factory=dict)
    notes: str = ""  # what an install prints
    ready: str = ""
    metrics: str = ""
    capture: Document = field(default_factory=dict)
    injected: Document = field(default_factory=dict)
    run: Document = field(default_factory=dict)
    operator_log: str = ""
    tested: str = ""

    def note(self, when: str) -> None:
        admin = self.server.admin
        secrets = admin.get(f"/api/v1/namespaces/{NAMESPACE}/secrets")["items"]
        ours = [each for each in secrets if not each["metadata"]["name"].startswith("sh.helm.")]
        bundles = {
            f"{kind} {webhook['name']}": webhook["clientConfig"].get("caBundle", "")
            for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
            for webhook in admin.get(f"{WEBHOOKS}/{kind}/rankscope")["webhooks"]
        }
        self.kept[when] = {each["metadata"]["name"]: str(each.get("data")) for each in ours} | bundles
        self.schemas[when] = admin.get(CAPTURES)["spec"]["versions"][0]["schema"]
        self.objects[when] = cluster.everything(admin)


def previous_chart(folder: Path) -> Path:
    """As an older version may have been: of another number, and its Captures had no deleteArtifacts."""
    copy = folder / "rankscope-previous"
    shutil.copytree(CHART, copy)
    about = copy / "Chart.yaml"
    about.write_text(re.sub("(?m)^version: .*", "version: 0.0.9", about.read_text()))
    definition = copy / "files" / "crds" / "captures.yaml"
    document = yaml.safe_load(definition.read_text())
    del spec_of(document["spec"]["versions"][0]["schema"])["deleteArtifacts"]
    definition.write_text(yaml.safe_dump(document))
    return copy


def spec_of(schema: Document) -> Document:
    properties: Document = schema["openAPIV3Schema"]["properties"]["spec"]["properties"]
    return properties


def account(server: ApiServer, name: str) -> User:
    """The service account with a token as its pod would have it."""
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    answer = server.admin.create(path, {"spec": {"audiences": [], "expirationSeconds": 3600}})
    return User(server, name, answer["status"]["token"])


@pytest.fixture(scope="module")
def life(server: ApiServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    for name in (NAMESPACE, TEAM):
        server.admin.create("/api/v1/namespaces", {"metadata": {"name": name}})
    folder = tmp_path_factory.mktemp("life")
    helm = Helm(folder, server.admin.kubeconfig(folder / "kubeconfig"))
    life = Life(server, helm)
    life.before = cluster.everything(server.admin)
    release = (RELEASE, "--namespace", NAMESPACE)
    # What is installed is what was checked: the API server's own schemas do not tell what is superfluous.
    life.notes = helm.run(
        *("install", release[0], str(previous_chart(folder)), *release[1:]), "--disable-openapi-validation"
    )
    with_everything = helm.values_file("everything", COMBINATIONS["everything"])
    with Running(life, folder) as running:
        running.work()
        life.note("install")
        # It would write again what helm took away, and nobody would see.
        running.operator.signal(signal.SIGSTOP)
        helm.run(
            *("upgrade", release[0], str(CHART), *release[1:], "--values", with_everything),
            "--disable-openapi-validation",
        )
        life.note("upgrade")
        helm.run("rollback", RELEASE, "1", *release[1:])
        life.note("rollback")
        running.operator.signal(signal.SIGCONT)
        life.operator_log = running.operator.log
        # The operator goes on for a while: pods end after their Deployment is gone, and their rights with it.
        helm.run("uninstall", *release)
    cluster.collect_garbage(server.admin)
    life.objects["uninstall"] = cluster.everything(server.admin)
    yield life
    for kind in ("captures", "profilingpolicies", "trainingruns"):
        path = CAPTURES.replace("captures", kind)
        server.admin.delete(path)
        wait_until(lambda path=path: not server.admin.is_served(path))


class Running:
    """The operator and one node's daemon of a release, and what they are asked to do."""

    def __init__(self, life: Life, folder: Path) -> None:
        self._life = life
        self._admin = life.server.admin
        self._folder = folder
        prefix = life.server.services.rpartition(".")[0]  # 127.x.0
        network = prefix.rpartition(".")[0]
        self.operator = self._pod("deployments/rankscope-operator", f"{network}.1.1", POD_NAME="rankscope-operator-0")
        self.daemon = self._pod(
            "daemonsets/rankscope-daemon", f"{network}.1.2", NODE_NAME="node-a", HOST_IP=f"{network}.1.3"
        )
        self._proxy: ServiceProxy | None = None

    def _pod(self, path: str, address: str, **environment: str) -> PodProcess:
        document = self._admin.get(f"/apis/apps/v1/namespaces/{NAMESPACE}/{path}")
        name = path.partition("/")[2]
        return PodProcess(
            self._admin, NAMESPACE, document["spec"]["template"], address, self._folder / name, environment
        )

    def __enter__(self) -> Running:
        user = account(self._life.server, self.operator.template["spec"]["serviceAccountName"])
        wrapper, environment = with_token(self._folder / "token", user)
        self.operator.start(*wrapper, environment=environment)
        self._proxy = ServiceProxy(self._admin, NAMESPACE, [self.operator])
        self._wait(lambda: self._answer("/readyz"), self.operator)
        secret = f"/api/v1/namespaces/{NAMESPACE}/secrets/rankscope-daemon-tls"
        self._wait(lambda: self._admin.get(secret).get("data"), self.operator)
        # The processes of this machine are out of its sight, as those of other nodes are.
        self.daemon.start("unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
        make_pod(
            self._life.server,
            NAMESPACE,
            "rankscope-daemon-x",
            "node-a",
            self.daemon.template["metadata"]["labels"],
            ports=self.daemon.container["ports"],
            address=self.daemon.address,
        )
        return self

    def __exit__(self, *_: object) -> None:
        self.operator.stop()
        self.daemon.stop()
        if self._proxy is not None:
            self._proxy.stop()

    def work(self) -> None:
        life, admin = self._life, self._admin
        connected = "rankscope_operator_daemons_connected 1.0"

        def hears_its_daemon() -> bool:
            life.ready, life.metrics = self._answer("/readyz"), self._answer("/metrics")
            # A lease that is renewed late is not held for a moment.
            return connected in life.metrics and HOLDS in life.metrics and life.ready != ""

        self._wait(hears_its_daemon, self.daemon)
        make_pod(life.server, TEAM, "llama-0", "node-a", {"rankscope.dev/run": "llama"})
        runs = f"/apis/rankscope.dev/v1alpha1/namespaces/{TEAM}/trainingruns"
        self._wait(lambda: admin.get(runs)["items"], self.operator)
        (life.run,) = admin.get(runs)["items"]
        webhook = f"{WEBHOOKS}/validatingwebhookconfigurations/rankscope"
        self._wait(
            lambda: all(each["clientConfig"].get("caBundle") for each in admin.get(webhook)["webhooks"]), self.operator
        )
        pods = f"/api/v1/namespaces/{TEAM}/pods?dryRun=All"
        labels = {"rankscope.dev/inject": "kineto"}
        container = {"name": "pytorch", "image": "registry.example/train:1"}
        pod = {"metadata": {"name": "llama-1", "labels": labels}, "spec": {"containers": [container]}}

        # The API server hears of the authority a moment after it was written, and makes pods without us where our
        # answer is late.
        def is_injected() -> bool:
            life.injected = admin.create(pods, pod)
            return "env" in life.injected["spec"]["containers"][0]

        self._wait(is_injected, self.operator)
        capture = {
            "apiVersion": "rankscope.dev/v1alpha1",
            "kind": "Capture",
            "metadata": {"name": "why-slow"},
            "spec": {"run": life.run["metadata"]["name"], "ranks": "all", "steps": 3},
        }
        captures = f"/apis/rankscope.dev/v1alpha1/namespaces/{TEAM}/captures?dryRun=All"

        def is_admitted() -> bool:
            try:
                life.capture = admin.create(captures, capture)
            except ApiError as error:
                assert error.status == 500, error  # our answer was late, or is not trusted yet
                return False
            return True

        self._wait(is_admitted, self.operator)

        life.tested = self._tested()

    def _tested(self) -> str:
        """`helm test`, where this is the kubelet that runs its pod."""
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/rankscope-test"
        with ThreadPoolExecutor(1) as pool:
            asked = pool.submit(self._life.helm.run, "test", RELEASE, "--namespace", NAMESPACE, "--timeout", "4m")
            self._wait(lambda: asked.done() or self._admin.is_served(path), self.operator)
            (container,) = self._admin.get(path)["spec"]["containers"]
            assert container["command"] == ["python3", "-c"]
            program = container["args"][0].replace(f"rankscope-operator.{NAMESPACE}.svc", self._service_address)
            done = subprocess.run([sys.executable, "-c", program], check=False, timeout=120)
            phase = "Succeeded" if done.returncode == 0 else "Failed"
            self._admin.merge(f"{path}/status", {"status": {"phase": phase}})
            return asked.result()

    @property
    def _service_address(self) -> str:
        service = self._admin.get(f"/api/v1/namespaces/{NAMESPACE}/services/rankscope-operator")
        return str(service["spec"]["clusterIP"])

    def _answer(self, path: str) -> str:
        """By the Service, as Prometheus would ask."""
        try:
            url = f"http://{self._service_address}:9466{path}"
            with urllib.request.urlopen(url, timeout=20) as answer:
                return str(answer.read().decode())
        except (urllib.error.URLError, OSError):
            return ""

    def _wait(self, condition: Any, process: PodProcess) -> None:
        def is_met() -> object:
            assert process.process is not None and process.process.poll() is None, logs()
            return condition()

        def logs() -> str:
            return f"operator:\n{self.operator.log}\ndaemon:\n{self.daemon.log}"

        wait_until(is_met, logs)


def test_the_installed_operator_is_ready_and_hears_the_installed_daemon(life: Life) -> None:
    assert life.ready == "ok\n"
    assert HOLDS in life.metrics
    assert life.run["spec"]["workload"]["name"] == "llama"


def test_an_install_says_what_the_daemons_namespace_has_to_allow(life: Life) -> None:
    assert f"kubectl label namespace {NAMESPACE} pod-security.kubernetes.io/enforce=privileged" in life.notes


def test_helm_test_asks_the_operator_and_is_content(life: Life) -> None:
    assert re.search(r"Phase:\s+Succeeded", life.tested), life.tested


def test_the_roles_that_are_installed_suffice(life: Life) -> None:
    assert "answered 403" not in life.operator_log, life.operator_log
    assert "Traceback" not in life.operator_log, life.operator_log


def test_the_webhooks_that_are_installed_are_reached_by_their_service(life: Life) -> None:
    (container,) = life.injected["spec"]["containers"]
    assert {"name": "KINETO_USE_DAEMON", "value": "1"} in container["env"]
    assert life.capture["metadata"]["annotations"]["rankscope.dev/requested-by"] == "admin"


@pytest.mark.parametrize("when", ["upgrade", "rollback"])
def test_certificates_and_what_the_api_server_trusts_outlive(life: Life, when: str) -> None:
    assert all(value not in ("", "None") for value in life.kept["install"].values()), life.kept["install"]
    assert {name: life.kept[when].get(name) for name in life.kept["install"]} == life.kept["install"]


def test_an_upgrade_brings_new_kinds_and_a_rollback_old_ones(life: Life) -> None:
    assert "deleteArtifacts" not in spec_of(life.schemas["install"])
    assert "deleteArtifacts" in spec_of(life.schemas["upgrade"])
    assert "deleteArtifacts" not in spec_of(life.schemas["rollback"])
    assert f"PodMonitor {NAMESPACE}/rankscope-daemon" in life.objects["upgrade"]
    assert f"PodMonitor {NAMESPACE}/rankscope-daemon" not in life.objects["rollback"]


def test_uninstalling_leaves_nothing_behind_but_kinds_with_their_objects(life: Life) -> None:
    left = life.objects["uninstall"] - life.before
    of_the_test = {f"Pod {NAMESPACE}/rankscope-daemon-x", f"Pod {TEAM}/llama-0"}
    assert left - of_the_test == {
        "CustomResourceDefinition /captures.rankscope.dev",
        "CustomResourceDefinition /profilingpolicies.rankscope.dev",
        "CustomResourceDefinition /trainingruns.rankscope.dev",
        f"TrainingRun {TEAM}/{life.run['metadata']['name']}",
    }
    assert not life.before - life.objects["uninstall"]


def test_it_can_be_reinstalled_over_kept_kinds_and_objects(life: Life) -> None:
    values = life.helm.values_file("cert-manager", COMBINATIONS["cert-manager"])
    release = (RELEASE, "--namespace", NAMESPACE)
    life.helm.run("install", RELEASE, str(CHART), *release[1:], "--values", values, "--disable-openapi-validation")
    installed = cluster.everything(life.server.admin)
    assert f"Certificate {NAMESPACE}/rankscope-daemon-tls" in installed
    assert f"TrainingRun {TEAM}/{life.run['metadata']['name']}" in installed
    life.helm.run("uninstall", *release)
    assert cluster.everything(life.server.admin) == life.objects["uninstall"]
