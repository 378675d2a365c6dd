"""`rankscope operator`: correlate the ranks of a Kubernetes cluster, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from rankscope.cli.foreground import add_service_arguments, add_tls_arguments, host_port, run_until_signalled, tls_files
from rankscope.cli.messages import log_to_stderr, refuse
from rankscope.cli.prometheus_stack import add_prometheus_url_argument
from rankscope.operator.access.api_server import PORT, UserApiSettings
from rankscope.operator.alerts.alertmanager_webhook import TokenError, check_address
from rankscope.operator.certificates.rotation import fleet_rotation
from rankscope.operator.console.server import PORT as CONSOLE_PORT
from rankscope.operator.console_access import ConsoleSettings
from rankscope.operator.kube.api_client import ClusterError
from rankscope.operator.runtime import Operator, OperatorSettings
from rankscope.operator.webhooks.webhooks import WebhookSettings


def add_certificate_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("certificates (docs/tls.md)")
    group.add_argument(
        "--fleet-certificates",
        action="store_true",
        help="make and renew the daemons' and our own, in Secrets of our namespace; in place of the next three",
    )
    add_tls_arguments(group)
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
    """Raises ValueError for flags that contradict each other, or that would leave a token without TLS."""
    files = tls_files(arguments)
    if arguments.fleet_certificates and files:
        raise ValueError("--fleet-certificates makes the files of --tls-certificate: leave one of them out")
    certificate: Path | None = arguments.api_certificate
    key: Path | None = arguments.api_key
    if arguments.api_name and not arguments.fleet_certificates:
        raise ValueError("--api-name needs --fleet-certificates: other authorities choose the names themselves")
    serving = None if certificate is None or key is None else (certificate, key)
    has_serving = arguments.fleet_certificates or serving is not None
    if arguments.metrics_auth and not has_serving:
        raise ValueError("--metrics-auth needs --fleet-certificates, or --api-certificate and --api-key")
    if settings.alert_token_file is not None:
        check_address(settings.alert_host, has_serving)
    kept = None
    if arguments.fleet_certificates:
        kept = fleet_rotation(settings.namespace, arguments.api_name)
    return replace(
        settings,
        daemon_tls=files,
        fleet_certificates=kept,
        serving_files=serving,
        metrics_auth=arguments.metrics_auth,
    )


def add_user_api_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "runs and captures for users (docs/api.md)", "`rankscope top` and `capture --connect HOST:PORT`"
    )
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
        default=UserApiSettings.audience,
        metavar="TEXT",
        help="audience of the users' tokens (default: %(default)s)",
    )


def add_console_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "the console (docs/console.md)", "for browsers, with the tokens of --api-listen and its certificate"
    )
    group.add_argument(
        "--console-listen", metavar="HOST:PORT", help=f"serve it here, usually 0.0.0.0:{CONSOLE_PORT} (default: none)"
    )
    group.add_argument(
        "--console-name",
        action="append",
        default=[],
        metavar="NAME",
        help="a host name in browsers' addresses that the certificate does not have, as of a proxy (may be repeated)",
    )
    group.add_argument(
        "--console-proxy-authority",
        type=Path,
        metavar="FILE",
        help="believe X-Forwarded-User and X-Forwarded-Groups of a caller with a certificate of this CA; with the next",
    )
    group.add_argument("--console-proxy-name", default="", metavar="NAME", help="a name in that certificate")
    group.add_argument(
        "--console-proxy-loopback",
        action="store_true",
        help="believe them of callers in this pod, which includes all that may port-forward to it",
    )
    add_prometheus_url_argument(group)


def _console(arguments: argparse.Namespace) -> ConsoleSettings | None:
    authority, name = arguments.console_proxy_authority, arguments.console_proxy_name
    if arguments.console_listen is None:
        if authority or name or arguments.console_proxy_loopback or arguments.console_name or arguments.prometheus_url:
            raise ValueError("--console-name, --console-proxy-… and --prometheus-url need --console-listen")
        return None
    if arguments.api_listen is None:
        raise ValueError("--console-listen needs --api-listen: the console takes the same tokens")
    if (authority is None) != (not name):
        raise ValueError("--console-proxy-authority and --console-proxy-name belong together")
    if authority is not None:
        authority.read_bytes()  # raises OSError before anything starts
    host, port = host_port("--console-listen", arguments.console_listen)
    names = tuple(arguments.console_name)
    loopback, prometheus_url = arguments.console_proxy_loopback, arguments.prometheus_url
    return ConsoleSettings(host, port, names, loopback, name, authority, prometheus_url)


def _user_api(arguments: argparse.Namespace) -> UserApiSettings | None:
    if (arguments.api_certificate is None) != (arguments.api_key is None):
        raise ValueError("--api-certificate and --api-key belong together")
    if arguments.api_listen is None:
        return None
    host, port = host_port("--api-listen", arguments.api_listen)
    if not arguments.api_audience.strip():
        raise ValueError("--api-audience is empty: tokens for the API server are not for us to see")
    return UserApiSettings(host, port, arguments.api_audience)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    defaults = OperatorSettings()
    parser.epilog = (
        "In a pod it needs no flags: it takes the pod's service account. Elsewhere name a --kubeconfig. "
        "`kubectl get trainingruns -A` shows what it finds."
    )
    parser.add_argument("--kubeconfig", type=Path, metavar="FILE", help="how to reach the API server from outside")
    parser.add_argument(
        "--namespace",
        default=defaults.namespace,
        metavar="NAME",
        help="where the daemons and our leases are (default: %(default)s)",
    )
    parser.add_argument(
        "--identity",
        default=defaults.identity,
        metavar="NAME",
        help="this replica's name, unlike any other's (default: %(default)s)",
    )
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="parts of the runs (default: 1)")
    parser.add_argument(
        "--settling-seconds",
        type=float,
        default=defaults.settling_seconds,
        metavar="SECONDS",
        help="after a start, keep earlier findings this long until all ranks report (default: %(default)g)",
    )
    parser.add_argument("--pod-selector", default="", metavar="LABELS", help="watch only pods with these labels")
    add_service_arguments(parser)
    add_certificate_arguments(parser)
    add_user_api_arguments(parser)
    add_console_arguments(parser)
    _add_webhook_arguments(parser)
    parser.add_argument(
        "--node-conditions",
        action="store_true",
        help="set the condition RankscopeSlowNode on nodes (needs the chart's role node-conditions)",
    )


def _add_webhook_arguments(parser: argparse.ArgumentParser) -> None:
    webhooks = parser.add_argument_group("webhooks", "injection into pods and checks of our own objects")
    webhooks.add_argument("--webhook-listen", metavar="HOST:PORT", help="serve them here (default: no webhooks)")
    webhooks.add_argument(
        "--webhook-service",
        default=WebhookSettings.service,
        metavar="NAME",
        help="the Service by which the API server reaches the webhooks (default: %(default)s)",
    )
    webhooks.add_argument("--webhook-url", default="", metavar="URL", help="https://HOST:PORT instead of the Service")
    webhooks.add_argument(
        "--webhook-certificate",
        type=Path,
        metavar="FILE",
        help="serving certificate that you renew, with --webhook-key (default: issued by the operator, in a Secret)",
    )
    webhooks.add_argument("--webhook-key", type=Path, metavar="FILE", help="its key")
    webhooks.add_argument(
        "--webhook-authority",
        type=Path,
        metavar="FILE",
        help="CA of that certificate, which the operator registers with the API server",
    )
    webhooks.add_argument(
        "--webhook-client-authority",
        type=Path,
        metavar="FILE",
        help="CA of the API server's client certificate; other callers are refused (default: anybody may call)",
    )
    webhooks.add_argument(
        "--probe-image",
        metavar="IMAGE",
        help="image of the init container that copies the probe into pods (default: no injection)",
    )


def run(arguments: argparse.Namespace) -> int:
    log_to_stderr(arguments.log_level)
    try:
        operator = Operator(_settings(arguments))
    except (ValueError, OSError, TokenError, ClusterError) as error:
        return refuse(str(error))
    failures = (ValueError, OSError)
    return run_until_signalled("operator", operator, arguments.log_level, arguments.audit_log, failures)


def _webhooks(arguments: argparse.Namespace) -> WebhookSettings | None:
    if arguments.webhook_listen is None:
        return None
    if (arguments.webhook_certificate is None) != (arguments.webhook_key is None):
        raise ValueError("--webhook-certificate and --webhook-key belong together")
    if arguments.webhook_url and not arguments.webhook_url.startswith("https://"):
        raise ValueError("--webhook-url has to begin with https://: the API server calls nothing else")
    host, port = host_port("--webhook-listen", arguments.webhook_listen)
    return WebhookSettings(
        listen_host=host,
        listen_port=port,
        namespace=arguments.namespace,
        service=arguments.webhook_service,
        url=arguments.webhook_url,
        probe_image=arguments.probe_image,
        certificate=arguments.webhook_certificate,
        key=arguments.webhook_key,
        authority=arguments.webhook_authority,
        client_authority=arguments.webhook_client_authority,
    )


def _settings(arguments: argparse.Namespace) -> OperatorSettings:
    host, port = host_port("--listen", arguments.listen)
    alert_host, alert_port = host_port("--alerts-listen", arguments.alerts_listen)
    if arguments.shards < 1:
        raise ValueError("--shards must be at least 1")
    settings = OperatorSettings(
        kubeconfig=arguments.kubeconfig,
        namespace=arguments.namespace,
        identity=arguments.identity,
        shards=arguments.shards,
        settling_seconds=arguments.settling_seconds,
        pod_selector=arguments.pod_selector,
        listen_host=host,
        listen_port=port,
        mfu_target=arguments.mfu_target,
        node_conditions=arguments.node_conditions,
        alert_token_file=arguments.alerts_token,
        alert_host=alert_host,
        alert_port=alert_port,
        webhooks=_webhooks(arguments),
        user_api=_user_api(arguments),
        console=_console(arguments),
    )
    return with_certificates(settings, arguments)
