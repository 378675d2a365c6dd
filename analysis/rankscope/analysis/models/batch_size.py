"""Step time and memory by batch size, from a few measured batches.

A step takes a fixed time and a time per sample on the device, but no less than the host takes to launch it. Memory is a
fixed part and a part per sample. Both are lines with a floor, so one fit serves both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

# Above this, what the model says about other batches means nothing.
MAX_ERROR_RATIO = 0.10
# Of the device: for fragmentation, the CUDA context and the buffers of libraries. What the allocator has reserved and
# does not use is no measure of it: most is cache, which it gives back before it fails.
MARGIN_RATIO = 0.10
# Throughput is saturated where twice the batch brings less.
SATURATED_GAIN_RATIO = 0.05
MAX_BATCH = 1 << 30
# A point is bound by the host if the device works for less of its step.
_BUSY_RATIO = 0.9
# Growth below this is within the noise of a step.
_FLAT_RATIO = 0.02
# A line that misses by less needs no floor. Points on a floor differ by less.
_STRAIGHT_RATIO, _LEVEL_RATIO = 0.05, 0.10
_MAX_ROWS = 12
# A line through steps that differ by many orders of magnitude may come out at zero.
_MIN_STEP_US = 1e-3
_ROUNDING = 1e-9  # relative, of floating-point numbers


class BatchError(ValueError):
    """The points cannot be a measurement; the text says why, and the next step."""


@dataclass(frozen=True)
class Point:
    batch: int
    step_us: float
    device_us: float | None = None  # of the step, in which the device works
    memory_bytes: float | None = None  # at the peak

    @property
    def is_host_bound(self) -> bool | None:
        return None if self.device_us is None else self.device_us < _BUSY_RATIO * self.step_us


@dataclass(frozen=True)
class Line:
    """max(floor, fixed + per_sample · batch). Without growth there is a floor only."""

    fixed: float
    per_sample: float
    floor: float | None = None

    def at(self, batch: float) -> float:
        return max(self.floor or 0.0, self.fixed + self.per_sample * batch)

    @property
    def grows(self) -> bool:
        return self.per_sample > 0

    @property
    def knee(self) -> float | None:
        """The batch at which the line leaves its floor."""
        return (self.floor - self.fixed) / self.per_sample if self.floor is not None and self.grows else None


@dataclass(frozen=True)
class Check:
    """How well a line meets measurements that it was not made of: the largest error, and the batch that has it."""

    error_ratio: float
    batch: int

    @property
    def holds(self) -> bool:
        return self.error_ratio <= MAX_ERROR_RATIO


@dataclass(frozen=True)
class BatchModel:
    points: tuple[Point, ...]  # by batch
    step: Line
    step_check: Check | None  # None with two points, which every line meets
    memory: Line | None
    memory_check: Check | None
    memory_reason: str  # why there is no line; empty if there is one

    @property
    def host_us(self) -> tuple[float, float] | None:
        """The shortest and the longest step that the host bounds."""
        bound = [point.step_us for point in self.points if point.is_host_bound]
        return (min(bound), max(bound)) if bound else None

    @property
    def step_holds(self) -> bool:
        return self.step_check is None or self.step_check.holds

    @property
    def memory_holds(self) -> bool:
        return self.memory is not None and (self.memory_check is None or self.memory_check.holds)

    @property
    def holds(self) -> bool:
        return self.step_holds and (self.memory is None or self.memory_holds)

    def step_us(self, batch: float) -> float:
        return max(self.step.at(batch), _MIN_STEP_US)

    def samples_per_second(self, batch: float) -> float:
        return 1e6 * batch / self.step_us(batch)


@dataclass(frozen=True)
class Row:
    batch: int
    step_us: float
    samples_per_second: float
    gain_ratio: float | None  # of the throughput, against half the batch; None in the first row
    memory_bytes: float | None
    is_measured: bool


@dataclass(frozen=True)
class Answers:
    device_bytes: float | None
    usable_bytes: float | None  # without the margin
    largest_batch: int | None  # that fits; None if memory is not known, 0 if not even one sample fits
    largest_power_of_two: int | None
    host_bound_below: int | None  # batches below this take the same step
    saturated_at: int | None  # the batch from which doubling brings less than 5 %; None if the step does not grow
    best_batch: int | None  # of the rows, the smallest that is saturated, or the last that fits; None as above
    rows: tuple[Row, ...]  # the smallest batch, and doublings of it


def fit(points: Sequence[Point]) -> BatchModel:
    """Raises BatchError."""
    ordered = tuple(sorted(points, key=lambda point: point.batch))
    _verify(ordered)
    step = _fit_step(ordered)
    sized = tuple(point for point in ordered if point.memory_bytes is not None)
    memory, reason = _fit_memory(sized)
    return BatchModel(
        points=ordered,
        step=step,
        step_check=_check(ordered, step, _fit_step, _step_or_device),
        memory=memory,
        memory_check=None if memory is None else _check(sized, memory, lambda some: _fit_memory(some)[0], _memory),
        memory_reason=reason,
    )


def _verify(points: Sequence[Point]) -> None:
    for point in points:
        if not 0 < point.batch <= MAX_BATCH:
            raise BatchError(f"batch {point.batch}: a batch has 1 to {MAX_BATCH:,} samples; next step: correct it")
        for what, value in (("step", point.step_us), ("device time", point.device_us), ("memory", point.memory_bytes)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise BatchError(f"batch {point.batch}: its {what} is not a number above zero; next step: correct it")
    batches = [point.batch for point in points]
    twice = next((batch for batch in batches if batches.count(batch) > 1), None)
    if twice is not None:
        raise BatchError(f"batch {twice} is given twice; next step: give each batch once")
    if len(points) < 2:
        raise BatchError("one batch does not tell how the step grows; next step: measure a second, of twice the size")


def _fit_step(points: Sequence[Point]) -> Line:
    """Where a point is bound by the host, the line goes through the time of its device."""
    bound = [point.step_us for point in points if point.is_host_bound]
    if not bound:
        return _fit_line([(point.batch, point.step_us) for point in points])
    floor = float(np.median(bound))
    known = [pair for point in points if (pair := _device_pair(point, floor)) is not None]
    line = _straight(known) if len(known) > 1 else Line(floor, 0.0)
    return replace(line, floor=floor) if line.grows else Line(floor, 0.0, floor)


def _device_pair(point: Point, floor: float) -> tuple[int, float] | None:
    """None if the step says nothing about the device: it takes as long as the host, and no trace shows more."""
    if point.device_us is None and point.step_us <= (1 + _LEVEL_RATIO) * floor:
        return None
    return point.batch, _step_or_device(point)


def _fit_memory(points: Sequence[Point]) -> tuple[Line | None, str]:
    if len(points) < 2:
        return None, "memory is known of fewer than two batches"
    line = _fit_line([(point.batch, _memory(point)) for point in points])
    if line.grows:
        return line, ""
    return None, f"memory does not grow from batch {points[0].batch} to {points[-1].batch}"


def _memory(point: Point) -> float:
    return point.memory_bytes or 0.0


def _fit_line(pairs: Sequence[tuple[int, float]]) -> Line:
    """Batches and values. A floor is found only where two or more of the smallest batches lie on it: with one, every
    three points would have one."""
    line = _straight(pairs)
    if not line.grows:
        level = float(np.median([value for _, value in pairs]))
        return Line(level, 0.0, level)
    if len(pairs) < 3 or _worst(line, pairs).error_ratio <= _STRAIGHT_RATIO:
        return line
    found = [line]
    for level in range(2, len(pairs)):
        values = [value for _, value in pairs[:level]]
        if max(values) > (1 + _LEVEL_RATIO) * min(values):
            break
        # With one point above the floor, the line leaves it at the last that is on it.
        rest = _straight(pairs[level:] if len(pairs) - level >= 2 else pairs[level - 1 :])
        if rest.grows:
            found.append(replace(rest, floor=float(np.median(values))))
    return min(found, key=lambda one: _worst(one, pairs).error_ratio)


def _straight(pairs: Sequence[tuple[int, float]]) -> Line:
    """Least squares of relative errors, so that the smallest batch counts as much as the largest."""
    batch, value = np.array(pairs, dtype=np.float64).T
    if len(pairs) == 2:  # exactly
        slope = (value[1] - value[0]) / (batch[1] - batch[0])
        return _line(pairs, float(value[0] - slope * batch[0]), float(slope))
    columns = np.stack((np.ones_like(batch), batch), axis=1) / value[:, None]
    (fixed, per_sample), *_ = np.linalg.lstsq(columns, np.ones_like(batch), rcond=None)
    return _line(pairs, float(fixed), float(per_sample))


def _line(pairs: Sequence[tuple[int, float]], fixed: float, per_sample: float) -> Line:
    (first, value), (last, _) = pairs[0], pairs[-1]
    flat = per_sample * (last - first) <= _FLAT_RATIO * value
    return Line(0.0 if abs(fixed) < _ROUNDING * value else fixed, 0.0 if flat else per_sample)


def _worst(line: Line, pairs: Sequence[tuple[int, float]]) -> Check:
    errors = [abs(line.at(batch) / value - 1) for batch, value in pairs]
    worst = int(np.argmax(errors))
    return Check(errors[worst], pairs[worst][0])


def _check(
    points: Sequence[Point],
    line: Line,
    fit_points: Callable[[Sequence[Point]], Line | None],
    value_of: Callable[[Point], float],
) -> Check | None:
    """Each point is predicted from all, and from the others. With a floor that no trace shows, only where three points
    or more are above it: fewer do not tell where the line leaves it."""
    is_guessed = line.grows and line.floor is not None and not any(point.is_host_bound for point in points)
    if len(points) < (4 if is_guessed else 3):
        return None
    above = [point for point in points if value_of(point) > (1 + _LEVEL_RATIO) * (line.floor or 0.0)]
    left_out = points if not is_guessed else above if len(above) > 2 else []
    found = []
    for point in points:
        lines = [line]
        if point in left_out:
            lines.append(fit_points([other for other in points if other is not point]) or line)
        for one in lines:
            of_device = replace(one, floor=None) if point.is_host_bound and one.grows else one
            found.append(_worst(of_device, [(point.batch, value_of(point))]))
    return max(found, key=lambda one: one.error_ratio)


def _step_or_device(point: Point) -> float:
    """What grows with the batch. The host's time wanders from run to run."""
    return point.device_us if point.is_host_bound and point.device_us is not None else point.step_us


