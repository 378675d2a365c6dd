"""Fields of a Hugging Face model config, read with suspicion."""

from __future__ import annotations

from collections.abc import Mapping

# Far beyond any model: what is larger is a mistake, and would only cost time and overflow.
MOST = 10**9
MOST_LAYERS = 100_000


class ConfigError(ValueError):
    """The config cannot be counted; the text says which field, why, and what would do."""


class Fields:
    def __init__(self, values: Mapping[str, object]) -> None:
        self._values = values

    def has(self, name: str) -> bool:
        return self._values.get(name) is not None

    def count(self, *names: str, default: int | None = None) -> int:
        """A whole number of at least one under the first of these names that is there."""
        for name in names:
            value = self._values.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST:
                raise ConfigError(f"{name} is {str(value)[:40]!r}, not a whole number from 1 to {MOST:,}")
            return value
        if default is None:
            raise ConfigError(f"{names[0]} is missing")
        return default

    def count_or_none(self, name: str) -> int | None:
        return self.count(name) if self.has(name) else None

    def whole(self, name: str, default: int) -> int:
        """As `count`, and zero is allowed."""
        return 0 if self._values.get(name) == 0 else self.count(name, default=default)

    def flag(self, name: str, default: bool) -> bool:
        value = self._values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{name} is {str(value)[:40]!r}, not true or false")
        return value

    def number(self, name: str, default: float) -> float:
        value = self._values.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{name} is {str(value)[:40]!r}, not a number")
        return float(value)

    def texts(self, name: str) -> tuple[str, ...] | None:
        value = self._values.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise ConfigError(f"{name} is not a list of words")
        return tuple(value)

    def wholes(self, name: str) -> tuple[int, ...]:
        value = self._values.get(name)
        if value is None:
            return ()
        if not isinstance(value, list) or not all(isinstance(item, int) for item in value):
            raise ConfigError(f"{name} is not a list of whole numbers")
        return tuple(value)

    def layers(self, *names: str) -> int:
        layers = self.count(*names)
        if layers > MOST_LAYERS:
            raise ConfigError(f"{names[0]} is {layers:,}, more layers than are counted here ({MOST_LAYERS:,})")
        return layers
