"""Neighbours of a job that are odd, many, or both."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.security.bystander import Bystander
from tests.support.processes import children
from tests.support.waiting import wait_until

CROWD = 2000
FORKING = """
import os, sys, time
for _ in range(int(sys.argv[1])):
    if os.fork() == 0:
        while True:
            time.sleep(1000)
print("ready", flush=True)
time.sleep(1000)
"""
# A rank is known by the torch it has loaded.
RANK = """
import mmap, sys, time
with open(sys.argv[1], "rb") as library:
    loaded = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
"""
WORKERS = RANK + FORKING.replace("argv[1]", "argv[2]")
UNDUMPABLE = RANK + "import ctypes; ctypes.CDLL(None).prctl(4, 0); print('ready', flush=True); time.sleep(1000)"
STOPPED = RANK + "import os, signal; print('ready', flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
LEADERLESS = (
    RANK
    + """
import ctypes, threading
threading.Thread(target=time.sleep, args=(1000,)).start()
print("ready", flush=True)
ctypes.CDLL(None).pthread_exit(None)
"""
)
AS_NOBODY = ("setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups")
PYTHON = "/usr/bin/python3"  # one that every user may read


@contextmanager
def started(bystander: Bystander, *command: str, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """In a session of its own, which ends with the test."""
    with bystander.node():
        process = subprocess.Popen(
            [*bystander.enter, *command],
            env={"PATH": os.environ["PATH"], **environment},
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield process
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def as_rank(job: str) -> dict[str, str]:
    return {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "10.9.8.7", "TORCHELASTIC_RUN_ID": job}


def test_one_users_thousands_of_idle_processes_cost_others_nothing(bystander: Bystander) -> None:
    with bystander.under_attack() as watch, started(bystander, *AS_NOBODY, PYTHON, "-c", FORKING, str(CROWD)) as crowd:
        assert len(children(crowd.pid)) == CROWD
        bystander.wait_for_windows(3)  # some of them are read in each
        watch.observe()


@pytest.mark.skipif(not Path(PYTHON).exists(), reason="needs a Python that every user may read")
def test_odd_processes_beside_a_job_are_watched_or_left_alone(bystander: Bystander, tmp_path: Path) -> None:
    library = bystander.folder / "libtorch_cpu.so"
    library.write_bytes(b"torch")
    bystander.folder.chmod(0o755)
    odd = {
        "workers": (sys.executable, "-c", WORKERS, str(library), "50"),
        "undumpable": (*AS_NOBODY, PYTHON, "-c", UNDUMPABLE, str(library)),
        "stopped": (*AS_NOBODY, PYTHON, "-c", STOPPED, str(library)),
        "userns": (*AS_NOBODY, "unshare", "--user", "--pid", "--fork", PYTHON, "-c", UNDUMPABLE, str(library)),
        "leaderless": (*AS_NOBODY, PYTHON, "-c", LEADERLESS, str(library)),
    }
    with bystander.under_attack() as watch:
        neighbours = [started(bystander, *command, **as_rank(job)) for job, command in odd.items()]
        with neighbours[0], neighbours[1], neighbours[2], neighbours[3], neighbours[4]:
            found = ("workers", "undumpable", "stopped", "userns")
            wait_until(lambda: all(f"job '{job}" in bystander.log for job in found), lambda: bystander.log)
            watch.observe()
