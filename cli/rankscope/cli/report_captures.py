"""`rankscope report captures`: one report on many captures, made by one process or by several that share them."""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from rankscope.analysis.quantities import count, quantity, shorten, shorten_all
from rankscope.analysis.traces.capture_report import CaptureReport, CaptureRow, capture_report, capture_row
from rankscope.cli.messages import CommandError, Exit, overwrite, to_stderr
from rankscope.cli.options import add_options, add_output_argument
from rankscope.cli.output_file import open_output, write_output, writing
from rankscope.cli.trace_report.files import BrokenFile, find_files, without_collection
from rankscope.cli.trace_report.reduction import reduce_files
from rankscope.cli.trace_report.report import make_report, verdict_of

if TYPE_CHECKING:
    from rankscope.cli.terminal import Terminal

_EPILOG = """\
examples:
  rankscope report captures captures/                            every capture below a directory, as one report
  rankscope report captures captures/ --json > report.json       for scripts; keys are in docs/report-captures.md
  rankscope report captures captures/ --shards 4 --shard 0 --parts parts/
                                                                 a worker's share; 4 workers make the whole
  rankscope report captures --parts parts/                       the report on what all workers have read

A capture is a directory with the traces of its ranks, as `rankscope captures get` and uploads write them; the
directory above it is its run. In an Indexed Job of Kubernetes, --shard is the pod's index by itself. The worker that
ends last also makes the report.
"""
# Kubernetes sets it in the pods of an Indexed Job.
_INDEX_VARIABLE = "JOB_COMPLETION_INDEX"
_MAX_SHARDS = 10_000
_MAX_PART_BYTES = 1 << 30
_TOP_KERNELS = 10
_MAX_ROWS = 12
_NAME_CHARACTERS = 60


