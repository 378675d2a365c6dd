"""Reads the figures that DistributedDataParallel keeps about itself, rarely enough to cost under 0.1 % of a step."""

from __future__ import annotations

import functools
import math
import time
import weakref
from typing import Any, Dict, List, Optional, Tuple

Figures = Dict[str, float]  # the keys of _NAMES, or none
NOT_MEASURED: Figures = {}

COST_BUDGET_RATIO = 0.001
NEVER = 1 << 62
# DDP decides twice whether an iteration is measured: while it runs, and when the next one begins. If the rate changed
# between the two, it publishes the times of an older iteration. The change may come in the middle of a step.
DOUBTFUL_BOUNDARIES = 2
# What DDP spends on a sampled step, by CUDA events that it waits for (measured on an H200). Where the host loses its
# run-ahead by it, such a step of 6 ms took 2.3 ms longer. Sampling so rarely that this stays under 0.3 % (one step in
# 150) delayed alarms by 6 s and missed one: the rate follows a slow job only after it has become slow.
CUDA_SAMPLE_SECONDS = 0.0002
# As the record has them, in DDP's words.
_FORWARD_TIME = "forward_compute_time"
_NAMES = {
    "ddp_forward_seconds": _FORWARD_TIME,
    "ddp_backward_seconds": "backward_compute_time",
    "ddp_communication_seconds": "backward_comm_time",
    "ddp_overlap_seconds": "backward_compute_comm_overlap_time",
}


class Watched:
    __slots__ = ("iteration", "reference")

    def __init__(self, model: Any) -> None:
        self.reference = weakref.ref(model)
        self.iteration = 0  # whose figures were read last


class DdpSampler:
    """DDP measures an iteration when its number is a multiple of the sampling rate (and the first ten), and publishes
    the figures when the next forward begins: what is read at a boundary describes the step before."""

    def __init__(self) -> None:
        self.models: List[Watched] = []
        self._rate = 0  # 0: DDP's own, until tuned
        self._read_seconds = 40e-6
        self._next_read = 0
        self._doubtful_until = 0  # the boundary
        self._stale_reads = 0
        self._fresh: Optional[Tuple[int, int]] = None  # boundary and iteration of the last new figures
        self._ahead = NEVER  # by how many the number of a step exceeds that of its iteration
        self.step: Optional[int] = None  # which the figures last read are of, where that is known

    def watch(self, ddp_class: Any) -> None:
        original = ddp_class.__init__
        models = self.models

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for the class' own
            original(self, *args, **kwargs)
            models.append(Watched(self))

        ddp_class.__init__ = __init__

    def read(self, boundary: int) -> Figures:
        """New figures of all models together, or NOT_MEASURED when none are due."""
        if boundary < self._next_read:
            return NOT_MEASURED
        start = time.perf_counter()
        total = dict.fromkeys(_NAMES, 0.0)
        newest = 0
        for watched in self.models:
            # A model whose parameters are all left out of synchronisation has no logger.
            logger = getattr(watched.reference(), "logger", None)
            if logger is None:
                continue
            figures = logger._get_ddp_logging_data().ints_map
            iteration = figures.get("iteration", 0)
            if iteration == watched.iteration or _FORWARD_TIME not in figures:
                continue
            watched.iteration = iteration
            newest = newest or iteration
            for name, time_of_ddp in _NAMES.items():
                total[name] += max(0, figures.get(time_of_ddp, 0)) * 1e-9
        # The least of late: a read during which the thread lost its CPU says nothing about what reading costs, and
        # would leave a rank on a busy machine without figures.
        self._read_seconds = min(time.perf_counter() - start, 1.02 * self._read_seconds)
        if boundary <= self._doubtful_until:
            self._next_read = boundary + 1
            return NOT_MEASURED
        if not newest:
            self._expect_after_stale(boundary)
            return NOT_MEASURED
        scale = self._expect_after_fresh(boundary, newest)
        # Figures are there from the boundary after their step on, and a read may come later, never sooner.
        self._ahead = min(self._ahead, boundary - 1 - newest)
        self.step = newest + self._ahead if scale == 1.0 else None
        return {name: seconds * scale for name, seconds in total.items()}

    def _expect_after_fresh(self, boundary: int, iteration: int) -> float:
        """Plan the next read; returns how many DDP iterations make one step (gradient accumulation without no_sync)."""
        per_step = 1.0
        if self._fresh is not None and boundary > self._fresh[0] and iteration > self._fresh[1]:
            per_step = max(1.0, round((iteration - self._fresh[1]) / (boundary - self._fresh[0])))
        self._fresh = (boundary, iteration)
        self._stale_reads = 0
        next_iteration = (iteration // max(self._rate, 1) + 1) * max(self._rate, 1)
        self._next_read = boundary + max(1, math.ceil((next_iteration - iteration) / per_step))
        return min(per_step, 1024.0)

    def _expect_after_stale(self, boundary: int) -> None:
        # Off the beat: look at every boundary until in step again, but not forever (a model that is no longer
        # trained).
        self._stale_reads += 1
        searching = self._stale_reads <= 2 * self._rate + 16
        self._next_read = boundary + (1 if searching else 8 * max(self._rate, 1))

    def tune(self, step_seconds: float, boundary: int) -> None:
        """Choose the rate for steps of this length. Called about once a second, after this boundary."""
        self.models[:] = [watched for watched in self.models if watched.reference() is not None]
        alive: List[Any] = [watched.reference() for watched in self.models]
        alive = [model for model in alive if hasattr(model, "logger")]
        if not alive or step_seconds <= 0:
            return
        on_device = sum(_is_on_cuda(model) for model in alive)
        cost_seconds = self._read_seconds + on_device * CUDA_SAMPLE_SECONDS
        rate = min(10_000, max(1, math.ceil(cost_seconds / (COST_BUDGET_RATIO * step_seconds))))
        # What a program does in every tenth or hundredth step must not fall between the samples, nor into each.
        while math.gcd(rate, 10) != 1:
            rate += 1
        # Small changes are noise, and every change costs a search for the new beat.
        if self._rate and rate != 1 and 0.67 < rate / self._rate < 1.5:
            return
        if rate != self._rate:
            self._rate = rate
            self._next_read = boundary + 1
            self._doubtful_until = boundary + DOUBTFUL_BOUNDARIES
            for model in alive:
                model._set_ddp_runtime_logging_sample_rate(rate)


def _is_on_cuda(model: Any) -> bool:
    return any(parameter.is_cuda for parameter in list(model.parameters())[:1])
