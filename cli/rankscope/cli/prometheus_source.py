"""Commands that read history from Prometheus, Thanos or Mimir: options in common, and what to say if that fails."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from rankscope.cli.messages import CommandError, Exit, cannot_read
from rankscope.cli.options import add_since_argument, duration_seconds
from rankscope.operator.prometheus_api import Failure, PrometheusApi, read_token

MAX_SINCE_SECONDS: Final = 92 * 86400.0
MAX_TENANT_CHARACTERS: Final = 256
_FAILURES: Final = {
    Failure.UNREACHABLE: (Exit.UNREACHABLE, "see that it runs and that this machine reaches it"),
    Failure.REFUSED: (Exit.REFUSED, "pass --token-file or --tenant"),
    Failure.NO_API: (Exit.USAGE, "see that --prometheus is the address of its API"),
    Failure.EMPTY: (
        Exit.NOT_FOUND,
        "see that it scrapes daemons and operator (docs/metrics.md#scraping), or ask for a longer --since",
    ),
}


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    add_since_argument(parser, "7d")
    parser.add_argument("--prometheus", default="", metavar="URL", help="address of Prometheus, Thanos or Mimir")
    parser.add_argument(
        "--tenant", default="", metavar="NAME", help="tenant of Mimir to ask for (header X-Scope-OrgID)"
    )
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token to send")


def since_seconds(arguments: argparse.Namespace) -> float:
    """Raises CommandError."""
    seconds = duration_seconds("--since", arguments.since)
    if seconds > MAX_SINCE_SECONDS:
        raise CommandError(f"--since {arguments.since}: at most {MAX_SINCE_SECONDS / 86400:.0f}d")
    return seconds


def source(arguments: argparse.Namespace, example: str, request_seconds: float, max_answer_bytes: int) -> PrometheusApi:
    """The server that the options name; it is not asked yet. `example` is a command that names one. Raises
    CommandError."""
    if not arguments.prometheus:
        raise CommandError(f"--prometheus is missing: the history of the fleet is there; next step: {example}")
    if arguments.token_file is not None:
        try:
            read_token(arguments.token_file)
        except (OSError, ValueError) as error:
            raise CommandError(f"--token-file {arguments.token_file}: {cannot_read(error)}") from error
    try:
        return PrometheusApi(
            arguments.prometheus,
            request_seconds,
            max_answer_bytes,
            tenant=_tenant(arguments.tenant),
            token_file=arguments.token_file,
        )
    except ValueError as error:
        raise CommandError(f"--prometheus {arguments.prometheus[:80]}: {error}") from error


def explained(url: str, failure: Failure, text: str) -> CommandError:
    status, step = _FAILURES[failure]
    return CommandError(f"{url}: {text}; next step: {step}", status)


def _tenant(text: str) -> str:
    if not (text.isascii() and text.isprintable() and len(text) <= MAX_TENANT_CHARACTERS):
        raise CommandError(
            f"--tenant {text[:40]!r}: must be at most {MAX_TENANT_CHARACTERS} printable ASCII characters"
        )
    return text
