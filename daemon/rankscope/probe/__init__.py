"""The probe: runs inside the training process, so it is standard library only, runs on Python 3.9, and must never
break, slow or change the user's program. It writes records into a sealed memfd ring, where the daemon may leave a
command for a capture; it reads nothing else from anyone and imports nothing else of ours.

A script may call `step()`, `declare()` and `count_tokens()`. They do nothing when the probe is off, so the calls
can stay in the code."""

from __future__ import annotations

from typing import Any, Callable, Dict, Mapping, Optional, Union

# Filled by declare(), read by the probe about once a second; set by the probe when it is on.
_declared: Dict[str, Any] = {}
_marker: Optional[Callable[[], None]] = None
_tokens: Optional[float] = None  # since the process began; None before the first call


def step() -> None:
    """Mark the end of a training step. Needed only where no torch optimizer steps; from the first call on, only these
    calls mark steps."""
    if _marker is not None:
        _marker()


def declare(
    *,
    flops_per_step: Optional[float] = None,
    params: Optional[float] = None,
    layers: Optional[float] = None,
    width: Optional[float] = None,
    sequence: Optional[float] = None,
    batch: Optional[float] = None,
    parallelism: Union[str, Mapping[str, int], None] = None,
) -> None:
    """Say what cannot be measured: the whole job's model FLOPs per optimizer step, or the model's shape (`batch` counts
    the sequences of the whole job in one step), and the parallel layout ("pp=2,dp=2", the last varying fastest).
    RANKSCOPE_FLOPS_PER_STEP, RANKSCOPE_MODEL and RANKSCOPE_PARALLELISM in the environment win over these."""
    given = {
        "flops_per_step": flops_per_step,
        "params": params,
        "layers": layers,
        "width": width,
        "sequence": sequence,
        "batch": batch,
        "parallelism": parallelism,
    }
    _declared.update({name: value for name, value in given.items() if value is not None})


def count_tokens(tokens: float) -> None:
    """Say how many tokens this rank works on, as often as there are any: for a mixture of experts, the rows that its
    experts received. A rank that works longer because it got more tokens is not slow. Takes a number, not a tensor:
    reading one would wait for the device."""
    global _tokens
    if isinstance(tokens, (int, float)) and 0 <= tokens < 1e18:
        _tokens = (_tokens or 0.0) + tokens
