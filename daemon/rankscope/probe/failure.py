"""How the probe ends: one line on stderr, and never again in this process."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import Callable, List


class Switch:
    """`on` is read by every hook. Hooks stay installed when it is off: removing them would change
    dictionaries that torch may be iterating over right now."""

    __slots__ = ("on", "when_disabled")

    def __init__(self) -> None:
        self.on = True
        self.when_disabled: List[Callable[[], None]] = []


switch = Switch()


def complain(text: str) -> None:
    """One line on stderr, whatever state stderr is in."""
    with contextlib.suppress(Exception):
        sys.stderr.write("rankscope: " + " ".join(text.split())[:500] + "\n")
        sys.stderr.flush()


def disable(error: BaseException) -> None:
    """Switch the probe off for good, unless the exception is the user's own: a signal handler may raise (a time-out,
    say) while a hook happens to be running, and that exception has to arrive."""
    if raised_by_a_signal_handler(error):
        raise error
    if not switch.on:
        return
    switch.on = False
    complain("probe disabled: {}: {}; training is not affected".format(type(error).__name__, error))
    for action in switch.when_disabled:
        try:
            action()
        except Exception as second:
            complain("probe: {}".format(second))


def raised_by_a_signal_handler(error: BaseException) -> bool:
    codes = {getattr(signal.getsignal(number), "__code__", None) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    while codes and trace is not None:
        if trace.tb_frame.f_code in codes:
            return True
        trace = trace.tb_next
    return False
