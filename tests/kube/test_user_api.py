"""The API for people: real tokens of a real API server, its reviews of them, and what becomes of a capture that
somebody asks for with one. The operator is a process of its own, with the chart's roles; the daemon is scripted."""

from __future__ import annotations

import base64
import http.client
import json
import os
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import grpc
import pytest
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from rankscope.analysis.profiles.pprof import read_pprof
from rankscope.operator.certificates.rotation import OURS
from rankscope.operator.webhooks.configuration import Address, configurations
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from rankscope.v1.profile_service_pb2 import (
    CompareProfilesRequest,
    DumpStacksRequest,
    ProfileSelection,
    QueryProfileRequest,
)
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub
from tests.certificates import Authority
from tests.free_ports import free_port
from tests.kube.accounts import granted
from tests.kube.api_server import ApiError, ApiServer, User
from tests.kube.fleet import MAIN, OPERATOR_NAMESPACE
from tests.kube.operator_process import OperatorProcess
from tests.kube.scripted_daemon import PROFILE_SAMPLES, ScriptedDaemon, trace_of
from tests.kube.scripted_run import BASE, ScriptedRun
from tests.kube.test_webhooks import KINDS, ROOT, forget, patient_api_server
from tests.support.waiting import wait_until

NAME = "rankscope-api.rankscope.svc"
TEAM, OTHERS = "people-team", "people-others"
ISSUER = "https://kubernetes.default.svc"
CALL_SECONDS = 180.0
SECRETS = f"/api/v1/namespaces/{OPERATOR_NAMESPACE}/secrets"
Code = grpc.StatusCode


@dataclass
class Place:
    server: ApiServer
    operator: OperatorProcess
    authority: Path
    address: str
    audit: Path
    run: ScriptedRun
    secret: ScriptedRun  # of the other namespace
    capture: subprocess.Popen[str]  # ada's, by the command line, begun before the tests
    traces: Path
    webhook_url: str

    def calls(self, token: str | None) -> CaptureServiceStub:
        return CaptureServiceStub(self.channel(token))

    def channel(self, token: str | None) -> grpc.Channel:
        credentials = grpc.ssl_channel_credentials(self.authority.read_bytes())
        if token is not None:
            call = grpc.access_token_call_credentials(token)
            credentials = grpc.composite_channel_credentials(credentials, call)
        options = [("grpc.ssl_target_name_override", NAME), ("grpc.use_local_subchannel_pool", 1)]
        return grpc.secure_channel(self.address, credentials, options)

    def refusal(self, token: str | None, namespace: str = TEAM) -> tuple[grpc.StatusCode, str]:
        """Of a capture that is asked for."""
        run = self.run if namespace == TEAM else self.secret
        request = pb.StartCaptureRequest(job=f"{namespace}/{run.object_name}", ranks="0", steps=3)
        return refused(lambda: list(self.calls(token).StartCapture(request, timeout=CALL_SECONDS)))

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.audit.read_text().splitlines()]


def refused(call: Callable[[], object]) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError) as error:
        call()
    return error.value.code(), error.value.details()


def about(calls: CaptureServiceStub, identity: str) -> list[Callable[[], object]]:
    """All that can be asked about a capture, and lists that it would be in."""
    limit = {"timeout": CALL_SECONDS}
    return [
        lambda: calls.GetCapture(pb.GetCaptureRequest(id=identity), **limit),
        lambda: calls.CancelCapture(pb.CancelCaptureRequest(id=identity), **limit),
        lambda: calls.DeleteCapture(pb.DeleteCaptureRequest(id=identity), **limit),
        lambda: list(calls.DownloadArtifact(pb.DownloadArtifactRequest(id=identity), **limit)),
        lambda: calls.ListCaptures(pb.ListCapturesRequest(job=f"{identity.partition('/')[0]}/"), **limit),
        lambda: calls.ListCaptures(pb.ListCapturesRequest(), **limit),
    ]


