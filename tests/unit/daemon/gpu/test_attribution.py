from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from rankscope.daemon.gpu.attribution import Attributed, attribute, claimed_gpu, visible_gpus
from rankscope.daemon.gpu.readings import GpuReading, GpuState
from rankscope.daemon.samples import RankProcess
from tests.unit.daemon import gpu_makers
from tests.unit.daemon import window_makers as make
from tools.daemon_samples import gpu_uuid

GPUS = [gpu_makers.gpu(index) for index in range(4)]


def rank(number: int, *namespace_pids: int, **environment: str) -> RankProcess:
    made = make.rank(number)
    return replace(made, environment=environment, namespace_pids=namespace_pids or (made.pid,))


def attributed(
    ranks: list[RankProcess], *gpus: GpuReading, exists: Callable[[int], bool] = lambda _: True
) -> Attributed:
    return attribute(ranks, gpus, exists)


def kinds(found: Attributed) -> list[str | None]:
    return [None if a.problem is None else a.problem.kind for a in found.ranks.values()]


def used(found: Attributed) -> list[list[int]]:
    return [[gpu.index for gpu in attribution.gpus] for attribution in found.ranks.values()]


def test_each_rank_has_the_gpu_the_driver_lists() -> None:
    ranks = [rank(0), rank(1)]
    # The other way round than by their numbers: the list counts, not the order.
    found = attributed(ranks, gpu_makers.gpu(0, ranks[1].pid, 1), gpu_makers.gpu(1, ranks[0].pid))
    assert used(found) == [[1], [0]]
    assert found.shared == frozenset()


def test_only_a_gpu_with_two_ranks_is_shared() -> None:
    ranks = [rank(0), rank(1), rank(2)]
    both = gpu_makers.gpu(0, ranks[0].pid, ranks[1].pid)
    found = attributed(ranks, both, gpu_makers.gpu(1, ranks[2].pid, 99))
    assert used(found) == [[0], [0], [1]]
    assert found.shared == {both.uuid}
    assert kinds(found) == [None, "gpu_mismatch", None]  # rank 1 would be on GPU 1; for rank 2 nothing can be said


def test_a_process_alone_may_use_any_gpu_it_sees() -> None:
    alone = replace(rank(0), world_size=1)
    confined = replace(rank(0, CUDA_VISIBLE_DEVICES="0"), world_size=1)
    gpus = (gpu_makers.gpu(0), gpu_makers.gpu(1, alone.pid))
    assert kinds(attributed([alone], *gpus)) == [None]
    assert kinds(attributed([confined], *gpus)) == ["gpu_mismatch"]


def test_a_rank_on_several_gpus_has_all_and_a_problem() -> None:
    ranks = [rank(0), rank(1)]
    found = attributed(ranks, gpu_makers.gpu(0, ranks[0].pid, ranks[1].pid), gpu_makers.gpu(1, ranks[1].pid))
    assert used(found) == [[0], [0, 1]]
    assert kinds(found) == [None, "several_gpus"]
    problem = found.ranks[ranks[1].key].problem
    assert problem is not None and "GPU 0: 8192 MiB, GPU 1: 8192 MiB" in problem.text and "set_device" in problem.text


def test_a_slices_process_is_not_on_the_whole_gpu() -> None:
    member = rank(0)
    whole = gpu_makers.gpu(0, member.pid)
    part = replace(gpu_makers.gpu(1, member.pid), uuid="MIG-1", index=0, parent_uuid=whole.uuid)
    found = attributed([member], whole, part)
    assert [gpu.uuid for gpu in found.ranks[member.key].gpus] == ["MIG-1"]


def test_an_environment_naming_another_gpu_is_only_a_problem() -> None:
    member = rank(0, CUDA_VISIBLE_DEVICES="1")
    found = attributed([member], gpu_makers.gpu(0, member.pid), gpu_makers.gpu(1))
    assert used(found) == [[0]]
    problem = found.ranks[member.key].problem
    assert problem is not None and problem.kind == "gpu_mismatch" and "hides that GPU" in problem.text


