"""Connects to the daemon or the operator: address, channel, token, and error messages."""

from __future__ import annotations

import argparse
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from rankscope.common.http_server import is_loopback
from rankscope.common.text import printable
from rankscope.daemon.config import default_socket

VARIABLE = "RANKSCOPE_TOKEN"
TOKEN_BYTES = 12 * 1024
KUBECONFIG_BYTES = 4 << 20
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_NEXT = "next: kubectl create token ACCOUNT --audience rankscope > FILE, and --token-file FILE"
MESSAGE_LIMIT_BYTES = 64 << 20
AUTHORITY_BYTES = 1 << 20
# Prefix of HOST:PORT in messages.
LABEL = "the operator at "
SYSTEM_SOCKET = "/run/rankscope/daemon.sock"
# A list of captures includes the summaries of all ranks, which may exceed gRPC's 4 MiB.
CALL_SECONDS = 15.0
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_REFUSALS = ("FAILED_PRECONDITION", "NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE")


# The operator's token: from a file, the environment, or a kubeconfig that the user names.
#
# A kubeconfig is never searched for: its token grants access to the API server and must not be sent anywhere without
# the user's request.


class NoTokenError(Exception):
    """What is missing, and the next step. Never contains a token."""


def find_token(token_file: Path | None, kubeconfig: Path | None) -> str:
    if token_file is not None and kubeconfig is not None:
        raise NoTokenError("--token-file and --kubeconfig are two tokens: name one")
    if token_file is not None:
        return _checked(_read(token_file, "--token-file", TOKEN_BYTES), f"--token-file {token_file}")
    if kubeconfig is not None:
        return _from_kubeconfig(kubeconfig)
    given = os.environ.get(VARIABLE)
    if given is None:
        raise NoTokenError(f"the operator asks for a token; {_NEXT} (or {VARIABLE} in the environment)")
    return _checked(given, VARIABLE)


def _checked(text: str, where: str) -> str:
    token = text.strip()
    if _TOKEN.fullmatch(token) is None or len(token) > TOKEN_BYTES:
        raise NoTokenError(f"{where}: there is no token in it; {_NEXT}")
    return token


def _read(path: Path, flag: str, most_bytes: int) -> str:
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1).decode("utf-8", errors="replace")
    except OSError as error:
        raise NoTokenError(f"{flag} {path}: {error.strerror}") from error


def _from_kubeconfig(path: Path) -> str:
    import yaml

    where = f"--kubeconfig {path}"
    try:
        document = yaml.safe_load(_read(path, "--kubeconfig", KUBECONFIG_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The parser's own message quotes the file.
        raise NoTokenError(f"{where}: not a kubeconfig") from error
    user = _user(document)
    if user is None:
        raise NoTokenError(f"{where}: it has no current context with a user")
    if user.get("token"):
        return _checked(str(user["token"]), where)
    if user.get("tokenFile"):
        named = path.parent / str(user["tokenFile"])
        return _checked(_read(named, f"{where}: tokenFile", TOKEN_BYTES), str(named))
    kind = "gets its token from a program (exec)" if user.get("exec") or user.get("auth-provider") else "has no token"
    raise NoTokenError(f"{where}: its user {kind}, which is not run here; {_NEXT}")


def _user(document: Any) -> dict[str, Any] | None:
    if not isinstance(document, dict):
        return None
    context = _named(document.get("contexts"), document.get("current-context"), "context")
    return None if context is None else _named(document.get("users"), context.get("user"), "user")


def _named(entries: Any, name: Any, kind: str) -> dict[str, Any] | None:
    for entry in entries if isinstance(entries, list) else ():
        if isinstance(entry, dict) and entry.get("name") == name and isinstance(entry.get(kind), dict):
            return dict(entry[kind])
    return None


# The operator's API: TLS, a token on every call, and error messages.


class OperatorError(Exception):
    """Nothing was sent: names the flag, the reason and the next step."""


def add_operator_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("through the operator of a cluster (docs/api.md)")
    group.add_argument("--operator", metavar="HOST:PORT", help="the operator to ask, in place of a daemon")
    group.add_argument(
        "--operator-authority", type=Path, metavar="FILE", help="who signed its certificate (default: the system's)"
    )
    group.add_argument("--operator-name", metavar="NAME", help="in its certificate, where HOST is not (a port-forward)")
    group.add_argument("--token-file", type=Path, metavar="FILE", help=f"your token (default: {VARIABLE})")
    group.add_argument("--kubeconfig", type=Path, metavar="FILE", help="show the token of its current user")
    group.add_argument("--plaintext", action="store_true", help="without TLS; to this machine only")


def open_operator_channel(arguments: argparse.Namespace, host: str, target: str) -> grpc.Channel:
    """Raises OperatorError before anything is sent."""
    try:
        token = find_token(arguments.token_file, arguments.kubeconfig)
    except NoTokenError as error:
        raise OperatorError(str(error)) from error
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES),
        # The token is for the operator, not for a web proxy from the environment.
        ("grpc.enable_http_proxy", 0),
    ]
    if arguments.plaintext:
        if not is_loopback(host):
            raise OperatorError(f"--plaintext: a token is not sent to {host} without TLS; leave the flag out")
        channel = grpc.insecure_channel(target, options)
    else:
        if arguments.operator_name:
            options.append(("grpc.ssl_target_name_override", arguments.operator_name))
        channel = grpc.secure_channel(target, grpc.ssl_channel_credentials(_authority(arguments)), options)
    return grpc.intercept_channel(channel, _ShowToken(token))


