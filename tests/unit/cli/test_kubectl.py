"""`kubectl rankscope` with a kubectl that is a script: it says what was asked of it, and forwards to a local server."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from rankscope.cli import kubectl
from rankscope.cli.messages import Exit
from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1 import job_service_pb2_grpc
from tests.certificates import Authority

NAME = "rankscope-operator.watching.svc"
TOKEN = "eyJhbGciOiJSUzI1NiJ9.c2VjcmV0.c2ln"
KUBECTL = """\
#!{python}
import json, signal, sys
with open({log!r}, "a") as file:
    file.write(json.dumps(sys.argv[1:]) + "\\n")
if "port-forward" in sys.argv:
    if {port} == 0:
        sys.exit("error: services \\"rankscope-operator\\" not found")
    print("Forwarding from 127.0.0.1:{port} -> 9468", flush=True)
    signal.sigwait([signal.SIGTERM])
elif "secret" in sys.argv:
    print({authority!r})
elif "token" in sys.argv:
    print({token!r})
"""


class Runs(job_service_pb2_grpc.JobServiceServicer):
    def __init__(self) -> None:
        self.shown: list[str] = []
        self.asked: list[str] = []

    def ListJobs(self, request: pb.ListJobsRequest, context: grpc.ServicerContext) -> pb.ListJobsResponse:
        given: dict[str, Any] = dict(context.invocation_metadata())
        self.shown.append(given.get("authorization", ""))
        self.asked.append(request.run)
        verdict = pb.Verdict(kind=pb.VERDICT_KIND_HEALTHY, severity=pb.SEVERITY_NONE)
        return pb.ListJobsResponse(jobs=[pb.JobStatus(job="team/llama", world_size=8, ranks_seen=8, verdict=verdict)])


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def operator() -> Runs:
    return Runs()


@pytest.fixture
def port(operator: Runs, authority: Authority) -> Iterator[int]:
    pair = authority.issue("api", NAME)
    server = grpc.server(ThreadPoolExecutor(2))
    job_service_pb2_grpc.add_JobServiceServicer_to_server(operator, server)
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    made = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield made
    server.stop(0).wait(5)


class Kubectl:
    def __init__(self, folder: Path, authority: Authority) -> None:
        self._path, self._log, self._authority = folder / "kubectl", folder / "asked", authority

    def install(self, port: int) -> None:
        encoded = base64.b64encode(self._authority.certificate.read_bytes()).decode()
        program = KUBECTL.format(python=sys.executable, log=str(self._log), port=port, authority=encoded, token=TOKEN)
        self._path.write_text(program)
        self._path.chmod(0o755)

    @property
    def asked(self) -> list[list[str]]:
        return [json.loads(line) for line in self._log.read_text().splitlines()]


@pytest.fixture
def fake(tmp_path: Path, authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Kubectl:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("RANKSCOPE_TOKEN", raising=False)
    return Kubectl(tmp_path, authority)


def test_a_command_reaches_the_operator_with_the_accounts_token(
    operator: Runs, port: int, fake: Kubectl, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.install(port)
    flags = ["--context=lab", "--operator-namespace", "watching", "--service-account", "team/ada"]
    assert kubectl.main([*flags, "top", "--once", "--json", "--run", "team/"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["runs"][0]["run"] == "team/llama"
    assert (operator.shown, operator.asked) == ([f"Bearer {TOKEN}"], ["team/"])
    there = "--context=lab --namespace=watching"
    assert fake.asked == [
        f"{there} get secret rankscope-api-tls -o jsonpath={{.data.ca\\.crt}}".split(),
        ["--context=lab", "--namespace=team", "create", "token", "ada", "--audience=rankscope"],
        f"{there} port-forward --address=127.0.0.1 service/rankscope-operator :9468".split(),
    ]
    assert TOKEN not in shown.out + shown.err


def test_what_is_missing_is_said_with_the_next_step(
    fake: Kubectl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert kubectl.main(["top", "--once"]) == Exit.UNREACHABLE
    assert "kubectl: No such file or directory; is it installed" in capsys.readouterr().err
    fake.install(0)
    assert kubectl.main(["top", "--once"]) == Exit.USAGE
    assert "name --service-account NAMESPACE/NAME, or set RANKSCOPE_TOKEN" in capsys.readouterr().err
    monkeypatch.setenv("RANKSCOPE_TOKEN", TOKEN)
    assert kubectl.main(["top", "--once"]) == Exit.UNREACHABLE
    assert 'services "rankscope-operator" not found; next: --operator-namespace' in capsys.readouterr().err
