from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from rankscope.daemon import doctor
from rankscope.daemon import doctor_checks as checks
from rankscope.daemon.config import Config
from rankscope.daemon.doctor import CHECKS, WaitMeasured, examine, has_ring, rank_finding, wait_measured
from rankscope.daemon.doctor_checks import Finding, Level
from rankscope.daemon.samples import RankProcess
from rankscope.probe import nccl_plugin, ring_layout
from rankscope.probe.ring import Ring
from tests.unit.daemon import window_makers as make
from tests.unit.daemon.inspector_writer import CHOSEN, InspectorWriter, make_process
from tests.unit.daemon.ring_writer import Writer
from tools.network_tree import add_ethernet, add_infiniband, write


def test_this_machine_is_examined_without_a_breakdown(tmp_path: Path) -> None:
    findings = list(examine(make.config(socket=str(tmp_path / "d.sock"))))
    assert {"platform", "python", "packages", "ptrace", "py-spy", "memfd", "torch", "ranks"} <= {
        f.check for f in findings
    }
    assert "doctor" not in {finding.check for finding in findings}


def test_a_machine_without_the_daemons_packages_is_examined_and_told() -> None:
    program = (
        "import sys; sys.modules.update(dict.fromkeys(('grpc', 'numpy', 'prometheus_client', 'google')))\n"
        "from rankscope.daemon.config import Config\n"
        "from rankscope.daemon import doctor\n"
        "print(*(f'{found.check} {found.level.value}' for found in doctor.examine(Config(gpu=False))), sep='\\n')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"packages problem", "py-spy ok", "memfd ok"} <= set(done.stdout.splitlines())


def test_an_unusable_profile_folder_is_a_problem_and_damage_warns(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (refused,) = checks.profiles_can_be_kept(make.config(profile_dir=str(tmp_path / "file" / "profiles")))
    assert refused.level is Level.PROBLEM and "--profile-dir" in refused.next_step
    (tmp_path / "profiles.damaged").write_text("")
    damaged, *_ = checks.profiles_can_be_kept(make.config(profile_dir=str(tmp_path)))
    assert damaged.level is Level.WARNING and "dmesg" in damaged.next_step
    (off,) = checks.profiles_can_be_kept(make.config())
    assert off.level is Level.OK


def test_py_spy_really_reads_the_stack_of_a_child() -> None:
    (finding,) = checks.py_spy_samples(make.config())
    assert finding.level is Level.OK, finding.text
    assert "read the stack" in finding.text


def test_a_missing_or_broken_py_spy_is_a_problem(tmp_path: Path) -> None:
    (missing,) = checks.py_spy_samples(make.config(py_spy=str(tmp_path / "nowhere")))
    assert missing.level is Level.PROBLEM
    assert "pip install py-spy" in missing.next_step
    broken = tmp_path / "py-spy"
    broken.write_text("#!/bin/sh\necho 'Permission Denied: Try running again with elevated permissions' >&2\nexit 1\n")
    broken.chmod(0o755)
    (refused,) = checks.py_spy_samples(make.config(py_spy=str(broken)))
    assert refused.level is Level.PROBLEM
    assert "Permission Denied" in refused.text


@pytest.mark.parametrize(
    ("capabilities", "scope", "level"),
    [
        ("0000000000080000", "1", Level.OK),
        ("0000000000000000", "0", Level.WARNING),
        ("0000000000000000", None, Level.WARNING),
        ("0000000000000000", "1", Level.PROBLEM),
        ("000001ffffffffff", "3", Level.PROBLEM),
    ],
)
def test_the_right_to_read_memory_is_judged(tmp_path: Path, capabilities: str, scope: str | None, level: Level) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/status").write_text(f"Name:\tpython\nCapEff:\t{capabilities}\n")
    if scope is not None:
        (tmp_path / "sys/kernel/yama").mkdir(parents=True)
        (tmp_path / "sys/kernel/yama/ptrace_scope").write_text(f"{scope}\n")
    (finding,) = checks.may_read_memory(make.config(proc_root=str(tmp_path)))
    assert finding.level is level
    assert level is Level.OK or finding.next_step


def test_cgroups_of_both_versions_are_known(tmp_path: Path) -> None:
    (none,) = checks.cgroups_are_readable(make.config(cgroup_root=str(tmp_path)))
    assert none.level is Level.WARNING
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.stat").touch()
    (first,) = checks.cgroups_are_readable(make.config(cgroup_root=str(tmp_path)))
    assert first.text.startswith("v1")
    (tmp_path / "cgroup.controllers").touch()
    (second,) = checks.cgroups_are_readable(make.config(cgroup_root=str(tmp_path)))
    assert second.text.startswith("v2")


def test_a_hidden_network_is_a_warning_with_the_way_out(tmp_path: Path) -> None:
    config = make.config(network=True, sys_root=str(tmp_path))
    (hidden,) = checks.network_is_visible(config)
    assert hidden.level is Level.WARNING and "--sys-root" in hidden.next_step
    write(add_infiniband(tmp_path, "mlx5_1"), state="1: DOWN")
    add_ethernet(tmp_path)
    (found,) = checks.network_is_visible(config)
    assert (found.level, found.text) == (Level.OK, "ports: 1 infiniband, 1 ethernet; mlx5_1 is down")


def test_a_ranks_finding_names_what_is_missing() -> None:
    bare = rank_finding(make.rank(2), ring=False)
    assert bare.level is Level.WARNING
    assert "RANKSCOPE_PROBE=1" in bare.next_step
    environment = {"KINETO_USE_DAEMON": "1", "TEARDOWN_CUPTI": "1"}
    complete = rank_finding(RankProcess("job", 0, 0, 1, 9, 9, (9,), environment), ring=True)
    assert complete.level is Level.OK
    assert not complete.next_step


def test_a_ring_is_found_among_the_descriptors_of_a_process() -> None:
    assert has_ring(Path("/proc"), os.getpid()) is False
    ring = Ring()
    try:
        assert has_ring(Path("/proc"), os.getpid()) is True
    finally:
        ring.abandon()


@pytest.mark.parametrize(
    ("flags", "kinds", "source"),
    [
        (0, (), "blocking calls"),
        (0, (ring_layout.GROUP_EXPOSED,), "blocking calls"),
        (ring_layout.FLAG_DDP, (), "ddp timers"),
        (ring_layout.FLAG_DDP, (ring_layout.GROUP_EXPOSED,), "ddp timers + blocking calls"),
        (ring_layout.FLAG_DEVICE, (ring_layout.GROUP_EXPOSED, ring_layout.GROUP_OVERLAPPED), "collective spans"),
        (ring_layout.FLAG_DEVICE, (ring_layout.GROUP_DDP, ring_layout.GROUP_EXPOSED), "ddp timers + collective spans"),
        (ring_layout.FLAG_DEVICE, (), "no collective seen"),
        (
            ring_layout.FLAG_DEVICE | ring_layout.FLAG_BLIND,
            (ring_layout.GROUP_EXPOSED, ring_layout.GROUP_RECORDER),
            "flight recorder",
        ),
    ],
)
def test_a_rank_is_told_what_its_waiting_is_known_from(flags: int, kinds: tuple[int, ...], source: str) -> None:
    writer = Writer()
    try:
        writer.step(flags=flags)
        writer.ring.write_groups([(number, 4, 2, kind, 3, 0.1, 0.3) for number, kind in enumerate(kinds)])
        wait = wait_measured(Path("/proc"), os.getpid())
        assert wait == WaitMeasured(source)
        finding = rank_finding(make.rank(), True, wait)
        assert finding.level is Level.OK and finding.text.endswith(f"probe ring, wait: {source}")
    finally:
        writer.ring.abandon()


def test_a_rank_with_unmeasured_waiting_is_a_warning() -> None:
    writer = Writer()
    try:
        assert wait_measured(Path("/proc"), os.getpid()) == WaitMeasured("no step yet")
        writer.step(flags=ring_layout.FLAG_DEVICE | ring_layout.FLAG_BLIND)
        writer.ring.write_groups([(7, 4, 2, ring_layout.GROUP_EXPOSED, 3, 0.1, 0.3)])  # a few of many
        finding = rank_finding(make.rank(), True, wait_measured(Path("/proc"), os.getpid()))
        assert finding.level is Level.WARNING and "wait: not measured" in finding.text
        assert "--duty-cycle-steps" in finding.next_step and "TORCH_NCCL_ENABLE_TIMING=1" in finding.next_step
        writer.ring.mark_disabled()
        disabled = wait_measured(Path("/proc"), os.getpid())
        assert disabled is not None and "disabled itself" in disabled.source and disabled.next_step
        writer.rewrite_header(version=9)
        assert wait_measured(Path("/proc"), os.getpid()) is None
    finally:
        writer.ring.abandon()
    assert wait_measured(Path("/proc"), os.getpid()) is None


@pytest.mark.parametrize(("is_inspector", "source"), [(True, "NCCL Inspector's file"), (False, "collective spans")])
def test_the_users_plugin_and_its_files_are_named(tmp_path: Path, is_inspector: bool, source: str) -> None:
    environment = CHOSEN if is_inspector else {"NCCL_PROFILER_PLUGIN": "/opt/libother.so"}
    make_process(tmp_path / "proc", environment)
    inspector, writer = InspectorWriter(tmp_path), Writer()
    try:
        writer.ring.write_facts({"nccl_reason": nccl_plugin.OTHER})
        writer.step(flags=ring_layout.FLAG_DEVICE)
        writer.ring.write_groups([(7, 4, 2, ring_layout.GROUP_EXPOSED, 3, 0.1, 0.3)])
        found = wait_measured(tmp_path / "proc", os.getpid())
        assert found == WaitMeasured(f"{source} ({nccl_plugin.OTHER})")
    finally:
        writer.ring.abandon()
        inspector.file.close()


def test_a_check_that_raises_does_not_stop_the_others() -> None:
    def broken(_: object) -> list[Finding]:
        raise ZeroDivisionError("oops")

    first, second = examine(make.config(), (broken, checks.python_is_new_enough))
    assert (first.level, second.level) == (Level.WARNING, Level.OK)
    assert "oops" in first.text
    assert len(CHECKS) >= 12


def test_a_check_that_never_ends_does_not_stop_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    never, now = threading.Event(), [0.0]
    monkeypatch.setattr(doctor, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def blocked(config: Config) -> Iterator[Finding]:
        yield Finding("first", Level.OK, "")
        never.wait()

    findings = []
    try:
        for finding in examine(make.config(), (blocked, checks.python_is_new_enough), check_seconds=180.0):
            findings.append(finding)
            if finding.check == "first":
                now[0] += 180.0
    finally:
        never.set()
    assert [finding.check for finding in findings] == ["first", "doctor", "python"]
    assert findings[1].text == "blocked: does not end; a process that it looks at is blocked"
