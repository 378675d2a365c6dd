"""Real ranks, real gloo: each fault does what it says by the job's own numbers, and nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import pytest

from rankscope.cli import demo_job
from rankscope.cli.demo_job.cpu_limit import ControlGroup
from rankscope.cli.demo_job.faults import parse_fault
from rankscope.cli.demo_job.launcher import DemoJob, DemoJobError
from tests.support.processes import cpu_seconds, is_gone
from tests.support.waiting import wait_until

pytestmark = pytest.mark.acceptance

START_SECONDS = 120.0


@contextmanager
def training(ranks: int, spec: str, training_script: Path | None = None) -> Iterator[DemoJob]:
    with DemoJob(ranks, parse_fault(spec), probe=False, training_script=training_script) as job:
        job.start()
        job.wait_until_training(START_SECONDS, steps=5)
        yield job


def more_steps(job: DemoJob, steps: int) -> list[float]:
    """Waits for that many further steps on every rank; returns the median step time of each over them."""
    target = max(job.steps_done()) + steps
    wait_until(lambda: min(job.steps_done()) >= target, seconds=60.0)
    return [median(seconds[-steps:]) for seconds in job.step_seconds()]


def cpu_per_step(job: DemoJob, steps: int) -> list[float]:
    before, steps_before = [cpu_seconds(pid) for pid in job.pids], job.steps_done()
    more_steps(job, steps)
    used = [cpu_seconds(pid) - then for pid, then in zip(job.pids, before, strict=True)]
    return [cpu / (now - then) for cpu, now, then in zip(used, job.steps_done(), steps_before, strict=True)]


def test_a_slow_rank_makes_every_rank_equally_slow() -> None:
    delay_seconds = 0.15
    with training(4, "slow-rank:rank=2,delay=150") as job:
        healthy = more_steps(job, 20)
        job.start_fault()
        more_steps(job, 3)
        faulty = more_steps(job, 20)

    assert all(now > then + delay_seconds / 2 for now, then in zip(faulty, healthy, strict=True))
    assert max(faulty) < 1.1 * min(faulty)


def test_slow_input_on_one_rank_makes_every_rank_equally_slow() -> None:
    with training(2, "slow-input:rank=1") as job:
        healthy = more_steps(job, 20)
        job.start_fault()
        more_steps(job, 3)
        faulty = more_steps(job, 20)

    # The dataset sleeps for 48 ms a batch; contention that ends meanwhile may hide some of it.
    assert all(now > then + 0.02 for now, then in zip(faulty, healthy, strict=True))
    assert max(faulty) < 1.1 * min(faulty)


def test_a_slow_network_raises_ddps_communication_time_on_all_ranks(tmp_path: Path) -> None:
    script = tmp_path / "train_and_tell.py"
    script.write_text(TRAIN_AND_TELL.format(scripts=str(Path(demo_job.__file__).parent), folder=str(tmp_path)))

    def figures() -> list[dict[str, float]]:
        """Medians of each rank's latest 15 steps, in seconds."""
        more_steps(job, 18)
        ranks = []
        for rank in range(2):
            lines = (tmp_path / f"figures{rank}").read_text().splitlines()[-16:-1]
            rows = [json.loads(line) for line in lines]
            ranks.append({name: median(row[name] for row in rows) / 1e9 for name in rows[0]})
        return ranks

    with training(2, "slow-network", training_script=script) as job:
        healthy = figures()
        job.start_fault()
        faulty = figures()

    for now, then in zip(faulty, healthy, strict=True):
        communication = now["backward_comm_time"] - then["backward_comm_time"]
        assert communication > 0.04
        assert now["forward_compute_time"] - then["forward_compute_time"] < communication / 2


# Reads what DDP itself measured, the way a profiler would, and leaves the training script as it is.
TRAIN_AND_TELL = """
import json, os, sys
sys.path.insert(0, {scripts!r})
import train

class Telling(train.DistributedDataParallel):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._set_ddp_runtime_logging_sample_rate(1)
        self.file = open(os.path.join({folder!r}, "figures" + os.environ["RANK"]), "w", buffering=1)

    def forward(self, *args, **kwargs):
        data = self._get_ddp_logging_data()
        names = ("forward_compute_time", "backward_comm_time")
        self.file.write(json.dumps({{name: data.get(name, 0) for name in names}}) + "\\n")
        return super().forward(*args, **kwargs)

train.DistributedDataParallel = Telling
train.main()
"""


