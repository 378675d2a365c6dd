"""Lengths of time in options: 90s, 10m, 2h, 7d."""

from __future__ import annotations

import re

from rankscope.cli.exit_codes import CommandError

_DURATION = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*([smhd])(?:\s+ago)?")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def duration_seconds(flag: str, text: str, also: str = "") -> float:
    """Raises CommandError, with `also` as what else the option takes."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match[1]) * _UNITS[match[2]] if match else 0.0
    if not seconds:
        raise CommandError(f"{flag} {text[:40]!r}: say {also}a number and s, m, h or d, as in 10m")
    return seconds
