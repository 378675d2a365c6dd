"""`rankscope up`: daemon and correlation on this machine, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import re
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import headline, loss
from rankscope.cli.daemon import add_setting_arguments, audit_path, read_settings, warn_of_unknown_variables
from rankscope.cli.foreground import run_until_signalled
from rankscope.cli.job_tables import MARKS
from rankscope.cli.messages import refuse, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.prometheus_stack import (
    Pace,
    PrometheusStack,
    StackError,
    StackSettings,
    add_prometheus_url_argument,
    find_binaries,
)
from rankscope.cli.standalone import ConsoleListen, Standalone
from rankscope.common.http_server import is_loopback
from rankscope.common.tls import FollowedTls, files
from rankscope.daemon.config import NONE, Config, ConfigError, parse_address
from rankscope.daemon.server.sockets import ListenError
from rankscope.operator.alerts.alertmanager_webhook import TokenError, make_token, read_token
from rankscope.operator.console.server import TUNNEL
from rankscope.operator.correlation.correlator import JobState
from rankscope.operator.job_watch import AlertSettings

_ANY_PORT = "127.0.0.1:0"


# Alerts: the receiver that starts captures, and Prometheus and Alertmanager if requested.


def add_alert_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("Prometheus and alerts (docs/alerts.md)")
    add_prometheus_url_argument(group)
    group.add_argument(
        "--prometheus", action="store_true", help="start a Prometheus and an Alertmanager with our rules beside this"
    )
    group.add_argument(
        "--prometheus-listen", default=_ANY_PORT, metavar="HOST:PORT", help="default: a free port on loopback"
    )
    group.add_argument("--alertmanager-listen", default=_ANY_PORT, metavar="HOST:PORT", help="the same")
    group.add_argument(
        "--prometheus-dir", type=Path, metavar="DIR", help="keep data, logs and configuration there (default: nowhere)"
    )
    group.add_argument(
        "--prometheus-interval",
        type=_between(0.1, 60),
        default=Pace.interval_seconds,
        metavar="SECONDS",
        help=f"scrape and evaluate so often (default: {Pace.interval_seconds:g} s)",
    )
    group.add_argument(
        "--hurry",
        type=_between(1, 1000),
        default=1.0,
        metavar="N",
        help="divide all durations in the rules by N, to try alerts out; not for real jobs (default: 1)",
    )
    group.add_argument(
        "--alerts-listen",
        metavar="HOST:PORT",
        help="take notifications of Alertmanager, and capture when they ask for it (default: with --prometheus only)",
    )
    group.add_argument(
        "--alerts-token", type=Path, metavar="FILE", help="a token that notifications must show; only you may read FILE"
    )
    group.add_argument("--alerts-webhook", metavar="URL", help="with --prometheus: notify this address, too")


class Alerting:
    """The checked arguments; raises ConfigError, StackError or TokenError before anything starts."""

    def __init__(self, arguments: argparse.Namespace, config: Config) -> None:
        self._own_folder: Path | None = None
        self._stack: PrometheusStack | None = None
        self.settings: AlertSettings | None = None
        listen = arguments.alerts_listen or (_ANY_PORT if arguments.prometheus else None)
        if arguments.prometheus:
            if arguments.prometheus_url:
                raise ConfigError("--prometheus starts the one that the console asks; leave --prometheus-url out")
            if config.metrics_listen == "none":
                raise ConfigError("--prometheus has nothing to scrape with --metrics-listen none; leave that out")
            if config.metrics_tls:
                raise ConfigError("--prometheus has no certificate to show for --metrics-tls; leave that out")
            self._stack = PrometheusStack(_stack_settings(arguments))
        elif arguments.alerts_webhook:
            raise ConfigError("--alerts-webhook needs --prometheus")
        address = parse_address(listen, "--alerts-listen") if listen else None
        if address is None:
            if arguments.prometheus:
                raise ConfigError("--prometheus needs the receiver of alerts; leave --alerts-listen out")
            return
        if arguments.alerts_token is None and not arguments.prometheus:
            raise ConfigError(
                "--alerts-listen needs --alerts-token FILE; next: (umask 077; openssl rand -hex 32 > FILE)"
            )
        tls = None if is_loopback(address[0]) else self._tls(arguments, config, address[0])
        self._token_file = arguments.alerts_token.absolute() if arguments.alerts_token else self._make_token()
        self.settings = AlertSettings(*address, read_token(self._token_file), tls)

    def _tls(self, arguments: argparse.Namespace, config: Config, host: str) -> FollowedTls:
        if config.tls_certificate == NONE:
            raise ConfigError(
                f"--alerts-listen {host}: others can reach this address and there is no TLS, so the token would be "
                "read on its way; pass --tls-certificate, --tls-key and --tls-client-authority, or listen on 127.0.0.1"
            )
        if arguments.prometheus:
            raise ConfigError("--prometheus notifies this machine only; leave --alerts-listen out")
        return FollowedTls(files(Path(config.tls_certificate), Path(config.tls_key)))

    def _make_token(self) -> Path:
        self._own_folder = Path(tempfile.mkdtemp(prefix="rankscope-alerts-"))
        make_token(self._own_folder / "token")
        return self._own_folder / "token"

    def start(self, standalone: Standalone) -> None:
        if self._stack is None:
            return
        metrics_url, alerts_url = standalone.addresses.metrics_url, standalone.alerts_url
        assert metrics_url is not None  # checked above
        assert alerts_url is not None
        self._stack.start(metrics_url, alerts_url, self._token_file, standalone.console_url)
        standalone.read_older_history(self._stack.prometheus_url)

    def stop(self) -> None:
        if self._stack is not None:
            self._stack.stop()
        if self._own_folder is not None:
            shutil.rmtree(self._own_folder, ignore_errors=True)

    def addresses(self, standalone: Standalone) -> str:
        stack = self._stack
        named = {
            "console": standalone.console_url,
            "alerts": standalone.alerts_url,
            "prometheus": stack and stack.prometheus_url,
            "alertmanager": stack and stack.alertmanager_url,
            "their logs": stack and stack.folder,
        }
        return ", ".join([str(standalone.addresses), *(f"{name} {what}" for name, what in named.items() if what)])


class UpService:
    """The standalone stack with its alert receiver, as one foreground service."""

    def __init__(self, standalone: Standalone, alerting: Alerting) -> None:
        self._standalone = standalone
        self._alerting = alerting

    @property
    def addresses(self) -> str:
        return self._alerting.addresses(self._standalone)

    def start(self) -> None:
        try:
            self._standalone.start()
            try:
                self._alerting.start(self._standalone)
            except StackError as error:
                self._standalone.stop()
                raise ListenError(str(error)) from error
        except BaseException:
            self._alerting.stop()
            raise

    def stop(self) -> None:
        self._alerting.stop()
        self._standalone.stop()


def _stack_settings(arguments: argparse.Namespace) -> StackSettings:
    prometheus = parse_address(arguments.prometheus_listen, "--prometheus-listen")
    alertmanager = parse_address(arguments.alertmanager_listen, "--alertmanager-listen")
    if prometheus is None or alertmanager is None:
        raise ConfigError("--prometheus-listen and --alertmanager-listen: must be HOST:PORT")
    for flag, (host, _) in (("--prometheus-listen", prometheus), ("--alertmanager-listen", alertmanager)):
        if not is_loopback(host):
            raise ConfigError(
                f"{flag} {host}: others can reach this address, and what is started here has no TLS; listen on "
                "127.0.0.1 and come through an SSH tunnel, or run your own"
            )
    webhook: str | None = arguments.alerts_webhook
    if webhook is not None and not re.fullmatch(r"https?://\S+", webhook):
        raise ConfigError(f"--alerts-webhook {webhook}: must be an http:// or https:// address")
    return StackSettings(
        find_binaries(),
        Pace(arguments.prometheus_interval, arguments.hurry),
        prometheus,
        alertmanager,
        arguments.prometheus_dir,
        webhook,
    )


def _between(low: float, high: float) -> Callable[[str], float]:
    def number(text: str) -> float:
        if not low <= float(text) <= high:
            raise argparse.ArgumentTypeError(f"{low:g} to {high:g}")
        return float(text)

    return number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Watches this machine and judges its jobs. Prints a line whenever a verdict changes. The console shows runs "
        "and ranks in a browser, `rankscope top` in another terminal. Jobs started with RANKSCOPE_PROBE=1 are "
        "seen step by step, others through their stacks."
    )
    parser.add_argument(
        "--console-listen",
        metavar="HOST:PORT",
        help="serve the console there, on loopback (default: 127.0.0.1:9469, or a free port if that is taken); "
        "`none` for no console",
    )
    add_options(parser, "--mfu-target")
    add_alert_arguments(parser)
    add_setting_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    config = read_settings(arguments).config
    warn_of_unknown_variables()
    if config.socket == "none":
        return refuse("rankscope up needs the Unix socket; leave --socket out or name a path")
    try:
        console = _console_listen(arguments.console_listen, arguments.prometheus_url)
        alerting = Alerting(arguments, config)
    except (ConfigError, StackError, TokenError) as error:
        return refuse(str(error))
    policy = replace(DEFAULT_POLICY, mfu_target_ratio=arguments.mfu_target)
    standalone = Standalone(config, policy, alerts=alerting.settings, console=console)
    standalone.correlator.listen(VerdictPrinter())
    return run_until_signalled(
        "up",
        UpService(standalone, alerting),
        config.log_level,
        audit_path(config),
        targets=lambda: standalone.addresses.grpc_targets,
    )


def _console_listen(text: str | None, prometheus_url: str = "") -> ConsoleListen | None:
    if text is None:
        return ConsoleListen(prometheus_url=prometheus_url)
    address = parse_address(text, "--console-listen")
    if address is None:
        return None
    if not is_loopback(address[0]):
        raise ConfigError(
            f"--console-listen {address[0]}: others can reach this address, and the console has no login yet; {TUNNEL}"
        )
    return ConsoleListen(*address, or_any_port=False, prometheus_url=prometheus_url)


class VerdictPrinter:
    """One line per change of a job's verdict."""

    def __init__(self) -> None:
        self._shown: dict[str, tuple[object, ...]] = {}

    def __call__(self, states: tuple[JobState, ...]) -> None:
        for state in states:
            verdict = state.verdict
            gist = (verdict.kind, verdict.severity, verdict.culprits, verdict.stage)
            if self._shown.get(state.job) == gist:
                continue
            self._shown[state.job] = gist
            clock = time.strftime("%H:%M:%S")
            lost = loss(verdict)
            text = headline(verdict) + (f"; {lost}" if lost else "")
            to_stdout(f"{clock} {MARKS[verdict.severity]} {state.job}: {text}")
