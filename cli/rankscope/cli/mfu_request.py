"""The arguments of `rankscope mfu`: options to numbers, or a one-line error."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path

from rankscope.analysis.models.device_peaks import Peak, find_peak
from rankscope.analysis.models.mfu import (
    Recompute,
    TokenFlops,
    Utilisation,
    declared_token_flops,
    palm_token_flops,
    utilisation,
)
from rankscope.analysis.models.model_config import ConfigError, read_config
from rankscope.analysis.models.model_shape import Counting, ModelShape, count_flops

_POWERS = {"": 0, "K": 3, "M": 6, "B": 9, "G": 9, "T": 12}
_QUANTITY = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)(?:e([+-]?[0-9]{1,4}))?\s*([KMBGT]?)", re.IGNORECASE)
MAX_CONFIG_BYTES = 16 * 2**20
_MODEL_OPTIONS = ("params", "model_config", "flops_per_token", "flops_per_step")


# Numbers as users write them: 8.03e9, 8B, 540e9.


class QuantityError(ValueError):
    """Names the option, its value and what is accepted."""


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


@dataclass(frozen=True)
class Asked:
    shape: ModelShape | None  # from --model-config
    parameters: float | None
    sequence: int | None
    flops: TokenFlops | None  # None: a config without a sequence length, or FLOPs of a step without its tokens
    tokens_per_second: float | None
    gpus: int
    peak: Peak | None
    recompute: Recompute
    counting: Counting | None  # None: declared
    causal: bool
    used: Utilisation | None  # None: nothing says how fast it runs


def understand(arguments: argparse.Namespace) -> Asked:
    """Raises QuantityError, PeakError, ConfigError or OSError."""
    given = [name for name in _MODEL_OPTIONS if getattr(arguments, name) is not None]
    if len(given) != 1:
        said = " and ".join(map(_option, given)) + " exclude each other" if given else "nothing says what the model is"
        raise QuantityError(f"{said}; give one of {', '.join(map(_option, _MODEL_OPTIONS))}")
    shape = None if arguments.model_config is None else read_shape(arguments.model_config)
    sequence = None if arguments.sequence is None else read_count("--sequence", arguments.sequence, "8192")
    recompute = Recompute(arguments.recompute)
    gpus = read_count("--gpus", arguments.gpus, "64")
    peak = _peak(arguments)
    step_seconds, tokens_per_step, tokens_per_second = _speed(arguments)
    counting = None
    # The unit of work and its rate: tokens per second, or steps where only their FLOPs are declared.
    per_second = tokens_per_second
    flops: TokenFlops | None
    if arguments.flops_per_step is not None:
        if step_seconds is None:
            raise QuantityError("--flops-per-step: needs --step-seconds")
        counted = declared_token_flops(read_quantity("--flops-per-step", arguments.flops_per_step, "3.2e16"))
        flops = None if tokens_per_step is None else declared_token_flops(counted.model / tokens_per_step)
        per_second = 1 / step_seconds
    else:
        if step_seconds is not None and tokens_per_step is None:
            raise QuantityError("--step-seconds: needs --tokens-per-step")
        if arguments.flops_per_token is not None:
            flops = declared_token_flops(read_quantity("--flops-per-token", arguments.flops_per_token, "6.1e10"))
        elif shape is not None:
            counting = Counting(arguments.counting)
            flops = None if sequence is None else count_flops(shape, sequence, counting, causal=arguments.causal)
        else:
            counting = Counting.PALM
            flops = _palm(arguments, sequence)
        if flops is None and per_second is not None:
            raise QuantityError("--sequence: missing; the FLOPs of a token depend on how long its sequence is")
        counted = flops or TokenFlops(0, 0)
    if recompute is Recompute.SELECTIVE and counted.attention is None:
        raise QuantityError(
            "--recompute selective: declared FLOPs do not tell attention apart; give --params or --model-config"
        )
    if per_second is not None and peak is None:
        raise QuantityError("nothing says what the devices could do; give --gpu NAME or --peak-tflops P")
    used = None
    if per_second is not None and peak is not None:
        used = utilisation(counted, per_second, gpus, peak.flops_per_second, recompute)
    parameters = None if arguments.params is None else read_quantity("--params", arguments.params, "8.03B")
    return Asked(
        shape, parameters, sequence, flops, tokens_per_second, gpus, peak, recompute, counting, arguments.causal, used
    )


def read_shape(path: Path) -> ModelShape:
    with path.open("rb") as file:
        data = file.read(MAX_CONFIG_BYTES + 1)
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path}: more than {MAX_CONFIG_BYTES >> 20} MiB; a config.json is a few kilobytes")
    try:
        config = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({str(error)[:80]})") from None
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: not a JSON object but a {type(config).__name__}")
    try:
        return read_config(config)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _palm(arguments: argparse.Namespace, sequence: int | None) -> TokenFlops:
    parameters = read_quantity("--params", arguments.params, "8.03B")
    for option in ("layers", "width", "sequence"):
        if getattr(arguments, option) is None:
            raise QuantityError(f"--{option}: missing; --params needs --layers, --width and --sequence")
    layers = read_count("--layers", arguments.layers, "32")
    width = read_count("--width", arguments.width, "4096")
    return palm_token_flops(parameters, layers, width, sequence or 0, causal=arguments.causal)


def _speed(arguments: argparse.Namespace) -> tuple[float | None, float | None, float | None]:
    """Seconds per step, tokens per step and tokens per second, as far as given."""
    step_seconds = _optional(arguments, "step_seconds", "4.4")
    tokens_per_step = _optional(arguments, "tokens_per_step", "524288")
    tokens_per_second = _optional(arguments, "tokens_per_second", "2904")
    if tokens_per_second is not None and (step_seconds or tokens_per_step):
        raise QuantityError("--tokens-per-second: exclude each other: this, and --step-seconds with --tokens-per-step")
    if tokens_per_step is not None and step_seconds is None:
        raise QuantityError("--tokens-per-step: needs --step-seconds")
    if step_seconds is not None and tokens_per_step is not None:
        tokens_per_second = tokens_per_step / step_seconds
    return step_seconds, tokens_per_step, tokens_per_second


def _peak(arguments: argparse.Namespace) -> Peak | None:
    if arguments.peak_tflops is not None:
        if arguments.dtype is not None:
            raise QuantityError("--dtype: has no meaning with --peak-tflops, which is the peak itself")
        return Peak("", "", read_quantity("--peak-tflops", arguments.peak_tflops, "989"), "")
    return None if arguments.gpu is None else find_peak(arguments.gpu, arguments.dtype)


def _optional(arguments: argparse.Namespace, name: str, example: str) -> float | None:
    text = getattr(arguments, name)
    return None if text is None else read_quantity(_option(name), text, example)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
