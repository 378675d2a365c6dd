"""Authentication, authorization and limits of the users' API. Callers show a token that the API server reviews, or
where there is none, a certificate.

Every method reads its request as a stream of one message. The protocol is the same, but a caller is authenticated
before its message is waited for, and the wait has a limit."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509.oid import NameOID
from google.protobuf.message import DecodeError, Message

from rankscope.common.audit import AuditRecord
from rankscope.common.http_server import Request, Response
from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.access.token_review import Access, Caller, NoAnswerError, Reviews
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.certificates.authority import names_of
from rankscope.operator.certificates.roles import CLIENT, METRICS, OPERATOR

log = logging.getLogger(__name__)

REQUEST_SECONDS = 10.0
CALLS_OF_ONE = 16
# Strangers' tokens of one address that are looked at, and how quickly there may be more. A cluster may show all its
# callers by one address.
STRANGERS_AT_ONCE = 20.0
STRANGERS_PER_SECOND = 1.0
MAX_REFUSALS = 256

Asked = TypeVar("Asked", bound=Message)
Said = TypeVar("Said", bound=Message)
Code = grpc.StatusCode


class RefusedError(Exception):
    """The answer to the caller: it must not contain a secret."""

    def __init__(self, code: grpc.StatusCode, text: str) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Call:
    """An authenticated call."""

    caller: Caller
    address: str
    context: grpc.ServicerContext = field(repr=False)
    require: Callable[[Access], None] = field(repr=False)  # raises RefusedError
    recheck: Callable[[Access], None] = field(repr=False)  # who it is, too: streams outlast a review

    def record(self, event: Any, **what: Any) -> AuditRecord:
        caller = self.caller
        verified = caller.is_verified
        return AuditRecord(event, "api", caller.name, caller.groups, verified, address=self.address, **what)


@dataclass(frozen=True)
class Credentials:
    """What a caller shows, by gRPC or HTTP: all values of a header."""

    authorization: Sequence[str] = field(default=(), repr=False)
    certificate: bytes = b""  # PEM, verified by TLS
    # Headers of a proxy that has authenticated the user, or of a caller that pretends to be one.
    forwarded_user: Sequence[str] = ()
    forwarded_groups: Sequence[str] = ()


# What a caller shows, and its address. Raises RefusedError.
Peer = Callable[[grpc.ServicerContext], tuple[Credentials, str]]


class UnauthenticatedError(RefusedError):
    """`why` is for the log: what the caller has shown."""

    def __init__(self, why: str, text: str) -> None:
        super().__init__(Code.UNAUTHENTICATED, text)
        self.why = why


class Authentication(Protocol):
    def caller(self, shown: Credentials, address: str) -> Caller:
        """Who calls. Asked again during long streams. Raises RefusedError or NoAnswerError."""

    def allows(self, caller: Caller, access: Access) -> bool: ...


class TokenAuthentication:
    """A Kubernetes token that the API server accepts; its RBAC decides what the caller may do."""

    def __init__(self, reviews: Reviews) -> None:
        self._reviews = reviews
        self._strangers = KeyedTokenBuckets(STRANGERS_AT_ONCE, STRANGERS_PER_SECOND)

    def allows(self, caller: Caller, access: Access) -> bool:
        return self._reviews.allows(caller, access)

    def caller(self, shown: Credentials, address: str) -> Caller:
        token = self._token(shown.authorization)
        # One client with an expired token must not lock out all others of its address.
        is_new = not self._reviews.knows(token)
        if is_new and not self._strangers.take(address):
            raise RefusedError(Code.RESOURCE_EXHAUSTED, "too many tokens that were not accepted; try again in a moment")
        is_stranger = False
        try:
            caller = self._reviews.caller(token)
            is_stranger = caller is None
        finally:
            if is_new and not is_stranger:
                self._strangers.give_back(address)
        if caller is None:
            audience = self._reviews.audience
            raise UnauthenticatedError(
                "a token that is not accepted",
                "the token was not accepted: it has ended, was taken back, or is not for the audience "
                f"{audience!r}; next: kubectl create token ACCOUNT --audience {audience}",
            )
        return caller

    def _token(self, given: Sequence[str]) -> str:
        scheme, _, token = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        if scheme.lower() == "bearer" and token.strip():
            return token.strip()
        raise UnauthenticatedError(
            "no token",
            "show a token: rankscope capture --token-file FILE; next: "
            f"kubectl create token ACCOUNT --audience {self._reviews.audience}",
        )


class CertificateAuthentication:
    """Without Kubernetes: a certificate of our authority, for a client. It may do everything, as there are no roles.
    A daemon's certificate is refused: one that was stolen from a node must not open the others. Without TLS the
    server listens on loopback only, and the machine's users are trusted."""

    def __init__(self, has_tls: bool) -> None:
        self._has_tls = has_tls

    def allows(self, caller: Caller, access: Access) -> bool:
        return True

    def caller(self, shown: Credentials, address: str) -> Caller:
        if not self._has_tls:
            return Caller("loopback", is_verified=False)
        try:
            names = names_of(shown.certificate)
            subject = x509.load_pem_x509_certificate(shown.certificate).subject
            common = subject.get_attributes_for_oid(NameOID.COMMON_NAME)
        except (ValueError, x509.ExtensionNotFound):
            raise UnauthenticatedError("no certificate", "show a certificate for a client") from None
        if not names & {CLIENT, OPERATOR}:
            raise UnauthenticatedError(
                f"a certificate of {', '.join(sorted(names))[:200]!r}",
                f"this certificate is not a client's; next: rankscope certificates issue DIR --role client NAME "
                f"(its alternative names have {CLIENT})",
            )
        return Caller(str(common[0].value) if common else CLIENT)


