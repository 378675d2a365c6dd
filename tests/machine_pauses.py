"""Notices when the machine stood still: a virtual machine loses its cores for seconds now and then, one or all, and
whatever was measured meanwhile says nothing about what is tested."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

TICK_SECONDS = 0.05
PAUSE_SECONDS = 0.4
LATE_SECONDS = 0.01
# Of a priority above all that computes: only the machine itself delays it.
_PRIORITY = ("chrt", "--fifo", "90")
# A thread on each core writes the time of every tick, and the time since its last one.
_SLEEPER = f"""\
import os, threading, time
def tick(core):
    os.sched_setaffinity(0, {{core}})
    last = time.monotonic()
    while True:
        time.sleep({TICK_SECONDS})
        now = time.monotonic()
        os.write(1, b"%d %f %f\\n" % (core, now, now - last))
        last = now
for core in os.sched_getaffinity(0):
    threading.Thread(target=tick, args=(core,)).start()
"""


class MachinePauses:
    """From `start` to `stop`. Without the right to a real-time priority, it notices no pause."""

    def __init__(self) -> None:
        self._late: list[tuple[float, float]] = []  # ticks that came late: when, and by how many seconds
        self._ticks: dict[int, float] = {}  # the latest of each core
        self._is_over = False
        self._changed = threading.Condition()

    def start(self) -> None:
        command = ["setpriv", "--pdeathsig", "KILL", *_PRIORITY, sys.executable, "-S", "-c", _SLEEPER]
        self._sleeper = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._sleeper.stdout is not None
        for line in self._sleeper.stdout:
            core, now, seconds = line.split()
            with self._changed:
                self._ticks[int(core)] = float(now)
                if (late := float(seconds) - TICK_SECONDS) > LATE_SECONDS:
                    self._late.append((float(now), late))
                self._changed.notify_all()
        with self._changed:
            self._is_over = True
            self._changed.notify_all()

    def since(self, monotonic_seconds: float) -> bool:
        """Whether there was a pause that ended after this time."""
        return any(late > PAUSE_SECONDS for late in self._late_since(monotonic_seconds))

    def lost_since(self, monotonic_seconds: float) -> float:
        """Seconds that all cores together have lost since. The kernel charges them to what just ran."""
        return sum(self._late_since(monotonic_seconds))

    def _late_since(self, monotonic_seconds: float) -> list[float]:
        """A pause that has just ended is noticed: every core has ticked since the call."""
        asked_at = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._is_over or self._have_ticked(asked_at))
            return [late for at, late in self._late if at >= monotonic_seconds]

    def _have_ticked(self, since: float) -> bool:
        return bool(self._ticks) and all(tick >= since for tick in self._ticks.values())

    def stop(self) -> None:
        self._sleeper.kill()
        self._reader.join()
        assert self._sleeper.stdout is not None
        self._sleeper.stdout.close()
        self._sleeper.wait()
