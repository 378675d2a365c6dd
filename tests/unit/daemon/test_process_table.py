from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.discovery.process_table import LOOKS_AGAIN_PER_SCAN, RING_LOOKS_PER_SCAN
from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.probe import ring_layout
from tests.unit.daemon.fake_proc import FakeProc, torchrun


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    counted: Counter[int] = Counter()
    read_stat = procfs.read_stat

    def count(process: str) -> procfs.ProcessStat:
        counted[int(Path(process).name)] += 1
        return read_stat(process)

    monkeypatch.setattr(procfs, "read_stat", count)
    return counted


def test_a_non_python_process_is_read_rarely_from_the_start(proc: FakeProc, reads: Counter[int]) -> None:
    """A node may have thousands of them, and every read is taken from the budget of all ranks."""
    proc.add(50, {}, command="sleep", has_torch=False)
    proc.add(60, {}, command="python", has_torch=False)
    now = [0.0]
    discovery = RankDiscovery(proc.root, monotonic=lambda: now[0])
    while now[0] < 60.0:
        discovery.scan()
        now[0] += 1.0
    assert reads[50] <= 8
    assert reads[60] > 8, "a Python process may make a ring at any time"


def test_the_ring_of_an_old_process_is_seen_soon(proc: FakeProc, reads: Counter[int]) -> None:
    """However long it started, and whatever it was before: a shell that execs, a program with Python inside."""
    crowd = range(1000, 1000 + 2 * RING_LOOKS_PER_SCAN)
    for pid in (50, *crowd):
        proc.add(pid, {}, command="sleep", has_torch=False)
    now = [0.0]
    discovery = RankDiscovery(proc.root, monotonic=lambda: now[0])
    for _ in range(3):
        now[0] += 1000.0
        discovery.scan()
    (proc.root / "50" / "fd" / str(ring_layout.DESCRIPTORS[0])).symlink_to(procfs.RING_LINKS[0])
    reads.clear()
    for _ in range(3):  # each has its turn
        discovery.scan()
    assert reads[50] > 0


def test_a_scan_rereads_a_bounded_number_of_other_processes(proc: FakeProc, reads: Counter[int]) -> None:
    crowd = range(1000, 1000 + 3 * LOOKS_AGAIN_PER_SCAN)
    for pid in crowd:
        proc.add(pid, {}, command="python", has_torch=False)
    now = [0.0]
    discovery = RankDiscovery(proc.root, monotonic=lambda: now[0])
    discovery.scan()
    for _ in range(6):
        reads.clear()
        now[0] += 100.0  # all of them are due
        discovery.scan()
        assert reads.total() == LOOKS_AGAIN_PER_SCAN
    reads.clear()
    for pid in (7, 2000):
        proc.add(pid, torchrun(pid % 4))
    now[0] += 100.0
    assert [rank.pid for rank in discovery.scan().ranks] == [2000, 7], "a new process is looked at, and a rank always"
    assert reads[7] == reads[2000] == 1
    for _ in range(3):
        discovery.scan()
    assert all(reads[pid] for pid in crowd), "each has its turn"


class Machine:
    """Processes that use CPU time, scanned every two seconds."""

    def __init__(self, proc: FakeProc) -> None:
        self._proc = proc
        self._now = 100.0
        self.discovery = RankDiscovery(proc.root, monotonic=lambda: self._now)

    def run(
        self, seconds: float, busy: Mapping[int, float], line: str = "python\0train.py\0", **more: Any
    ) -> list[int]:
        """`busy` has the CPUs that each process uses. Returns the pids of the ranks."""
        for _ in range(int(seconds / 2)):
            self._now += 2.0
            for pid, cpus in busy.items():
                ticks = round(cpus * self._now * procfs.CLOCK_TICKS_PER_SECOND)
                folder = self._proc.add(pid, cpu_ticks=ticks, exec_mark=pid, **more)
                (folder / "cmdline").write_text(line)
            ranks = self.discovery.scan().ranks
        return [rank.pid for rank in ranks]


def test_a_process_that_computes_with_torch_is_a_run(proc: FakeProc) -> None:
    machine = Machine(proc)
    assert machine.run(4, {50: 0.9}) == [], "importing torch takes CPU time, too"
    assert machine.run(20, {50: 0.9}) == [50]
    assert machine.run(4, {50: 0.0}) == [50], "a pause does not end the run"
    (rank,) = machine.discovery.scan().ranks
    assert (rank.job, rank.world_size) == ("local-50", 1)


@pytest.mark.parametrize(
    ("busy", "more"),
    [
        pytest.param(0.05, {}, id="a notebook that has imported torch, or a launcher"),
        pytest.param(1.0, {"has_torch": False}, id="another program"),
        pytest.param(1.0, {"environment": {"RANKSCOPE_PROBE": "1"}}, id="with the probe, which says when it trains"),
        pytest.param(1.0, {"environment": {"PYTHONPATH": "/rankscope/inject"}}, id="with the probe injected"),
        pytest.param(1.0, {"line": "python\0-c\0from multiprocessing.spawn import spawn_main"}, id="a spawned worker"),
        pytest.param(1.0, {"line": "python\0/v/torch/_inductor/compile_worker/__main__.py"}, id="a compile worker"),
    ],
)
def test_a_process_that_does_not_train_alone_is_no_run(proc: FakeProc, busy: float, more: dict[str, Any]) -> None:
    assert Machine(proc).run(60, {50: busy}, **more) == []


def test_a_fork_that_computes_is_no_run(proc: FakeProc) -> None:
    proc.add(40, exec_mark=50)
    assert Machine(proc).run(60, {50: 1.0}, parent=40) == [], "a data-loader worker of a process that waits for it"


def test_what_a_computing_process_starts_is_no_run(proc: FakeProc) -> None:
    machine = Machine(proc)
    assert machine.run(20, {50: 1.0}) == [50]
    assert machine.run(60, {60: 1.0}, parent=50) == [50]


def test_a_busy_launcher_is_no_run_beside_its_rank(proc: FakeProc) -> None:
    machine = Machine(proc)
    assert machine.run(20, {50: 1.0}) == [50]
    proc.add(60, torchrun(0, 1), parent=50)
    assert machine.run(2, {50: 1.0}) == [60]
