"""`rankscope compare`: whether run B is slower than run A, by how much, and with what confidence."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from rankscope.analysis.stats.step_time_comparison import CompareError, compare
from rankscope.cli.comparison.report import notes_of, print_answer, to_json
from rankscope.cli.comparison.step_times import UNITS, StepFileError, read_runs
from rankscope.cli.messages import to_stderr, to_stdout
from rankscope.cli.mfu_report.request import QuantityError
from rankscope.cli.terminal import Terminal

NAME = "compare"
HELP = "report whether run B is slower than run A, and how certain that is"

_EPILOG = """\
examples:
  rankscope compare before.txt after.txt                  one step time per line, in seconds
  rankscope compare before.csv after.csv --column iteration_ms --unit ms
  rankscope compare trace_main.json.gz trace_mine.json.gz --json
  rankscope compare --a main_1.txt main_2.txt main_3.txt --b mine_1.txt mine_2.txt mine_3.txt
  rankscope compare nightly_old/ nightly_new/ --fail-if-slower 2

A file is text, CSV (column step_seconds, or --column), JSON, JSON lines, or a torch-profiler trace. Each file is a
run; traces in one directory are the ranks of one run. Difference = median of B ÷ median of A − 1. Steps that go up and
down together do not count as independent, and with several runs a side the runs are compared. How, and the JSON keys:
docs/compare.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("sides", nargs="*", type=Path, metavar="A B", help="two files or directories")
    parser.add_argument("--a", nargs="+", type=Path, metavar="FILE", help="the runs of A, in place of A")
    parser.add_argument("--b", nargs="+", type=Path, metavar="FILE", help="the runs of B, in place of B")
    parser.add_argument("--column", metavar="NAME", help="column or key that holds the step time")
    parser.add_argument(
        "--unit", choices=tuple(UNITS), help="of the times (default: s, or what the column's name says)"
    )
    parser.add_argument("--warmup", default="auto", metavar="N", help="first steps to drop of each run (default: auto)")
    parser.add_argument("--confidence", default="0.95", metavar="C", help="of the interval (default: 0.95)")
    parser.add_argument(
        "--fail-if-slower",
        metavar="PERCENT",
        help="exit with 1 when B is significantly slower, by more than so much (for CI)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    try:
        side_a, side_b = _sides(arguments)
        warmup = _warmup(arguments.warmup)
        confidence = _confidence(arguments.confidence)
        limit = None if arguments.fail_if_slower is None else _percent(arguments.fail_if_slower)
        with Terminal(stderr=True).status("reading step times") if sys.stderr.isatty() else nullcontext():
            runs_a = read_runs(side_a, arguments.column, arguments.unit)
            runs_b = read_runs(side_b, arguments.column, arguments.unit)
            result = compare(runs_a.seconds, runs_b.seconds, confidence=confidence, warmup=warmup)
    except (QuantityError, StepFileError, CompareError) as error:
        to_stderr(f"error: rankscope compare: {error}; next step: rankscope compare --help")
        return 2
    notes = [*_same(side_a, side_b), *notes_of(result), *runs_a.notes, *runs_b.notes]
    if arguments.json:
        to_stdout(json.dumps(to_json(result, runs_a.names, runs_b.names, notes)))
    else:
        print_answer(result, notes)
    return 1 if limit is not None and result.significant and result.median.difference_ratio > limit else 0


def _sides(arguments: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    given = [list(side) if side else None for side in (arguments.a, arguments.b)]
    wanted = given.count(None)
    if len(arguments.sides) != wanted:
        had = len(arguments.sides)
        raise QuantityError(
            f"{had} files or directories where A and B are needed; several runs a side: --a FILE… --b FILE…"
            if wanted == 2
            else f"{had} files or directories besides --a and --b, where {wanted} is needed"
        )
    left = iter(arguments.sides)
    a, b = (side if side is not None else [next(left)] for side in given)
    return a, b


def _same(a: Sequence[Path], b: Sequence[Path]) -> list[str]:
    twice = {path.resolve() for path in a} & {path.resolve() for path in b}
    return [f"{sorted(twice)[0]} stands on both sides"] if twice else []


def _warmup(text: str) -> int | None:
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 12:
        raise QuantityError(f"--warmup: {text[:40]!r} is neither auto nor a whole number")
    return int(text)


def _confidence(text: str) -> float:
    value = _number("--confidence", text)
    if not 0.5 <= value <= 0.9999:
        raise QuantityError(f"--confidence: {text[:40]!r} is not between 0.5 and 0.9999")
    return value


def _percent(text: str) -> float:
    value = _number("--fail-if-slower", text.removesuffix("%"))
    if not 0 <= value < 1e6:
        raise QuantityError(f"--fail-if-slower: {text[:40]!r} is not a percentage of zero or more")
    return value / 100


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QuantityError(f"{option}: {text[:40]!r} is no number")
    return value
