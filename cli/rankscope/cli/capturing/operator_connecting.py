"""Reaches the operator's API for people: TLS, a token on every call, and words for what goes wrong on the way."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc

from rankscope.analysis.drawing.svg import printable
from rankscope.cli.capturing.operator_tokens import VARIABLE, NoTokenError, find_token
from rankscope.wire.addresses import is_loopback

MESSAGE_LIMIT_BYTES = 64 << 20
AUTHORITY_BYTES = 1 << 20
# Its word in what is printed, before HOST:PORT.
LABEL = "the operator at "


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
        # The token is for the operator: not for a proxy that the shell names for the web.
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


class _ShowToken(grpc.UnaryUnaryClientInterceptor, grpc.UnaryStreamClientInterceptor):  # type: ignore[misc]  # untyped
    def __init__(self, token: str) -> None:
        self._metadata = ("authorization", f"Bearer {token}")

    def _shown(self, continuation: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        return continuation(details._replace(metadata=[*(details.metadata or ()), self._metadata]), request)

    intercept_unary_unary = intercept_unary_stream = _shown


def explain_operator(target: str, error: grpc.RpcError) -> str:
    """In words for the person who asked; the operator's own words where it gave any."""
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
