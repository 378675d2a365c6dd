"""Removes traces that nobody waits for any more: libkineto cannot be told to stop, so the file of a cancelled capture
appears later, in the container's file system, where it would stay."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.fetching import remove_file
from rankscope.daemon.procfs import is_alive

PATIENCE_SECONDS: Final = 600.0
INTERVAL_SECONDS: Final = 1.0


@dataclass(frozen=True)
class _Leftover:
    pid: int
    start_ticks: int
    path: str
    give_up_at: float


class Leftovers:
    def __init__(self, proc_root: Path = Path("/proc")) -> None:
        self._proc_root = proc_root
        self._expected: list[_Leftover] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            return len(self._expected)

    def expect(self, pid: int, start_ticks: int, path: str) -> None:
        """The file will be removed as soon as it is there."""
        with self._lock:
            self._expected.append(_Leftover(pid, start_ticks, path, time.monotonic() + PATIENCE_SECONDS))
            if len(self._expected) == 1:
                threading.Thread(target=self._run, name="rankscope-leftovers", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                expected = list(self._expected)
            done = {leftover for leftover in expected if self._is_done(leftover)}
            with self._lock:
                self._expected = [leftover for leftover in self._expected if leftover not in done]
                if not self._expected:
                    return
            time.sleep(INTERVAL_SECONDS)

    def _is_done(self, leftover: _Leftover) -> bool:
        if time.monotonic() > leftover.give_up_at:
            return True
        if not is_alive(f"{self._proc_root}/{leftover.pid}", leftover.start_ticks):
            return True
        return remove_file(leftover.pid, leftover.path, self._proc_root)
