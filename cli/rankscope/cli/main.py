"""`rankscope`: selects the subcommand and imports only that one: help is quick, and a missing extra is explained."""

from __future__ import annotations

import argparse
import difflib
import importlib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, NoReturn

from rankscope.cli.messages import CommandError, Exit, refuse, to_stdout

MAX_MESSAGE_CHARACTERS = 600


@dataclass(frozen=True)
class Subcommand:
    name: str
    help: str
    extra: str
    kinds: Mapping[str, str] = field(default_factory=dict)  # with their help; each has a module of its own

    @property
    def modules(self) -> dict[str, str]:
        """By the words that choose them."""
        names = [f"{self.name} {kind}" for kind in self.kinds] or [self.name]
        return {name: f"rankscope.cli.{name.replace(' ', '_').replace('-', '_')}" for name in names}


_ANALYZED = {
    "trace": "break torch-profiler traces down, and compare ranks",
    "timeline": "replay a pipeline-parallel job: what would it be without its slow rank, stage or operation?",
    "recording": "find the critical path of recorded steps, and the rank that holds the others up",
    "alphabeta": "fit latency and bandwidth of collectives; find the slow ones",
    "nccl-log": "say which network and transports NCCL uses, from its debug files (NCCL_DEBUG=INFO)",
    "flight-recorder": "say which rank a hung job waits for, from the dumps of torch's flight recorder",
}
_REPORTED = {
    "fleet": "say where the GPU-hours of a fleet went: losses, bad hardware, low MFU, runs to pack",
    "captures": "say where the time of many captures goes, and what to change first",
}


