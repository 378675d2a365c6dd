"""In which steps NCCL is asked for its times: in all, where that costs nothing that can be measured; else in a few.

What it costs depends on NCCL's version and on the links, so it is measured in the running job: in a trial, blocks of
steps with it and without it take turns. All follows from the number of the step and from how long steps take, which are
the same on all ranks."""

from __future__ import annotations

import math
from statistics import median
from typing import Dict, List

# Steps from one trial to the next. The first steps of a job compile, allocate and fill queues.
ROUND = 4096
FIRST_STEP = 64
BLOCK = 8
PAIRS = 24
# What it may cost. Less cannot be measured either.
COST_BUDGET_RATIO = 0.003
# A cost counts from this many standard errors on. Neighbouring steps are alike, so the error is larger than it seems.
ERRORS_NEEDED = 3.0
# Where it costs something: a block in so many.
RAREST = 64
MAD_TO_SIGMA = 1.4826
MEDIAN_TO_MEAN_ERROR = 1.2533


class Turns:
    def __init__(self) -> None:
        self.cost_ratio = math.nan  # of a step, as measured last
        self.every = 1  # of so many blocks, one is asked
        self._blocks: Dict[int, List[float]] = {}  # of the trial that is under way: seconds of steps

    def is_on(self, step: int) -> bool:
        """Steps count from 1."""
        block = self._trial_block(step)
        if block >= 0:
            return block % 4 in (0, 3)  # so that a drift cancels out
        return step // BLOCK % self.every == 0

    def is_whole(self, step: int) -> bool:
        """Whether all collectives of a step are known: NCCL hears of a change only with the next one."""
        return self.is_on(step) and self.is_on(step - 1)

    def observe(self, step: int, seconds: float) -> None:
        """A step that the device has finished."""
        block = self._trial_block(step)
        # NCCL hears of a turn in the first step of its block.
        if block >= 0 and (step - FIRST_STEP) % BLOCK and seconds > 0:
            self._blocks.setdefault(block, []).append(seconds)
        elif block < 0 and self._blocks:
            self._conclude()

    @staticmethod
    def _trial_block(step: int) -> int:
        """-1 outside of a trial."""
        block = (step % ROUND - FIRST_STEP) // BLOCK
        return block if 0 <= block < 2 * PAIRS else -1

    def _conclude(self) -> None:
        blocks, self._blocks = self._blocks, {}
        pairs = [(2 * pair + pair % 2, 2 * pair + 1 - pair % 2) for pair in range(PAIRS)]  # with it, without it
        ratios = [median(blocks[on]) / median(blocks[off]) for on, off in pairs if on in blocks and off in blocks]
        if len(ratios) < PAIRS // 2:
            return  # too many steps were not timed
        self.cost_ratio = median(ratios) - 1.0
        spread = MAD_TO_SIGMA * median(abs(ratio - 1.0 - self.cost_ratio) for ratio in ratios)
        error = MEDIAN_TO_MEAN_ERROR * spread / math.sqrt(len(ratios))
        self.every = 1
        if self.cost_ratio - ERRORS_NEEDED * error > COST_BUDGET_RATIO:
            while self.every < RAREST and self.cost_ratio / self.every > COST_BUDGET_RATIO:
                self.every *= 2
