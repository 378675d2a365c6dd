"""Where steps end: the optimizer hooks, the election of the optimizer that counts, and what happens at a boundary."""

from __future__ import annotations

import functools
import threading
import time
import weakref
from typing import Any, Callable, Dict, Optional, Tuple

from . import graph_steps
from .failure import disable, switch
from .torch_timers import (
    LAST_END,
    OPTIMIZER,
    OPTIMIZER_STARTED,
    STEPS,
    Tally,
    hide_from_dynamo,
    keep_frame_from_dynamo,
)

RE_ELECT_AFTER_STEPS = 64
# Fewer are no training loop: a test of gradients, an attribution method.
PASSES_NEEDED = 16


class Anchor:
    """The one optimizer whose steps are the training steps; a loop may have several (GANs, one per parameter). The
    first to step is it, until it is gone, or until another has stepped RE_ELECT_AFTER_STEPS times in its silence."""

    __slots__ = ("_reference", "optimizer_id", "silence")

    def __init__(self) -> None:
        self.optimizer_id = 0
        self._reference: Optional["weakref.ref[Any]"] = None
        self.silence: Dict[int, int] = {}

    def elect(self, optimizer: Any) -> None:
        self.silence.clear()
        self.optimizer_id = id(optimizer)
        self._reference = weakref.ref(optimizer, self._gone)

    def _gone(self, reference: Any) -> None:
        if reference is self._reference:
            self.optimizer_id = 0

    def other_stepped(self, optimizer: Any) -> bool:
        """True when this one has just become the anchor."""
        count = self.silence.get(id(optimizer), 0) + 1
        if self.optimizer_id == 0 or count >= RE_ELECT_AFTER_STEPS:
            self.elect(optimizer)
            return True
        self.silence[id(optimizer)] = count
        return False


def training_thread_id() -> int:
    """The stepping thread; but an optimizer may step inside backward, on a thread of the autograd engine, and then the
    loop is the main thread's."""
    here = threading.get_ident()
    started_by_python = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    return here if here in started_by_python else threading.main_thread().ident or here


def breaks_the_graph(optimizer: Any) -> bool:
    """True of most of torch's own optimizers: torch.compile leaves their steps uncompiled."""
    decorated = getattr(type(optimizer).step, "__wrapped__", None)
    return decorated is not None and decorated.__code__.co_name == "_use_grad"


