from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.cli.demo_job.cpu_limit import (
    MAX_STOP_SECONDS,
    RUNNING_FRACTION,
    ControlGroup,
    StopAndGo,
    confine,
    stop_seconds,
)
from tests.support.measuring import Measured
from tests.support.processes import cpu_seconds, is_gone, state
from tests.support.waiting import wait_until


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "while True: pass"])
    yield process
    process.kill()
    process.wait()


def by_whatever_works_here(pid: int) -> ControlGroup | StopAndGo:
    return confine(pid, f"test-{pid}", core_fraction=0.15)


def cpu_share(pid: int, seconds: float) -> float:
    """Cores that the process used over that long."""
    start, before = time.monotonic(), cpu_seconds(pid)
    time.sleep(seconds)
    return (cpu_seconds(pid) - before) / (time.monotonic() - start)


@pytest.mark.parametrize("confine_it", [by_whatever_works_here, StopAndGo])
def test_a_confined_process_gets_under_half_a_core_until_released(
    busy: subprocess.Popen[bytes], confine_it: Callable[[int], ControlGroup | StopAndGo], measured: Measured
) -> None:
    confinement = confine_it(busy.pid)
    try:
        confined = cpu_share(busy.pid, seconds=1.5)
    finally:
        confinement.lift()

    assert confined > 0
    measured("CPU of a confined process", confined, "cores", at_most=0.48)
    # Freed, it runs; how fast depends on what else the machine does.
    before = cpu_seconds(busy.pid)
    wait_until(lambda: cpu_seconds(busy.pid) > before + 0.2)
    assert not (isinstance(confinement, ControlGroup) and confinement.folder.exists())


def test_a_process_that_overran_is_stopped_for_longer() -> None:
    for ran_seconds in (0.02, 0.2):
        assert ran_seconds / (ran_seconds + stop_seconds(ran_seconds)) == pytest.approx(RUNNING_FRACTION)
    assert stop_seconds(4.0) == MAX_STOP_SECONDS


def test_without_a_control_group_the_process_is_stopped_and_started(
    busy: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    (tmp_path / "cgroup.procs").write_text("")

    confinement = confine(busy.pid, "test", core_fraction=0.15, cgroup_root=tmp_path)
    confinement.lift()

    assert isinstance(confinement, StopAndGo)
    assert (tmp_path / "cgroup.procs").read_text() == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "cgroup.procs"]


def test_a_stopped_process_resumes_when_its_stopper_is_killed(busy: subprocess.Popen[bytes]) -> None:
    code = (
        "import sys; from rankscope.cli.demo_job.cpu_limit import StopAndGo; "
        "print(StopAndGo(int(sys.argv[1])).helper_pid, flush=True); sys.stdin.read()"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code, str(busy.pid)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert launcher.stdout is not None
    assert launcher.stdin is not None
    helper = int(launcher.stdout.readline())
    wait_until(lambda: state(busy.pid) == "T")

    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    launcher.stdin.close()
    launcher.stdout.close()

    wait_until(lambda: is_gone(helper))
    assert state(busy.pid) != "T"
