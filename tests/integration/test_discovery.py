"""Real processes: a torchrun job with data-loader workers, a lone process with a ring, another user's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from rankscope.daemon.discovery.ranks import RankDiscovery
from tests.support.waiting import wait_until

from .small_job import small_ddp_job

LONE_TRAINER = """
import os, sys
os.memfd_create("rankscope-ring")
if os.fork() == 0:  # a worker: it inherits the ring
    os.read(0, 1); os._exit(0)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""

SCAN_AS_NOBODY = """
import os
from rankscope.daemon.discovery.ranks import RankDiscovery
if os.getuid() == 0:
    os.setgid(65534), os.setuid(65534)
discovery = RankDiscovery()
discovery.scan()
print([problem.text for problem in discovery.scan().problems])
"""


def test_a_torchrun_jobs_ranks_exclude_launcher_and_workers() -> None:
    with small_ddp_job("discovered") as job:
        discovery = RankDiscovery()
        ranks = [rank for rank in discovery.scan().ranks if rank.job == "discovered"]
        assert [(rank.rank, rank.local_rank, rank.world_size) for rank in ranks] == [(0, 0, 2), (1, 1, 2)]
        assert len({rank.job for rank in ranks}) == 1
        pids = {rank.pid for rank in ranks}
        assert job.pid not in pids
        children = {pid for rank in pids for pid in Path(f"/proc/{rank}/task/{rank}/children").read_text().split()}
        assert children, "the job has data-loader workers"
        assert not pids & {int(child) for child in children}
        again = [rank for rank in discovery.scan().ranks if rank.job == "discovered"]
        assert again == ranks
    assert not [rank for rank in discovery.scan().ranks if rank.job == "discovered"]


def test_a_lone_ring_process_is_a_job_without_its_fork() -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    with subprocess.Popen(
        [sys.executable, "-c", LONE_TRAINER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as trainer:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == "ready\n"
        found = [rank for rank in RankDiscovery().scan().ranks if rank.job.startswith("local-")]
        trainer.communicate("x")
    assert [(rank.job, rank.rank, rank.world_size) for rank in found if rank.pid == trainer.pid] == [
        (f"local-{trainer.pid}", 0, 1)
    ]
    assert all(rank.pid == trainer.pid or f"-{trainer.pid}" not in rank.job for rank in found)


def test_processes_of_other_users_are_counted_in_one_problem() -> None:
    done = subprocess.run([sys.executable, "-c", SCAN_AS_NOBODY], capture_output=True, text=True, timeout=240)
    assert "of other users cannot be read; run as root or with CAP_SYS_PTRACE" in done.stdout, done.stderr


def test_processes_that_come_and_go_do_not_disturb_the_scan() -> None:
    discovery = RankDiscovery()
    churn = subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"])
    scans = 0

    def scanned_often() -> bool:
        nonlocal scans
        discovery.scan()
        scans += 1
        return scans >= 20

    try:
        wait_until(scanned_often)
    finally:
        churn.kill()
        churn.wait()
