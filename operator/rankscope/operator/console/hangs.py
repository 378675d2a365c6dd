"""The console's reports of hangs: HTTP in front of JobService. Nothing is kept here."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rankscope.analysis.collectives.hang_report import HangReport
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
    made_unix_seconds: float
    ended_unix_seconds: float | None  # null: it lasts, or its end was not seen


class HangsAnswer(msgspec.Struct):
    hangs: list[HangRow]


_REPORTS = msgspec.json.Decoder(HangReport)


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
        made_unix_seconds=hang.made_unix_nanos / 1e9,
        ended_unix_seconds=hang.ended_unix_nanos / 1e9 or None,
    )


def hang(api: Served, request: Request, query: HangQuery) -> Response:
    """The report as it is kept: all of its text is printable."""
    with calls(api, request) as channel:
        answer = JobServiceStub(channel).GetHang(pb.GetHangRequest(id=query.id), timeout=CALL_SECONDS)
    try:
        _REPORTS.decode(answer.report)
    except msgspec.DecodeError as error:
        advice = "update the console or the server, so that both have the same version"
        raise ProblemError(502, f"the report of {query.id} cannot be read: {error}", advice) from error
    return Response(answer.report, media_type=JSON)


_remote = partial(Endpoint, is_remote=True)
HANG_ENDPOINTS = (
    _remote("/hangs", "Reports of hangs, the latest first.", HangsQuery, HangsAnswer, hangs),
    _remote("/hang", "One report: who is where, and what the collectives show.", HangQuery, HangReport, hang),
)
