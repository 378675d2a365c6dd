"""What a process group is for, from what its ranks do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.step_graph.group_kinds import GroupKind, declared_kind, infer_group_kinds
from rankscope.analysis.step_graph.operations import UNKNOWN, Group, Operations
from rankscope.analysis.step_graph.recording import read_recording
from tests.shared_data import ROOT
from tests.support.step_programs import Layout, play

REDUCE, GATHER, SCATTER = CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_GATHER, CollectiveKind.REDUCE_SCATTER
SEND, RECV, EXCHANGE = CollectiveKind.SEND, CollectiveKind.RECV, CollectiveKind.ALL_TO_ALL
MIB = 1 << 20
LAYERS = 8
# Work in ms before an operation; its group, kind, bytes and peer.
Call = tuple[float, int, CollectiveKind, int, int]


def call(work: float, kind: CollectiveKind, size: int = 2 * MIB, group: int = 0, peer: int = UNKNOWN) -> Call:
    return work, group, kind, size, peer


def run(
    *steps: Sequence[Call], ranks: tuple[int, ...] = (0, 1), groups: Iterable[Group] = (), world: int = 4
) -> list[str]:
    """The kinds of groups in which all these ranks do the same."""
    rows = []
    for rank in ranks:
        now = 0.0
        for step, calls in enumerate(steps):
            for place, (work, group, kind, size, peer) in enumerate(calls):
                now += work
                # What has no work before it is in the same kernel.
                now -= 0.5 if work == 0 and rows else 0.0
                rows.append((rank, step, group, kind, place, peer, size, now * 1e6, (now + 0.5) * 1e6, 0))
                now += 0.5
    columns = (np.array(column).astype(np.int64) for column in zip(*rows, strict=True))
    operations = Operations(*columns, groups=tuple(groups) or (Group("a", ranks),))
    return [kind.value for kind in infer_group_kinds(operations, world)]


def ddp(sizes: Iterable[int] = range(25 * MIB, 33 * MIB, MIB), group: int = 0) -> list[Call]:
    """All-reduces from the first gradients on; before, the forward pass."""
    return [call(20.0 if place == 0 else 4.0, REDUCE, size, group) for place, size in enumerate(sizes)]


def tensor(kinds: Sequence[CollectiveKind] = (REDUCE,), layers: int = LAYERS, group: int = 0) -> list[Call]:
    """Two calls of each kind in each layer, forward and backward."""
    forward = [call(2.0, kind, group=group) for _ in range(2 * layers) for kind in kinds]
    return forward + [call(4.0, kind, group=group) for _ in range(2 * layers) for kind in kinds[::-1]]


def fsdp(sizes: Sequence[int] = (64 * MIB, *LAYERS * [16 * MIB]), accumulated: int = 1) -> list[Call]:
    """Parameters are gathered for forward and for backward, gradients are scattered in the backward pass only."""
    forward = [call(4.0, GATHER, size) for size in sizes]
    backward = [[call(4.0, GATHER, size), call(4.0, SCATTER, 2 * size)] for size in sizes[::-1]]
    return accumulated * [*forward, *(each for pair in backward for each in pair)]


STEPS = 6


def test_tensor_groups_call_in_every_layer_of_the_whole_step() -> None:
    assert run(*STEPS * [tensor()]) == ["tensor"]


def test_sequence_parallelism_is_tensor_and_sharded_parameters_are_data() -> None:
    sequence = tensor((GATHER, SCATTER))
    assert run(*STEPS * [sequence]) == ["tensor"]
    assert run(*STEPS * [fsdp()]) == ["data"]
    # Layers alike, as activations are: the forward pass scatters nothing.
    assert run(*STEPS * [fsdp(LAYERS * [16 * MIB])]) == ["data"]
    assert run(*STEPS * [fsdp(accumulated=4)]) == ["data"]


def test_scattering_what_was_never_gathered_has_no_name() -> None:
    scattered = [call(20.0 if place == 0 else 4.0, SCATTER, 3 * MIB) for place in range(LAYERS)]
    assert run(*STEPS * [[*scattered, call(1.0, GATHER, 5 * MIB)]]) == ["unknown"]


@pytest.mark.parametrize("sizes", [[64 * MIB], [MIB, 25 * MIB, 25 * MIB], 12 * [25 * MIB]])
def test_gradients_are_data_on_all_ranks_and_on_some(sizes: list[int]) -> None:
    assert run(*STEPS * [ddp(sizes)], world=2) == ["data"]
    assert run(*STEPS * [ddp(sizes)], world=8) == ["data"]


def test_gradients_that_take_most_of_the_step_are_data() -> None:
    """Buckets back to back: the forward pass is little of the time, but most of the work between them."""
    busy = [call(10.0 if place == 0 else 0.01, REDUCE, 25 * MIB) for place in range(40)]
    assert run(*STEPS * [busy]) == ["data"]


def test_groups_of_the_same_members_have_their_own_purposes() -> None:
    groups = [Group("a", (0, 1)), Group("b", (0, 1)), Group("c", (0, 1))]
    step = [*tensor(), *ddp([64 * MIB], group=1), call(1.0, REDUCE, 4, group=2)]
    assert run(*STEPS * [step], groups=groups) == ["tensor", "data", "unknown"]


def test_small_collectives_of_the_whole_job_are_global() -> None:
    assert run(*STEPS * [[call(1.0, REDUCE, 8)]], world=2) == ["global"]
    assert run(*STEPS * [[call(1.0, REDUCE, 8)]], world=4) == ["unknown"]


def test_only_exchanges_that_vary_are_expert() -> None:
    random = np.random.default_rng(1)
    routed = [[call(2.0, EXCHANGE, int(size)) for size in random.integers(MIB, 4 * MIB, 16)] for _ in range(STEPS)]
    assert run(*routed) == ["expert"]
    assert run(*STEPS * [[call(2.0, EXCHANGE, MIB) for _ in range(16)]]) == ["unknown"]
    # Tables and gradients in one group, as of recommendation models.
    assert run(*([*step, *ddp([64 * MIB])] for step in routed)) == ["unknown"]


def test_messages_both_ways_at_once_are_no_pipeline() -> None:
    random = np.random.default_rng(1)

    def exchange(size: int) -> Iterator[Call]:
        yield call(3.0, SEND, size, peer=1)
        yield call(0.0, RECV, size, peer=1)

    varying = [
        [each for size in random.integers(MIB, 4 * MIB, 8) for each in exchange(int(size))] for _ in range(STEPS)
    ]
    assert run(*varying, ranks=(0,), groups=[Group("a", (0, 1))]) == ["expert"]
    alike = [[each for _ in range(8) for each in exchange(MIB)] for _ in range(STEPS)]
    assert run(*alike, ranks=(0,), groups=[Group("a", (0, 1))]) == ["unknown"], "attention in a ring"


@pytest.mark.parametrize(
    "layout",
    [
        Layout(tensor=2, pipeline=2, data=2, steps=4),
        Layout(tensor=2, pipeline=2, data=2, micro_batches=8, pairs=True, steps=4),
        Layout(pipeline=4, data=2, pairs=True, steps=4),
        Layout(pipeline=4, steps=4),
        Layout(data=3, steps=4),
    ],
)
def test_every_group_of_a_played_job_has_its_kind(layout: Layout) -> None:
    operations = play(layout)
    kinds = infer_group_kinds(operations)
    for group, kind in zip(operations.groups, kinds, strict=True):
        name = "pipeline" if group.name.startswith("pair") else group.name.rstrip("0123456789")
        assert kind.value == name or not (operations.group == operations.groups.index(group)).any()


def test_ends_of_a_pipeline_share_an_embedding() -> None:
    operations = play(Layout(pipeline=4, steps=4))
    for members, kind in (((0, 3), GroupKind.EMBEDDING), ((0, 2), GroupKind.UNKNOWN)):
        extended = _with_a_reduction(operations, members)
        assert infer_group_kinds(extended)[-1] is kind


def _with_a_reduction(operations: Operations, members: tuple[int, int]) -> Operations:
    """A large all-reduce of two ranks after each step."""
    last = [
        int(np.flatnonzero((operations.rank == rank) & (operations.step == step))[-1])
        for rank in members
        for step in np.unique(operations.step)
    ]
    end = operations.stop_ns[last]
    added = {
        "group": np.full(len(last), len(operations.groups)),
        "kind": np.full(len(last), int(REDUCE)),
        "sequence": operations.step[last],
        "peer": np.full(len(last), UNKNOWN),
        "bytes": np.full(len(last), 8 * MIB),
        "start_ns": end + 1_000,
        "stop_ns": end + 2_000,
    }
    names = ("rank", "step", "group", "kind", "sequence", "peer", "bytes", "start_ns", "stop_ns", "queued_ns")
    columns = {
        name: np.concatenate([getattr(operations, name), added.get(name, getattr(operations, name)[last])])
        for name in names
    }
    return Operations(**columns, groups=(*operations.groups, Group("ends", members)))


@pytest.mark.parametrize(
    ("recording", "kinds"),
    [
        ("pp2_dp2_healthy", {"pipeline": 2, "data": 2, "embedding": 2, "global": 1, "unknown": 2}),
        ("pp2_dp2_late_host", {"pipeline": 2, "data": 2, "embedding": 2, "global": 1, "unknown": 2}),
        ("pp4_late_host", {"pipeline": 1, "embedding": 1, "global": 2}),
        ("pp4_interleaved_healthy", {"pipeline": 4, "embedding": 1, "global": 2}),
        ("ep2_healthy", {"expert": 2, "data": 3, "global": 1, "unknown": 4}),
        ("tp2_pp2_slow_gpu", {"tensor": 2, "pipeline": 2, "embedding": 2, "global": 2}),
    ],
)
def test_groups_of_recorded_jobs_have_their_kinds(recording: str, kinds: dict[str, int]) -> None:
    """Unknown are small collectives of a part of the job: norms over a pipeline, counts of tokens."""
    operations = read_recording(ROOT / "tests" / "data" / "nccl" / f"{recording}.npz").operations
    used = set(operations.group.tolist())
    inferred = infer_group_kinds(operations)
    assert Counter(kind.value for number, kind in enumerate(inferred) if number in used) == kinds


@pytest.mark.parametrize(
    ("description", "kind"),
    [
        ("TENSOR_MODEL_PARALLEL_GROUP", "tensor"),
        ("mesh_tp", "tensor"),
        ("PIPELINE_MODEL_PARALLEL_GROUP", "pipeline"),
        ("DATA_PARALLEL_GROUP_WITH_CP_GLOO", "data"),
        ("mesh_dp_shard", "data"),
        ("fsdp", "data"),
        ("EXPERT_MODEL_PARALLEL_GROUP", "expert"),
        ("EXPERT_DATA_PARALLEL_GROUP", "data"),
        ("EMBEDDING_GROUP", "embedding"),
        ("TENSOR_AND_DATA_PARALLEL_GROUP", "unknown"),
        ("MODEL_PARALLEL_GROUP", "unknown"),
        ("default_pg", "unknown"),
        ("", "unknown"),
    ],
)
def test_a_declaration_of_one_dimension_names_the_kind(description: str, kind: str) -> None:
    assert declared_kind(description).value == kind


def test_a_declaration_goes_before_what_is_inferred() -> None:
    assert run(*STEPS * [tensor()], groups=[Group("a", (0, 1), "mesh_dp")]) == ["data"]
    assert run(*STEPS * [tensor()], groups=[Group("a", (0, 1), "default_pg")]) == ["tensor"]


def test_one_step_alone_gives_layers_no_name() -> None:
    """Buckets of equal size, without the forward pass before them, look like layers."""
    assert run(ddp(12 * [25 * MIB])) == ["unknown"]


def test_as_many_groups_as_messages_cost_no_square_of_time() -> None:
    count = 200_000
    numbers = np.arange(count)
    groups = tuple(Group(str(number), (0, number + 1)) for number in range(count))
    zero = np.zeros(count, dtype=np.int64)
    messages = np.where(numbers % 2, int(SEND), int(RECV))
    operations = Operations(
        zero, zero, numbers, messages, zero, numbers + 1, zero + MIB, numbers, numbers + 1, zero, groups
    )
    assert Counter(infer_group_kinds(operations)) == {GroupKind.UNKNOWN: count}
