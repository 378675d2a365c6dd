"""Whose GPU is whose: the driver's list of processes held against the ranks, and their environment against both.

Nothing is guessed: a rank on several GPUs has several, and a GPU with several ranks is shared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rankscope.daemon.collectors.gpu.readings import GpuReading, GpuState
from rankscope.daemon.collectors.gpu.visible_devices import claimed_gpu, visible_gpus
from rankscope.daemon.samples import Problem, RankKey, RankProcess

SOURCE = "gpu"
NAMED_GPUS = 4
MEBIBYTE = 1 << 20


@dataclass(frozen=True)
class Attribution:
    """The GPUs of one rank."""

    gpus: tuple[GpuReading, ...] = ()
    problem: Problem | None = None

    @property
    def only(self) -> GpuReading | None:
        return self.gpus[0] if len(self.gpus) == 1 else None


@dataclass(frozen=True)
class Attributed:
    ranks: Mapping[RankKey, Attribution] = field(default_factory=dict)
    shared: frozenset[str] = frozenset()  # uuids that more than one rank uses


def attribute(
    ranks: Sequence[RankProcess], gpus: Sequence[GpuReading], process_exists: Callable[[int], bool]
) -> Attributed:
    """`process_exists` tells whether /proc has a pid: NVML in a container may speak of another namespace's."""
    usable = [gpu for gpu in gpus if gpu.state is GpuState.OK]
    listed = _pids_by_gpu(usable)
    foreign = any(not process_exists(pid) for pids in listed.values() for pid in pids)
    by_pid = {rank.pid: rank for rank in ranks}
    inner = _unique_inner_pids(ranks)
    found: dict[RankKey, list[GpuReading]] = {}
    unsure: dict[RankKey, list[GpuReading]] = {}
    for gpu in usable:
        for pid in listed.get(gpu.uuid, ()):
            rank = by_pid.get(pid)
            sure = rank is not None and not foreign
            rank = rank or (inner.get(pid) if foreign else None)
            if rank is None:
                continue
            # Pids of another namespace may coincide with ours: then the environment has to say the same.
            if sure or claimed_gpu(rank.environment, rank.local_rank, usable) == gpu:
                found.setdefault(rank.key, []).append(gpu)
            else:
                unsure.setdefault(rank.key, []).append(gpu)
    whole = {rank.key: _without_parents(found.get(rank.key, ())) for rank in ranks}
    users: dict[str, int] = {}
    for theirs in whole.values():
        for gpu in theirs:
            users[gpu.uuid] = users.get(gpu.uuid, 0) + 1
    attributions = {
        rank.key: Attribution(
            whole[rank.key], _problem(rank, whole[rank.key], unsure.get(rank.key, ()), usable, foreign, listed)
        )
        for rank in ranks
    }
    return Attributed(attributions, frozenset(uuid for uuid, count in users.items() if count > 1))


def _pids_by_gpu(gpus: Sequence[GpuReading]) -> dict[str, frozenset[int]]:
    return {gpu.uuid: frozenset(process.pid for process in gpu.processes or ()) for gpu in gpus}


def _unique_inner_pids(ranks: Sequence[RankProcess]) -> dict[int, RankProcess]:
    """Ranks by the pids that namespaces within ours know them by; a pid that two ranks have names neither."""
    seen: dict[int, RankProcess | None] = {}
    for rank in ranks:
        for pid in set(rank.namespace_pids) - {rank.pid}:
            seen[pid] = None if pid in seen else rank
    return {pid: rank for pid, rank in seen.items() if rank is not None}


def _without_parents(gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """A process on a slice is listed on the GPU it is cut from as well."""
    parents = {gpu.parent_uuid for gpu in gpus}
    return tuple(gpu for gpu in gpus if gpu.uuid not in parents)


def _problem(
    rank: RankProcess,
    used: Sequence[GpuReading],
    unsure: Sequence[GpuReading],
    gpus: Sequence[GpuReading],
    foreign: bool,
    listed: Mapping[str, frozenset[int]],
) -> Problem | None:
    who = f"rank {rank.rank} (pid {rank.pid})"
    if not used:
        if unsure or (foreign and not any(rank.pid in pids for pids in listed.values()) and _claims_any(rank, gpus)):
            text = (
                f"{who}: the driver names processes by pids of another namespace, so its GPU is not known; "
                "run the daemon in the host's pid namespace (hostPID)"
            )
            return Problem(SOURCE, "pid_namespace", text)
        return None
    if len(used) > 1:
        text = (
            f"{who} uses {len(used)} GPUs ({_held(rank, used)}), so its GPU figures are not told; where one was meant, "
            "call torch.cuda.set_device(local_rank) before anything else touches CUDA"
        )
        return Problem(SOURCE, "several_gpus", text)
    claimed = claimed_gpu(rank.environment, rank.local_rank, gpus)
    if claimed is None or claimed == used[0] or used[0].parent_uuid == claimed.uuid:
        return None
    visible = visible_gpus(rank.environment, gpus) or ()
    hidden = used[0] not in visible and not any(gpu.uuid == used[0].parent_uuid for gpu in visible)
    said = "its environment hides that GPU" if hidden else f"local rank {rank.local_rank} would be GPU {claimed.index}"
    text = (
        f"{who} runs on GPU {used[0].index} ({used[0].uuid}), but {said}; check CUDA_VISIBLE_DEVICES and the script's "
        "torch.cuda.set_device"
    )
    return Problem(SOURCE, "gpu_mismatch", text)


def _claims_any(rank: RankProcess, gpus: Sequence[GpuReading]) -> bool:
    """Whether the environment speaks of a GPU at all: a CPU job on a GPU node has no problem."""
    named = "CUDA_VISIBLE_DEVICES" in rank.environment or "NVIDIA_VISIBLE_DEVICES" in rank.environment
    return named and bool(visible_gpus(rank.environment, gpus))


def _held(rank: RankProcess, gpus: Sequence[GpuReading]) -> str:
    parts = []
    for gpu in gpus[:NAMED_GPUS]:
        held = [process.used_bytes for process in gpu.processes or () if process.pid == rank.pid]
        amount = sum(used or 0 for used in held)
        parts.append(f"GPU {gpu.index}: {amount / MEBIBYTE:.0f} MiB" if amount else f"GPU {gpu.index}")
    more = len(gpus) - NAMED_GPUS
    return ", ".join(parts) + (f" and {more} more" if more > 0 else "")
