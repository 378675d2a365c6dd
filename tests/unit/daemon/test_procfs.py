"""What a process does, as /proc shows it: bytes moved, and children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.probe import ring_layout

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


# What a second daemon on the same machine does in every window, or when it leaves a command, held open.
READER = """
import os, sys
descriptor = os.open(sys.argv[1], int(sys.argv[2]))
print("reading", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_WRONLY])
def test_who_looks_into_a_ring_is_not_who_keeps_it(flags: int) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    ring = os.memfd_create(ring_layout.RING_NAME)
    try:
        with subprocess.Popen(
            [sys.executable, "-c", READER, f"/proc/{os.getpid()}/fd/{ring}", str(flags)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as reader:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "reading\n"
            links = [str(link.readlink()) for link in Path(f"/proc/{reader.pid}/fd").iterdir()]
            assert any(link in procfs.RING_LINKS for link in links)
            assert procfs.RingSearch(f"/proc/{reader.pid}").look() is None
            assert procfs.RingSearch(f"/proc/{os.getpid()}").look() == f"/proc/{os.getpid()}/fd/{ring}"
            assert reader.pid not in [rank.pid for rank in RankDiscovery().scan().ranks]
            reader.communicate()
    finally:
        os.close(ring)


def test_a_ring_behind_many_descriptors_is_found_and_remembered() -> None:
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(40)]
    ring = os.memfd_create(ring_layout.RING_NAME)
    search = procfs.RingSearch(f"/proc/{os.getpid()}")
    try:
        looks = [search.look(descriptors=8) for _ in range(ring // 8 + 1)]
        assert looks[0] is None
        assert looks[-1] == f"/proc/{os.getpid()}/fd/{ring}"
        assert search.look(descriptors=0) == looks[-1]  # where it was
        os.close(ring)
        assert search.look() is None
        ring = os.memfd_create(ring_layout.RING_NAME)
        assert search.look() is not None
    finally:
        for descriptor in (ring, *many):
            os.close(descriptor)


def test_empty_places_of_a_table_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "print('ready', flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        opened = {str(link) for link in Path(f"/proc/{process.pid}/fd").iterdir()}
        read = os.readlink
        links: list[str] = []
        monkeypatch.setattr(os, "readlink", lambda path: links.append(path) or read(path))
        assert procfs.RingSearch(f"/proc/{process.pid}").look() is None
        process.communicate("\n")
    assert set(links) == opened | {f"/proc/{process.pid}/fd/{number}" for number in ring_layout.DESCRIPTORS}


@pytest.mark.parametrize(("has_many", "searched_of_twelve"), [(False, 12), (True, 4)])
def test_many_descriptors_without_a_ring_are_searched_less_often(
    monkeypatch: pytest.MonkeyPatch, has_many: bool, searched_of_twelve: int
) -> None:
    """Where one look is enough, a ring is found as soon as it appears."""
    if has_many:
        monkeypatch.setattr(procfs.RingSearch, "_listed", lambda self, limit: range(limit))
        monkeypatch.setattr(procfs.RingSearch, "_table_size", lambda self: 2 * procfs.DESCRIPTORS_PER_LOOK)
    search = procfs.RingSearch(f"/proc/{os.getpid()}", longest_pause=4)
    read = os.readlink
    links: list[str] = []
    monkeypatch.setattr(os, "readlink", lambda path: links.append(path) or read(path))
    searched = []
    for _ in range(240):
        before = len(links)
        search.look()
        searched.append(len(links) > before + len(ring_layout.DESCRIPTORS))
    assert all(searched[:16])
    assert sum(searched[-12:]) == searched_of_twelve
