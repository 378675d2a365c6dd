"""`rankscope compare`: whether run B is slower than run A, by how much, and with what confidence."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rankscope.analysis.quantities import count
from rankscope.analysis.stats.step_time_comparison import CompareError, Comparison, Shift, Side, compare
from rankscope.cli.messages import Exit, refuse, to_stdout
from rankscope.cli.mfu_request import QuantityError
from rankscope.cli.options import add_options
from rankscope.cli.step_times import UNITS, StepFileError, read_runs
from rankscope.cli.terminal import Terminal, make_table

_EPILOG = """\
examples:
  rankscope compare before.txt after.txt                  one step time per line, in seconds
  rankscope compare before.csv after.csv --column iteration_ms --unit ms
  rankscope compare trace_main.json.gz trace_mine.json.gz --json
  rankscope compare --a main_1.txt main_2.txt main_3.txt --b mine_1.txt mine_2.txt mine_3.txt
  rankscope compare main.json branch.json --max-regression 5%   a gate for CI, on summaries of `rankscope run --summary`

A file is text, CSV (column step_seconds, or --column), JSON, JSON lines, or a torch-profiler trace. Each file is a
run; traces in one directory are the ranks of one run. Difference = median of B ÷ median of A − 1. Steps that go up and
down together do not count as independent, and with several runs a side the runs are compared. With --max-regression the
exit code is 0 if B passes, 1 if it is or seems slower by more than that, 3 if it seems within the limit but the noise
is larger; 2 is wrong usage or a file that cannot be read. How, and the JSON keys: docs/compare.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
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
        "--max-regression",
        metavar="PERCENT",
        help="a gate for CI: exit with 1 if B is slower by more than this",
    )
    parser.add_argument(
        "--undecided",
        choices=("fail", "pass"),
        default="fail",
        help="when the data do not decide, the gate fails or passes (default: %(default)s)",
    )
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    try:
        side_a, side_b = _sides(arguments)
        warmup = _warmup(arguments.warmup)
        confidence = _confidence(arguments.confidence)
        limit = None if arguments.max_regression is None else _percent(arguments.max_regression)
        with Terminal(stderr=True).status("reading step times") if sys.stderr.isatty() else nullcontext():
            runs_a = read_runs(side_a, arguments.column, arguments.unit)
            runs_b = read_runs(side_b, arguments.column, arguments.unit)
            result = compare(runs_a.seconds, runs_b.seconds, confidence=confidence, warmup=warmup)
    except (QuantityError, StepFileError, CompareError) as error:
        return refuse(f"rankscope compare: {error}; next step: rankscope compare --help")
    gate = None if limit is None else judge(result, limit, undecided_passes=arguments.undecided == "pass")
    notes = [*_same(side_a, side_b), *notes_of(result), *runs_a.notes, *runs_b.notes]
    if arguments.json:
        to_stdout(json.dumps(to_json(result, runs_a.names, runs_b.names, notes, gate)))
    else:
        print_answer(result, notes, gate)
    return Exit.OK if gate is None else gate.status


