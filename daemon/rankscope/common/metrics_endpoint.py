"""/metrics as Prometheus asks for it: format, compression and selection of metrics. Many may ask: what a page shows is
rendered once and kept until it changes."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qs

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from rankscope.common.http_server import Request, Response

# Prometheus asks for one of a few formats; a caller could invent any number.
FORMATS_KEPT: Final = 8


@dataclass(frozen=True)
class _Families:
    """Metrics that were collected before."""

    families: Sequence[Metric]

    def collect(self) -> Iterable[Metric]:
        return self.families


class MetricsPage:
    """`version` returns an object that is replaced when the metrics change; without it, every request collects."""

    def __init__(self, collectors: Iterable[Collector], version: Callable[[], object] | None = None) -> None:
        self._collectors = tuple(collectors)
        self._version = version or object
        self._lock = threading.Lock()
        self._shown = object()
        self._families = _Families(())
        self._bodies: dict[tuple[str, bool], bytes] = {}  # by format and whether it is compressed

    def response(self, request: Request) -> Response:
        names = parse_qs(request.query).get("name[]")
        accepted = [part.partition(";")[0].strip() for part in request.headers.get("Accept-Encoding", "").split(",")]
        with self._lock:  # callers at the same time wait for one rendering
            self._refresh()
            accept = request.headers.get("Accept", "")
            encode, content_type = choose_encoder(accept if len(self._bodies) < 2 * FORMATS_KEPT else "")
            if names is not None:
                body = encode(_Families(list(self._selected(frozenset(names)))))
                return Response(200, body, content_type)
            if (content_type, False) not in self._bodies:
                self._bodies[content_type, False] = encode(self._families)
            if "gzip" not in accepted:
                return Response(200, self._bodies[content_type, False], content_type)
            if (content_type, True) not in self._bodies:
                self._bodies[content_type, True] = gzip.compress(self._bodies[content_type, False], compresslevel=5)
            return Response(200, self._bodies[content_type, True], content_type, {"Content-Encoding": "gzip"})

    def _refresh(self) -> None:
        version = self._version()
        if version is not self._shown:
            families = [family for collector in self._collectors for family in collector.collect()]
            self._families, self._bodies, self._shown = _Families(families), {}, version

    def _selected(self, names: frozenset[str]) -> Iterable[Metric]:
        """The samples of these names."""
        for family in self._families.families:
            samples = [sample for sample in family.samples if sample.name in names]
            if samples:
                selected = Metric(family.name, family.documentation, family.type, family.unit)
                selected.samples = samples
                yield selected
