"""Limits a process to a fraction of a core: by a control group if possible, else by stopping and continuing it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

# Shorter than the kernel's default of 100 ms: the process is slow in every step rather than stopped in every second
# one.
PERIOD_SECONDS = 0.05
_MIN_QUOTA_MICROSECONDS = 1000  # the kernel refuses less
# Stopping also interrupts the waits for a device: this share of the time slows a rank about as much as half of its
# processor time.
RUNNING_FRACTION = 0.4
# After a run that was longer than planned, because the helper itself was late, the process is stopped for longer, but
# not for so long that it seems to hang.
MAX_STOP_SECONDS = 0.5
_GROUP_PREFIX = "rankscope-confined-"
_ABANDONED_SECONDS = 60.0


def confine(
    pid: int, name: str, core_fraction: float, *, cgroup_root: Path = Path("/sys/fs/cgroup")
) -> ControlGroup | StopAndGo:
    """Limit the process, with all its threads, to that fraction of a core."""
    for group in _candidate_groups(pid, f"{_GROUP_PREFIX}{name}", cgroup_root):
        _remove_abandoned(group.parent)
        confinement = ControlGroup(group, core_fraction)
        try:
            confinement.take(pid)
        except OSError:
            # Read-only, no controller here, not permitted: try the next candidate.
            confinement.lift()
            continue
        return confinement
    return StopAndGo(pid)


def _candidate_groups(pid: int, name: str, root: Path) -> Iterator[Path]:
    """Where a group may be created: below the process' own group, then at the top, of v1's `cpu` and of v2."""
    own = {"cpu": "/", "": "/"}
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            for controller in controllers.split(","):
                if controller in own:
                    own[controller] = path
    for mount, path in ((root / "cpu", own["cpu"]), (root / "cpu,cpuacct", own["cpu"]), (root, own[""])):
        parents = dict.fromkeys((mount / path.lstrip("/"), mount))
        for parent in parents:
            if (parent / "cgroup.procs").exists():
                yield parent / name


def _remove_abandoned(parent: Path) -> None:
    """A launcher that was killed could not remove its group; one with processes in it cannot be removed."""
    for group in parent.glob(f"{_GROUP_PREFIX}*"):
        with suppress(OSError):
            if time.time() - group.stat().st_mtime > _ABANDONED_SECONDS:
                group.rmdir()


class ControlGroup:
    """A group of one process with a quota, in either version of the kernel's interface."""

    def __init__(self, folder: Path, core_fraction: float) -> None:
        self.folder = folder
        self.core_fraction = core_fraction

    def take(self, pid: int) -> None:
        self.folder.mkdir()
        period = round(PERIOD_SECONDS * 1e6)
        quota = max(_MIN_QUOTA_MICROSECONDS, round(period * self.core_fraction))
        if (self.folder / "cpu.max").exists():
            _write_existing(self.folder / "cpu.max", f"{quota} {period}")
        else:
            _write_existing(self.folder / "cpu.cfs_period_us", str(period))
            _write_existing(self.folder / "cpu.cfs_quota_us", str(quota))
        _write_existing(self.folder / "cgroup.procs", str(pid))

    def lift(self) -> None:
        """Lift the limit and remove the group."""
        parent = self.folder.parent / "cgroup.procs"
        with suppress(OSError):
            for pid in (self.folder / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    _write_existing(parent, pid)
        # A process that has just ended may hold its group for a moment.
        deadline = time.monotonic() + 2.0
        while self.folder.is_dir():
            try:
                self.folder.rmdir()
            except OSError:
                if time.monotonic() > deadline:
                    return
                time.sleep(0.01)


def _write_existing(path: Path, text: str) -> None:
    # Never create: outside of a control group the write must fail.
    with path.open("r+") as file:
        file.write(text)


class StopAndGo:
    """A helper process that lets the other run for a fraction of each period. Its standard input ends with the
    launcher."""

    def __init__(self, pid: int) -> None:
        self._helper = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def helper_pid(self) -> int:
        return self._helper.pid

    def lift(self) -> None:
        """Let the process run and end the helper."""
        if self._helper.stdin is not None:
            self._helper.stdin.close()
        self._helper.wait()


def _stop_and_go(pid: int) -> None:
    """Runs in the helper until standard input ends or the process is gone."""
    handle = os.pidfd_open(pid)  # never signals another process that reuses the pid
    # Ctrl-C and SIGTERM must not leave the process stopped.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(0))
    try:
        while True:
            began = time.monotonic()
            signal.pidfd_send_signal(handle, signal.SIGCONT)
            if _ended(handle, PERIOD_SECONDS * RUNNING_FRACTION):
                return
            signal.pidfd_send_signal(handle, signal.SIGSTOP)
            if _ended(handle, stop_seconds(time.monotonic() - began)):
                return
    except ProcessLookupError:
        return
    finally:
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(handle, signal.SIGCONT)


def stop_seconds(ran_seconds: float) -> float:
    """For how long a process is stopped that ran for so long."""
    return min(MAX_STOP_SECONDS, ran_seconds * (1 - RUNNING_FRACTION) / RUNNING_FRACTION)


def _ended(handle: int, seconds: float) -> bool:
    """Wait; true when the launcher closed the input or the process is gone (its handle becomes readable)."""
    readable, _, _ = select.select([sys.stdin, handle], [], [], seconds)
    return bool(readable)


if __name__ == "__main__":
    _stop_and_go(int(sys.argv[1]))
