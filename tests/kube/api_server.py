"""A real kube-apiserver with its etcd, on free ports of this machine, for one test session or one test."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import secrets
import ssl
import subprocess
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import urllib3
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.certificates import Authority
from tests.free_ports import free_port
from tests.support.waiting import wait_until

VERSION = "1.20.2"
TOKEN_SECONDS = 7200


def assets() -> Path:
    """The folder with kube-apiserver and etcd: KUBEBUILDER_ASSETS, or what tools/setup_kube.sh built."""
    named = os.environ.get("KUBEBUILDER_ASSETS")
    if named and all((Path(named) / program).exists() for program in ("kube-apiserver", "etcd")):
        return Path(named)
    cache = os.environ.get("RANKSCOPE_KUBE_CACHE")
    if cache:
        return Path(cache)
    architecture = subprocess.run(["dpkg", "--print-architecture"], capture_output=True, text=True, check=True)
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "rankscope" / f"kube-{VERSION}-{architecture.stdout.strip()}"


class ApiError(Exception):
    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"{status}: {body[:600]}")
        self.status = status
        self.body = body


@dataclass
class User:
    """A name with a token."""

    server: ApiServer
    name: str
    token: str

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        content_type: str = "application/json",
        timeout: float = 120.0,
        accept: str = "application/json",
    ) -> Any:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": content_type, "Accept": accept}
        try:
            answer = self.server.connections.request(
                method, self.server.url + path, body=data, headers=headers, timeout=timeout, retries=False
            )
        except urllib3.exceptions.HTTPError as error:
            raise OSError(f"{method} {path}: {error}") from error
        if answer.status >= 400:
            raise ApiError(answer.status, answer.data.decode(errors="replace"))
        return json.loads(answer.data or b"null")

    def get(self, path: str) -> Any:
        return self.request("GET", path)

    def create(self, path: str, body: Any) -> Any:
        return self.request("POST", path, body)

    def merge(self, path: str, body: Any) -> Any:
        return self.request("PATCH", path, body, "application/merge-patch+json")

    def delete(self, path: str) -> Any:
        return self.request("DELETE", path)

    def is_served(self, path: str) -> bool:
        try:
            self.get(path)
        except (ApiError, OSError):
            return False
        return True

    def kubeconfig(self, path: Path) -> Path:
        """A file with which kubectl, helm and the operator act as this user."""
        cluster = {"server": self.server.url, "certificate-authority-data": self.server.ca_base64}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "test",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": self.name, "user": {"token": self.token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": self.name, "namespace": "default"}}],
        }
        path.write_text(json.dumps(document))
        path.chmod(0o600)
        return path


@dataclass
class ApiServer:
    """`start`, then `admin`; `user` makes others. No controllers run: nothing is garbage-collected, no pod appears."""

    folder: Path
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)  # name to groups, known from the start
    services: str = "10.0.0.0/24"  # the addresses that Services get

    def __post_init__(self) -> None:
        self._etcd: subprocess.Popen[bytes] | None = None
        self._api: subprocess.Popen[bytes] | None = None
        self._etcd_port, self._peer_port, self._port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self._port}"
        self.folder.mkdir(parents=True, exist_ok=True)
        self._tokens = {"admin": secrets.token_hex(16), **{name: secrets.token_hex(16) for name in self.users}}
        self._write_tokens()
        self._write_keys()
        self._write_admission()
        self._trust_certificate(None)

    def start(self) -> None:
        self.start_etcd()
        self.start_api()

    def start_etcd(self) -> None:
        client = f"http://127.0.0.1:{self._etcd_port}"
        peer = f"http://127.0.0.1:{self._peer_port}"
        command = [
            str(assets() / "etcd"),
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            "--unsafe-no-fsync",
        ]
        environment = {**os.environ, "ETCD_UNSUPPORTED_ARCH": "arm64"}
        self._etcd = self._run(command, "etcd.log", environment)
        self._wait(lambda: _answers(f"{client}/health"), self._etcd, "etcd")

    def start_api(self) -> None:
        folder = self.folder
        command = [
            str(assets() / "kube-apiserver"),
            f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self._port}",
            f"--cert-dir={folder / 'certificates'}",
            f"--service-account-key-file={folder / 'accounts.key'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={self.services}",
            "--disable-admission-plugins=ServiceAccount",
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
            f"--admission-control-config-file={folder / 'admission.yaml'}",
        ]
        self._api = self._run(command, "kube-apiserver.log")
        certificate = folder / "certificates" / "apiserver.crt"
        self._wait(certificate.exists, self._api, "kube-apiserver")
        self._trust_certificate(certificate)
        self._wait(self._is_ready, self._api, "kube-apiserver")
        if not self.admin.is_served("/api/v1/namespaces/default"):  # not every version makes it by itself at once
            with contextlib.suppress(ApiError):
                self.admin.create("/api/v1/namespaces", {"metadata": {"name": "default"}})

    def _trust_certificate(self, certificate: Path | None) -> None:
        self._tls = ssl.create_default_context(cafile=certificate)
        # Kept open: tests ask ten times a second, and a new connection costs five times as much as a request.
        self.connections = urllib3.PoolManager(ssl_context=self._tls)

    @property
    def ca_base64(self) -> str:
        return base64.b64encode((self.folder / "certificates" / "apiserver.crt").read_bytes()).decode()

    @property
    def admin(self) -> User:
        return User(self, "admin", self._tokens["admin"])

    def user(self, name: str) -> User:
        """One of `users`, or a service account (system:serviceaccount:NAMESPACE:NAME) with a token as pods get it."""
        if name not in self._tokens:
            _, _, namespace, account = name.split(":")
            path = f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}/token"
            asked = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest"}
            made = self.admin.create(path, {**asked, "spec": {"expirationSeconds": TOKEN_SECONDS}})
            self._tokens[name] = made["status"]["token"]
        return User(self, name, self._tokens[name])

    @property
    def is_running(self) -> bool:
        return self._api is not None and self._api.poll() is None

    def stop_api(self) -> None:
        """An outage: everything stays in etcd, and `start_api` brings it back on the same port."""
        self._api = _ended(self._api)

    def forget_history(self) -> None:
        """Compact etcd to its newest revision: a watch that resumes from before gets `410 Gone`."""
        base = f"http://127.0.0.1:{self._etcd_port}/v3/kv"
        header = _post(f"{base}/range", {"key": base64.b64encode(b"x").decode()})["header"]
        _post(f"{base}/compaction", {"revision": header["revision"], "physical": True})

    def delete_behind_the_watch(self, key: str) -> None:
        """Remove an object from etcd while the API server is down, as another API server would."""
        _post(f"http://127.0.0.1:{self._etcd_port}/v3/kv/deleterange", {"key": base64.b64encode(key.encode()).decode()})

    def stop(self) -> None:
        self._api = _ended(self._api)
        self._etcd = _ended(self._etcd)

    def _is_ready(self) -> bool:
        return _answers(f"{self.url}/readyz", self._tls) and self.admin.is_served(
            "/apis/rbac.authorization.k8s.io/v1/clusterroles/cluster-admin"
        )

    def _write_tokens(self) -> None:
        groups = {"admin": ("system:masters",), **self.users}
        lines = [f'{token},{name},{name},"{",".join(groups[name])}"' for name, token in self._tokens.items()]
        (self.folder / "tokens.csv").write_text("\n".join(lines) + "\n")

    def _write_keys(self) -> None:
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        pem = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
        (self.folder / "accounts.key").write_bytes(pem)

    def _write_admission(self) -> None:
        """The certificate that it shows to webhooks which ask for one; `webhook_clients` signs it."""
        authority = Authority(self.folder / "webhook-clients")
        pair = authority.issue("api-server", "kube-apiserver")
        self.webhook_clients = authority.certificate
        user = {"client-certificate": str(pair.certificate), "client-key": str(pair.key)}
        kubeconfig = {"apiVersion": "v1", "kind": "Config", "users": [{"name": "*", "user": user}]}
        (self.folder / "webhooks.kubeconfig").write_text(json.dumps(kubeconfig))
        settings = {
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "WebhookAdmissionConfiguration",
            "kubeConfigFile": str(self.folder / "webhooks.kubeconfig"),
        }
        plugins = ("MutatingAdmissionWebhook", "ValidatingAdmissionWebhook")
        document = {
            "apiVersion": "apiserver.config.k8s.io/v1",
            "kind": "AdmissionConfiguration",
            "plugins": [{"name": name, "configuration": settings} for name in plugins],
        }
        (self.folder / "admission.yaml").write_text(json.dumps(document))

    def _run(
        self, command: list[str], log: str, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as output:
            return subprocess.Popen(
                command, stdout=output, stderr=output, env=environment, start_new_session=True, cwd=self.folder
            )

    def _wait(self, is_there: Callable[[], bool], process: subprocess.Popen[bytes], name: str) -> None:
        def is_ready() -> bool:
            if is_there():
                return True
            if process.poll() is not None:
                text = (self.folder / f"{name}.log").read_text(errors="replace")[-2000:]
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{text}")
            return False

        wait_until(is_ready, lambda: f"{name} is not ready; see {self.folder}/{name}.log")


def _ended(process: subprocess.Popen[bytes] | None) -> None:
    """At once, as in a crash: asked politely, an API server waits for its watches for longer than a test runs."""
    if process is not None:
        process.kill()
        process.wait()


def _answers(url: str, tls: ssl.SSLContext | None = None) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10, context=tls) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def _post(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, data=json.dumps(body).encode(), method="POST")
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())