def _authority(arguments: argparse.Namespace) -> bytes | None:
    path: Path | None = arguments.operator_authority
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            content = file.read(AUTHORITY_BYTES)
    except OSError as error:
        raise OperatorError(f"--operator-authority {path}: {error.strerror}") from error
    if b"-----BEGIN CERTIFICATE-----" not in content:
        raise OperatorError(f"--operator-authority {path}: there is no PEM certificate in it")
    return content


# grpc has no types, and `intercept_channel` accepts instances of these classes only. gRPC's own call credentials
# need TLS, which `--plaintext` to this machine does not have.
class _ShowToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]
    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def _shown(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._metadata]), request)

    intercept_unary_unary = intercept_unary_stream = _shown


def explain_operator(target: str, error: grpc.RpcError) -> str:
    """An error message for the user; the operator's own text if there is one."""
    name, details = error.code().name, printable(error.details() or "")
    if name == "UNAVAILABLE":
        return _unreachable(target, details)
    if name == "DEADLINE_EXCEEDED":
        return f"{target} does not answer; is it overloaded?"
    if name == "UNIMPLEMENTED":
        return f"{target}: {details}; is that the port of its API (--api-listen), and not of a daemon?"
    return details or name


def _unreachable(target: str, details: str) -> str:
    lowered = details.lower()
    if "certificate_verify_failed" in lowered:
        return (
            f"{target}: its certificate is not signed by anybody known here, or has ended; name who signed it with "
            "--operator-authority ca.crt (ca.crt of the Secret rankscope-api-tls)"
        )
    if "hostname verification" in lowered or "is not in peer certificate" in lowered:
        return f"{target}: its certificate is for another name; say which with --operator-name NAME"
    if "handshake failed" in lowered or "wrong_version_number" in lowered:
        return f"{target}: no TLS there; is that the port of its API (--api-listen)?"
    if "failed to connect" in lowered or "resolution" in lowered or "connection refused" in lowered:
        return f"nobody answers at {target.removeprefix(LABEL)} ({details}); does the operator run with --api-listen?"
    return f"{target}: {details}"


class EndpointError(Exception):
    pass


def add_endpoint_argument(parser: argparse.ArgumentParser) -> None:
    """For a daemon; `connect` also accepts what `add_operator_arguments` adds."""
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="the daemon to ask, also unix:PATH (default: this machine's, over its Unix socket)",
    )


