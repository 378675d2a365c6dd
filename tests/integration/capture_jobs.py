"""Real 4-rank DDP jobs for captures, each in network, mount and pid namespaces of its own, as in a pod."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, Serving, run_of
from tests.integration.private_tmp import PRIVATE_TMP
from tests.integration.small_job import SCRIPT
from tests.support.waiting import wait_until

LOOPBACK = Path(__file__).parent / "jobs" / "loopback_up.py"
RANKS = 4
# Its own loopback, and a /tmp that nobody else sees.
# Processes of its own, which end with the first of them: torchrun's ranks outlive a torchrun that is killed.
ENTER_NAMESPACES = ("unshare", "--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc")
ENTER = f'"$1" {LOOPBACK} && {PRIVATE_TMP} && printf "$POLLING" >/tmp/kineto.conf && exec $AS_USER "$@"'
# As in most pods. The capability is for a checkout that only root may read.
AS_NOBODY = (
    "setpriv --reuid 65534 --regid 65534 --clear-groups --inh-caps +dac_read_search --ambient-caps +dac_read_search --"
)
# libkineto's period is 5 s unless a file says otherwise.
HURRIED = {"KINETO_CONFIG": "/tmp/kineto.conf", "POLLING": "ON_DEMAND_CONFIG_UPDATE_INTERVAL_SECS=1\\n"}
CAPTURE_SECONDS = 240.0


@dataclass(frozen=True)
class CaptureJob:
    process: subprocess.Popen[bytes]
    folder: Path
    name: str

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")[-5000:]

    def stop(self) -> int:
        """Ask the job to end, and tell how it did."""
        (self.folder / "STOP").touch()
        return self.process.wait(PATIENCE_SECONDS * 3)

    def files_left(self, pid: int) -> list[str]:
        """Traces left behind in the job's own /tmp."""
        return sorted(path.name for path in Path("/proc", str(pid), "root", "tmp").glob("rankscope-*"))


@contextmanager
def capture_job(
    folder: Path,
    run_id: str,
    *,
    slow_rank: int = -1,
    probe: bool = True,
    hurried: bool = False,
    as_user: str = "",
    **more: str,
) -> Iterator[CaptureJob]:
    """`hurried`: asks for work every second, not every five. `more` goes into its environment."""
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    environment = {
        **{name: value for name, value in os.environ.items() if not name.startswith(("RANK", "MASTER_", "KINETO"))},
        "KINETO_USE_DAEMON": "1",
        "TEARDOWN_CUPTI": "1",
        "JOB_FOLDER": str(folder),
        "SLOW_RANK": str(slow_rank),
        **({"RANKSCOPE_PROBE": "1"} if probe else {}),
        **(HURRIED if hurried else {}),
        "AS_USER": as_user,
        **more,
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS), "--master-port", "29512"]
    launch += ["--rdzv-id", run_id, "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29511", str(SCRIPT)]
    # The folder is outside of /tmp, which is another one in there.
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*ENTER_NAMESPACES, "bash", "-c", ENTER, "bash", *launch],
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        ready = folder / "READY"

        def log_text() -> str:
            return (folder / "log").read_text(errors="replace")

        wait_until(lambda: ready.exists() or process.poll() is not None, log_text, 3 * PATIENCE_SECONDS)
        assert process.poll() is None, log_text()
        yield CaptureJob(process, folder, run_id)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        shutil.rmtree(folder, ignore_errors=True)


def job_name(serving: Serving, run_id: str) -> str:
    """What the daemon calls the job, once it sees all its ranks' steps."""
    found: set[str] = set()

    def all_ranks_step() -> bool:
        steps = [(labels, value) for name, labels, value in serving.scrape() if name == "rankscope_rank_steps_total"]
        mine = [run_of(labels) for labels, value in steps if run_id in run_of(labels) and value > 0]
        found.update(mine)
        return len(mine) == RANKS

    serving.wait_until(all_ranks_step)
    (name,) = found
    return name


def capture_command(serving: Serving, *flags: str) -> list[str]:
    return [*MAIN, "capture", "--connect", serving.grpc_target, "--json", *flags]


def capture(serving: Serving, *flags: str) -> tuple[int, dict[str, Any]]:
    """The command's exit code and what it printed."""
    done = subprocess.run(capture_command(serving, *flags), capture_output=True, text=True, timeout=CAPTURE_SECONDS)
    assert done.stdout, f"{done.returncode}: {done.stderr}\n{serving.log[-3000:]}"
    return done.returncode, json.loads(done.stdout)
