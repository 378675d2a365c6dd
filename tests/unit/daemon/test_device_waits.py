"""Stacks of a host that waits for its GPU, by the text of their lines."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

from rankscope.analysis.profiles.frames import DEVICE_WAIT, Frame, Stack
from rankscope.analysis.profiles.phases import DEVICE_SYNC, OTHER, phase_of
from rankscope.daemon import procfs
from rankscope.daemon.stacks.device_waits import MAX_FILE_BYTES, MAX_FILES_READ, DeviceWaits, waiting_lines

ME = os.getpid()


@pytest.mark.parametrize(
    "line",
    [
        "total += loss.item()",
        "    norms = [one.tolist() for one in norms]",
        "print(loss.cpu())",
        'y = x.to("cpu")',
        "torch.cuda.synchronize()",
        "value = float(loss)",
        "if found_inf:",
        "    elif not self.overflow:  # of the gradients",
        "while running:",
        "flag = torch.tensor([stop], device='cuda')",
    ],
)
def test_a_host_may_wait_at_such_a_line(line: str) -> None:
    assert waiting_lines(line.encode()) == {1}


@pytest.mark.parametrize(
    "line",
    [
        "y = model(x)",
        "time.sleep(0.06)",
        "if slow_check(batch):",
        "x = data[start : start + size]",
        "# loss.item()",
        "value = float(decode(text))",
        "items = list(batch)",
    ],
)
def test_a_host_works_at_such_a_line(line: str) -> None:
    assert not waiting_lines(line.encode())


def test_a_hostile_line_takes_no_time() -> None:
    for piece in (b"tensor(", b"float(", b"if a", b"int( "):
        began = time.process_time()
        assert not waiting_lines(piece * (MAX_FILE_BYTES // len(piece)))
        assert time.process_time() - began < 1.0


def program(folder: Path, text: str) -> str:
    path = folder / "train.py"
    path.write_text(text)
    return str(path)


def stacks_at(file: str, *lines: int) -> Counter[Stack]:
    return Counter({(Frame("train", file, line), Frame("<module>", file, 99)): 3 for line in lines})


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process has loaded the driver's library."""
    monkeypatch.setattr(procfs, "find_mapping", lambda *_: (True, 0))


@pytest.mark.usefixtures("on_gpu")
def test_the_wait_is_the_innermost_frame_and_names_the_phase(tmp_path: Path) -> None:
    file = program(tmp_path, "work(batch)\nloss.item()\n")
    marked = DeviceWaits(ME, Path("/proc")).mark(stacks_at(file, 1, 2))
    phases = {stack[-2].line: (phase_of(stack), stack[0] == DEVICE_WAIT) for stack in marked}
    assert phases == {1: (OTHER, False), 2: (DEVICE_SYNC, True)}
    assert marked.total() == 6


def test_a_process_without_a_gpu_never_waits_for_one(tmp_path: Path) -> None:
    stacks = stacks_at(program(tmp_path, "loss.item()\n"), 1)
    assert DeviceWaits(ME, Path("/proc")).mark(stacks) == stacks


@pytest.mark.usefixtures("on_gpu")
@pytest.mark.parametrize("kind", ["missing", "relative", "fifo", "folder", "device", "unreadable", "huge"])
def test_a_file_that_cannot_be_right_changes_nothing(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "train.py"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "unreadable":
        path.write_text("loss.item()\n")
        path.chmod(0o600)
        os.chown(path, 4711, 4711) if os.geteuid() == 0 else path.chmod(0)
    elif kind == "huge":
        path.write_text("#\n" * MAX_FILE_BYTES + "loss.item()\n")
    stacks = stacks_at("train.py" if kind == "relative" else str(path), MAX_FILE_BYTES + 1 if kind == "huge" else 1)
    assert DeviceWaits(ME, Path("/proc")).mark(stacks) == stacks


@pytest.mark.usefixtures("on_gpu")
def test_few_files_are_read_at_a_time(tmp_path: Path) -> None:
    stacks: Counter[Stack] = Counter()
    for number in range(3 * MAX_FILES_READ):
        path = tmp_path / f"module_{number}.py"
        path.write_text("loss.item()\n")
        stacks[(Frame("f", str(path), 1),)] = 1
    waits = DeviceWaits(ME, Path("/proc"))
    marked = [sum(stack[0] == DEVICE_WAIT for stack in waits.mark(stacks)) for _ in range(4)]
    assert marked == [MAX_FILES_READ, 2 * MAX_FILES_READ, 3 * MAX_FILES_READ, 3 * MAX_FILES_READ]
