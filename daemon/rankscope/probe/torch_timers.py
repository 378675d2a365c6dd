"""Times what the training thread spends inside a few torch functions, without changing what they take or give back;
and counts the FLOPs of one step on request (RANKSCOPE_COUNT_FLOPS=1)."""

from __future__ import annotations

import functools
import sys
import threading
import time
from typing import Any, Callable, List, Optional

from .failure import complain

# Places in Tally.ledger. The first five are nanoseconds spent since the process began; then when the optimizer step
# that is running began (0: none is), steps so far, and when the last one ended.
INPUT, BLOCKING, OPTIMIZER, CHECKPOINT, BACKWARD, OPTIMIZER_STARTED, STEPS, LAST_END = range(8)
# Boundaries at which counting FLOPs may begin. The steps before build optimizer state, DDP's buckets, caches.
FIRST_BOUNDARY = 3
LAST_BOUNDARY = 100


class Tally:
    """What one thread did so far. Causes never overlap: the outermost call wins. But a backward pass may hold any of
    them."""

    __slots__ = ("in_backward", "inside", "ledger", "thread_id")

    def __init__(self) -> None:
        self.ledger: List[int] = [0] * 8
        self.thread_id = 0  # none before the first step
        self.inside = False
        self.in_backward = False

    def add(self, cause: int, elapsed_ns: int) -> None:
        self.ledger[cause] += elapsed_ns
        if self.ledger[OPTIMIZER_STARTED]:
            # An optimizer that communicates (ZeRO) is not computing meanwhile.
            self.ledger[OPTIMIZER_STARTED] += elapsed_ns


def hide_from_dynamo(function: Callable[..., Any], with_callees: bool = True) -> Callable[..., Any]:
    """torch.compile would otherwise trace into us, guard on our counters and recompile at every step (seen)."""
    function._torchdynamo_disable = True  # type: ignore[attr-defined]  # dynamo's own mark
    return keep_frame_from_dynamo(function, with_callees)


def keep_frame_from_dynamo(function: Callable[..., Any], with_callees: bool = False) -> Callable[..., Any]:
    """After a graph break dynamo would compile what is called, frame by frame (seen). Its callees too, where they are
    ours: a function of the user's is compiled as without us."""
    frames: Any = sys.modules.get("torch._C._dynamo.eval_frame")
    try:
        action = frames._FrameAction
        strategy = frames._FrameExecStrategy(action.SKIP, action.SKIP if with_callees else action.DEFAULT)
        frames.set_code_exec_strategy(function.__code__, strategy)
    except (AttributeError, TypeError):
        pass  # torch before 2.7
    return function


def timed(function: Callable[..., Any], tally: Tally, cause: int) -> Callable[..., Any]:
    now = time.monotonic_ns
    get_ident = threading.get_ident
    add = tally.add

    # pybind's functions have no __module__ or the like; update what is there.
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if tally.inside or get_ident() != tally.thread_id:
            return function(*args, **kwargs)
        tally.inside = True
        start_ns = now()
        try:
            return function(*args, **kwargs)
        finally:
            add(cause, now() - start_ns)
            tally.inside = False

    return hide_from_dynamo(wrapper, with_callees=False)


def time_checkpoints(torch: Any, tally: Tally) -> None:
    # Both names must stay the same object, or pickling a reference to torch.save fails.
    torch.save = torch.serialization.save = timed(torch.save, tally, CHECKPOINT)


class FlopCount:
    """Enters torch's FlopCounterMode at one boundary and leaves it at the next. The counted step is slow and is not
    reported as one."""

    def __init__(self) -> None:
        self.done = False
        self._mode: Optional[Any] = None
        self._top: Optional[Any] = None

    def at_boundary(self, boundary: int) -> Optional[float]:
        """The count, once, when it is known."""
        from torch.utils import _python_dispatch, flop_counter

        modes = _python_dispatch._get_current_dispatch_mode_stack()
        if self._mode is not None:
            # The modes form a stack: ours can be taken off only when it lies on top.
            if not modes or modes[-1] is not self._top:
                return None
            self._mode.__exit__(None, None, None)
            self.done = True
            return float(self._mode.get_total_flops())
        if boundary >= LAST_BOUNDARY:
            self.done = True
            complain("RANKSCOPE_COUNT_FLOPS=1: not counted, the loop runs inside a torch dispatch mode of its own")
        elif boundary >= FIRST_BOUNDARY and not modes:
            self._mode = flop_counter.FlopCounterMode(display=False)
            self._mode.__enter__()
            self._top = _python_dispatch._get_current_dispatch_mode_stack()[-1]
        return None

    @property
    def counting(self) -> bool:
        return self._mode is not None and not self.done
