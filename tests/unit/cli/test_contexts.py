from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from rankscope.cli import contexts
from rankscope.cli.contexts import Endpoint, EndpointError, contexts_path, endpoint_of, load_contexts
from rankscope.cli.main import main, make_parser
from rankscope.cli.messages import Exit

Output = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(contexts.VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    return contexts_path()


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o600)


def chosen(*words: str) -> Endpoint:
    import rankscope.cli.top as top

    parser, places = make_parser()
    top.add_arguments(places["top"])
    return endpoint_of(parser.parse_args(["top", *words]))


def test_a_context_is_set_used_listed_and_deleted(own_file: Path, tmp_path: Path, capsys: Output) -> None:
    flags = ["--connect", "h.example:9468", "--certificate-authority", "ca.crt", "--token-file", "token"]
    assert main(["context", "set", "prod", *flags]) == 0
    assert main(["context", "set", "lab", "--connect", "unix:/run/d.sock"]) == 0
    assert own_file.stat().st_mode & 0o777 == 0o600
    assert chosen().connect is None
    assert main(["context", "use", "prod"]) == 0
    # Paths of the flags are relative to where they were typed.
    assert chosen() == Endpoint(
        "h.example:9468", certificate_authority=tmp_path / "ca.crt", token_file=tmp_path / "token"
    )
    capsys.readouterr()
    assert main(["context", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:8] for line in lines] == ["  local ", "  lab   ", "* prod  "]
    assert main(["context", "list", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["contexts"]
    assert [(one["name"], one["current"]) for one in told] == [("local", False), ("lab", False), ("prod", True)]
    assert main(["context", "list", "--names"]) == 0
    assert capsys.readouterr().out.split() == ["local", "lab", "prod"]
    assert main(["context", "delete", "prod"]) == 0
    assert (set(load_contexts().named), load_contexts().current) == ({"lab"}, "local")


def test_the_flag_overrides_the_environment_which_overrides_the_file(
    own_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(own_file, "current: a\ncontexts: {a: {connect: 'a:1'}, b: {connect: 'b:1'}, c: {connect: 'c:1'}}\n")
    assert chosen().connect == "a:1"
    monkeypatch.setenv("RANKSCOPE_CONTEXT", "b")
    assert chosen().connect == "b:1"
    assert chosen("--context", "c").connect == "c:1"
    assert chosen("--context", "local") == Endpoint()


def test_a_contexts_token_is_not_sent_to_another_server(own_file: Path) -> None:
    write(own_file, "current: a\ncontexts: {a: {connect: 'a:1', token-file: token, tls-server-name: n}}\n")
    # Paths in the file are relative to the file.
    assert chosen().token_file == own_file.parent / "token"
    assert chosen("--connect", "other:1") == Endpoint("other:1")
    assert chosen("--tls-server-name", "x").tls_server_name == "x"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- {", "not YAML"),
        ("[]", "its keys are"),
        ("contexts: {a: {}}", "needs `connect: HOST:PORT`"),
        ("contexts: {a: {connect: 'h:1', token: SECRET}}", "a token is kept in a file that token-file names"),
        ("contexts: {a: {connect: 'h:1', plaintext: SECRET}}", "plaintext must be true or false"),
        ("contexts: SECRET", "`contexts` holds names"),
        ("current: gone", "no context 'gone'"),
    ],
)
def test_a_file_that_is_wrong_is_refused_without_quoting_it(own_file: Path, text: str, reason: str) -> None:
    write(own_file, text)
    with pytest.raises(EndpointError) as error:
        chosen()
    assert reason in str(error.value) and str(own_file) in str(error.value)
    assert "SECRET" not in str(error.value)


def test_a_file_that_others_can_write_is_not_trusted(own_file: Path, capsys: Output) -> None:
    write(own_file, "contexts: {}")
    own_file.chmod(0o620)
    assert main(["top", "--once"]) == Exit.USAGE
    assert f"others may write it; next: chmod 600 {own_file}" in capsys.readouterr().err
    own_file.unlink()
    os.mkfifo(own_file)
    assert main(["context", "list"]) == Exit.USAGE
    assert "not a plain file" in capsys.readouterr().err


def test_a_file_of_another_user_is_not_trusted(own_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Output) -> None:
    write(own_file, "contexts: {}")
    mine = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: mine + 1)
    assert main(["context", "list"]) == Exit.USAGE
    assert f"it belongs to user {mine}, and you are user {mine + 1}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["set", "local", "--connect", "h:1"], "'local' is this machine's daemon"),
        (["set", "a/b", "--connect", "h:1"], "up to 63 letters"),
        (["set", "a"], "name the server with --connect"),
        (["set", "a", "--connect", "nowhere"], "say HOST:PORT"),
        (["use", "gone"], "no context 'gone'"),
        (["delete", "gone"], "no context 'gone'"),
    ],
)
def test_a_wrong_name_or_address_is_refused(words: list[str], reason: str, own_file: Path, capsys: Output) -> None:
    assert main(["context", *words]) == Exit.USAGE
    assert reason in capsys.readouterr().err
    assert not own_file.exists()
