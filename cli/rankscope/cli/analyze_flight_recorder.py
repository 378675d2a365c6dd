"""`rankscope analyze flight-recorder`: which rank is missing in which collective, from the dumps of torch's flight
recorder."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from rankscope.analysis.collectives.flight_recorder.catalog import Catalog, DumpError
from rankscope.analysis.collectives.flight_recorder.dump import MAX_DUMP_BYTES, Dump, read_dump, renumber
from rankscope.analysis.collectives.flight_recorder.matching import Stall, analyze_dumps
from rankscope.analysis.collectives.flight_recorder.records import Position
from rankscope.analysis.collectives.flight_recorder.report import Outcome, Report, absence_text, make_report, to_json
from rankscope.analysis.quantities import count, shorten
from rankscope.cli.messages import Exit, cannot_read, overwrite, refuse, to_stderr, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.trace_report.files import find_files, without_collection
from rankscope.common.rank_selection import rank_ranges

if TYPE_CHECKING:
    from rankscope.cli.terminal import Terminal

_EPILOG = """\
examples:
  TORCH_FR_BUFFER_SIZE=2000 TORCH_NCCL_DUMP_ON_TIMEOUT=1 TORCH_FR_DUMP_TEMP_FILE=/shared/fr_ torchrun … train.py
  rankscope analyze flight-recorder /shared/               after a timeout: one file per rank, fr_0, fr_1, …
  rankscope analyze flight-recorder '/shared/fr_*' --json | jq '.reason, .culprits'

FILE is what torch wrote on a timeout, or the bytes of _dump_fr_trace() or _dump_nccl_trace() or their _json variants,
of torch 2.4 or later; a directory or a glob of them. The rank is the number at the end of the file's name. Dumps are
pickles: nothing in them is executed. Meanings and JSON keys: docs/analyze-flight-recorder.md.
"""

# nccl_trace_rank_17, fr_17.pickle, rank17.json
_RANK = re.compile(r"(\d{1,9})(?:\.[A-Za-z]\w*)*$")
_ROWS_SHOWN = 12
_GROUPS_SHOWN = 24
_RANKS_CHARACTERS = 32
_FILES_OF_A_TASK = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="+", metavar="FILE", help="dumps, directories of dumps, or globs; one per rank")
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    with without_collection():
        return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    catalog = Catalog()
    left_out: list[tuple[Path, str]] = []
    try:
        dumps = _read(arguments.paths, catalog, left_out)
        if not dumps:
            path, reason = left_out[0]
            more = f" (and {len(left_out) - 1} more)" if len(left_out) > 1 else ""
            return refuse(f"{path}: {reason}{more}")
        report = make_report(analyze_dumps(dumps, catalog))
    except DumpError as error:
        return refuse(str(error))
    except (MemoryError, BrokenProcessPool):  # a child was killed, probably for its memory
        return refuse("the dumps do not fit into memory; give fewer, or dump with a smaller TORCH_FR_BUFFER_SIZE")
    for path, reason in left_out:
        to_stderr(f"warning: {path}: left out: {reason}")
    if arguments.json:
        files = [{"file": str(path), "reason": reason} for path, reason in left_out]
        to_stdout(json.dumps({**to_json(report), "left_out": files}))
        return Exit.OK
    from rankscope.cli.terminal import Terminal

    _print(report, Terminal())
    return Exit.OK


# Files.


def _read(paths: Sequence[str], catalog: Catalog, left_out: list[tuple[Path, str]]) -> dict[int, Dump]:
    dumps: dict[int, Dump] = {}
    read_from: dict[int, Path] = {}
    files, broken = find_files(paths, _RANK.search, "no dump in it; name what torch wrote, as in fr_0")
    left_out += [(one.path, one.reason) for one in broken]
    for path, dump in _read_files(files, catalog):
        if isinstance(dump, str):
            left_out.append((path, dump))
            continue
        found = _RANK.search(path.name)
        rank = dump.rank if dump.rank is not None else int(found[1]) if found else None
        if rank is None:
            left_out.append((path, "its name does not end with the rank; rename it, as in fr_3"))
        elif rank in dumps:
            left_out.append((path, f"it is of rank {rank}, and so is {read_from[rank]}; give one dump per rank"))
        else:
            dumps[rank], read_from[rank] = dump, path
    return dumps


def _read_files(files: list[Path], catalog: Catalog) -> Iterator[tuple[Path, Dump | str]]:
    """In parallel if there are many: a process reads some files with a catalog of its own."""
    parts = [files[start : start + _FILES_OF_A_TASK] for start in range(0, len(files), _FILES_OF_A_TASK)]
    processes = min(os.cpu_count() or 1, len(parts))
    with contextlib.ExitStack() as stack:
        each: Iterable[tuple[list[tuple[Path, Dump | str]], Catalog]] = map(_read_part, parts)
        if processes > 1:
            # Forked: children reuse the imports, and no other threads run yet.
            pool = ProcessPoolExecutor(processes, mp_context=get_context("fork"), initializer=_ignore_interrupts)
            stack.callback(pool.shutdown, cancel_futures=True)
            each = pool.map(_read_part, parts)
        for done, (read, own) in enumerate(each, 1):
            overwrite("" if done == len(parts) else f"read {done * _FILES_OF_A_TASK} of {len(files)} dumps")
            numbers = catalog.adopt(own)
            yield from ((path, dump if isinstance(dump, str) else renumber(dump, numbers)) for path, dump in read)


def _ignore_interrupts() -> None:
    """The parent ends its children."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _read_part(files: Sequence[Path]) -> tuple[list[tuple[Path, Dump | str]], Catalog]:
    """Dumps, or the reasons why there are none."""
    catalog = Catalog()
    read: list[tuple[Path, Dump | str]] = []
    for path in files:
        try:
            with path.open("rb") as file:
                read.append((path, read_dump(file.read(MAX_DUMP_BYTES + 1), catalog)))
        except OSError as error:
            read.append((path, cannot_read(error)))
        except DumpError as error:
            read.append((path, str(error)))
    return read, catalog


