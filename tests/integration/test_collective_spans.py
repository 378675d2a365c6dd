"""Collectives of real gloo processes, by process group, and in code that torch compiles."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from rankscope.daemon.steps import ring_reader
from rankscope.probe import ring_layout
from tests.integration.probe_running import COME_LATE, LATE_SECONDS, Job, running
from tests.support.measuring import Measured

START = """
import sys, time, torch, torch.distributed as dist, rankscope.probe
from os import environ
rank, world_size = int(environ["RANK"]), int(environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world_size)
"""
# The table of groups is written about once a second.
REFRESH = """
time.sleep(1.1)
rankscope.probe.step()
"""

GROUPS = (
    START
    + """
pairs = [dist.new_group(ranks) for ranks in ([0, 1], [1, 2], [0, 2])]
again = dist.new_group([0, 1])
rankscope.probe.step()
for _ in range(3):
    dist.all_reduce(torch.ones(4))
    for group in (*pairs, again):
        if dist.get_rank(group) >= 0:
            dist.all_reduce(torch.ones(4), group=group)
    rankscope.probe.step()
"""
    + REFRESH
)

KINDS = (
    START
    + COME_LATE
    + """
import torch.distributed._functional_collectives as functional
from torch.distributed.distributed_c10d import _coalescing_manager
gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor  # the name before torch 2.13
other = 1 - rank
def coalesced():
    with _coalescing_manager():
        dist.all_reduce(torch.ones(4)); dist.all_reduce(torch.ones(8))
def coalesced_asynchronously():
    with _coalescing_manager(async_ops=True) as works:
        dist.all_reduce(torch.ones(4)); dist.all_reduce(torch.ones(8))
    works.wait()
def point_to_point():
    ops = [dist.P2POp(dist.irecv, torch.ones(4), other), dist.P2POp(dist.isend, torch.ones(4), other)]
    [work.wait() for work in dist.batch_isend_irecv(ops)]
calls = [
    lambda: functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1,
    lambda: gather(torch.ones(4), 0, dist.group.WORLD).sum(),
    coalesced,
    coalesced_asynchronously,
    point_to_point,
]
for call in calls:
    call()  # the first of each kind imports for seconds
dist.barrier()
rankscope.probe.step()
for call in calls:
    come_late()
    call()
    rankscope.probe.step()
"""
    + REFRESH
)

UNUSUAL = (
    START
    + """
import datetime, os
import torch.distributed._functional_collectives as functional
def beside_torch_distributed():
    store = dist.PrefixStore("own", dist.HashStore())
    gloo = dist.ProcessGroup.BackendType.GLOO
    group = dist.ProcessGroup(store, 0, 1)
    group._set_default_backend(gloo)
    timeout = datetime.timedelta(seconds=60)
    group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, 0, 1, timeout))
    group.allreduce([torch.ones(4)]).wait()
def scripted(x: torch.Tensor) -> torch.Tensor:
    return functional.wait_tensor(x)
rankscope.probe.step()
beside_torch_distributed()
torch.jit.script(scripted)(torch.ones(4))
late = functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD)
work = dist.all_reduce(torch.ones(4), async_op=True)
dist.destroy_process_group()
work.wait()
late + 1
os.remove(sys.argv[1])
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=world_size)
functional.all_reduce(torch.ones(4), "sum", dist.group.WORLD) + 1
"""
    + REFRESH
)

COMPILED = """
import sys, torch, torch.distributed as dist
from os import environ
import torch.distributed._functional_collectives as functional
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import clear_compilation_metrics, counters, get_compilation_metrics
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
gather = getattr(functional, "all_gather_single", None) or functional.all_gather_tensor
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
def by_functional(x):
    return functional.wait_tensor(functional.all_reduce(x * 2, "sum", dist.group.WORLD)) + 1
def lazily(x):
    return gather(x, 0, dist.group.WORLD) + 1
def in_place(x):
    y = x * 2
    dist.all_reduce(y)
    return y + 1
def asynchronously(x):
    y = x * 2
    work = dist.all_reduce(y, async_op=True)
    work.wait()
    return y + 1
model = torch.nn.Linear(4, 4)
def training(x):
    y = model(x).sum()
    y.backward()
    gradient = model.weight.grad
    dist.all_reduce(gradient, async_op=True).wait()
    return gradient * 2
class Own(torch.optim.Optimizer):
    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.add_(parameter.grad, alpha=-0.1)
class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 2
    def __getitem__(self, index):
        return torch.ones(4) * index
class Saved:
    def __reduce__(self):
        torch.ones(1) + 1
        return int, ()
def doubled(gradient):
    return gradient * 2
model.weight.register_hook(doubled)
own, scaler = Own(model.parameters(), {}), torch.amp.GradScaler("cpu")
def frame_by_frame(x):
    for batch in torch.utils.data.DataLoader(Items(), batch_size=None):
        torch._dynamo.graph_break()  # in a loop: only what is called from here is compiled
        scaler.scale(model(batch).sum()).backward()
        scaler.step(own)
        scaler.update()
        own.step()
        torch.save(Saved(), "/dev/null")
