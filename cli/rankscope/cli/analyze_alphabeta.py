"""`rankscope analyze alphabeta`: latency and bandwidth of collectives, and which of them are slow."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.collectives.alpha_beta import Observations
from rankscope.analysis.collectives.timings import UnreadableError, read_text
from rankscope.analysis.stats.robust import join_rows
from rankscope.analysis.traces.collective_timings import observe_traces
from rankscope.cli.alpha_beta_report import draw_svg, make_page, make_report, print_report, to_json
from rankscope.cli.messages import CommandError, cannot_read, refuse, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.output_file import write_output
from rankscope.cli.terminal import Terminal
from rankscope.cli.trace_report.files import load_traces, show_progress

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
_OPS = [
    kind.label
    for kind in CollectiveKind
    if kind not in (CollectiveKind.OTHER, CollectiveKind.SEND_RECV, CollectiveKind.COALESCED)
]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("files", nargs="+", metavar="FILE", help="CSV, JSON, output of nccl-tests, or torch traces")
    parser.add_argument("--op", choices=_OPS, help="the collective, where the file does not say")
    parser.add_argument("--group-size", type=int, metavar="N", help="ranks of a group, where the file does not say")
    parser.add_argument("--at-group-size", type=int, metavar="N", help="predict for a group of N ranks, too")
    add_options(parser, "--json", "--html")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write predicted against actual as a plot, too")


def run(arguments: argparse.Namespace) -> int:
    for option, value in (("--group-size", arguments.group_size), ("--at-group-size", arguments.at_group_size)):
        if value is not None and not 1 <= value < 1 << 31:
            return refuse(f"{option}: {value} is not a valid number of ranks; give 1 or more")
    try:
        read = read_collectives(arguments.files, op=arguments.op, ranks=arguments.group_size)
    except MemoryError:
        return refuse(f"{arguments.files[0]}: does not fit into memory; give fewer files")
    report = make_report(read.observations, read.notes, read.source, arguments.at_group_size)
    name = Path(arguments.files[0]).name if len(arguments.files) == 1 else f"{len(arguments.files)} files"
    if arguments.svg is not None:
        write_output("--svg", arguments.svg, draw_svg(report))
    if arguments.html is not None:
        write_output("--html", arguments.html, make_page(report, name))
    if arguments.json:
        to_stdout(json.dumps(to_json(report), allow_nan=False))
        return 0
    print_report(report, Terminal(soft_wrap=True))
    return 0


# Files of collective timings, in several formats.


_HEAD_BYTES = 64 << 10
_MAX_TEXT_BYTES = 256 << 20
_TRACE_MARKS = (b'"traceEvents"', b'"schemaVersion"', b'"ph"')


@dataclass(frozen=True)
class ReadCollectives:
    observations: Observations
    source: str  # traces or text
    notes: tuple[str, ...]


def read_collectives(paths: Sequence[str], *, op: str | None = None, ranks: int | None = None) -> ReadCollectives:
    """Raises CommandError. Broken traces among many are left out and named in the notes."""
    are_traces = [_is_trace(path) for path in paths]
    if all(are_traces):
        return _read_traces(paths, ranks)
    if any(are_traces):
        odd = paths[are_traces.index(not are_traces[0])]
        raise CommandError(f"{odd}: traces and tables of collectives cannot be read together; analyse them one by one")
    parts = [_read_text(path, op, ranks) for path in paths]
    return ReadCollectives(parts[0] if len(parts) == 1 else _together(paths, parts), "text", ())


def _is_trace(path: str) -> bool:
    """Directories and globs are traces; a file is a trace if it begins like one."""
    place = Path(path)
    try:
        if not place.is_file():
            return True  # the trace reader reports what is wrong with it
        with place.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except (OSError, ValueError) as error:
        raise CommandError(f"{path}: {cannot_read(error)}") from None
    if head.startswith(b"\x1f\x8b"):
        return True
    return head.lstrip(b"\xef\xbb\xbf \t\r\n")[:1] in (b"{", b"[") and any(mark in head for mark in _TRACE_MARKS)


def _read_text(path: str, op: str | None, ranks: int | None) -> Observations:
    place = Path(path)
    try:
        if place.stat().st_size > _MAX_TEXT_BYTES:
            raise CommandError(f"{path}: is larger than {_MAX_TEXT_BYTES >> 20} MiB; cut it into pieces")
        return read_text(place.read_text(encoding="utf-8"), name=place.stem, op=op, ranks=ranks)
    except UnicodeDecodeError:
        raise CommandError(f"{path}: is no text; give CSV, JSON, the output of nccl-tests, or torch traces") from None
    except OSError as error:
        raise CommandError(f"{path}: {cannot_read(error)}") from None
    except UnreadableError as error:
        raise CommandError(f"{path}: {error}") from None


def _together(paths: Sequence[str], parts: list[Observations]) -> Observations:
    """Groups of different files are different groups."""
    groups: list[str] = []
    numbers = []
    for path, part in zip(paths, parts, strict=True):
        numbers.append(part.group + len(groups))
        groups += [" ".join(word for word in (Path(path).stem, group) if word) for group in part.groups]
    joined, in_order = join_rows(parts), all(part.in_order for part in parts)
    return replace(joined, group=np.concatenate(numbers), groups=tuple(groups), in_order=in_order)


def _read_traces(paths: Sequence[str], ranks: int | None) -> ReadCollectives:
    loaded = load_traces(paths, progress=show_progress)
    if not loaded.traces:
        first = loaded.broken[0]
        more = f" (and {len(loaded.broken) - 1} more files)" if len(loaded.broken) > 1 else ""
        raise CommandError(f"{first.path}: {first.reason}{more}")
    notes = [f"{broken.path} left out: {broken.reason}" for broken in loaded.broken]
    known = {one.trace.rank: one.trace for one in loaded.traces if one.trace.rank is not None}
    traces = known if known else {0: loaded.traces[0].trace}
    observed = observe_traces(traces, ranks=ranks)
    if not len(observed.observations):
        raise CommandError(f"{paths[0]}: no collective that was timed; trace a job of several ranks with NCCL or gloo")
    return ReadCollectives(observed.observations, "traces", (*notes, *observed.notes))
