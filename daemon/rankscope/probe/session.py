"""One training process' measuring: ties the hooks, the ring and the slower sources together."""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from typing import Any, Optional

from . import layout
from .counters import UNKNOWN_COLLECTIVES, UNKNOWN_MEMORY, read_collectives, read_memory
from .ddp import NOT_MEASURED, DdpSampler
from .facts import Facts
from .failing import disable, switch
from .flops import FlopCount
from .ring import Ring
from .stepping import training_thread_id
from .timing import BLOCKING, CHECKPOINT, INPUT, OPTIMIZER, Tally

REFRESH_NS = 1_000_000_000
STALLED_NS = 2_000_000_000
STALL_CHECK_SECONDS = 1.0


class Session:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.tally = Tally()
        self.sampler = DdpSampler()
        self.facts = Facts(torch)
        self._ring: Optional[Ring] = None
        self._count = FlopCount() if os.environ.get("RANKSCOPE_COUNT_FLOPS") == "1" else None
        self._flags = 0
        self._last_end_ns = 0
        self._next_refresh_ns = 0
        self._refreshed_at_head = 0
        self._refreshed_ns = 0
        self._memory = UNKNOWN_MEMORY
        self._collectives = UNKNOWN_COLLECTIVES
        self._watching = False
        self._leaving = False
        # Held while the shared part of the ring is written or torch is asked from the second thread.
        self._lock = threading.Lock()

    def boundary(self, end_ns: int) -> None:
        """A step has ended. This is the hot path: about a microsecond."""
        ring = self._ring
        if ring is None:
            ring = self._begin()
        step_s = (end_ns - self._last_end_ns) * 1e-9 if self._last_end_ns else 0.0
        self._last_end_ns = end_ns
        if self._count is not None:
            step_s = self._count_flops(ring.head, step_s)
        spent = self.tally.spent_ns
        sampler = self.sampler
        ring.append(
            end_ns,
            step_s,
            spent[INPUT] * 1e-9,
            spent[BLOCKING] * 1e-9,
            spent[OPTIMIZER] * 1e-9,
            spent[CHECKPOINT] * 1e-9,
            sampler.read(ring.head) if sampler.models else NOT_MEASURED,
            self._flags,
        )
        spent[INPUT] = spent[BLOCKING] = spent[OPTIMIZER] = spent[CHECKPOINT] = 0
        if end_ns >= self._next_refresh_ns:
            self._refresh(ring, end_ns)

    def mark_explicit(self) -> None:
        self._flags |= layout.FLAG_EXPLICIT

    def _begin(self) -> Ring:
        """At the first step, not before: launchers and helpers import torch too, and must not look like ranks."""
        self.tally.thread_id = training_thread_id()
        self.tally.spent_ns[:] = [0, 0, 0, 0]
        ring = self._ring = Ring()
        os.register_at_fork(after_in_child=self._after_fork_in_child)
        switch.when_disabled.append(ring.mark_disabled)
        return ring

    def _after_fork_in_child(self) -> None:
        # A child of a process that trains is a data-loader worker or a helper, not a rank.
        switch.on = False
        self.tally.thread_id = 0
        if self._ring is not None:
            self._ring.abandon()

    def _count_flops(self, boundary: int, step_s: float) -> float:
        if self._count is None or threading.get_ident() != self.tally.thread_id:
            return step_s
        was_counting = self._count.counting
        counted = self._count.at_boundary(boundary)
        if counted:
            self.facts.counted_flops = counted
            self._next_refresh_ns = 0
        if self._count.done:
            self._count = None
        return 0.0 if was_counting else step_s

    def _refresh(self, ring: Ring, end_ns: int) -> None:
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._next_refresh_ns = end_ns + REFRESH_NS
            steps = ring.head - self._refreshed_at_head
            if self.sampler.models:
                self._flags |= layout.FLAG_DDP
                if self._refreshed_ns and steps:
                    self.sampler.tune((end_ns - self._refreshed_ns) * 1e-9 / steps)
            self._refreshed_at_head, self._refreshed_ns = ring.head, end_ns
            if _host_runs_ahead(self._torch):
                self._flags |= layout.FLAG_HOST_RUNS_AHEAD
            self._memory = read_memory(self._torch)
            self._collectives = read_collectives(self._torch)
            ring.write_live(self._memory, self._collectives)
            ring.write_facts(self.facts.gather())
            if not self._watching and self._collectives != UNKNOWN_COLLECTIVES:
                self._watching = True
                atexit.register(self._leave)
                # Not threading.Thread: it would show up in the user's threading.enumerate().
                _thread.start_new_thread(self._watch_for_stalls, ())
        finally:
            self._lock.release()

    def _watch_for_stalls(self) -> None:
        """The step hook of a hanging rank does not run, so the counters that tell who never entered the collective are
        refreshed from here. Memory is not: asking CUDA's allocator could block behind the hang, holding the GIL."""
        try:
            while switch.on and not self._leaving:
                time.sleep(STALL_CHECK_SECONDS)
                if time.monotonic_ns() - self._last_end_ns < STALLED_NS:
                    continue
                with self._lock:
                    if switch.on and not self._leaving and self._ring is not None:
                        self._collectives = read_collectives(self._torch)
                        self._ring.write_live(self._memory, self._collectives)
        except Exception as error:
            disable(error)

    def _leave(self) -> None:
        # A thread that is inside torch while the interpreter ends may crash it: wait for a read under way
        # (microseconds), and let no other begin.
        self._leaving = True
        if self._lock.acquire(timeout=0.1):
            self._lock.release()


def _host_runs_ahead(torch: Any) -> bool:
    distributed = torch.distributed
    if not (torch.cuda.is_initialized() and distributed.is_available() and distributed.is_initialized()):
        return False
    return "nccl" in str(distributed.get_backend_config()) if hasattr(distributed, "get_backend_config") else True
