"""`rankscope up`: daemon and correlation on this machine, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import replace
from pathlib import Path

from rankscope.analysis.policy import DEFAULT_POLICY
from rankscope.cli.daemon import add_setting_arguments, audit_path, read_settings, warn_of_unknown_variables
from rankscope.cli.foreground import run_until_signalled
from rankscope.cli.prometheus_stack.files import StackError
from rankscope.cli.sentences import MARKS, headline, loss
from rankscope.cli.standalone import Standalone
from rankscope.cli.up_alerting import Alerting, UpService, add_alert_arguments
from rankscope.daemon.config import ConfigError
from rankscope.operator.alerts.tokens import TokenError
from rankscope.operator.correlation.correlator import JobState

NAME = "up"
HELP = "watch this machine and judge its jobs"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Prints a line whenever a verdict changes. In another terminal, `rankscope top` shows the ranks. "
        "Jobs started with RANKSCOPE_PROBE=1 are seen step by step, others through their stacks."
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the daemon's settings as keys")
    parser.add_argument("--mfu-target", type=float, metavar="RATIO", help="raise low_mfu below this, for example 0.4")
    add_alert_arguments(parser)
    add_setting_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    try:
        config = read_settings(arguments).config
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    warn_of_unknown_variables()
    if config.socket == "none":
        print("error: rankscope up needs the Unix socket; leave --socket out or name a path", file=sys.stderr)
        return 2
    try:
        alerting = Alerting(arguments, config)
    except (ConfigError, StackError, TokenError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    policy = replace(DEFAULT_POLICY, mfu_target_ratio=arguments.mfu_target)
    standalone = Standalone(config, policy, alerts=alerting.settings)
    standalone.correlator.listen(VerdictPrinter())
    return run_until_signalled(NAME, UpService(standalone, alerting), config.log_level, audit_path(config))


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
            print(f"{clock} {MARKS[verdict.severity]} {state.job}: {text}", flush=True)
