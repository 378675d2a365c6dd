"""The operator as a process of its own, as tests see it."""

from __future__ import annotations

import re
import subprocess
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from tests.kube.api_server import User
from tests.kube.fleet import MAIN, OPERATOR_NAMESPACE
from tests.support.waiting import wait_until


@dataclass
class OperatorProcess:
    user: User
    folder: Path
    identity: str = "operator-0"
    flags: tuple[str, ...] = ()

    def start(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        kubeconfig = self.user.kubeconfig(self.folder / f"{self.identity}.kubeconfig")
        self.log_path = self.folder / f"{self.identity}.log"
        with self.log_path.open("ab") as log:
            self.log_start = log.tell()
            self.process = subprocess.Popen(
                [
                    *(*MAIN, "operator", "--kubeconfig", str(kubeconfig), "--namespace", OPERATOR_NAMESPACE),
                    *("--identity", self.identity, "--listen", "127.0.0.1:0", *self.flags),
                ],
                stdout=log,
                stderr=log,
            )
        try:
            wait_until(lambda: "rankscope operator: http" in self.log or self.process.poll() is not None)
        except BaseException:
            self.kill()  # it would hold its leases against the operators of later tests
            raise
        assert self.process.poll() is None, self.log
        self.url = re.findall(r"rankscope operator: (https?://\S+)", self.log)[-1]

    @property
    def log(self) -> str:
        """Of this process: one of the same name before it may have written to the same file."""
        return self.log_path.read_bytes()[self.log_start :].decode(errors="replace")

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return str(answer.read().decode())

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()
