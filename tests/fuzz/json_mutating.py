"""Changing a JSON document where it means something: a value, a key, a branch of another document."""

from __future__ import annotations

import json
from collections.abc import Sequence
from random import Random
from typing import Any

from tests.fuzz.mutating import NUMBER_TEXTS, TEXTS, WHOLE_NUMBERS, Mutator

_ODD: tuple[Any, ...] = (None, True, False, [], {}, [[]], [{}], {"": None}, 0.5, -0.5, 1e308, float("nan"), 1e-320)
_SURROGATE = "\ud800"


class JsonMutator:
    """Falls back to bytes for what is no JSON, and now and then for what is."""

    def __init__(self, plain: Mutator, words: Sequence[str] = ()) -> None:
        self._plain = plain
        self._random: Random = plain.random
        self._words = words

    def mutate(self, data: bytes, other: bytes) -> bytes:
        document = _parsed(data)
        if document is None or self._random.random() < 0.15:
            return self._plain.mutate(data, other)
        donor = _parsed(other)
        for _ in range(min(1 + int(self._random.expovariate(0.7)), 8)):
            document = self._change(document, donor)
        return self.written(document)

    def written(self, document: Any) -> bytes:
        try:
            text = json.dumps(document, ensure_ascii=self._random.random() < 0.5)
        except (RecursionError, ValueError):
            return b"{}"
        return text.encode("utf-8", "surrogatepass")[: self._plain.size_limit]

    def _change(self, document: Any, donor: Any) -> Any:
        places = _places(document)
        if not places:
            return self._value(document, donor)
        parent, key = self._random.choice(places)
        kind = self._random.randrange(10)
        if kind < 5:
            parent[key] = self._value(parent[key], donor)
        elif kind < 6:
            del parent[key]
        elif kind < 7 and isinstance(parent, list):
            times = self._random.choice((1, 1, 2, 20))
            parent[key:key] = [parent[key]] * times
        elif kind < 8 and isinstance(parent, dict):
            parent[self._text()] = parent[key]
        else:
            elsewhere, place = self._random.choice(places)
            taken = elsewhere[place] if place in elsewhere or isinstance(elsewhere, list) else None
            # A copy: a document that holds itself has no end.
            parent[key] = _copied(taken)
        return document

    def _value(self, old: Any, donor: Any) -> Any:
        kind = self._random.randrange(9)
        if kind == 0 and donor is not None:
            places = _places(donor)
            if places:
                parent, key = self._random.choice(places)
                return _copied(parent[key])
        if kind <= 2 and isinstance(old, int | float) and not isinstance(old, bool):
            return min(old, 1e300) * self._random.choice((-1, 2, 10, 1000)) + self._random.choice((0, 1, -1, 0.5))
        if kind <= 3 and isinstance(old, str):
            changed = self._plain.mutate(old.encode("utf-8", "surrogatepass"), b"")
            return changed.decode("utf-8", "surrogateescape" if self._random.random() < 0.2 else "replace")
        if kind <= 5:
            return self._random.choice(WHOLE_NUMBERS)
        if kind == 6:
            return self._random.choice(_ODD)
        if kind == 7 and self._random.random() < 0.05:
            nested: Any = []
            for _ in range(self._random.choice((20, 200, 900))):
                nested = [nested] if self._random.random() < 0.5 else {"a": nested}
            return nested
        return self._text()

    def _text(self) -> str:
        kind = self._random.randrange(8)
        if kind < 4 and self._words:
            return self._random.choice(self._words)
        if kind == 4:
            return self._random.choice(NUMBER_TEXTS)
        if kind == 5:
            return (
                _SURROGATE if self._random.random() < 0.3 else "x" * self._random.choice((62, 63, 64, 253, 254, 1025))
            )
        return self._random.choice(TEXTS)


def _parsed(data: bytes) -> Any:
    try:
        return json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return None


def _copied(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value))
    except (ValueError, RecursionError):
        return None


def _places(document: Any) -> list[tuple[Any, Any]]:
    """Every value by the thing that holds it and its key there."""
    found: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting and len(found) < 20_000:
        holder = waiting.pop()
        keys: Any = holder if isinstance(holder, dict) else range(len(holder)) if isinstance(holder, list) else ()
        for key in list(keys):
            found.append((holder, key))
            waiting.append(holder[key])
    return found
