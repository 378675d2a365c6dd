"""The webhooks behind a real API server: what it sends, what it makes of our answers, and what it does without us."""

from __future__ import annotations

import base64
import http.client
import itertools
import json
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from rankscope.common.http_server import JSON, HttpServer, Request, Response, Route
from rankscope.common.tls import FollowedTls, TlsMaterial
from rankscope.operator.certificates.authority import Lifetimes, authorities, new_authority, signed
from rankscope.operator.certificates.roles import Use
from rankscope.operator.certificates.rotation import OURS, CertificateRotation
from rankscope.operator.kube.api_client import Api
from rankscope.operator.webhooks import configuration
from rankscope.operator.webhooks.admission import INJECT_PATH, REQUESTED_BY
from rankscope.operator.webhooks.configuration import Address, configurations
from rankscope.operator.webhooks.pod_injection import FOLDER, INJECTED, VOLUME
from rankscope.operator.webhooks.webhooks import BODY_BYTES, Webhooks, WebhookSettings
from tests.free_ports import free_port
from tests.kube.accounts import RESEARCHER, wait_until_allowed
from tests.kube.api_server import ApiError, ApiServer, User
from tests.kube.fleet import OPERATOR_NAMESPACE
from tests.kube.operator_process import OperatorProcess
from tests.support.waiting import wait_until