def install_optimizer_hooks(
    optimizer_module: Any,
    tally: Tally,
    flush: Callable[[int], int],
    is_compiling: Callable[[], bool],
    scaler_class: Any = None,
    cuda: Any = None,
) -> Tuple[Callable[[], None], Callable[[], None]]:
    """Registers the global hooks; returns what rankscope.probe.step() calls, and what ends a step where there is no
    optimizer. A step that torch's GradScaler (`scaler_class`) leaves out because of an overflow took its time all the
    same, and counts. So does the replay of a CUDA graph that holds a step (`cuda` is torch's module).

    `flush(now)` writes a record about the steps since the last and returns when it wants to be called again: packing
    one costs 5 µs where torch's own bookkeeping around a step keeps evicting us from the processor's caches."""
    now = time.monotonic_ns
    ledger = tally.ledger
    optimizer_ns, started, steps, last_end = OPTIMIZER, OPTIMIZER_STARTED, STEPS, LAST_END
    anchor = Anchor()
    silence = anchor.silence
    explicit = False
    flush_at_ns = 0
    plain_until_ns = 0  # until then, a step of the anchor is only counted: nothing else is to be looked at
    graph_class = getattr(cuda, "CUDAGraph", None)
    is_known = all(hasattr(graph_class, name) for name in graph_steps.WRAPPED)
    graphs = graph_steps.GraphSteps(cuda.is_current_stream_capturing) if is_known else None

    # torch.compile may trace an optimizer's step whole, and only then is_compiling() is true. A graph break there would
    # leave the step uncompiled, or raise with fullgraph=True (seen), so the hooks are left out of such a graph. Where
    # the step breaks the graph itself, the hooks run outside of it.
    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        if is_compiling():
            if breaks_the_graph(optimizer):
                hidden_before(optimizer, args, kwargs)
            return
        ledger[started] = now()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal flush_at_ns, plain_until_ns
        if is_compiling():
            if breaks_the_graph(optimizer):
                hidden_after(optimizer, args, kwargs)
            return
        end_ns = now()
        start_ns = ledger[started]
        if start_ns and end_ns < plain_until_ns and id(optimizer) == anchor.optimizer_id:
            ledger[optimizer_ns] += end_ns - start_ns
            ledger[started] = 0
            ledger[steps] += 1
            ledger[last_end] = end_ns
            return
        if not switch.on:
            return
        try:
            plain_until_ns = 0
            if graphs is not None and graphs.takes(optimizer):
                ledger[started] = 0
                return
            # One optimizer may step inside another's step (ZeRO): the innermost is timed. A step that raises never gets
            # here, so nothing may be counted up on the way in.
            if start_ns:
                ledger[optimizer_ns] += end_ns - start_ns
                ledger[started] = 0
            if id(optimizer) == anchor.optimizer_id:
                silence.clear()
            elif not anchor.other_stepped(optimizer):
                return
            if explicit:
                return
            ledger[steps] += 1
            ledger[last_end] = end_ns
            if end_ns >= flush_at_ns:
                flush_at_ns = flush(end_ns)
            plain_until_ns = flush_at_ns
        except Exception as error:
            disable(error)

    def end_plain_steps() -> None:
        nonlocal plain_until_ns
        plain_until_ns = 0

    def mark() -> None:
        nonlocal explicit, plain_until_ns
        if not switch.on:
            return
        try:
            explicit, plain_until_ns = True, 0
            count_step()
        except Exception as error:
            disable(error)

    def count_step() -> None:
        nonlocal flush_at_ns
        end_ns = ledger[last_end] = now()
        ledger[steps] += 1
        if end_ns >= flush_at_ns:
            flush_at_ns = flush(end_ns)

    def mark_implicitly() -> None:
        # An optimizer that was unpickled was never made in this process, but steps.
        if not explicit and not anchor.optimizer_id:
            count_step()

    if scaler_class is not None:
        scaled_step = scaler_class.step

        @functools.wraps(scaled_step)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if is_compiling():
                return scaled_step(scaler, optimizer, *args, **kwargs)
            counted = ledger[steps]
            result = scaled_step(scaler, optimizer, *args, **kwargs)
            if ledger[steps] == counted and id(optimizer) == anchor.optimizer_id:
                after(optimizer, args, kwargs)
            return result

        scaler_class.step = keep_frame_from_dynamo(step)
    if graphs is not None:
        graphs.watch(graph_class, end_plain_steps, hide_from_dynamo(lambda optimizer: after(optimizer, (), {})))
    switch.when_disabled.append(end_plain_steps)
    hidden_before = hide_from_dynamo(lambda *arguments: before(*arguments))
    hidden_after = hide_from_dynamo(lambda *arguments: after(*arguments))
    optimizer_module.register_optimizer_step_pre_hook(keep_frame_from_dynamo(before))
    optimizer_module.register_optimizer_step_post_hook(keep_frame_from_dynamo(after))
    return hide_from_dynamo(mark), hide_from_dynamo(mark_implicitly)


class BackwardSteps:
    """Steps of a process that trains without an optimizer: the worker of a parameter server computes gradients, sends
    them away and receives weights. There, each backward pass ends a step. A process that has made an optimizer steps it
    after some number of passes, so its passes are no steps."""

    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark
        self._passes = 0
        self._has_optimizer = False

    def watch(self, optimizer_class: Any) -> None:
        """Learns of every optimizer that is made."""
        original = optimizer_class.__init__

        @functools.wraps(original)
        def make(optimizer: Any, *args: Any, **kwargs: Any) -> None:
            self._has_optimizer = True
            original(optimizer, *args, **kwargs)

        optimizer_class.__init__ = keep_frame_from_dynamo(make)

    def passed(self) -> None:
        """A backward pass that accumulates gradients has ended, and is not inside another."""
        if self._has_optimizer or not switch.on:
            return
        try:
            self._passes += 1
            if self._passes >= PASSES_NEEDED:
                self._mark()
        except Exception as error:
            disable(error)
