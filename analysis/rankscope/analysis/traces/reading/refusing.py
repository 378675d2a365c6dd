"""Why a trace cannot be read, or what had to be mended to read it: in words, with the place."""

from __future__ import annotations


class TraceError(ValueError):
    """The file is no readable trace. `reason` is a clause without the file's name, `byte` the place in the
    (decompressed) text where one can be named."""

    def __init__(self, reason: str, *, byte: int | None = None) -> None:
        self.reason = reason if byte is None else f"{reason} (byte {byte})"
        self.byte = byte
        super().__init__(self.reason)

    def name_file(self, name: str) -> None:
        if name:
            self.args = (f"{name}: {self.reason}",)


class Repairs:
    """Counts what was mended, each kind once, with the first place."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}
        self._first: dict[str, int | None] = {}

    def note(self, words: str, count: int = 1, *, byte: int | None = None) -> None:
        if count:
            self._counts[words] = self._counts.get(words, 0) + count
            self._first.setdefault(words, byte)

    def add(self, other: Repairs) -> None:
        for words, count in other._counts.items():
            self.note(words, count, byte=other._first[words])

    def total(self, prefix: str) -> int:
        """Of all kinds whose words begin so."""
        return sum(count for words, count in self._counts.items() if words.startswith(prefix))

    def in_words(self) -> tuple[str, ...]:
        return tuple(self._sentence(words, count) for words, count in self._counts.items())

    def _sentence(self, words: str, count: int) -> str:
        first = self._first[words]
        place = "" if first is None else f" (byte {first})" if count == 1 else f" (first at byte {first})"
        return f"{words}{place}" if count == 1 else f"{words}: {count} times{place}"
