"""The console's HTTP API: endpoints, events, static files, and the OpenAPI document that is generated from them.

To add an endpoint, add a row to ENDPOINTS. Names of runs contain slashes, so they are query parameters."""

from __future__ import annotations

import asyncio
import contextlib
import re
import struct
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from os import PathLike, stat_result
from pathlib import Path
from typing import Annotated, Any

import anyio.to_thread
import msgspec
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from rankscope.operator.console.answers import (
    HeatmapHeader,
    RankHistory,
    RunDetail,
    RunsAnswer,
    RunSummary,
    SignalsAnswer,
    StepAnswer,
)
from rankscope.operator.console.captures import CAPTURE_ENDPOINTS
from rankscope.operator.console.endpoints import (
    BINARY,
    EVENTS,
    JSON,
    PREFIX,
    Channels,
    Endpoint,
    NoQuery,
    ProblemError,
    RankQuery,
    RunQuery,
    departure,
    json_response,
    no_channel,
    openapi,
    problem,
)
from rankscope.operator.console.history import MAX_RUNS, History, RunView
from rankscope.operator.console.older_history import PrometheusHistory
from rankscope.operator.console.profiles import PROFILE_ENDPOINTS
from rankscope.operator.console.reports import REPORT_ENDPOINTS
from rankscope.operator.console.run_views import heatmap, rank_history, run_detail, run_summary
from rankscope.operator.console.signals import RUN_SIGNALS, SIGNAL_ROWS, SIGNALS
from rankscope.operator.console.step_view import step_answer

STATIC = Path(__file__).parent / "static"
# Requests that are computed at the same time, and those that wait for another process; others wait for these.
WORKERS, REMOTE_WORKERS = 4, 8
EVENT_CLIENTS = 64
MAX_COLUMNS = 2000
# Answers that are kept for other viewers of the same run.
MAX_KEPT_BYTES = 16 << 20
# Between two events to the same client, and the longest silence: a comment shows that the connection is alive.
EVENT_SECONDS, SILENT_SECONDS = 0.5, 15.0
_HASHED_NAME = re.compile(r"[-.][A-Za-z0-9_-]{8,}\.\w+$")

# Returns whether the caller may see the run. A list leaves out runs that the caller may not see; a request for one of
# them gets the same answer as a request for a run that does not exist.
Authorize = Callable[[Request, str], bool]
# The runs that another replica correlates, with its name.
Elsewhere = Callable[[], Mapping[str, str]]


Since = Annotated[
    float,
    msgspec.Meta(
        description="Unix seconds; a negative number counts back from now, or from the end of a run that has ended; "
        "0 is all that is in memory."
    ),
]


class RunHistoryQuery(RunQuery, forbid_unknown_fields=True):
    since: Since = 0.0


class RankHistoryQuery(RankQuery, forbid_unknown_fields=True):
    since: Since = 0.0


class HeatmapQuery(RunQuery, forbid_unknown_fields=True):
    signal: Annotated[str, msgspec.Meta(description="A signal of a rank, as /signals has it.")] = "self_seconds"
    since: Since = 0.0
    columns: Annotated[int, msgspec.Meta(ge=1, le=MAX_COLUMNS, description="Columns at most.")] = 300


