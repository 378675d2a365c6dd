"""The console's captures: HTTP in front of CaptureService. Nothing is kept here."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated

import anyio.to_thread
import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from rankscope.analysis.quantities import quantity
from rankscope.analysis.traces.joins.comparison import MAX_RECORDED_SECONDS, MAX_RECORDED_STEPS
from rankscope.common.rank_selection import MAX_TEXT_CHARACTERS, STRAGGLER_AND_PEER, rank_ranges
from rankscope.common.text import printable
from rankscope.operator.console.answers import NAME_CHARACTERS, TEXT_CHARACTERS
from rankscope.operator.console.capture_answers import (
    FINAL,
    CaptureAnswer,
    artifact_name,
    capture_answer,
    delivered,
    is_trace,
    sentence,
    state_word,
    stem,
)
from rankscope.operator.console.endpoints import (
    CALL_SECONDS,
    GZIP,
    Endpoint,
    NoQuery,
    ProblemError,
    RunQuery,
    Served,
    calls,
    departure,
    json_response,
    refusals,
)
from rankscope.operator.console.merged_trace import Merge, MergeError
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

DOWNLOAD_SECONDS = 3600.0
MAX_LISTED = 200
ROW_CHARACTERS = 200
# A trace of a daemon has at most 4 GiB before it is compressed.
MAX_ARTIFACT_BYTES = 4 << 30
# Of all ranks of a capture, compressed.
MAX_MERGED_BYTES = 512 << 20
# Each holds a connection, and a thread now and then.
DOWNLOADS = threading.BoundedSemaphore(4)
# torch asks for work every 5 s; then come the start that the ranks share and the analysis.
AROUND_SECONDS = 10.0
# docs/captures.md has the measurements.
_SLOWDOWN = "Steps take 10 to 80 % longer while they are recorded, most where the host only launches work."
_BYTES = "A rank's file has some 10 KiB to 1 MiB for each step."


class CapturesQuery(msgspec.Struct, forbid_unknown_fields=True):
    run: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS, description="Of this run only.")] = ""


class CaptureQuery(msgspec.Struct, forbid_unknown_fields=True):
    id: Annotated[str, msgspec.Meta(max_length=320, pattern="^[a-z0-9][a-z0-9.-]*(/[a-z0-9][a-z0-9.-]*)?$")]


class CancelCapture(CaptureQuery, forbid_unknown_fields=True):
    pass


class ArtifactQuery(CaptureQuery, forbid_unknown_fields=True):
    rank: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    window: Annotated[int, msgspec.Meta(ge=0, le=100, description="0: the first.")] = 0


class CaptureOptions(msgspec.Struct, forbid_unknown_fields=True):
    """As in capture_service.proto."""

    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    flops: bool = False
    modules: bool = False
    allow_slowdown: bool = False
    wait_steps: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0
    warmup_steps: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] | None = None
    repeat: Annotated[int, msgspec.Meta(ge=0, lt=2**32)] = 0


class LengthQuery(RunQuery, forbid_unknown_fields=True):
    """Steps or seconds; without either, as many steps as tell a slow rank from the others."""

    steps: Annotated[int, msgspec.Meta(ge=1, lt=2**32)] | None = None
    seconds: Annotated[float, msgspec.Meta(gt=0)] | None = None


class StartCapture(LengthQuery, forbid_unknown_fields=True):
    """Ranks: all, 0,3-5, straggler, or straggler+peer."""

    ranks: Annotated[str, msgspec.Meta(max_length=MAX_TEXT_CHARACTERS)] = STRAGGLER_AND_PEER
    options: CaptureOptions = msgspec.field(default_factory=CaptureOptions)
    reason: Annotated[str, msgspec.Meta(max_length=1000)] = ""


class CaptureRow(msgspec.Struct):
    """Of the list."""

    id: str
    run: str
    state: str
    is_final: bool
    ranks: str  # as in 0,3-5
    ranks_selected: int
    ranks_delivered: int
    requested_unix_ms: int
    requested_by: str
    reason: str
    sentence: str


class CapturesAnswer(msgspec.Struct):
    captures: list[CaptureRow]


class CaptureCost(msgspec.Struct):
    sentences: list[str]
    duration_seconds: float
    recording_seconds: float | None
    slowdown_ratio: float | None  # of steps while they are recorded
    bytes_per_rank: int | None


def captures(api: Served, request: Request, query: CapturesQuery) -> Response:
    found = _listed(api, request, query.run)
    return json_response(CapturesAnswer([_row(each) for each in found[:MAX_LISTED]]))


def _row(capture: pb.Capture) -> CaptureRow:
    return CaptureRow(
        id=printable(capture.id),
        run=printable(capture.job),
        state=state_word(capture.state),
        is_final=capture.state in FINAL,
        ranks=printable(rank_ranges(entry.rank for entry in capture.ranks), ROW_CHARACTERS),
        ranks_selected=len(capture.ranks),
        ranks_delivered=len(delivered(capture)),
        requested_unix_ms=capture.requested_unix_millis,
        requested_by=printable(capture.requested_by, ROW_CHARACTERS),
        reason=printable(capture.reason, ROW_CHARACTERS),
        sentence=printable(sentence(capture), 2 * ROW_CHARACTERS),
    )


def _listed(api: Served, request: Request, run: str) -> list[pb.Capture]:
    with calls(api, request) as channel:
        answer = CaptureServiceStub(channel).ListCaptures(pb.ListCapturesRequest(job=run), timeout=CALL_SECONDS)
    return sorted(answer.captures, key=lambda each: each.requested_unix_millis, reverse=True)


def start(api: Served, request: Request, body: StartCapture) -> Response:
    """The capture goes on when we hang up."""
    _check_length(body)
    options = pb.CaptureOptions(**{n: v for n, v in msgspec.structs.asdict(body.options).items() if v is not None})
    wanted = pb.StartCaptureRequest(job=body.run, ranks=body.ranks, options=options, reason=body.reason)
    if body.steps is not None:
        wanted.steps = body.steps
    elif body.seconds is not None:
        wanted.seconds = body.seconds
    with calls(api, request) as channel:
        call = CaptureServiceStub(channel).StartCapture(wanted, timeout=CALL_SECONDS)
        first = next(call, None)
        call.cancel()
    if first is None:
        raise ProblemError(502, "the server said nothing about the capture", "see the list before you start another")
    return json_response(capture_answer(first.capture))


def _check_length(query: LengthQuery) -> None:
    if query.steps is not None and query.seconds is not None:
        raise ProblemError(400, "a capture is as long as its steps or its seconds", "name one of the two, or none")


def cost(api: Served, request: Request, query: LengthQuery) -> Response:
    """By the latest capture of the run, else as the documentation has it."""
    _check_length(query)
    view = api.history.run(query.run)
    step = None if view is None else view.state.step_seconds
    recording = query.seconds
    if query.steps is not None and step is not None:
        recording = query.steps * step
    elif query.seconds is None and step is not None:
        recording = min(MAX_RECORDED_STEPS * step, MAX_RECORDED_SECONDS)
    duration = AROUND_SECONDS + (recording or 0.0)
    known = next((each for each in _listed(api, request, query.run) if delivered(each)), pb.Capture())
    times = [each.step_times for each in known.ranks]
    ratios = [
        each.during_seconds / each.before_seconds - 1
        for each in times
        if each.HasField("during_seconds") and each.before_seconds
    ]
    slowdown = max(ratios, default=None)
    bytes_per_step = max((each.bytes / each.steps for each in delivered(known) if each.steps), default=0.0)
    steps = query.steps if query.steps is not None else recording / step if recording and step else 0
    size = round(bytes_per_step * steps) or None
    measured = f"in {printable(known.id, TEXT_CHARACTERS)}, the latest capture of this run"
    sentences = [
        f"It takes about {quantity(duration, 's')}: all ranks begin at the same moment, record and are analysed.",
        _SLOWDOWN if slowdown is None else f"Recorded steps took {100 * max(0.0, slowdown):.0f} % longer {measured}.",
        _BYTES if size is None else f"A rank's file has about {quantity(size, 'B')}, as {measured}.",
        "Each option makes recording slower and files larger, stacks most.",
    ]
    return json_response(CaptureCost(sentences, duration, recording, slowdown, size))


def capture(api: Served, request: Request, query: CaptureQuery) -> Response:
    with calls(api, request) as channel:
        return json_response(capture_answer(_found(channel, query.id)))


def _found(channel: grpc.Channel, capture_id: str) -> pb.Capture:
    answer: pb.GetCaptureResponse = CaptureServiceStub(channel).GetCapture(
        pb.GetCaptureRequest(id=capture_id), timeout=CALL_SECONDS
    )
    return answer.capture


def cancel(api: Served, request: Request, body: CancelCapture) -> Response:
    with calls(api, request) as channel:
        CaptureServiceStub(channel).CancelCapture(pb.CancelCaptureRequest(id=body.id), timeout=CALL_SECONDS)
        return json_response(capture_answer(_found(channel, body.id)))


# Artifacts.


@contextlib.contextmanager
def _download(api: Served, request: Request) -> Iterator[tuple[grpc.Channel, contextlib.ExitStack]]:
    """A channel, and what the response closes when it has taken it with `pop_all`."""
    if not DOWNLOADS.acquire(blocking=False):
        raise ProblemError(503, "too many downloads are under way", "wait for one of them, then try again")
    with contextlib.ExitStack() as stack:
        stack.callback(DOWNLOADS.release)
        channel = stack.enter_context(api.channels(request))
        with refusals():
            yield channel, stack


def artifact(api: Served, request: Request, query: ArtifactQuery) -> Response:
    with _download(api, request) as (channel, stack):
        found = _found(channel, query.id)
        entry = next((each for each in delivered(found) if each.rank == query.rank), pb.RankCapture())
        sizes = [entry.bytes, *(window.bytes for window in entry.more_windows)]
        if not entry.artifact or query.window >= len(sizes):
            where = f"rank {query.rank} of {query.id}"
            raise ProblemError(404, f"there is no recording of {where}", "the capture's page has why")
        size, parts = sizes[query.window], Recording(channel, query.id, query.rank, query.window)
        stack.callback(parts.cancel)
        if parts.bytes != size or size > MAX_ARTIFACT_BYTES:
            text = f"the recording has {parts.bytes} bytes, and its record says {size}"
            raise ProblemError(502, text, "it cannot be trusted; take another capture")
        name = artifact_name(found, entry, query.window)
        return Download(api, name, parts.chunks(), parts.cancel, stack.pop_all(), size)
    raise AssertionError("nothing is suppressed")


def merged(api: Served, request: Request, query: CaptureQuery) -> Response:
    with _download(api, request) as (channel, stack):
        found = _found(channel, query.id)
        entries = sorted((each for each in delivered(found) if is_trace(each)), key=lambda each: each.rank)
        if not entries:
            raise ProblemError(404, f"{query.id} has no traces", "the capture's page has why")
        size = sum(entry.bytes for entry in entries)
        if size > MAX_MERGED_BYTES:
            text = f"traces of {quantity(size, 'B')}; up to {quantity(MAX_MERGED_BYTES, 'B')} are merged here"
            advice = "rankscope captures get, then rankscope analyze trace --merged"
            raise ProblemError(413, text, advice)
        opened: list[Recording] = []

        def recordings() -> Iterator[tuple[int, int, Iterator[bytes]]]:
            for entry in entries:
                opened[:] = [Recording(channel, query.id, entry.rank)]
                yield entry.rank, opened[0].bytes, opened[0].chunks()

        merge = Merge(len(entries), recordings())

        def cancel() -> None:
            for one in opened:
                one.cancel()
            merge.end()

        stack.callback(cancel)
        return Download(api, f"{stem(found)}-all-ranks.json.gz", merge.chunks(), cancel, stack.pop_all())
    raise AssertionError("nothing is suppressed")


class Recording:
    """A rank's file, as the server sends it. Raises grpc.RpcError."""

    def __init__(self, channel: grpc.Channel, capture_id: str, rank: int, window: int = 0) -> None:
        wanted = pb.DownloadArtifactRequest(id=capture_id, rank=rank, window=window)
        self._parts = CaptureServiceStub(channel).DownloadArtifact(wanted, timeout=DOWNLOAD_SECONDS)
        self._first = next(self._parts, pb.DownloadArtifactResponse())
        self.bytes = self._first.total_bytes

    def chunks(self) -> Iterator[bytes]:
        yield self._first.chunk
        for part in self._parts:
            yield part.chunk

    def cancel(self) -> None:
        self._parts.cancel()


