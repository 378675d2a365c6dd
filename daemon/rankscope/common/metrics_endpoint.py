"""/metrics as Prometheus asks for it: format, compression and selection of metrics."""

from __future__ import annotations

import gzip
from collections.abc import Iterable
from urllib.parse import parse_qs

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rankscope.common.http_server import Request, Response


def registry_of(collectors: Iterable[Collector]) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    for collector in collectors:
        registry.register(collector)
    return registry


def metrics_response(registry: CollectorRegistry, request: Request) -> Response:
    encode, content_type = choose_encoder(request.headers.get("Accept", ""))
    names = parse_qs(request.query).get("name[]")
    body = encode(registry.restricted_registry(names) if names else registry)
    accepted = [part.partition(";")[0].strip() for part in request.headers.get("Accept-Encoding", "").split(",")]
    if "gzip" not in accepted:
        return Response(200, body, content_type)
    return Response(200, gzip.compress(body, compresslevel=5), content_type, {"Content-Encoding": "gzip"})
