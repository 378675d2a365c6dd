"""Where steps end: the optimizer hooks, the election of the optimizer that counts, and what happens at a boundary."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any, Callable, Dict, Optional

from .failing import disable, switch
from .timing import BLOCKING, OPTIMIZER, Tally, hide_from_dynamo

RE_ELECT_AFTER_STEPS = 64


class Anchor:
    """The one optimizer whose steps are the training steps; a loop may have several (GANs, one per parameter). The
    first to step is it, until it is gone, or until another has stepped RE_ELECT_AFTER_STEPS times in its silence."""

    __slots__ = ("_reference", "_silence", "optimizer_id")

    def __init__(self) -> None:
        self.optimizer_id = 0
        self._reference: Optional["weakref.ref[Any]"] = None
        self._silence: Dict[int, int] = {}

    def elect(self, optimizer: Any) -> None:
        self._silence.clear()
        self.optimizer_id = id(optimizer)
        self._reference = weakref.ref(optimizer, self._gone)

    def _gone(self, reference: Any) -> None:
        if reference is self._reference:
            self.optimizer_id = 0

    def stepped(self) -> None:
        if self._silence:
            self._silence.clear()

    def other_stepped(self, optimizer: Any) -> bool:
        """True when this one has just become the anchor."""
        count = self._silence.get(id(optimizer), 0) + 1
        if self.optimizer_id == 0 or count >= RE_ELECT_AFTER_STEPS:
            self.elect(optimizer)
            return True
        self._silence[id(optimizer)] = count
        return False


def training_thread_id() -> int:
    """The stepping thread; but an optimizer may step inside backward, on a thread of the autograd engine, and then the
    loop is the main thread's."""
    here = threading.get_ident()
    started_by_python = {t.ident for t in threading.enumerate() if not isinstance(t, threading._DummyThread)}
    return here if here in started_by_python else threading.main_thread().ident or here


def install_optimizer_hooks(optimizer_module: Any, tally: Tally, boundary: Callable[[int], None]) -> Callable[[], None]:
    """Registers the global hooks; returns what rankscope.probe.step() calls."""
    now = time.monotonic_ns
    spent_ns = tally.spent_ns
    anchor = Anchor()
    explicit = False
    running_id = started_ns = started_blocking_ns = 0

    def before(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal running_id, started_ns, started_blocking_ns
        running_id = id(optimizer)
        started_blocking_ns = spent_ns[BLOCKING]
        started_ns = now()

    def after(optimizer: Any, args: Any, kwargs: Any) -> None:
        nonlocal running_id
        if not switch.on:
            return
        try:
            end_ns = now()
            this_id = id(optimizer)
            # One optimizer may step inside another's step (ZeRO): the innermost is timed. A step that raised never gets
            # here, so nothing may be counted up on the way in.
            if this_id == running_id:
                spent_ns[OPTIMIZER] += end_ns - started_ns - (spent_ns[BLOCKING] - started_blocking_ns)
                running_id = 0
            if this_id == anchor.optimizer_id:
                anchor.stepped()
            elif not anchor.other_stepped(optimizer):
                return
            if not explicit:
                boundary(end_ns)
        except Exception as error:
            disable(error)

    def mark() -> None:
        nonlocal explicit
        if not switch.on:
            return
        try:
            explicit = True
            boundary(now())
        except Exception as error:
            disable(error)

    optimizer_module.register_optimizer_step_pre_hook(hide_from_dynamo(before))
    optimizer_module.register_optimizer_step_post_hook(hide_from_dynamo(after))
    return hide_from_dynamo(mark)
