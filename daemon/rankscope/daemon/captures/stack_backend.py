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

from rankscope.daemon import procfs
from rankscope.daemon.blocking_reads import BlockedError
from rankscope.daemon.captures.fetch import ROOM_FACTOR
from rankscope.daemon.captures.orders import (
    MAX_RECORDING_SECONDS,
    CancelledError,
    CaptureError,
    Order,
    Recording,
    Stage,
    Workspace,
)
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.stacks import pyspy
from rankscope.daemon.stacks.pyspy_output import parse_errors

RATE_HZ: Final = 50
UNKNOWN_STEPS_SECONDS: Final = 3.0
TICK_SECONDS: Final = 0.05
# py-spy randomizes the pauses between samples, and a busy machine stretches them.
OVERSTAY_FACTOR: Final = 2.0
OVERSTAY_SECONDS: Final = 10.0
REAP_SECONDS: Final = 2.0
ERRORS_NOTED_RATIO: Final = 0.1


class StacksBackend:
    name = "stacks"
    keeps_schedules = False
    needs_steps = False

    def __init__(self, py_spy: Path | str | None = None, proc_root: Path = Path("/proc")) -> None:
        self._py_spy = Path(py_spy) if py_spy else pyspy.find_py_spy()
        self._proc_root = proc_root

    def objection(self, rank: RankProcess) -> str | None:
        if self._py_spy is None or not self._py_spy.is_file():
            return pyspy.missing(self._py_spy).text
        # What py-spy does first; the kernel allows it to any process that may trace the target.
        folder = f"{self._proc_root}/{rank.pid}"
        try:
            procfs.BLOCKING.call(folder, lambda: os.close(os.open(f"{folder}/mem", os.O_RDONLY | os.O_CLOEXEC)))
        except BlockedError:
            return f"{rank} blocks readers of its memory; does an exec of it not end?"
        except FileNotFoundError:
            return f"{rank} has ended"
        except OSError as error:
            needs = "the daemon needs CAP_SYS_PTRACE (see docs/troubleshooting.md)"
            return f"{rank}: its memory may not be read: {error.strerror}; {needs}"
        return None

    def record(
        self, order: Order, workspace: Workspace, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording:
        objection = self.objection(order.rank)
        if objection is not None or self._py_spy is None:
            raise CaptureError(objection or pyspy.missing(None).text)
        report(Stage.ARMED)
        while (left := order.start_unix_millis / 1000 - time.time()) > 0:
            if cancelled.wait(min(TICK_SECONDS, left)):
                raise CancelledError(f"{order.rank}: cancelled")
        seconds = _seconds(order)
        output = workspace.folder / f"rank{order.rank.rank}.folded"
        workspace.reserve(output, ROOM_FACTOR * pyspy.MAX_OUTPUT_BYTES)
        start_unix_millis = round(time.time() * 1000)
        report(Stage.RUNNING)
        log = self._run(order, seconds, output, cancelled)
        notes = [f"stacks of py-spy, {RATE_HZ} a second for {seconds} s"]
        errors = parse_errors(log)
        if errors > ERRORS_NOTED_RATIO * RATE_HZ * seconds:
            notes.append(f"{errors} samples could not be read")
        if output.stat().st_size >= pyspy.MAX_OUTPUT_BYTES:
            notes.append(f"cut off at {pyspy.MAX_OUTPUT_BYTES} bytes")
        return Recording(output, is_trace=False, start_unix_millis=start_unix_millis, notes=tuple(notes))

    def _run(self, order: Order, seconds: int, output: Path, cancelled: threading.Event) -> str:
        """py-spy's log."""
        rank = order.rank
        assert self._py_spy is not None
        # The child dies with the thread that started it, and this thread waits for it.
        child = pyspy.Child(pyspy.record_command(self._py_spy, rank.pid, seconds, RATE_HZ, output))
        kill_at = time.monotonic() + seconds * OVERSTAY_FACTOR + OVERSTAY_SECONDS
        ended: pyspy.Ended | None = None
        try:
            while (ended := child.poll()) is None and time.monotonic() < kill_at:
                if cancelled.wait(TICK_SECONDS):
                    raise CancelledError(f"{rank}: cancelled")
        finally:
            if ended is None:
                child.kill()
                # One that waits for a file system which does not answer is reaped when the next process is started.
                child.wait(REAP_SECONDS)
        lives = procfs.is_alive(str(self._proc_root / str(rank.pid)), rank.start_ticks)
        has_output = output.is_file() and output.stat().st_size > 0
        if ended is None or ended.status != 0 or not has_output:
            raise CaptureError(pyspy.explain_failure(rank, ended, child.log, lives).text)
        return child.log


def _seconds(order: Order) -> int:
    """Whole seconds, as py-spy requires."""
    return math.ceil(min(MAX_RECORDING_SECONDS, max(1.0, order.record_seconds or UNKNOWN_STEPS_SECONDS)))
