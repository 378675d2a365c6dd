"""What must hold for anything that came out of a container, whatever it was."""

from __future__ import annotations

import contextlib
import logging
import math
import zlib
from collections.abc import Iterable, Iterator

from google.protobuf.message import Message
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

LABEL_CHARACTERS = 256
TEXT_CHARACTERS = 4096
SERIES = 2000
MESSAGE_BYTES = 1 << 20


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """What is logged about inputs is for operators, not for a run of ten million of them."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def check_text(text: str, characters: int = TEXT_CHARACTERS) -> None:
    assert len(text) <= characters, f"{len(text)} characters: {text[:80]!r}"
    assert text.isprintable(), f"not printable: {text[:80]!r}"
    text.encode()


def check_number(value: float | None) -> None:
    assert value is None or math.isfinite(value), value


def check_duration(seconds: float | None) -> None:
    assert seconds is None or (math.isfinite(seconds) and seconds >= 0), seconds


def check_message(message: Message) -> None:
    """Finite numbers, bounded and printable texts, and no more of it than a reader takes."""
    assert len(message.SerializeToString()) <= MESSAGE_BYTES
    _check_fields(message)


def _check_fields(message: Message) -> None:
    for field, value in message.ListFields():
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _check_values([*value.keys(), *(value[key] for key in value)])
        elif field.is_repeated:
            _check_values(value)
        else:
            _check_values([value])


def _check_values(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, Message):
            _check_fields(value)
        elif isinstance(value, float):
            check_number(value)
        elif isinstance(value, str):
            check_text(value)


class _Once(Collector):
    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = list(metrics)

    def collect(self) -> Iterable[Metric]:
        return self._metrics

    def describe(self) -> Iterable[Metric]:
        return ()


def check_metrics(metrics: Iterable[Metric], series: int = SERIES, *, data: bytes = b"") -> None:
    """Prometheus takes the page: it can be parsed, no series comes twice, and there are not too many. Writing and
    parsing it costs more than all the rest, so that is done for one `data` in sixteen."""
    families = list(metrics)
    _check_families(families, series)
    if zlib.crc32(data) % 16 == 0:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(families))
        text = generate_latest(registry).decode()
        _check_families(text_string_to_metric_families(text), series)


def _check_families(families: Iterable[Metric], series: int) -> None:
    seen: set[tuple[str, tuple[str, ...]]] = set()
    for family in families:
        for sample in family.samples:
            key = sample.name, tuple(sample.labels[name] for name in sorted(sample.labels))
            assert key not in seen, f"twice: {key}"
            seen.add(key)
            check_number(sample.value)
            for value in sample.labels.values():
                check_text(value, LABEL_CHARACTERS)
    assert len(seen) <= series, f"{len(seen)} series"
