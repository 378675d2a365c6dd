"""`rankscope analyze`: traces, timelines and benchmarks of collectives, each in a module of its own."""

from __future__ import annotations

import argparse
import importlib

NAME = "analyze"
HELP = "read traces, timelines and collectives from files"

_KINDS = {
    "trace": "break torch-profiler traces down, and compare ranks",
    "timeline": "replay a pipeline-parallel job: what would it be without its slow rank, stage or operation?",
    "alphabeta": "fit latency and bandwidth of collectives; find the slow ones",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(title="what to read", metavar="KIND", dest="kind", required=True)
    for kind, text in _KINDS.items():
        place = kinds.add_parser(kind, help=text, description=text[0].upper() + text[1:])
        importlib.import_module(f"rankscope.cli.analyze_{kind}").add_arguments(place)


def run(arguments: argparse.Namespace) -> int:
    return int(importlib.import_module(f"rankscope.cli.analyze_{arguments.kind}").run(arguments))
