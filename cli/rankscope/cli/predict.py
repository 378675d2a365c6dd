"""`rankscope predict`: what a change would bring, from a replay of recorded steps."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.text import Text

from rankscope.analysis.quantities import quantity, shorten
from rankscope.analysis.replay.changes import CHANGES, Change
from rankscope.analysis.replay.graph import ReplayError
from rankscope.analysis.replay.prediction import LEAST_GAIN_RATIO, MOST_ERROR_RATIO, Forecast, forecast
from rankscope.analysis.traces.trace import Trace
from rankscope.cli.exit_codes import CommandError, Exit
from rankscope.cli.messages import refuse, to_stderr, to_stdout
from rankscope.cli.terminal import Terminal, make_table
from rankscope.cli.trace_report.files import load_traces, show_progress

_EPILOG = """\
examples:
  rankscope predict trace.json.gz                          every change, the largest gain first
  rankscope predict traces/ --with even                    all ranks of a job: what does the slow one cost?
  rankscope predict trace.json.gz --with fused+graph       two changes together
  rankscope predict trace.json.gz --step-ms 14.7           the job's step without the profiler, for exact gains
  rankscope predict --list                                 the changes there are

The steps of the traces are replayed from the durations of their kernels and host calls. The error of that replay is
printed; above 5 % nothing is predicted. The profiler slows the host: a job that is bound by launches needs --step-ms.
What each change assumes: docs/predict.md.
"""
_BY_NAME = {change.name: change for change in CHANGES}
NS_PER_MS = 1e6
# Names of kernels can be thousands of characters long.
_NAME_CHARACTERS = 76


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="*", metavar="FILE|DIR", help="traces (.json, .json.gz), directories or globs")
    parser.add_argument("--list", action="store_true", help="print the changes there are, and exit")
    parser.add_argument(
        "--with",
        dest="changes",
        metavar="CHANGE[+CHANGE],…",
        help=f"changes to predict, + for two together: {', '.join(_BY_NAME)} (default: each)",
    )
    parser.add_argument(
        "--step-ms", type=float, metavar="MS", help="the job's step without the profiler, in milliseconds"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    if arguments.list:
        _print_list(as_json=arguments.json)
        return Exit.OK
    if not arguments.paths:
        raise CommandError("no trace is named; next step: rankscope predict TRACE, or --list for the changes there are")
    if arguments.step_ms is not None and not 0 < arguments.step_ms < float("inf"):
        raise CommandError(
            f"--step-ms {arguments.step_ms:g}: a step takes longer than nothing; next step: --step-ms 250"
        )
    changes = _read_changes(arguments.changes)
    traces = _read_traces(arguments.paths)
    step_ns = None if arguments.step_ms is None else arguments.step_ms * NS_PER_MS
    try:
        found = forecast(traces, changes, step_ns)
    except ReplayError as error:
        hint = "record whole steps, as with rankscope capture --steps 5"
        return refuse(f"cannot be predicted: {error}; next step: {hint}")
    if arguments.json:
        to_stdout(json.dumps(to_json(found, len(traces)), allow_nan=False))
    else:
        print_forecast(found, len(traces), arguments.step_ms)
    return Exit.OK if found.is_usable else Exit.UNDECIDED


def _read_changes(said: str | None) -> list[list[Change]] | None:
    if said is None:
        return None
    changes = [[word.strip() for word in part.split("+")] for part in said.split(",")]
    unknown = [word for part in changes for word in part if word not in _BY_NAME]
    if unknown:
        raise CommandError(f"--with {unknown[0]}: there is no such change; next step: one of {', '.join(_BY_NAME)}")
    return [[_BY_NAME[word] for word in dict.fromkeys(part)] for part in changes]


def _read_traces(paths: Sequence[str | Path]) -> dict[int, Trace]:
    loaded = load_traces(paths, progress=show_progress)
    for one in loaded.broken:
        to_stderr(f"warning: {one.path}: {one.reason}")
    if not loaded.traces:
        raise CommandError("no trace could be read; next step: name files that torch.profiler wrote")
    known = {one.trace.rank: one.trace for one in loaded.traces if one.trace.rank is not None}
    if known:
        return known
    if len(loaded.traces) > 1:
        raise CommandError("the traces name no ranks; next step: name one of them, or files as rank-0.json.gz")
    return {0: loaded.traces[0].trace}


def _print_list(*, as_json: bool) -> None:
    if as_json:
        to_stdout(json.dumps([_described(change) for change in CHANGES]))
        return
    console = Terminal(soft_wrap=True)
    for change in CHANGES:
        console.print(Text.assemble((f"{change.name:8}", "bold"), f"{change.what}"))
        console.print(Text(f"        by {change.remedy}; costs {change.costs}", style="dim"))


def print_forecast(found: Forecast, ranks: int, step_ms: float | None, console: Terminal | None = None) -> None:
    console = console or Terminal(soft_wrap=True)
    error = _percent(abs(found.error_ratio))
    recorded = f"a step of {quantity(found.recorded_step_ns / 1000, 'us')} was recorded on {_count(ranks)}"
    if not found.is_usable:
        console.print(Text("Cannot be predicted.", style="bold red"))
        limit = _percent(MOST_ERROR_RATIO)
        console.print(Text(f"{recorded}; the replay differs by {error}, more than {limit}."))
        console.print(Text(f"It drifts apart before {shorten(found.diverges_at, _NAME_CHARACTERS)}."))
        return
    console.print(Text(_headline(found), style="bold"))
    console.print(Text(f"{recorded}; the replay differs by {error}", style="dim"))
    if found.host_factor < 1:
        factor = _percent(found.host_factor)
        console.print(Text(f"without the profiler the host takes {factor} of its recorded time", style="dim"))
    else:
        rest = "sleeping, reading and communication take" if found.on_host else "the device alone takes"
        known = f"; {rest} the step's time" if step_ms is not None else "; --step-ms MS corrects it"
        console.print(Text(f"host time as recorded, slowed by the profiler{known}", style="dim"))
    console.print()
    table = make_table(("change", "step", "gain"), left=("change",))
    for one in found.predictions:
        if one.gain_ratio is not None:
            step = quantity((one.step_ns or 0.0) / 1000, "us")
            table.add_row(*map(Text, (one.name, step, _percent(one.gain_ratio))))
    if table.row_count:
        console.print(table)
        console.print()
    for one in found.predictions:
        if one.gain_ratio is None:
            console.print(Text(f"{one.name}: {one.reason}", style="dim"))
        elif one.gain_ratio >= LEAST_GAIN_RATIO and len(one.changes) == 1:
            change = one.changes[0]
            console.print(Text(f"{change.name}: {change.remedy}; costs {change.costs}"))


def _headline(found: Forecast) -> str:
    best = found.predictions[0] if found.predictions else None
    if best is None or best.gain < LEAST_GAIN_RATIO:
        return "None of these changes would shorten the step."
    what = " and ".join(change.what for change in best.changes)
    return f"{_percent(best.gain)} of the step would be saved if {what}."


def _percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"


def _count(ranks: int) -> str:
    return "1 rank" if ranks == 1 else f"{ranks} ranks"


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
        "predictions": [
            {
                "name": one.name,
                "step_ms": None if one.step_ns is None else one.step_ns / NS_PER_MS,
                "gain_ratio": one.gain_ratio,
                "reason": one.reason,
                "changes": [_described(change) for change in one.changes],
            }
            for one in found.predictions
        ],
    }
