"""`rankscope predict`: what a change would bring, from a replay of recorded steps."""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from rankscope.analysis.quantities import quantity
from rankscope.analysis.replay.changes import CHANGES, Change, bucket, faster
from rankscope.analysis.replay.graph import ReplayError
from rankscope.analysis.replay.prediction import MIN_GAIN_RATIO, Forecast, Prediction, StepCosts, forecast, gain_words
from rankscope.analysis.replay.step_timeline import StepTimelines
from rankscope.cli.messages import CommandError, Exit, refuse, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.output_file import write_output
from rankscope.cli.predict_device import (
    add_device_arguments,
    check_device_arguments,
    device_headline,
    device_json,
    move,
    print_device,
)
from rankscope.cli.prediction_text import facts, gain_unit, headline, not_applicable
from rankscope.cli.terminal import Terminal, make_table
from rankscope.cli.trace_report.files import load_ranks

_EPILOG = """\
examples:
  rankscope predict trace.json.gz                          every change, the largest gain first
  rankscope predict traces/ --with even                    all ranks of a job: what does the slow one cost?
  rankscope predict trace.json.gz --with fused+graph       two changes together
  rankscope predict trace.json.gz --with 'softmax*2'       kernels with softmax in their name, twice as fast
  rankscope predict trace.json.gz --step-ms 14.7           the job's step without the profiler, for exact gains
  rankscope predict trace.json.gz --html step.html         a page with the timeline of a step before and after
  rankscope predict trace.json.gz --on H100                on another GPU
  rankscope predict --list                                 the changes there are

The steps of the traces are replayed from the durations of their kernels and host calls. The error of that replay is
printed; above 5 % nothing is predicted. The profiler slows the host: a job that is bound by launches needs --step-ms.
What each change assumes: docs/predict.md.
"""
_BY_NAME = {change.name: change for change in CHANGES}
_BUCKET = re.compile(r"bucket([1-9]\d{0,4})")
_FASTER = re.compile(r"([^*]+)\*(\d{1,4}(?:\.\d{1,4})?)")
NS_PER_MS = 1e6


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="*", metavar="FILE|DIR", help="traces (.json, .json.gz), directories or globs")
    parser.add_argument("--list", action="store_true", help="print the changes there are, and exit")
    parser.add_argument(
        "--with",
        dest="changes",
        metavar="CHANGE[+CHANGE],…",
        help=f"changes to predict, + for two together: {', '.join(_BY_NAME)} (default: each)",
    )
    add_step_argument(parser)
    add_options(parser, "--json", "--html")
    add_device_arguments(parser)


def add_step_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="the job's step without the profiler, in milliseconds"
    )


def read_step(step_ms: float | None) -> float | None:
    """In nanoseconds."""
    if step_ms is None:
        return None
    if not 0 < step_ms < float("inf"):
        raise CommandError(f"--step-ms {step_ms:g}: a step takes longer than nothing; next step: --step-ms 250")
    return step_ms * NS_PER_MS


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        _print_list(as_json=arguments.json)
        return Exit.OK
    if not arguments.paths:
        raise CommandError("no trace is named; next step: rankscope predict TRACE, or --list for the changes there are")
    step_ns = read_step(arguments.step_ms)
    changes = _read_changes(arguments.changes)
    other = check_device_arguments(arguments)
    traces = {rank: one.trace for rank, one in load_ranks(arguments.paths).items()}
    timelines = None if arguments.html is None else StepTimelines()
    try:
        moved = None if other is None else move(arguments, traces, other, changes, step_ns)
        found = forecast(traces, changes, step_ns, timelines) if moved is None else moved.as_is
    except ReplayError as error:
        hint = "record whole steps, as with rankscope capture --steps 5"
        return refuse(f"cannot be predicted: {error}; next step: {hint}")
    if timelines is not None:
        _write_page(arguments.html, found, facts(found, len(traces), arguments.step_ms), timelines)
    prices = arguments.price, arguments.price_now
    if arguments.json:
        on = None if moved is None else device_json(moved, *prices)
        to_stdout(json.dumps({**to_json(found, len(traces)), "on": on}, allow_nan=False))
    elif moved is None:
        print_forecast(found, len(traces), arguments.step_ms)
    else:
        console = Terminal(soft_wrap=True)
        answer = device_headline(moved) if found.is_usable else headline(found)
        if _print_facts(found, answer, facts(found, len(traces), arguments.step_ms), console):
            print_device(moved, *prices, console)
    return Exit.OK if found.is_usable else Exit.UNDECIDED


