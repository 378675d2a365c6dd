"""What an endpoint of the console's API is: its request and answer are structs, from which the OpenAPI document is
generated, so that the document cannot differ from what is served.

Captures and profiles come from another API. Each request opens a channel to it, in the caller's name: to a daemon's
socket, or to the operator's own API with the caller's token. Access, quotas and audit are there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Protocol

import anyio
import grpc
import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive

from rankscope.common.text import printable
from rankscope.operator.console.answers import NAME_CHARACTERS, TEXT_CHARACTERS
from rankscope.operator.console.history import History

PREFIX = "/api/v1"
JSON, BINARY, EVENTS = "application/json", "application/octet-stream", "text/event-stream"
GZIP, HTML, FORM = "application/gzip", "text/html", "application/x-www-form-urlencoded"
BODY_BYTES = 64 << 10
CALL_SECONDS = 15.0

Channels = Callable[[Request], grpc.Channel]


class Problem(msgspec.Struct):
    error: str
    next: str  # what to do about it


class ProblemError(Exception):
    """Ends a request with this answer."""

    def __init__(self, status: int, error: str, advice: str) -> None:
        super().__init__(error)
        self.response = problem(status, error, advice)


def problem(status: int, error: str, advice: str) -> Response:
    body = msgspec.json.encode(Problem(printable(error, TEXT_CHARACTERS), advice))
    return Response(body, status, media_type=JSON)


def json_response(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type=JSON)


class NoQuery(msgspec.Struct, forbid_unknown_fields=True):
    pass


class RunQuery(msgspec.Struct, forbid_unknown_fields=True):
    run: Annotated[str, msgspec.Meta(max_length=NAME_CHARACTERS, description="The name of a run, as /runs has it.")]


class RankQuery(RunQuery, forbid_unknown_fields=True):
    rank: Annotated[int, msgspec.Meta(ge=0)]


@dataclass(frozen=True)
class Endpoint:
    """`handle` is called in a thread with the API, the request, and what was asked: the query of a GET, the body of
    another method."""

    path: str
    summary: str
    query: type[msgspec.Struct]
    answer: type[msgspec.Struct]  # before the matrix, of a binary answer
    handle: Callable[[Any, Request, Any], Response]
    media: str = JSON
    method: str = "GET"
    is_remote: bool = False  # waits for another process, so in a pool of its own

    @property
    def takes_form(self) -> bool:
        """Whether a browser loads it as a download, a tab or a frame: then the token can come in a form."""
        return self.method == "GET" and self.media in (GZIP, HTML)

    async def asked(self, request: Request) -> Any:
        try:
            if self.method == "GET":
                return msgspec.convert(dict(request.query_params), self.query, strict=False)
            return msgspec.json.decode(await _body(request), type=self.query)
        except msgspec.DecodeError as error:  # or its subclass ValidationError
            advice = f"see {PREFIX}/openapi.json for its parameters"
            raise ProblemError(400, f"{self.path}: {error}", advice) from error


async def departure(receive: Receive) -> None:
    """Returns when the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _body(request: Request) -> bytes:
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise ProblemError(413, f"a body has at most {BODY_BYTES} bytes", f"see {PREFIX}/openapi.json")
    return body


# The API behind the console.

# Status, and the next step where the server's own text has none.
_ANSWERS = {
    grpc.StatusCode.INVALID_ARGUMENT: (400, "change the request"),
    grpc.StatusCode.OUT_OF_RANGE: (400, "change the request"),
    grpc.StatusCode.UNAUTHENTICATED: (401, "log in again"),
    grpc.StatusCode.PERMISSION_DENIED: (403, "ask an administrator for access"),
    grpc.StatusCode.NOT_FOUND: (404, "it may have been removed; the list shows what is there"),
    grpc.StatusCode.FAILED_PRECONDITION: (409, "docs/captures.md has what to do about it"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (429, "wait, then try again"),
    grpc.StatusCode.UNIMPLEMENTED: (501, "start the daemon with captures and profiles"),
    grpc.StatusCode.UNAVAILABLE: (503, "is the daemon running? try again in a few seconds"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (504, "the machine may be overloaded; ask for less, or try again"),
}


class Served(Protocol):
    """What the endpoints need of the API."""

    history: History
    channels: Channels
    remote: anyio.CapacityLimiter


def no_channel(request: Request) -> grpc.Channel:
    raise ProblemError(501, "this console has no captures and profiles", "use the one that `rankscope up` serves")


@contextlib.contextmanager
def calls(api: Served, request: Request) -> Iterator[grpc.Channel]:
    with api.channels(request) as channel, refusals():
        yield channel


@contextlib.contextmanager
def refusals() -> Iterator[None]:
    try:
        yield
    except grpc.RpcError as error:
        status, advice = _ANSWERS.get(error.code(), (502, "the log of the server has the reason"))
        text = error.details() if status not in (502, 503) else ""  # else about sockets
        raise ProblemError(status, text or f"the server answers {error.code().name}", advice) from error


# The document.

_TOKEN = {"type": "object", "properties": {"token": {"type": "string"}}}
_FORM = {
    "summary": "The same as GET, with the token in a form: a browser sends no header with a download or a frame.",
    "requestBody": {"required": True, "content": {FORM: {"schema": _TOKEN}}},
}


def openapi(endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    types = {each for endpoint in endpoints for each in (endpoint.query, endpoint.answer)}
    ordered = sorted(types, key=lambda each: each.__name__)
    _, schemas = msgspec.json.schema_components([*ordered, Problem], ref_template="#/components/schemas/{name}")
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        operation = _operation(endpoint, schemas)
        operations = paths.setdefault(PREFIX + endpoint.path, {})
        operations[endpoint.method.lower()] = operation
        if endpoint.takes_form:
            operations["post"] = {**operation, "operationId": f"post_{operation['operationId']}", **_FORM}
    for endpoint in endpoints:
        if endpoint.method == "GET":  # they are parameters, not bodies
            schemas.pop(endpoint.query.__name__, None)
    info = {"title": "Rankscope console", "version": _version()}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": schemas}}


def _operation(endpoint: Endpoint, schemas: dict[str, Any]) -> dict[str, Any]:
    refusal = {"description": "What is wrong, and what to do.", "content": {JSON: {"schema": _reference(Problem)}}}
    shown: dict[str, Any] = {"schema": _reference(endpoint.answer)}
    if endpoint.media == BINARY:
        shown = {"schema": {"type": "string", "format": "binary"}, "x-header": _reference(endpoint.answer)}
    elif endpoint.takes_form:
        shown = {}
    query = schemas[endpoint.query.__name__]
    name = endpoint.path.strip("/").replace("/", "_")
    operation: dict[str, Any] = {
        "summary": endpoint.summary,
        "operationId": name if endpoint.method == "GET" else f"{endpoint.method.lower()}_{name}",
    }
    if endpoint.method == "GET":
        operation["parameters"] = [
            {"name": name, "in": "query", "required": name in query["required"], "schema": schema}
            for name, schema in query["properties"].items()
        ]
    else:
        operation["requestBody"] = {"required": True, "content": {JSON: {"schema": _reference(endpoint.query)}}}
    content = {endpoint.media: shown}
    operation["responses"] = {"200": {"description": endpoint.summary, "content": content}, "default": refusal}
    return operation


def _reference(answer: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{answer.__name__}"}


def _version() -> str:
    try:
        return version("rankscope")
    except PackageNotFoundError:  # from a checkout
        return "0"
