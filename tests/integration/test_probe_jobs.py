"""The probe in real training processes, read from outside as the daemon does."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from rankscope.daemon.samples import Problem, StepSample
from rankscope.daemon.steps.collector import StepsCollector
from rankscope.probe import injection
from tests.integration.probe_running import COME_LATE, LATE_SECONDS, PROBE_PATH, running
from tests.support.measuring import Measured

DDP = """
import sys, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from os import environ
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(environ["RANK"]), world_size=2)
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(240, 64)), batch_size=8)
for (batch,) in data:
    out = model(batch)
    if dist.get_rank() == 1:
        time.sleep(0.15)  # much longer than a step of a busy machine
    out.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

BLOCKING = (
    COME_LATE
    + """
import sys, time, torch, torch.distributed as dist, rankscope.probe
from datetime import timedelta
from os import environ
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=int(environ["RANK"]), world_size=2)
rank, one = dist.get_rank(), torch.ones(4)
other = 1 - rank
def p2p():
    ops = [dist.P2POp(dist.irecv if rank == 0 else dist.isend, torch.ones(4), other)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]
calls = [
    lambda: dist.recv(torch.ones(4), 1) if rank == 0 else dist.send(torch.ones(4), 0),
    lambda: dist.barrier(),
    lambda: dist.all_reduce(torch.ones(4)),
    lambda: dist.broadcast(torch.ones(4), 1),
    lambda: dist.all_gather([torch.ones(4), torch.ones(4)], one),
    lambda: dist.all_reduce(torch.ones(4), async_op=True).wait(),
    p2p,
    lambda: dist.monitored_barrier(timeout=timedelta(seconds=60)),
    lambda: dist.all_gather_object([None, None], {"a": 1}),
]
rankscope.probe.step()
for call in calls:
    come_late()
    call()
    rankscope.probe.step()
assert dist.recv.__module__ == "torch.distributed.distributed_c10d" and dist.Work.wait.__name__ == "wait"
mesh = dist.device_mesh.init_device_mesh("cpu", (2, 1), mesh_dim_names=("pp", "dp"))
time.sleep(1.1)
rankscope.probe.step()
"""
)

MANY_WAYS = """
import os, sys, threading, time, torch
assert os.environ["OWN_SITECUSTOMIZE"] == "ran"
real = torch.nn.Linear(32, 16); fake = torch.nn.Linear(32, 16)
critic = torch.optim.SGD(real.parameters(), lr=0.1); generator = torch.optim.Adam(fake.parameters())
class Slow(torch.utils.data.Dataset):
    def __len__(self): return 10
    def __getitem__(self, i): time.sleep(0.02); return torch.ones(32)
steps = 0
for batch in torch.utils.data.DataLoader(Slow()):
    for model, optimizer in ((real, critic), (fake, generator)):
        for _ in range(2):  # gradient accumulation
            model(batch).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    steps += 1
    if steps == 5:
        class Late:
            def __reduce__(self): time.sleep(0.05); return (int, ())
        torch.save(Late(), os.devnull)
    if steps == 6:
        pid = os.fork()
        if pid == 0:
            critic.step()
            links = [os.readlink("/proc/self/fd/" + fd) for fd in os.listdir("/proc/self/fd") if fd.isdigit()
                     and os.path.islink("/proc/self/fd/" + fd)]
            os._exit(any("rankscope" in link for link in links))
        assert os.waitpid(pid, 0)[1] == 0, "the child has a ring"
assert threading.active_count() == 1
"""

THEN_EXEC = """
if len(sys.argv) < 3:
    print("once", flush=True)
    os.read(0, 1)  # until the test has looked at the first ring
    os.execv(sys.executable, [sys.executable, *sys.argv, "again"])
"""


def test_slow_ranks_have_equal_step_time_but_more_self_time(tmp_path: Path, measured: Measured) -> None:
    environment = {"RANKSCOPE_PARALLELISM": "dp=2", "RANKSCOPE_MODEL": "params=1M,sequence=2,batch=4"}
    with running(tmp_path, DDP, ranks=2, **environment) as job:
        job.wait_until_done()
        fast, slow = job.samples()
        step = [float(np.median(sample.step_seconds)) for sample in (fast, slow)]
        own = [float(np.nanmedian(sample.step_seconds - sample.wait_seconds)) for sample in (fast, slow)]
        measured("difference of two ranks' step times", abs(step[0] / step[1] - 1), "of a step", at_most=0.2)
        measured("own time of a slow rank", own[1] / own[0], "times its peer's", at_least=1.5)
        assert own[1] > 0.15
        assert slow.steps_total == 30
        assert slow.collectives_enqueued is not None and slow.collectives_enqueued > 0
        assert (slow.facts.rank, slow.facts.world_size, slow.facts.data) == (1, 2, 1)
        assert slow.facts.model_flops_per_step == pytest.approx(6 * 1e6 * 2 * 4 / 2)
        assert not np.isnan(slow.backward_seconds).all()
        assert [code for code, _ in job.finish()] == [0, 0]


def test_every_blocking_call_of_torch_distributed_counts_as_waiting(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path, BLOCKING, ranks=2) as job:
        job.wait_until_done()
        waiting, late = job.samples()
        calls = 9
        assert len(waiting.step_seconds) == calls + 1
        assert (waiting.wait_seconds[:calls] > 0).all(), waiting.wait_seconds
        assert (waiting.wait_seconds <= waiting.step_seconds).all()
        measured("wait in a blocking call", waiting.wait_seconds[:calls].min(), "s", at_least=LATE_SECONDS * 2 / 3)
        measured("wait of the late rank", float(np.median(late.wait_seconds[:calls])), "s", at_most=LATE_SECONDS / 2)
        assert (waiting.facts.pipeline, late.facts.pipeline) == (0, 1)  # from the DeviceMesh
        assert job.finish() == [(0, ""), (0, "")]