def account(server: ApiServer, namespace: str, name: str, *roles: str) -> str:
    """A ServiceAccount with these ClusterRoles in its namespace; its user name."""
    server.admin.create(f"/api/v1/namespaces/{namespace}/serviceaccounts", {"metadata": {"name": name}})
    for role in roles:
        body = {
            "metadata": {"name": f"{name}-{role}"},
            "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
            "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
        }
        server.admin.create(f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings", body)
    return f"system:serviceaccount:{namespace}:{name}"


def token_of(server: ApiServer, namespace: str, name: str, *audiences: str) -> str:
    """By TokenRequest, as `kubectl create token --audience` does; without audiences it is for the API server."""
    spec = {"expirationSeconds": 600, **({"audiences": list(audiences)} if audiences else {})}
    body = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": spec}
    made = server.admin.create(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", body)
    return str(made["status"]["token"])


def signed_token(server: ApiServer, namespace: str, name: str, expires_in: float, key: bytes | None = None) -> str:
    """As the API server signs them, with whatever end: TokenRequest gives none that is over."""
    uid = server.admin.get(f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}")["metadata"]["uid"]
    now = int(time.time())
    claims = {
        "iss": ISSUER,
        "sub": f"system:serviceaccount:{namespace}:{name}",
        "aud": ["rankscope"],
        "iat": now - 7200,
        "nbf": now - 7200,
        "exp": now + int(expires_in),
        "kubernetes.io": {"namespace": namespace, "serviceaccount": {"name": name, "uid": uid}},
    }
    private = serialization.load_pem_private_key(key or (server.folder / "accounts.key").read_bytes(), password=None)
    assert isinstance(private, rsa.RSAPrivateKey)
    content = f"{_part({'alg': 'RS256', 'typ': 'JWT'})}.{_part(claims)}"
    signature = private.sign(content.encode(), padding.PKCS1v15(), hashes.SHA256())
    return f"{content}.{base64.urlsafe_b64encode(signature).decode().rstrip('=')}"


def _part(document: dict[str, Any]) -> str:
    return base64.urlsafe_b64encode(json.dumps(document).encode()).decode().rstrip("=")


@pytest.fixture(scope="module")
def place(server: ApiServer, operator_user: User, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("people")
    authority = Authority(folder / "authority")
    pair = authority.issue("api", NAME)
    for namespace in (TEAM, OTHERS):
        server.admin.create("/api/v1/namespaces", {"metadata": {"name": namespace}})
    account(server, TEAM, "ada", "rankscope-view", "rankscope-capture")
    account(server, TEAM, "looker", "rankscope-view")
    account(server, OTHERS, "mallory", "rankscope-view", "rankscope-capture")
    account(server, TEAM, "leaver", "rankscope-view", "rankscope-capture")
    daemon = ScriptedDaemon(server, "people-node")
    daemon.start()
    hidden = ScriptedDaemon(server, "people-hidden-node")
    hidden.start()
    run = ScriptedRun(server, TEAM, "llama", [daemon])
    secret = ScriptedRun(server, OTHERS, "secret", [hidden], job="10.0.0.9:29500")
    port = free_port()
    url = f"https://127.0.0.1:{port}"
    api_flags = ("--api-listen", "127.0.0.1:0", "--api-certificate", str(pair.certificate), "--api-key", str(pair.key))
    operator = OperatorProcess(
        operator_user,
        folder,
        "people-0",
        (
            *api_flags,
            "--audit-log",
            str(folder / "audit.log"),
            "--webhook-listen",
            f"127.0.0.1:{port}",
            "--webhook-url",
            url,
        ),
    )
    with patient_api_server():
        made = configurations(Address(url=url))
    for kind, document in zip(KINDS, made, strict=True):
        del document["metadata"]["labels"]  # as the chart has them: the operator may not make any
        server.admin.create(f"{ROOT}/{kind}", document)
    server.admin.create(SECRETS, {"metadata": {"name": "rankscope-webhook", "labels": OURS}})
    try:
        with granted(server, "api"):
            run.start()
            secret.start()
            operator.start()
            address = operator.log.rpartition(" api ")[2].split()[0]
            for each in (run, secret):
                wait_until(lambda each=each: each.status.get("ranks", {}).get("seen") == 2)
            wait_until(lambda: _is_admitted(server))
            (folder / "token").write_text(token_of(server, TEAM, "ada", "rankscope"))
            command = [
                *(
                    *MAIN,
                    "capture",
                    "--run",
                    f"{TEAM}/{run.object_name}",
                    "--connect",
                    address,
                    "--tls-server-name",
                    NAME,
                ),
                *("--certificate-authority", str(authority.certificate), "--token-file", str(folder / "token")),
                *("--ranks", "0,1", "--steps", "3", "--reason", "slow since noon", "--json"),
                *("--output", str(folder / "traces")),
            ]
            capture = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            try:
                wait_until(lambda: server.admin.get(f"{BASE}/{TEAM}/captures")["items"] or capture.poll() is not None)
                yield Place(
                    server,
                    operator,
                    authority.certificate,
                    address,
                    folder / "audit.log",
                    run,
                    secret,
                    capture,
                    folder / "traces",
                    url,
                )
            finally:
                capture.kill()
                capture.wait()
    finally:
        operator.stop()
        forget(server, "rankscope")
        server.admin.delete(f"{SECRETS}/rankscope-webhook")
        daemon.stop()
        hidden.stop()


def _is_admitted(server: ApiServer) -> bool:
    body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": "x"}}
    try:
        made = server.admin.create(f"{BASE}/{TEAM}/captures?dryRun=All", {**body, "spec": {"run": "x", "steps": 1}})
    except ApiError:
        return False
    return made["metadata"].get("annotations", {}).get("rankscope.dev/requested-by") == "admin"


def test_top_and_doctor_ask_the_operator_in_a_context(place: Place, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(token_of(place.server, TEAM, "looker", "rankscope"))
    environment = {**os.environ, "XDG_CONFIG_HOME": str(tmp_path), "RANKSCOPE_CONTEXT": "prod"}

    def rankscope(*words: str) -> subprocess.CompletedProcess[str]:
        command = [*MAIN, *words]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=CALL_SECONDS)

    named = ["--connect", place.address, "--tls-server-name", NAME, "--certificate-authority", str(place.authority)]
    made = rankscope("context", "set", "prod", *named, "--token-file", str(tmp_path / "token"))
    assert made.returncode == 0, made.stderr
    shown = rankscope("top", "--once", "--json", "--run", f"{TEAM}/")
    assert shown.returncode == 0, shown.stderr
    (run,) = json.loads(shown.stdout)["runs"]
    assert (run["run"], run["ranks_seen"]) == (f"{TEAM}/{place.run.object_name}", 2)
    assert [(rank["rank"], rank["node"]) for rank in run["ranks"]] == [(0, "people-node"), (1, "people-node")]
    for wanted in (f"{OTHERS}/", f"{OTHERS}/{place.secret.object_name}", ""):
        hidden = rankscope("top", "--once", "--json", "--run", wanted)
        assert (hidden.returncode, hidden.stdout) == (5, ""), wanted
        assert "may not list trainingruns" in hidden.stderr and "secret" not in hidden.stderr.replace(wanted, "")
    examined = rankscope("doctor", "--cluster")
    assert examined.returncode == 0, examined.stderr
    assert "warning  runs: " in examined.stdout and "may not list trainingruns in all namespaces" in examined.stdout


def test_only_a_valid_token_for_our_audience_is_accepted(place: Place) -> None:
    server = place.server
    own_key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    # The twin of the one that has ended: it would be let in, and asks for what is not there.
    good = signed_token(server, TEAM, "ada", 600)
    missing = pb.GetCaptureRequest(id=f"{TEAM}/none")
    code, _ = refused(lambda: place.calls(good).GetCapture(missing, timeout=CALL_SECONDS))
    assert code is Code.NOT_FOUND
    tokens = {
        "none": None,
        "for another audience": token_of(server, TEAM, "ada", "vault"),
        "for the API server": token_of(server, TEAM, "ada"),
        "an administrator's": server.admin.token,
        "ended": signed_token(server, TEAM, "ada", -3600),
        "signed by somebody else": signed_token(server, TEAM, "ada", 600, own_key),
        "cut": good[:-20],
        "of another with this one's signature": ".".join([good.split(".")[0], _part({"sub": "x"}), good.split(".")[2]]),
    }
    texts = set()
    for kind, token in tokens.items():
        code, text = place.refusal(token)
        assert code is Code.UNAUTHENTICATED, (kind, code, text)
        assert "--audience rankscope" in text and (token is None or token not in text)
        texts.add(text)
    assert len(texts) == 2  # no token, and not accepted: why not is nobody's business
    told = place.operator.log
    assert told.count("refused 127.0.0.1: 'no token'") == 1
    assert told.count("refused 127.0.0.1: 'a token that is not accepted'") == 1
    everything = told + place.audit.read_text()
    assert not any(token in everything for token in tokens.values() if token is not None)


def test_nobody_captures_or_sees_another_namespaces_job(place: Place) -> None:
    server = place.server
    ada, mallory = token_of(server, TEAM, "ada", "rankscope"), token_of(server, OTHERS, "mallory", "rankscope")
    code, text = place.refusal(ada, OTHERS)
    assert code is Code.PERMISSION_DENIED
    assert f"may not create captures in namespace {OTHERS}" in text and "rankscope-capture" in text
    assert place.secret.object_name not in text and "people-hidden-node" not in text
    code, _ = place.refusal(mallory, TEAM)
    assert code is Code.PERMISSION_DENIED
    (capture,) = server.admin.get(f"{BASE}/{TEAM}/captures")["items"]
    for name in (capture["metadata"]["name"], "none"):
        for call in about(place.calls(mallory), f"{TEAM}/{name}"):
            assert refused(call)[0] is Code.PERMISSION_DENIED
    assert server.admin.get(f"{BASE}/{OTHERS}/captures")["items"] == []
    denied = [record for record in place.records() if record.get("result") == "PermissionDenied"]
    assert {(record["user"], record["namespace"]) for record in denied if record["message"] == "create captures"} == {
        (f"system:serviceaccount:{TEAM}:ada", OTHERS),
        (f"system:serviceaccount:{OTHERS}:mallory", TEAM),
    }


def test_a_viewer_neither_captures_nor_downloads(place: Place) -> None:
    looker = token_of(place.server, TEAM, "looker", "rankscope")
    code, text = place.refusal(looker)
    assert code is Code.PERMISSION_DENIED and "rankscope-capture" in text
    (listed,) = place.calls(looker).ListCaptures(pb.ListCapturesRequest(job=f"{TEAM}/"), timeout=CALL_SECONDS).captures
    assert listed.requested_by == f"system:serviceaccount:{TEAM}:ada"
    request = pb.DownloadArtifactRequest(id=listed.id, rank=0)
    code, text = refused(lambda: list(place.calls(looker).DownloadArtifact(request, timeout=CALL_SECONDS)))
    assert code is Code.PERMISSION_DENIED and "captures/artifacts" in text


def about_profiles(channel: grpc.Channel, run: str) -> list[Callable[[], Any]]:
    calls, limit = ProfileServiceStub(channel), {"timeout": CALL_SECONDS}
    selection = ProfileSelection(job=run, ranks=[1], start_unix_nanos=5, end_unix_nanos=9)
    return [
        lambda: list(calls.QueryProfile(QueryProfileRequest(selection=selection), **limit)),
        lambda: calls.CompareProfiles(CompareProfilesRequest(selection=selection), **limit),
        lambda: calls.DumpStacks(DumpStacksRequest(job=run, pods=["pod-of-another-run"]), **limit),
    ]


def test_profiles_need_download_rights_and_stacks_need_capture_rights(place: Place) -> None:
    server, (daemon,) = place.server, place.run.daemons
    own, hidden = f"{TEAM}/{place.run.object_name}", f"{OTHERS}/{place.secret.object_name}"
    looker = place.channel(token_of(server, TEAM, "looker", "rankscope"))
    missing_rights = ["get captures/artifacts", "get captures/artifacts", "create captures"]
    for call, right in zip(about_profiles(looker, own), missing_rights, strict=True):
        code, text = refused(call)
        assert code is Code.PERMISSION_DENIED and f"may not {right} in namespace {TEAM}" in text
    ada = place.channel(token_of(server, TEAM, "ada", "rankscope"))
    for existing, missing in zip(about_profiles(ada, hidden), about_profiles(ada, f"{OTHERS}/none"), strict=True):
        assert refused(existing) == refused(missing)
        assert refused(existing)[0] is Code.PERMISSION_DENIED
    assert not daemon.selections and not daemon.dumps and not place.secret.daemons[0].selections
    query, compare, dump = about_profiles(ada, own)
    parts = query()
    profile = read_pprof(b"".join(part.pprof for part in parts))
    assert {one.rank for one in profile} == {1} and not parts[-1].problems
    assert compare().reference_samples == PROFILE_SAMPLES
    assert [(stack.rank, stack.node, bool(stack.frames)) for stack in dump().ranks] == [
        (0, "people-node", True),
        (1, "people-node", True),
    ]
    # Daemons answer for the pods of the run, whatever a caller says.
    assert {tuple(asked.pods) for asked in daemon.dumps} == {tuple(place.run.pods)}
    assert {asked.job for asked in (*daemon.selections, *daemon.dumps)} == {own}
    records = [record for record in place.records() if record.get("what") == "stacks"]
    assert [(record["event"], record["user"]) for record in records] == [
        (event, f"system:serviceaccount:{TEAM}:ada") for event in ("asked", "ended")
    ]


def test_a_replayed_token_of_a_deleted_account_is_refused(place: Place) -> None:
    token = token_of(place.server, TEAM, "leaver", "rankscope")
    missing = pb.GetCaptureRequest(id=f"{TEAM}/none")
    assert refused(lambda: place.calls(token).GetCapture(missing, timeout=CALL_SECONDS))[0] is Code.NOT_FOUND
    place.server.admin.delete(f"/api/v1/namespaces/{TEAM}/serviceaccounts/leaver")
    # Both the API server and the operator remember a yes for ten seconds.
    wait_until(
        lambda: refused(lambda: place.calls(token).GetCapture(missing, timeout=CALL_SECONDS))[0] is Code.UNAUTHENTICATED
    )


def test_a_command_line_capture_delivers_traces_and_leaves_records(place: Place) -> None:
    out, errors = place.capture.communicate(timeout=240)
    assert place.capture.returncode == 0, errors
    told = json.loads(out)
    assert [(rank["rank"], rank["state"], rank["node"]) for rank in told["ranks"]] == [
        (0, "analysed", "people-node"),
        (1, "analysed", "people-node"),
    ]
    assert [Path(rank["file"]).read_bytes() for rank in told["ranks"]] == [trace_of(0), trace_of(1)]
    namespace, _, name = told["id"].partition("/")
    document = place.server.admin.get(f"{BASE}/{namespace}/captures/{name}")
    ada = f"system:serviceaccount:{TEAM}:ada"
    # Made by the operator's account, and in her name: the webhook let the operator, and nobody else, say so.
    assert document["metadata"]["annotations"]["rankscope.dev/requested-by"] == ada
    assert document["spec"]["reason"] == "slow since noon"
    records = [record for record in place.records() if record.get("capture") == name]
    assert [record["event"] for record in records] == ["asked", "begun", "ended", "downloaded", "downloaded"]
    for record in records:
        assert (record["via"], record["user"], record["verified"]) == ("api", ada, True)
    asked, begun, ended, *_ = records
    assert "system:serviceaccounts" in asked["groups"] and asked["address"] == "127.0.0.1"
    assert (begun["ranks"], begun["id"]) == ("0,1", f"k-{document['metadata']['uid']}")
    assert (ended["result"], ended["message"]) == ("Succeeded", "2/2 ranks delivered")
    assert {record["reason"] for record in (asked, begun, ended)} == {"slow since noon"}
    assert place.audit.stat().st_mode & 0o777 == 0o600


def test_kubectl_callers_are_recorded_and_cannot_claim_another_identity(place: Place) -> None:
    server = place.server
    ada = User(server, "ada", token_of(server, TEAM, "ada"))
    claims = {"rankscope.dev/requested-by": "the-boss", "rankscope.dev/via": "api", "rankscope.dev/trigger": "policy"}
    evil = 'x"}\n{"event": "ended"'
    body = {
        "apiVersion": "rankscope.dev/v1alpha1",
        "kind": "Capture",
        "metadata": {"name": "by-hand", "annotations": claims},
        "spec": {"run": place.run.object_name, "ranks": "7", "steps": 3, "reason": evil},
    }
    made = ada.create(f"{BASE}/{TEAM}/captures", body)
    name = f"system:serviceaccount:{TEAM}:ada"
    assert made["metadata"]["annotations"] == {"rankscope.dev/requested-by": name}
    of_it: list[dict[str, Any]] = []

    def is_over() -> bool:
        of_it[:] = [record for record in place.records() if record.get("capture") == "by-hand"]
        return any(record["event"] == "ended" for record in of_it)

    wait_until(is_over)
    assert [record["event"] for record in of_it] == ["asked", "ended"]
    assert {(record["via"], record["user"], record["verified"]) for record in of_it} == {("kubectl", name, True)}
    assert of_it[-1]["result"] == "Failed" and of_it[-1]["message"]
    assert of_it[0]["reason"] == evil


def forged_review(name: str, spec: dict[str, Any]) -> bytes:
    """As the API server would send it when an administrator makes a Capture."""
    request = {
        "uid": name,
        "operation": "CREATE",
        "resource": {"group": "rankscope.dev", "version": "v1alpha1", "resource": "captures"},
        "namespace": TEAM,
        "userInfo": {"username": "admin", "groups": ["system:masters"]},
        "object": {"metadata": {"name": name, "uid": name}, "spec": spec},
    }
    return json.dumps({"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "request": request}).encode()


def webhook_caller(place: Place) -> http.client.HTTPSConnection:
    """Any pod reaches the webhook's port."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    address = urlsplit(place.webhook_url)
    return http.client.HTTPSConnection(str(address.hostname), address.port, timeout=CALL_SECONDS, context=tls)


def test_reviews_that_are_not_the_api_servers_leave_no_record(place: Place) -> None:
    before = len(place.records())
    caller = webhook_caller(place)
    for number in range(200):
        for path, spec in (("/stamp", {"run": "x"}), ("/validate", {"run": "x", "steps": 1})):
            caller.request("POST", path, forged_review(f"forged-{number}", spec))
            answer = caller.getresponse()
            assert answer.status == 200 and b'"allowed"' in answer.read()
    caller.close()
    # A true one afterwards: the records are in order, so nothing of the forged ones is still to come.
    ada = User(place.server, "ada", token_of(place.server, TEAM, "ada"))
    body = {"apiVersion": "rankscope.dev/v1alpha1", "kind": "Capture", "metadata": {"name": "true-one"}}
    ada.create(f"{BASE}/{TEAM}/captures", {**body, "spec": {"run": place.run.object_name, "ranks": "7", "steps": 3}})

    def is_over() -> bool:
        return any((each["event"], each.get("capture")) == ("ended", "true-one") for each in place.records())

    wait_until(is_over)
    records = place.records()[before:]
    assert not [each for each in records if each.get("capture", "").startswith("forged") or each["user"] == "admin"]
    of_it = [each for each in records if each.get("capture") == "true-one"]
    assert [each["event"] for each in of_it] == ["asked", "ended"]
    assert {(each["user"], each["verified"]) for each in of_it} == {(f"system:serviceaccount:{TEAM}:ada", True)}


def test_a_flood_of_large_reviews_is_refused_unread(place: Place) -> None:
    limited = 'rankscope_operator_reviews_total{result="limited",webhook="validate"}'
    for _ in range(100):
        caller = webhook_caller(place)
        caller.putrequest("POST", "/validate")
        caller.putheader("Content-Length", str(3 << 20))
        caller.endheaders(b"{")
        caller.close()
        if limited in place.operator.get("/metrics"):
            break
    assert limited in place.operator.get("/metrics")
    # Small ones, as the API server sends, still pass: here both have the same address.
    assert _is_admitted(place.server)


def test_cancelling_ends_a_capture_and_keeps_its_object(place: Place) -> None:
    token = token_of(place.server, TEAM, "ada", "rankscope")
    calls, (daemon,) = place.calls(token), place.run.daemons
    request = pb.StartCaptureRequest(job=f"{TEAM}/{place.run.object_name}", ranks="1", steps=3, id="to-be-cancelled")
    daemon.release.clear()  # it does not end by itself
    stream = calls.StartCapture(request, timeout=CALL_SECONDS)
    assert next(stream).capture.id == f"{TEAM}/to-be-cancelled"
    calls.CancelCapture(pb.CancelCaptureRequest(id=f"{TEAM}/to-be-cancelled"), timeout=CALL_SECONDS)
    try:
        last = list(stream)[-1].capture
    except grpc.RpcError as error:  # cancelled before any rank was chosen
        assert error.code() is Code.FAILED_PRECONDITION and "cancelled" in error.details()
    else:
        assert last.state == pb.CAPTURE_STATE_CANCELLED
    finally:
        daemon.release.set()
    kept = place.server.admin.get(f"{BASE}/{TEAM}/captures/to-be-cancelled")
    assert kept["status"]["phase"] == "Cancelled"
    calls.DeleteCapture(pb.DeleteCaptureRequest(id=f"{TEAM}/to-be-cancelled"), timeout=CALL_SECONDS)
    wait_until(lambda: not place.server.admin.is_served(f"{BASE}/{TEAM}/captures/to-be-cancelled"))
    assert "Traceback" not in place.operator.log
