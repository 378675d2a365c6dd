"""Recordings by py-spy (level 0): dense stacks of a process that supports nothing better. The process is never
stopped."""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rankscope.daemon.captures.fetch import ROOM_FACTOR
from rankscope.daemon.captures.orders import (
    SECONDS_LIMIT,
    CancelledError,
    CaptureError,
    Order,
    Recording,
    Stage,
    Workspace,
)
from rankscope.daemon.procfs import is_alive
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.pyspy_output import parse_errors, read_text

RATE_HZ: Final = 50
UNKNOWN_STEPS_SECONDS: Final = 3.0
TICK_SECONDS: Final = 0.05
# py-spy randomizes the pauses between samples, and a busy machine stretches them.
OVERSTAY_FACTOR: Final = 2.0
OVERSTAY_SECONDS: Final = 10.0
ERRORS_NOTED_RATIO: Final = 0.1


class StacksBackend:
    name = "stacks"
    keeps_schedules = False

    def __init__(self, py_spy: Path | str | None = None, proc_root: Path = Path("/proc")) -> None:
        self._py_spy = Path(py_spy) if py_spy else pyspy.find_py_spy()
        self._proc_root = proc_root

    def objection(self, rank: RankProcess) -> str | None:
        if self._py_spy is None or not self._py_spy.is_file():
            return pyspy.missing(self._py_spy).text
        # What py-spy does first; the kernel allows it to any process that may trace the target.
        try:
            os.close(os.open(self._proc_root / str(rank.pid) / "mem", os.O_RDONLY | os.O_CLOEXEC))
        except FileNotFoundError:
            return f"rank {rank.rank} (pid {rank.pid}) has ended"
        except OSError as error:
            return (
                f"rank {rank.rank} (pid {rank.pid}): its memory may not be read: {error.strerror}; the daemon needs "
                "CAP_SYS_PTRACE (see docs/troubleshooting.md)"
            )
        return None

    def record(
        self, order: Order, workspace: Workspace, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        objection = self.objection(order.rank)
        if objection is not None or self._py_spy is None:
            raise CaptureError(objection or pyspy.missing(None).text)
        who = f"rank {order.rank.rank} (pid {order.rank.pid})"
        report(Stage.ARMED)
        while (left := order.start_unix_millis / 1000 - time.time()) > 0:
            if cancelled.wait(min(TICK_SECONDS, left)):
                raise CancelledError(f"{who}: cancelled")
        seconds = _seconds(order)
        output, log = (workspace.folder / f"rank{order.rank.rank}.{suffix}" for suffix in ("folded", "log"))
        workspace.reserve(output, ROOM_FACTOR * pyspy.OUTPUT_LIMIT_BYTES)
        start_unix_millis = round(time.time() * 1000)
        report(Stage.RUNNING)
        self._run(order, seconds, output, log, cancelled)
        notes = [f"stacks of py-spy, {RATE_HZ} a second for {seconds} s"]
        errors = parse_errors(read_text(log, pyspy.LOG_LIMIT_BYTES))
        if errors > ERRORS_NOTED_RATIO * RATE_HZ * seconds:
            notes.append(f"{errors} samples could not be read")
        if output.stat().st_size >= pyspy.OUTPUT_LIMIT_BYTES:
            notes.append(f"cut off at {pyspy.OUTPUT_LIMIT_BYTES} bytes")
        log.unlink(missing_ok=True)
        return Recording(output, is_trace=False, start_unix_millis=start_unix_millis, notes=tuple(notes))

    def _run(self, order: Order, seconds: int, output: Path, log: Path, cancelled: threading.Event) -> None:
        rank = order.rank
        assert self._py_spy is not None
        # The child dies with the thread that started it, and this thread waits for it.
        child = pyspy.Child(pyspy.record_command(self._py_spy, rank.pid, seconds, RATE_HZ, output), log)
        kill_at = time.monotonic() + seconds * OVERSTAY_FACTOR + OVERSTAY_SECONDS
        ended: pyspy.Ended | None = None
        try:
            while (ended := child.poll()) is None and time.monotonic() < kill_at:
                if cancelled.wait(TICK_SECONDS):
                    raise CancelledError(f"rank {rank.rank} (pid {rank.pid}): cancelled")
        finally:
            if ended is None:
                child.kill()
        lives = is_alive(str(self._proc_root / str(rank.pid)), rank.start_ticks)
        has_output = output.is_file() and output.stat().st_size > 0
        if ended is None or ended.status != 0 or not has_output:
            text = read_text(log, pyspy.LOG_LIMIT_BYTES)
            raise CaptureError(pyspy.explain_failure(rank, ended, text, lives).text)


def _seconds(order: Order) -> int:
    """Whole seconds, as py-spy requires."""
    return math.ceil(min(SECONDS_LIMIT, max(1.0, order.record_seconds or UNKNOWN_STEPS_SECONDS)))