def _sides(arguments: argparse.Namespace) -> tuple[list[Path], list[Path]]:
    given = [list(side) if side else None for side in (arguments.a, arguments.b)]
    wanted = given.count(None)
    if len(arguments.sides) != wanted:
        had = count(len(arguments.sides), "file or directory", "files or directories")
        raise QuantityError(
            f"{had} where A and B are needed; several runs a side: --a FILE… --b FILE…"
            if wanted == 2
            else f"{had} besides --a and --b, where {wanted} is needed"
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
    value = _number("--max-regression", text.removesuffix("%"))
    if not 0 < value < 1e6:
        # No two runs are equal: with a limit of 0 nothing passes.
        raise QuantityError(f"--max-regression: {text[:40]!r} is not a percentage above zero, such as 5%")
    return value / 100


def _number(option: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise QuantityError(f"{option}: {text[:40]!r} is no number")
    return value


# The answer: a sentence and a table, or a JSON object.


# Below this time a run is too short to compare, however many steps it has.
_ALIKE_STEPS = 5.0


def notes_of(result: Comparison) -> list[str]:
    notes = []
    if result.a.runs == 1 and result.b.runs == 1 and not result.reason:
        notes.append(
            "one run each: this tells the two runs apart, not yet the two versions; processes of the same code may "
            "differ by 10 % (give several runs: --a A1 A2 A3 --b B1 B2 B3)"
        )
    if max(result.a.correlation_steps, result.b.correlation_steps) >= _ALIKE_STEPS:
        steps = max(result.a.correlation_steps, result.b.correlation_steps)
        notes.append(
            f"steps go up and down together: about {steps:.0f} of them count as one; the interval allows for it"
        )
    if result.mean.significant(result.confidence) and not result.significant:
        notes.append(f"the median hides slow steps: by the mean, {_words(result.mean, result.confidence)}")
    return notes


# Without significance, runs are only called alike if the interval excludes a larger difference.
ALIKE_RATIO = 0.05


def sentence(result: Comparison, alike_ratio: float = ALIKE_RATIO) -> str:
    shift = result.median
    if shift.ci_low is None or shift.ci_high is None:
        return f"Too few steps to decide: {_moved(shift, 'seems')}, but {result.reason}"
    if result.significant:
        return _words(shift, result.confidence)
    if -alike_ratio < shift.ci_low and shift.ci_high < alike_ratio:
        return f"No difference of {alike_ratio * 100:g} % or more: {_words(shift, result.confidence)}"
    return f"Undecided: {_words(shift, result.confidence, 'seems')}; noise may be the reason"


@dataclass(frozen=True)
class Gate:
    """Whether B passes a limit on its slowdown."""

    limit_ratio: float
    result: str  # passed, regression or undecided
    text: str
    status: Exit


def judge(result: Comparison, limit_ratio: float, *, undecided_passes: bool = False) -> Gate:
    """B passes only if a regression of the size of the limit would have been seen. The gate does not turn green because
    noise hides what seems to be a regression."""
    shift, limit = result.median, _percent_text(limit_ratio)
    if result.significant and shift.difference_ratio > limit_ratio:
        return Gate(limit_ratio, "regression", f"regression: B is slower by more than {limit} %", Exit.FAILED)
    if result.mean.significant(result.confidence) and result.mean.difference_ratio > limit_ratio:
        text = f"regression: by the mean, B is slower by more than {limit} %: look for slow steps that the median hides"
        return Gate(limit_ratio, "regression", text, Exit.FAILED)
    seems_slower = shift.difference_ratio > limit_ratio
    reason = ""
    if shift.ci_high is None:
        reason = result.reason
    elif seems_slower:
        reason = "the noise is too large to be sure"
    elif shift.ci_high - shift.difference_ratio > limit_ratio and shift.ci_high > limit_ratio:
        noise_ratio = shift.ci_high - shift.difference_ratio
        reason = f"the noise of ±{_percent_text(noise_ratio)} % hides a regression of {limit} %"
    if not reason:
        return Gate(limit_ratio, "passed", f"passed: B is not slower by more than {limit} %", Exit.OK)
    seems = f"B seems slower by more than {limit} %, but " if seems_slower else ""
    text = f"undecided: {seems}{reason}; next step: more steps, or several runs each (--a A1 A2 A3 --b B1 B2 B3)"
    if undecided_passes:
        return Gate(limit_ratio, "undecided", f"{text}; passed because of --undecided pass", Exit.OK)
    return Gate(limit_ratio, "undecided", text, Exit.FAILED if seems_slower else Exit.UNDECIDED)


def to_json(
    result: Comparison, names_a: tuple[str, ...], names_b: tuple[str, ...], notes: list[str], gate: Gate | None = None
) -> dict[str, Any]:
    return {
        **({} if gate is None else {"gate": {"max_regression_ratio": gate.limit_ratio, "result": gate.result}}),
        **asdict(result.median),
        "significant": result.significant,
        "confidence": result.confidence,
        "cliffs_delta": result.cliffs_delta,
        "method": result.method,
        "reason": result.reason or None,
        "sentence": sentence(result, ALIKE_RATIO if gate is None else gate.limit_ratio),
        "mean": {**asdict(result.mean), "significant": result.mean.significant(result.confidence)},
        "a": _side_json(result.a, names_a),
        "b": _side_json(result.b, names_b),
        "notes": notes,
    }


def print_answer(result: Comparison, notes: list[str], gate: Gate | None = None) -> None:
    console = Terminal()
    style = ("red" if result.median.difference_ratio > 0 else "green") if result.significant else "yellow"
    alike_ratio = ALIKE_RATIO if gate is None else gate.limit_ratio
    console.print(sentence(result, alike_ratio), style=f"bold {'yellow' if result.reason else style}")
    table = make_table(("", "runs", "steps", "warm-up", "median", "mean", "p90"))
    for name, side in (("A", result.a), ("B", result.b)):
        times = (side.median_seconds, side.mean_seconds, side.p90_seconds)
        counts = (f"{side.runs:,}", f"{side.steps:,}", f"{side.warmup_steps:,}")
        table.add_row(name, *counts, *map(_duration, times))
    console.print(table)
    console.print(f"Cliff's delta {result.cliffs_delta:+.2f}: {_overlap(result.cliffs_delta)}", style="dim")
    for note in notes:
        console.print(f"note: {note}", style="dim")
    if gate is not None:
        style = {"passed": "green", "regression": "red"}.get(gate.result, "yellow")
        console.print(f"gate: {gate.text}", style=f"bold {style}")


def _words(shift: Shift, confidence: float, verb: str = "is") -> str:
    low, high = shift.ci_low or 0.0, shift.ci_high or 0.0
    if shift.difference_ratio < 0:
        low, high = -high, -low
    interval = f"{confidence * 100:g} % CI {_percent_text(low)} – {_percent_text(high)} %"
    return f"{_moved(shift, verb)} ({interval}), p {_p(shift.p_value or 0.0)}"


def _moved(shift: Shift, verb: str = "is") -> str:
    if shift.difference_ratio == 0:
        return f"B {verb} as fast as A"
    direction = "slower" if shift.difference_ratio > 0 else "faster"
    return f"B {verb} {_percent_text(abs(shift.difference_ratio))} % {direction}"


def _percent_text(ratio: float) -> str:
    percent = ratio * 100
    digits = 1 if abs(percent) >= 0.1 or percent == 0 else 3
    return f"{percent:.{digits}f}".replace("-", "−") if abs(percent) < 1e4 else f"{percent:.2g}"


def _p(value: float) -> str:
    return "< 0.001" if value < 0.001 else f"= {value:.3f}" if value < 0.1 else f"= {value:.2f}"


def _overlap(delta: float) -> str:
    faster = "faster" if delta < 0 else "slower"
    if abs(delta) < 1e-9:
        return "a step of B is slower than one of A as often as it is faster"
    return f"a step of B is {faster} than one of A in {50 + 50 * abs(delta):.0f} % of pairs"


def _duration(seconds: float) -> str:
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")):
        if seconds >= scale:
            return f"{seconds / scale:,.4g} {unit}"
    return f"{seconds / 1e-9:,.4g} ns"


def _side_json(side: Side, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "files": list(names),
        "runs": side.runs,
        "steps": side.steps,
        "warmup_steps_dropped": side.warmup_steps,
        "median_seconds": side.median_seconds,
        "mean_seconds": side.mean_seconds,
        "p90_seconds": side.p90_seconds,
        "correlation_steps": side.correlation_steps,
    }