def _write_page(path: Path, found: Forecast, said: Sequence[str], timelines: StepTimelines) -> None:
    from rankscope.cli.predict_page import make_page

    write_output("--html", path, make_page(found, headline(found), said, timelines))


def _read_changes(said: str | None) -> list[list[Change]] | None:
    if said is None:
        return None
    return [[_read_change(word.strip()) for word in dict.fromkeys(part.split("+"))] for part in said.split(",")]


def _read_change(word: str) -> Change:
    if word in _BY_NAME:
        return _BY_NAME[word]
    if found := _BUCKET.fullmatch(word):
        return bucket(int(found[1]))
    if found := _FASTER.fullmatch(word):
        factor = float(found[2])
        if 0 < factor < float("inf"):
            return faster(found[1], factor)
    raise CommandError(
        f"--with {word}: there is no such change; next step: one of {', '.join(_BY_NAME)}, bucketMB such as bucket50, "
        "or KERNEL*FACTOR such as softmax*2"
    )


def _print_list(*, as_json: bool) -> None:
    if as_json:
        to_stdout(json.dumps({"changes": [_described(change) for change in CHANGES]}))
        return
    console = Terminal(soft_wrap=True)
    for change in CHANGES:
        console.print(Text.assemble((f"{change.name:12}", "bold"), f"{change.what}"))
        console.print(Text(f"            by {change.remedy}; costs {change.costs}", style="dim"))
    console.print(Text("also bucketMB, such as bucket50, and KERNEL*FACTOR, such as softmax*2"))


def print_forecast(found: Forecast, ranks: int, step_ms: float | None) -> None:
    console = Terminal(soft_wrap=True)
    if _print_facts(found, headline(found), facts(found, ranks, step_ms), console):
        _print_predictions(found, console)


def _print_facts(found: Forecast, answer: str, said: Sequence[str], console: Terminal) -> bool:
    """The answer, and what it rests on. False if the replay is too far off for more."""
    console.print(Text(answer, style="bold" if found.is_usable else "bold red"))
    for line in said:
        console.print(Text(line, style="dim" if found.is_usable else ""))
    if found.is_usable:
        console.print()
    return found.is_usable


def _print_predictions(found: Forecast, console: Terminal) -> None:
    known = [one for one in found.predictions if one.gain_ratio is not None]
    table = make_table(("change", "step", "gain", ""), left=("change", ""))
    for one in known:
        step = quantity((one.step_ns or 0.0) / 1000, "us")
        table.add_row(*map(Text, (one.name, step, gain_words(one), gain_unit(one))))
    if table.row_count:
        console.print(table)
        console.print()
    for one in known:
        if one.gain >= MIN_GAIN_RATIO and len(one.changes) == 1:
            change = one.changes[0]
            console.print(Text(f"{change.name}: {change.remedy}; costs {change.costs}"))
    for reason, names in not_applicable(found).items():
        console.print(Text(f"{names}: {reason}", style="dim"))


def _described(change: Change) -> dict[str, str]:
    return {"name": change.name, "what": change.what, "remedy": change.remedy, "costs": change.costs}


def to_json(found: Forecast, ranks: int) -> dict[str, Any]:
    """The keys are documented in docs/predict.md."""
    return {
        "ranks": ranks,
        "usable": found.is_usable,
        "recorded_step_ms": found.recorded_step_ns / NS_PER_MS,
        "replayed_step_ms": found.replayed_step_ns / NS_PER_MS,
        "error_ratio": found.error_ratio,
        "diverges_at": found.diverges_at,
        "step_ms": found.step_ns / NS_PER_MS,
        "host_factor": found.host_factor,
        "consists_of": _costs_json(found.costs),
        "predictions": [prediction_json(one) for one in found.predictions],
    }


def prediction_json(one: Prediction) -> dict[str, Any]:
    return {
        "name": one.name,
        "step_ms": None if one.step_ns is None else one.step_ns / NS_PER_MS,
        "gain_ratio": one.gain_ratio,
        "most_gain_ratio": one.most_gain_ratio,
        "consists_of": None if one.costs is None else _costs_json(one.costs),
        "reason": one.reason,
        "changes": [_described(change) for change in one.changes],
    }


def _costs_json(costs: StepCosts) -> dict[str, float]:
    return {
        "kernels": costs.kernels,
        **{
            name.replace("_ns", "_ms"): value / NS_PER_MS for name, value in vars(costs).items() if name.endswith("_ns")
        },
    }