def test_stages_are_balanced_until_the_last_computes_more() -> None:
    with training(4, "stage-imbalance") as job:
        healthy = cpu_per_step(job, 30)
        job.start_fault()
        more_steps(job, 3)
        faulty = cpu_per_step(job, 20)

    assert max(healthy) < 1.4 * min(healthy)
    assert min(faulty[2:]) > 1.8 * max(faulty[:2])


def test_a_starved_rank_gets_less_cpu_and_leaves_no_cgroup() -> None:
    with training(2, "starved:rank=1") as job:
        start, before = time.monotonic(), cpu_seconds(job.pids[1])
        more_steps(job, 40)
        healthy_share = (cpu_seconds(job.pids[1]) - before) / (time.monotonic() - start)
        job.start_fault()
        start, before = time.monotonic(), cpu_seconds(job.pids[1])
        more_steps(job, 20)
        starved_share = (cpu_seconds(job.pids[1]) - before) / (time.monotonic() - start)
        confinement = job.confinement

    assert starved_share < 0.8 * healthy_share
    assert not (isinstance(confinement, ControlGroup) and confinement.folder.exists())


def test_a_hung_rank_blocks_all_and_stopping_leaves_nothing_behind() -> None:
    with training(2, "hang:rank=1") as job:
        pids = job.pids
        folder = Path(f"/proc/{pids[0]}/cwd").readlink()
        job.start_fault()
        # Hung means at rest: no step and no processor time to speak of while twenty healthy steps would have gone by.
        stuck_at = []
        wait_until(lambda: is_standing_still(job, stuck_at), seconds=30.0)
        assert job.poll() == []

    assert all(is_gone(pid) for pid in pids)
    assert not folder.exists()
    job.stop()


def is_standing_still(job: DemoJob, history: list[list[int]]) -> bool:
    history.append(job.steps_done())
    return len(history) > 100 and history[-1] == history[-100]


def test_the_ranks_die_with_a_launcher_that_is_killed() -> None:
    code = (
        "import time; from rankscope.cli.demo_job.faults import Fault; "
        "from rankscope.cli.demo_job.launcher import DemoJob; "
        "job = DemoJob(2, Fault(), probe=False); job.start(); print(*job.pids, flush=True); time.sleep(600)"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert launcher.stdout is not None
    pids = [int(word) for word in launcher.stdout.readline().split()]
    wait_until(lambda: all("train.py" in Path(f"/proc/{pid}/cmdline").read_text().split("\0")[1] for pid in pids))

    os.kill(launcher.pid, signal.SIGKILL)
    launcher.wait()
    launcher.stdout.close()

    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_a_failed_start_names_the_rank_and_its_log_tail(tmp_path: Path) -> None:
    script = tmp_path / "broken.py"
    script.write_text(
        "import os, time\nif os.environ['RANK'] == '1': raise SystemExit('no such shard')\ntime.sleep(600)"
    )
    with DemoJob(2, parse_fault("none"), probe=False, training_script=script) as job:
        job.start()
        with pytest.raises(DemoJobError, match=r"(?s)rank 1 ended with 1 .*no such shard"):
            job.wait_until_training(START_SECONDS)


def test_a_job_whose_port_was_taken_starts_over_with_another(tmp_path: Path) -> None:
    script = tmp_path / "unlucky.py"
    # The first attempt fails as torch does when somebody was faster; the second one makes its steps.
    script.write_text(
        "import os, pathlib, sys, time\n"
        f"sys.path.insert(0, {str(Path(demo_job.__file__).parent)!r})\n"
        "from fault_switch import FaultSwitch\n"
        "seen = pathlib.Path('port-' + os.environ['RANK'])\n"
        "if not seen.exists():\n"
        "    seen.write_text(os.environ['MASTER_PORT'])\n"
        "    raise SystemExit('The server socket has failed to listen: EADDRINUSE, address already in use')\n"
        "assert seen.read_text() != os.environ['MASTER_PORT']\n"
        "switch = FaultSwitch.from_environment(int(os.environ['RANK']))\n"
        "while True:\n"
        "    time.sleep(0.01)\n"
        "    switch.next_step()\n"
    )
    with DemoJob(2, parse_fault("none"), probe=False, training_script=script) as job:
        job.start()
        first_port = job.port
        job.wait_until_training(START_SECONDS)
        assert job.port != first_port
