"""Numbers as people write them: 8.03e9, 8B, 540e9."""

from __future__ import annotations

import math
import re

_POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:e([+-]?[0-9]{1,4}))?\s*([KMBGT]?)", re.IGNORECASE)


class QuantityError(ValueError):
    """Names the option, what was written there and what would do."""


def read_quantity(option: str, text: str, example: str) -> float:
    """A finite number above zero."""
    plain = text.strip().replace("_", "").replace(",", "")
    match = _QUANTITY.fullmatch(plain)
    # By its digits: 8.03 × 1e9 is not 8.03e9 in floating point.
    value = float(f"{match[1]}e{int(match[2] or 0) + _POWERS[match[3].upper()]}") if match else _number(plain)
    if value is None:
        raise QuantityError(f"{option}: {text[:40]!r} is no number; write it like {example}")
    if not math.isfinite(value) or value <= 0:
        raise QuantityError(f"{option}: {text[:40]!r} is not a finite number above zero; write it like {example}")
    return value


def read_count(option: str, text: str, example: str) -> int:
    """A whole number above zero. Thousands may not be abbreviated: 8K is 8000 to some and 8192 to others."""
    if text.strip()[-1:].upper() == "K":
        raise QuantityError(
            f"{option}: {text[:40]!r} may mean thousands of 1000 or of 1024; write it out, like {example}"
        )
    value = read_quantity(option, text, example)
    if value != int(value) or value > 1e15:
        raise QuantityError(f"{option}: {text[:40]!r} is not a whole number; write it like {example}")
    return int(value)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
