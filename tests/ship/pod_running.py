"""A pod's container as a process of this machine: the rendered command and arguments, volumes as folders, the pod's
address on the loopback network and no more capabilities than it is given. And Services, as kube-proxy makes them."""

from __future__ import annotations

import base64
import os
import re
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.kube.api_server import User

Document = dict[str, Any]

_PATH = re.compile(r"(?<==)/[^\s,]+")


@dataclass
class PodProcess:
    """`address` is one of 127.0.0.0/8: everything that listens on all addresses of its pod listens there."""

    admin: User
    namespace: str
    template: Document  # of a Deployment or DaemonSet
    address: str
    folder: Path
    environment: dict[str, str] = field(default_factory=dict)  # what the downward API would say
    process: subprocess.Popen[bytes] | None = None

    @property
    def container(self) -> Document:
        (container,) = self.template["spec"]["containers"]
        return dict(container)

    def command(self) -> list[str]:
        container = self.container
        assert container["command"][0] == "rankscope"
        words = [*container["command"][1:], *container["args"]]
        return [sys.executable, "-m", "rankscope.cli.main", *(self._adapted(word) for word in words)]

    def start(self, *wrapper: str, environment: Mapping[str, str] | None = None) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*wrapper, *self._confined(), *self.command()],
                stdout=log,
                stderr=log,
                env={**os.environ, **(environment or {})},
            )

    @property
    def log(self) -> str:
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is None:
            return
        self.process.terminate()
        self.process.send_signal(signal.SIGCONT)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def _adapted(self, word: str) -> str:
        word = re.sub(r"\$\((\w+)\)", lambda match: self.environment[match[1]], word)
        word = word.replace("=0.0.0.0:", f"={self.address}:")
        return _PATH.sub(lambda match: self._local(match[0]), word)

    def _local(self, path: str) -> str:
        for mount in self.container["volumeMounts"]:
            if path == mount["mountPath"] or path.startswith(mount["mountPath"] + "/"):
                return str(self._folder_of(mount["name"])) + path.removeprefix(mount["mountPath"])
        return path

    def _folder_of(self, name: str) -> Path:
        volume = next(each for each in self.template["spec"]["volumes"] if each["name"] == name)
        if "hostPath" in volume and volume["hostPath"]["path"].startswith("/sys/"):
            return Path(volume["hostPath"]["path"])
        place = self.folder / "volumes" / name
        place.mkdir(parents=True, exist_ok=True)
        if "secret" in volume:
            path = f"/api/v1/namespaces/{self.namespace}/secrets/{volume['secret']['secretName']}"
            for key, value in (self.admin.get(path).get("data") or {}).items():
                (place / key).write_bytes(base64.b64decode(value))
                (place / key).chmod(volume["secret"]["defaultMode"])
        return place

    def _confined(self) -> tuple[str, ...]:
        """A wrapper that leaves what the container's securityContext leaves: its capabilities, no way to get more."""
        context = self.container["securityContext"]
        assert context["capabilities"]["drop"] == ["ALL"]
        added = [f"+{name.lower()}" for name in context["capabilities"].get("add", ())]
        bounds = ",".join(["-all", *added])
        privileges = () if context["allowPrivilegeEscalation"] else ("--no-new-privs",)
        return ("setpriv", f"--bounding-set={bounds}", "--inh-caps=-all", *privileges, "--")


def with_token(folder: Path, user: User) -> tuple[tuple[str, ...], dict[str, str]]:
    """A wrapper and variables by which a process finds API server and token where every pod finds them."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "token").write_text(user.token)
    (folder / "ca.crt").write_bytes(base64.b64decode(user.server.ca_base64))
    host, _, port = user.server.url.removeprefix("https://").partition(":")
    place = "/run/secrets/kubernetes.io/serviceaccount"
    enter = f'mount -t tmpfs tmpfs /run && mkdir -p {place} && cp "$0"/* {place} && exec "$@"'
    wrapper = ("unshare", "--mount", "sh", "-c", enter, str(folder))
    return wrapper, {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}


class ServiceProxy:
    """Takes connections to the Services of a namespace to the pods that they select."""

    def __init__(self, admin: User, namespace: str, pods: list[PodProcess]) -> None:
        self._selector = selectors.DefaultSelector()
        self._listeners: list[socket.socket] = []
        self._stopping = threading.Event()
        for service in admin.get(f"/api/v1/namespaces/{namespace}/services")["items"]:
            for port in service["spec"]["ports"]:
                target = _target(service, port, pods)
                if target is not None:
                    listener = socket.create_server((service["spec"]["clusterIP"], port["port"]))
                    self._listeners.append(listener)
                    self._selector.register(listener, selectors.EVENT_READ, target)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        for listener in self._listeners:
            listener.close()

    def _run(self) -> None:
        while not self._stopping.is_set():
            for key, _ in self._selector.select(0.2):
                listener = key.fileobj
                assert isinstance(listener, socket.socket)
                near, _ = listener.accept()
                threading.Thread(target=_join, args=(near, key.data), daemon=True).start()


def _target(service: Document, port: Document, pods: list[PodProcess]) -> tuple[str, int] | None:
    """None: selects none of these pods. A port of a name that its pods do not have is an error."""
    for pod in pods:
        labels = pod.template["metadata"]["labels"]
        if (service["spec"].get("selector") or {"": ""}).items() <= labels.items():
            if isinstance(port["targetPort"], int):
                return (pod.address, port["targetPort"])
            ports = {each["name"]: each["containerPort"] for each in pod.container["ports"]}
            return (pod.address, ports[port["targetPort"]])
    return None


def _join(near: socket.socket, target: tuple[str, int]) -> None:
    try:
        far = socket.create_connection(target, 10)
    except OSError:
        near.close()
        return
    back = threading.Thread(target=_copy, args=(far, near), daemon=True)
    back.start()
    _copy(near, far)
    back.join()
    near.close()
    far.close()


def _copy(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)
