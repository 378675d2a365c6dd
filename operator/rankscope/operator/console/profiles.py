"""The console's flame graphs, and the frames in which a rank spends more time than its peers: HTTP in front of
ProfileService."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from rankscope.analysis.profiles.comparison import FrameExcess, sentence
from rankscope.analysis.profiles.flame_graph import content_policy, flame_graph
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.pprof import PprofError, read_pprof
from rankscope.analysis.profiles.profile import Profile
from rankscope.analysis.quantities import quantity
from rankscope.common.rank_selection import MAX_TEXT_CHARACTERS, ChoiceError, numbered_ranks
from rankscope.common.text import printable
from rankscope.operator.console.answers import TEXT_CHARACTERS
from rankscope.operator.console.endpoints import (
    CALL_SECONDS,
    HTML,
    Endpoint,
    NoQuery,
    ProblemError,
    RankQuery,
    RunQuery,
    Served,
    calls,
    json_response,
)
from rankscope.v1 import profile_service_pb2 as pb
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub

QUERY_SECONDS = 60.0
MAX_EXCESSES = 30
MAX_PPROF_BYTES = 64 << 20
# Each takes up to a few hundred megabytes.
FLAME_GRAPHS = threading.BoundedSemaphore(2)


class FlameQuery(RunQuery, forbid_unknown_fields=True):
    ranks: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARACTERS, description="As in 0,3-5; all by default.")] = (
        "all"
    )
    against: Annotated[Literal["", "cohort"], msgspec.Meta(description="cohort: the other ranks.")] = ""
    since: Annotated[float, msgspec.Meta(lt=0, description="Seconds, counted back from now.")] = -600.0


class ExcessQuery(RankQuery, forbid_unknown_fields=True):
    since: Annotated[float, msgspec.Meta(lt=0, description="Seconds, counted back from now.")] = -600.0


class ExcessFrame(msgspec.Struct):
    function: str
    file: str
    line: int
    phase: str  # in which it is seen most
    share_ratio: float  # of the time, anywhere on the stack
    reference_share_ratio: float


class ExcessAnswer(msgspec.Struct):
    """The frames in which a rank spends more of its time than its peers do, the line to look at first."""

    sentence: str
    reason: str  # why nothing can be said
    samples: int
    reference_samples: int
    frames: list[ExcessFrame]
    problems: list[str]


def flame(api: Served, request: Request, query: FlameQuery) -> Response:
    """A page for a frame or a tab of its own: sandboxed, so that it has no access to the console's origin."""
    try:
        ranks = numbered_ranks(query.ranks)
    except ChoiceError as error:
        raise ProblemError(400, str(error), "name ranks as in 0,3-5") from error
    if query.against and not ranks:
        raise ProblemError(400, "all ranks have no cohort", "name some ranks, as in ranks=3")
    if not FLAME_GRAPHS.acquire(timeout=CALL_SECONDS):
        raise ProblemError(503, "other flame graphs are being made", "try again in a few seconds")
    try:
        with calls(api, request) as channel:
            selection = _selection(query.run, ranks, query.since)
            profile = _profile(channel, selection)
            reference = None
            if query.against:
                selection.ClearField("ranks")
                everybody = _profile(channel, selection)
                reference = everybody.filter(ranks=set(everybody.rank.tolist()) - set(ranks))
        title = f"{query.run}{f', rank {query.ranks}' if ranks else ''}, the last {quantity(-query.since, 's')}"
        page = flame_graph(profile, f"{title}{', against its peers' if query.against else ''}", reference)
    finally:
        FLAME_GRAPHS.release()
    policy = f"{content_policy()}; frame-ancestors 'self'; sandbox allow-scripts"
    return Response(page, media_type=HTML, headers={"content-security-policy": policy})


def _selection(run: str, ranks: Sequence[int], since: float) -> pb.ProfileSelection:
    end = time.time_ns()
    return pb.ProfileSelection(
        job=run, ranks=ranks, start_unix_nanos=max(0, end + round(since * 1e9)), end_unix_nanos=end
    )


def _profile(channel: grpc.Channel, selection: pb.ProfileSelection) -> Profile:
    parts, size = [], 0
    wanted = pb.QueryProfileRequest(selection=selection)
    for part in ProfileServiceStub(channel).QueryProfile(wanted, timeout=QUERY_SECONDS):
        size += len(part.pprof)
        if size > MAX_PPROF_BYTES:
            raise ProblemError(502, "the profile is too large", "ask for fewer ranks or a shorter time")
        parts.append(part.pprof)
    try:
        profile = read_pprof(b"".join(parts))
    except PprofError as error:
        raise ProblemError(502, f"no profile that can be read: {error}", "try again") from error
    if not profile.samples_total:
        raise ProblemError(404, "no stack was sampled in this time", "ask for a longer time, or see `rankscope doctor`")
    return profile


def excess(api: Served, request: Request, query: ExcessQuery) -> Response:
    wanted = pb.CompareProfilesRequest(selection=_selection(query.run, [query.rank], query.since))
    with calls(api, request) as channel:
        answer = ProfileServiceStub(channel).CompareProfiles(wanted, timeout=QUERY_SECONDS)
    said = ""
    if answer.excesses:
        first = answer.excesses[0]
        frame = Frame(first.function, first.file, first.line)
        found = FrameExcess(frame, first.share_ratio, first.reference_share_ratio, 0.0, first.phase)
        said = sentence(f"rank {query.rank}", found)
    return json_response(
        ExcessAnswer(
            sentence=said,
            reason=printable(answer.reason, TEXT_CHARACTERS),
            samples=answer.samples,
            reference_samples=answer.reference_samples,
            frames=[_excess(each) for each in answer.excesses[:MAX_EXCESSES]],
            problems=[printable(each, TEXT_CHARACTERS) for each in answer.problems[:MAX_EXCESSES]],
        )
    )


def _excess(one: pb.FrameExcess) -> ExcessFrame:
    function, file, phase = (printable(text, TEXT_CHARACTERS) for text in (one.function, one.file, one.phase))
    return ExcessFrame(function, file, one.line, phase, one.share_ratio, one.reference_share_ratio)


_remote = partial(Endpoint, is_remote=True)
PROFILE_ENDPOINTS = (
    _remote("/flame", "A flame graph as a page; red is more than the cohort.", FlameQuery, NoQuery, flame, HTML),
    _remote("/excess", "Frames in which a rank spends more time than its peers.", ExcessQuery, ExcessAnswer, excess),
)
