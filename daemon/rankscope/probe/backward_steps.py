"""Steps of a process that trains without an optimizer: the worker of a parameter server computes gradients, sends them
away and receives weights. There, each backward pass ends a step.

A process that has made an optimizer will step it, after however many passes, so its passes are no steps."""

from __future__ import annotations

import functools
from typing import Any, Callable

from .failure import disable, switch
from .torch_timers import keep_frame_from_dynamo

# Fewer are no training loop: a test of gradients, an attribution method.
PASSES_NEEDED = 16


class BackwardSteps:
    def __init__(self, mark: Callable[[], None]) -> None:
        self._mark = mark
        self._passes = 0
        self._has_optimizer = False

    def watch(self, optimizer_class: Any) -> None:
        """Learns of every optimizer that is made."""
        original = optimizer_class.__init__

        @functools.wraps(original)
        def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - stands in for the class' own
            self._has_optimizer = True
            original(optimizer, *args, **kwargs)

        optimizer_class.__init__ = keep_frame_from_dynamo(__init__)

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
