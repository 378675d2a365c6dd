"""`rankscope report fleet`: where the GPU-hours of a fleet went, from Prometheus."""

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
from rankscope.analysis.plots.charts import bars
from rankscope.analysis.plots.page import Section, Table, page
from rankscope.analysis.plots.svg import Axis
from rankscope.cli.exit_codes import CommandError, Exit
from rankscope.cli.fleet_history import MAX_ANSWER_BYTES, QUERY_SECONDS, read_facts
from rankscope.cli.fleet_tables import ReportTable, headline, notes, span, tables
from rankscope.cli.messages import overwrite, to_stderr, to_stdout
from rankscope.cli.output_file import write_output
from rankscope.cli.prometheus_source import add_source_arguments, since_seconds, source
from rankscope.common import object_store
from rankscope.operator.prometheus_api import PrometheusApi

if TYPE_CHECKING:
    from rankscope.cli.terminal import Terminal

_EPILOG = """\
examples:
  rankscope report fleet --prometheus http://prometheus:9090               the last week
  rankscope report fleet --prometheus http://prometheus:9090 --since 24h --html fleet.html
  rankscope report fleet --prometheus https://mimir/prometheus --tenant ml --token-file token --json
  rankscope report fleet --prometheus http://prometheus:9090 --upload s3://bucket/reports

The address is that of a Prometheus that scrapes Rankscope, or of Thanos' or Mimir's query frontend.
What the tables mean: docs/report.md.
"""
_EXAMPLE = "rankscope report fleet --prometheus http://prometheus:9090"
MAX_ROWS_SHOWN = 10
MAX_ROWS_OF_PAGE = 30


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    add_source_arguments(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--upload",
        default="",
        metavar="URL",
        help="put fleet-DATE.html and .json there, as in s3://bucket/folder, and print nothing without --json",
    )


def run(arguments: argparse.Namespace) -> int:
    seconds = since_seconds(arguments)
    if arguments.upload:
        with _uploading():
            object_store.check_store(arguments.upload)
    api = source(arguments, _EXAMPLE, QUERY_SECONDS, MAX_ANSWER_BYTES)
    report = make_report(_read(api, arguments.prometheus, seconds))
    if arguments.html is not None:
        try:
            write_output(arguments.html, make_page(report))
        except OSError as error:
            raise CommandError(f"{error.filename}: {error.strerror}; name another file with --html") from error
        to_stderr(f"wrote {arguments.html}")
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


def _read(api: PrometheusApi, url: str, seconds: float) -> FleetFacts:
    try:
        return read_facts(api, seconds, time.time(), _show_progress)
    except CommandError as error:
        raise CommandError(f"{url}: {error}", error.status) from error
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
            plot = bars(names, report.utilization_gpu_hours, axis=Axis("GPU-hours"), row_title="utilization")
            section = Section(table.title, table.said, plots=[plot])
        sections.append(section)
    foot = "Made by rankscope report fleet. What the tables mean: docs/report.md; this page needs no network."
    return page(f"Rankscope fleet report, {span(report)}", sections, lead=f"{headline(report)}.", foot=foot)


def _section(table: ReportTable) -> Section:
    if not table.rows:
        return Section(table.title, [table.empty])
    cut = len(table.rows) - MAX_ROWS_OF_PAGE
    said = [*table.said, *([f"The first {MAX_ROWS_OF_PAGE}; --json has {cut} more."] if cut > 0 else [])]
    numeric = [column not in table.left for column in table.columns]
    return Section(table.title, said, [Table(table.columns, table.rows[:MAX_ROWS_OF_PAGE], numeric)])


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
