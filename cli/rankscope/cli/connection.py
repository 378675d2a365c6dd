"""Connects a command to a daemon, a correlator or an operator: address, TLS, token, and error messages."""

from __future__ import annotations

import argparse
import os
import re
import signal
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc

from rankscope.cli.contexts import TOKEN_VARIABLE, Endpoint, EndpointError, endpoint_of
from rankscope.cli.messages import CommandError, cannot_read, of_call
from rankscope.cli.server_notes import check_owner, running_servers
from rankscope.common.http_server import is_loopback
from rankscope.common.text import printable
from rankscope.daemon.config import default_socket

TOKEN_BYTES = 12 * 1024
KUBECONFIG_BYTES = 4 << 20
_TOKEN = re.compile(r"[A-Za-z0-9._~+/-]+=*")
_NEXT = "next: kubectl create token ACCOUNT --audience rankscope > FILE, and --token-file FILE"
MAX_MESSAGE_BYTES = 64 << 20
PEM_BYTES = 1 << 20
_LISTENS = "00010000"  # a flag in /proc/net/unix
SYSTEM_SOCKET = "/run/rankscope/daemon.sock"
# A list of captures includes the summaries of all ranks, which may exceed gRPC's 4 MiB.
CALL_SECONDS = 15.0
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+):(\d{1,5})")


# The token: from a file, the environment, or a kubeconfig that the user names.
#
# A kubeconfig is never searched for: its token grants access to the API server and must not be sent anywhere without
# the user's request.


def find_token(endpoint: Endpoint) -> str | None:
    """None if there is none: a daemon and a correlator know their callers by certificate."""
    if endpoint.token_file is not None and endpoint.kubeconfig is not None:
        raise EndpointError("--token-file and --kubeconfig are two tokens: name one")
    if endpoint.token_file is not None:
        path = endpoint.token_file
        return _checked(_read(path, "--token-file", TOKEN_BYTES), f"--token-file {path}")
    if endpoint.kubeconfig is not None:
        return _from_kubeconfig(endpoint.kubeconfig)
    given = os.environ.get(TOKEN_VARIABLE)
    return None if given is None else _checked(given, TOKEN_VARIABLE)


def _checked(content: str | bytes, where: str) -> str:
    token = (content.decode(errors="replace") if isinstance(content, bytes) else content).strip()
    if _TOKEN.fullmatch(token) is None or len(token) > TOKEN_BYTES:
        raise EndpointError(f"{where}: there is no token in it; {_NEXT}")
    return token


