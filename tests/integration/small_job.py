"""Starting the small DDP job, and what the tests that watch it share."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.daemon import procfs
from rankscope.daemon.samples import RankProcess

SCRIPT = Path(__file__).parent / "jobs" / "small_ddp.py"


def slow_line() -> int:
    return 1 + next(number for number, line in enumerate(SCRIPT.read_text().splitlines()) if "SLOW LINE" in line)


@contextmanager
def small_ddp_job(run_id: str) -> Iterator[subprocess.Popen[str]]:
    """Two ranks under torchrun, past their twentieth step. A job of its own run id, whatever else runs here."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_"))}
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--rdzv-id", run_id, str(SCRIPT)]
    # A session of its own, so that launcher, ranks and workers can be ended together.
    job = subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        assert job.stdout is not None
        assert job.stdout.readline() == "step 20\n", "the job ended before its twentieth step"
        yield job
    finally:
        os.killpg(job.pid, signal.SIGTERM)
        try:
            job.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.communicate()


def as_rank(pid: int, number: int = 0) -> RankProcess:
    """Any process, as if discovery had found it."""
    return RankProcess("test", number, number, 4, pid, procfs.read_stat(f"/proc/{pid}").start_ticks, (pid,))
