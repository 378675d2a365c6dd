"""Flags of `rankscope operator` about the API for people."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rankscope.operator.kube.operator_settings import OperatorSettings
from rankscope.operator.kube.people.serving import PORT, PeopleSettings


def add_people_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("captures for people (docs/api.md)", "`rankscope capture --operator HOST:PORT`")
    group.add_argument(
        "--api-listen", metavar="HOST:PORT", help=f"serve them here, usually 0.0.0.0:{PORT} (default: no such API)"
    )
    group.add_argument(
        "--api-certificate",
        type=Path,
        metavar="FILE",
        help="for callers of this API, of alerts and of --metrics-auth; with the next one",
    )
    group.add_argument("--api-key", type=Path, metavar="FILE", help="its key")
    group.add_argument(
        "--api-audience",
        default=PeopleSettings.audience,
        metavar="TEXT",
        help="what people's tokens have to be for (default: %(default)s)",
    )


def with_people(settings: OperatorSettings, arguments: argparse.Namespace) -> OperatorSettings:
    if (arguments.api_certificate is None) != (arguments.api_key is None):
        raise ValueError("--api-certificate and --api-key belong together")
    if arguments.api_listen is None:
        return settings
    host, _, port = arguments.api_listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"--api-listen {arguments.api_listen!r} is not HOST:PORT")
    if not arguments.api_audience.strip():
        raise ValueError("--api-audience is empty: tokens for the API server are not for us to see")
    return replace(settings, people=PeopleSettings(host.strip("[]"), int(port), arguments.api_audience))