def update(x):
    own.step()
for function in (by_functional, lazily, in_place, asynchronously, training, frame_by_frame, update):
    torch._dynamo.reset()
    counters.clear()
    clear_compilation_metrics()
    compiled = torch.compile(function, backend=(graphs := CompileCounter()), fullgraph=function is update)
    for _ in range(5):
        compiled(torch.ones(4))
        function(torch.ones(4))  # eager beside it
        optimizer.step()
    breaks = sum(counters["graph_break"].values())
    frames = sorted(one.co_name for one in get_compilation_metrics() if one.co_filename == __file__)
    print(function.__name__, graphs.frame_count, graphs.op_count, breaks, *frames, file=sys.stderr)
print("probe:", "rankscope.probe.collective_spans" in sys.modules, file=sys.stderr)
"""

SAID = ("by_functional", "lazily", "in_place", "asynchronously", "training", "frame_by_frame", "update", "probe:")


def tables(job: Job) -> list[dict[tuple[int, int], tuple[int, ...]]]:
    """Of each rank: number and kind of a group to size, position and whether any time was spent in it."""
    found: list[dict[tuple[int, int], tuple[int, ...]]] = []
    for process in job.processes:
        with ring_reader.opened(Path("/proc"), process.pid) as descriptor:
            assert descriptor is not None
            table = ring_reader.read_groups(descriptor)
        assert table is not None
        rows = [row.item() for row in table]
        found.append({(row[0], row[3]): (row[1], row[2], int(row[4] > 0 and row[5] > 0)) for row in rows})
    return found


def test_a_group_has_one_distinct_number_on_all_members(tmp_path: Path) -> None:
    with running(tmp_path, GROUPS, ranks=3) as job:
        job.wait_until_done()
        found = tables(job)
        members: dict[int, dict[int, tuple[int, ...]]] = {}
        for rank, table in enumerate(found):
            assert {kind for _, kind in table} == {ring_layout.GROUP_EXPOSED}
            for (number, _), described in table.items():
                members.setdefault(number, {})[rank] = described
        by_ranks = {tuple(sorted(of_group)): of_group for of_group in members.values()}
        assert len(members) == len(by_ranks)  # two groups of the same ranks are one
        assert sorted(by_ranks) == [(0, 1), (0, 1, 2), (0, 2), (1, 2)]
        for ranks, of_group in by_ranks.items():
            assert of_group == {rank: (len(ranks), position, 1) for position, rank in enumerate(ranks)}
        assert job.finish() == [(0, "")] * 3


def test_functional_and_coalesced_collectives_are_waiting_and_messages_p2p(tmp_path: Path, measured: Measured) -> None:
    with running(tmp_path, KINDS, ranks=2) as job:
        job.wait_until_done()
        waiting, late = job.samples()
        calls = 5
        assert (waiting.wait_seconds[:calls] > 0).all(), waiting.wait_seconds
        assert (waiting.wait_seconds <= waiting.step_seconds).all()
        measured(
            "wait in a functional collective", waiting.wait_seconds[:calls].min(), "s", at_least=LATE_SECONDS * 2 / 3
        )
        measured("wait of the late rank", float(np.median(late.wait_seconds[:calls])), "s", at_most=LATE_SECONDS / 2)
        for table in tables(job):
            assert sorted(kind for _, kind in table) == [ring_layout.GROUP_EXPOSED, ring_layout.GROUP_POINT_TO_POINT]
            assert len({number for number, _ in table}) == 1
        assert job.finish() == [(0, "")] * 2


def test_unusual_groups_torchscript_and_reinitialization_leave_the_probe_on(tmp_path: Path) -> None:
    with running(tmp_path, UNUSUAL) as job:
        job.wait_until_done()
        assert job.samples()[0].steps_total == 2
        ((_, described),) = tables(job)[0].items()
        assert described == (1, 0, 1)
        assert job.finish() == [(0, "")]


def test_the_probe_does_not_change_compiled_graphs(tmp_path: Path) -> None:
    said = []
    for is_on in ("1", "0"):
        folder = tmp_path / is_on
        folder.mkdir()
        with running(folder, COMPILED, RANKSCOPE_PROBE=is_on) as job:
            job.wait_until_done()
            ((code, errors),) = job.finish()
            assert code == 0, errors
            said.append([line for line in errors.splitlines() if line.startswith(SAID)])
    with_probe, without = said
    assert with_probe[-1] == "probe: True" and without[-1] == "probe: False"
    assert len(with_probe) == len(SAID)
    assert {"__getitem__", "__reduce__", "doubled"} <= set(with_probe[-3].split())
    assert with_probe[:-1] == without[:-1]
