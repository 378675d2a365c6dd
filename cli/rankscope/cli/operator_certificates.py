"""Flags of `rankscope operator` about certificates, and what they mean together."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rankscope.operator.alerts.receiving import check_address
from rankscope.operator.kube.certificates.daemon_credentials import Tls
from rankscope.operator.kube.certificates.fleet import roles
from rankscope.operator.kube.certificates.fleet_keeping import FleetCertificateSettings
from rankscope.operator.kube.operator_settings import OperatorSettings


def add_certificate_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("certificates (docs/tls.md)")
    group.add_argument(
        "--fleet-certificates",
        action="store_true",
        help="make and renew the daemons' and our own, in Secrets of our namespace; in place of the next three",
    )
    group.add_argument("--tls-certificate", type=Path, metavar="FILE", help="ours, for the daemons; with the next two")
    group.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    group.add_argument("--tls-authority", type=Path, metavar="FILE", help="who signed the daemons' certificates")
    group.add_argument(
        "--api-name",
        action="append",
        default=[],
        metavar="NAME",
        help="with --fleet-certificates: a further host name or address that we are called by (may be repeated)",
    )
    group.add_argument(
        "--metrics-auth",
        action="store_true",
        help="/metrics with TLS, for tokens that may get it (needs a certificate, and the chart's role api)",
    )


def with_certificates(settings: OperatorSettings, arguments: argparse.Namespace) -> OperatorSettings:
    """Raises ValueError for what makes no sense together, or would be without TLS where it needs one."""
    files = (arguments.tls_certificate, arguments.tls_key, arguments.tls_authority)
    if any(files) and not all(files):
        raise ValueError("--tls-certificate, --tls-key and --tls-authority belong together")
    if arguments.fleet_certificates and any(files):
        raise ValueError("--fleet-certificates makes what --tls-certificate names: leave one of them out")
    certificate: Path | None = arguments.api_certificate
    key: Path | None = arguments.api_key
    if arguments.api_name and not arguments.fleet_certificates:
        raise ValueError("--api-name needs --fleet-certificates: others name what they sign")
    serving = None if certificate is None or key is None else (certificate, key)
    has_serving = arguments.fleet_certificates or serving is not None
    if arguments.metrics_auth and not has_serving:
        raise ValueError("--metrics-auth needs --fleet-certificates, or --api-certificate and --api-key")
    if settings.alert_token_file is not None:
        check_address(settings.alert_host, has_serving)
    kept = None
    if arguments.fleet_certificates:
        roles(settings.namespace, arguments.api_name)
        kept = FleetCertificateSettings(settings.namespace, tuple(arguments.api_name))
    return replace(
        settings,
        tls=Tls(*files) if all(files) else None,
        fleet_certificates=kept,
        serving_files=serving,
        metrics_auth=arguments.metrics_auth,
    )
