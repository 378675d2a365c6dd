"""`rankscope`: selects the subcommand and imports only that one: help is quick, and a missing extra is explained."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType

from rankscope.cli.messages import to_stderr, to_stdout


@dataclass(frozen=True)
class Subcommand:
    """`help` repeats the module's HELP, so that the list of commands needs no imports."""

    name: str
    help: str
    extra: str

    @property
    def module(self) -> str:
        return f"rankscope.cli.{self.name.replace('-', '_')}"


SUBCOMMANDS: tuple[Subcommand, ...] = (
    Subcommand("daemon", "watch the training ranks of this machine", "daemon"),
    Subcommand("doctor", "report what does not work on this machine, and why", "daemon"),
    Subcommand("run", "run a training command and report what slows it down", "cli"),
    Subcommand("up", "watch this machine and judge its jobs", "daemon"),
    Subcommand("operator", "correlate the ranks of a Kubernetes cluster", "operator"),
    Subcommand("top", "show jobs and ranks as a live table", "cli"),
    Subcommand("capture", "record chosen ranks in depth, all at the same moment", "cli"),
    Subcommand("captures", "list, show, download, cancel and remove captures", "cli"),
    Subcommand("analyze", "read traces, timelines and collectives from files", "cli"),
    Subcommand("mfu", "compute MFU and HFU of a model on a device", "cli"),
    Subcommand("compare", "report whether run B is slower than run A, and how certain that is", "cli"),
    Subcommand("demo", "run a real job with a fault and find it", "demo"),
)
_BY_NAME = {subcommand.name: subcommand for subcommand in SUBCOMMANDS}


def main(arguments: Sequence[str] | None = None) -> int:
    # Before numpy and grpc load: BLAS threads and gRPC's log lines are not needed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    words = sys.argv[1:] if arguments is None else list(arguments)
    chosen = _BY_NAME.get(words[0]) if words else None
    parser = argparse.ArgumentParser(prog="rankscope", description="Finds what slows a PyTorch training job down.")
    parser.add_argument("--version", action=_PrintVersion)
    places = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    module: ModuleType | None = None
    for subcommand in SUBCOMMANDS:
        place = places.add_parser(subcommand.name, help=subcommand.help, description=_sentence(subcommand.help))
        if subcommand is chosen:
            try:
                module = importlib.import_module(subcommand.module)
                module.add_arguments(place)
            except ModuleNotFoundError as error:
                return _explain(subcommand, error)
    parsed = parser.parse_args(words)
    if module is None:
        parser.error("choose a command")
    try:
        return int(module.run(parsed))
    except ModuleNotFoundError as error:
        return _explain(_BY_NAME[words[0]], error)
    except KeyboardInterrupt:
        return 130


def _explain(subcommand: Subcommand, error: ModuleNotFoundError) -> int:
    missing = error.name or ""
    if missing.split(".")[0] == "rankscope":
        hint = f"this installation has no {missing}; next step: pip install 'rankscope[{subcommand.extra}]'"
        to_stderr(f"error: rankscope {subcommand.name}: {hint}")
    else:
        hint = f"needs the {subcommand.extra} extra: pip install 'rankscope[{subcommand.extra}]'"
        to_stderr(f"error: rankscope {subcommand.name} {hint} (there is no {missing})")
    return 2


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


class _PrintVersion(argparse.Action):
    """Looks the version up only when requested: that takes longer than most commands need to start."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show the version and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        to_stdout(f"rankscope {_version()}")
        parser.exit()


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("rankscope")
    except PackageNotFoundError:
        return "(not installed)"


if __name__ == "__main__":
    sys.exit(main())
