"""Time in collectives, per process group, of whatever framework issues them from Python.

On a GPU, marks go around what makes a stream wait: a synchronous collective, or `Work.wait` of an asynchronous one, in
sampled steps only, and rarely where NCCL itself says how long they take. On a CPU the training thread itself waits, and
every step is timed. A collective ends on all members of a group together and begins on each when it arrives, so the
member that the others wait for has the shortest time.

All wrappers are transparent to torch.compile: those around C functions are marked for it to skip, as it skips the C
function itself, and those around Python functions lead straight to the original while compiling."""

from __future__ import annotations

import functools
import threading
import time
import weakref
import zlib
from collections import deque
from statistics import median
from typing import Any, Callable, Deque, Dict, List, Optional, Set, Tuple

from . import ring_layout
from .clock import CudaClock, Mark
from .failure import disable, switch
from .torch_timers import BACKWARD, BLOCKING, INPUT, Tally, hide_from_dynamo, timed

COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "reduce", "broadcast", "barrier", "gather", "scatter"),
    *("allgather", "allgather_coalesced", "_allgather_base", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced", "alltoall", "alltoall_base"),
    # Names since torch 2.13.
    *("all_gather_single", "all_gather_single_coalesced", "all_to_all_single"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced"),
)
POINT_TO_POINT = ("send", "recv", "recv_anysource")

COST_BUDGET_RATIO = 0.003
# Recording an event and reading it later: 10 µs of the host's time, and more on the device where processes share it.
MARK_SECONDS = 40e-6
# A step in so long is sampled, whatever it costs: rarer samples say nothing about a window.
SAMPLED_EVERY_SECONDS = 1.0
# The same for collectives whose times NCCL tells: marks only add which of them nothing hides. Hundreds in a step of
# Megatron-LM made the sampled step 12 % longer.
COLLECTIVES_EVERY_SECONDS = 60.0
MAX_MARKS = 4096  # in one step
MAX_INPUTS = 64
FIRST_RATE = 8


class Slot:
    """What one group's collectives of one kind took since the process began."""

    __slots__ = ("kind", "number", "position", "samples", "seconds", "size", "step_seconds")

    def __init__(self, number: int, size: int, position: int, kind: int) -> None:
        self.number = number
        self.size = size
        self.position = position
        self.kind = kind
        self.samples = 0
        self.seconds = 0.0
        self.step_seconds = 0.0

    def row(self) -> Tuple[Any, ...]:
        return (self.number, self.size, self.position, self.kind, self.samples, self.seconds, self.step_seconds)


class Groups:
    """The process groups of this rank under names that are equal on all members."""

    def __init__(self, distributed: Any) -> None:
        self._distributed = distributed
        self._known: Dict[int, Tuple[Any, Optional[Tuple[int, int, int]]]] = {}
        self.slots: Dict[Tuple[int, int], Slot] = {}

    def slot(self, group: Any, kind: int) -> Optional[Slot]:
        """None for a group without ranks of the job, and when there are too many groups to keep apart."""
        described = self._describe(group)
        if described is None:
            return None
        number, size, position = described
        slot = self.slots.get((number, kind))
        if slot is None:
            if len(self.slots) >= ring_layout.MAX_GROUPS:
                return None
            slot = self.slots[number, kind] = Slot(number, size, position, kind)
        return slot

    def _describe(self, group: Any) -> Optional[Tuple[int, int, int]]:
        known = self._known.get(id(group))
        if known is not None and known[0]() is group:
            return known[1]
        described = None
        try:
            ranks = [int(rank) for rank in self._distributed.get_process_group_ranks(group)]
            # Below 2 ** 53, so that it survives as a float.
            number = zlib.crc32(repr(ranks).encode()) | min(len(ranks), 0xFFFFF) << 32
            described = (number, len(ranks), ranks.index(self._distributed.get_rank()))
        except (KeyError, ValueError):
            pass  # made beside torch.distributed (inference engines do that), or destroyed
        if len(self._known) > 1024:
            self._known.clear()
        self._known[id(group)] = (weakref.ref(group), described)
        return described

    def count(self, step_seconds: float, steps: int = 1) -> None:
        """Steps that were sampled, whether or not a group communicated in them."""
        for slot in self.slots.values():
            if slot.kind not in (ring_layout.GROUP_DDP, ring_layout.GROUP_RECORDER):
                slot.samples += steps
                slot.step_seconds += step_seconds

    def rows(self) -> List[Tuple[Any, ...]]:
        return [slot.row() for slot in self.slots.values()]


class Sample:
    """The marks of one sampled step. In many steps, those of collectives are left out."""

    __slots__ = ("has_collectives", "inputs", "marks", "spans")

    def __init__(self, has_collectives: bool) -> None:
        self.has_collectives = has_collectives
        self.spans: List[Tuple[Slot, Mark, Mark]] = []
        self.inputs: List[Tuple[Mark, Mark]] = []
        self.marks: List[Tuple[Mark, int]] = []  # and the host's time

    @property
    def cheap_marks(self) -> int:
        return len(self.inputs) * 2 + len(self.marks)

    def every_mark(self) -> List[Mark]:
        pairs = [mark for _, start, end in self.spans for mark in (start, end)]
        pairs += [mark for pair in self.inputs for mark in pair]
        return pairs + [mark for mark, _ in self.marks]


class Rate:
    """Every how many steps one is sampled: a power of two that depends on nothing but the step time and the number of
    marks, which are the same on all ranks. Where two ranks differ all the same, the rarer samples are among the more
    frequent."""

    def __init__(self) -> None:
        self.every = FIRST_RATE
        self._steps: Deque[float] = deque(maxlen=15)
        self._marks: Deque[int] = deque([4], maxlen=4)

    def is_sampled(self, step: int) -> bool:
        """Steps count from 1. Not the multiples themselves: loops log and evaluate there."""
        return (step + 1) % self.every == 0

    def observe(self, step_seconds: float, marks: int) -> None:
        """A finished step; `marks` is 0 for one that was not sampled."""
        self._steps.append(step_seconds)
        if marks:
            self._marks.append(marks)

    def tune(self, rarest_seconds: float) -> None:
        """A step in `rarest_seconds` is sampled, whatever it costs."""
        step_seconds = median(self._steps) if self._steps else 0.0
        if step_seconds <= 0:
            return
        wanted = median(self._marks) * MARK_SECONDS / (COST_BUDGET_RATIO * step_seconds)
        wanted = min(wanted, max(1.0, rarest_seconds / step_seconds))
        # Near the border between two rungs ranks would differ by chance.
        if 0.4 * self.every <= wanted <= 1.2 * self.every:
            return
        self.every = 1
        while self.every < wanted:
            self.every *= 2


class Spans:
    """Wraps what makes a rank wait for others; `sample` is not None while a step is sampled."""

    def __init__(self, torch: Any, tally: Tally) -> None:
        self._tally = tally
        self._torch = torch
        self._is_compiling: Callable[[], bool] = torch.compiler.is_compiling
        self.groups = Groups(torch.distributed)
        self.rate = Rate()  # of samples
        self.collective_rate = Rate()  # of those with collectives, which are among them
        self.clock: Optional[CudaClock] = None  # None: the host's
        self.main_stream: Optional[int] = None  # where the optimizer steps
        self.sample: Optional[Sample] = None
        self._is_timing = False  # collectives, in this step of a device
        # By id of the Work: references to it and to its group, and the kind. The Work itself may hold tensors.
        self._expected: Dict[int, Tuple[Any, Any, int]] = {}
        self._coalescing: Dict[int, int] = {}  # id of the group to the kind seen inside
        self._functional_groups: Set[str] = set()
        self._seen = 0  # collectives, in sampled steps
        self._is_blind = False

    # -- steps ---------------------------------------------------------------------------------------------------------

    def next_step(self, step: int) -> Optional[Sample]:
        """A border on a device: the marks of the step that ends. The one that begins is `step`."""
        is_timing = self.collective_rate.is_sampled(step)
        ended, self.sample = self.sample, Sample(is_timing) if is_timing or self.rate.is_sampled(step) else None
        self._is_timing = is_timing
        if ended is not None or self.sample is not None:
            self._expected.clear()
            self._coalescing.clear()
        return ended

    def observe(self, step_seconds: float, sample: Optional[Sample]) -> None:
        """A finished step, and its sample where it was sampled."""
        cheap = 0 if sample is None else sample.cheap_marks
        self.rate.observe(step_seconds, cheap)
        is_timed = sample is not None and sample.has_collectives
        self.collective_rate.observe(step_seconds, cheap + len(sample.spans) * 2 if sample and is_timed else 0)

    def tune(self, is_told_by_nccl: bool) -> None:
        """Choose the rates, about once a second. `is_told_by_nccl`: how long collectives take, in every step."""
        self.collective_rate.tune(COLLECTIVES_EVERY_SECONDS if is_told_by_nccl else SAMPLED_EVERY_SECONDS)
        self.rate.tune(SAMPLED_EVERY_SECONDS)
        if not is_told_by_nccl or self.rate.every > self.collective_rate.every:
            self.rate.every = self.collective_rate.every

    def settle(self, sample: Sample, step_seconds: float) -> Tuple[float, float]:
        """Adds a sampled step whose marks have all passed; returns its exposed communication, NaN where some may have
        been hidden by other work, and its exposed input."""
        clock = self.clock
        assert clock is not None
        exposed, hidden = 0.0, False
        for slot, start, end in sample.spans:
            seconds = max(0.0, clock.seconds(start, end))
            slot.seconds += seconds
            exposed += seconds
            hidden = hidden or slot.kind == ring_layout.GROUP_OVERLAPPED
        if sample.has_collectives:
            self.groups.count(step_seconds)
        waited = sum(max(0.0, clock.seconds(start, end)) for start, end in sample.inputs)
        return (exposed if sample.has_collectives and not hidden else float("nan")), waited

    def mark_moment(self) -> None:
        """How far the host is ahead of the device here."""
        sample, clock = self.sample, self.clock
        if sample is not None and clock is not None and len(sample.marks) < 16:
            mark = self._mark()
            if mark is not None:
                sample.marks.append((mark, time.monotonic_ns()))

    def is_blind(self, enqueued: int, steps: int) -> bool:
        """Whether most of the collectives that were enqueued in these steps passed by the wrappers: issued by compiled
        code, by C++, by a CUDA graph. Called about once a second."""
        seen, self._seen = self._seen, 0
        if steps <= 0 or enqueued < steps:
            return False  # none, or not in every step: evaluation, logging
        sampled = steps / self.collective_rate.every if self.clock is not None else steps
        if sampled < 1 and not seen:
            return self._is_blind
        self._is_blind = seen / max(sampled, 1.0) < 0.5 * enqueued / steps
        return self._is_blind

    # -- wrappers ------------------------------------------------------------------------------------------------------

    def install(self, bindings: Any) -> None:
        group_class, work_class = bindings.ProcessGroup, bindings.Work
        for name in (*COLLECTIVES, *POINT_TO_POINT):
            if hasattr(group_class, name):
                kind = ring_layout.GROUP_POINT_TO_POINT if name in POINT_TO_POINT else ring_layout.GROUP_EXPOSED
                setattr(group_class, name, self._issuing(getattr(group_class, name), kind))
        if hasattr(group_class, "monitored_barrier"):
            group_class.monitored_barrier = self._waiting(group_class.monitored_barrier, self._group_itself)
        if hasattr(group_class, "_start_coalescing"):
            group_class._start_coalescing = self._starting(group_class._start_coalescing)
            group_class._end_coalescing = self._ending(group_class._end_coalescing)
        work_class.wait = self._waiting(work_class.wait, self._group_of_work)

    def install_functional(self, module: Any) -> None:
        """Functional collectives in eager mode wait in `wait_tensor`. Which group that is for is known only where the
        process uses one group for all of them."""
        module.wait_tensor = self._visible_to_dynamo(module.wait_tensor)
        name = "_resolve_group" if hasattr(module, "_resolve_group") else "_resolve_group_name"
        resolve, is_compiling = getattr(module, name), self._is_compiling

        @functools.wraps(resolve)
        def resolve_group(*args: Any, **kwargs: Any) -> Any:
            found = resolve(*args, **kwargs)
            if not is_compiling():
                self._functional_groups.add(found if isinstance(found, str) else found.group_name)
            return found

        setattr(module, name, resolve_group)

    def install_rpc(self, future_class: Any, is_active: Callable[[], bool]) -> None:
        """Remote calls wait in futures, and so do other parts of torch, which is why RPC must be in use."""
        original = future_class.wait
        waiting = self._waiting(original, lambda future: (None, 0))

        @functools.wraps(original)
        def wait(future: Any, /) -> Any:
            return waiting(future) if is_active() else original(future)

        future_class.wait = hide_from_dynamo(wait)

    def install_input(self, dataloader: Any, look: Callable[[], None]) -> None:
        """On a device, what counts is how long it stood still for the data."""
        iterator = dataloader._BaseDataLoaderIter
        original = iterator.__next__
        on_host = timed(original, self._tally, INPUT)

        def begin() -> Tuple[Optional[Sample], Optional[Mark]]:
            look()
            sample = self.sample
            return sample, self._mark() if sample is not None and len(sample.inputs) < MAX_INPUTS else None

        def end(sample: Optional[Sample], start: Optional[Mark]) -> None:
            passed = self._mark() if start is not None else None
            if sample is not None and start is not None and passed is not None:
                sample.inputs.append((start, passed))

        hide_from_dynamo(begin)
        hide_from_dynamo(end)

        @functools.wraps(original)
        def __next__(loader: Any) -> Any:  # noqa: N807 - stands in for the class' own
            if self.clock is None:
                return on_host(loader)
            sample, start = begin()
            try:
                return original(loader)
            finally:
                end(sample, start)

        # Datasets may be compiled, as without us.
        iterator.__next__ = hide_from_dynamo(__next__, with_callees=False)

    def install_backward(self, autograd: Any, look: Callable[[], None], passed: Callable[[], None]) -> None:
        """Around a backward pass the host is often the furthest ahead of the device. On the CPU DDP waits inside it.
        `passed` is called after every pass that accumulates gradients and is not inside another."""
        original, tally, now = autograd._engine_run_backward, self._tally, time.monotonic_ns
        is_inside = False

        def looked() -> None:
            if self.clock is not None and switch.on:
                look()
                self.mark_moment()

        def begin() -> int:
            """When the pass began; 0 for one inside another, or of another thread."""
            if tally.in_backward or threading.get_ident() != tally.thread_id:
                return 0
            tally.in_backward = True
            return now()

        def end(start_ns: int) -> None:
            if start_ns:
                tally.ledger[BACKWARD] += now() - start_ns
                tally.in_backward = False

        for ours in (looked, begin, end):
            hide_from_dynamo(ours)

        @functools.wraps(original)
        def _engine_run_backward(*args: Any, **kwargs: Any) -> Any:
            nonlocal is_inside
            looked()
            start_ns = begin()
            is_outermost, is_inside = not is_inside, True
            try:
                result = original(*args, **kwargs)
            finally:
                end(start_ns)
                is_inside = not is_outermost
            looked()
            if is_outermost and kwargs.get("accumulate_grad"):
                passed()
            return result

        # Hooks that run inside may be compiled, as without us.
        autograd._engine_run_backward = hide_from_dynamo(_engine_run_backward, with_callees=False)

    def _visible_to_dynamo(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Traced through instead of skipped, which would break the graph."""
        is_compiling, wrapper = self._is_compiling, self._waiting(original, self._group_of_tensor)

        @functools.wraps(original)
        def wait_tensor(tensor: Any) -> Any:
            return original(tensor) if is_compiling() else wrapper(tensor)

        vars(wait_tensor)["__prepare_scriptable__"] = lambda: original  # what torch.jit.script takes
        return wait_tensor

    def _issuing(self, original: Callable[..., Any], kind: int) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            if not switch.on or (not self._is_timing and self.clock is not None):
                return original(group, *args, **kwargs)
            self._seen += 1
            if self._coalescing and id(group) in self._coalescing:
                self._coalescing[id(group)] = kind
                return original(group, *args, **kwargs)
            return self._issue(original, group, kind, args, kwargs)

        return hide_from_dynamo(wrapper)

    def _issue(self, original: Callable[..., Any], group: Any, kind: int, args: Any, kwargs: Any) -> Any:
        start = self._start()
        start_ns = time.monotonic_ns()
        work = original(group, *args, **kwargs)
        try:
            if work is None:
                self._finish(group, kind, start, start_ns)
            else:
                self._expect(work, group, kind, start)
        except Exception as error:
            disable(error)
        return work

    def _waiting(self, original: Callable[..., Any], find: Callable[[Any], Tuple[Any, int]]) -> Callable[..., Any]:
        tally, get_ident, now = self._tally, threading.get_ident, time.monotonic_ns

        @functools.wraps(original)
        def wrapper(target: Any, /, *args: Any, **kwargs: Any) -> Any:
            if self.clock is not None:
                return self._wait_on_device(original, find, target, args, kwargs)
            if tally.inside or get_ident() != tally.thread_id:
                return original(target, *args, **kwargs)
            tally.inside = True
            start_ns = now()
            try:
                return original(target, *args, **kwargs)
            finally:
                elapsed_ns = now() - start_ns
                tally.add(BLOCKING, elapsed_ns)
                tally.inside = False
                self._add_host_seconds(find, target, elapsed_ns * 1e-9)

        return hide_from_dynamo(wrapper)

    def _wait_on_device(
        self, original: Callable[..., Any], find: Callable[[Any], Tuple[Any, int]], target: Any, args: Any, kwargs: Any
    ) -> Any:
        if not self._is_timing or not switch.on:
            return original(target, *args, **kwargs)
        start, group, kind = None, None, 0
        try:
            group, kind = find(target)
            start = self._start() if group is not None else None
        except Exception as error:
            disable(error)
        result = original(target, *args, **kwargs)
        if start is not None:
            try:
                self._finish(group, kind, start, 0)
            except Exception as error:
                disable(error)
        return result

    def _starting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            if switch.on and (self._is_timing or self.clock is None):
                self._coalescing[id(group)] = ring_layout.GROUP_EXPOSED
            return original(group, *args, **kwargs)

        return hide_from_dynamo(wrapper)

    def _ending(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def wrapper(group: Any, /, *args: Any, **kwargs: Any) -> Any:
            kind = self._coalescing.pop(id(group), None)
            if kind is None:
                return original(group, *args, **kwargs)
            return self._issue(original, group, kind, args, kwargs)

        return hide_from_dynamo(wrapper)

    # -- what the wrappers note ----------------------------------------------------------------------------------------

    def _start(self) -> Optional[Mark]:
        sample = self.sample
        return self._mark() if sample is not None and len(sample.spans) < MAX_MARKS else None

    def _mark(self) -> Optional[Mark]:
        """Never raises: after a failed kernel every call of CUDA does, and that error is the program's to see."""
        clock = self.clock
        if clock is None or not switch.on:
            return None
        try:
            return clock.mark()
        except Exception as error:
            disable(error)
            return None

    def _finish(self, group: Any, kind: int, start: Optional[Mark], start_ns: int) -> None:
        sample, clock = self.sample, self.clock
        if clock is None:
            if threading.get_ident() == self._tally.thread_id and not self._tally.inside:
                elapsed_ns = time.monotonic_ns() - start_ns
                self._tally.add(BLOCKING, elapsed_ns)
                self._add_seconds(group, kind, elapsed_ns * 1e-9)
            return
        end = self._mark() if start is not None else None
        if sample is None or start is None or end is None:
            return
        if kind == ring_layout.GROUP_EXPOSED and self.main_stream not in (None, start.stream):
            kind = ring_layout.GROUP_OVERLAPPED
        slot = self.groups.slot(group, kind)
        if slot is not None:
            sample.spans.append((slot, start, end))

    def _expect(self, work: Any, group: Any, kind: int, start: Optional[Mark]) -> None:
        if start is not None and self.clock is not None:
            self.clock.release(start)  # it is the wait that makes a stream stand still
        if len(self._expected) >= MAX_MARKS:
            self._expected.clear()
        self._expected[id(work)] = (weakref.ref(work), weakref.ref(group), kind)

    def _group_of_work(self, work: Any) -> Tuple[Any, int]:
        expected = self._expected.pop(id(work), None)
        return (expected[1](), expected[2]) if expected is not None and expected[0]() is work else (None, 0)

    def _group_itself(self, group: Any) -> Tuple[Any, int]:
        return group, ring_layout.GROUP_EXPOSED

    def _group_of_tensor(self, tensor: Any) -> Tuple[Any, int]:
        self._seen += 1
        if len(self._functional_groups) != 1:
            return self._torch.distributed.group.WORLD, ring_layout.GROUP_POINT_TO_POINT
        (name,) = self._functional_groups
        try:
            return self._torch._C._distributed_c10d._resolve_process_group(name), ring_layout.GROUP_EXPOSED
        except RuntimeError:  # destroyed meanwhile
            self._functional_groups.clear()
            return None, 0

    def _add_host_seconds(self, find: Callable[[Any], Tuple[Any, int]], target: Any, seconds: float) -> None:
        try:
            group, kind = find(target)
            if group is not None:
                self._add_seconds(group, kind, seconds)
        except Exception as error:
            disable(error)

    def _add_seconds(self, group: Any, kind: int, seconds: float) -> None:
        slot = self.groups.slot(group, kind)
        if slot is not None:
            slot.seconds += seconds
