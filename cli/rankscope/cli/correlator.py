"""`rankscope correlator`: the operator's work on machines without Kubernetes, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from rankscope.cli.foreground import (
    add_service_arguments,
    add_tls_arguments,
    host_port,
    run_until_signalled,
    tls_files,
)
from rankscope.cli.messages import refuse
from rankscope.cli.prometheus_stack import add_prometheus_url_argument
from rankscope.common.http_server import is_loopback
from rankscope.operator.access.api_server import PORT
from rankscope.operator.alerts.alertmanager_webhook import TokenError, check_address, read_token
from rankscope.operator.console.server import PORT as CONSOLE_PORT
from rankscope.operator.console_access import ConsoleSettings
from rankscope.operator.correlator_runtime import CorrelatorRuntime, CorrelatorSettings
from rankscope.operator.runs.daemon_sources import (
    DaemonSource,
    DnsDaemons,
    FileDaemons,
    GivenDaemons,
    SlurmDaemons,
    SourceError,
)
from rankscope.operator.runs.daemon_streams import DEFAULT_PORT

_EPILOG = """\
examples:
  rankscope correlator --daemons-slurm --api-listen 0.0.0.0:9468 \\
    --tls-certificate tls.crt --tls-key tls.key --tls-authority ca.crt     the nodes of a Slurm cluster
  rankscope correlator --daemons-file /etc/rankscope/nodes                 a file that is read again when it changes
  rankscope correlator --daemon 127.0.0.1:9465 --daemon 127.0.0.1:9475     daemons behind SSH tunnels, without TLS

Daemons on other machines need certificates: `rankscope certificates --help`. docs/slurm.md describes an installation.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    daemons = parser.add_argument_group("daemons (at least one; lists are read again every few seconds)")
    daemons.add_argument(
        "--daemon", action="append", default=[], metavar="HOST:PORT", help="a daemon's --grpc-listen (may be repeated)"
    )
    daemons.add_argument(
        "--daemons-file",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="HOST:PORT on each line; .json, .yml and .yaml: targets as in Prometheus' file_sd_configs",
    )
    daemons.add_argument(
        "--daemons-dns", action="append", default=[], metavar="NAME:PORT", help="every address of a name in DNS"
    )
    daemons.add_argument("--daemons-slurm", action="store_true", help="every node that sinfo lists")
    daemons.add_argument(
        "--daemon-port", type=int, default=DEFAULT_PORT, metavar="N", help="for --daemons-slurm (default: %(default)s)"
    )
    tls = parser.add_argument_group("certificates (docs/tls.md)", "needed unless everything is on this machine")
    add_tls_arguments(tls)
    parser.add_argument(
        "--api-listen",
        default=f"127.0.0.1:{PORT}",
        metavar="HOST:PORT",
        help="captures and verdicts for users, with certificates unless this machine's (default: %(default)s)",
    )
    parser.add_argument(
        "--console-listen",
        metavar="HOST:PORT",
        help="the console, for browsers with a client's certificate unless this machine's, "
        f"usually 0.0.0.0:{CONSOLE_PORT} (default: no console)",
    )
    add_prometheus_url_argument(parser)
    parser.add_argument("--metrics-tls", action="store_true", help="/metrics with TLS, for callers with a certificate")
    parser.add_argument(
        "--state-dir",
        type=Path,
        default=default_state_dir(),
        metavar="DIR",
        help="where captures are remembered (default: %(default)s)",
    )
    add_service_arguments(parser)


def default_state_dir() -> Path:
    if os.geteuid() == 0:
        return Path("/var/lib/rankscope/correlator")
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "rankscope" / "correlator"


def run(arguments: argparse.Namespace) -> int:
    try:
        runtime = CorrelatorRuntime(_settings(arguments))
    except (ValueError, OSError, TokenError, SourceError) as error:
        return refuse(str(error))
    failures = (ValueError, OSError)
    return run_until_signalled("correlator", runtime, arguments.log_level, arguments.audit_log, failures)


def _settings(arguments: argparse.Namespace) -> CorrelatorSettings:
    files = tls_files(arguments)
    has_tls = files is not None
    api_host, api_port = _for_users("--api-listen", arguments.api_listen, has_tls)
    console = None
    if arguments.console_listen is not None:
        host, port = _for_users("--console-listen", arguments.console_listen, has_tls)
        console = ConsoleSettings(host, port, prometheus_url=arguments.prometheus_url)
    elif arguments.prometheus_url:
        raise ValueError("--prometheus-url needs --console-listen: the console asks it")
    if arguments.metrics_tls and not has_tls:
        raise ValueError("--metrics-tls needs --tls-certificate, --tls-key and --tls-authority")
    listen_host, listen_port = host_port("--listen", arguments.listen)
    alert_host, alert_port = host_port("--alerts-listen", arguments.alerts_listen)
    token = b""
    if arguments.alerts_token is not None:
        check_address(alert_host, has_tls)
        token = read_token(arguments.alerts_token)
    return CorrelatorSettings(
        sources=_sources(arguments, has_tls),
        state_folder=arguments.state_dir,
        api_host=api_host,
        api_port=api_port,
        listen_host=listen_host,
        listen_port=listen_port,
        tls_files=files,
        console=console,
        metrics_tls=arguments.metrics_tls,
        alert_host=alert_host,
        alert_port=alert_port,
        alert_token=token,
        mfu_target=arguments.mfu_target,
    )


def _for_users(flag: str, text: str, has_tls: bool) -> tuple[str, int]:
    host, port = host_port(flag, text)
    if not has_tls and not is_loopback(host):
        raise ValueError(
            f"{flag} {host}: others can reach this address, and callers are known by their certificates: "
            "pass --tls-certificate, --tls-key and --tls-authority (`rankscope certificates --help`)"
        )
    return host, port


def _sources(arguments: argparse.Namespace, has_tls: bool) -> list[DaemonSource]:
    found: list[DaemonSource] = [FileDaemons(path) for path in arguments.daemons_file]
    found += [DnsDaemons(name) for name in arguments.daemons_dns]
    if arguments.daemon:
        found.append(GivenDaemons(arguments.daemon))
        for address in arguments.daemon:
            host, _ = host_port("--daemon", address)
            if not has_tls and not is_loopback(host):
                raise ValueError(
                    f"--daemon {address}: the daemon of another machine wants a certificate: "
                    "pass --tls-certificate, --tls-key and --tls-authority (`rankscope certificates --help`)"
                )
    if arguments.daemons_slurm:
        if not 0 < arguments.daemon_port < 65536:
            raise ValueError(f"--daemon-port {arguments.daemon_port}: 1 to 65535")
        found.append(SlurmDaemons(arguments.daemon_port))
    if not found:
        raise ValueError("name the daemons: --daemon, --daemons-file, --daemons-dns or --daemons-slurm")
    return found
