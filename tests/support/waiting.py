from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.005
_LONGEST_PAUSE_SECONDS = 0.1


def wait_until(condition: Callable[[], T], explain: Callable[[], object] = lambda: "", seconds: float = 180.0) -> T:
    """Calls the condition until it returns something true, and returns that. It is called once more when the time is
    up: the machine may have stood still."""
    give_up_at = time.monotonic() + seconds
    pause_seconds = _FIRST_PAUSE_SECONDS
    while True:
        is_last = time.monotonic() >= give_up_at
        if found := condition():
            return found
        if is_last:
            raise AssertionError(f"waited {seconds:g} s in vain\n{explain()}")
        time.sleep(pause_seconds)
        pause_seconds = min(2 * pause_seconds, _LONGEST_PAUSE_SECONDS)
