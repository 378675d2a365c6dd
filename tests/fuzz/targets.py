"""The targets by name. A module `target_<name>` has `SEEDS` (real bytes) and `run(data)`, which calls the parser and
asserts what must hold for any input; for inputs with a structure it has `mutator(plain)`. `TOKENS`, `CPU_SECONDS` and
`SIZE_LIMIT` are optional."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from tests.fuzz.mutating import SIZE_LIMIT, Mutator

HERE = Path(__file__).resolve().parent
SEEDS = HERE / "seeds"
REGRESSIONS = HERE / "regressions"
# Of a healthy machine for one input; what takes longer has a cost that grows faster than the input.
CPU_SECONDS = 1.0


class Mutates(Protocol):
    def mutate(self, data: bytes, other: bytes) -> bytes: ...


@dataclass(frozen=True)
class Target:
    name: str
    run: Callable[[bytes], None]
    seeds: Sequence[bytes]
    make_mutator: Callable[[Mutator], Mutates]
    tokens: Sequence[bytes]
    cpu_seconds: float
    size_limit: int


def names() -> list[str]:
    return sorted(path.stem.removeprefix("target_") for path in HERE.glob("target_*.py"))


def load(name: str) -> Target:
    """Raises ImportError where something that the parser needs is not installed."""
    module = importlib.import_module(f"tests.fuzz.target_{name}")
    return Target(
        name=name,
        run=module.run,
        seeds=[*module.SEEDS, *regressions(name)],
        make_mutator=getattr(module, "mutator", lambda plain: plain),
        tokens=getattr(module, "TOKENS", ()),
        cpu_seconds=getattr(module, "CPU_SECONDS", CPU_SECONDS),
        size_limit=getattr(module, "SIZE_LIMIT", SIZE_LIMIT),
    )


def recorded(name: str) -> list[bytes]:
    """Real bytes that `python -m tests.fuzz.recording` left."""
    return [path.read_bytes() for path in sorted((SEEDS / name).glob("*"))]


def regressions(name: str) -> list[bytes]:
    """Inputs that once broke something, or reach far."""
    return [path.read_bytes() for path in sorted((REGRESSIONS / name).glob("*"))]
