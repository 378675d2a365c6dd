from __future__ import annotations

import pytest

from rankscope.analysis.collective_kinds import CollectiveKind, kind_of_kernel, kind_of_note
from rankscope.analysis.stats.robust import take_rows
from rankscope.analysis.traces.communication.collectives import Collectives, find_collectives
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.trace import Category, ProcessGroup
from tests.shared_data import H200, shared
from tests.unit.analysis.traces.trace_builder import Event, make_trace

OP, RUN, KERNEL, NOTE = Category.CPU_OP, Category.RUNTIME, Category.KERNEL, Category.USER_ANNOTATION
MEGA = 1 << 20


def nccl_call(start: float, number: int, kernel_start: float, kernel: str = "AllReduce", **note: object) -> list[Event]:
    """A call as a torch of today leaves it: operator, note and annotation on the host, a kernel on stream 20."""
    noted = {
        "collective": "allreduce",
        "group": "0",
        "group_size": 8,
        "in_elements": MEGA,
        "out_elements": MEGA,
        "element_type": "BFloat16",
        **note,
    }
    return [
        ("c10d::allreduce_", OP, start, 10),
        ("record_param_comms", OP, start + 1, 8, noted),
        ("nccl:all_reduce", NOTE, start + 2, 6),
        ("cudaLaunchKernelExC", RUN, start + 3, 2, {"correlation": number}),
        (
            f"ncclDevKernel_{kernel}_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
            KERNEL,
            kernel_start,
            40,
            {"correlation": number, "stream": 20},
        ),
    ]


def labels(found: Collectives) -> list[str]:
    return [CollectiveKind(kind).label for kind in found.kind]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)", CollectiveKind.ALL_REDUCE),
        ("ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)", CollectiveKind.ALL_REDUCE),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgs)", CollectiveKind.REDUCE_SCATTER),
        ("ncclKernel_AllGather_RING_LL_Sum_int8_t(ncclDevComm*)", CollectiveKind.ALL_GATHER),
        ("ncclDevKernel_Broadcast_RING_LL", CollectiveKind.BROADCAST),
        ("ncclDevKernel_Reduce_Sum_f32_RING_LL", CollectiveKind.REDUCE),
        ("ncclDevKernel_SendRecv(ncclDevKernelArgsStorage<4096ul>)", CollectiveKind.SEND_RECV),
        ("ncclDevKernel_Generic_4(ncclDevKernelArgsStorage<4096ul>)", CollectiveKind.OTHER),
        ("ncclSymkDevKernel_AllGather_LL", CollectiveKind.ALL_GATHER),
    ],
)
def test_tells_a_kernel_s_kind_by_old_and_new_names(name: str, kind: CollectiveKind) -> None:
    assert kind_of_kernel(name) is kind


@pytest.mark.parametrize(
    ("note", "kind"),
    [
        ("_allgather_base", CollectiveKind.ALL_GATHER),
        ("ALLREDUCE", CollectiveKind.ALL_REDUCE),
        ("reduce_scatter_tensor_coalesced", CollectiveKind.REDUCE_SCATTER),
        ("alltoall_base", CollectiveKind.ALL_TO_ALL),
        ("_reduce_oop", CollectiveKind.REDUCE),
        ("send 0->1", CollectiveKind.SEND),
        ("all_reduce_barrier", CollectiveKind.BARRIER),
        ("wait", None),
        ("init", None),
    ],
)
def test_a_note_gives_its_collective_kind_and_a_wait_none(note: str, kind: CollectiveKind | None) -> None:
    assert kind_of_note(note) is kind


def test_ties_each_kernel_once_to_the_call_that_launched_it() -> None:
    events = [*nccl_call(0, 1, 20), *nccl_call(100, 2, 120, in_elements=5, out_elements=5)]
    events.append(("gemm", KERNEL, 110, 30, {"stream": 7}))
    found = find_collectives(make_trace(events, groups=(ProcessGroup("0", "default_pg", tuple(range(8))),)))
    assert labels(found) == ["all_reduce", "all_reduce"]
    assert list(found.bytes) == [2 * MEGA, 10]
    assert list(found.group_size) == [8, 8]
    assert [found.groups[g].name for g in found.group] == ["0", "0"]
    assert list(found.exposed_ns) == [40_000, 20_000]
    assert list(found.sequence) == [0, 1] and not found.sequence_noted.any()
    assert found.measured.all() and list(found.calls) == [1, 1]


def test_takes_the_profiler_s_sequence_and_numbers_what_shares_one() -> None:
    events = [
        *nccl_call(0, 1, 20, sequence=7),
        *nccl_call(100, 2, 120, sequence=8),
        *nccl_call(200, 3, 220, sequence=8),
    ]
    found = find_collectives(make_trace(events))
    assert found.sequence_noted.all()
    assert list(found.sequence) == [7, 8, 8]
    assert list(found.repeat) == [0, 0, 1]