def _read(path: Path, flag: str, most_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(most_bytes + 1)
    except OSError as error:
        raise EndpointError(f"{flag} {path}: {cannot_read(error)}") from error


def _from_kubeconfig(path: Path) -> str:
    import yaml

    where = f"--kubeconfig {path}"
    try:
        document = yaml.safe_load(_read(path, "--kubeconfig", KUBECONFIG_BYTES))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # The parser's own message quotes the file.
        raise EndpointError(f"{where}: not a kubeconfig") from error
    user = _user(document)
    if user is None:
        raise EndpointError(f"{where}: it has no current context with a user")
    if user.get("token"):
        return _checked(str(user["token"]), where)
    if user.get("tokenFile"):
        named = path.parent / str(user["tokenFile"])
        return _checked(_read(named, f"{where}: tokenFile", TOKEN_BYTES), str(named))
    kind = "gets its token from a program (exec)" if user.get("exec") or user.get("auth-provider") else "has no token"
    raise EndpointError(f"{where}: its user {kind}, which is not run here; {_NEXT}")


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


# The address.


def target_of(address: str | None) -> str:
    """What to pass to gRPC: HOST:PORT, unix:PATH, or this machine's daemon."""
    if address is None:
        return _local_target()
    if address.startswith("/"):
        return f"unix:{address}"
    if address.startswith("unix:") and len(address) > len("unix:"):
        return address
    match = _HOST_AND_PORT.fullmatch(address)
    if match is None or not 0 < int(match[1]) < 65536:
        raise EndpointError(f"--connect {address[:100]!r}: say HOST:PORT or unix:PATH")
    return address


def _local_target() -> str:
    """The daemon at the usual socket; if none listens there, the one server that this user runs on this machine."""
    path = Path(default_socket())
    check_owner(path.parent)
    servers = [] if _is_served(str(path)) else running_servers()
    if len(servers) > 1:
        listed = ", ".join(f"--connect {server.target} ({server.command})" for server in servers)
        raise EndpointError(f"{len(servers)} servers of yours run on this machine; name one of them: {listed}")
    return servers[0].target if servers else f"unix:{path}"


# The channel: TLS, and the token on every call.


def connect(arguments: argparse.Namespace) -> tuple[str, grpc.Channel]:
    """The channel, and the name of its peer in messages. Raises EndpointError before anything is sent."""
    endpoint = endpoint_of(arguments)
    target = target_of(endpoint.connect)
    options: list[tuple[str, Any]] = [
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # A request and its token are for the server, not for a web proxy from the environment.
        ("grpc.enable_http_proxy", 0),
    ]
    host = "" if target.startswith("unix:") else target.rpartition(":")[0].strip("[]")
    is_local = not host or is_loopback(host)
    if endpoint.plaintext and not is_local:
        raise EndpointError(f"--plaintext: nothing is sent to {host} without TLS; leave the flag out")
    files = (endpoint.certificate_authority, endpoint.client_certificate, endpoint.client_key)
    tells_tls = any((*files, endpoint.tls_server_name, endpoint.token_file, endpoint.kubeconfig))
    if not host or (is_local and not endpoint.plaintext and not tells_tls):
        return target, grpc.insecure_channel(target, options)
    token = find_token(endpoint)
    if endpoint.plaintext:
        channel = grpc.insecure_channel(target, options)
    else:
        if endpoint.tls_server_name:
            options.append(("grpc.ssl_target_name_override", endpoint.tls_server_name))
        channel = grpc.secure_channel(target, _credentials(endpoint), options)
    return target, channel if token is None else grpc.intercept_channel(channel, _TokenInterceptor(token))


@contextmanager
def connected(arguments: argparse.Namespace) -> Iterator[tuple[str, grpc.Channel]]:
    """Like `connect`, until the end of the context. A failed call in it becomes a CommandError."""
    # A shell starts background programs with SIGINT ignored; Ctrl-C must still end the command.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    target, channel = connect(arguments)
    with channel:
        try:
            yield target, channel
        except grpc.RpcError as error:
            raise CommandError(explain(target, error), of_call(error)) from error


def _credentials(endpoint: Endpoint) -> grpc.ChannelCredentials:
    if (endpoint.client_certificate is None) != (endpoint.client_key is None):
        raise EndpointError("--client-certificate and --client-key belong together")
    if endpoint.client_certificate is not None and endpoint.client_key is not None:
        _check_key(endpoint.client_certificate, endpoint.client_key)
    return grpc.ssl_channel_credentials(
        _pem("--certificate-authority", endpoint.certificate_authority, b"CERTIFICATE-----"),
        _pem("--client-key", endpoint.client_key, b"PRIVATE KEY-----"),
        _pem("--client-certificate", endpoint.client_certificate, b"CERTIFICATE-----"),
    )


def _check_key(certificate: Path, key: Path) -> None:
    """gRPC would only say that the handshake failed."""
    _pem("--client-certificate", certificate, b"CERTIFICATE-----")
    _pem("--client-key", key, b"PRIVATE KEY-----")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(certificate, key, password=str)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            reason = f"--client-key {key} is not the key of --client-certificate {certificate}"
            raise EndpointError(f"{reason}; next step: name the key that was made with it") from error
        reason = f"--client-certificate {certificate} and --client-key {key} cannot be used"
        raise EndpointError(f"{reason}: {error.reason or error}; keys must have no password") from error


def _pem(flag: str, path: Path | None, kind: bytes) -> bytes | None:
    if path is None:
        return None
    content = _read(path, flag, PEM_BYTES)
    if kind not in content:
        raise EndpointError(f"{flag} {path}: there is no PEM {kind.decode().strip('-').lower()} in it")
    return content


class _TokenInterceptor:
    """Adds the token to every call. gRPC's own call credentials need TLS, which `--plaintext` does not have."""

    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def _with_token(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._metadata]), request)

    intercept_unary_unary = intercept_unary_stream = _with_token


