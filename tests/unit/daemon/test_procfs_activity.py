"""What a process does, as /proc shows it: bytes moved, and children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.daemon import procfs

OWN = f"/proc/{os.getpid()}"


def test_bytes_that_a_process_writes_are_counted(tmp_path: Path) -> None:
    before = procfs.moved_bytes(OWN)
    (tmp_path / "checkpoint").write_bytes(bytes(1 << 20))
    assert procfs.moved_bytes(OWN) >= before + (1 << 20)


def test_the_main_threads_children_are_found_up_to_a_limit() -> None:
    code = "import subprocess, sys; a = [subprocess.Popen(['sleep', '60']) for _ in range(3)]"
    code += "; print(*[c.pid for c in a]); sys.stdout.flush(); sys.stdin.read(); [c.kill() for c in a]"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert procfs.child_pids(f"/proc/{parent.pid}", 8) == pids
        assert procfs.child_pids(f"/proc/{parent.pid}", 2) == pids[:2]


def test_a_process_that_ended_has_no_children_and_no_bytes(tmp_path: Path) -> None:
    assert procfs.child_pids(str(tmp_path / "4"), 8) == []
    with pytest.raises(OSError, match="io"):
        procfs.moved_bytes(str(tmp_path / "4"))


@pytest.mark.parametrize("content", [b"", b"rchar: x\nwchar:\n", b"wchar: 99999999999999999999999\n", b"\xff\n:::"])
def test_a_file_that_no_kernel_writes_counts_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "io").write_bytes(content)
    assert procfs.moved_bytes(str(tmp_path)) == 0
