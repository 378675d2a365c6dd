"""Which certificates each side of the operator has: files that somebody else renews, or those it keeps itself."""

from __future__ import annotations

from rankscope.operator.kube.api import Api
from rankscope.operator.kube.certificates.daemon_credentials import DaemonTls, HeldTls
from rankscope.operator.kube.certificates.fleet_keeping import FleetCertificates
from rankscope.operator.kube.metrics_guarding import MetricsGuard
from rankscope.operator.kube.operator_settings import OperatorSettings
from rankscope.operator.kube.people.reviewing import Reviews
from rankscope.wire.following_tls import FollowedTls, Read, TlsMaterial, files


def towards_daemons(settings: OperatorSettings, kept: FleetCertificates | None) -> DaemonTls | None:
    if settings.tls is not None or kept is None:
        return settings.tls
    return HeldTls(lambda: kept.operator)


def towards_callers(settings: OperatorSettings, kept: FleetCertificates | None) -> FollowedTls | None:
    """For alerts and, if asked for, /metrics. None: there is no certificate, and there will be none."""
    read = serving_pair(settings, kept)
    return None if read is None else FollowedTls(read)


def serving_pair(settings: OperatorSettings, kept: FleetCertificates | None) -> Read | None:
    if settings.serving_files is not None:
        return files(*settings.serving_files)
    if kept is None:
        return None

    def read() -> TlsMaterial | None:
        leaf = kept.serving
        return None if leaf is None else TlsMaterial(leaf.certificate, leaf.key)

    return read


def metrics_guard(settings: OperatorSettings, api: Api) -> MetricsGuard | None:
    # Prometheus shows the token that every pod has: one for the API server.
    return MetricsGuard(Reviews(api, audience="")) if settings.metrics_auth else None
