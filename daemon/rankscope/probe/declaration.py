"""What the user says in the environment or through declare(): parallel layout and FLOPs. Pure: text in, numbers out.
A bad value raises BadValueError, whose text names the variable, the value and an example."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Mapping, Optional, Tuple

_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12, "P": 1e15}
_MODEL_NAMES = ("params", "layers", "width", "sequence", "batch")
_AXES = {"pp": "pipeline", "tp": "tensor", "dp": "data"}
# Axes that take part in the layout but make no cohort.
_OTHER_AXES = ("cp", "ep", "sp")

FLOPS_EXAMPLE = "RANKSCOPE_FLOPS_PER_STEP=4.2e18"
PEAK_EXAMPLE = "RANKSCOPE_PEAK_FLOPS=989T"
MODEL_EXAMPLE = "RANKSCOPE_MODEL=params=7B,layers=32,width=4096,sequence=4096,batch=1024"
PARALLELISM_EXAMPLE = "RANKSCOPE_PARALLELISM=pp=2,dp=4"


class BadValueError(ValueError):
    def __init__(self, name: str, value: object, reason: str, example: str) -> None:
        super().__init__("{}={!s:.80}: {}; example: {}".format(name, value, reason, example))


def quantity(name: str, value: object, example: str) -> float:
    """7e9, "7e9", "7B", "989T"."""
    text = str(value).strip().replace("_", "")
    try:
        number = float(text[:-1]) * _SUFFIXES[text[-1:].upper()] if text[-1:].upper() in _SUFFIXES else float(text)
    except ValueError:
        raise BadValueError(name, value, "not a number", example) from None
    if not (math.isfinite(number) and 0 < number < 1e30):
        raise BadValueError(name, value, "must be above zero and finite", example)
    return number


def pairs(name: str, text: str, example: str) -> List[Tuple[str, str]]:
    """ "a=1,b=2" in the order given."""
    found = []
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals or not key.strip() or not value.strip():
            raise BadValueError(name, text, "{!r:.40} is not name=value".format(part.strip()), example)
        found.append((key.strip().lower(), value.strip()))
    if len({key for key, _ in found}) != len(found):
        raise BadValueError(name, text, "a name appears twice", example)
    return found


def model_flops(name: str, shape: Mapping[str, Any]) -> float:
    """The whole job's FLOPs per optimizer step by PaLM's appendix B: (6 N + 12 L width sequence) per token. Without
    layers and width the attention term is left out."""
    unknown = sorted(set(shape) - set(_MODEL_NAMES))
    if unknown:
        raise BadValueError(name, unknown[0], "unknown name; known are " + ", ".join(_MODEL_NAMES), MODEL_EXAMPLE)
    missing = [key for key in ("params", "sequence", "batch") if key not in shape]
    if missing:
        raise BadValueError(name, ",".join(shape), missing[0] + " is missing", MODEL_EXAMPLE)
    numbers = {key: quantity(name + ": " + key, value, MODEL_EXAMPLE) for key, value in shape.items()}
    attention = 12 * numbers.get("layers", 0.0) * numbers.get("width", 0.0) * numbers["sequence"]
    return (6 * numbers["params"] + attention) * numbers["sequence"] * numbers["batch"]


def flops_from_environment(environment: Mapping[str, str]) -> Optional[float]:
    if "RANKSCOPE_FLOPS_PER_STEP" in environment:
        return quantity("RANKSCOPE_FLOPS_PER_STEP", environment["RANKSCOPE_FLOPS_PER_STEP"], FLOPS_EXAMPLE)
    if "RANKSCOPE_MODEL" in environment:
        name = "RANKSCOPE_MODEL"
        return model_flops(name, dict(pairs(name, environment[name], MODEL_EXAMPLE)))
    return None


def flops_declared(declared: Mapping[str, Any]) -> Optional[float]:
    if "flops_per_step" in declared:
        return quantity("declare(flops_per_step)", declared["flops_per_step"], "declare(flops_per_step=4.2e18)")
    shape = {key: declared[key] for key in _MODEL_NAMES if key in declared}
    return model_flops("declare()", shape) if shape else None


def coordinates(name: str, layout: object, rank: int, world_size: int) -> Dict[str, int]:
    """This rank's place. Sizes are in the order given and the last varies fastest: with pp=2,dp=4 rank 5 is pp 1, dp
    1."""
    given = layout.items() if isinstance(layout, Mapping) else pairs(name, str(layout), PARALLELISM_EXAMPLE)
    sizes = []
    for axis, value in given:
        if axis not in _AXES and axis not in _OTHER_AXES:
            known = ", ".join((*_AXES, *_OTHER_AXES))
            raise BadValueError(
                name, layout, "unknown axis {!r:.20}; known are {}".format(axis, known), PARALLELISM_EXAMPLE
            )
        size = quantity(name + ": " + axis, value, PARALLELISM_EXAMPLE)
        if size != int(size):
            raise BadValueError(name, layout, "{} is not a whole number".format(axis), PARALLELISM_EXAMPLE)
        sizes.append((axis, int(size)))
    product = math.prod(size for _, size in sizes)
    if product != world_size:
        reason = "the sizes multiply to {}, but the world size is {}".format(product, world_size)
        raise BadValueError(name, layout, reason, PARALLELISM_EXAMPLE)
    place, rest = {}, rank
    for axis, size in reversed(sizes):
        rest, place[axis] = divmod(rest, size)
    return {_AXES[axis]: index for axis, index in place.items() if axis in _AXES}


def mesh_coordinates(names: Tuple[str, ...], sizes: Tuple[int, ...], place: Tuple[int, ...]) -> Dict[str, int]:
    """From a DeviceMesh: several data axes (dp_replicate, dp_shard) make one data coordinate, the last varying
    fastest."""
    found: Dict[str, int] = {}
    for position, name in enumerate(names):
        axis = _axis_of(name.lower())
        if axis is not None:
            found[axis] = found.get(axis, 0) * sizes[position] + place[position]
    return found


def _axis_of(name: str) -> Optional[str]:
    if name.startswith(("pp", "pipe", "stage")):
        return "pipeline"
    if name.startswith(("tp", "tensor", "model")):
        return "tensor"
    if name.startswith(("dp", "ddp", "fsdp", "data", "replicate", "shard")):
        return "data"
    return None
