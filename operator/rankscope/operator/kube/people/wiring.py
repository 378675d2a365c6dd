"""The API for people as one thing: from `start` to `stop`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rankscope.operator.kube.api import Api
from rankscope.operator.kube.captures.auditing import CaptureAudit
from rankscope.operator.kube.captures.calls import DaemonCalls
from rankscope.operator.kube.captures.objects import CaptureObject
from rankscope.operator.kube.people.captures import PeopleCaptures
from rankscope.operator.kube.people.exporting import PeopleExporter
from rankscope.operator.kube.people.guarding import Guard
from rankscope.operator.kube.people.reviewing import Reviews
from rankscope.operator.kube.people.serving import PeopleServer, PeopleSettings
from rankscope.operator.kube.people.traces import Traces
from rankscope.operator.kube.runs.controlling import RunsController
from rankscope.operator.kube.watching import Watched
from rankscope.wire.following_tls import Read


class People:
    """`read` tells the certificate to serve with. Raises ValueError where tokens would travel in plain text."""

    def __init__(
        self,
        api: Api,
        settings: PeopleSettings,
        captures: Watched[CaptureObject],
        runs: RunsController,
        calls: DaemonCalls,
        addresses: Callable[[], Mapping[str, str]],
        audit: CaptureAudit,
        read: Read | None,
    ) -> None:
        if not settings.audience:
            raise ValueError("--api-audience is empty: tokens for the API server are not for us to see")
        self._traces = Traces(calls, addresses)
        service = PeopleCaptures(
            api,
            captures,
            runs.object_of,
            self._traces,
            audit,
            is_ready=lambda: captures.listed.is_set() and runs.watched.listed.is_set(),
        )
        guard = Guard(Reviews(api, settings.audience), audit)
        self.exporter = PeopleExporter(guard.counts)
        self.server = PeopleServer(settings, service.handler(guard), read)

    def start(self) -> None:
        self.server.start()

    def stop(self) -> None:
        self.server.stop()
        self._traces.stop()
