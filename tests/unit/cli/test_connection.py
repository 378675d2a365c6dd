from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest
from cryptography.hazmat.primitives import serialization

from rankscope.cli import capture as command
from rankscope.cli import captures, connection
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import capture_service_pb2_grpc
from tests.certificates import Authority
from tests.unit.cli.capture_server import ANALYSED, ScriptedCaptures, capture

TOKEN = "eyJhbGciOiJSUzI1NiJ9.c2VjcmV0.c2ln"
ID = "team/c-20260301-101112-a1b2c3"
RUN = "team/pytorchjob-llama"
NAME = "rankscope-api.rankscope.svc"


class Operator(ScriptedCaptures):
    """Also remembers what was shown to it."""

    def __init__(self) -> None:
        super().__init__()
        self.shown: list[str] = []
        self.code: Any = None
        self.deleted: list[str] = []

    def look(self, continuation: Any, details: Any) -> Any:
        given = dict(details.invocation_metadata)
        self.shown.append(str(given.get("authorization", "")))
        if self.code is not None:
            return grpc.unary_stream_rpc_method_handler(lambda _, context: context.abort(*self.code))
        return continuation(details)

    def DeleteCapture(
        self, request: pb.DeleteCaptureRequest, context: grpc.ServicerContext
    ) -> pb.DeleteCaptureResponse:
        self.deleted.append(request.id)
        return pb.DeleteCaptureResponse()