def test_optimizers_accumulation_fork_input_checkpoint_flops_and_exec(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text("import os; os.environ['OWN_SITECUSTOMIZE'] = 'ran'")
    path = os.pathsep.join([injection.inject_folder(), str(own)])
    environment = {"PYTHONPATH": path, "RANKSCOPE_COUNT_FLOPS": "1", "RANKSCOPE_PEAK_FLOPS": "many"}
    with running(tmp_path, MANY_WAYS + THEN_EXEC, 1, **environment) as job:
        (process,) = job.processes
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "once\n"
        (first,) = job.samples()
        assert (first.steps_total, first.steps_lost) == (10, 0)
        process.stdin.write("x")
        process.stdin.flush()
        job.wait_until_done()
        # The same collector finds the second ring, and all steps in it.
        (second,) = job.samples()
        assert (second.steps_total, second.steps_lost) == (10, 0)
        assert len(second.step_seconds) == len(first.step_seconds)
        job.collector = StepsCollector()
        (sample,) = job.samples()
        assert sample.steps_total == 10  # pairs of optimizers
        assert np.median(sample.input_seconds) > 0.018
        assert sample.checkpoint_seconds.max() > 0.045
        assert (sample.checkpoint_seconds > 0.01).sum() == 1
        assert sample.facts.model_flops_per_step == 2 * 2 * (4 * 1 * 32 * 16)
        assert len(sample.step_seconds) == 8  # neither the first, nor the one whose FLOPs were counted
        ((code, errors),) = job.finish()
        assert code == 0
        lines = set(errors.splitlines())
        assert len(lines) == 1
        assert "RANKSCOPE_PEAK_FLOPS=many: not a number; example: RANKSCOPE_PEAK_FLOPS=989T" in lines.pop()


def test_a_failure_inside_the_probe_changes_nothing_but_one_line(tmp_path: Path) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import rankscope.probe.counters as c\n"
        "def broken(torch): raise MemoryError('planted')\n"
        "c.read_memory = broken\n"
    )
    script = (
        "import sys, torch\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "for _ in range(100): optimizer.step()\n"
        "import atexit, os; atexit.register(os._exit, 7)\n"
    )
    with running(tmp_path, script, PYTHONPATH=os.pathsep.join([injection.inject_folder(), str(own)])) as job:
        job.wait_until_done()
        (problem,) = job.look()
        assert isinstance(problem, Problem) and problem.kind == "disabled"
        line = "rankscope: probe disabled: MemoryError: planted; training is not affected\n"
        assert job.finish() == [(7, line)]


def test_a_stalled_rank_keeps_reporting_its_collective_progress(tmp_path: Path) -> None:
    script = (
        "import sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, world_size=1)\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "dist.all_reduce(torch.ones(1)); optimizer.step()\n"
        "print('stepped', flush=True); sys.stdin.readline()\n"
        "dist.all_reduce(torch.ones(1)); dist.all_reduce(torch.ones(1))\n"
    )
    with running(tmp_path, script) as job:
        (process,) = job.processes
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "stepped\n"
        first = job.samples()[0].collectives_enqueued
        assert first is not None
        process.stdin.write("\n")
        process.stdin.flush()
        job.wait_until_done()

        def has_moved(found: list[StepSample | Problem | None]) -> bool:
            return isinstance(found[0], StepSample) and found[0].collectives_enqueued == first + 2

        job.look_until(has_moved)
        assert job.finish()[0][0] == 0


def test_an_ending_process_waits_for_a_read_of_its_recorder(tmp_path: Path) -> None:
    """A thread that is inside torch while the interpreter ends may crash it."""
    own = tmp_path / "own"
    own.mkdir()
    (own / "sitecustomize.py").write_text(
        "import os, time\n"
        "import rankscope.probe.session as session\n"
        "read = session.read_collectives\n"
        "def slow(torch):\n"
        "    if os.path.exists('stalled'):\n"
        "        open('reading', 'w').close(); time.sleep(1.0); open('read', 'w').close()\n"
        "    return read(torch)\n"
        "session.read_collectives = slow\n"
    )
    script = (
        "import os, sys, time, torch, torch.distributed as dist\n"
        "os.chdir(os.path.dirname(sys.argv[1]))\n"
        "dist.init_process_group('gloo', init_method='file://' + sys.argv[1], rank=0, world_size=1)\n"
        "optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)\n"
        "dist.all_reduce(torch.ones(1)); optimizer.step()\n"
        "open('stalled', 'w').close()\n"
        "while not os.path.exists('reading'): time.sleep(0.01)\n"
        "sys.exit(0)\n"
    )
    with running(tmp_path, script, PYTHONPATH=os.pathsep.join([PROBE_PATH, str(own)])) as job:
        assert job.finish() == [(0, "")]
    assert (tmp_path / "read").exists()


def test_a_compiled_training_step_is_counted_and_compiled_once(tmp_path: Path) -> None:
    script = (
        "import sys, time, torch\n"
        "from torch._dynamo.testing import CompileCounter\n"
        "model = torch.nn.Linear(4, 4); optimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "graphs = CompileCounter()\n"
        "@torch.compile(backend=graphs)\n"
        "def update(): optimizer.step()\n"
        "for i in range(20):\n"
        "    model(torch.ones(2, 4)).sum().backward(); update(); time.sleep(0.011)  # a record each\n"
        "    if i == 2: after_warm_up = graphs.frame_count\n"
        "assert graphs.frame_count == after_warm_up, 'the probe makes torch compile again'\n"
    )
    with running(tmp_path, script) as job:
        job.wait_until_done()
        assert job.samples()[0].steps_total == 20
