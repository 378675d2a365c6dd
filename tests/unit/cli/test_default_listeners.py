"""Without options, commands listen on loopback or not at all."""

from __future__ import annotations

import argparse
import importlib

import pytest

from rankscope.cli.main import MODULES
from rankscope.common.http_server import is_loopback
from rankscope.daemon.config import NONE, resolve


def listen_defaults(command: str) -> dict[str, str | None]:
    parser = argparse.ArgumentParser(add_help=False)
    importlib.import_module(MODULES[command]).add_arguments(parser)
    return {action.dest: action.default for action in parser._actions if action.dest.endswith("listen")}


@pytest.mark.parametrize("command", ["correlator", "operator", "up"])
def test_a_command_listens_on_loopback_by_default(command: str) -> None:
    defaults = listen_defaults(command)
    assert defaults
    for name, address in defaults.items():
        assert address is None or is_loopback(address.rpartition(":")[0]), (name, address)


def test_a_daemon_listens_on_loopback_by_default() -> None:
    config = resolve({}, {}).config
    assert config.grpc_listen == NONE
    assert is_loopback(config.metrics_listen.rpartition(":")[0])