class CertificateMetricsGuard:
    """Decides who may read a correlator's /metrics with TLS: scrapers and clients, by their certificates."""

    def check(self, request: Request) -> Response | None:
        """None: the caller may."""
        try:
            certificate = x509.load_der_x509_certificate(request.certificate)
            names = names_of(certificate.public_bytes(Encoding.PEM))
        except (ValueError, x509.ExtensionNotFound):
            names = set()
        if names & {METRICS, OPERATOR, CLIENT}:
            return None
        return Response(403, f"a certificate of {METRICS} is needed\n".encode())


class Guard:
    def __init__(self, authentication: Authentication, audit: CaptureAudit, peer: Peer | None = None) -> None:
        """`peer` tells who a gRPC call comes from; by default, who has made the connection."""
        self._peer = peer or _peer
        self.counts: Counter[tuple[str, str]] = Counter()  # by method, and how a call ended
        self._authentication = authentication
        self._audit = audit
        self._lock = threading.Lock()
        self._calls: Counter[str] = Counter()  # by tenant
        self._told: set[tuple[str, str]] = set()

    def single(self, name: str, asked: type[Asked], behave: Callable[[Asked, Call], Said]) -> grpc.RpcMethodHandler:
        """A method with one answer."""

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Said:
            with self._answering(name, context), self._admitted(context) as call:
                return behave(_only(asked, requests, context), call)
            raise AssertionError("an answer or an abort")

        return grpc.stream_unary_rpc_method_handler(handle, response_serializer=_bytes)

    def streaming(
        self, name: str, asked: type[Asked], behave: Callable[[Asked, Call], Iterator[Said]]
    ) -> grpc.RpcMethodHandler:
        """A method with many."""

        def handle(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[Said]:
            with self._answering(name, context), self._admitted(context) as call:
                yield from behave(_only(asked, requests, context), call)

        return grpc.stream_stream_rpc_method_handler(handle, response_serializer=_bytes)

    @contextmanager
    def _answering(self, name: str, context: grpc.ServicerContext) -> Iterator[None]:
        code, text = Code.OK, ""
        try:
            yield
        except RefusedError as error:
            code, text = error.code, str(error)
        except NoAnswerError as error:
            code, text = Code.UNAVAILABLE, f"{error}; try again"
        except GeneratorExit:
            code = Code.CANCELLED  # the caller left
            raise
        except Exception:
            if not context.is_active():
                code, text = Code.CANCELLED, "the caller left, or gRPC ended the call"
            else:
                # Its text may contain secrets.
                log.exception("a call of the API failed")
                code, text = Code.INTERNAL, "unexpected; the operator's log has the reason"
        finally:
            self.counts[name, code.name] += 1
        if code is not Code.OK:
            _abort(context, code, text)

    @contextmanager
    def _admitted(self, context: grpc.ServicerContext) -> Iterator[Call]:
        shown, address = self._peer(context)
        caller = self.identify(shown, address)

        def require(access: Access) -> None:
            self.require(caller, address, access)

        def recheck(access: Access) -> None:
            self.identify(shown, address)
            require(access)

        with self.counted(caller):
            yield Call(caller, address, context, require, recheck)

    def identify(self, shown: Credentials, address: str) -> Caller:
        """Raises RefusedError or NoAnswerError."""
        try:
            return self._authentication.caller(shown, address)
        except UnauthenticatedError as error:
            self._log_unauthenticated(address, error.why)
            raise

    def allows(self, caller: Caller, access: Access) -> bool:
        """For what is left out of a list. Raises NoAnswerError."""
        return self._authentication.allows(caller, access)

    def require(self, caller: Caller, address: str, access: Access) -> None:
        """Raises RefusedError or NoAnswerError."""
        if not self.allows(caller, access):
            self._deny(caller, address, access)

    @contextmanager
    def counted(self, caller: Caller) -> Iterator[None]:
        """A call under way, against the limit of its tenant. Raises RefusedError."""
        with self._lock:
            if self._calls[caller.tenant] >= CALLS_OF_ONE:
                raise RefusedError(Code.RESOURCE_EXHAUSTED, f"you have {CALLS_OF_ONE} calls under way; wait for one")
            self._calls[caller.tenant] += 1

        try:
            yield
        finally:
            with self._lock:
                self._calls[caller.tenant] -= 1
                if self._calls[caller.tenant] <= 0:
                    del self._calls[caller.tenant]

    def _deny(self, caller: Caller, address: str, access: Access) -> NoReturn:
        what = "/".join(part for part in (access.resource, access.subresource) if part)
        where = f"in namespace {access.namespace}" if access.namespace else "in all namespaces"
        role = "rankscope-view" if access.verb in ("get", "list") and not access.subresource else "rankscope-capture"
        text = f"{caller.name[:256]} may not {access.verb} {what} {where}; ask for the role {role} there"
        self._tell(address, f"{caller.name[:256]} may not {access.verb} {what} {where}")
        self._audit.refused(
            AuditRecord(
                "refused",
                "api",
                caller.name,
                caller.groups,
                verified=True,
                address=address,
                namespace=access.namespace,
                result="PermissionDenied",
                message=f"{access.verb} {what}",
            )
        )
        raise RefusedError(Code.PERMISSION_DENIED, text)

    def _log_unauthenticated(self, address: str, why: str) -> None:
        self._tell(address, why)
        self._audit.refused(AuditRecord("refused", "api", address=address, result="Unauthenticated", message=why))

    def _tell(self, address: str, why: str) -> None:
        """In the log, once for each address and reason."""
        with self._lock:
            if (address, why) in self._told or len(self._told) >= MAX_REFUSALS:
                return
            self._told.add((address, why))
        log.warning("refused %s: %r", address, why)


def address_of(peer: str) -> str:
    """`ipv4:10.0.0.7:5123` without its port, and `unix:` as it is."""
    kind, _, rest = peer.partition(":")
    return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else peer[:64]


def _peer(context: grpc.ServicerContext) -> tuple[Credentials, str]:
    given = [str(value) for key, value in context.invocation_metadata() or () if key == "authorization"]
    certificate = b"".join(context.auth_context().get("x509_pem_cert", ())[:1])
    return Credentials(given, certificate), address_of(context.peer())


def _only(asked: type[Asked], requests: Iterator[bytes], context: grpc.ServicerContext) -> Asked:
    too_late = threading.Timer(REQUEST_SECONDS, context.cancel)
    too_late.daemon = True
    too_late.start()
    try:
        for request in requests:
            # Decoded here: gRPC would log a traceback for every malformed message.
            return asked.FromString(request)
    except DecodeError:
        raise RefusedError(Code.INVALID_ARGUMENT, "the request cannot be read") from None
    finally:
        too_late.cancel()
    raise RefusedError(Code.INVALID_ARGUMENT, "the call has no request")


def _bytes(message: Message) -> bytes:
    return message.SerializeToString()


def _abort(context: grpc.ServicerContext, code: grpc.StatusCode, text: str) -> NoReturn:
    context.abort(code, text)
    raise AssertionError("abort returns never")
