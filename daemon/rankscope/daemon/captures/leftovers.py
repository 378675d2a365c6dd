"""Removes traces that nobody waits for any more: libkineto cannot be told to stop, so the file of a cancelled capture
appears later, in the container's file system, where it would stay."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.fetching import remove_file
from rankscope.daemon.captures.kineto_config import log_file, written_file
from rankscope.daemon.captures.orders import CaptureError
from rankscope.daemon.procfs import is_alive
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb

PATIENCE_SECONDS: Final = 600.0
# Captures that were asked for longer ago than that have written what they will.
LOST_SECONDS: Final = 3600.0
INTERVAL_SECONDS: Final = 1.0


@dataclass(frozen=True)
class _Leftover:
    pid: int
    start_ticks: int
    path: str
    give_up_at: float


def left_behind(
    captures: Iterable[pb.Capture], ranks: Iterable[RankProcess], unix_seconds: float
) -> list[tuple[RankProcess, str]]:
    """What an earlier daemon may have left in these ranks' containers, by its own records: files of captures that it
    did not fetch. The name is of that capture, and of nothing else."""
    here = {(rank.job, rank.rank, rank.pid): rank for rank in ranks}
    found = []
    for capture in captures:
        if unix_seconds - capture.requested_unix_millis / 1000 > LOST_SECONDS:
            continue
        for entry in capture.ranks:
            rank = here.get((capture.job, entry.rank, entry.pid))
            if rank is None or entry.backend != "kineto" or entry.state == pb.CAPTURE_STATE_ANALYSED:
                continue
            with contextlib.suppress(CaptureError):  # a folder that was not used
                asked = log_file(capture.id, rank.rank, rank.environment.get("KINETO_ONDEMAND_TRACE_DIR", ""))
                found.append((rank, written_file(asked, rank.namespace_pids[-1])))
    return found


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
