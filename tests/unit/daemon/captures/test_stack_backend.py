"""Dense recordings by a real py-spy of a real process."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rankscope.daemon.captures.orders import CancelledError, CaptureError, Order, Stage, Workspace
from rankscope.daemon.captures.stack_backend import StacksBackend
from rankscope.daemon.procfs import read_stat
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.stacks.pyspy_output import parse_recording

SCRIPT = """
import time
def train():
    print("trains", flush=True)
    while True:
        sum(range(1000))
train()
"""


@pytest.fixture
def rank() -> Iterator[RankProcess]:
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "trains\n"
            ticks = read_stat(f"/proc/{process.pid}").start_ticks
            yield RankProcess("job", 2, 0, 4, process.pid, ticks, (process.pid,))
        finally:
            process.kill()


def order(rank: RankProcess, seconds: float | None = 1.0, ahead_seconds: float = 0.0) -> Order:
    start = time.time() + ahead_seconds
    steps = None if seconds is not None else 5
    return Order("c", rank, steps, seconds, round(start * 1000), start + 60.0, step_seconds=0.1)


def test_a_recording_is_dense_and_names_the_work(rank: RankProcess, tmp_path: Path) -> None:
    backend, stages = StacksBackend(), list[Stage]()
    assert backend.objection(rank) is None
    asked = order(rank, seconds=2.0, ahead_seconds=0.3)
    recording = backend.record(asked, Workspace(tmp_path), stages.append, threading.Event())
    stacks = parse_recording(recording.path.read_text(), rank.namespace_pids).stacks
    assert stacks.total() > 20
    assert any(frame.function == "train" for stack in stacks for frame in stack)
    assert not recording.is_trace
    assert recording.steps is None
    assert recording.start_unix_millis is not None and recording.start_unix_millis >= asked.start_unix_millis
    assert stages == [Stage.ARMED, Stage.RUNNING]
    assert [path.name for path in tmp_path.iterdir()] == ["rank2.folded"]


def test_steps_are_recorded_for_as_long_as_they_take(rank: RankProcess, tmp_path: Path) -> None:
    recording = StacksBackend().record(
        order(rank, seconds=None), Workspace(tmp_path), lambda stage: None, threading.Event()
    )
    assert "for 1 s" in recording.notes[0]


def test_cancelling_ends_py_spy_at_once(rank: RankProcess, tmp_path: Path) -> None:
    cancelled = threading.Event()

    def cancel_when_it_runs(stage: Stage) -> None:
        if stage is Stage.RUNNING:
            threading.Timer(0.2, cancelled.set).start()

    with pytest.raises(CancelledError):
        StacksBackend().record(order(rank, seconds=60.0), Workspace(tmp_path), cancel_when_it_runs, cancelled)


def test_a_process_that_ends_meanwhile_is_told(rank: RankProcess, tmp_path: Path) -> None:
    def kill(stage: Stage) -> None:
        if stage is Stage.ARMED:
            os.kill(rank.pid, signal.SIGKILL)

    with pytest.raises(CaptureError, match=f"rank 2 \\(pid {rank.pid}\\)"):
        StacksBackend().record(order(rank, ahead_seconds=0.3), Workspace(tmp_path), kill, threading.Event())


def test_a_missing_py_spy_is_an_objection(rank: RankProcess, tmp_path: Path) -> None:
    objection = StacksBackend(tmp_path / "py-spy").objection(rank)
    assert objection is not None and "pip install py-spy" in objection


def test_memory_that_may_not_be_read_is_an_objection(tmp_path: Path) -> None:
    memory = tmp_path / "1" / "mem"
    memory.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as refused:  # root may open anything else
        refused.bind(str(memory))
        objection = StacksBackend(proc_root=tmp_path).objection(RankProcess("job", 0, 0, 1, 1, 1, (1,)))
    assert objection is not None and "CAP_SYS_PTRACE" in objection
