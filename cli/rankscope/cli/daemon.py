"""`rankscope daemon`: the node daemon in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
from pathlib import Path

from rankscope.daemon.config import (
    ENVIRONMENT_PREFIX,
    SETTINGS,
    Config,
    ConfigError,
    Resolved,
    resolve,
    unknown_variables,
)

NAME = "daemon"
HELP = "watch the training ranks of this machine"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"Flags win over environment ({ENVIRONMENT_PREFIX}*), which wins over the file."
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with these settings as keys")
    parser.add_argument("--print-config", action="store_true", help="show every value and its origin, then exit")
    add_setting_arguments(parser)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting of the daemon."""
    for setting in SETTINGS:
        if setting.kind is bool:
            parser.add_argument(setting.flag, action="store_true", default=None, help=setting.help)
        else:
            metavar = {str: "TEXT", float: "NUMBER", int: "N"}[setting.kind]
            default = setting.default()
            shown = f"{setting.help} (default: {default})" if default != "" else setting.help
            parser.add_argument(setting.flag, metavar=metavar, help=shown)


def read_settings(arguments: argparse.Namespace) -> Resolved:
    """The daemon's settings from parsed flags, environment and file; raises ConfigError."""
    flags = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS}
    return resolve(flags, os.environ, arguments.config)


def run(arguments: argparse.Namespace) -> int:
    try:
        resolved = read_settings(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if arguments.print_config:
        print(resolved.describe())
        return 0
    warn_of_unknown_variables()
    return run_daemon(resolved.config)


def run_daemon(config: Config) -> int:
    # Before numpy and grpc load: a BLAS thread per core and gRPC's own log lines are of no use here.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from rankscope.daemon.listening import ListenError
    from rankscope.daemon.loop import Daemon
    from rankscope.daemon.reporting import OneLine

    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler])
    stopping = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stopping.set())
    daemon = Daemon(config)
    try:
        daemon.start()
    except ListenError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"rankscope daemon: {daemon.addresses}", file=sys.stderr, flush=True)
    stopping.wait()
    daemon.stop()
    return 0


def warn_of_unknown_variables() -> None:
    for name in unknown_variables(os.environ):
        print(f"warning: {name}: no such setting of the daemon; see rankscope daemon --help", file=sys.stderr)