ROOT = "/apis/admissionregistration.k8s.io/v1"
KINDS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
IMAGE = "registry.example/rankscope:1"
MAX_SECONDS = 30  # that an API server may wait for a webhook
LEVEL_1 = {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1"}

Make = Callable[..., Webhooks]


def forget(server: ApiServer, name: str) -> None:
    for kind in KINDS:
        if server.admin.is_served(f"{ROOT}/{kind}/{name}"):
            server.admin.delete(f"{ROOT}/{kind}/{name}")
    # The API server asks for a moment longer: other tests make captures too.
    path = f"{captures('default')}?dryRun=All"
    wait_until(lambda: is_made(server, path, capture(steps=1)))


@contextmanager
def patient_api_server() -> Iterator[None]:
    """Configurations that are made meanwhile have it wait for answers as long as it can: a pod whose review comes late
    is made without us."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("INJECT_SECONDS", "OURS_SECONDS"):
            patch.setattr(configuration, name, MAX_SECONDS)
        yield


def is_made(server: ApiServer, path: str, body: dict[str, Any]) -> bool:
    try:
        server.admin.create(path, body)
    except ApiError:
        return False
    return True


def material() -> TlsMaterial:
    """A certificate of somebody else's authority."""
    now = datetime.now(timezone.utc)
    authority, key = new_authority("test", now, 86400.0)
    return TlsMaterial(*signed(authority, key, "x", ("127.0.0.1",), Use.SERVER, now, 86400.0), authority)


def settings(namespace: str, **changes: Any) -> WebhookSettings:
    port = free_port()
    made = WebhookSettings(
        listen_host="127.0.0.1",
        listen_port=port,
        namespace=namespace,
        url=f"https://127.0.0.1:{port}",
        configuration=f"rankscope-{namespace}",
        probe_image=IMAGE,
        round_seconds=0.2,
        settle_seconds=2.0,
    )
    return replace(made, **changes)


@pytest.fixture
def make(server: ApiServer, api: Api, namespace: str) -> Iterator[Make]:
    made: list[Webhooks] = []

    def start(leads: bool = True, **changes: Any) -> Webhooks:
        webhooks = Webhooks(api, settings(namespace, **changes), lambda: leads)
        made.append(webhooks)
        webhooks.start()
        return webhooks

    with patient_api_server():
        yield start
    for webhooks in made:
        webhooks.stop()  # first, or the leader recreates the configurations
    forget(server, f"rankscope-{namespace}")


@pytest.fixture
def webhooks(server: ApiServer, namespace: str, make: Make) -> Webhooks:
    made = make()
    wait_until_asked(server, namespace)
    return made


_NUMBERS = itertools.count(1)


def pod(label: str | None = None, *containers: dict[str, Any], **spec: Any) -> dict[str, Any]:
    labels = {} if label is None else {"rankscope.dev/inject": label}
    return {
        "metadata": {"name": f"p-{next(_NUMBERS)}", "labels": labels},
        "spec": {"containers": list(containers) or [{"name": "pytorch", "image": "x"}], **spec},
    }


def create(server: ApiServer, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = server.admin.create(f"/api/v1/namespaces/{namespace}/pods", body)
    return made


def capture(**spec: Any) -> dict[str, Any]:
    metadata = {"name": f"c-{next(_NUMBERS)}", "annotations": {REQUESTED_BY: "somebody else"}}
    return {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "Capture",
        "metadata": metadata,
        "spec": {"run": "r", **spec},
    }


def captures(namespace: str) -> str:
    return f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/captures"


def wait_until_asked(server: ApiServer, namespace: str, name: str = "") -> None:
    """By the configurations of this name, as they are now, and as their webhooks are served now."""
    wanted = name or f"rankscope-{namespace}"

    def are_written() -> bool:
        paths = [f"{ROOT}/{kind}/{wanted}" for kind in KINDS]
        every = [server.admin.get(path)["webhooks"][0] for path in paths if server.admin.is_served(path)]
        return len(every) == len(KINDS) and all(webhook["clientConfig"].get("caBundle") for webhook in every)

    wait_until(are_written)
    wait_until_read(server, namespace)
    wait_until(lambda: INJECTED in create(server, namespace, pod("kineto"))["metadata"].get("annotations", {}))


def wait_until_read(server: ApiServer, namespace: str) -> None:
    """The API server hears of configurations a moment after they were written, one after the other: when it follows
    the one that is written here, by which it refuses something, it has read all before it."""
    path = f"/api/v1/namespaces/{namespace}/configmaps?dryRun=All"
    for kind in KINDS:
        name = f"last-{next(_NUMBERS)}"
        rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["configmaps"]}
        webhook = {
            "name": f"{name}.example.com",
            "admissionReviewVersions": ["v1"],
            "clientConfig": {"url": "https://127.0.0.1:1/"},  # where no server listens
            "rules": [{**rule, "scope": "Namespaced"}],
            "objectSelector": {"matchLabels": {"refused-by": name}},
            "sideEffects": "None",
            "failurePolicy": "Fail",
        }
        server.admin.create(f"{ROOT}/{kind}", {"metadata": {"name": name}, "webhooks": [webhook]})
        body = {"metadata": {"name": name, "labels": {"refused-by": name}}}
        wait_until(lambda body=body: not is_made(server, path, body))
        server.admin.delete(f"{ROOT}/{kind}/{name}")


def env(made: dict[str, Any], index: int = 0) -> dict[str, Any]:
    return {item["name"]: item.get("value") for item in made["spec"]["containers"][index].get("env", ())}


def test_an_opted_in_pod_is_injected_and_keeps_its_settings(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    bare = create(server, namespace, pod("probe"))
    assert env(bare) == {**LEVEL_1, "PYTHONPATH": FOLDER}
    (init,) = bare["spec"]["initContainers"]
    assert (init["name"], init["image"], "resources" in init) == (VOLUME, IMAGE, True)
    assert {volume["name"] for volume in bare["spec"]["volumes"]} == {VOLUME}
    assert bare["status"]["qosClass"] == "BestEffort"

    amounts = {"cpu": "2", "memory": "1Gi"}
    trains = {
        "name": "pytorch",
        "image": "x",
        "env": [{"name": "TEARDOWN_CUPTI", "value": "0"}, {"name": "PYTHONPATH", "value": "/src"}],
        "resources": {"limits": amounts},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
    }
    sidecar = {"name": "logs", "image": "y", "resources": {"limits": amounts}}
    first = {"name": "download", "image": "z", "resources": {"limits": amounts}}
    body = pod("true", trains, sidecar, initContainers=[first], volumes=[{"name": "data", "emptyDir": {}}])
    body["metadata"]["annotations"] = {"rankscope.dev/inject-containers": "pytorch", "theirs": "kept"}
    full = create(server, namespace, body)
    assert env(full) == {"TEARDOWN_CUPTI": "0", "PYTHONPATH": f"{FOLDER}:/src", "KINETO_USE_DAEMON": "1"}
    assert env(full, 1) == {}
    assert [container["name"] for container in full["spec"]["initContainers"]] == ["download", VOLUME]
    assert [mount["name"] for mount in full["spec"]["containers"][0]["volumeMounts"]] == ["data", VOLUME]
    assert full["metadata"]["annotations"] == {**body["metadata"]["annotations"], INJECTED: "probe=pytorch"}
    assert full["status"]["qosClass"] == "Guaranteed"

    plain = create(server, namespace, pod())
    assert env(plain) == {}


def test_a_namespace_opts_in_its_pods_unless_they_decline(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    other = f"{namespace}-labelled"
    server.admin.create(
        "/api/v1/namespaces", {"metadata": {"name": other, "labels": {"rankscope.dev/inject": "kineto"}}}
    )
    wait_until(lambda: env(create(server, other, pod())) == LEVEL_1)
    assert env(create(server, other, pod("false"))) == {}
    assert "PYTHONPATH" in env(create(server, other, pod("probe")))  # the pod's word counts
    assert env(create(server, namespace, pod("yes, please".replace(", ", "-")))) == {}


def test_an_invalid_pod_is_refused_for_its_own_fault(server: ApiServer, namespace: str, webhooks: Webhooks) -> None:
    for containers in ([], [{"name": "a"}], [{"name": "a", "image": "x"}, {"name": "a", "image": "x"}]):
        body = pod("probe")
        body["spec"]["containers"] = containers
        with pytest.raises(ApiError, match=r"spec\.containers") as refused:
            create(server, namespace, body)
        assert refused.value.status == 422
        assert "rankscope" not in refused.value.body.replace("rankscope-probe", "")


def test_reinvocation_after_another_webhook_adds_nothing_twice(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    """It brings a sidecar, as a service mesh does: that one is a container of the pod like any other."""
    operation = {"op": "add", "path": "/spec/containers/-", "value": {"name": "mesh", "image": "m"}}

    def respond(received: Request) -> Response:
        request = json.loads(received.body)["request"]
        has_it = any(container["name"] == "mesh" for container in request["object"]["spec"]["containers"])
        response: dict[str, Any] = {"uid": request["uid"], "allowed": True}
        if not has_it:
            response |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps([operation]).encode()).decode()}
        answer = {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": response}
        return Response(200, json.dumps(answer).encode(), JSON)

    kept = material()
    routes = {("POST", INJECT_PATH): Route(respond, BODY_BYTES)}
    mesh = HttpServer("127.0.0.1", 0, routes, FollowedTls(lambda: replace(kept, authorities=b"")))
    mesh.start()
    mutating = configurations(Address(url=f"https://127.0.0.1:{mesh.port}"), "z-mesh")[0]
    webhook = {**mutating["webhooks"][0], "name": "mesh.example.com"}
    webhook["clientConfig"] |= {"caBundle": base64.b64encode(kept.authorities).decode()}
    server.admin.create(f"{ROOT}/{KINDS[0]}", {**mutating, "webhooks": [webhook]})  # after ours by its name
    try:
        wait_until_read(server, namespace)
        made = create(server, namespace, pod("probe"))
    finally:
        forget(server, "z-mesh")
        mesh.stop()
    for index in (0, 1):
        assert env(made, index) == {**LEVEL_1, "PYTHONPATH": FOLDER}
        names = [item["name"] for item in made["spec"]["containers"][index]["env"]]
        assert len(names) == len(set(names)) == 3
    assert len(made["spec"]["initContainers"]) == len(made["spec"]["volumes"]) == 1
    assert made["metadata"]["annotations"][INJECTED] == "kineto=pytorch,mesh probe=pytorch,mesh"


def test_without_the_webhook_pods_pass_unchanged_and_captures_fail(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    server.admin.create(captures(namespace), capture(steps=1))
    webhooks.stop()
    assert env(create(server, namespace, pod("probe"))) == {}
    with pytest.raises(ApiError, match="failed calling webhook") as refused:
        server.admin.create(captures(namespace), capture(steps=1))
    assert refused.value.status == 500


def test_a_capture_names_its_requester_and_keeps_its_spec(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    # Not by the administrator, as whom the webhooks run here: the operator may speak for others.
    made = server.user(RESEARCHER).create(captures(namespace), capture(steps=3))
    assert made["metadata"]["annotations"][REQUESTED_BY] == RESEARCHER
    path = f"{captures(namespace)}/{made['metadata']['name']}"
    forged = server.admin.merge(path, {"metadata": {"annotations": {REQUESTED_BY: "root", "note": "x"}}})
    assert forged["metadata"]["annotations"] == {REQUESTED_BY: RESEARCHER, "note": "x"}
    with pytest.raises(ApiError, match="make another"):
        server.admin.merge(path, {"spec": {"steps": 9}})
    server.admin.merge(f"{path}/status", {"status": {"phase": "Running"}})
    server.admin.merge(path, {"metadata": {"finalizers": ["rankscope.dev/capture"]}})
    server.admin.delete(path)
    server.admin.merge(path, {"metadata": {"finalizers": None}})
    assert not server.admin.is_served(path)
    with pytest.raises(ApiError, match="exclude each other"):
        server.admin.create(captures(namespace), capture(steps=1, seconds=2.0))


def test_only_the_operator_writes_status_and_nobody_in_its_absence(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    role = {"metadata": {"name": "all"}, "rules": [{"apiGroups": ["*"], "resources": ["*"], "verbs": ["*"]}]}
    rbac = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}"
    server.admin.create(f"{rbac}/roles", role)
    reference = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "all"}
    subject = {"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": RESEARCHER}
    binding = {"metadata": {"name": "all"}, "roleRef": reference, "subjects": [subject]}
    server.admin.create(f"{rbac}/rolebindings", binding)
    ours = {"apiGroups": ["rankscope.dev"], "resources": ["*"], "verbs": ["*"]}
    wait_until_allowed(server, RESEARCHER, [ours], namespace)
    user = server.user(RESEARCHER)
    body = {"apiVersion": "rankscope.dev/v1alpha1", "metadata": {"name": "x"}}
    specs = {
        ("captures", "Capture"): ({"run": "r", "steps": 1}, {"phase": "Running"}),
        ("trainingruns", "TrainingRun"): ({"workload": {"kind": "Job", "name": "x"}}, {"phase": "Running"}),
        ("profilingpolicies", "ProfilingPolicy"): ({}, {"runs": 7}),
    }
    paths = {}
    for (plural, kind), (spec, status) in specs.items():
        collection = f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/{plural}"
        user.create(collection, {**body, "kind": kind, "spec": spec})
        paths[f"{collection}/x"] = status
    for path, status in paths.items():
        with pytest.raises(ApiError, match="is written by the operator"):
            user.merge(f"{path}/status", {"status": status})
        # As the administrator, who is the operator here.
        assert status.items() <= server.admin.merge(f"{path}/status", {"status": status})["status"].items()
    path = next(iter(paths))
    user.merge(path, {"metadata": {"annotations": {"note": "x"}}})
    webhooks.stop()
    for changed in ("/status", ""):
        forged = {"status": {"phase": "Succeeded"}, "metadata": {"annotations": {REQUESTED_BY: "root"}}}
        with pytest.raises(ApiError, match="failed calling webhook"):
            user.merge(f"{path}{changed}", forged)
    user.delete(path)
    assert not server.admin.is_served(path)


def test_with_a_caller_authority_only_the_api_server_is_answered(server: ApiServer, namespace: str, make: Make) -> None:
    webhooks = make(client_authority=server.webhook_clients)
    wait_until_asked(server, namespace)
    held = webhooks.certificates.client("rankscope-webhook")()
    assert held is not None
    trusting = ssl.create_default_context(cadata=held.authorities.decode())
    for path in webhooks.admission.paths:
        caller = http.client.HTTPSConnection("127.0.0.1", webhooks.server.port, timeout=30, context=trusting)
        caller.request("POST", path, b"{}")
        assert caller.getresponse().status == 403
        caller.close()
    assert env(create(server, namespace, pod("kineto"))) == LEVEL_1


def test_a_policy_without_sense_is_refused_in_words(server: ApiServer, namespace: str, webhooks: Webhooks) -> None:
    path = f"/apis/rankscope.dev/v1alpha1/namespaces/{namespace}/profilingpolicies"
    body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "ProfilingPolicy", "metadata": {"name": "p"}}
    with pytest.raises(ApiError, match="healthy is no reason"):
        server.admin.create(path, {**body, "spec": {"automaticCaptures": {"on": ["healthy"]}}})
    server.admin.create(path, {**body, "spec": {"automaticCaptures": {"on": ["slow_rank"]}}})


def test_a_new_authority_is_adopted_without_failing_requests(
    server: ApiServer, namespace: str, webhooks: Webhooks
) -> None:
    # A new connection for every request: each meets the certificate of its moment.
    webhooks.server.limits = replace(webhooks.server.limits, idle_seconds=0.0)
    rotation = webhooks.certificates
    assert isinstance(rotation, CertificateRotation)
    path = f"/api/v1/namespaces/{namespace}/secrets/rankscope-webhook"

    def kept() -> dict[str, bytes]:
        return {key: base64.b64decode(value) for key, value in server.admin.get(path)["data"].items()}

    before = kept()
    stopping = threading.Event()
    failures: list[object] = []
    counted = [0, 0]

    def go_on() -> None:
        while not stopping.is_set():
            try:
                made = create(server, namespace, pod("kineto"))
                if env(made) != LEVEL_1:
                    failures.append(made)
                server.admin.create(captures(namespace), capture(steps=1))
            except (ApiError, OSError) as error:
                failures.append(error)
            counted[served()] += 1

    def served() -> int:
        held = rotation.server("rankscope-webhook")()
        return int(held is not None and held.certificate != before["tls.crt"])

    asking = threading.Thread(target=go_on)
    asking.start()
    try:
        wait_until(lambda: counted[0] > 3 or failures)
        # Whatever there is now has less than a third of these left: the authority is due. Nothing that it signs is
        # served before the API server trusts it.
        lifetimes = Lifetimes(authority_seconds=5 * 365 * 86400.0)
        rotation.settings = replace(rotation.settings, lifetimes=lifetimes, settle_seconds=float("inf"))
        wait_until(lambda: len(authorities(kept()["ca.crt"])) == 2)
        during = kept()
        bundle = base64.b64encode(during["ca.crt"]).decode()
        wait_until(lambda: bundles(server, namespace) == {bundle})
        wait_until_read(server, namespace)
        rotation.settings = replace(rotation.settings, settle_seconds=0.0)
        assert authorities(during["ca.crt"])[1] == authorities(before["ca.crt"])[0]
        wait_until(lambda: (served() and counted[1] > 5) or failures)
    finally:
        stopping.set()
        asking.join(60)
    assert failures == []
    after = kept()
    assert after["ca.crt"] == during["ca.crt"]
    # And by the new authority alone.
    newest = ssl.create_default_context(cadata=authorities(after["ca.crt"])[0].decode())
    assert ssl.get_server_certificate(("127.0.0.1", webhooks.server.port)).encode() == after["tls.crt"]
    with socket.create_connection(("127.0.0.1", webhooks.server.port), timeout=30) as held:
        newest.wrap_socket(held, server_hostname="127.0.0.1").close()


def bundles(server: ApiServer, namespace: str) -> set[str]:
    found = [server.admin.get(f"{ROOT}/{kind}/rankscope-{namespace}")["webhooks"] for kind in KINDS]
    return {webhook["clientConfig"]["caBundle"] for webhooks in found for webhook in webhooks}


def test_replicas_that_do_not_lead_serve_what_the_leader_made(namespace: str, make: Make) -> None:
    follower = make(leads=False)
    port = free_port()
    leader = make(listen_port=port)
    wait_until(lambda: follower.is_serving and leader.is_serving)
    seen = {ssl.get_server_certificate(("127.0.0.1", one.server.port)) for one in (follower, leader)}
    assert len(seen) == 1


def test_files_that_somebody_else_renews_are_taken_up(
    server: ApiServer, namespace: str, make: Make, tmp_path: Path
) -> None:
    def write() -> None:
        kept = material()
        for name, content in (("ca.crt", kept.authorities), ("tls.key", kept.key), ("tls.crt", kept.certificate)):
            (tmp_path / f"{name}.new").write_bytes(content)
            (tmp_path / f"{name}.new").replace(tmp_path / name)

    write()
    files = {"certificate": tmp_path / "tls.crt", "key": tmp_path / "tls.key", "authority": tmp_path / "ca.crt"}
    webhooks = make(**files)
    wait_until_asked(server, namespace)
    assert not server.admin.is_served(f"/api/v1/namespaces/{namespace}/secrets/rankscope-webhook")
    write()
    certificate = (tmp_path / "tls.crt").read_text()
    wait_until(lambda: ssl.get_server_certificate(("127.0.0.1", webhooks.server.port)) == certificate)
    wait_until_asked(server, namespace)


def test_a_charts_configuration_keeps_its_rules_and_gets_the_authority(
    server: ApiServer, namespace: str, make: Make
) -> None:
    wanted = settings(namespace)
    for kind, document in zip(KINDS, configurations(Address(url=wanted.url), wanted.configuration), strict=True):
        document["metadata"]["labels"] = {"app.kubernetes.io/managed-by": "Helm"}
        document["webhooks"] = document["webhooks"][:1]
        document["webhooks"][0]["timeoutSeconds"] = 7
        document["webhooks"].append({**document["webhooks"][0], "name": "other.example.com", "failurePolicy": "Ignore"})
        server.admin.create(f"{ROOT}/{kind}", document)
    make(listen_port=wanted.listen_port, url=wanted.url)
    wait_until_asked(server, namespace)
    for kind in KINDS:
        ours, other = server.admin.get(f"{ROOT}/{kind}/{wanted.configuration}")["webhooks"]
        assert ours["timeoutSeconds"] == 7
        assert ours["clientConfig"]["caBundle"]
        assert "caBundle" not in other["clientConfig"]


def test_somebody_elses_secret_of_that_name_is_not_overwritten(
    server: ApiServer, api: Api, namespace: str, make: Make
) -> None:
    path = f"/api/v1/namespaces/{namespace}/secrets"
    server.admin.create(path, {"metadata": {"name": "rankscope-webhook"}, "stringData": {"theirs": "x"}})
    webhooks = Webhooks(api, settings(namespace), lambda: True)
    webhooks.certificates.round()
    assert not webhooks.is_serving
    assert server.admin.get(f"{path}/rankscope-webhook")["data"].keys() == {"theirs"}
    webhooks.server.stop()


def test_the_operator_serves_webhooks_with_only_its_accounts_roles(
    server: ApiServer, namespace: str, operator_user: User, tmp_path: Path
) -> None:
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    operator = OperatorProcess(
        operator_user,
        tmp_path,
        flags=("--webhook-listen", f"127.0.0.1:{port}", "--webhook-url", url, "--probe-image", IMAGE),
    )
    with patient_api_server():
        made = configurations(Address(url=url))
    for kind, document in zip(KINDS, made, strict=True):
        del document["metadata"]["labels"]  # as the chart has them: the operator may not make any
        server.admin.create(f"{ROOT}/{kind}", document)
    secret = {"metadata": {"name": "rankscope-webhook", "labels": OURS}}  # as the chart has it: empty
    server.admin.create(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets", secret)
    try:
        operator.start()
        wait_until_asked(server, namespace, "rankscope")
        assert create(server, namespace, pod("probe"))["spec"]["initContainers"][0]["image"] == IMAGE
        told = operator.get("/metrics")
        assert 'rankscope_operator_reviews_total{result="changed",webhook="inject"}' in told
        assert "rankscope_operator_certificate_expiry_timestamp_seconds" in told
        with pytest.raises(ApiError) as refused:
            operator_user.create(f"{ROOT}/{KINDS[0]}", {"metadata": {"name": "x"}})
        assert refused.value.status == 403
        secrets = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets"
        for method, path in (("GET", f"{secrets}/another"), ("GET", secrets), ("POST", secrets)):
            with pytest.raises(ApiError) as refused:
                operator_user.request(method, path, {"metadata": {"name": "x"}} if method == "POST" else None)
            assert refused.value.status == 403
    finally:
        operator.stop()
        forget(server, "rankscope")
        server.admin.delete(f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets/rankscope-webhook")
