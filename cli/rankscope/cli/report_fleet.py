"""`rankscope report fleet`: where the GPU-hours of a fleet went, from Prometheus or from a server of Rankscope."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.text import Text

from rankscope.analysis.fleet.facts import FleetFacts
from rankscope.analysis.fleet.report import FleetReport, make_report
from rankscope.analysis.fleet.tables import MAX_ROWS_OF_PAGE, ReportTable, headline, notes, shortened, span, tables
from rankscope.analysis.plots.charts import bars
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.durations import duration_seconds
from rankscope.cli.exit_codes import CommandError, Exit
from rankscope.cli.messages import overwrite, to_stderr, to_stdout
from rankscope.cli.output_file import write_output
from rankscope.cli.terminal import Terminal
from rankscope.operator.fleet_history import MAX_ANSWER_BYTES, QUERY_SECONDS, Failure, HistoryError, read_facts
from rankscope.operator.prometheus_api import PrometheusApi, read_token

_EPILOG = """\
examples:
  rankscope report fleet --prometheus http://prometheus:9090               the last week
  rankscope report fleet --prometheus http://prometheus:9090 --since 24h --html fleet.html
  rankscope report fleet --prometheus https://mimir/prometheus --tenant ml --token-file token --json
  rankscope report fleet --context prod --since 24h      made by an operator, a correlator or `rankscope up`

