"""Processes that discovery takes for ranks: rank variables, and a program whose path is that of a torch library."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


def rank_variables(rank: int, world_size: int = 2, address: str = "10.9.8.7", **more: str) -> dict[str, str]:
    """As torchrun sets them, without a run id of the user's."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "none",
        **more,
    }


class RankProcesses:
    def __init__(self, folder: Path) -> None:
        folder.chmod(0o755)
        # They sleep, and cost next to nothing: a test may have a thousand.
        self.program = folder / "libtorch_sleep"
        shutil.copy(str(shutil.which("sleep")), self.program)
        self._pids: list[int] = []

    def start(
        self,
        variables: Mapping[str, str],
        *,
        uid: int = 0,
        namespaces: Sequence[str] = (),
        command: Sequence[str | Path] = (),
    ) -> int:
        command = [*(("unshare", *namespaces) if namespaces else ()), *(command or (self.program, "600"))]
        if uid:  # not by Popen, which would fork: gRPC may have threads in this process
            command = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", *command]
        environment = {"PATH": os.environ["PATH"], **variables}
        # A session of its own: a shell ends with its children.
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        process.returncode = 0  # waited for by pid
        self._pids.append(process.pid)
        return process.pid

    def start_many(self, variables: Sequence[Mapping[str, str]]) -> list[int]:
        arguments = [str(self.program), "600"]
        started = []
        for each in variables:
            started.append(os.posix_spawn(str(self.program), arguments, dict(each), setpgroup=0))
            self._pids.append(started[-1])
        return started

    def end(self, pid: int) -> None:
        self._pids.remove(pid)
        os.killpg(pid, signal.SIGKILL)
        os.waitpid(pid, 0)

    def end_all(self) -> None:
        for pid in self._pids[:]:
            self.end(pid)


@contextmanager
def rank_processes(folder: Path) -> Iterator[RankProcesses]:
    processes = RankProcesses(folder)
    try:
        yield processes
    finally:
        processes.end_all()