def answer(model: BatchModel, device_bytes: float | None = None) -> Answers:
    """What rests on a model that does not hold is left out."""
    usable = None if device_bytes is None else device_bytes * (1 - MARGIN_RATIO)
    memory = model.memory if model.memory_holds else None
    largest = None if usable is None or memory is None else _largest(memory, usable)
    saturated = _saturated(model) if model.step.grows and model.step_holds else None
    rows = _rows(model, memory, largest, saturated) if model.step_holds else ()
    knee = model.step.knee if model.step_holds else None
    best = next((row.batch for row in rows if saturated is not None and row.batch >= saturated), None)
    if best is None and saturated is not None and rows:
        best = rows[-1].batch
    return Answers(
        device_bytes=device_bytes,
        usable_bytes=usable,
        largest_batch=largest,
        largest_power_of_two=None if largest is None else (1 << largest.bit_length()) >> 1,
        host_bound_below=min(math.ceil(knee * (1 - _ROUNDING)), MAX_BATCH) if knee is not None and knee > 1 else None,
        saturated_at=saturated,
        best_batch=best,
        rows=rows,
    )


def _largest(memory: Line, usable: float) -> int:
    if memory.at(0) > usable:
        return 0
    return int(min(max((usable - memory.fixed) / memory.per_sample * (1 + _ROUNDING), 0.0), MAX_BATCH))