class _Looking(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    def __init__(self, operator: Operator) -> None:
        self._operator = operator

    def intercept_service(self, continuation: Any, handler_call_details: Any) -> Any:
        return self._operator.look(continuation, handler_call_details)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def operator() -> Operator:
    made = Operator()
    made.script = [done()]
    made.known[ID] = done()
    return made


def done() -> pb.Capture:
    made = capture(ANALYSED, ANALYSED, ANALYSED)
    made.id, made.job = ID, RUN
    return made


@pytest.fixture
def address(operator: Operator, authority: Authority) -> Iterator[str]:
    pair = authority.issue("api", NAME)
    credentials = grpc.ssl_server_credentials([(pair.key.read_bytes(), pair.certificate.read_bytes())])
    server = grpc.server(ThreadPoolExecutor(4), interceptors=(_Looking(operator),))
    capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(operator, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield f"127.0.0.1:{port}"
    operator.cancelled.set()
    server.stop(0).wait(5)


@pytest.fixture
def flags(address: str, authority: Authority, tmp_path: Path) -> list[str]:
    (tmp_path / "token").write_text(TOKEN + "\n")
    trusting = ["--certificate-authority", str(authority.certificate), "--tls-server-name", NAME]
    return ["--connect", address, *trusting, "--token-file", str(tmp_path / "token")]


def run(module: ModuleType, *words: str) -> int:
    return main([module.__name__.rpartition(".")[2], *words])


def test_an_operator_capture_sends_the_token_on_every_call(
    operator: Operator, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        operator.artifacts[rank] = bytes(done().ranks[rank].bytes)
    output = tmp_path / "traces"
    assert (
        run(command, "--run", RUN, *flags, "--steps", "3", "--reason", "slow", "--output", str(output), "--json") == 0
    )
    (request,) = operator.requests
    assert (request.job, request.reason, request.steps) == (RUN, "slow", 3)
    assert operator.shown == [f"Bearer {TOKEN}"] * 3
    shown = capsys.readouterr()
    assert json.loads(shown.out)["id"] == ID
    assert all(path.parent == output for path in output.rglob("*")) and len(list(output.iterdir())) == 3
    assert TOKEN not in shown.out + shown.err


def test_captures_are_listed_cancelled_and_removed_through_the_operator(
    operator: Operator, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(captures, "ls", "--run", RUN, *flags) == 0
    assert ID in capsys.readouterr().out
    assert run(captures, "cancel", ID, *flags) == 0
    assert run(captures, "rm", ID, *flags) == 0
    assert operator.deleted == [ID]
    operator.known[ID].state = pb.CAPTURE_STATE_RUNNING
    assert run(captures, "rm", ID, *flags) == Exit.REFUSED
    assert f"rankscope captures cancel {ID} --connect HOST:PORT" in capsys.readouterr().err


def test_a_download_without_a_place_stays_below_here(
    operator: Operator, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    operator.known["../../evil"] = done()
    for rank in (0, 1):
        operator.artifacts[rank] = bytes(done().ranks[rank].bytes)
    assert run(captures, "get", "../../evil", *flags) == 0
    (folder,) = [path for path in tmp_path.iterdir() if path.is_dir() and path.name != "authority"]
    assert len(list(folder.iterdir())) == 3
    assert not (tmp_path.parent.parent / "evil").exists()


def test_the_operators_refusals_are_said_in_its_words(
    operator: Operator, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = grpc.StatusCode
    for refusal, text, status in (
        (code.PERMISSION_DENIED, "ada may not create captures in namespace team; ask for the role", Exit.REFUSED),
        (code.UNAUTHENTICATED, "the token was not accepted; next: kubectl create token", Exit.REFUSED),
        (code.FAILED_PRECONDITION, "no rank is slow now", Exit.REFUSED),
        (code.NOT_FOUND, "no run llama in namespace team", Exit.NOT_FOUND),
        (code.INVALID_ARGUMENT, "name a run as NAMESPACE/RUN", Exit.USAGE),
        (code.UNAVAILABLE, "the API server does not answer; try again", Exit.UNREACHABLE),
    ):
        operator.code = (refusal, text)
        assert run(command, "--run", RUN, *flags, "--steps", "3") == status
        said = capsys.readouterr().err
        assert text in said and TOKEN not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--certificate-authority", "none"], "--certificate-authority"),
        (["--tls-server-name", "other.example"], "say which with --tls-server-name NAME"),
    ],
)
def test_no_token_is_shown_to_somebody_else(
    operator: Operator, flags: list[str], capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    words = list(flags)
    place = words.index(change[0])
    words[place : place + 2] = [] if change[1] == "none" else change
    assert run(command, "--run", RUN, *words, "--steps", "3") == Exit.UNREACHABLE
    assert said in capsys.readouterr().err
    assert operator.shown == []


def test_without_tls_a_token_does_not_leave_this_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANKSCOPE_TOKEN", TOKEN)
    operator = Operator()
    operator.script = [done()]
    server = grpc.server(ThreadPoolExecutor(4), interceptors=(_Looking(operator),))
    capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(operator, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        named = ["--tls-server-name", NAME]
        assert run(command, "--run", RUN, "--connect", f"127.0.0.1:{port}", *named, "--steps", "3") == Exit.UNREACHABLE
        assert "no TLS there" in capsys.readouterr().err
        assert run(command, "--run", RUN, "--connect", f"127.0.0.1:{port}", "--steps", "3") == 0
        assert operator.shown == [""]
        operator.shown.clear()
        assert run(command, "--run", RUN, "--connect", f"127.0.0.1:{port}", "--plaintext", "--steps", "3") == 0
        assert operator.shown == [f"Bearer {TOKEN}"]
        capsys.readouterr()
        assert run(command, "--run", RUN, "--connect", "operator.example:9468", "--plaintext", "--steps", "3") == 2
        assert "nothing is sent to operator.example without TLS" in capsys.readouterr().err
    finally:
        server.stop(0).wait(5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--connect", "h:1", "--context", "prod"], "--connect and --context are two servers"),
        (["--context", "prod"], "no context 'prod'"),
        (["--connect", "nowhere"], "say HOST:PORT"),
        (["--connect", "h:1", "--client-key", "x"], "--client-certificate and --client-key belong together"),
        (["--connect", "h:1", "--certificate-authority", "/etc/hostname"], "there is no PEM certificate in it"),
        (["--token-file", "x"], "--token-file goes with --connect HOST:PORT or --context"),
        (["--connect", "h:1", "--token-file", "/nowhere"], "--token-file /nowhere: cannot be read: No such file"),
        (["--connect", "h:1", "--token-file", "x", "--kubeconfig", "y"], "name one"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_sent(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKSCOPE_TOKEN", raising=False)
    assert run(command, "--run", RUN, "--steps", "3", *words) == 2
    assert said in capsys.readouterr().err


def test_a_server_that_wants_a_certificate_gets_the_clients(
    operator: Operator, authority: Authority, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKSCOPE_TOKEN", raising=False)
    pair, client = authority.issue("daemon", "rankscope-daemon"), authority.issue("client", "rankscope-client")
    credentials = grpc.ssl_server_credentials(
        [(pair.key.read_bytes(), pair.certificate.read_bytes())], authority.certificate.read_bytes(), True
    )
    server = grpc.server(ThreadPoolExecutor(4), interceptors=(_Looking(operator),))
    capture_service_pb2_grpc.add_CaptureServiceServicer_to_server(operator, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    trusting = ["--certificate-authority", str(authority.certificate), "--tls-server-name", "rankscope-daemon"]
    shown = ["--client-certificate", str(client.certificate), "--client-key", str(client.key)]
    try:
        assert run(captures, "ls", "--connect", f"127.0.0.1:{port}", *trusting, *shown) == 0
        assert operator.shown == [""]  # no token: nobody asked for one
        capsys.readouterr()
        assert run(captures, "ls", "--connect", f"127.0.0.1:{port}", *trusting) == Exit.UNREACHABLE
        assert operator.shown == [""]
        assert "certificate (--client-certificate FILE)" in capsys.readouterr().err
    finally:
        server.stop(0).wait(5)


def kubeconfig(path: Path, user: object) -> Path:
    document = {
        "current-context": "here",
        "contexts": [{"name": "other", "context": {"user": "x"}}, {"name": "here", "context": {"user": "ada"}}],
        "users": [{"name": "x", "user": {"token": "wrong"}}, {"name": "ada", "user": user}],
    }
    path.write_text(json.dumps(document))
    return path


def test_the_token_of_a_named_kubeconfig_is_its_current_users(
    operator: Operator, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = flags[: flags.index("--token-file")]
    path = kubeconfig(tmp_path / "config", {"token": TOKEN})
    assert run(command, "--run", RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 0
    (tmp_path / "t").write_text(TOKEN)
    kubeconfig(path, {"tokenFile": "t"})
    assert run(command, "--run", RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 0
    assert set(operator.shown) == {f"Bearer {TOKEN}"}
    capsys.readouterr()
    for user, said in (
        ({"exec": {"command": "aws"}}, "gets its token from a program (exec), which is not run here"),
        ({"client-certificate-data": "x"}, "has no token"),
        ({"token": f"{TOKEN}\nX: y"}, "there is no token in it"),
        ("text", "no current context with a user"),
    ):
        kubeconfig(path, user)
        assert run(command, "--run", RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 2
        shown = capsys.readouterr().err
        assert said in shown and TOKEN not in shown
    path.write_text(f"token: {TOKEN}\n\t- {{")
    assert run(command, "--run", RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 2
    assert TOKEN not in capsys.readouterr().err


def test_only_a_listening_socket_counts_not_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    system = tmp_path / "daemon.sock"
    (tmp_path / "daemon.sock.lock").touch()
    monkeypatch.setattr(connection, "SYSTEM_SOCKET", str(system))
    own = f"unix:{tmp_path / 'own' / 'daemon.sock'}"
    assert "use sudo" not in connection._without_socket(own)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(system))
        listener.listen()
        assert connection._without_socket(own).endswith(f"but one of root at {system}: use sudo")
    assert system.exists()
    assert "use sudo" not in connection._without_socket(own)


def test_a_key_of_another_certificate_is_named(
    authority: Authority, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKSCOPE_TOKEN", raising=False)
    one, other = authority.issue("one", "one"), authority.issue("other", "other")
    words = ["--connect", "h:1", "--client-certificate", str(one.certificate), "--client-key"]
    assert run(captures, "ls", *words, str(other.key)) == Exit.USAGE
    said = capsys.readouterr().err
    assert f"--client-key {other.key} is not the key of --client-certificate {one.certificate}; next step: " in said

    locked = tmp_path / "locked.key"
    key = serialization.load_pem_private_key(one.key.read_bytes(), None)
    form = serialization.BestAvailableEncryption(b"secret")
    locked.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, form))
    assert run(captures, "ls", *words, str(locked)) == Exit.USAGE
    assert "keys must have no password" in capsys.readouterr().err
