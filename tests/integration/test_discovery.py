"""Real processes: a torchrun job with data-loader workers, a lone process with a ring, another user's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from rankscope.daemon import procfs
from rankscope.daemon.discovery import process_table
from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.daemon.samples import RankProcess
from tests.free_ports import free_port
from tests.support.waiting import wait_until

from .probe_running import DEADLINE_SECONDS, PROBE_PATH
from .small_job import small_ddp_job

LONE_TRAINER = """
import os, sys
from rankscope.probe.ring import Ring
ring = Ring({})
if os.fork() == 0:  # a worker: it inherits the ring
    os.read(0, 1); os._exit(0)
print("ready", flush=True)
sys.stdin.read()
os.wait()
"""

# Both ways to set ranks inside the script. Both train until the file STOP appears.
RANKS_IN_THE_SCRIPT = """
import os, sys, time, torch, torch.distributed as dist, torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel
folder = sys.argv[1]
def train(rank, method):
    if method == "env://":
        variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2]}
        os.environ.update(variables)
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    model = DistributedDataParallel(torch.nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    data = torch.utils.data.DataLoader(torch.ones(64, 8), batch_size=8, num_workers=1, persistent_workers=True)
    is_over = torch.zeros(1)
    while not is_over:
        for batch in data:
            model(batch).sum().backward()
            optimizer.step()
        open(os.path.join(folder, "stepped-%d" % rank), "w").close()
        is_over.fill_(os.path.exists(os.path.join(folder, "STOP")))
        dist.all_reduce(is_over)
        time.sleep(0.05)
if __name__ == "__main__":
    if sys.argv[3:]:
        train(int(sys.argv[3]), "env://")
    else:
        mp.spawn(train, args=("file://" + os.path.join(folder, "store"),), nprocs=2)
"""

SCAN_AS_NOBODY = """
import os
from rankscope.daemon import procfs
from rankscope.daemon.discovery import process_table
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


@contextmanager
def training(folder: Path, *arguments: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Processes of the script, one for each list of arguments, once both ranks have stepped."""
    (folder / "train.py").write_text(RANKS_IN_THE_SCRIPT)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_", "MASTER_"))}
    kept |= {"PYTHONPATH": PROBE_PATH, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, str(folder / "train.py"), str(folder), *more], env=kept, start_new_session=True
        )
        for more in arguments
    ]
    try:
        wait_until(
            lambda: (
                all((folder / f"stepped-{rank}").exists() for rank in range(2))
                or any(process.poll() is not None for process in processes)
            ),
            seconds=DEADLINE_SECONDS,
        )
        yield processes
        (folder / "STOP").touch()
        assert [process.wait(DEADLINE_SECONDS) for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_spawned_ranks_are_one_run_without_launcher_and_workers(tmp_path: Path) -> None:
    with training(tmp_path, ()) as (launcher,):
        ranks = ours(launcher.pid)
        assert [(rank.rank, rank.world_size) for rank in ranks] == [(0, 2), (1, 2)]
        (job,) = {rank.job for rank in ranks}
        assert job.startswith(f"file:{tmp_path / 'store'}".replace("/", "-"))
        assert launcher.pid not in {rank.pid for rank in ranks}


def test_ranks_that_a_script_exports_are_one_run(tmp_path: Path) -> None:
    port = str(free_port())
    with training(tmp_path, (port, "0"), (port, "1")) as processes:
        ranks = [rank for process in processes for rank in ours(process.pid)]
        assert [(rank.rank, rank.world_size, rank.pid) for rank in ranks] == [
            (number, 2, process.pid) for number, process in enumerate(processes)
        ]
        assert {rank.job for rank in ranks} == {f"127.0.0.1:{port}"}


def ours(session: int) -> list[RankProcess]:
    return [rank for rank in RankDiscovery().scan().ranks if os.getsid(rank.pid) == session]


COMPUTING = """
import os
from tests.integration.jobs.ring_keeper import look_like_torch
torch = look_like_torch()
os.fork()  # a data-loader worker, as busy as its parent
while True:
    sum(range(10_000))
"""


def test_a_process_that_computes_is_a_run_without_its_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the probe. How long and how busy is up to the machine, and tested with a clock of its own."""
    monkeypatch.setattr(process_table, "MIN_BUSY_CPU_SECONDS", 0.5)
    monkeypatch.setattr(process_table, "MIN_BUSY_RATIO", 1e-6)
    discovery = RankDiscovery()
    trainer = subprocess.Popen(
        [sys.executable, "-c", COMPUTING],
        env={name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "PYTHONPATH")},
        start_new_session=True,
    )
    try:

        def found() -> list[RankProcess]:
            return [rank for rank in discovery.scan().ranks if os.getsid(rank.pid) == trainer.pid]

        (rank,) = wait_until(found)
        assert (rank.pid, rank.job, rank.world_size) == (trainer.pid, f"local-{trainer.pid}", 1)
        (child,) = Path(f"/proc/{trainer.pid}/task/{trainer.pid}/children").read_text().split()
        used = procfs.read_stat(f"/proc/{child}").user_ticks
        wait_until(lambda: discovery.scan() and procfs.read_stat(f"/proc/{child}").user_ticks > used + 200)
        assert [rank.pid for rank in found()] == [trainer.pid]
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)
        trainer.wait()


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
