"""`rankscope daemon`: the node daemon in the foreground, until SIGTERM or SIGINT."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from rankscope.cli.messages import CommandError, to_stderr, to_stdout
from rankscope.daemon.config import (
    ENVIRONMENT_PREFIX,
    NONE,
    SETTINGS,
    Config,
    ConfigError,
    Resolved,
    resolve,
    unknown_variables,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--print-config", action="store_true", help="show every value and its origin, then exit")
    add_setting_arguments(parser)


def add_setting_arguments(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting of the daemon. Call it last: help lists the command's own options first."""
    parser.usage = "%(prog)s [options] [settings]"
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with the daemon's settings as keys")
    parser.add_argument_group(
        "settings of the daemon (docs/configuration.md)",
        f"A flag wins over the environment ({ENVIRONMENT_PREFIX}*), which wins over the file of --config.",
    )
    groups = {title: parser.add_argument_group(title) for title in dict.fromkeys(setting.group for setting in SETTINGS)}
    for setting in SETTINGS:
        default = setting.default()
        shown = str(default).lower() if setting.kind is bool else default
        options: dict[str, Any] = {"choices": setting.choices} if setting.choices else {}
        if setting.kind is bool:
            # With a value, too: a setting that is on by default must be possible to switch off.
            options = {"nargs": "?", "const": "true"}
        text = setting.help if default == "" else f"{setting.help} (default: {shown})"
        groups[setting.group].add_argument(setting.flag, metavar=setting.form, help=text, **options)


def read_settings(arguments: argparse.Namespace) -> Resolved:
    """The daemon's settings from parsed flags, environment and file."""
    flags = {setting.name: getattr(arguments, setting.name) for setting in SETTINGS}
    try:
        return resolve(flags, os.environ, arguments.config)
    except ConfigError as error:
        raise CommandError(str(error)) from error


def run(arguments: argparse.Namespace) -> int:
    resolved = read_settings(arguments)
    if arguments.print_config:
        to_stdout(resolved.describe())
        return 0
    warn_of_unknown_variables()
    # Imported here: --help and a wrong setting need none of the daemon's packages.
    from rankscope.cli.foreground import run_until_signalled
    from rankscope.daemon.loop import Daemon

    config = resolved.config
    daemon = Daemon(config)
    return run_until_signalled(
        "daemon", daemon, config.log_level, audit_path(config), targets=lambda: daemon.addresses.grpc_targets
    )


def audit_path(config: Config) -> Path | None:
    return None if config.audit_log == NONE else Path(config.audit_log)


def warn_of_unknown_variables() -> None:
    for name in unknown_variables(os.environ):
        to_stderr(f"warning: {name}: no such setting of the daemon; see rankscope daemon --help")