# By task, in the order of the help, of completion and of docs/cli.md.
TASKS: dict[str, tuple[Subcommand, ...]] = {
    "start here": (
        Subcommand("demo", "run a real job with a fault and find it", "demo"),
        Subcommand("run", "run a training command and report what slows it down", "cli"),
        Subcommand("up", "watch this machine and judge its jobs", "cli"),
    ),
    "look at running jobs": (
        Subcommand("top", "show jobs and ranks as a live table", "cli"),
        Subcommand("flame", "show where the time of ranks goes: top frames, flame graph, pprof", "cli"),
        Subcommand("stacks", "show where every rank stands now, the odd ones first", "cli"),
        Subcommand("hangs", "list reports of hangs, and show who was stuck where", "cli"),
        Subcommand("doctor", "report what does not work on this machine, and why", "daemon"),
    ),
    "record in depth": (
        Subcommand("capture", "record chosen ranks in depth, all at the same moment", "cli"),
        Subcommand("captures", "list, show, download, cancel and remove captures", "cli"),
        Subcommand("record", "keep the NCCL operations of a run in a file, to analyse or to report", "cli"),
    ),
    "analyse files": (
        Subcommand("analyze", "read traces, timelines, collectives and flight recorders from files", "cli", _ANALYZED),
        Subcommand("advise", "say from traces what to change, and what it would bring", "cli"),
        Subcommand("predict", "predict from traces what a change would bring", "cli"),
        Subcommand("batch", "predict step time and memory at other batch sizes", "cli"),
        Subcommand("mfu", "compute MFU and HFU of a model on a device", "cli"),
        Subcommand("compare", "report whether run B is slower than run A, and how certain that is", "cli"),
    ),
    "report on a fleet": (
        Subcommand("report", "report on a whole fleet or on many captures", "cli", _REPORTED),
        Subcommand("export", "write the history of a fleet to Parquet files", "export"),
    ),
    "run as a service": (
        Subcommand("daemon", "watch the training ranks of this machine", "daemon"),
        Subcommand("correlator", "correlate the ranks of many machines, without Kubernetes", "operator"),
        Subcommand("operator", "correlate the ranks of a Kubernetes cluster", "operator"),
    ),
    "set up": (
        Subcommand("context", "name the servers that commands connect to", "cli"),
        Subcommand("certificates", "make an authority and certificates for machines without Kubernetes", "operator"),
        Subcommand("completion", "print the completion script of a shell", "cli"),
    ),
}
SUBCOMMANDS = tuple(subcommand for subcommands in TASKS.values() for subcommand in subcommands)
_BY_NAME = {subcommand.name: subcommand for subcommand in SUBCOMMANDS}
MODULES = {words: module for subcommand in SUBCOMMANDS for words, module in subcommand.modules.items()}


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Fills paragraphs and keeps the lines of examples."""
        kind = argparse.RawDescriptionHelpFormatter if "\n" in text else argparse.HelpFormatter
        return kind._fill_text(self, text, width, indent)

    def _format_usage(
        self, usage: str | None, actions: Iterable[argparse.Action], groups: Iterable[Any], prefix: str | None
    ) -> str:
        """Options that may be left out are listed below, not here."""
        if usage is None:
            needed = {id(action) for group in groups if group.required for action in group._group_actions}
            shown = [each for each in actions if not each.option_strings or each.required or id(each) in needed]
            plain = super()._format_usage(None, shown, groups, "").strip()
            usage = plain.replace("%", "%%").replace(self._prog, "%(prog)s [options]", 1)
        return super()._format_usage(usage, actions, groups, prefix)


class Parser(argparse.ArgumentParser):
    """In the result, `bare` is the parser that still needs a command, or None."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"formatter_class": _Formatter, **options})
        # What begins like a negative number is a value, so that `--since -5m` has the error of its option.
        self._negative_number_matcher = re.compile(r"-\.?\d")
        self.set_defaults(bare=None)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        text = message.removeprefix("argument ")[:MAX_MESSAGE_CHARACTERS]
        self.exit(refuse(text if text.endswith("?") else f"{text}; next step: {self.prog} --help"))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            alike = difflib.get_close_matches(str(value), choices, 1)
            rest = f"did you mean {alike[0]}?" if alike else f"choose from {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"there is no {str(value)[:40]!r}; {rest}")

    def add_subparsers(self, **options: Any) -> Any:
        self.set_defaults(bare=self)
        return super().add_subparsers(prog=self.prog, **options)

    def _print_message(self, message: str, file: Any = None) -> None:
        """Flushed, so that `rankscope | head` ends like every other command."""
        if message:
            print(message, end="", file=file, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    # Before numpy and grpc load: BLAS threads and gRPC's log lines are not needed.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    words = sys.argv[1:] if arguments is None else list(arguments)
    chosen = next((each for each in (" ".join(words[:2]), *words[:1]) if each in MODULES), None)
    parser, places = make_parser()
    module: ModuleType | None = None
    try:
        if chosen is not None:
            module = importlib.import_module(MODULES[chosen])
            module.add_arguments(places[chosen])
        parsed, unknown = parser.parse_known_args(words)
        if unknown:  # with the usage of the command, not of `rankscope`
            asked = parser if chosen is None else places[chosen]
            alike = difflib.get_close_matches(unknown[0], asked._option_string_actions, 1)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            asked.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        if module is None or parsed.bare is not None:
            parsed.bare.print_help()
            return Exit.OK
        return int(module.run(parsed))
    except ModuleNotFoundError as error:
        return _explain(_BY_NAME[words[0]], error)
    except CommandError as error:
        return refuse(str(error), error.status)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # The reader of stdout has left, as `head` does. Python would complain at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def make_parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of the modules, which are still without arguments."""
    parser = Parser(
        prog="rankscope",
        usage="%(prog)s [options] COMMAND ...",
        description="Finds what slows a PyTorch training job down.",
        epilog="`rankscope COMMAND --help` shows the options of a command, with examples.",
    )
    parser.add_argument("--version", action=_PrintVersion)
    commands = parser.add_subparsers(metavar="COMMAND", help=argparse.SUPPRESS)
    places = {}
    for task, subcommands in TASKS.items():
        listed = parser.add_argument_group(task)
        for each in subcommands:
            place = places[each.name] = commands.add_parser(each.name, help=each.help, description=_sentence(each.help))
            # argparse has one list of commands; this one has a title for each task.
            listed._group_actions.append(commands._choices_actions[-1])
            if each.kinds:
                kinds = place.add_subparsers(title="kinds", metavar="KIND")
                for kind, text in each.kinds.items():
                    places[f"{each.name} {kind}"] = kinds.add_parser(kind, help=text, description=_sentence(text))
    return parser, {words: places[words] for words in MODULES}


def _explain(subcommand: Subcommand, error: ModuleNotFoundError) -> int:
    missing = error.name or ""
    if missing.split(".")[0] == "rankscope":
        hint = f"this installation has no {missing}; next step: pip install 'rankscope[{subcommand.extra}]'"
        return refuse(f"rankscope {subcommand.name}: {hint}")
    hint = f"needs the {subcommand.extra} extra: pip install 'rankscope[{subcommand.extra}]'"
    return refuse(f"rankscope {subcommand.name} {hint} (there is no {missing})")


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")


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
