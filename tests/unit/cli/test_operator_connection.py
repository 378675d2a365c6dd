from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import grpc
import pytest

from rankscope.cli import capture as command
from rankscope.cli import captures
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
    trusting = ["--operator-authority", str(authority.certificate), "--operator-name", NAME]
    return ["--operator", address, *trusting, "--token-file", str(tmp_path / "token")]


def run(module: ModuleType, *words: str) -> int:
    parser = argparse.ArgumentParser(prog="rankscope")
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(words)))


def test_a_run_is_captured_through_the_operator_with_the_token_shown_on_every_call(
    operator: Operator, flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        operator.artifacts[rank] = bytes(done().ranks[rank].bytes)
    output = tmp_path / "traces"
    assert run(command, RUN, *flags, "--steps", "3", "--reason", "slow", "--output", str(output), "--json") == 0
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
    assert run(captures, "ls", "--job", RUN, *flags) == 0
    assert ID in capsys.readouterr().out
    assert run(captures, "cancel", ID, *flags) == 0
    assert run(captures, "rm", ID, *flags) == 0
    assert operator.deleted == [ID]
    operator.known[ID].state = pb.CAPTURE_STATE_RUNNING
    assert run(captures, "rm", ID, *flags) == 2
    assert f"rankscope captures cancel {ID} --operator HOST:PORT" in capsys.readouterr().err


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
    for code, text in (
        (grpc.StatusCode.PERMISSION_DENIED, "ada may not create captures in namespace team; ask for the role"),
        (grpc.StatusCode.UNAUTHENTICATED, "the token was not accepted; next: kubectl create token"),
        (grpc.StatusCode.FAILED_PRECONDITION, "no rank is slow now"),
        (grpc.StatusCode.UNAVAILABLE, "the API server does not answer; try again"),
    ):
        operator.code = (code, text)
        assert run(command, RUN, *flags, "--steps", "3") == 2
        said = capsys.readouterr().err
        assert text in said and TOKEN not in said


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--operator-authority", "none"], "--operator-authority"),
        (["--operator-name", "other.example"], "say which with --operator-name NAME"),
    ],
)
def test_no_token_is_shown_to_somebody_else(
    operator: Operator, flags: list[str], capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    words = list(flags)
    place = words.index(change[0])
    words[place : place + 2] = [] if change[1] == "none" else change
    assert run(command, RUN, *words, "--steps", "3") == 2
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
        assert run(command, RUN, "--operator", f"127.0.0.1:{port}", "--steps", "3") == 2
        assert "no TLS there" in capsys.readouterr().err
        assert operator.shown == []
        assert run(command, RUN, "--operator", f"127.0.0.1:{port}", "--plaintext", "--steps", "3") == 0
        assert operator.shown == [f"Bearer {TOKEN}"]
        capsys.readouterr()
        assert run(command, RUN, "--operator", "operator.example:9468", "--plaintext", "--steps", "3") == 2
        assert "not sent to operator.example without TLS" in capsys.readouterr().err
    finally:
        server.stop(0).wait(5)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--operator", "h:1", "--endpoint", "unix:/x"], "name one"),
        (["--operator", "nowhere"], "say HOST:PORT"),
        (["--operator", "h:1"], "kubectl create token ACCOUNT --audience rankscope"),
        (["--token-file", "x"], "--token-file goes with --operator"),
        (["--operator", "h:1", "--token-file", "/nowhere"], "--token-file /nowhere: No such file"),
        (["--operator", "h:1", "--token-file", "x", "--kubeconfig", "y"], "name one"),
    ],
)
def test_what_is_missing_is_said_before_anything_is_sent(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RANKSCOPE_TOKEN", raising=False)
    assert run(command, RUN, "--steps", "3", *words) == 2
    assert said in capsys.readouterr().err


def test_a_run_needs_its_namespace(flags: list[str], operator: Operator, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(command, "llama", *flags, "--steps", "3") == 2
    assert run(command, *flags, "--steps", "3") == 2
    assert capsys.readouterr().err.count("NAMESPACE/RUN") == 2
    assert operator.shown == []


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
    assert run(command, RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 0
    (tmp_path / "t").write_text(TOKEN)
    kubeconfig(path, {"tokenFile": "t"})
    assert run(command, RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 0
    assert set(operator.shown) == {f"Bearer {TOKEN}"}
    capsys.readouterr()
    for user, said in (
        ({"exec": {"command": "aws"}}, "gets its token from a program (exec), which is not run here"),
        ({"client-certificate-data": "x"}, "has no token"),
        ({"token": f"{TOKEN}\nX: y"}, "there is no token in it"),
        ("text", "no current context with a user"),
    ):
        kubeconfig(path, user)
        assert run(command, RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 2
        shown = capsys.readouterr().err
        assert said in shown and TOKEN not in shown
    path.write_text(f"token: {TOKEN}\n\t- {{")
    assert run(command, RUN, *words, "--kubeconfig", str(path), "--steps", "3") == 2
    assert TOKEN not in capsys.readouterr().err
