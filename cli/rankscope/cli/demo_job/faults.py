"""The faults of the demo's job, and their syntax on the command line."""

from __future__ import annotations

from dataclasses import dataclass

NONE = "none"
SLOW_RANK = "slow-rank"
SLOW_INPUT = "slow-input"
SLOW_NETWORK = "slow-network"
STAGE_IMBALANCE = "stage-imbalance"
HANG = "hang"
STARVED = "starved"

# Which options each fault takes.
OPTIONS: dict[str, tuple[str, ...]] = {
    NONE: (),
    SLOW_RANK: ("rank", "delay"),
    SLOW_INPUT: ("rank",),
    SLOW_NETWORK: (),
    STAGE_IMBALANCE: (),
    HANG: ("rank",),
    STARVED: ("rank",),
}
KINDS = tuple(OPTIONS)

DEFAULT_RANK = 2
DEFAULT_DELAY_MS = 40.0
# A longer delay leaves too few steps in a window for a verdict.
MAX_DELAY_MS = 1000.0


class FaultError(ValueError):
    """A fault that is not available, with those that are."""


@dataclass(frozen=True)
class Fault:
    """One fault. `rank` is None if no single rank is to blame or the default is meant (see `for_ranks`)."""

    kind: str = NONE
    rank: int | None = None
    delay_ms: float | None = None

    @property
    def spec(self) -> str:
        """The fault as spelled on the command line; `parse_fault` reads it."""
        options = []
        if self.rank is not None:
            options.append(f"rank={self.rank}")
        if self.delay_ms is not None:
            options.append(f"delay={self.delay_ms:g}")
        return f"{self.kind}:{','.join(options)}" if options else self.kind

    @property
    def is_pipeline(self) -> bool:
        return self.kind == STAGE_IMBALANCE

    def for_ranks(self, ranks: int) -> Fault:
        """The same fault with defaults for a job of that many ranks; raises FaultError if it does not fit."""
        if not 2 <= ranks <= 16:
            raise FaultError(f"--world-size {ranks}: the demo runs 2 to 16 ranks")
        if self.is_pipeline and (ranks < 4 or ranks % 2):
            raise FaultError(
                f"--world-size {ranks}: {STAGE_IMBALANCE} has two stages of equal size: take an even number from 4"
            )
        rank = self.rank
        if "rank" in OPTIONS[self.kind]:
            if rank is None:
                rank = min(DEFAULT_RANK, ranks - 1)
            if rank >= ranks:
                raise FaultError(f"fault '{self.spec}': the job has ranks 0 to {ranks - 1}")
        return Fault(self.kind, rank, self.delay_ms)


def parse_fault(spec: str) -> Fault:
    """Reads `kind` or `kind:option=value,…`."""
    kind, _, option_text = spec.strip().partition(":")
    if kind not in OPTIONS:
        raise FaultError(f"unknown fault '{kind}'; choose one of {', '.join(KINDS)}")
    values: dict[str, str] = {}
    for option in option_text.split(",") if option_text else ():
        name, equals, value = (part.strip() for part in option.partition("="))
        if name not in OPTIONS[kind]:
            allowed = " and ".join(f"'{each}='" for each in OPTIONS[kind]) or "no options"
            raise FaultError(f"fault '{spec}': unknown option '{name}'; {kind} takes {allowed}")
        if not equals or not value:
            raise FaultError(f"fault '{spec}': '{name}' needs a value, as in '{name}={DEFAULT_RANK}'")
        if name in values:
            raise FaultError(f"fault '{spec}': '{name}' is given twice")
        values[name] = value
    rank = _rank(spec, values["rank"]) if "rank" in values else None
    delay_ms = None
    if kind == SLOW_RANK:
        delay_ms = _delay(spec, values["delay"]) if "delay" in values else DEFAULT_DELAY_MS
    return Fault(kind, rank, delay_ms)


def _rank(spec: str, text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise FaultError(f"fault '{spec}': rank '{text}' is not a whole number from 0")
    return int(text)


def _delay(spec: str, text: str) -> float:
    try:
        delay_ms = float(text)
    except ValueError:
        raise FaultError(f"fault '{spec}': delay '{text}' is not a number of milliseconds") from None
    if not 0 < delay_ms <= MAX_DELAY_MS:
        raise FaultError(f"fault '{spec}': delay must be above 0 and at most {MAX_DELAY_MS:g} milliseconds")
    return delay_ms
