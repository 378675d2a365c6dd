"""The admission webhooks: their server, certificates and configurations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import urlsplit

from rankscope.common.http_server import JSON, TEXT, HttpServer, Limits, Request, Response, Route, body_length
from rankscope.common.tls import FollowedTls, Read, TlsMaterial
from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.certificates.authority import Lifetimes
from rankscope.operator.certificates.roles import Role, Use
from rankscope.operator.certificates.rotation import (
    CertificateFiles,
    CertificateRotation,
    CertificateSource,
    RotationSettings,
)
from rankscope.operator.kube.api_client import Api, OwnName
from rankscope.operator.webhooks.admission import Admission
from rankscope.operator.webhooks.configuration import NAME, Address, Configurations

BODY_BYTES = 3 << 20
# Reviews from one address: an API server sends one for each pod, of a few kilobytes.
PART_BYTES = 16 << 10
PARTS_AT_ONCE, PARTS_PER_SECOND = 2000.0, 200.0
# Longer than the API server keeps a connection idle: it has to be the first to close it, or a request may be lost.
LIMITS = Limits(connections=256, request_seconds=10.0, idle_seconds=150.0)


@dataclass(frozen=True)
class WebhookSettings:
    listen_host: str
    listen_port: int
    namespace: str = "rankscope"
    service: str = "rankscope-webhook"
    url: str = ""  # instead of the Service, for an operator outside the cluster
    secret: str = "rankscope-webhook"
    configuration: str = NAME
    probe_image: str | None = None
    certificate: Path | None = None  # None: in the Secret, renewed by us
    key: Path | None = None
    authority: Path | None = None
    # Signs the certificate of the API server, which has to show it. None: it shows none, and anybody may ask.
    client_authority: Path | None = None
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    round_seconds: float = 10.0
    # From the moment a new authority is in the configurations until a certificate that it signed is served: every API
    # server must have read it.
    settle_seconds: float = 60.0

    @property
    def names(self) -> tuple[str, ...]:
        if self.url:
            return (urlsplit(self.url).hostname or "",)
        return (f"{self.service}.{self.namespace}.svc", f"{self.service}.{self.namespace}.svc.cluster.local")

    @property
    def rotation(self) -> RotationSettings:
        """Authority and certificate are in one Secret: nobody else signs or shows anything with them."""
        return RotationSettings(
            namespace=self.namespace,
            authority_name="rankscope webhooks",
            authority_secret=self.secret,
            roles=(Role(self.secret, self.names, Use.SERVER, is_operators=True),),
            lifetimes=self.lifetimes,
            settle_seconds=self.settle_seconds,
            round_seconds=self.round_seconds,
        )


class Webhooks:
    """Every replica serves; the one that `leads` renews and publishes. Runs from `start` to `stop`."""

    def __init__(
        self, api: Api, settings: WebhookSettings, leads: Callable[[], bool], audit: CaptureAudit | None = None
    ) -> None:
        self._is_authenticated = settings.client_authority is not None
        self.admission = Admission(settings.probe_image, OwnName(api), audit if self._is_authenticated else None)
        self._rates = KeyedTokenBuckets(PARTS_AT_ONCE, PARTS_PER_SECOND)  # by address
        address = Address(settings.namespace, settings.service, url=settings.url)
        publish = Configurations(api, address, settings.configuration).publish
        self.certificates: CertificateSource
        if settings.certificate is not None and settings.key is not None:
            files = settings.certificate, settings.key, settings.authority
            self.certificates = CertificateFiles(settings.secret, *files, leads, publish, settings.round_seconds)
        else:
            self.certificates = CertificateRotation(api, settings.rotation, leads, publish)
        routes = {("POST", path): Route(self._review, BODY_BYTES, self._check) for path in self.admission.paths}
        tls = FollowedTls(_asking_callers(self.certificates.server(settings.secret), settings.client_authority))
        self.server = HttpServer(settings.listen_host, settings.listen_port, routes, tls, LIMITS)

    @property
    def is_serving(self) -> bool:
        return self.certificates.are_held

    @property
    def expires_unix(self) -> float | None:
        """Of the certificate that is served."""
        return self.certificates.expires_unix

    def start(self) -> None:
        self.server.start()
        self.certificates.start()

    def stop(self) -> None:
        self.certificates.stop()
        self.server.stop()

    def _check(self, request: Request) -> Response | None:
        """Before the body is read. The API server follows the webhook's failurePolicy after a refusal."""
        webhook = request.path.split("/")[1]
        if self._is_authenticated:
            if request.certificate:
                return None
            self.admission.counts[webhook, "unauthenticated"] += 1
            return Response(403, b"a certificate of --webhook-client-authority is needed, see docs/injection.md\n")
        if not self._rates.take(request.address, 1 + body_length(request.headers, BODY_BYTES) // PART_BYTES):
            self.admission.counts[webhook, "limited"] += 1
            return Response(429, b"too many reviews from this address\n")
        return None

    def _review(self, request: Request) -> Response:
        status, body = self.admission.answer(request.path, request.body)
        return Response(status, body, JSON if status == 200 else TEXT)


def _asking_callers(read: Read, authority: Path | None) -> Read:
    """With the authority of callers, which is read again for every connection."""
    if authority is None:
        return read

    def read_both() -> TlsMaterial | None:
        held = read()
        return None if held is None else replace(held, authorities=authority.read_bytes())

    return read_both
