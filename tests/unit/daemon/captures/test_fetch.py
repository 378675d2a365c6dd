"""Taking a trace out of a container that would rather give something else. A directory stands for the container's root:
/proc/<pid>/root is a link to it, as the kernel's own is."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rankscope.daemon.captures import fetch
from rankscope.daemon.captures.fetch import NotThereError, copy_file, remove_file, take_file
from rankscope.daemon.captures.orders import CaptureError

PID = 7
TRACE = "/tmp/rankscope-c-1-rank0_7.json"
SECRET = "root:$6$secret"


class Box:
    """A container, a machine around it with a secret, and where traces are taken to."""

    def __init__(self, folder: Path) -> None:
        self.proc_root = folder / "proc"
        self.root = folder / "box"
        self.host = folder / "host"
        self.target = folder / "taken.json"
        (self.proc_root / str(PID)).mkdir(parents=True)
        (self.root / "tmp").mkdir(parents=True)
        self.host.mkdir()
        (self.host / "shadow").write_text(SECRET)
        (self.proc_root / str(PID) / "root").symlink_to(self.root)
        self.trace = self.root / TRACE[1:]
        (self.proc_root / str(PID) / "status").write_text(f"Name:\tpython\nUid:\t{os.getuid()}\t0\t0\t0\n")
        self.when_reserving: Callable[[], object] = lambda: None
        self.reserved: list[tuple[Path, int]] = []

    def reserve(self, path: Path, size_bytes: int) -> None:
        self.reserved.append((path, size_bytes))
        self.when_reserving()

    def take(self, **more: int) -> int:
        return take_file(PID, TRACE, self.target, self.reserve, self.proc_root, **more).st_size

    def refuses(self, words: str, **more: int) -> None:
        with pytest.raises(CaptureError, match=words) as refusal:
            self.take(**more)
        assert not isinstance(refusal.value, NotThereError)
        assert not self.target.exists()


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)


def test_a_plain_file_is_copied_and_then_removed(box: Box) -> None:
    box.trace.write_text('{"traceEvents": []}')
    assert box.take() == 19
    assert box.target.read_text() == '{"traceEvents": []}'
    assert remove_file(PID, TRACE, box.proc_root)
    assert not box.trace.exists()
    assert not remove_file(PID, TRACE, box.proc_root)


def test_a_missing_file_has_an_error_of_its_own(box: Box) -> None:
    with pytest.raises(NotThereError):
        box.take()
    box.trace.parent.rmdir()
    with pytest.raises(NotThereError):
        box.take()
    box.trace.parent.write_text("")
    box.refuses("cannot be reached: Not a directory")


def test_a_process_that_is_gone_has_no_file_system(box: Box) -> None:
    with pytest.raises(CaptureError, match="the file system of pid 8 cannot be entered"):
        take_file(8, TRACE, box.target, box.reserve, box.proc_root)
    assert not remove_file(8, TRACE, box.proc_root)


@pytest.mark.parametrize("link", ["/etc/shadow", "{host}/shadow", "../../host/shadow", "decoy"])
def test_a_link_in_place_of_the_trace_is_not_followed(box: Box, link: str) -> None:
    (box.root / "tmp" / "decoy").write_text("inside")
    box.trace.symlink_to(link.format(host=box.host))
    box.refuses("is not a plain file")


@pytest.mark.parametrize("link", ["{host}", "../host", "../../../../../../../../../..{host}"])
def test_a_linked_folder_does_not_leave_the_containers_root(box: Box, link: str) -> None:
    (box.host / box.trace.name).write_text(SECRET)
    (box.root / "tmp").rmdir()
    (box.root / "tmp").symlink_to(link.format(host=box.host))
    with pytest.raises(CaptureError):
        box.take()
    assert not remove_file(PID, TRACE, box.proc_root)
    assert (box.host / box.trace.name).read_text() == SECRET


def test_a_link_within_the_container_is_the_containers_own_affair(box: Box) -> None:
    (box.root / "tmp").rename(box.root / "scratch")
    (box.root / "tmp").symlink_to("/scratch")
    (box.root / "scratch" / box.trace.name).write_text("{}")
    assert box.take() == 2
    assert remove_file(PID, TRACE, box.proc_root)


def test_a_way_through_proc_is_refused(box: Box) -> None:
    (box.root / "tmp").rmdir()
    (box.root / "proc").mkdir()
    descriptor = os.open(box.host, os.O_RDONLY)
    try:
        (box.host / box.trace.name).write_text(SECRET)
        # A link of the kernel's own would leave any root.
        take_from = f"/proc/self/fd/{descriptor}/{box.trace.name}"
        (box.proc_root / str(PID) / "root").unlink()
        (box.proc_root / str(PID) / "root").symlink_to("/")
        with pytest.raises(CaptureError, match="cannot be reached"):
            take_file(PID, take_from, box.target, box.reserve, box.proc_root)
    finally:
        os.close(descriptor)


@contextmanager
def at_once() -> Iterator[None]:
    """Fails a test that waits forever in a thread of its own."""
    timer = threading.Timer(180, os._exit, (9,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def test_anything_but_a_plain_file_is_refused_at_once(box: Box) -> None:
    with at_once():
        os.mkfifo(box.trace)
        box.refuses("is not a plain file")
        box.trace.unlink()
        os.mknod(box.trace, stat.S_IFSOCK | 0o600)
        box.refuses("is not a plain file")
        box.trace.unlink()
        box.trace.mkdir()
        box.refuses("is not a plain file")


@pytest.mark.skipif(os.getuid() != 0, reason="to make a device needs root")
def test_a_device_is_refused_and_not_even_opened(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    # Opening /dev/watchdog, say, would restart the machine soon.
    os.mknod(box.trace, stat.S_IFCHR | 0o600, os.makedev(1, 5))
    opened: list[object] = []
    real = os.open

    def watched(path: Path, flags: int) -> int:
        if not flags & os.O_PATH:
            opened.append(path)
        return real(path, flags)

    monkeypatch.setattr(fetch.os, "open", watched)
    box.refuses("is not a plain file")
    assert opened == []


def test_a_file_with_a_second_name_is_refused(box: Box) -> None:
    (box.root / "tmp" / "somebody-elses").write_text(SECRET)
    os.link(box.root / "tmp" / "somebody-elses", box.trace)
    box.refuses("has other names as well")


def test_a_file_that_keeps_growing_is_given_up(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    box.trace.write_bytes(b"x" * 1000)
    monkeypatch.setattr(fetch, "CHUNK_BYTES", 100)
    box.when_reserving = lambda: box.trace.write_bytes(b"x" * 2000)
    box.refuses("had 1000 bytes and changed while it was read")


def test_a_file_that_shrinks_is_given_up(box: Box) -> None:
    box.trace.write_bytes(b"x" * 1000)
    box.when_reserving = lambda: os.truncate(box.trace, 10)
    box.refuses("had 1000 bytes and changed while it was read")


def test_a_huge_file_of_holes_costs_no_disk(box: Box) -> None:
    with box.trace.open("wb") as file:
        file.write(b"{")
        file.truncate(8 << 30)
    box.refuses("8589934592 bytes; .* at most are taken")
    os.truncate(box.trace, 16 << 20)
    box.refuses("is no text")


def test_a_file_over_limit_or_quota_is_refused(box: Box) -> None:
    box.trace.write_text("{}" * 100)
    box.refuses("200 bytes; 199 at most are taken", limit_bytes=199)
    assert box.reserved == []

    def full() -> None:
        raise CaptureError("do not fit into the quota")

    box.when_reserving = full
    box.refuses("do not fit into the quota")
    assert box.reserved == [(box.target, 400)]


def test_a_full_disk_is_the_reason_given_and_leaves_nothing(box: Box) -> None:
    box.trace.write_text("{}" * 100)
    with box.trace.open("rb", buffering=0) as source, pytest.raises(CaptureError, match="No space left on device"):
        copy_file(source, FullDisk(box.target), 200, "the trace", box.reserve)
    assert not box.target.exists()


class FullDisk(type(Path())):  # type: ignore[misc]
    def open(self, *mode: str) -> Any:
        super().open(*mode).close()
        return Path("/dev/full").open("wb", buffering=0)


@pytest.mark.skipif(os.getuid() != 0, reason="to give a file to another user needs root")
def test_another_users_file_is_refused_unless_world_readable(box: Box) -> None:
    box.trace.write_text("{}")
    box.trace.chmod(0o640)
    os.chown(box.trace, 12345, 12345)
    box.refuses("belongs to uid 12345 and the process runs as uid 0, which may not read it")
    box.trace.chmod(0o644)  # as on NFS, where root becomes nobody
    assert box.take() == 2


def test_a_copy_never_replaces_a_file_of_ours(box: Box) -> None:
    box.trace.write_text("{}")
    box.target.write_text("ours")
    with pytest.raises(FileExistsError):
        box.take()
    assert box.target.read_text() == "ours"
