"""Steps as the device did them: a border is marked when the host enqueues it, and read when the device has passed it.

The host may be many steps ahead. How far is worked out without ever waiting: the device's clock is bracketed by what
the host knows for sure, namely that a border is passed after it was enqueued and before it was first found passed."""

from __future__ import annotations

import math
import time
from collections import deque
from statistics import median
from typing import Callable, Deque, Dict, List, Optional, Tuple

from . import ring_layout
from .clock import CudaClock, Mark
from .collective_spans import Sample, Spans
from .ddp import Figures
from .torch_timers import CHECKPOINT, LAST_END, STEPS

MAX_PENDING = 256
# A step's marks lie on several streams; where some are not passed by so many borders later, they are given up.
PATIENCE_BORDERS = 16
EPOCH_NS = 5_000_000_000
# A step that is so much longer than those before it held something else too: an evaluation, a checkpoint. All ranks
# see the same step times, so that they leave out the same steps.
ATYPICAL_RATIO = 1.5
RECENT_STEPS = 15
MAX_STEPS = 64
NAN = math.nan

Write = Callable[[int, int, Dict[str, float], int, int, int], None]  # as Ring.append


class Border:
    __slots__ = ("ddp_step", "figures", "flags", "is_typical", "ledger", "mark", "sample")

    def __init__(
        self,
        mark: Mark,
        ledger: List[int],
        figures: Figures,
        ddp_step: Optional[int],
        flags: int,
        sample: Optional[Sample],
        is_typical: bool,
    ) -> None:
        self.mark = mark
        self.ledger = ledger
        self.figures = figures
        self.ddp_step = ddp_step  # which the figures are of
        self.flags = flags
        self.sample = sample
        self.is_typical = is_typical


class Offset:
    """What to add to the device's time to get the host's, from bounds of the last seconds. Clocks drift, so that older
    bounds do not hold."""

    def __init__(self) -> None:
        self._epoch_end_ns = 0
        self._low = [-math.inf, -math.inf]
        self._high = [math.inf, math.inf]

    def bound(self, enqueued_ns: int, passed_ns: int, device_ns: float) -> None:
        if passed_ns >= self._epoch_end_ns:
            self._epoch_end_ns = passed_ns + EPOCH_NS
            self._low = [self._low[1], -math.inf]
            self._high = [self._high[1], math.inf]
        self._low[1] = max(self._low[1], enqueued_ns - device_ns)
        self._high[1] = min(self._high[1], passed_ns - device_ns)

    @property
    def ns(self) -> float:
        """The host looks often, so that some border is found passed soon after it was."""
        return max(min(self._high), max(self._low))


