"""`rankscope advise`: what to change about a job, with the evidence, the lines, and what it costs."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from typing import Any

import msgspec
from rich.text import Text

from rankscope.analysis.quantities import quantity
from rankscope.analysis.replay.advice import Advice, Advised, advise
from rankscope.analysis.replay.prediction import gain_words
from rankscope.analysis.traces.diagnosis import Diagnosis
from rankscope.cli.messages import Exit, refuse, to_stderr, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.predict import add_step_argument, prediction_json, read_step, to_json
from rankscope.cli.prediction_text import facts, gain_unit, headline
from rankscope.cli.terminal import Terminal, make_table
from rankscope.cli.trace_report.files import load_ranks
from rankscope.cli.trace_report.reduction import Reduced, ReducedFiles, reduce_trace
from rankscope.cli.trace_report.report import Report, make_report

_EPILOG = """\
examples:
  rankscope advise trace.json.gz                    one rank: what would help, the largest gain first
  rankscope advise traces/ --step-ms 27.3           all ranks of a job, with its step without the profiler
  rankscope advise trace.json.gz --json             for scripts; keys are in docs/advise.md

Gains are predicted by a replay (rankscope predict). A trace with Python stacks (rankscope capture --stacks, or
with_stack=True) names the lines of your program. What is in use already is not advised.
"""
_ANSWERS = {True: "yes", False: "no", None: "not known"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="+", metavar="FILE|DIR", help="traces (.json, .json.gz), directories or globs")
    add_step_argument(parser)
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    step_ns = read_step(arguments.step_ms)
    loaded = load_ranks(arguments.paths)
    reduced: dict[int, Reduced] = {}
    for rank, one in loaded.items():
        made = reduce_trace(one.path, one.trace, top=1)
        if isinstance(made, str):
            to_stderr(f"warning: {one.path}: {made}")
        else:
            reduced[rank] = made
    if not reduced:
        return refuse("nothing can be said about these traces; next step: record steps of a job that is training")
    outcome = make_report(ReducedFiles(tuple(reduced.values()), ()))
    if outcome.failure:
        to_stderr(f"warning: {outcome.failure}")
    report = outcome.report
    diagnosis = Diagnosis(report.bound, report.sentence, report.shares, report.findings)
    advice = advise({rank: loaded[rank].trace for rank in reduced}, report.ranks, diagnosis, step_ns)
    if arguments.json:
        to_stdout(json.dumps(_to_json(advice, report, len(reduced)), allow_nan=False))
    else:
        _print(advice, report, len(reduced), arguments.step_ms)
    return Exit.OK if not advice.reason else Exit.UNDECIDED


def _print(advice: Advice, report: Report, ranks: int, step_ms: float | None) -> None:
    console = Terminal(soft_wrap=True)
    found = advice.forecast
    if found is None or advice.reason:
        console.print(Text(f"No gain can be predicted: {advice.reason}.", style="bold"))
    else:
        console.print(Text(headline(found), style="bold"))
        for line in facts(found, ranks, step_ms):
            console.print(Text(line, style="dim"))
    console.print(Text(f"{report.sentence}", style="dim"))
    for number, one in enumerate((one for one in advice.advised if len(one.prediction.changes) == 1), 1):
        _print_advised(console, number, one)
    for one in advice.advised:
        if len(one.prediction.changes) > 1:
            console.print()
            console.print(Text(f"together: {one.prediction.name} {gain_words(one.prediction)}", style="bold"))
    if advice.others:
        said = ", ".join(f"{one.name} {gain_words(one)} {gain_unit(one)}" for one in advice.others)
        console.print()
        console.print(Text(f"other batches or updates: {said}"))
    if advice.losses:
        console.print()
        console.print(Text("Not predicted; saves at most", style="bold"))
    for finding in advice.losses:
        console.print(Text(f"{finding.title}: {quantity(finding.saving_ratio, 'ratio')}. {finding.suggestion}"))
    console.print()
    console.print(Text(f"In use: {', '.join(advice.in_use) or 'none of the remedies that traces show'}"))
    table = make_table(("question", "answer", ""), left=("question", "answer", ""))
    for check in advice.checks:
        table.add_row(*map(Text, (check.question, _ANSWERS[check.answer], check.evidence)))
    if table.row_count:
        console.print(table)


def _print_advised(console: Terminal, number: int, one: Advised) -> None:
    change = one.prediction.changes[0]
    console.print()
    console.print(Text(f"{number}. {change.name}: {gain_words(one.prediction)} of the step", style="bold"))
    console.print(Text(f"   do: {change.remedy}"))
    for evidence in one.evidence:
        console.print(Text(f"   why: {evidence}"))
    if one.lines:
        console.print(Text(f"   where: {', '.join(map(str, one.lines))}"))
    console.print(Text(f"   costs: {change.costs}"))


def _to_json(advice: Advice, report: Report, ranks: int) -> dict[str, Any]:
    """The keys are documented in docs/advise.md."""
    return {
        "sentence": report.sentence,
        "reason": advice.reason,
        "replay": None if advice.forecast is None else to_json(advice.forecast, ranks),
        "advice": [
            {
                **prediction_json(one.prediction),
                "evidence": list(one.evidence),
                "lines": [{"function": line.function, "file": line.file, "line": line.line} for line in one.lines],
            }
            for one in advice.advised
        ],
        "losses": msgspec.to_builtins(advice.losses),
        "in_use": list(advice.in_use),
        "checks": [asdict(check) for check in advice.checks],
    }
