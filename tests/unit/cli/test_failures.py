"""The same failure has the same text and the same exit status in every command, and the same option the same form."""

from __future__ import annotations

import argparse
import importlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from rankscope.cli.main import MODULES, main, make_parser
from rankscope.cli.messages import CommandError, Exit
from rankscope.cli.profile_client import one_run
from rankscope.daemon.captures.request import choose_run
from rankscope.daemon.captures.service import CaptureServicer
from rankscope.daemon.captures.store import Store
from rankscope.v1.capture_service_pb2 import StartCaptureRequest
from rankscope.v1.capture_service_pb2_grpc import add_CaptureServiceServicer_to_server

DATA = Path(__file__).parents[2] / "data"
TRACE = DATA / "h200" / "launch_bound.json.gz"
COLLECTIVES = DATA / "h200" / "gloo_2ranks_rank0.json.gz"
SERVED = [
    ("top", "--once"),
    ("flame",),
    ("stacks",),
    ("hangs",),
    ("capture", "--steps", "1"),
    ("captures", "ls"),
    ("captures", "show", "c-1"),
    ("captures", "get", "c-1"),
    ("captures", "cancel", "c-1"),
    ("captures", "rm", "c-1"),
    ("report", "fleet"),
    ("doctor",),
]
SELECTING = [*SERVED[:3], SERVED[4], SERVED[7]]
READING: list[tuple[str, ...]] = [
    ("analyze", "trace"),
    ("analyze", "timeline"),
    ("analyze", "recording"),
    ("analyze", "alphabeta"),
    ("analyze", "nccl-log"),
    ("analyze", "flight-recorder"),
    ("advise",),
    ("predict",),
    ("compare", "--b", "x", "--a"),
    ("report", "captures"),
    ("mfu", "--model-config"),
    ("mfu", "--memory-trace"),
    ("daemon", "--config"),
    ("up", "--config"),
    ("doctor", "--config"),
    ("top", "--connect", "127.0.0.1:1", "--token-file"),
    ("captures", "ls", "--connect", "127.0.0.1:1", "--certificate-authority"),
    ("export", "-o", "x", "--prometheus", "http://127.0.0.1:1", "--token-file"),
    ("report", "fleet", "--prometheus", "http://127.0.0.1:1", "--token-file"),
]
Output = pytest.CaptureFixture[str]


def failed(words: Sequence[str], capsys: Output) -> tuple[int, str]:
    """The exit status, and the one line on stderr."""
    status = main(words)
    said = capsys.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1), said
    return status, said.err.removeprefix("error: ")


