"""`rankscope report fleet`: where the GPU-hours of a fleet went, from Prometheus or from a server of Rankscope."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankscope.analysis.fleet.facts import FleetFacts
from rankscope.analysis.fleet.report import FleetReport, make_report
from rankscope.analysis.fleet.tables import MAX_ROWS_OF_PAGE, ReportTable, headline, notes, shortened, span, tables
from rankscope.analysis.plots.charts import Series, bars
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import CommandError, Exit, overwrite, to_stderr, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.output_file import write_output
from rankscope.cli.prometheus_source import add_source_arguments, explained, since_seconds, source
from rankscope.common import object_store
from rankscope.operator.fleet_history import MAX_ANSWER_BYTES, QUERY_SECONDS, HistoryError, read_facts
from rankscope.operator.prometheus_api import PrometheusApi

if TYPE_CHECKING:
    from rankscope.cli.terminal import Terminal

_EPILOG = """\
examples:
  rankscope report fleet --prometheus http://prometheus:9090               the last week
  rankscope report fleet --prometheus http://prometheus:9090 --since 24h --html fleet.html
  rankscope report fleet --prometheus https://mimir/prometheus --tenant ml --token-file token --json
  rankscope report fleet --prometheus http://prometheus:9090 --upload s3://bucket/reports
  rankscope report fleet --context prod --since 24h      made by an operator, a correlator or `rankscope up`

The address is that of a Prometheus that scrapes Rankscope, or of Thanos' or Mimir's query frontend.
Without --prometheus, the server makes the report from the Prometheus that it knows (24h, 7d or 30d), or else from what
it has seen since it started. What the tables mean: docs/report.md.
"""
_EXAMPLE = "rankscope report fleet --prometheus http://prometheus:9090"
MAX_ROWS_SHOWN = 10
ASK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    add_source_arguments(parser)
    add_options(parser, "--html", "--json")
    parser.add_argument(
        "--upload",
        default="",
        metavar="URL",
        help="put fleet-DATE.html and .json there, as in s3://bucket/folder, and print nothing without --json",
    )
    add_connection_arguments(parser, has_token_file=True)


def run(arguments: argparse.Namespace) -> int:
    seconds = since_seconds(arguments)
    if arguments.prometheus and (arguments.connect or arguments.context):
        raise CommandError("--prometheus and --connect or --context are two sources: name one")
    if arguments.upload:
        with _uploading():
            object_store.check_store(arguments.upload)
    if arguments.prometheus:
        report = make_report(_read(source(arguments, _EXAMPLE, QUERY_SECONDS, MAX_ANSWER_BYTES), arguments, seconds))
    else:
        report = _ask_server(arguments, seconds)
    if arguments.html is not None:
        write_output("--html", arguments.html, make_page(report))
    if arguments.upload:
        _upload(report, arguments.upload)
    if arguments.json:
        to_stdout(_json(report))
    elif not arguments.upload:
        _print(report, has_page=arguments.html is not None)
    return Exit.UNDECIDED if report.problems else Exit.OK


def _print(report: FleetReport, *, has_page: bool) -> None:
    try:
        print_report(report)
    except ModuleNotFoundError as error:
        if not has_page:
            raise
        to_stderr(f"only the page is written: this installation has no {error.name}")


def _json(report: FleetReport) -> str:
    return json.dumps(to_json(report), allow_nan=False)


def _upload(report: FleetReport, url: str) -> None:
    """Under the day of UTC at which it ends: a report of the same day is replaced."""
    name = time.strftime("fleet-%Y-%m-%d", time.gmtime(report.end_unix_seconds))
    with tempfile.TemporaryDirectory() as folder:
        for ending, text in ((".html", make_page(report)), (".json", _json(report) + "\n")):
            path = Path(folder) / f"{name}{ending}"
            path.write_text(text)
            target = f"{url.rstrip('/')}/{path.name}"
            with _uploading():
                object_store.upload(path, target)
            to_stderr(f"uploaded {object_store.shown(target)}")


@contextmanager
def _uploading() -> Iterator[None]:
    try:
        yield
    except object_store.UploadError as error:
        hint = "see that this is the store, and that its credentials are set"
        raise CommandError(f"--upload {error}; next step: {hint}") from error


def _read(api: PrometheusApi, arguments: argparse.Namespace, seconds: float) -> FleetFacts:
    try:
        return read_facts(api, seconds, time.time(), _show_progress)
    except HistoryError as error:
        raise explained(arguments.prometheus, error.failure, str(error)) from error
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


def _show_progress(done: int, total: int) -> None:
    overwrite(f"asking Prometheus: {done} of {total} pages")


def print_report(report: FleetReport, console: Terminal | None = None) -> None:
    # The images, in which a CronJob makes reports, have no rich.
    from rich.text import Text

    from rankscope.cli.terminal import Terminal

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
            hours = Series("", report.utilization_gpu_hours)
            plot = bars(names, [hours], axis=Axis("GPU-hours"), row_title="utilization")
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
