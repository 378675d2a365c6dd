"""One training process' measuring: ties the hooks, the ring and the slower sources together."""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from typing import Any, Optional

from . import ring_layout
from .capture import Captures
from .clock import CudaClock
from .collective_spans import Spans
from .counters import UNKNOWN_COLLECTIVES, UNKNOWN_MEMORY, RecordedDurations, read_collectives, read_memory
from .ddp import NOT_MEASURED, DdpSampler, Figures
from .device_steps import DeviceSteps
from .facts import Facts
from .failure import disable, switch
from .nvtx_ranges import RangeTimes
from .ring import Ring
from .step_boundary import training_thread_id
from .torch_timers import BACKWARD, BLOCKING, CHECKPOINT, INPUT, LAST_END, OPTIMIZER, STEPS, FlopCount, Tally

RECORD_NS = 10_000_000  # a record covers at least this, or one step
REFRESH_NS = 1_000_000_000
STALLED_NS = 2_000_000_000
STALL_CHECK_SECONDS = 1.0
# How often the device is looked at from beside the training loop, which may pass no hook for most of a step.
LOOK_SECONDS = 0.2
# For how long the process waits at its end for the other thread, which reads a recorder in milliseconds.
LEAVE_SECONDS = 5.0
# Of a record, where the ledger adds up its nanoseconds.
LEDGER_SECONDS = (
    ("input_seconds", INPUT),
    ("blocking_seconds", BLOCKING),
    ("optimizer_seconds", OPTIMIZER),
    ("checkpoint_seconds", CHECKPOINT),
    ("in_backward_seconds", BACKWARD),
)


