"""`rankscope context`: names for servers, so that their flags are typed once."""

from __future__ import annotations

import argparse
import json

from rankscope.cli.connection import target_of
from rankscope.cli.contexts import (
    FIELDS,
    LOCAL,
    Contexts,
    Endpoint,
    EndpointError,
    add_connection_arguments,
    chosen_name,
    load_contexts,
    save_contexts,
)
from rankscope.cli.messages import Exit, to_stdout
from rankscope.cli.options import add_options

_EPILOG = """\
examples:
  rankscope context set prod --connect rankscope.example:9468 --certificate-authority ca.crt --token-file token
  rankscope context use prod       from now on; `--context NAME` and RANKSCOPE_CONTEXT choose for one command
  rankscope context use local      this machine's daemon again

The file ~/.config/rankscope/contexts.yaml holds addresses and the paths of certificates and tokens, no secrets.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    actions = parser.add_subparsers(title="actions", metavar="ACTION", dest="action")
    listing = actions.add_parser("list", help="list contexts; * marks the one in use")
    shape = listing.add_mutually_exclusive_group()
    add_options(shape, "--json")
    shape.add_argument("--names", action="store_true", help="print the names alone, one a line")
    using = actions.add_parser("use", help="use a context from now on")
    setting = actions.add_parser("set", help="make or replace a context from the flags of a server")
    deleting = actions.add_parser("delete", help="remove a context; its certificates and tokens stay")
    for action in (using, setting, deleting):
        action.add_argument("name", metavar="NAME", help="of the context")
    add_connection_arguments(setting)


def run(arguments: argparse.Namespace) -> int:
    contexts = load_contexts()
    if arguments.action == "list":
        _list(contexts, arguments)
    elif arguments.action == "use":
        save_contexts(contexts.use(arguments.name))
        to_stdout(f"commands now use {arguments.name}: {_address(contexts.find(arguments.name))}")
    elif arguments.action == "set":
        endpoint = _endpoint(arguments)
        save_contexts(contexts.with_context(arguments.name, endpoint))
        to_stdout(f"{arguments.name} is {endpoint.connect}; next: rankscope context use {arguments.name}")
    else:
        save_contexts(contexts.without(arguments.name))
        to_stdout(f"{arguments.name} is removed")
    return Exit.OK


def _endpoint(arguments: argparse.Namespace) -> Endpoint:
    if arguments.connect is None or arguments.context is not None:
        raise EndpointError("name the server with --connect HOST:PORT, and its certificates and token with their flags")
    target_of(arguments.connect)
    return Endpoint(**{name: getattr(arguments, name) for name in FIELDS})


def _list(contexts: Contexts, arguments: argparse.Namespace) -> None:
    current = chosen_name(None, contexts)
    named = {LOCAL: Endpoint(), **dict(sorted(contexts.named.items()))}
    if arguments.names:
        to_stdout("\n".join(named))
    elif arguments.json:
        rows = [{"name": name, "current": name == current, **endpoint.given} for name, endpoint in named.items()]
        to_stdout(json.dumps({"contexts": rows}))
    else:
        width = max(map(len, named))
        for name, endpoint in named.items():
            to_stdout(f"{'*' if name == current else ' '} {name:<{width}}  {_address(endpoint)}{_how(endpoint)}")


def _address(endpoint: Endpoint) -> str:
    return endpoint.connect or "this machine's daemon"


def _how(endpoint: Endpoint) -> str:
    """`  token-file /home/ada/token`"""
    return "".join(f"  {name} {value}" for name, value in endpoint.given.items() if name != "connect")
