"""Declared metrics: a row says what a metric is called and how to read it, and one function turns rows into Prometheus'
families. What was not measured has no series.

A table has a section of rows for each kind of subject: a rank, a GPU, a job. A page shows tables as Prometheus asks for
them: format, compression and selection of metrics."""

from __future__ import annotations

import gzip
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeGuard, TypeVar
from urllib.parse import parse_qs

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from rankscope.common.http_server import Request, Response
from rankscope.common.text import printable

LABEL_CHARACTERS: Final = 128
# Prometheus asks for one of a few formats; a caller could invent any number.
MAX_FORMATS: Final = 8
ANY: Final = ()  # values of a label that is not a closed set
FULL_ONLY: Final = ()  # `standard` of a metric that only metrics_detail = full has

Subject = TypeVar("Subject")
# One value, or values by further label: by its value, or by a tuple of values where there are several such labels.
Reading: TypeAlias = float | Mapping[Any, float | None] | None


@dataclass(frozen=True)
class Metric(Generic[Subject]):
    type: ClassVar[str]
    name: str  # in full, as Prometheus shows it
    help: str
    read: Callable[[Subject], Reading]
    # Beside those of the section, with all values where they are a closed set.
    labels: Mapping[str, Sequence[str]] = field(default_factory=dict)
    standard: Collection[object] | None = None  # keys of the reading that metrics_detail = standard shows; None: all

    def samples(self, subject: Subject, full: bool) -> Mapping[tuple[str, ...], float]:
        """By values of the further labels. There is no sample for a value that is unknown or not finite, nor for a
        label value outside its closed set: what a container reports cannot add series."""
        if not full and self.standard == FULL_ONLY:
            return {}
        reading = self.read(subject)
        if reading is None or isinstance(reading, int | float):
            return {(): float(reading)} if self._is_sound(reading) else {}
        found: dict[tuple[str, ...], float] = {}
        for key, value in reading.items():
            if self._is_sound(value) and (full or self.standard is None or key in self.standard):
                texts = (label(key),) if isinstance(key, str) else tuple(map(label, key))
                if all(not closed or text in closed for text, closed in zip(texts, self.labels.values(), strict=True)):
                    found.setdefault(texts, float(value))
        return found

    def _is_sound(self, value: float | None) -> TypeGuard[float]:
        return value is not None and math.isfinite(value) and (value >= 0 or self.type != "counter")


class Gauge(Metric[Subject]):
    type = "gauge"


class Counter(Metric[Subject]):
    type = "counter"


@dataclass(frozen=True)
class Section(Generic[Subject]):
    """Metrics of one kind of subject. `labels` identify the subject and are on every metric."""

    labels: tuple[str, ...]
    metrics: tuple[Metric[Subject], ...]

    def families(
        self, subjects: Iterable[tuple[tuple[str, ...], Subject]], *, full: bool = True
    ) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """`subjects` come with the values of the section's labels."""
        # One series twice makes Prometheus refuse the whole scrape: the first subject with the same labels wins.
        unique: dict[tuple[str, ...], Subject] = {}
        for values, subject in subjects:
            unique.setdefault(tuple(map(label, values)), subject)
        for metric in self.metrics:
            kind = CounterMetricFamily if metric.type == "counter" else GaugeMetricFamily
            family = kind(metric.name, metric.help, labels=(*self.labels, *metric.labels))
            for values, subject in unique.items():
                for further, value in metric.samples(subject, full).items():
                    family.add_metric((*values, *further), value)
            if family.samples:
                yield family

    def of(self, subject: Subject | None) -> Iterator[GaugeMetricFamily | CounterMetricFamily]:
        """The families of the only subject of a section without labels; none where there is no such subject."""
        return self.families(() if subject is None else [((), subject)])


def label(text: str) -> str:
    """A label value: names of jobs, nodes, pods and GPUs come from other programs."""
    return printable(text, LABEL_CHARACTERS)


@dataclass(frozen=True)
class _Families:
    """Metrics that were collected before."""

    families: Sequence[Family]

    def collect(self) -> Iterable[Family]:
        return self.families


class MetricsPage:
    """Many may ask: what a page shows is rendered once and kept until it changes. `version` returns an object that is
    replaced when the metrics change; without it, every request collects."""

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
            encode, content_type = choose_encoder(accept if len(self._bodies) < 2 * MAX_FORMATS else "")
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

    def _selected(self, names: frozenset[str]) -> Iterable[Family]:
        """The samples of these names."""
        for family in self._families.families:
            samples = [sample for sample in family.samples if sample.name in names]
            if samples:
                selected = Family(family.name, family.documentation, family.type, family.unit)
                selected.samples = samples
                yield selected
