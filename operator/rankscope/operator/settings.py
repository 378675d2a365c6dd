"""The operator's settings."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from rankscope.operator.access.api_server import UserApiSettings
from rankscope.operator.certificates.rotation import RotationSettings
from rankscope.operator.kube.leader_election import SETTLING_SECONDS
from rankscope.operator.runs.daemon_streams import SELECTOR
from rankscope.operator.webhooks.webhooks import WebhookSettings

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text().strip()
    except OSError:
        return "rankscope"


@dataclass(frozen=True)
class OperatorSettings:
    kubeconfig: Path | None = None  # None: the pod's service account
    namespace: str = field(default_factory=own_namespace)  # of the operator and the daemons
    identity: str = field(default_factory=lambda: os.environ.get("POD_NAME") or socket.gethostname())
    shards: int = 1
    settling_seconds: float = SETTLING_SECONDS
    pod_selector: str = ""
    daemon_selector: str = SELECTOR
    listen_host: str = "127.0.0.1"
    listen_port: int = 9466
    # Our certificate and key for the daemons, and the authority that signs theirs.
    daemon_tls: tuple[Path, Path, Path] | None = None
    fleet_certificates: RotationSettings | None = None  # made and renewed by us, instead of `daemon_tls`
    # Certificate and key for callers; without them, ours of `fleet_certificates`.
    serving_files: tuple[Path, Path] | None = None
    metrics_auth: bool = False
    mfu_target: float | None = None
    node_conditions: bool = False
    # Alertmanager may ask for captures with this token; without one there is no receiver.
    alert_token_file: Path | None = None
    alert_host: str = "127.0.0.1"
    alert_port: int = 9467
    webhooks: WebhookSettings | None = None
    user_api: UserApiSettings | None = None
