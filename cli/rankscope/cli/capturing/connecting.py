"""Reaches who takes captures, a daemon or the operator: the address, the channel, and words for what goes wrong."""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

import grpc

from rankscope.analysis.drawing.svg import printable
from rankscope.cli.capturing.operator_connecting import LABEL, OperatorError, explain_operator, open_operator_channel
from rankscope.daemon.config import default_socket

SYSTEM_SOCKET = "/run/rankscope/daemon.sock"
# A list of captures carries the summaries of all their ranks, which gRPC's 4 MiB may not hold.
MESSAGE_LIMIT_BYTES = 64 << 20
CALL_SECONDS = 15.0
_HOST_AND_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.%a-z]+\]|[A-Za-z0-9._-]+):(\d{1,5})")
_REFUSALS = ("FAILED_PRECONDITION", "NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "OUT_OF_RANGE")


class EndpointError(Exception):
    pass


def add_endpoint_argument(parser: argparse.ArgumentParser) -> None:
    """Of a daemon; `connect` then takes what `add_operator_arguments` adds as well."""
    parser.add_argument(
        "--endpoint",
        metavar="HOST:PORT",
        help="the daemon to ask, also unix:PATH (default: this machine's, over its Unix socket)",
    )


def target_of(endpoint: str | None) -> str:
    """What to pass to gRPC: HOST:PORT, unix:PATH, or this machine's daemon."""
    if endpoint is None:
        return f"unix:{default_socket()}"
    if endpoint.startswith("/"):
        return f"unix:{endpoint}"
    if endpoint.startswith("unix:") and len(endpoint) > len("unix:"):
        return endpoint
    match = _HOST_AND_PORT.fullmatch(endpoint)
    if match is None or not 0 < int(match[1]) < 65536:
        raise EndpointError(f"--endpoint {endpoint[:100]!r}: say HOST:PORT or unix:PATH")
    return endpoint


def connect(arguments: argparse.Namespace) -> tuple[str, grpc.Channel]:
    """The channel, and how whoever is at its end is called in what is printed. Raises EndpointError."""
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
        # A daemon is reached directly: a proxy that the shell names for the web does not know it.
        options=[("grpc.max_receive_message_length", MESSAGE_LIMIT_BYTES), ("grpc.enable_http_proxy", 0)],
    )


def explain(target: str, error: grpc.RpcError) -> str:
    """In words for the person who asked; the daemon's own words where it gave any."""
    if target.startswith(LABEL):
        return explain_operator(target, error)
    name = error.code().name
    details = printable(error.details() or "")
    if name in _REFUSALS:
        return details or name
    if name == "UNIMPLEMENTED":
        return f"{target}: {details}"
    if name == "UNAVAILABLE":
        return _unreachable(target, details)
    if name == "DEADLINE_EXCEEDED":
        return f"{target} does not answer; is that machine overloaded, or the daemon stopped?"
    return f"{target}: {name}: {details}"


def _unreachable(target: str, details: str) -> str:
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
        return True  # in a directory that we may not enter
