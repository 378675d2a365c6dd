"""`rankscope analyze alphabeta`: latency and bandwidth of collectives, and which of them are slow."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rankscope.cli.messages import to_stderr, to_stdout
from rankscope.cli.output_file import write_output

HELP = "fit latency and bandwidth of collectives; find the slow ones"

_EPILOG = """\
examples:
  all_reduce_perf -b 8 -e 1G -f 2 -g 8 > all_reduce_perf.txt
  rankscope analyze alphabeta all_reduce_perf.txt --svg fit.svg
  rankscope analyze alphabeta collectives.csv --json | jq '.fits[] | {op, alpha_us, beta_gbps}'
  rankscope analyze alphabeta traces/ --html report.html

FILE is CSV or JSON with op, bytes, seconds (or us, ms) and ranks, and if there are, group and time; the output of
nccl-tests; or torch traces, a directory of them too. bytes are those of the whole array, as nccl-tests count them.
Formats, numbers and JSON keys: docs/analyze-alphabeta.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="CSV, JSON, output of nccl-tests, or torch traces")
    parser.add_argument("--op", metavar="NAME", help="the collective, where the file does not say: all_reduce, …")
    parser.add_argument("--ranks", type=int, metavar="N", help="ranks of a group, where the file does not say")
    parser.add_argument("--at-ranks", type=int, metavar="N", help="predict for N ranks, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write predicted against actual as a plot")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page")


def run(arguments: argparse.Namespace) -> int:
    # Imported here because `rankscope analyze trace` reads this module's arguments, too.
    from rankscope.analysis.collectives.kinds import kind_of_note
    from rankscope.cli.alpha_beta.files import FileError, read_collectives
    from rankscope.cli.alpha_beta.report import make_report, to_json

    for option, value in (("--ranks", arguments.ranks), ("--at-ranks", arguments.at_ranks)):
        if value is not None and not 1 <= value < 1 << 31:
            return _fail(option, f"{value} is not a valid number of ranks; give 1 or more")
    if arguments.op and kind_of_note(arguments.op) is None:
        return _fail("--op", f"{arguments.op!r} is not a collective; use all_reduce, all_gather, reduce_scatter, …")
    try:
        read = read_collectives(arguments.files, op=arguments.op, ranks=arguments.ranks)
    except FileError as error:
        return _fail(error)
    except MemoryError:
        return _fail(arguments.files[0], "does not fit into memory; give fewer files")
    report = make_report(read.observations, read.notes, read.source, arguments.at_ranks)
    name = Path(arguments.files[0]).name if len(arguments.files) == 1 else f"{len(arguments.files)} files"
    for path in (arguments.svg, arguments.html):
        if path is not None:
            from rankscope.cli.alpha_beta.page import draw_svg, make_page

            text = draw_svg(report) if path is arguments.svg else make_page(report, name)
            try:
                write_output(path, text)
            except OSError as error:
                return _fail(path, f"{error.strerror or error}; choose a place that can be written")
    if arguments.json:
        to_stdout(json.dumps(to_json(report), allow_nan=False))
        return 0
    from rankscope.cli.alpha_beta.report import print_report
    from rankscope.cli.terminal import Terminal

    print_report(report, Terminal(soft_wrap=True))
    return 0


def _fail(*words: object) -> int:
    to_stderr("error: " + ": ".join(map(str, words)))
    return 2
