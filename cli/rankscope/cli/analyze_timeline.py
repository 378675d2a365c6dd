"""`rankscope analyze timeline`: the step time without its slow rank, stage or operation."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.cli.messages import overwrite, to_stderr, to_stdout
from rankscope.cli.output_file import write_output

if TYPE_CHECKING:
    from rankscope.analysis.timelines.report import TimelineReport

HELP = "replay a pipeline-parallel job: what would it be without its slow rank, stage or operation?"
UNITS = ("s", "ms", "us", "ns")

_EPILOG = """\
examples:
  rankscope analyze timeline trace.parquet --meta meta.yaml
  rankscope analyze timeline trace.csv --json | jq .verdict
  rankscope analyze timeline trace.parquet --heatmap ranks.svg --html report.html

A row of FILE is one operation of one rank in one step: dp_rank, stage, step, optype, start_ts, duration (seconds), and
if there are, rank, seq_id, mc or gmc (model chunk). --meta is YAML with pp_size, dp_size, tp_size; without it, the
rows tell. Columns, numbers and JSON keys: docs/analyze-timeline.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="parquet or CSV, a row per operation")
    parser.add_argument("--meta", type=Path, metavar="YAML", help="sizes of the job: pp_size, dp_size, tp_size …")
    parser.add_argument("--unit", choices=UNITS, default="s", help="of start_ts and duration (default: s)")
    parser.add_argument("--min-steps", type=int, metavar="N", help="steps needed for a verdict (default: 20)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--heatmap", type=Path, metavar="FILE", help="write stage × dp rank to FILE.svg")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")


def run(arguments: argparse.Namespace) -> int:
    # Imported here because `rankscope analyze trace` reads this module's arguments, too.
    from rankscope.analysis.timelines.report import NOT_DECLARED, analyze
    from rankscope.analysis.timelines.timeline import TimelineError
    from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
    from rankscope.cli.timeline_report.files import FileError, read_sizes, read_timeline

    if arguments.heatmap and arguments.heatmap.suffix.lower() != ".svg":
        return _fail(arguments.heatmap, "a heat map is an SVG picture; give it the ending .svg")
    policy = DEFAULT_POLICY
    if arguments.min_steps is not None:
        if arguments.min_steps < 1:
            return _fail("--min-steps", "must be 1 or more")
        policy = replace(policy, steps_needed=arguments.min_steps)
    try:
        sizes = read_sizes(arguments.meta) if arguments.meta else NOT_DECLARED
    except FileError as error:
        return _fail(arguments.meta, error)
    try:
        overwrite(f"reading {arguments.file.name} …")
        timeline = read_timeline(arguments.file, arguments.unit)
        overwrite(f"replaying {len(timeline):,} operations …")
        report = analyze(timeline, sizes, policy)
        overwrite("")
    except (FileError, TimelineError) as error:
        return _fail(arguments.file, error)
    except MemoryError:
        return _fail(arguments.file, "does not fit into memory; cut it to fewer steps")
    try:
        _draw(report, arguments)
    except OSError as error:
        return _fail(error.filename, f"{error.strerror or error}; choose a place that can be written")
    try:
        _print(report, as_json=arguments.json)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader closed the pipe; without this, Python reports an error when it closes its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _draw(report: TimelineReport, arguments: argparse.Namespace) -> None:
    if arguments.heatmap is None and arguments.html is None:
        return
    from rankscope.cli.timeline_report.page import draw_svg, make_page

    if arguments.heatmap is not None:
        write_output(arguments.heatmap, draw_svg(report))
    if arguments.html is not None:
        write_output(arguments.html, make_page(report, arguments.file.name))


def _print(report: TimelineReport, *, as_json: bool) -> None:
    if as_json:
        from rankscope.cli.timeline_report.report import to_json

        to_stdout(json.dumps(to_json(report), allow_nan=False))
        return
    from rankscope.cli.terminal import Terminal
    from rankscope.cli.timeline_report.report import print_report

    print_report(report, Terminal(soft_wrap=True))


def _fail(what: object, why: object) -> int:
    overwrite("")
    to_stderr(f"error: {what}: {why}")
    return 2