def target_of(endpoint: str | None) -> str:
    """What to pass to gRPC: HOST:PORT, unix:PATH, or this machine's daemon."""
    if endpoint is None:
        path = Path(default_socket())
        _check_owner(path.parent)
        return f"unix:{path}"
    if endpoint.startswith("/"):
        return f"unix:{endpoint}"
    if endpoint.startswith("unix:") and len(endpoint) > len("unix:"):
        return endpoint
    match = _HOST_AND_PORT.fullmatch(endpoint)
    if match is None or not 0 < int(match[1]) < 65536:
        raise EndpointError(f"--endpoint {endpoint[:100]!r}: say HOST:PORT or unix:PATH")
    return endpoint


def _check_owner(directory: Path) -> None:
    """Anybody can make the directory in /tmp, and would then get requests that are meant for this user's daemon."""
    try:
        status = directory.lstat()
    except FileNotFoundError:
        return
    except OSError as error:
        raise EndpointError(f"{directory}: {error.strerror}; name the daemon with --endpoint") from error
    is_open = stat.S_IMODE(status.st_mode) & 0o022
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or is_open:
        raise EndpointError(
            f"{directory} is not trusted: it must be a directory of user {os.geteuid()} that only this user can write "
            "to. Remove it and restart your daemon, or name a daemon with --endpoint unix:PATH"
        )


def connect(arguments: argparse.Namespace) -> tuple[str, grpc.Channel]:
    """The channel, and a name for its peer in messages. Raises EndpointError."""
    if arguments.operator is None:
        for flag in ("operator_authority", "operator_name", "token_file", "kubeconfig", "plaintext"):
            if getattr(arguments, flag):
                raise EndpointError(f"--{flag.replace('_', '-')} goes with --operator HOST:PORT")
        target = target_of(arguments.endpoint)
        return target, open_channel(target)
    if arguments.endpoint is not None:
        raise EndpointError("--operator and --endpoint are two places: name one")
    match = _HOST_AND_PORT.fullmatch(arguments.operator)
    if match is None or not 0 < int(match[1]) < 65536:
        raise EndpointError(f"--operator {arguments.operator[:100]!r}: say HOST:PORT")
    host = arguments.operator.rpartition(":")[0].strip("[]")
    try:
        return LABEL + arguments.operator, open_operator_channel(arguments, host, arguments.operator)
    except OperatorError as error:
        raise EndpointError(str(error)) from error


def open_channel(target: str) -> grpc.Channel:
    return grpc.insecure_channel(
        target,
        # A daemon is reached directly: a web proxy from the environment does not know it.
        options=[("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES), ("grpc.enable_http_proxy", 0)],
    )


def explain(target: str, error: grpc.RpcError) -> str:
    """An error message for the user; the daemon's own text if there is one."""
    if target.startswith(LABEL):
        return explain_operator(target, error)
    name = error.code().name
    details = printable(error.details() or "")
    if name in _REFUSALS:
        return details or name
    if name == "UNIMPLEMENTED":
        return f"{target}: {details}"
    if name == "UNAVAILABLE":
        return _connecting_unreachable(target, details)
    if name == "DEADLINE_EXCEEDED":
        return f"{target} does not answer; is that machine overloaded, or the daemon stopped?"
    return f"{target}: {name}: {details}"


def _connecting_unreachable(target: str, details: str) -> str:
    if not target.startswith("unix:"):
        return (
            f"nobody answers at {target} ({details}); is a daemon running there with --grpc-listen, and is the port "
            "its gRPC port?"
        )
    path = Path(target.removeprefix("unix:").removeprefix("//"))
    if _exists(path):
        if not os.access(path, os.W_OK):
            return f"{path} belongs to another user's daemon; use sudo, or the --endpoint of a daemon of yours"
        return f"{path}: nobody listens there any more; start `rankscope up` (or `rankscope daemon`) again"
    if str(path) != SYSTEM_SOCKET and _exists(Path(SYSTEM_SOCKET)):
        return f"no daemon of yours at {path}, but one of root at {SYSTEM_SOCKET}: use sudo"
    return f"no daemon at {path}; start `rankscope up` (or `rankscope daemon`), or name another --endpoint"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # in a directory without search permission