for _kind in (grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):
    _kind.register(_TokenInterceptor)


# Error messages.


def explain(target: str, error: grpc.RpcError) -> str:
    """An error message for the user; the server's own text if there is one."""
    name, details = error.code().name, printable(error.details() or "")
    if name == "UNAVAILABLE":
        return _without_socket(target) if target.startswith("unix:") else _unreachable(target, details)
    if name == "DEADLINE_EXCEEDED":
        return f"{target} does not answer; is that machine overloaded, or the server stopped?"
    if name == "UNIMPLEMENTED":
        return f"{target}: {details}; is that the gRPC port of a daemon (--grpc-listen) or of an API (--api-listen)?"
    if name in ("UNKNOWN", "INTERNAL", "CANCELLED"):
        return f"{target}: {name}: {details}"
    return details or name


def _unreachable(target: str, details: str) -> str:
    lowered = details.lower()
    if "certificate_verify_failed" in lowered:
        return (
            f"{target}: its certificate is not signed by anybody known here, or has ended; name who signed it with "
            "--certificate-authority ca.crt (an operator: ca.crt of the Secret rankscope-api-tls)"
        )
    if "hostname verification" in lowered or "is not in peer certificate" in lowered:
        return f"{target}: its certificate is for another name; say which with --tls-server-name NAME"
    if "handshake failed" in lowered or "wrong_version_number" in lowered:
        return (
            f"{target}: no TLS there, or it refuses your certificate; is that its gRPC port, and does it want a "
            "--client-certificate?"
        )
    if "socket closed" in lowered or "connection reset" in lowered:
        return (
            f"{target} closed the connection; does it stop, or want TLS (--certificate-authority FILE) or your "
            "certificate (--client-certificate FILE)?"
        )
    if "failed to connect" in lowered or "resolution" in lowered or "connection refused" in lowered:
        return (
            f"nobody answers at {target} ({details}); does a server listen there (a daemon with --grpc-listen, an "
            "operator or a correlator with --api-listen), and is that port the right one?"
        )
    return f"{target}: {details}"


def _without_socket(target: str) -> str:
    path = Path(target.removeprefix("unix:").removeprefix("//"))
    if _exists(path):
        if not os.access(path, os.W_OK):
            return f"{path} belongs to another user's daemon; use sudo, or the --connect of a daemon of yours"
        return f"{path}: nobody listens there any more; start `rankscope up` (or `rankscope daemon`) again"
    if str(path) != SYSTEM_SOCKET and _is_served(SYSTEM_SOCKET):
        return f"no daemon of yours at {path}, but one of root at {SYSTEM_SOCKET}: use sudo"
    return f"no daemon at {path}; start `rankscope up` or `rankscope run`, or name another --connect"


def _is_served(path: str) -> bool:
    """By the kernel's list: whether a socket lies in a directory of root, and whether a daemon is behind it, another
    user cannot see."""
    try:
        with Path("/proc/net/unix").open(errors="replace") as lines:
            rows = (line.split(maxsplit=7) for line in lines)
            return any(row[3] == _LISTENS and row[-1].rstrip("\n") == path for row in rows if len(row) == 8)
    except OSError:
        return False


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return True  # in a directory without search permission