# Text.


def _print(report: Report, console: Terminal) -> None:
    from rich.table import Table
    from rich.text import Text

    from rankscope.cli.terminal import make_table

    def show(title: str, rows: Sequence[tuple[str, Sequence[int], str]]) -> None:
        console.print()
        console.print(Text(title, style="bold"))
        table = Table(box=None, pad_edge=False, show_header=False)
        for said, ranks, text in rows:
            table.add_row(f"  {said}", _ranks(ranks), Text(text))
        console.print(table)

    def show_rest(number: int) -> None:
        if number > 0:
            console.print(Text(f"… and {number} more (--json has all)", style="dim"))

    analysis = report.analysis
    style = {Outcome.HEALTHY: "bold green", Outcome.HANG: "bold red", Outcome.MISMATCH: "bold red"}
    console.print(Text(report.outcome.value, style=style.get(report.outcome, "bold yellow")), Text(report.headline))
    for group, mismatch in analysis.mismatches[:_ROWS_SHOWN]:
        more = f", and in {mismatch.sequences - 1} later" if mismatch.sequences > 1 else ""
        title = f"group {group.label}: different {mismatch.difference.words} in seq {mismatch.sequence}{more}"
        show(title, [(_state(at), at.ranks, _place(at)) for at in mismatch.positions[:_ROWS_SHOWN]])
    show_rest(len(analysis.mismatches) - _ROWS_SHOWN)
    for stall in analysis.stalls[:_ROWS_SHOWN]:
        others = f" and {count(len(stall.others), 'other')}" if stall.others else ""
        operation = f"{stall.waiting[0].operation.name} seq {stall.sequence}"
        show(f"group {stall.group.label}{others}: {operation}", _stall_rows(stall))
    show_rest(len(analysis.stalls) - _ROWS_SHOWN)
    console.print()
    table = make_table(("group", "ranks", "status", "entered by all", "entered"), ("group", "ranks", "status"))
    ordered = sorted(analysis.groups, key=lambda one: one.status == "complete")
    for one in ordered[:_GROUPS_SHOWN]:
        entered = [str(number) if number is not None else "–" for number in (one.last_entered_by_all, one.last_entered)]
        table.add_row(Text(one.group.label), _ranks(one.ranks), one.status, *entered)
    console.print(table)
    show_rest(len(ordered) - _GROUPS_SHOWN)
    notes = [f"{count(len(analysis.ranks), 'dump')}, {count(analysis.records, 'record')}"]
    if analysis.no_dump:
        notes.append(f"no dump: {_ranks(analysis.no_dump)}; they left or died, or their files were not given")
    if analysis.without_records:
        notes.append(f"dumped without collectives, or with those in flight only: {_ranks(analysis.without_records)}")
    for note in notes:
        console.print(Text(note, style="dim"))


def _stall_rows(stall: Stall) -> list[tuple[str, Sequence[int], str]]:
    rows: list[tuple[str, Sequence[int], str]] = []
    rows += [(_state(at), at.ranks, _place(at)) for at in stall.waiting[:_ROWS_SHOWN]]
    for absent in stall.never_entered[:_ROWS_SHOWN]:
        last = absent.last_finished
        done = f"; finished {last.operation.name} seq {last.sequence} of this group" if last else ""
        rows.append(("never entered", absent.ranks, f"{absence_text(absent)}{done}"))
    rows.append(("finished", stall.finished, ""))
    rows.append(("no dump", stall.no_dump, "left, died, or the file was not given"))
    rows.append(("unknown", stall.unknown, "the dump has no record of that time"))
    return [row for row in rows if row[1]]


def _state(position: Position) -> str:
    return {"pending": "wait", "ended": "ended or failed"}.get(position.state.name.lower(), "finished")


def _place(position: Position) -> str:
    """all_reduce [1024, 8] Float in train_step (train.py:88)"""
    operation = f"{position.operation.name} {position.operation.shapes}".strip()
    return f"{operation} in {position.line}" if position.line else operation


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shorten(rank_ranges(ranks), _RANKS_CHARACTERS)}"