def test_foreign_namespace_pids_count_only_if_the_environment_agrees() -> None:
    """The driver's pid 4001 may be anybody, where it also lists pids that this /proc does not have."""
    ranks = [rank(0), rank(1, CUDA_VISIBLE_DEVICES="1"), rank(2, CUDA_VISIBLE_DEVICES="3")]
    gpus = [gpu_makers.gpu(i, pid) for i, pid in enumerate((ranks[2].pid, ranks[1].pid, 777_777))]
    found = attributed(ranks, *gpus, exists=lambda pid: pid < 777_777)
    assert used(found) == [[], [1], []]
    assert kinds(found) == [None, None, "pid_namespace"]


def test_an_inner_pid_that_the_environment_confirms_names_the_rank() -> None:
    confirmed, doubtful = rank(0, 4000, 17, CUDA_VISIBLE_DEVICES="0"), rank(1, 4001, 18)
    found = attributed([confirmed, doubtful], gpu_makers.gpu(0, 17, 18), gpu_makers.gpu(1), exists=lambda _: False)
    assert used(found) == [[0], []]
    twins = [rank(0, 4000, 17, CUDA_VISIBLE_DEVICES="0"), rank(1, 4001, 17, CUDA_VISIBLE_DEVICES="0")]
    assert used(attributed(twins, gpu_makers.gpu(0, 17), exists=lambda _: False)) == [[], []]


def test_a_cpu_job_on_a_gpu_node_has_no_problem() -> None:
    found = attributed([rank(0), rank(1, CUDA_VISIBLE_DEVICES="")], gpu_makers.gpu(0, 777_777), exists=lambda _: False)
    assert used(found) == [[], []] and kinds(found) == [None, None]


def test_lost_gpus_and_gpus_without_process_lists_have_no_ranks() -> None:
    member = rank(0)
    lost = replace(gpu_makers.gpu(0, member.pid), state=GpuState.LOST)
    silent = replace(gpu_makers.gpu(1), processes=None)
    assert used(attributed([member], lost, silent)) == [[]]


@pytest.mark.parametrize(
    ("environment", "indices"),
    [
        ({}, [0, 1, 2, 3]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, [2, 0]),
        ({"CUDA_VISIBLE_DEVICES": " 1 , 3 "}, [1, 3]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,-1,1"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "0,9,1"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1,1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0x1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "²"}, []),
        ({"CUDA_VISIBLE_DEVICES": "9" * 5000}, []),
        ({"CUDA_VISIBLE_DEVICES": gpu_uuid(2)}, [2]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-00000003"}, [3]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-0000000"}, []),  # the beginning of all four
        ({"CUDA_VISIBLE_DEVICES": "GPU-"}, []),
        ({"CUDA_VISIBLE_DEVICES": "MIG-GPU-00000000/1/0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "MIG-0123"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "all", "CUDA_VISIBLE_DEVICES": "1"}, [1]),
        ({"NVIDIA_VISIBLE_DEVICES": f"{gpu_uuid(3)},{gpu_uuid(2)}"}, [2, 3]),
        ({"NVIDIA_VISIBLE_DEVICES": "2,3", "CUDA_VISIBLE_DEVICES": "1"}, [3]),
        ({"NVIDIA_VISIBLE_DEVICES": "void"}, None),
        ({"NVIDIA_VISIBLE_DEVICES": "something\n"}, None),
    ],
)
def test_visible_devices_are_read_as_cuda_reads_them(environment: dict[str, str], indices: list[int] | None) -> None:
    visible = visible_gpus(environment, GPUS)
    assert (None if visible is None else [gpu.index for gpu in visible]) == indices


def test_an_index_among_unequal_gpus_needs_a_set_order() -> None:
    mixed = [gpu_makers.gpu(0, name="NVIDIA T4"), gpu_makers.gpu(1)]
    assert claimed_gpu({"CUDA_VISIBLE_DEVICES": "0"}, 0, mixed) is None
    assert claimed_gpu({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, 0, mixed) == mixed[0]
    assert claimed_gpu({"CUDA_VISIBLE_DEVICES": mixed[1].uuid}, 3, mixed) == mixed[1]


def test_the_local_rank_chooses_among_several_and_not_beyond_them() -> None:
    assert claimed_gpu({"CUDA_VISIBLE_DEVICES": "3,1"}, 1, GPUS) == GPUS[1]
    assert claimed_gpu({"CUDA_VISIBLE_DEVICES": "3,1"}, 2, GPUS) is None
