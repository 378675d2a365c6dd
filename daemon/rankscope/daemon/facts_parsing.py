"""The probe's facts: JSON written by a process we do not trust, into checked values."""

from __future__ import annotations

import json
import math

from rankscope.daemon.rings import RingError
from rankscope.daemon.samples import ProbeFacts

TEXT_LENGTH = 128
RANKS_AT_MOST = 10_000_000
FLOPS_AT_MOST = 1e30


def parse_facts(text: bytes) -> ProbeFacts:
    """A field of the wrong type or range is left out; text that is no JSON object raises RingError."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RingError("corrupt", f"the ring's facts are not JSON: {str(error)[:80]}") from error
    if not isinstance(said, dict):
        raise RingError("corrupt", "the ring's facts are not a JSON object")
    return ProbeFacts(
        rank=_index(said.get("rank")),
        world_size=_index(said.get("world_size")),
        pipeline=_index(said.get("pipeline")),
        tensor=_index(said.get("tensor")),
        data=_index(said.get("data")),
        model_flops_per_step=_positive(said.get("model_flops_per_step")),
        peak_flops_per_second=_positive(said.get("peak_flops_per_second")),
        device_name=_text(said.get("device_name")),
        torch_version=_text(said.get("torch_version")),
    )


def _index(value: object) -> int | None:
    good = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= RANKS_AT_MOST
    return value if good and isinstance(value, int) else None


def _positive(value: object) -> float | None:
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Compared before conversion: an integer of thousands of digits is valid JSON and no float.
    return float(value) if 0 < value < FLOPS_AT_MOST and math.isfinite(value) else None


def _text(value: object) -> str | None:
    if not isinstance(value, str):
        return None
    return "".join(character for character in value if character.isprintable())[:TEXT_LENGTH] or None
