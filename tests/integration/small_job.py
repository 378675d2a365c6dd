"""Starting the plain DDP job, and what the tests that watch it share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.daemon import procfs
from rankscope.daemon.samples import RankProcess
from tests.support.waiting import wait_until
from tools.jobs.launcher import SCRIPTS

SCRIPT = SCRIPTS / "plain_ddp.py"
END_SECONDS = 240.0


def slow_line(of: str = "all ranks") -> int:
    """The line where all ranks sleep in every step, or where `one rank` does."""
    return marked_line(f"# SLOW LINE of {of}")


def marked_line(mark: str) -> int:
    return 1 + next(number for number, line in enumerate(SCRIPT.read_text().splitlines()) if line.endswith(mark))


@contextmanager
def small_ddp_job(run_id: str, ranks: int = 2, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts ranks under torchrun and waits for their twentieth step. The run ID keeps the job apart from other jobs on
    the machine. On exit the job is asked to stop, and has stopped."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", run_id, str(SCRIPT)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        variables = {"JOB_FOLDER": name, "JOB_WORKERS": "1", "OMP_NUM_THREADS": "1", **environment}
        # A new session, so that one signal ends launcher, ranks and workers.
        with (folder / "log").open("wb") as log:
            job = subprocess.Popen(command, env=kept | variables, stdout=log, stderr=log, start_new_session=True)
        try:
            ready = folder / "READY"
            wait_until(lambda: ready.exists() or job.poll() is not None, (folder / "log").read_text, END_SECONDS)
            assert job.poll() is None, (folder / "log").read_text()
            yield job
            (folder / "STOP").touch()
            job.wait(END_SECONDS)
        finally:
            if job.poll() is None:
                os.killpg(job.pid, signal.SIGKILL)
                job.wait()


def as_rank(pid: int, number: int = 0) -> RankProcess:
    """Returns a process as discovery would return a rank."""
    return RankProcess("test", number, number, 4, pid, procfs.read_stat(f"/proc/{pid}").start_ticks, (pid,))