class ConsoleApi:
    """The application is `app`. `close` ends the events."""

    def __init__(
        self,
        history: History,
        authorize: Authorize = lambda request, run: True,
        elsewhere: Elsewhere = dict,
        channels: Channels = no_channel,
        older: PrometheusHistory | None = None,
    ) -> None:
        """`channels` lead to the API that serves captures, profiles, hangs and the fleet report, in the caller's name:
        access, quotas and audit are there."""
        self.history = history
        self.older = older or PrometheusHistory()
        self.authorize = authorize
        self._elsewhere = elsewhere
        self.channels = channels
        self.remote = anyio.CapacityLimiter(REMOTE_WORKERS)
        self.is_closing = threading.Event()
        self.event_slots = threading.BoundedSemaphore(EVENT_CLIENTS)
        self._summaries: dict[str, tuple[int, RunSummary]] = {}  # with the version of the run
        self._wake: set[Callable[[], object]] = set()
        self._kept = AnswerCache()
        history.listen(self._changed)
        self.app = Starlette(
            routes=[
                *(Route(PREFIX + each.path, self._serve(each), methods=[each.method]) for each in ENDPOINTS),
                Route(f"{PREFIX}/openapi.json", lambda request: Response(OPENAPI, media_type=JSON)),
                Mount("/", Assets(directory=STATIC, html=True)),
            ],
            exception_handlers={HTTPException: _refused, ProblemError: _problem, Exception: _failed},
            lifespan=_few_workers,
        )

    def close(self) -> None:
        self.is_closing.set()
        self._changed()

    def wake_by(self, wake: Callable[[], object]) -> Callable[[], None]:
        """Call `wake` after each change, in any thread; the result ends that."""
        self._wake.add(wake)
        return lambda: self._wake.discard(wake)

    def _changed(self) -> None:
        for wake in tuple(self._wake):
            with contextlib.suppress(RuntimeError):  # the server has stopped
                wake()

    def _serve(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        def answer(request: Request, query: Any) -> Response:
            if isinstance(query, RunQuery) and not self.authorize(request, query.run):
                return _no_run(query.run)
            return endpoint.handle(self, request, query)

        async def serve(request: Request) -> Response:
            query = await endpoint.asked(request)
            limiter = self.remote if endpoint.is_remote else None
            return await anyio.to_thread.run_sync(answer, request, query, limiter=limiter)

        return serve

    def runs_since(self, request: Request, since: int) -> RunsAnswer:
        """All runs if one was removed since then, which only a complete answer can say."""
        version, is_complete = self.history.version, since <= self.history.forgotten_version
        views = self.history.changed_since(-1 if is_complete else since)
        shown = [self._summary(view) for view in views if self.authorize(request, view.name)]
        others = sorted((run, replica) for run, replica in self._elsewhere().items() if self.history.run(run) is None)
        elsewhere = {run: replica for run, replica in others if self.authorize(request, run)}
        return RunsAnswer(version, is_complete, shown, self.history.left_out, elsewhere)

    def _summary(self, view: RunView) -> RunSummary:
        """Made once for all clients."""
        known = self._summaries.get(view.name)
        if known is None or known[0] != view.version:
            if len(self._summaries) > 2 * MAX_RUNS:
                self._summaries.clear()  # most are of runs that are forgotten
            known = self._summaries[view.name] = (view.version, run_summary(view))
        return known[1]

    def runs(self, request: Request, query: NoQuery) -> Response:
        return json_response(self.runs_since(request, 0))

    def run(self, request: Request, query: RunHistoryQuery) -> Response:
        view = self.history.run(query.run)
        if view is None:
            return self._no_history(query.run)
        since = _moment(view, query.since)
        body = self._answer(view, query, since, lambda: msgspec.json.encode(run_detail(view, since, self.older)))
        return Response(body, media_type=JSON)

    def rank(self, request: Request, query: RankHistoryQuery) -> Response:
        view = self.history.run(query.run)
        if view is None:
            return self._no_history(query.run)
        found = rank_history(view, query.rank, _moment(view, query.since), self.older)
        if found is None:
            return problem(404, f"{query.run} has no rank {query.rank}", f"{PREFIX}/run?run=… lists its ranks")
        return json_response(found)

    def heatmap(self, request: Request, query: HeatmapQuery) -> Response:
        view: RunView | None = self.history.run(query.run)
        if view is None:
            return self._no_history(query.run)
        if query.signal not in SIGNAL_ROWS:
            return problem(400, f"{query.signal} is no signal of a rank", f"{PREFIX}/signals lists them")
        since = _moment(view, query.since)
        body = self._answer(
            view, query, since, lambda: _packed(*heatmap(view, query.signal, since, query.columns, self.older))
        )
        return Response(body, media_type=BINARY)

    def step(self, request: Request, query: RunQuery) -> Response:
        view = self.history.run(query.run)
        if view is None:
            return self._no_history(query.run)
        return json_response(step_answer(view))

    def _answer(self, view: RunView, query: RunQuery, since: float, make: Callable[[], bytes]) -> bytes:
        """Kept for other viewers, unless it changes with what Prometheus has answered meanwhile."""
        return make() if self.older.reaches(view, since) else self._kept.get(view, query, make)

    def _no_history(self, run: str) -> Response:
        replica = self._elsewhere().get(run)
        return _no_run(run) if replica is None else _at(replica, run)

    def signals(self, request: Request, query: NoQuery) -> Response:
        return json_response(SignalsAnswer([*SIGNALS, *RUN_SIGNALS]))

    def events(self, request: Request, query: NoQuery) -> Response:
        if not self.event_slots.acquire(blocking=False):
            return problem(
                503, f"{EVENT_CLIENTS} clients follow events already", "close some, or ask for /runs instead"
            )
        return EventStream(self, request)


ENDPOINTS = (
    Endpoint("/runs", "All runs, with their verdicts.", NoQuery, RunsAnswer, ConsoleApi.runs),
    Endpoint("/run", "One run: layout, phases, pace, marks.", RunHistoryQuery, RunDetail, ConsoleApi.run),
    Endpoint("/rank", "A rank over time, beside its cohort.", RankHistoryQuery, RankHistory, ConsoleApi.rank),
    Endpoint(
        "/heatmap",
        "A signal by rank and time: the length of a header (little-endian uint32), the header as JSON with spaces up "
        "to a multiple of 4 bytes, then the matrix.",
        HeatmapQuery,
        HeatmapHeader,
        ConsoleApi.heatmap,
        BINARY,
    ),
    Endpoint(
        "/step",
        "One step of all ranks that explains the verdict: operations, waiting, the critical path, the late operation.",
        RunQuery,
        StepAnswer,
        ConsoleApi.step,
    ),
    Endpoint("/signals", "Signals with unit and definition.", NoQuery, SignalsAnswer, ConsoleApi.signals),
    Endpoint(
        "/events",
        "Server-sent events `runs`: all runs, then those that changed. A slow reader gets the newest state.",
        NoQuery,
        RunsAnswer,
        ConsoleApi.events,
        EVENTS,
    ),
    *CAPTURE_ENDPOINTS,
    *PROFILE_ENDPOINTS,
    *REPORT_ENDPOINTS,
)


class AnswerCache:
    """Answers of the latest version of runs, so that many viewers cost little more than one. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._answers: dict[bytes, tuple[int, bytes]] = {}  # by query: version and answer, the latest used last

    def get(self, view: RunView, query: RunQuery, make: Callable[[], bytes]) -> bytes:
        key = msgspec.json.encode(query)
        with self._lock:
            version, answer = self._answers.pop(key, (None, b""))
        if version != view.version:
            answer = make()
        with self._lock:
            self._answers[key] = (view.version, answer)
            while sum(len(kept) for _, kept in self._answers.values()) > MAX_KEPT_BYTES:
                del self._answers[next(iter(self._answers))]
        return answer


class EventStream(Response):
    """A client that reads slowly misses states in between: nothing is queued for it."""

    media_type = EVENTS

    def __init__(self, api: ConsoleApi, request: Request) -> None:
        super().__init__(headers={"cache-control": "no-store"})
        del self.headers["content-length"]
        self._api = api
        self._request = request
        self._version = -1

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop, changed = asyncio.get_running_loop(), asyncio.Event()
        stop_waking = self._api.wake_by(lambda: loop.call_soon_threadsafe(changed.set))
        leaving = asyncio.ensure_future(departure(receive))
        leaving.add_done_callback(lambda _: changed.set())
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            while not leaving.done() and not self._api.is_closing.is_set():
                changed.clear()
                body = await run_in_threadpool(self._message)
                await send({"type": "http.response.body", "body": body, "more_body": True})
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(changed.wait(), SILENT_SECONDS)
                    await asyncio.sleep(EVENT_SECONDS)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            leaving.cancel()
            stop_waking()
            self._api.event_slots.release()

    def _message(self) -> bytes:
        answer = self._api.runs_since(self._request, self._version)
        if answer.version == self._version:
            return b":\n\n"
        self._version = answer.version
        return b"event: runs\nid: %d\ndata: %b\n\n" % (answer.version, msgspec.json.encode(answer))


class Assets(StaticFiles):
    """Files with a hash in their name never change; others are asked for again, with their ETag."""

    def file_response(
        self, full_path: str | PathLike[str], stat_result: stat_result, scope: Scope, status_code: int = 200
    ) -> Response:
        response = super().file_response(full_path, stat_result, scope, status_code)
        is_hashed = _HASHED_NAME.search(Path(full_path).name) is not None
        response.headers["cache-control"] = "public, max-age=31536000, immutable" if is_hashed else "no-cache"
        return response


def _moment(view: RunView, since: float) -> float:
    """A negative number counts back from now, or from the end of a run."""
    return since if since >= 0 else (view.ended_unix_seconds or time.time()) + since


def _packed(header: HeatmapHeader, matrix: bytes) -> bytes:
    text = msgspec.json.encode(header)
    text += b" " * (-(4 + len(text)) % 4)  # so that the matrix can be read in place
    return struct.pack("<I", len(text)) + text + matrix


def _no_run(name: str) -> Response:
    return problem(404, f"no run {name}", f"see the list of runs ({PREFIX}/runs); one that ended long ago is forgotten")


def _at(replica: str, run: str) -> Response:
    advice = "try again: the next connection may reach that one"
    if replica:
        advice += f"; or kubectl port-forward pod/{replica} 9469, in the operator's namespace"
    answer = problem(503, f"another replica correlates {run}", advice)
    answer.headers["connection"] = "close"
    return answer


def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    where = f"{request.method} {request.url.path}"
    return problem(error.status_code, f"{where}: {error.detail}", f"{PREFIX}/openapi.json describes the API")


def _problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, ProblemError)
    return error.response


def _failed(request: Request, error: Exception) -> Response:
    return problem(500, f"{request.url.path} failed", "the log of this process has the reason; please report it")


@contextlib.asynccontextmanager
async def _few_workers(app: Starlette) -> AsyncIterator[None]:
    anyio.to_thread.current_default_thread_limiter().total_tokens = WORKERS
    yield


OPENAPI = msgspec.json.encode(openapi(ENDPOINTS))
DOCUMENT: dict[str, Any] = msgspec.json.decode(OPENAPI)
