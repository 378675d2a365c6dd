"""What being watched costs a job: everything on against everything off, taking turns within one run of one job.

The job is a 2-rank DDP over gloo that fills two cores, so every microsecond Rankscope uses is taken from it. "On" is
the probe in both ranks and a real daemon with all its collectors, restarted for each block and given time to settle;
"off" is no daemon, and the probe taken out of the processes. A second, faster alternation has the probe alone."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.reporting import Row, between
from benchmarks.running import BenchmarkError, Control, Job, await_ranks, daemon, job
from benchmarks.statistics import Ratio, paired_ratio

PAIRS = 12
BLOCK_SECONDS = 8.0
SETTLING_SECONDS = 2.0
PROBE_PAIRS = 30
PROBE_BLOCK_SECONDS = 0.75
PROBE_SETTLING_SECONDS = 0.1
RANKS = 2
# Wider than this, the interval says nothing about one per cent.
INTERVAL_AT_MOST = 0.02


@dataclass(frozen=True)
class Block:
    on: bool
    start_ns: int
    end_ns: int


def measure(pairs: int = PAIRS, probe_pairs: int = PROBE_PAIRS) -> list[Row]:
    with job("heavy", RANKS) as running:
        probe_blocks = list(_alternate_probe(running, probe_pairs))
        blocks = list(_alternate_everything(running, pairs))
        running.ranks.check()
        times = np.load(running.times_path(0), mmap_mode="r")
        ends, lengths = (np.array(column) for column in times[times[:, 0] > 0].T)
    everything = _Compared.of(blocks, ends, lengths)
    probe = _Compared.of(probe_blocks, ends, lengths)
    step_ms = float(np.median(everything.off_medians)) / 1e6
    return [
        everything.row(f"overhead: probe + daemon, median step ({step_ms:.1f} ms)", target=1.01),
        everything.mean_row("overhead: probe + daemon, mean step"),
        probe.row("overhead: probe alone, median step"),
    ]


def _alternate_probe(running: Job, pairs: int) -> Iterator[Block]:
    for on in _orders(pairs):
        running.control.set(Control.PROBED if on else Control.PLAIN)
        time.sleep(PROBE_SETTLING_SECONDS)
        yield _block(on, PROBE_BLOCK_SECONDS)


def _alternate_everything(running: Job, pairs: int) -> Iterator[Block]:
    for on in _orders(pairs):
        running.ranks.check()
        running.control.set(Control.PROBED if on else Control.PLAIN)
        with ExitStack() as stack:
            if on:
                await_ranks(stack.enter_context(daemon()), running)
            time.sleep(SETTLING_SECONDS)
            yield _block(on, BLOCK_SECONDS)


def _orders(pairs: int) -> Iterator[bool]:
    """off on, on off, off on, …: a drift of the machine favours neither."""
    for pair in range(pairs):
        yield from (False, True) if pair % 2 == 0 else (True, False)


def _block(on: bool, seconds: float) -> Block:
    start_ns = time.monotonic_ns()
    time.sleep(seconds)
    return Block(on, start_ns, time.monotonic_ns())


@dataclass(frozen=True)
class _Compared:
    on_medians: Sequence[float]
    off_medians: Sequence[float]
    on_means: Sequence[float]
    off_means: Sequence[float]

    @staticmethod
    def of(blocks: Sequence[Block], ends_ns: npt.NDArray[np.int64], lengths_ns: npt.NDArray[np.int64]) -> _Compared:
        def steps(block: Block) -> npt.NDArray[np.int64]:
            return lengths_ns[(ends_ns - lengths_ns >= block.start_ns) & (ends_ns <= block.end_ns)]

        if not all(steps(block).size for block in blocks):
            raise BenchmarkError("a block went by without a whole step; this machine is too busy to measure on")
        on = [steps(block) for block in blocks if block.on]
        off = [steps(block) for block in blocks if not block.on]
        return _Compared(
            [float(np.median(block)) for block in on],
            [float(np.median(block)) for block in off],
            [float(block.mean()) for block in on],
            [float(block.mean()) for block in off],
        )

    def row(self, name: str, target: float | None = None) -> Row:
        raw = {"on_median_ns": self.on_medians, "off_median_ns": self.off_medians}
        return _ratio_row(name, paired_ratio(self.on_medians, self.off_medians), target, raw)

    def mean_row(self, name: str) -> Row:
        raw = {"on_mean_ns": self.on_means, "off_mean_ns": self.off_means}
        return _ratio_row(name, paired_ratio(self.on_means, self.off_means), None, raw)


def _ratio_row(name: str, ratio: Ratio, target: float | None, raw: dict[str, Sequence[float]]) -> Row:
    noisy = target is not None and ratio.high - ratio.low > INTERVAL_AT_MOST
    return Row(name, ratio.ratio, "×", between(ratio.low, ratio.high, 4), target, 4, raw, noisy)
