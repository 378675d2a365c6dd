"""The console's reports of hangs and of the fleet: HTTP in front of JobService. The fleet report has the same tables as
in the terminal. Nothing is kept here."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Annotated, Literal, TypeVar

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rankscope.analysis.collectives.hang_report import HangReport
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
from rankscope.operator.console.answers import NAME_CHARACTERS
from rankscope.operator.console.endpoints import (
    CALL_SECONDS,
    JSON,
    Endpoint,
    ProblemError,
    Served,
    calls,
    json_response,
)
from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1.job_service_pb2_grpc import JobServiceStub

MAX_LISTED = 200
HEADLINE_CHARACTERS = 800
MAX_CELL_CHARACTERS = 1000
MAX_NOTES = 30
Kind = TypeVar("Kind")


class HangsQuery(msgspec.Struct, forbid_unknown_fields=True):
    run: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS, description="Of this run only.")] = ""


class HangQuery(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(max_length=320, pattern="^([a-z0-9][a-z0-9.-]*/)?h-[0-9a-f-]+$")]


class HangRow(msgspec.Struct):
    """Of the list."""

    id: str
    run: str
    headline: str
    began_unix_seconds: float  # the last step of any rank
    until_unix_seconds: float  # the end, or the last moment at which it was seen
    ended_unix_seconds: float | None  # null: it lasts, or its end was not seen


class HangsAnswer(msgspec.Struct):
    hangs: list[HangRow]


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


# Built on import: msgspec reads annotations when a type is first decoded, and every request has a thread.
_HANGS, _FLEETS = msgspec.json.Decoder(HangReport), msgspec.json.Decoder(FleetReport)


def _decoded(content: bytes, decoder: msgspec.json.Decoder[Kind], what: str) -> Kind:
    try:
        return decoder.decode(content)
    except msgspec.DecodeError as error:
        advice = "update the console or the server, so that both have the same version"
        raise ProblemError(502, f"{what} cannot be read: {error}", advice) from error


def hangs(api: Served, request: Request, query: HangsQuery) -> Response:
    with calls(api, request) as channel:
        answer = JobServiceStub(channel).ListHangs(pb.ListHangsRequest(run=query.run), timeout=CALL_SECONDS)
    return json_response(HangsAnswer([_row(each) for each in answer.hangs[:MAX_LISTED]]))


def _row(hang: pb.HangSummary) -> HangRow:
    return HangRow(
        id=printable(hang.id),
        run=printable(hang.run, NAME_CHARACTERS),
        headline=printable(hang.headline, HEADLINE_CHARACTERS),
        began_unix_seconds=hang.began_unix_nanos / 1e9,
        until_unix_seconds=hang.until_unix_nanos / 1e9,
        ended_unix_seconds=hang.ended_unix_nanos / 1e9 or None,
    )


def hang(api: Served, request: Request, query: HangQuery) -> Response:
    """The report as it is kept: all of its text is printable."""
    with calls(api, request) as channel:
        answer = JobServiceStub(channel).GetHang(pb.GetHangRequest(id=query.id), timeout=CALL_SECONDS)
    _decoded(answer.report, _HANGS, f"the report of {query.id}")
    return Response(answer.report, media_type=JSON)


def fleet_report(api: Served, request: Request, query: FleetReportQuery) -> Response:
    with calls(api, request) as channel:
        answer = JobServiceStub(channel).GetFleetReport(
            pb.GetFleetReportRequest(since=query.since), timeout=CALL_SECONDS
        )
    if answer.failure:
        raise ProblemError(503, answer.failure, printable(answer.next_step, MAX_CELL_CHARACTERS))
    if not answer.report:
        pages = f": {answer.pages_done} of {answer.pages} pages" if answer.pages else ""
        return json_response(FleetReportAnswer(f"being made{pages}"))
    report = _decoded(answer.report, _FLEETS, "the report")
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


_remote = partial(Endpoint, is_remote=True)
REPORT_ENDPOINTS = (
    _remote("/hangs", "Reports of hangs, the latest first.", HangsQuery, HangsAnswer, hangs),
    _remote("/hang", "One report: who is where, and what the collectives show.", HangQuery, HangReport, hang),
    _remote(
        "/report",
        "Where the GPU-hours of all runs went, for callers that may see all namespaces. Ask again while it is being "
        "made.",
        FleetReportQuery,
        FleetReportAnswer,
        fleet_report,
    ),
)