class Download(Response):
    """What is shorter or longer than it should be breaks off, so that the browser reports it."""

    media_type = GZIP

    def __init__(
        self,
        api: Served,
        name: str,
        chunks: Iterator[bytes],
        cancel: Callable[[], None],
        resources: contextlib.ExitStack,
        size: int | None = None,
    ) -> None:
        super().__init__(headers={"content-disposition": f'attachment; filename="{name}"'})
        del self.headers["content-length"]
        if size is not None:
            self.headers["content-length"] = str(size)
        self._api = api
        self._left = size
        self._chunks = chunks
        self._cancel = cancel
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        leaving = asyncio.ensure_future(departure(receive))
        leaving.add_done_callback(lambda _: self._cancel())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while chunk := await anyio.to_thread.run_sync(next, self._chunks, b"", limiter=self._api.remote):
                if self._left is not None:
                    self._left -= len(chunk)
                    if self._left < 0:
                        return
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            if not self._left and not leaving.done():
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except (grpc.RpcError, MergeError):
            pass
        finally:
            leaving.cancel()
            self._resources.close()


_remote = partial(Endpoint, is_remote=True)
CAPTURE_ENDPOINTS = (
    _remote("/captures", "Captures, the newest first.", CapturesQuery, CapturesAnswer, captures),
    _remote("/captures", "Start a capture.", StartCapture, CaptureAnswer, start, method="POST"),
    _remote("/captures/cost", "What a capture would cost, in words and numbers.", LengthQuery, CaptureCost, cost),
    _remote("/capture", "One capture: its ranks, and what their traces say.", CaptureQuery, CaptureAnswer, capture),
    _remote(
        "/capture/cancel",
        "End a capture. What its ranks have delivered is kept.",
        CancelCapture,
        CaptureAnswer,
        cancel,
        method="POST",
    ),
    _remote("/capture/artifact", "The recording of a rank.", ArtifactQuery, NoQuery, artifact, GZIP),
    _remote(
        "/capture/merged",
        "The traces of all ranks as one, for Perfetto. Every rank keeps the clock of its machine.",
        CaptureQuery,
        NoQuery,
        merged,
        GZIP,
    ),
)