class Session:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.tally = Tally()
        self.spans = Spans(torch, self.tally)
        self.ranges = RangeTimes(self.tally)
        self.sampler = DdpSampler()
        self.facts = Facts(torch)
        self._captures = Captures(torch)
        self._ring: Optional[Ring] = None
        self._device: Optional[DeviceSteps] = None  # once CUDA is in use
        self._flags = 0
        self._count = FlopCount() if os.environ.get("RANKSCOPE_COUNT_FLOPS") == "1" else None
        self._written = self.tally.ledger[:]  # the ledger as of the last record
        self._next_refresh_ns = 0
        self._refreshed = (0, 0)  # at which time, after how many steps
        self._memory = UNKNOWN_MEMORY
        self._collectives = UNKNOWN_COLLECTIVES
        self._recorded = RecordedDurations()
        self._watching = False
        self._leaving = False
        # Held by the thread that writes the ring: the training thread, or the second one while training is stalled.
        self._lock = threading.Lock()

    def flush(self, now_ns: int) -> int:
        """Writes a record about the steps since the last one; returns when to come again. Never waits."""
        again_ns = self._record(now_ns)
        ring, captures = self._ring, self._captures
        if ring is not None and (captures.active or ring.command_mark() != captures.mark):
            is_inside_step = not self._flags & ring_layout.FLAG_EXPLICIT
            captures.at_boundary(ring, self.tally.ledger[STEPS], is_inside_step)
            return now_ns if captures.active else again_ns
        return again_ns

    def _record(self, now_ns: int) -> int:
        if not self._lock.acquire(blocking=False):
            return now_ns
        try:
            ring = self._ring or self._begin()
            # At every boundary as long as there is something that has to be read at every boundary.
            slow = self._count is not None or bool(self.sampler.models) or self._device is not None
            boundary = self.tally.ledger[STEPS]
            figures = self.sampler.read(boundary) if self.sampler.models else NOT_MEASURED
            is_typical = self._count is None or self._count_flops(self._count, boundary)
            if self._device is not None:
                known = ring_layout.FLAG_NCCL if self.facts.nccl.next_step(boundary) else 0
                self._device.border(self.tally.ledger[:], figures, self._flags | known, is_typical, self.sampler.step)
                self._device.look()
            else:
                self._write(ring, figures, is_typical)
            if now_ns >= self._next_refresh_ns:
                self._next_refresh_ns = now_ns + REFRESH_NS
                self._refresh(ring, now_ns)
            return now_ns if slow else now_ns + RECORD_NS
        finally:
            self._lock.release()

    def look_at_device(self) -> None:
        """Between two borders: the sooner a finished step is seen, the better its end is known."""
        device = self._device
        if device is not None and switch.on and self._lock.acquire(blocking=False):
            try:
                device.look()
            except Exception as error:
                disable(error)
            finally:
                self._lock.release()

    def _write(self, ring: Ring, figures: Figures, is_typical: bool = True) -> None:
        ledger, written = self.tally.ledger[:], self._written
        steps = ledger[STEPS] - written[STEPS]
        if steps:
            seconds = {name: (ledger[place] - written[place]) * 1e-9 for name, place in LEDGER_SECONDS}
            span_ns = ledger[LAST_END] - written[LAST_END] if is_typical else 0
            ring.append(ledger[LAST_END], span_ns, {**figures, **seconds}, self._flags, steps)
            self._written = ledger

    def _count_flops(self, count: FlopCount, boundary: int) -> bool:
        """False for a step that was counted, which says nothing about how long steps take."""
        if threading.get_ident() != self.tally.thread_id:
            return True
        was_counting = count.counting
        self.facts.counted_flops = count.at_boundary(boundary)
        if count.done:
            self._count = None
            self._next_refresh_ns = 0
        return not was_counting

    def mark_explicit(self) -> None:
        self._flags |= ring_layout.FLAG_EXPLICIT

    def _begin(self) -> Ring:
        """At the first step, not before: launchers and helpers import torch too, and must not look like ranks."""
        self.tally.thread_id = training_thread_id()
        # The first step has no known beginning: it gets a length of zero.
        self._written = self.tally.ledger[:]
        self._written[STEPS] = 0
        ring = self._ring = Ring(self.facts.gather())
        os.register_at_fork(before=self._captures.before_fork, after_in_child=self._after_fork_in_child)
        switch.when_disabled.append(ring.mark_disabled)
        self._use_device(ring)
        return ring

    def _use_device(self, ring: Ring) -> None:
        cuda = self._torch.cuda
        if self._device is None and cuda.is_initialized():
            clock = CudaClock(cuda)
            clock.watch_graph_captures(cuda.CUDAGraph)
            self._device = DeviceSteps(clock, self.spans, ring.append)
            self._device.on_ddp = self._add_ddp
            self._device.on_step = self.facts.nccl.turns.observe
            # At once, so that the windows of all ranks hold the same steps.
            self._device.on_sample = lambda: ring.write_groups(self.spans.groups.rows())
            self.spans.clock = clock

    def _add_ddp(self, figures: Figures, step_seconds: float) -> None:
        """What DDP's buckets made the device wait, beside what other collectives did."""
        models = [watched.reference() for watched in self.sampler.models]
        group = next((getattr(model, "process_group", None) for model in models if model is not None), None)
        slot = None if group is None else self.spans.groups.slot(group, ring_layout.GROUP_DDP)
        if slot is not None:
            slot.samples += 1
            slot.seconds += max(0.0, figures["ddp_communication_seconds"] - figures["ddp_overlap_seconds"])
            slot.step_seconds += step_seconds

    def _after_fork_in_child(self) -> None:
        # A child of a process that trains is a data-loader worker or a helper, not a rank.
        switch.on = False
        self.tally.thread_id = 0
        self._captures.after_fork_in_child()
        if self._ring is not None:
            self._ring.abandon()

    def _refresh(self, ring: Ring, now_ns: int) -> None:
        since_ns, since_steps = self._refreshed
        self._refreshed = (now_ns, self.tally.ledger[STEPS])
        steps = self.tally.ledger[STEPS] - since_steps
        if since_ns and steps > 0:
            seconds = (now_ns - since_ns) * 1e-9
            self.sampler.tune(seconds / steps, self.tally.ledger[STEPS])
            if self._device is None:
                self.spans.groups.count(seconds, steps)
        self._use_device(ring)
        self.spans.tune(self.facts.nccl.tells_every_step)
        ring.write_groups(self.spans.groups.rows())
        ranges = self.ranges.rows()
        if ranges:
            ring.write_ranges(ranges)
        self._flags &= ~(ring_layout.FLAG_DDP | ring_layout.FLAG_BLIND)
        if self.sampler.models:
            self._flags |= ring_layout.FLAG_DDP
        self._memory = read_memory(self._torch)
        enqueued = self._collectives[0]
        self._collectives = read_collectives(self._torch)
        is_blind = self.spans.is_blind(self._collectives[0] - max(0, enqueued), steps) and not self.sampler.models
        if since_ns and is_blind:
            self._flags |= ring_layout.FLAG_BLIND
            if self._recorded.is_on and self._device is not None and steps > 0:
                self._recorded.read(self._torch, self.spans.groups, (now_ns - since_ns) * 1e-9 / steps)
        ring.write_live(self._memory, self._collectives)
        ring.write_facts(self.facts.gather(steps if since_ns else 0))
        if not self._watching and self._collectives != UNKNOWN_COLLECTIVES:
            self._watching = True
            atexit.register(self._leave)
            ring.write_abilities(ring_layout.TAKES_CAPTURES | ring_layout.HANDS_OVER_RECORDER)
            # Not threading.Thread: it would show up in the user's threading.enumerate().
            _thread.start_new_thread(self._watch_for_stalls, ())

    def _watch_for_stalls(self) -> None:
        """The step hook of a hanging rank does not run, so the counters that show who never entered the collective are
        refreshed from here, and the recorder is handed over. Memory is not read: the query of CUDA's allocator could
        block behind the hang, holding the GIL."""
        check_at_ns = 0
        is_stalled = False
        try:
            while switch.on and not self._leaving:
                time.sleep(LOOK_SECONDS if is_stalled or self._device is not None else STALL_CHECK_SECONDS)
                self.look_at_device()
                now_ns = time.monotonic_ns()
                is_stalled = now_ns - self.tally.ledger[LAST_END] >= STALLED_NS
                if not is_stalled:
                    continue
                with self._lock:
                    if switch.on and not self._leaving and self._ring is not None:
                        if now_ns >= check_at_ns:
                            check_at_ns = now_ns + int(STALL_CHECK_SECONDS * 1e9)
                            if self._device is not None:
                                self._device.look()
                            else:
                                self._write(self._ring, NOT_MEASURED)
                            self._collectives = read_collectives(self._torch)
                            self._ring.write_live(self._memory, self._collectives)
                        # NCCL's recorder asks for events, which would end the capture of a CUDA graph.
                        if self.spans.clock is None or self.spans.clock.is_free:
                            self._captures.hand_over_recorder(self._ring)
        except Exception as error:
            disable(error)

    def _leave(self) -> None:
        # A thread that is inside torch while the interpreter ends may crash it: wait for a read under way
        # (microseconds, longer where the machine pauses), and let no other begin.
        self._leaving = True
        if self._lock.acquire(timeout=LEAVE_SECONDS):
            self._lock.release()
