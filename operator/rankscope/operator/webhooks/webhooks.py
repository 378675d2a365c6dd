"""The webhooks as one thing: server, certificates and configurations, kept in step."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.certificates.authority import Lifetimes, expires
from rankscope.operator.certificates.webhook_secret import FileKeeper, Keeper, SecretKeeper, Served
from rankscope.operator.kube.api_client import Api, ApiError, UnreachableError
from rankscope.operator.kube.ownership import OwnName
from rankscope.operator.webhooks.admission import Admission
from rankscope.operator.webhooks.configuration import NAME, Address, Configuring
from rankscope.operator.webhooks.https_server import WebhookServer

log = logging.getLogger(__name__)


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
    certificate: Path | None = None  # None: the Secret, renewed by ourselves
    key: Path | None = None
    authority: Path | None = None
    lifetimes: Lifetimes = field(default_factory=Lifetimes)
    round_seconds: float = 10.0
    # From the moment a new authority is in the configurations until something signed by it is served: every API server
    # must have heard of it.
    settle_seconds: float = 60.0

    @property
    def names(self) -> tuple[str, ...]:
        if self.url:
            return (urlsplit(self.url).hostname or "",)
        return (f"{self.service}.{self.namespace}.svc", f"{self.service}.{self.namespace}.svc.cluster.local")


class Webhooks:
    """Every replica serves; whoever `leads` renews and publishes. Runs from `start` to `stop`."""

    def __init__(
        self, api: Api, settings: WebhookSettings, leads: Callable[[], bool], audit: CaptureAudit | None = None
    ) -> None:
        self._settings = settings
        self._leads = leads
        self.admission = Admission(settings.probe_image, OwnName(api), audit)
        self.server = WebhookServer(settings.listen_host, settings.listen_port, self.admission.answer)
        address = Address(settings.namespace, settings.service, url=settings.url)
        self._configuring = Configuring(api, address, settings.configuration)
        self._keeper: Keeper
        if settings.certificate is not None and settings.key is not None:
            self._keeper = FileKeeper(settings.certificate, settings.key, settings.authority)
        else:
            self._keeper = SecretKeeper(api, settings.namespace, settings.secret, settings.names, settings.lifetimes)
        self._served: Served | None = None
        self._trusted_since: tuple[bytes, float] | None = None  # the newest authority, seen in the configurations
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rankscope-certificates", daemon=True)

    @property
    def is_serving(self) -> bool:
        return self._served is not None

    @property
    def expires_unix(self) -> float | None:
        """Of the certificate that is served."""
        served = self._served
        return None if served is None else expires(served.certificate).timestamp()

    def start(self) -> None:
        self.server.start()
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(5.0)
        self.server.stop()

    def round(self) -> None:
        leads = self._leads()
        if leads:
            self._keeper.renew(self._newest_is_trusted())
        served = self._keeper.read()
        if served is None:
            return
        if served != self._served:
            self.server.use(served.certificate, served.key)
            self._served = served
        if not leads:
            self._trusted_since = None
        elif served.bundle:
            self._publish(served)

    def _publish(self, served: Served) -> None:
        stood = self._configuring.publish(served.bundle)
        if not stood:
            self._trusted_since = None
        elif self._trusted_since is None or self._trusted_since[0] != served.newest_authority:
            self._trusted_since = (served.newest_authority, time.monotonic())

    def _newest_is_trusted(self) -> bool:
        if self._trusted_since is None or self._served is None:
            return False
        authority, since = self._trusted_since
        settled = time.monotonic() - since >= self._settings.settle_seconds
        return settled and authority == self._served.newest_authority

    def _run(self) -> None:
        while True:
            pause = self._settings.round_seconds
            try:
                self.round()
            except UnreachableError as error:
                log.debug("the webhooks' certificates wait for the API server: %s", error)
            except (ApiError, ValueError, OSError) as error:
                log.warning("the webhooks' certificates cannot be kept: %s", error)
            except Exception:
                log.exception("a round of the webhooks' certificates failed")
            if not self.is_serving:
                pause = min(pause, 1.0)  # the leader is about to make them
            if self._stopping.wait(pause):
                return