@pytest.mark.parametrize("words", SERVED, ids=" ".join)
def test_without_a_server(words: tuple[str, ...], tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "none.sock"
    status, text = failed([*words, "--connect", f"unix:{path}"], capsys)
    assert status == Exit.UNREACHABLE
    assert text.startswith((f"no daemon at {path}; start `rankscope up`", "no daemon of yours at"))


@contextmanager
def refusing(code: grpc.StatusCode, text: str) -> Iterator[str]:
    """A server that refuses every call."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
            return grpc.unary_unary_rpc_method_handler(lambda request, context: context.abort(code, text))

    server = grpc.server(ThreadPoolExecutor(2), handlers=[Handler()])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("words", SERVED, ids=" ".join)
@pytest.mark.parametrize("code", [grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.RESOURCE_EXHAUSTED], ids=str)
def test_refused_by_the_server(words: tuple[str, ...], code: grpc.StatusCode, capsys: Output) -> None:
    with refusing(code, "no, says the server") as address:
        status, said = failed([*words, "--connect", address], capsys)
    # `report fleet` can ask Prometheus instead, and says so.
    assert (status, said.split("; or ")[0].strip()) == (Exit.REFUSED, "no, says the server")


@pytest.mark.parametrize("words", SELECTING, ids=" ".join)
@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ("x", "or numbers and ranges, as in 0-7,12"),
        ("-1", "or numbers and ranges"),
        ("0,,1", "or numbers and ranges"),
        ("3-1", "as in 1-3"),
        ("0-999999999", "131072 at most"),
        ("0," * 3000, "use ranges"),
    ],
    ids=lambda text: text[:12],
)
def test_a_bad_selection_of_ranks(words: tuple[str, ...], ranks: str, text: str, capsys: Output) -> None:
    with refusing(grpc.StatusCode.NOT_FOUND, "no such capture") as address:
        status, said = failed([*words, f"--ranks={ranks}", "--connect", address], capsys)
    if words[:2] != ("captures", "get"):  # this one looks the capture up first
        assert (status, said.startswith("--ranks"), text in said) == (Exit.USAGE, True, True), said


@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_a_file_that_is_not_there(words: tuple[str, ...], tmp_path: Path, capsys: Output) -> None:
    path = tmp_path / "none.json"
    status, said = failed([*words, str(path)], capsys)
    assert status == Exit.USAGE
    assert f"{path}: cannot be read: No such file or directory" in said


@pytest.mark.parametrize(
    ("words", "option"),
    [
        (("analyze", "trace", str(TRACE)), "--html"),
        (("analyze", "trace", str(TRACE)), "--merged"),
        (("analyze", "trace", str(TRACE)), "--flame"),
        (("predict", str(TRACE)), "--html"),
        (("analyze", "alphabeta", str(COLLECTIVES)), "--html"),
        (("analyze", "alphabeta", str(COLLECTIVES)), "--svg"),
        (("capture", "--steps", "1"), "-o"),
        (("daemon", "--socket", "none", "--metrics-listen", "none", "--captures", "false"), "--audit-log"),
    ],
    ids=lambda each: " ".join(each[:2]) if isinstance(each, tuple) else each,
)
def test_a_file_that_cannot_be_written(words: tuple[str, ...], option: str, capsys: Output) -> None:
    path = f"/proc/nowhere{'.html' if option in ('--flame', '--html') else ''}"
    status, said = failed([*words, option, path], capsys)
    assert (status, said) == (
        Exit.USAGE,
        f"{path}: cannot be written: No such file or directory; next step: name another with {option}\n",
    )


@pytest.mark.parametrize(
    ("wanted", "runs", "status", "text"),
    [
        ("", {"a", "b"}, Exit.USAGE, "several runs are seen: a, b; name one with --run"),
        ("", set(), Exit.NOT_FOUND, "no run is seen now; `rankscope top` shows what is"),
        ("c", {"a", "b"}, Exit.NOT_FOUND, "no run 'c' is seen now; there is a, b"),
    ],
)
def test_which_run(wanted: str, runs: set[str], status: Exit, text: str, capsys: Output) -> None:
    """`flame`, `stacks` and `capture --nsight` choose here, `capture` lets the daemon choose."""
    with pytest.raises(CommandError, match=re.escape(text)) as raised:
        one_run(wanted, runs)
    assert raised.value.status == status

    def start(request: StartCaptureRequest, requested_by: str) -> str:
        return choose_run(request.job, runs)

    runner: Any = SimpleNamespace(start=start, audit=SimpleNamespace(refused=lambda *_: None))
    server = grpc.server(ThreadPoolExecutor(2))
    add_CaptureServiceServicer_to_server(CaptureServicer(runner, Store.__new__(Store)), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        assert failed(["capture", "--steps", "1", "--run", wanted, "--connect", f"127.0.0.1:{port}"], capsys) == (
            status,
            f"{text}\n",
        )
    finally:
        server.stop(None).wait()


def parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Of all commands and their actions."""
    _, places = make_parser()
    for words, place in places.items():
        importlib.import_module(MODULES[words]).add_arguments(place)
        below = [action for action in place._actions if isinstance(action, argparse._SubParsersAction)]
        yield from ((f"{words} {name}", each) for action in below for name, each in action.choices.items())
        yield words, place


ONE_FORM = (
    *("--json", "--html", "--run", "--ranks", "--since", "--config", "--connect", "--context", "--token-file"),
    *("--certificate-authority", "--client-certificate", "--client-key", "--tls-server-name", "--plaintext"),
    *("--prometheus-url", "--mfu-target", "--seconds", "--log-level", "--tls-certificate", "--tls-key"),
)


def test_an_option_has_the_same_form_in_every_command() -> None:
    forms = defaultdict(set)
    for words, parser in parsers():
        for action in parser._actions:
            for name in {*action.option_strings} & {*ONE_FORM}:
                choices = "|".join(action.choices) if action.choices else None
                forms[name].add((action.nargs, action.metavar or choices, type(action).__name__))
            if "--output" in action.option_strings:
                assert (action.option_strings, action.metavar in ("FILE", "DIR")) == (["-o", "--output"], True), words
    assert {name: found for name, found in forms.items() if len(found) > 1} == {}
    assert forms.keys() == {*ONE_FORM}


def test_choices_are_shown() -> None:
    for words, parser in parsers():
        for action in parser._actions:
            if action.option_strings and action.choices and action.metavar:
                assert action.metavar == "|".join(map(str, action.choices)), (words, action.option_strings)
