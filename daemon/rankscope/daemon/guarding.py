"""Who may call over gRPC: an operator by its certificate, whoever can open the Unix socket, and nobody else.

A request is waited for and read only after its caller was let in: gRPC's own way has a thread wait for the message of
whoever has begun a call, so that calls begun and left alone would take all threads there are."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from rankscope.daemon.arriving import Arrivals
from rankscope.daemon.certificates import CertificateError, names

log = logging.getLogger(__name__)

# Daemons have certificates of the same authority: one that was stolen from a node must not open the other nodes.
OPERATOR_ROLE = "rankscope-operator"
CALLERS_REMEMBERED = 256
NOT_AN_OPERATOR = "this certificate is not an operator's"
UNREADABLE = "the request cannot be read"
REQUEST_SECONDS = 10.0

Behaviour = Callable[[Any, grpc.ServicerContext], Any]


class CallGuard(grpc.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """`arrivals` are those of the port with TLS; None: there is none, and the addresses guard themselves."""

    def __init__(self, arrivals: Arrivals | None) -> None:
        self._arrivals = arrivals
        self._told: set[tuple[str, str]] = set()

    def intercept_service(
        self, continuation: Callable[[Any], Any], handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        handler = continuation(handler_call_details)
        if handler is None:
            return grpc.stream_unary_rpc_method_handler(self._guarded(_unknown_method))
        behaviour = getattr(handler, _kind(handler))
        answers = "stream" if handler.response_streaming else "unary"
        made = getattr(grpc, f"stream_{answers}_rpc_method_handler")
        if handler.request_streaming:  # each is read when it is asked for, by whoever was let in
            read = handler.request_deserializer
            return made(self._guarded(behaviour), read, handler.response_serializer)
        guarded = self._guarded(_taking_one(behaviour, handler.request_deserializer))
        return made(guarded, response_serializer=handler.response_serializer)

    def _guarded(self, behaviour: Behaviour) -> Behaviour:
        def guard(requests: Any, context: grpc.ServicerContext) -> Any:
            if self._arrivals is not None and not context.peer().startswith("unix:"):
                self._check(context, self._arrivals)
            return behaviour(requests, context)

        return guard

    def _check(self, context: grpc.ServicerContext, arrivals: Arrivals) -> None:
        arrivals.shown(context.peer())
        known_as = caller_names(context.auth_context())
        if OPERATOR_ROLE in known_as:
            return
        address = context.peer().rpartition(":")[0]
        shown = ", ".join(sorted(known_as))[:200]
        if (address, shown) not in self._told and len(self._told) < CALLERS_REMEMBERED:
            self._told.add((address, shown))
            log.warning("refused %s: its certificate is of %r, not of %s", address, shown, OPERATOR_ROLE)
        context.abort(grpc.StatusCode.PERMISSION_DENIED, NOT_AN_OPERATOR)


def caller_names(auth: dict[str, list[bytes]]) -> frozenset[str]:
    """Names that the authority vouches for. From the certificate itself: gRPC's own lists end at the first NUL, and an
    authority may have signed `rankscope-operator\\0.example.com`."""
    try:
        found = names(auth["x509_pem_cert"][0])
    except (KeyError, IndexError, CertificateError):
        return frozenset()
    return frozenset(name.decode(errors="replace") for name in found)


def _taking_one(behaviour: Behaviour, read: Callable[[bytes], Any]) -> Behaviour:
    def take(requests: Iterator[bytes], context: grpc.ServicerContext) -> Any:
        too_late = threading.Timer(REQUEST_SECONDS, context.cancel)
        too_late.daemon = True
        too_late.start()
        try:
            raw = next(requests)
        except StopIteration:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)
        finally:
            too_late.cancel()
        try:
            request = read(raw)
        except (DecodeError, ValueError):  # gRPC would log every one with a traceback
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, UNREADABLE)
        return behaviour(request, context)

    return take


def _kind(handler: grpc.RpcMethodHandler) -> str:
    return f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"


def _unknown_method(request: object, context: grpc.ServicerContext) -> None:
    context.abort(grpc.StatusCode.UNIMPLEMENTED, "no such method")