def test_counts_calls_itself_where_only_some_were_numbered() -> None:
    found = find_collectives(make_trace([*nccl_call(0, 1, 20, sequence=7), *nccl_call(100, 2, 120)]))
    assert list(found.sequence) == [0, 1] and not found.sequence_noted.any()


def test_believes_the_note_on_the_kernel_itself() -> None:
    note = {
        "collective": "_allgather_base",
        "group": "3",
        "group_size": 4,
        "in_elements": 10,
        "out_elements": 40,
        "element_type": "Float",
        "stream": 9,
    }
    found = find_collectives(make_trace([("ncclDevKernel_Generic_4(args)", KERNEL, 0, 5, note)]))
    assert labels(found) == ["all_gather"]
    assert list(found.bytes) == [160]
    assert list(found.calls) == [0]


def test_ties_no_kernel_to_another_threads_call_or_by_correlation() -> None:
    events = nccl_call(0, 1, 20)[:3]
    events += [
        ("cudaLaunchKernelExC", RUN, 3, 2, {"correlation": 5, "thread": 2}),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", KERNEL, 20, 9, {"correlation": 5, "external_id": 5}),
        ("nccl:all_reduce", NOTE, 50, 6, {"external_id": 6}),
        ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", KERNEL, 60, 9, {"correlation": 6, "external_id": 6}),
    ]
    found = find_collectives(make_trace(events))
    kernels = take_rows(found, found.kernel_row >= 0)
    assert list(kernels.calls) == [0, 0] and list(kernels.bytes) == [-1, -1]


def test_uses_the_external_id_where_no_launch_was_recorded() -> None:
    events = nccl_call(0, 1, 20)[:3]
    events[1] = (*events[1][:4], {**events[1][4], "external_id": 77})
    events.append(("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", KERNEL, 20, 9, {"correlation": 5, "external_id": 77}))
    found = find_collectives(make_trace(events))
    assert len(found) == 1
    assert list(found.bytes) == [2 * MEGA]


def test_counts_the_calls_of_one_kernel_and_adds_their_bytes() -> None:
    note = {"group": "0", "group_size": 8, "element_type": "float", "collective": "allreduce"}
    events: list[Event] = [
        ("nccl:coalesced", NOTE, 0, 100),
        ("record_param_comms", OP, 1, 8, {**note, "in_elements": 10, "out_elements": 10}),
        ("record_param_comms", OP, 11, 8, {**note, "in_elements": 30, "out_elements": 30}),
        ("cudaLaunchKernelExC", RUN, 50, 2, {"correlation": 1}),
        ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", KERNEL, 60, 40, {"correlation": 1}),
    ]
    found = find_collectives(make_trace(events))
    assert list(found.calls) == [2]
    assert labels(found) == ["all_reduce"]
    assert list(found.bytes) == [160]


def test_gives_no_size_to_a_kernel_of_mixed_call_kinds() -> None:
    note = {"group": "0", "group_size": 8, "element_type": "float", "in_elements": 10, "out_elements": 10}
    events: list[Event] = [
        ("nccl:coalesced", NOTE, 0, 100),
        ("record_param_comms", OP, 1, 8, {**note, "collective": "send", "peer": 1}),
        ("record_param_comms", OP, 11, 8, {**note, "collective": "recv", "peer": 3}),
        ("cudaLaunchKernelExC", RUN, 50, 2, {"correlation": 1}),
        ("ncclDevKernel_SendRecv(args)", KERNEL, 60, 40, {"correlation": 1}),
    ]
    found = find_collectives(make_trace(events))
    assert labels(found) == ["send_recv"]
    assert list(found.calls) == [2] and list(found.bytes) == [-1] and list(found.peer) == [-1]


def test_takes_the_kernels_of_one_call_as_one_transfer() -> None:
    events = nccl_call(0, 1, 20, collective="all_to_all")
    events += [
        ("cudaLaunchKernelExC", RUN, 6, 1, {"correlation": 2}),
        ("ncclDevKernel_SendRecv(args)", KERNEL, 70, 10, {"correlation": 2, "stream": 20}),
    ]
    found = find_collectives(make_trace(events))
    assert list(found.start_ns) == [20_000] and list(found.duration_ns) == [60_000]


def test_keeps_a_call_without_a_kernel_as_unmeasured() -> None:
    found = find_collectives(make_trace(nccl_call(0, 1, 20, group_size=1)[:4]))
    assert list(found.measured) == [False] and list(found.duration_ns) == [0]
    assert list(found.bytes) == [2 * MEGA]


