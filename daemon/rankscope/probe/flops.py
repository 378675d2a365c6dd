"""Counts the FLOPs of one step on request (RANKSCOPE_COUNT_FLOPS=1), with torch's own FlopCounterMode."""

from __future__ import annotations

from typing import Any, Optional

from .failing import complain

FIRST_BOUNDARY = 3  # the steps before it build optimizer state, DDP's buckets, caches
LAST_BOUNDARY = 100


class FlopCount:
    """Enters the mode at one boundary and leaves it at the next. The counted step is slow and is not reported as
    one."""

    def __init__(self) -> None:
        self.done = False
        self._mode: Optional[Any] = None
        self._top: Optional[Any] = None

    def at_boundary(self, boundary: int) -> Optional[float]:
        """The count, once, when it stands."""
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
