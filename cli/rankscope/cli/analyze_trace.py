"""`rankscope analyze trace`: breaks down torch-profiler traces, joins them across ranks, and gives advice."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rankscope.analysis.profiles.profile import merge
from rankscope.analysis.quantities import count
from rankscope.cli.messages import refuse, to_stderr
from rankscope.cli.options import add_options
from rankscope.cli.output_file import ENDINGS_IN_WORDS, check_format, write_output, write_profile, writing
from rankscope.cli.trace_report.files import nothing_read, show_progress, without_collection
from rankscope.cli.trace_report.reduction import Reduced, read_layout, reduce_files
from rankscope.cli.trace_report.report import Outcome, make_report, to_json, write_merged

_EPILOG = """\
examples:
  rankscope analyze trace trace.json.gz                    one rank: where its time went and what to try
  rankscope analyze trace traces/ --html report.html       all ranks below a directory, as one page with plots
  rankscope analyze trace 'r*.json.gz' --json | jq .join   for scripts; keys are in docs/analyze-trace.md
  rankscope analyze trace traces/ --merged all.json.gz     one trace of all ranks for ui.perfetto.dev
  rankscope analyze trace trace.json.gz --flame gpu.html   flame graph of the GPU: kernels, launches, operators, Python
  rankscope analyze trace trace.json.gz --lines            time and memory of each line and module of the model

Lines, and Python frames in flame graphs, need traces with stacks: rankscope capture --stacks, with_stack=True.
Traces are what torch.profiler writes (export_chrome_trace, tensorboard_trace_handler) or a Rankscope capture.
Broken files are named and left out; the exit code is 2 if nothing could be read.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="+", metavar="FILE|DIR", help="traces (.json, .json.gz), directories or globs")
    add_options(parser, "--json", "--html")
    parser.add_argument(
        "--merged", metavar="FILE", type=Path, help="write all ranks as one trace for Perfetto (.json or .json.gz)"
    )
    parser.add_argument(
        "--flame",
        metavar="FILE",
        type=Path,
        help=f"write the time of kernels by their launch, operators and Python stack: {ENDINGS_IN_WORDS}",
    )
    parser.add_argument(
        "--lines", action="store_true", help="device time and memory by line of the program and by nn.Module"
    )
    layout = parser.add_mutually_exclusive_group()
    layout.add_argument(
        "--parallelism",
        metavar="pp=P,dp=D,tp=T",
        help="how ranks are laid out, pipeline stages outermost as Megatron and torchtitan number them; "
        "stages are then compared separately",
    )
    layout.add_argument("--stages", metavar="S,S,…", help="pipeline stage of rank 0, 1, …, for any other layout")
    parser.add_argument("--top", type=int, default=10, metavar="N", help="kernels listed (default: 10)")


def run(arguments: argparse.Namespace) -> int:
    with without_collection():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    if arguments.top < 1:
        return refuse(f"--top {arguments.top}: at least one kernel is needed; next step: --top 10")
    if arguments.flame is not None:
        check_format("--flame", arguments.flame)
    layout = read_layout(arguments.parallelism, arguments.stages)
    stages = layout.stages if layout else None
    wants_kernels = arguments.flame is not None
    files = reduce_files(
        arguments.paths,
        top=arguments.top,
        stages=stages,
        kernels=wants_kernels,
        lines=arguments.lines,
        progress=show_progress,
    )
    if not files.ranks:
        raise nothing_read(files.broken)
    for one in files.broken:
        to_stderr(f"warning: {one.path}: {one.reason}")
    if files.broken:
        total = len(files.ranks) + len(files.broken)
        to_stderr(f"warning: {len(files.broken)} of {total} left out, {len(files.ranks)} analysed")
    ranks = [one.summary.rank for one in files.ranks if one.summary.rank is not None]
    outcome = make_report(files, layout.stage_of(ranks) if layout else None)
    if arguments.lines and not any(one.summary.lines for one in files.ranks):
        hint = "next step: record a job on a GPU with with_stack=True, as rankscope capture --stacks does"
        to_stderr(f"warning: no lines: the trace has no Python stacks; {hint}")
    if outcome.failure:
        to_stderr(f"warning: {outcome.failure}")
    _write(arguments, outcome, {one.summary.rank: one.path for one in files.ranks if one.summary.rank is not None})
    if arguments.flame is not None:
        with writing("--flame"):
            _write_flame(arguments.flame, files.ranks)
    if arguments.json:
        sys.stdout.buffer.write(to_json(outcome.report) + b"\n")
    else:
        from rankscope.cli.trace_report.terminal import print_report

        print_report(outcome.report, most_lines=arguments.top)
    sys.stdout.flush()
    return 0


def _write(arguments: argparse.Namespace, outcome: Outcome, paths: Mapping[int, Path]) -> None:
    if arguments.html is not None:
        from rankscope.cli.trace_report.page import make_page

        write_output("--html", arguments.html, make_page(outcome.report))
    if arguments.merged is not None:
        with writing("--merged"):
            write_merged(arguments.merged, paths, outcome.shifts)
        to_stderr(f"wrote {arguments.merged}: open it at ui.perfetto.dev")


def _write_flame(path: Path, ranks: Sequence[Reduced]) -> None:
    profile = merge([one.kernels for one in ranks if one.kernels is not None])
    if not profile.samples_total:
        to_stderr(f"warning: {path} is empty: nothing ran on a device; next step: record a job that uses a GPU")
    source = ranks[0].path.name if len(ranks) == 1 else count(len(ranks), "rank")
    write_profile(path, profile, f"{source}: time on the device", is_of_device=True)
    to_stderr(f"wrote {path}: {count(profile.samples_total, 'kernel')}")
