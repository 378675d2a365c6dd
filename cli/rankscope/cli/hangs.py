"""`rankscope hangs`: reports of hangs: a list of them, one of them, and one as a page."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from typing import Final

import grpc
import msgspec

from rankscope.analysis.collectives.hang_report import HangReport, Place
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.quantities import count, quantity
from rankscope.cli.connection import CALL_SECONDS, connected
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import CommandError, Exit, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.output_file import write_output
from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1.job_service_pb2_grpc import JobServiceStub

FRAMES_SHOWN: Final = 12
TABLES: Final = {
    "Collectives": ("collectives", ("collective", "ranks", "finding", "detail")),
    "Could not be read": ("gaps", ("ranks", "what", "reason")),
}
_EPILOG = """\
examples:
  rankscope hangs                                         all reports, the latest first
  rankscope hangs --run team/llama --context prod         those of a run of a cluster
  rankscope hangs h-20260301-101500-0a1b2c                where every rank stood, the odd ones first
  rankscope hangs h-20260301-101500-0a1b2c --html hang.html

A report is made once, when a run hangs. `rankscope stacks` shows where ranks stand now. It needs `rankscope up`, a
correlator or an operator: a daemon alone does not decide that a run hangs. Meanings and JSON keys: docs/hangs.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("id", nargs="?", default="", metavar="ID", help="show this report (default: list all)")
    add_options(parser, "--run NAMESPACE/", "--json", "--html")
    add_connection_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    if arguments.html is not None and not arguments.id:
        raise CommandError("--html needs the ID of a report; `rankscope hangs` lists them")
    if arguments.run and arguments.id:
        raise CommandError("an ID names one report; leave --run out")
    with connected(arguments) as (target, channel):
        stub = JobServiceStub(channel)
        try:
            return _show(stub, arguments) if arguments.id else _list(stub, arguments)
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
            text = "a daemon alone has no reports; connect to `rankscope up`, a correlator or an operator"
            raise CommandError(f"{target}: {text}", Exit.REFUSED) from error


def _list(stub: JobServiceStub, arguments: argparse.Namespace) -> int:
    hangs = stub.ListHangs(pb.ListHangsRequest(run=arguments.run), timeout=CALL_SECONDS).hangs
    if arguments.json:
        fields = [field.name for field in pb.HangSummary.DESCRIPTOR.fields]
        to_stdout(json.dumps({"hangs": [{name: getattr(hang, name) for name in fields} for hang in hangs]}))
        return Exit.OK
    for hang in hangs:
        lasted = _lasted((hang.until_unix_nanos - hang.began_unix_nanos) / 1e9, bool(hang.ended_unix_nanos))
        to_stdout(f"{hang.id}  {_clock(hang.made_unix_nanos / 1e9)}  {hang.run}  {lasted}  {hang.headline}")
    if not hangs:
        of_run = f" of {arguments.run}" if arguments.run else ""
        to_stdout(f"no hang{of_run} was reported; `rankscope stacks` shows where ranks stand now")
    return Exit.OK


def _show(stub: JobServiceStub, arguments: argparse.Namespace) -> int:
    content = stub.GetHang(pb.GetHangRequest(id=arguments.id), timeout=CALL_SECONDS).report
    try:
        report = msgspec.json.decode(content, type=HangReport)
    except msgspec.MsgspecError as error:
        raise CommandError(f"the report cannot be read: {error}; is the server newer?", Exit.FAILED) from error
    if arguments.html is not None:
        write_output("--html", arguments.html, hang_page(report))
    if arguments.json:
        to_stdout(json.dumps(msgspec.to_builtins(report)))
    else:
        to_stdout("\n".join(hang_lines(report)))
    return Exit.OK


def hang_lines(report: HangReport) -> Iterator[str]:
    yield report.headline
    yield from (f"{name}: {value}" for name, value in _facts(report))
    for place in report.places:
        yield ""
        yield f"{_who(place)} in {place.place} [{place.phase}]"
        yield from (f"    {frame}" for frame in place.stack[:FRAMES_SHOWN])
        if len(place.stack) > FRAMES_SHOWN:
            yield f"    … {len(place.stack) - FRAMES_SHOWN} more; --json has all"
    for title, (name, columns) in TABLES.items():
        rows = [columns, *([getattr(row, column) for column in columns] for row in getattr(report, name))]
        if len(rows) > 1:
            widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
            yield ""
            yield title.upper()
            for row in rows:
                yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
    for problem in report.problems:
        yield f"warning: {problem}"


def hang_page(report: HangReport) -> str:
    sections = [Section("Hang", tables=[Table(("", ""), list(_facts(report)))])]
    for title, (name, columns) in TABLES.items():
        rows = [[getattr(row, column) for column in columns] for row in getattr(report, name)]
        if rows:
            sections.append(Section(title, tables=[Table(columns, rows)]))
    sections += [
        Section(
            f"{_who(place)} in {place.place}",
            tables=[Table((f"frame, innermost first ({place.phase})",), [(frame,) for frame in place.stack])],
        )
        for place in report.places
    ]
    if report.problems:
        sections.append(Section("Problems", report.problems))
    return page(f"Hang of {report.run}", sections, lead=report.headline, foot=f"rankscope hangs {report.id}")


def _facts(report: HangReport) -> Iterator[tuple[str, str]]:
    yield "run", f"{report.run}, {count(report.world_size, 'rank')}"
    yield "last step", _clock(report.began_unix_seconds)
    yield "lasted", _lasted(report.seconds, report.ended_unix_seconds is not None)
    yield "verdict", report.verdict
    if report.left:
        yield "left", f"ranks {report.left}: their processes have ended"


def _who(place: Place) -> str:
    return f"rank {place.ranks}" if place.count == 1 else f"{count(place.count, 'rank')} ({place.ranks})"


def _lasted(seconds: float, is_over: bool) -> str:
    return quantity(seconds, "s") if is_over else f"over {quantity(seconds, 's')}"


def _clock(unix_seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(unix_seconds))
