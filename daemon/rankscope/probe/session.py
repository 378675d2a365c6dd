"""One training process' measuring: ties the hooks, the ring and the slower sources together."""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from typing import Any, Optional

from . import layout
from .capturing import Captures
from .counters import UNKNOWN_COLLECTIVES, UNKNOWN_MEMORY, read_collectives, read_memory
from .ddp import NOT_MEASURED, DdpSampler, Figures
from .facts import Facts
from .failing import disable, switch
from .flops import FlopCount
from .ring import Ring
from .stepping import training_thread_id
from .timing import BLOCKING, CHECKPOINT, INPUT, LAST_END, OPTIMIZER, STEPS, Tally

RECORD_NS = 10_000_000  # a record covers at least this, or one step
REFRESH_NS = 1_000_000_000
STALLED_NS = 2_000_000_000
STALL_CHECK_SECONDS = 1.0


class Session:
    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.tally = Tally()
        self.sampler = DdpSampler()
        self.facts = Facts(torch)
        self._captures = Captures(torch)
        self._ring: Optional[Ring] = None
        self._flags = 0
        self._count = FlopCount() if os.environ.get("RANKSCOPE_COUNT_FLOPS") == "1" else None
        self._written = self.tally.ledger[:]  # the ledger as of the last record
        self._next_refresh_ns = 0
        self._refreshed = (0, 0)  # at which time, after how many steps
        self._memory = UNKNOWN_MEMORY
        self._collectives = UNKNOWN_COLLECTIVES
        self._watching = False
        self._leaving = False
        # Held by whoever writes the ring: the training thread, or the second one while training is stalled.
        self._lock = threading.Lock()

    def flush(self, now_ns: int) -> int:
        """Writes a record about the steps since the last one; returns when to come again. Never waits."""
        again_ns = self._record(now_ns)
        ring, captures = self._ring, self._captures
        if ring is not None and (captures.active or ring.command_mark() != captures.mark):
            is_inside_step = not self._flags & layout.FLAG_EXPLICIT
            captures.at_boundary(ring, self.tally.ledger[STEPS], is_inside_step)
            return now_ns if captures.active else again_ns
        return again_ns

    def _record(self, now_ns: int) -> int:
        if not self._lock.acquire(blocking=False):
            return now_ns
        try:
            ring = self._ring or self._begin()
            # At every boundary as long as there is something that has to be read at every boundary.
            slow = self._count is not None or bool(self.sampler.models)
            figures = self.sampler.read(ring.records) if self.sampler.models else NOT_MEASURED
            if self._count is not None:
                self._count_flops(self._count, ring)
            self._write(ring, figures)
            if now_ns >= self._next_refresh_ns:
                self._next_refresh_ns = now_ns + REFRESH_NS
                self._refresh(ring, now_ns)
            return now_ns if slow else now_ns + RECORD_NS
        finally:
            self._lock.release()

    def _write(self, ring: Ring, figures: Figures) -> None:
        ledger, written = self.tally.ledger[:], self._written
        steps = ledger[STEPS] - written[STEPS]
        if steps:
            causes = [(ledger[cause] - written[cause]) * 1e-9 for cause in (INPUT, BLOCKING, OPTIMIZER, CHECKPOINT)]
            span_ns = ledger[LAST_END] - written[LAST_END]
            ring.append(ledger[LAST_END], span_ns, causes, figures, self._flags, steps)
            self._written = ledger

    def _count_flops(self, count: FlopCount, ring: Ring) -> None:
        if threading.get_ident() != self.tally.thread_id:
            return
        if count.counting:
            # A step that was counted says nothing about how long steps take.
            self._written[LAST_END] = self.tally.ledger[LAST_END]
        self.facts.counted_flops = count.at_boundary(ring.records)
        if count.done:
            self._count = None
            self._next_refresh_ns = 0

    def mark_explicit(self) -> None:
        self._flags |= layout.FLAG_EXPLICIT

    def _begin(self) -> Ring:
        """At the first step, not before: launchers and helpers import torch too, and must not look like ranks."""
        self.tally.thread_id = training_thread_id()
        # The first step has no known beginning: it gets a length of zero.
        self._written = self.tally.ledger[:]
        self._written[STEPS] = 0
        ring = self._ring = Ring()
        os.register_at_fork(before=self._captures.before_fork, after_in_child=self._after_fork_in_child)
        switch.when_disabled.append(ring.mark_disabled)
        return ring

    def _after_fork_in_child(self) -> None:
        # A child of a process that trains is a data-loader worker or a helper, not a rank.
        switch.on = False
        self.tally.thread_id = 0
        self._captures.after_fork_in_child()
        if self._ring is not None:
            self._ring.abandon()

    def _refresh(self, ring: Ring, now_ns: int) -> None:
        since_ns, since_steps = self._refreshed
        self._refreshed = (now_ns, ring.steps)
        if since_ns and ring.steps > since_steps:
            self.sampler.tune((now_ns - since_ns) * 1e-9 / (ring.steps - since_steps))
        self._flags &= ~layout.FLAG_DDP
        if self.sampler.models:
            self._flags |= layout.FLAG_DDP
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

    def _watch_for_stalls(self) -> None:
        """The step hook of a hanging rank does not run, so the counters that tell who never entered the collective are
        refreshed from here. Memory is not: asking CUDA's allocator could block behind the hang, holding the GIL."""
        try:
            while switch.on and not self._leaving:
                time.sleep(STALL_CHECK_SECONDS)
                if time.monotonic_ns() - self.tally.ledger[LAST_END] < STALLED_NS:
                    continue
                with self._lock:
                    if switch.on and not self._leaving and self._ring is not None:
                        self._write(self._ring, NOT_MEASURED)
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