def test_counts_gloo_once_with_the_size_it_copied_back() -> None:
    events: list[Event] = [
        ("c10d::allreduce_", OP, 0, 10),
        ("gloo:all_reduce", NOTE, 5, 100, {"thread": 2}),
        ("cudaMemcpyAsync", RUN, 90, 2, {"thread": 2, "correlation": 4}),
        ("Memcpy HtoD (Pinned -> Device)", Category.MEMCPY, 95, 5, {"correlation": 4, "size_bytes": 4096}),
        ("gemm", KERNEL, 0, 25),
        ("gloo:all_reduce", Category.GPU_ANNOTATION, 95, 5),
    ]
    found = find_collectives(make_trace(events, backend="gloo"))
    assert labels(found) == ["all_reduce"]
    assert list(found.bytes) == [4096]
    assert list(found.duration_ns) == [100_000] and list(found.exposed_ns) == [80_000]


def test_hides_gloo_behind_operators_where_there_is_no_device() -> None:
    events: list[Event] = [
        ("c10d::allreduce_", OP, 5, 100),
        ("gloo:all_reduce", NOTE, 5, 100, {"thread": 2}),
        ("aten::mm", OP, 15, 30, {"thread": 3}),
    ]
    found = find_collectives(make_trace(events, backend="gloo"))
    assert list(found.exposed_ns) == [70_000]


def test_learns_an_unnamed_groups_size_from_a_gather() -> None:
    events = [
        *nccl_call(0, 1, 20, collective="_allgather_base", group_size=-1, in_elements=4, out_elements=256),
        *nccl_call(100, 2, 120, group_size=-1),
    ]
    for event in events:
        if len(event) > 4:
            event[4].pop("group", None)
    events[2] = ("nccl:_all_gather_base", NOTE, 2, 6)
    found = find_collectives(make_trace(events))
    assert list(found.group_size) == [64, 64]
    assert found.groups[0].name == "" and found.groups[0].description == "stream 20"


def test_gives_an_unknown_group_the_size_that_all_groups_share() -> None:
    events: list[Event] = [("gloo:all_reduce", NOTE, 5, 100, {"thread": 2})]
    alike = (ProcessGroup("0", "default_pg", (0, 1)), ProcessGroup("1", "", (0, 1)))
    assert list(find_collectives(make_trace(events, groups=alike)).group_size) == [2]
    unlike = (ProcessGroup("0", "default_pg", (0, 1, 2)), ProcessGroup("1", "", (0, 1)))
    assert list(find_collectives(make_trace(events, groups=unlike)).group_size) == [-1]


def test_a_call_with_a_huge_timestamp_keeps_its_kernel() -> None:
    events = nccl_call(0, 1, 20) + [(f"thread {n}", OP, 9e14 + n, 1, {"thread": n}) for n in range(2, 40)]
    found = find_collectives(make_trace([*events, *nccl_call(9.1e14, 2, 9.1e14 + 20)]))
    assert list(found.calls) == [1, 1] and list(found.bytes) == [2 * MEGA, 2 * MEGA]


def test_sizes_collectives_of_a_real_old_trace_by_input_shapes() -> None:
    trace = read_trace((shared("hta_pair") / "rank-0.json.gz").read_bytes())
    found = find_collectives(trace)
    reductions = take_rows(found, found.kind == CollectiveKind.ALL_REDUCE)
    assert list(reductions.bytes) == [19618307 * 4, 26955536 * 4, 26258430 * 4, 5716654 * 4]
    exchanges = take_rows(found, found.kind == CollectiveKind.ALL_TO_ALL)
    assert list(exchanges.bytes) == [384 * 8, 419430400, 419430400, 2846720 * 4]
    # Every kernel is an old ncclKernel_SendRecv or the like; only the host's calls tell them apart.
    assert found.measured.all() and list(found.calls) == [1] * 10
    assert len(found.groups) == 2 and {group.name for group in found.groups} == {""}


@pytest.mark.parametrize("rank", [0, 1])
def test_sizes_real_gloo_collectives_and_finds_the_first_buckets_hidden(rank: int) -> None:
    found = find_collectives(read_trace((H200 / f"gloo_2ranks_rank{rank}.json.gz").read_bytes()))
    assert labels(found) == ["all_reduce"] * 25
    assert list(found.bytes[[0, 24]]) == [33558528, 8192] and found.measured.all()
    assert found.exposed_ns[0] < found.duration_ns[0] * 0.05 and found.exposed_ns[10] == found.duration_ns[10]


def test_finds_unmeasured_calls_of_a_real_group_of_one() -> None:
    found = find_collectives(read_trace((H200 / "nccl_world1_3steps.json.gz").read_bytes()))
    assert labels(found) == ["all_reduce"] * 75 and set(found.group_size.tolist()) == {1}
    assert not found.measured.any() and found.groups[0].name == "0"


def test_finds_nothing_in_a_trace_without_communication() -> None:
    assert len(find_collectives(make_trace([("aten::mm", OP, 0, 5), ("gemm", KERNEL, 1, 5)]))) == 0
    assert len(find_collectives(make_trace([]))) == 0
