"""Whether the kernel killed a process for lack of memory, by the counters of its groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.daemon.cgroups import MemoryKills, oom_kills

V1 = ("5:devices:/job\n4:memory:/job/step\n", "memory", "memory.limit_in_bytes", "memory.oom_control")
V2 = ("0::/job/step\n", "", "memory.max", "memory.events")


class Groups:
    def __init__(self, root: Path, version: tuple[str, str, str, str]) -> None:
        self.membership, folder, self.limit, self.events = version
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.job = self.cgroups / folder / "job"
        self.step = self.job / "step"
        self.step.mkdir(parents=True)
        (self.proc / "7").mkdir(parents=True)
        (self.proc / "7" / "cgroup").write_text(self.membership)

    def write(self, group: Path, kills: int, limit: str | None = None) -> None:
        (group / self.events).write_text(f"low 0\noom {kills}\noom_kill {kills}\n")
        if limit is not None:
            (group / self.limit).write_text(limit)

    def kills(self) -> MemoryKills:
        return MemoryKills(7, self.proc, self.cgroups)


@pytest.mark.parametrize("version", [V1, V2], ids=["v1", "v2"])
def test_a_kill_in_its_group_counts_with_the_limit(tmp_path: Path, version: tuple[str, str, str, str]) -> None:
    groups = Groups(tmp_path, version)
    groups.write(groups.step, 3, "max" if version is V2 else str((1 << 63) - 4096))
    groups.write(groups.job, 5, str(2 << 30))
    kills = groups.kills()
    assert not kills.more() and kills.limit_bytes is None
    # The process is gone by the time that this is asked.
    (groups.proc / "7" / "cgroup").unlink()
    groups.write(groups.step, 4)
    groups.write(groups.job, 6)
    assert kills.more() and kills.limit_bytes == 2 << 30


def test_kills_of_other_groups_and_unreadable_ones_do_not_count(tmp_path: Path) -> None:
    groups = Groups(tmp_path, V2)
    other = groups.job / "other"
    other.mkdir()
    groups.write(groups.step, 0, str(1 << 30))
    groups.write(other, 0)
    kills = groups.kills()
    groups.write(other, 1)
    assert not kills.more()
    (groups.step / groups.events).unlink()
    assert not kills.more()
    assert not MemoryKills(8, groups.proc, groups.cgroups).more()


def test_the_counter_of_the_machine_is_read(tmp_path: Path) -> None:
    vmstat = tmp_path / "vmstat"
    vmstat.write_text("nr_free_pages 5\noom_kill 12\n")
    assert oom_kills(str(vmstat)) == 12
    vmstat.write_text("nr_free_pages 5\noom_kill x\n")
    assert oom_kills(str(vmstat)) is None and oom_kills(str(tmp_path / "missing")) is None
