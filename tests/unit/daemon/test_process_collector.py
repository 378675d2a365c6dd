from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.process_collector import ProcessCollector
from rankscope.daemon.samples import ProcessSample, RankProcess, Span

from .fake_proc import FakeProc

RANK = RankProcess("job", 0, 0, 1, 50, 100, (50,))
SPAN = Span(0, 2_000_000_000)


@pytest.fixture
def proc(tmp_path: Path) -> FakeProc:
    return FakeProc(tmp_path / "proc")


@pytest.fixture
def cgroups(tmp_path: Path) -> Path:
    (tmp_path / "cgroup").mkdir()
    return tmp_path / "cgroup"


def collector(proc: FakeProc, cgroups: Path) -> ProcessCollector:
    return ProcessCollector(proc.root, cgroups, clock_ticks_per_second=100)


def sample(source: ProcessCollector) -> ProcessSample:
    found = source.collect([RANK], SPAN)[RANK.key]
    assert isinstance(found, ProcessSample)
    return found


def throttle(group: Path, line: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "cpu.stat").write_text(f"nr_periods 5\n{line}\n")


def test_the_first_call_has_levels_and_no_deltas(proc: FakeProc, cgroups: Path) -> None:
    proc.add(50, cpu_ticks=500)
    first = sample(collector(proc, cgroups))
    assert first.cpu_seconds is first.run_delay_seconds is first.stopped_seconds is first.voluntary_switches is None
    assert first.threads == 7
    assert first.resident_bytes


def test_deltas_are_what_was_used_since_the_last_call(proc: FakeProc, cgroups: Path) -> None:
    source = collector(proc, cgroups)
    proc.add(50, cpu_ticks=500, run_delay_nanos=10**9, switches=10)
    sample(source)
    proc.add(50, cpu_ticks=650, run_delay_nanos=3 * 10**9, switches=15)
    second = sample(source)
    assert (second.cpu_seconds, second.run_delay_seconds) == (1.5, 2.0)
    assert (second.voluntary_switches, second.involuntary_switches) == (5, 10)
    assert second.stopped_seconds == 0.0


def test_a_counter_that_goes_backwards_is_not_measured(proc: FakeProc, cgroups: Path) -> None:
    source = collector(proc, cgroups)
    proc.add(50, cpu_ticks=500, switches=10)
    sample(source)
    proc.add(50, cpu_ticks=400, switches=9)
    assert sample(source).cpu_seconds is None
    assert sample(source).cpu_seconds == 0.0


def test_the_share_of_looks_that_found_it_stopped_becomes_seconds(proc: FakeProc, cgroups: Path) -> None:
    source = collector(proc, cgroups)
    proc.add(50)
    sample(source)
    proc.add(50, state="T")
    for _ in range(3):
        source.poll()
    proc.add(50, state="S")
    assert sample(source).stopped_seconds == pytest.approx(1.5)


def test_a_reused_pid_gives_no_sample(proc: FakeProc, cgroups: Path) -> None:
    source = collector(proc, cgroups)
    proc.add(50, started=999)
    assert source.collect([RANK], SPAN) == {}
    proc.remove(50)
    source.poll()
    assert source.collect([RANK], SPAN) == {}


@pytest.mark.parametrize("version", ["v1", "v2"])
def test_throttling_counts_when_a_group_above_holds_the_quota(proc: FakeProc, cgroups: Path, version: str) -> None:
    hierarchy = cgroups / "cpu,cpuacct" if version == "v1" else cgroups
    counter = "throttled_time {}000" if version == "v1" else "throttled_usec {}"
    proc.add(50, cgroup="4:cpu,cpuacct:/pod/container\n0::/\n" if version == "v1" else "0::/pod/container\n")
    throttle(hierarchy / "pod/container", counter.format(0))
    throttle(hierarchy / "pod", counter.format(1_000_000))
    source = collector(proc, cgroups)
    assert sample(source).throttled_seconds is None
    throttle(hierarchy / "pod", counter.format(1_500_000))
    assert sample(source).throttled_seconds == pytest.approx(0.5)
    throttle(hierarchy / "pod", counter.format(90_000_000))
    assert sample(source).throttled_seconds == SPAN.seconds


@pytest.mark.parametrize("path", ["/../secret", "//../secret", "//secret", "/a/../../secret"])
def test_a_cgroup_path_that_climbs_is_not_followed(proc: FakeProc, cgroups: Path, path: str) -> None:
    throttle(cgroups.parent / "secret", "throttled_usec 5")
    proc.add(50, cgroup=f"0::{path}\n")
    (proc.root / "self").mkdir()
    (proc.root / "self/cgroup").write_text("0::/docker/ab\n")
    source = collector(proc, cgroups)
    sample(source)
    assert sample(source).throttled_seconds is None


def test_the_hosts_path_resolves_without_an_own_cgroup_namespace(proc: FakeProc, cgroups: Path) -> None:
    proc.add(50, cgroup="1:cpu:/docker/ab\n")
    (proc.root / "self").mkdir()
    (proc.root / "self/cgroup").write_text("1:cpu:/docker/ab\n")
    throttle(cgroups / "cpu", "throttled_time 0")
    source = collector(proc, cgroups)
    sample(source)
    throttle(cgroups / "cpu", "throttled_time 700000000")
    assert sample(source).throttled_seconds == pytest.approx(0.7)


@pytest.mark.parametrize("number", ["9" * 400, "18446744073709551616", "-1"])
def test_numbers_that_no_kernel_writes_are_not_read(proc: FakeProc, number: str) -> None:
    folder = proc.add(7)
    (folder / "status").write_text(f"NSpid:\t{number}\nvoluntary_ctxt_switches:\t{number}\n")
    status = procfs.read_status(str(folder))
    assert status.namespace_pids == () and status.voluntary_switches is None
    line = (folder / "stat").read_text().replace(" 100 ", f" {number} ")
    with pytest.raises(ValueError, match="not a number"):
        procfs.parse_stat(line.encode())
