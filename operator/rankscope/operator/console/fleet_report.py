"""The console's fleet report: HTTP in front of JobService, with the same tables as in the terminal."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rankscope.analysis.fleet.report import FleetReport
from rankscope.analysis.fleet.tables import (
    DEFINITIONS,
    MAX_ROWS_OF_PAGE,
    ReportTable,
    headline,
    notes,
    shortened,
    span,
    tables,
)
from rankscope.common.text import printable
from rankscope.operator.console.endpoints import CALL_SECONDS, Endpoint, ProblemError, Served, calls, json_response
from rankscope.v1.job_service_pb2 import GetFleetReportRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub

MAX_CELL_CHARACTERS = 1000
MAX_NOTES = 30


class FleetReportQuery(msgspec.Struct, forbid_unknown_fields=True):
    since: Annotated[Literal["24h", "7d", "30d"], msgspec.Meta(description="The last so long.")] = "7d"


class FleetReportAnswer(msgspec.Struct):
    """`making` says how far the report is; it is empty once the report is there. `definitions` are of columns. In a
    table, `left` are the columns of words, `said` are sentences below it, and `empty` is shown in place of no rows."""

    making: str
    made_unix_seconds: float = 0.0
    span: str = ""
    headline: str = ""
    notes: list[str] = []
    tables: list[ReportTable] = []
    definitions: dict[str, str] = {}


_REPORTS = msgspec.json.Decoder(FleetReport)


def fleet_report(api: Served, request: Request, query: FleetReportQuery) -> Response:
    with calls(api, request) as channel:
        answer = JobServiceStub(channel).GetFleetReport(GetFleetReportRequest(since=query.since), timeout=CALL_SECONDS)
    if answer.failure:
        raise ProblemError(503, answer.failure, printable(answer.next_step, MAX_CELL_CHARACTERS))
    if not answer.report:
        pages = f": {answer.pages_done} of {answer.pages} pages" if answer.pages else ""
        return json_response(FleetReportAnswer(f"being made{pages}"))
    try:
        report = _REPORTS.decode(answer.report)
    except msgspec.DecodeError as error:
        advice = "update the console or the server, so that both have the same version"
        raise ProblemError(502, f"the report cannot be read: {error}", advice) from error
    return json_response(
        FleetReportAnswer(
            making="",
            made_unix_seconds=answer.made_unix_nanos / 1e9,
            span=span(report),
            headline=headline(report),
            notes=_printable(notes(report)[:MAX_NOTES]),
            tables=[_shown(table) for table in tables(report)],
            definitions=dict(DEFINITIONS),
        )
    )


def _shown(table: ReportTable) -> ReportTable:
    short = shortened(table, MAX_ROWS_OF_PAGE)
    return replace(
        short,
        title=printable(short.title, MAX_CELL_CHARACTERS),
        rows=[tuple(_printable(row)) for row in short.rows],
        said=tuple(_printable(short.said)),
    )


def _printable(texts: list[str] | tuple[str, ...]) -> list[str]:
    return [printable(text, MAX_CELL_CHARACTERS) for text in texts]


REPORT_ENDPOINTS = (
    Endpoint(
        "/report",
        "Where the GPU-hours of all runs went, for callers that may see all namespaces. Ask again while it is being "
        "made.",
        FleetReportQuery,
        FleetReportAnswer,
        fleet_report,
        is_remote=True,
    ),
)