def _saturated(model: BatchModel) -> int:
    """From the smallest measured batch up. The gain of doubling falls with the batch, so it is bisected."""
    low, high = model.points[0].batch - 1, MAX_BATCH
    while high - low > 1:
        middle = (low + high) // 2
        if _doubling_gain(model, middle) < SATURATED_GAIN_RATIO:
            high = middle
        else:
            low = middle
    return high


def _doubling_gain(model: BatchModel, batch: int) -> float:
    return model.samples_per_second(2 * batch) / model.samples_per_second(batch) - 1


def _rows(model: BatchModel, memory: Line | None, largest: int | None, saturated: int | None) -> tuple[Row, ...]:
    """As far as it fits, and two beyond the saturated one and what was measured. Where the step does not grow, no
    further than was measured: nothing tells when it would."""
    measured = {point.batch for point in model.points}
    last = max(measured)
    until = 4 * max(last, saturated) if saturated is not None else last
    until = min(until, MAX_BATCH if largest is None else max(largest, 0))
    rows: list[Row] = []
    batch = min(measured)
    while batch <= until and len(rows) < _MAX_ROWS:
        step = model.step_us(batch)
        per_second = model.samples_per_second(batch)
        gain = per_second / rows[-1].samples_per_second - 1 if rows else None
        size = None if memory is None else memory.at(batch)
        rows.append(Row(batch, step, per_second, gain, size, batch in measured))
        batch *= 2
    return tuple(rows)