class PartHeader(msgspec.Struct, frozen=True):
    """The first line of a part. Rows follow, one a line."""

    shard: int
    shards: int


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("paths", nargs="*", metavar="DIR", help="directories with captures")
    add_options(parser, "--json")
    add_output_argument(parser, "FILE", "write the object of --json there, and print nothing")
    parser.add_argument("--shards", type=int, metavar="N", help="number of workers that share the captures")
    parser.add_argument(
        "--shard", type=int, metavar="I", help=f"this worker, from 0 (default: ${_INDEX_VARIABLE}, of an Indexed Job)"
    )
    parser.add_argument(
        "--parts",
        type=Path,
        metavar="DIR",
        help="where workers write what they read: a new directory for each report",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.shards is None:
        if arguments.shard is not None:
            raise CommandError("--shard: of how many? next step: --shards N")
        if arguments.parts is not None and arguments.paths:
            raise CommandError("--parts: a worker needs its share; next step: --shards N --shard I")
    if arguments.parts is not None and not arguments.paths:
        return _report(_joined(arguments.parts), arguments)
    if not arguments.paths:
        raise CommandError("no directory; next step: rankscope report captures DIR")
    if arguments.shards is None:
        return _report(_rows(arguments.paths, 0, 1), arguments)
    shard = _shard(arguments.shard, arguments.shards)
    if arguments.parts is None:
        raise CommandError("--shards: the workers need a place in common; next step: --parts DIR")
    _write_part(arguments.parts, PartHeader(shard, arguments.shards), _rows(arguments.paths, shard, arguments.shards))
    missing = _missing(arguments.parts, arguments.shards)
    if missing:
        to_stderr(f"{count(len(missing), 'part')} of {arguments.shards} to come: the worker that ends last reports")
        return Exit.OK
    return _report(_joined(arguments.parts), arguments)


def _shard(given: int | None, shards: int) -> int:
    if not 1 <= shards <= _MAX_SHARDS:
        raise CommandError(f"--shards {shards}: from 1 to {_MAX_SHARDS:,}; next step: --shards 4")
    shard = given
    if shard is None:
        index = os.environ.get(_INDEX_VARIABLE, "")
        if not (index.isascii() and index.isdigit() and len(index) < 9):
            raise CommandError(f"which of {shards} shards? ${_INDEX_VARIABLE} does not say; next step: --shard 0")
        shard = int(index)
    if not 0 <= shard < shards:
        raise CommandError(f"shard {shard} of {shards}: shards are numbered from 0; next step: --shard {shards - 1}")
    return shard


# Captures and their rows.


def _rows(paths: Sequence[str], shard: int, shards: int) -> Iterator[CaptureRow]:
    """Of the captures of a shard. The name of a capture decides on its shard, so workers need not talk."""
    files, broken = find_files(paths)
    roots = [Path(path).resolve() for path in paths]
    captures: dict[str, list[Path]] = {}
    for path in files:
        captures.setdefault(_name(path.parent, roots), []).append(path)
    own = {name: paths for name, paths in captures.items() if zlib.crc32(os.fsencode(name)) % shards == shard}
    if not captures:
        reason = f"{broken[0].path}: {broken[0].reason}; " if broken else ""
        raise CommandError(f"{reason}no capture was found; next step: name a directory with captures")
    if broken and shard == 0:
        yield _row(".", "", [], broken)
    for done, (name, paths_of) in enumerate(sorted(own.items())):
        overwrite(f"read {done} of {count(len(own), 'capture')}")
        run, _, _ = name.rpartition("/")
        yield _row(name, run, paths_of, ())
    overwrite("")


def _name(folder: Path, roots: Sequence[Path]) -> str:
    """Below the directory that was given, so that workers may mount it at different places."""
    resolved = folder.resolve()
    below = next((resolved.relative_to(root) for root in roots if resolved.is_relative_to(root)), None)
    return folder.name if below is None or below == Path() else below.as_posix()


def _row(name: str, run: str, paths: Sequence[Path], broken: Sequence[BrokenFile]) -> CaptureRow:
    with without_collection():
        report = make_report(reduce_files([str(path) for path in paths], top=_TOP_KERNELS)).report
    words = [f"{one.path}: {one.reason}" for one in broken] + [f"{one.file}: {one.reason}" for one in report.broken]
    return capture_row(name, run, report.ranks, report.bound, report.findings, verdict_of(report), tuple(words))


# Parts: what workers leave for the report.


def _part(folder: Path, shard: int, shards: int) -> Path:
    return folder / f"part-{shard}-of-{shards}.jsonl"


def _missing(folder: Path, shards: int) -> list[int]:
    return [shard for shard in range(shards) if not _part(folder, shard, shards).is_file()]


def _write_part(folder: Path, header: PartHeader, rows: Iterable[CaptureRow]) -> None:
    encode = msgspec.json.Encoder().encode
    path = _part(folder, header.shard, header.shards)
    with writing("--parts"):
        folder.mkdir(parents=True, exist_ok=True)
        with open_output(path) as file:
            file.write(encode(header) + b"\n")
            number = sum(file.write(encode(row) + b"\n") > 0 for row in rows)
    to_stderr(f"wrote {path}: {count(number, 'capture')}")


def _joined(folder: Path) -> list[CaptureRow]:
    """Raises CommandError unless the parts are those of one report, and all are there."""
    paths = sorted(folder.glob("part-*-of-*.jsonl"))
    if not paths:
        raise CommandError(f"{folder}: no parts; next step: run the workers with --parts {folder}")
    rows: list[CaptureRow] = []
    headers: list[PartHeader] = []
    for path in paths:
        header, own = read_part(path)
        headers.append(header)
        rows += own
    numbers = {header.shards for header in headers}
    if len(numbers) > 1:
        said = " and ".join(map(str, sorted(numbers)))
        raise CommandError(f"{folder}: parts of {said} shards; next step: a new directory for each report")
    missing = _missing(folder, headers[0].shards)
    if missing:
        raise CommandError(
            f"{folder}: shard {missing[0]} of {headers[0].shards} is missing; next step: run that worker"
        )
    return rows


def read_part(path: Path) -> tuple[PartHeader, list[CaptureRow]]:
    """Raises CommandError for what is no part."""
    try:
        if path.stat().st_size > _MAX_PART_BYTES:
            raise CommandError(f"{path}: larger than {_MAX_PART_BYTES >> 20} MiB; next step: use more shards")
        first, *lines = path.read_bytes().splitlines()
        header = msgspec.json.decode(first, type=PartHeader)
        decode = msgspec.json.Decoder(CaptureRow).decode
        return header, [decode(line) for line in lines]
    except (OSError, ValueError, msgspec.DecodeError) as error:
        raise CommandError(f"{path}: not a part of a report ({error}); next step: remove it, run its worker") from error


# Output.


def _report(rows: Iterable[CaptureRow], arguments: argparse.Namespace) -> int:
    report = capture_report(rows)
    for text in report.broken[:_MAX_ROWS]:
        to_stderr(f"warning: {text}")
    if len(report.broken) > _MAX_ROWS:
        to_stderr(f"warning: {len(report.broken) - _MAX_ROWS:,} more files left out (--json has all)")
    if not report.captures:
        raise CommandError("no trace could be read; next step: name directories that hold captures")
    encoded = msgspec.json.encode(report) + b"\n"
    if arguments.output is not None:
        write_output("-o", arguments.output, encoded)
    elif arguments.json:
        sys.stdout.buffer.write(encoded)
        sys.stdout.flush()
    else:
        print_report(report)
    return Exit.OK


def print_report(report: CaptureReport) -> None:
    # The operator's image, in which workers run, has no rich.
    from rich.text import Text

    from rankscope.cli.terminal import Terminal

    console = Terminal()
    devices = ", ".join(report.devices)
    console.print(
        Text(
            f"{count(report.captures, 'capture')} of {count(len(report.runs), 'run')}, {count(report.ranks, 'rank')}, "
            f"{quantity(report.span_us, 'us')} of rank time{f'; {devices}' if devices else ''}",
            style="bold",
        )
    )
    parts = sorted(report.shares.items(), key=lambda one: -one[1])
    console.print(Text(", ".join(f"{part.replace('_', ' ')} {_percent(share)}" for part, share in parts if share)))
    console.print(Text(f"bound by: {_counted(report.bounds)}"))
    if report.verdicts:
        console.print(Text(f"ranks compared: {_counted(report.verdicts)}"))
    console.print()
    rows = [["saves at most", "captures", "finding", "most in"]]
    rows += [
        [_percent(one.saving_ratio), f"{one.captures:,}", one.kind, shorten(one.worst[0], _NAME_CHARACTERS)]
        for one in report.findings
    ]
    _print_rows(console, rows, ("finding", "most in"))
    rows = [["time", "captures", "step", "compute", "bound", "finding", "run"]]
    rows += [
        [
            _percent(one.share_ratio),
            f"{one.captures:,}",
            quantity(one.step_us, "us"),
            _percent(one.compute_ratio),
            one.bound,
            one.finding,
            shorten(one.run or ".", _NAME_CHARACTERS),
        ]
        for one in report.runs
    ]
    _print_rows(console, rows, ("bound", "finding", "run"))
    names = shorten_all([one.name for one in report.kernels], _NAME_CHARACTERS)
    rows = [["time", "captures", "kernel or operator"]]
    rows += [
        [quantity(one.total_us, "us"), f"{one.captures:,}", name]
        for one, name in zip(report.kernels, names, strict=True)
    ]
    _print_rows(console, rows, ("kernel or operator",))


def _print_rows(console: Terminal, rows: Sequence[Sequence[str]], left: Sequence[str]) -> None:
    if len(rows) > 1:
        console.print_rows(rows, left, _MAX_ROWS)


def _percent(ratio: float) -> str:
    return f"{ratio * 100:.1f} %"


def _counted(counts: dict[str, int]) -> str:
    return ", ".join(f"{word} {number:,}" for word, number in counts.items())