class DeviceSteps:
    def __init__(self, clock: CudaClock, spans: Spans, write: Write) -> None:
        self._clock = clock
        self._spans = spans
        self._write = write
        self._pending: Deque[Border] = deque()
        self._last: Optional[Border] = None  # the newest that has passed
        self._spans_by_step: Dict[int, float] = {}
        self._device_ns = 0.0  # of `_last`, since the first border
        self._offset = Offset()
        self._end_ns = 0
        self._patience = PATIENCE_BORDERS
        self._recent: Deque[float] = deque(maxlen=RECENT_STEPS)
        self.on_ddp: Optional[Callable[[Figures, float], None]] = None
        self.on_sample: Callable[[], None] = lambda: None  # the groups' times have changed
        self.on_step: Callable[[int, float], None] = lambda step, seconds: None  # its number; one that was timed alone

    def border(
        self, ledger: List[int], figures: Figures, flags: int, is_typical: bool, ddp_step: Optional[int] = None
    ) -> None:
        """The host has enqueued a step; `ledger` is the tally's, to be kept."""
        sample = self._spans.next_step(ledger[STEPS] + 1)
        mark = self._clock.mark() if len(self._pending) < MAX_PENDING else None
        if mark is None:
            return  # the next border covers this step too
        self._spans.main_stream = mark.stream
        flags |= ring_layout.FLAG_DEVICE
        self._pending.append(Border(mark, ledger, figures, ddp_step, flags, sample, is_typical))

    def look(self) -> None:
        """Writes a record about every step that the device has finished by now."""
        while self._pending:
            border = self._pending[0]
            if not self._clock.has_passed(border.mark):
                return
            now_ns = time.monotonic_ns()
            if border.sample is not None and not all(map(self._clock.has_passed, border.sample.every_mark())):
                self._patience -= 1
                if self._patience > 0 and len(self._pending) < MAX_PENDING:
                    return
                border.sample = None
            self._patience = PATIENCE_BORDERS
            self._pending.popleft()
            self._passed(border, now_ns)

    def _passed(self, border: Border, now_ns: int) -> None:
        before, self._last = self._last, border
        if before is None or before.mark.device != border.mark.device:
            span_seconds, steps = 0.0, max(1, border.ledger[STEPS] - (before.ledger[STEPS] if before else 0))
            self._device_ns, self._offset = 0.0, Offset()
        else:
            span_seconds = max(0.0, self._clock.seconds(before.mark, border.mark))
            steps = border.ledger[STEPS] - before.ledger[STEPS]
        started_ns = self._device_ns
        self._device_ns += span_seconds * 1e9
        self._offset.bound(border.ledger[LAST_END], now_ns, self._device_ns)
        exposed, waited, run_ahead = NAN, NAN, NAN
        sample = border.sample
        is_typical = self._is_typical(span_seconds / max(steps, 1))
        if span_seconds and is_typical and before is not None:
            if sample is not None:
                exposed, waited = self._spans.settle(sample, span_seconds)
                run_ahead = self._run_ahead(border, before, sample, started_ns)
                self.on_sample()
            self._spans.observe(span_seconds / max(steps, 1), sample)
        self._add_ddp(border)
        if steps == 1:
            self.on_step(border.ledger[STEPS], span_seconds)
        self._spans_by_step[border.ledger[STEPS]] = span_seconds if is_typical and steps == 1 else NAN
        while len(self._spans_by_step) > MAX_STEPS:
            del self._spans_by_step[next(iter(self._spans_by_step))]
        self._end_ns = max(self._end_ns, int(self._device_ns + self._offset.ns))
        host = (border.ledger[LAST_END] - before.ledger[LAST_END]) * 1e-9 if before else NAN
        saved = (border.ledger[CHECKPOINT] - before.ledger[CHECKPOINT]) * 1e-9 if before else 0.0
        seconds = {
            **border.figures,
            "input_seconds": waited,
            "checkpoint_seconds": saved,
            "host_seconds": host,
            "run_ahead_seconds": run_ahead,
            "exposed_seconds": exposed,
        }
        span_ns = int(span_seconds * 1e9) if border.is_typical else 0
        self._write(self._end_ns, span_ns, seconds, border.flags, max(steps, 1), border.ledger[LAST_END])
        if before is not None:
            self._clock.release(before.mark)
        if sample is not None:
            for mark in sample.every_mark():
                self._clock.release(mark)

    def _add_ddp(self, border: Border) -> None:
        if self.on_ddp is None or not border.figures:
            return
        step = border.ledger[STEPS] - 1 if border.ddp_step is None else border.ddp_step
        span_seconds = self._spans_by_step.get(step, NAN)
        if span_seconds > 0:
            self.on_ddp(border.figures, span_seconds)

    def _is_typical(self, step_seconds: float) -> bool:
        usual = median(self._recent) if self._recent else math.inf
        self._recent.append(step_seconds)
        return step_seconds <= ATYPICAL_RATIO * usual

    def _run_ahead(self, border: Border, before: Border, sample: Sample, started_ns: float) -> float:
        """The furthest the host was ahead in this step, in seconds."""
        moments: List[Tuple[Mark, int]] = [(border.mark, border.ledger[LAST_END]), *sample.marks]
        furthest = 0.0
        for mark, host_ns in moments:
            if mark.device == before.mark.device:
                passed_ns = started_ns + self._clock.seconds(before.mark, mark) * 1e9 + self._offset.ns
                furthest = max(furthest, passed_ns - host_ns)
        return furthest * 1e-9