The address is that of a Prometheus that scrapes Rankscope, or of Thanos' or Mimir's query frontend.
Without --prometheus, the server makes the report from the Prometheus that it knows (24h, 7d or 30d), or else from what
it has seen since it started. What the tables mean: docs/report.md.
"""
_EXAMPLE = "rankscope report fleet --prometheus http://prometheus:9090"
MAX_SECONDS = 92 * 86400.0
MAX_ROWS_SHOWN = 10
ASK_SECONDS = 1.0
_FAILURES = {
    Failure.UNREACHABLE: (Exit.UNREACHABLE, "see that it runs and that this machine reaches it"),
    Failure.REFUSED: (Exit.REFUSED, "pass --token-file or --tenant"),
    Failure.NO_API: (Exit.USAGE, "see that --prometheus is the address of its API"),
    Failure.EMPTY: (
        Exit.NOT_FOUND,
        "see that it scrapes daemons and operator (docs/metrics.md#scraping), or ask for a longer --since",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("--since", default="7d", metavar="TIME", help="the last so long, as in 24h, 7d (default), 30d")
    parser.add_argument("--prometheus", default="", metavar="URL", help="address of Prometheus, Thanos or Mimir")
    parser.add_argument("--tenant", default="", help="tenant to ask for (header X-Scope-OrgID), for Mimir")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help="file with a bearer token to send")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_connection_arguments(parser, has_token_file=True)


def run(arguments: argparse.Namespace) -> int:
    seconds = duration_seconds("--since", arguments.since)
    if seconds > MAX_SECONDS:
        raise CommandError(f"--since {arguments.since}: at most {MAX_SECONDS / 86400:.0f}d")
    if arguments.prometheus and (arguments.connect or arguments.context):
        raise CommandError("--prometheus and --connect or --context are two sources: name one")
    report = make_report(_read(arguments, seconds)) if arguments.prometheus else _ask_server(arguments, seconds)
    if arguments.html is not None:
        try:
            write_output(arguments.html, make_page(report))
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}; name another file with --html") from error
        to_stderr(f"wrote {arguments.html}")
    if arguments.json:
        to_stdout(json.dumps(to_json(report), allow_nan=False))
    else:
        print_report(report)
    return Exit.UNDECIDED if report.problems else Exit.OK


def _read(arguments: argparse.Namespace, seconds: float) -> FleetFacts:
    if arguments.token_file is not None:
        try:
            read_token(arguments.token_file)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise CommandError(f"--token-file {arguments.token_file}: {reason}") from error
    try:
        api = PrometheusApi(
            arguments.prometheus,
            QUERY_SECONDS,
            MAX_ANSWER_BYTES,
            tenant=_tenant(arguments.tenant),
            token_file=arguments.token_file,
        )
    except ValueError as error:
        raise CommandError(f"--prometheus {arguments.prometheus[:80]}: {error}") from error
    try:
        return read_facts(api, seconds, time.time(), _show_progress)
    except HistoryError as error:
        status, step = _FAILURES[error.failure]
        raise CommandError(f"{arguments.prometheus}: {error}; next step: {step}", status) from error
    finally:
        overwrite("")


def _ask_server(arguments: argparse.Namespace, seconds: float) -> FleetReport:
    # Prometheus needs no gRPC.
    import grpc
    import msgspec

    from rankscope.cli.connection import CALL_SECONDS, connected
    from rankscope.operator.correlation.fleet_reports import PERIODS
    from rankscope.v1.job_service_pb2 import GetFleetReportRequest
    from rankscope.v1.job_service_pb2_grpc import JobServiceStub

    if arguments.tenant:
        raise CommandError(f"--tenant goes with --prometheus; next step: {_EXAMPLE} --tenant NAME")
    since = next((name for name, length in PERIODS.items() if length == seconds), None)
    if since is None:
        known = ", ".join(PERIODS)
        raise CommandError(f"--since {arguments.since}: a server makes reports of {known}; next step: {_EXAMPLE}")
    try:
        with connected(arguments) as (target, channel):
            call = JobServiceStub(channel).GetFleetReport
            while not (answer := call(GetFleetReportRequest(since=since), timeout=CALL_SECONDS)).report:
                if answer.failure:
                    raise CommandError(f"{target}: {answer.failure}; next step: {answer.next_step}", Exit.REFUSED)
                overwrite(f"the server asks Prometheus: {answer.pages_done} of {answer.pages} pages")
                time.sleep(ASK_SECONDS)
            return msgspec.json.decode(answer.report, type=FleetReport)
    except msgspec.DecodeError as error:
        raise CommandError(f"the report cannot be read: {error}; is the server newer?", Exit.FAILED) from error
    except CommandError as error:
        if not isinstance(error.__cause__, grpc.RpcError):
            raise
        raise CommandError(f"{error}; or ask Prometheus: {_EXAMPLE}", error.status) from error
    finally:
        overwrite("")


def _tenant(text: str) -> str:
    if not (text.isascii() and text.isprintable() and len(text) <= 256):
        raise CommandError(f"--tenant {text[:40]!r}: must be at most 256 printable ASCII characters")
    return text


def _show_progress(done: int, total: int) -> None:
    overwrite(f"asking Prometheus: {done} of {total} pages")


def print_report(report: FleetReport, console: Terminal | None = None) -> None:
    console = console or Terminal(soft_wrap=True)
    console.print(Text(f"{span(report)}: {headline(report)}", style="bold"))
    for note in notes(report):
        console.print(Text(f"note: {note}", style="yellow"))
    console.print()
    for table in tables(report):
        console.print(Text(table.title, style="bold"))
        if table.rows:
            console.print_rows([table.columns, *table.rows], table.left, MAX_ROWS_SHOWN)
        else:
            console.print(Text(table.empty, style="dim"))
            console.print()
        for said in table.said[:MAX_ROWS_SHOWN] if table.rows else ():
            console.print(Text(said, style="dim"))
        if table.rows and table.said:
            console.print()


def make_page(report: FleetReport) -> str:
    sections = [Section("What is missing", notes(report))] if notes(report) else []
    for table in tables(report):
        section = _section(table)
        if table.title.startswith("Utilization") and table.rows:
            names = [row[0] for row in table.rows]
            plot = bars(names, report.utilization_gpu_hours, axis=Axis("GPU-hours"), row_title="utilization")
            section = Section(table.title, table.said, plots=[plot])
        sections.append(section)
    foot = "Made by rankscope report fleet. What the tables mean: docs/report.md; this page needs no network."
    return page(f"Rankscope fleet report, {span(report)}", sections, lead=f"{headline(report)}.", foot=foot)


def _section(table: ReportTable) -> Section:
    if not table.rows:
        return Section(table.title, [table.empty])
    shown = shortened(table, MAX_ROWS_OF_PAGE)
    numeric = [column not in table.left for column in table.columns]
    return Section(table.title, shown.said, [Table(table.columns, shown.rows, numeric)])


def to_json(report: FleetReport) -> dict[str, Any]:
    """The keys are documented in docs/report.md."""
    found = asdict(report)
    found["complete"] = not report.problems
    for name, rows in (("low_teams", report.low_teams), ("low_runs", report.low_runs)):
        for shown, low in zip(found[name], rows, strict=True):
            shown["shortfall_gpu_hours"] = low.shortfall_gpu_hours
    for shown, group in zip(found["packing"], report.packing, strict=True):
        shown["saved_gpu_hours"] = group.saved_gpu_hours
    return found
