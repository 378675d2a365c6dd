"""Which GPUs each rank uses: the driver's list of processes, matched with the ranks and checked against the GPU that
their environment claims. Nothing is guessed: a rank may have several GPUs, and a GPU with several ranks is shared.

A claim is no more than that: a script may choose another device, and an index means little unless the order of devices
is known.

Which pod has which GPU is known from the kubelet's pod-resources API (v1 List): a thread polls its socket."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc

from rankscope.daemon.gpu.readings import GpuReading, GpuState
from rankscope.daemon.samples import Problem, RankKey, RankProcess
from rankscope.kubelet.pod_resources_pb2 import ListPodResourcesRequest, ListPodResourcesResponse
from rankscope.kubelet.pod_resources_pb2_grpc import PodResourcesListerStub

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 15.0
ANSWER_SECONDS: Final = 5.0
ANSWER_BYTES: Final = 16 << 20
NAME_CHARACTERS: Final = 253  # the longest a name may be in Kubernetes
GPU_RESOURCES: Final = ("nvidia.com/", "amd.com/")
SOURCE: Final = "gpu"
NAMED_GPUS: Final = 4
MEBIBYTE: Final = 1 << 20
ENTRIES_READ: Final = 256
_EVERYTHING: Final = frozenset({"all"})
_NOTHING: Final = frozenset({"void", "none", "no-dev-files"})
_UNKNOWN: Final = GpuReading(uuid="", index=-1, name="")  # an entry that may name a device, but which is not clear


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
    """`process_exists`: whether /proc has a pid. NVML in a container may list pids of another namespace."""
    usable = [gpu for gpu in gpus if gpu.state is GpuState.OK]
    listed = {gpu.uuid: frozenset(process.pid for process in gpu.processes or ()) for gpu in usable}
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
            # A pid of another namespace may coincide with one of ours: then the environment has to agree.
            if sure or claimed_gpu(rank.environment, rank.local_rank, usable) == gpu:
                found.setdefault(rank.key, []).append(gpu)
            else:
                unsure.setdefault(rank.key, []).append(gpu)
    whole = {rank.key: _without_parents(found.get(rank.key, ())) for rank in ranks}
    users = Counter(gpu.uuid for theirs in whole.values() for gpu in theirs)
    attributions = {
        rank.key: Attribution(
            whole[rank.key], _problem(rank, whole[rank.key], unsure.get(rank.key, ()), usable, foreign, listed)
        )
        for rank in ranks
    }
    return Attributed(attributions, frozenset(uuid for uuid, count in users.items() if count > 1))


def _unique_inner_pids(ranks: Sequence[RankProcess]) -> dict[int, RankProcess]:
    """Ranks by their pids in namespaces within ours; a pid that two ranks have is left out."""
    seen: dict[int, RankProcess | None] = {}
    for rank in ranks:
        for pid in set(rank.namespace_pids) - {rank.pid}:
            seen[pid] = None if pid in seen else rank
    return {pid: rank for pid, rank in seen.items() if rank is not None}


def _without_parents(gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...]:
    """A process on a MIG instance is listed on the whole GPU as well."""
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
    who = str(rank)
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
            f"{who} uses {len(used)} GPUs ({_held(rank, used)}), so its GPU figures are not reported; where one was "
            "meant, call torch.cuda.set_device(local_rank) before anything else touches CUDA"
        )
        return Problem(SOURCE, "several_gpus", text)
    claimed = claimed_gpu(rank.environment, rank.local_rank, gpus)
    if claimed is None or claimed == used[0] or used[0].parent_uuid == claimed.uuid:
        return None
    visible = visible_gpus(rank.environment, gpus) or ()
    hidden = used[0] not in visible and not any(gpu.uuid == used[0].parent_uuid for gpu in visible)
    if rank.world_size == 1 and not hidden:
        return None  # alone, it may choose any GPU
    said = "its environment hides that GPU" if hidden else f"local rank {rank.local_rank} would be GPU {claimed.index}"
    text = (
        f"{who} runs on GPU {used[0].index} ({used[0].uuid}), but {said}; check CUDA_VISIBLE_DEVICES and the script's "
        "torch.cuda.set_device"
    )
    return Problem(SOURCE, "gpu_mismatch", text)


def _claims_any(rank: RankProcess, gpus: Sequence[GpuReading]) -> bool:
    """Whether the environment names a GPU at all: a CPU job on a GPU node has no problem."""
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


def visible_gpus(environment: Mapping[str, str], gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...] | None:
    """The GPUs in the order in which CUDA numbers them for the process; None where that is not known."""
    mounted = _mounted(environment.get("NVIDIA_VISIBLE_DEVICES"), gpus)
    if mounted is None:
        return None
    text = environment.get("CUDA_VISIBLE_DEVICES")
    whole = _in_cuda_order(environment, mounted)
    if text is None:
        return whole
    chosen: list[GpuReading] = []
    for entry in text.split(",")[:ENTRIES_READ]:
        found = _named(entry.strip(), whole, gpus)
        # CUDA stops at the first entry that names no device: what follows is not visible ("0,-1,1" is GPU 0 alone).
        if found is _UNKNOWN:
            return None
        if found is None:
            break
        if found in chosen:
            return ()  # CUDA refuses a device that is named twice
        chosen.append(found)
    return tuple(chosen)


def claimed_gpu(environment: Mapping[str, str], local_rank: int, gpus: Sequence[GpuReading]) -> GpuReading | None:
    """The GPU the rank would use by convention: the only visible one, else the one its local rank numbers."""
    visible = visible_gpus(environment, gpus)
    if visible is None or not visible:
        return None
    if len(visible) == 1:
        return visible[0]
    return visible[local_rank] if local_rank < len(visible) else None


def _mounted(text: str | None, gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...] | None:
    """The GPUs that the container runtime gave to the container, in the driver's order."""
    whole = tuple(sorted((gpu for gpu in gpus if gpu.parent_uuid is None), key=lambda gpu: gpu.index))
    if text is None or not text.strip() or text.strip() in _EVERYTHING:
        return whole
    if text.strip() in _NOTHING:
        # Kubernetes' device plugin may hand devices over in another way and leave "void" here.
        return None
    mounted: set[str] = set()
    for entry in text.split(",")[:ENTRIES_READ]:
        found = _named(entry.strip(), whole, gpus)
        if found is None or found is _UNKNOWN:
            return None
        mounted.add(found.uuid)
    return tuple(sorted((gpu for gpu in gpus if gpu.uuid in mounted), key=lambda gpu: (gpu.index, gpu.uuid)))


def _in_cuda_order(environment: Mapping[str, str], gpus: Sequence[GpuReading]) -> tuple[GpuReading, ...] | None:
    """The driver numbers by PCI address. CUDA puts the fastest first by default; equal GPUs stay in that order."""
    if environment.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID" and len({gpu.name for gpu in gpus}) > 1:
        return None
    return tuple(gpus)


def _named(entry: str, in_order: Sequence[GpuReading] | None, gpus: Sequence[GpuReading]) -> GpuReading | None:
    digits = entry.removeprefix("-")
    return _by_index(entry, in_order) if digits.isascii() and digits.isdigit() else _by_uuid(entry, gpus)


def _by_index(entry: str, gpus: Sequence[GpuReading] | None) -> GpuReading | None:
    if entry.startswith("-") or len(entry) > 4:
        return None
    if gpus is None:
        return _UNKNOWN
    index = int(entry)
    return gpus[index] if index < len(gpus) else None


def _by_uuid(entry: str, gpus: Sequence[GpuReading]) -> GpuReading | None:
    """By the whole UUID or any beginning that only one has. Older drivers named a slice MIG-GPU-<uuid>/<gi>/<ci>, which
    matches nothing in a reading."""
    if entry.startswith("MIG-GPU-"):
        return _UNKNOWN
    if not entry.startswith(("GPU-", "MIG-")) or len(entry) <= len("GPU-"):
        return None
    matches = [gpu for gpu in gpus if gpu.uuid.lower().startswith(entry.lower())]
    if not matches and entry.startswith("MIG-"):
        return _UNKNOWN  # a slice that is not among the readings
    return matches[0] if len(matches) == 1 else None


@dataclass(frozen=True)
class Pod:
    name: str
    namespace: str


NO_PODS: Final[Mapping[str, Pod]] = {}


class MalformedAnswerError(ValueError):
    """A name in the kubelet's answer cannot be a Kubernetes name."""


class KubeletPods:
    def __init__(self, socket: Path) -> None:
        self._socket = socket
        self._pods: Mapping[str, Pod] = NO_PODS
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rankscope-kubelet", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stopping.set()

    def latest(self) -> Mapping[str, Pod]:
        """Pods by the UUID of a GPU that no other pod has. Does not block."""
        return self._pods

    def _run(self) -> None:
        logged = ""
        while not self._stopping.is_set():
            try:
                self._pods = self._ask() if self._socket.is_socket() else NO_PODS
                logged = ""
            except (grpc.RpcError, MalformedAnswerError, OSError) as error:
                self._pods = NO_PODS
                reason = error.code().name if isinstance(error, grpc.RpcError) else str(error)
                if reason != logged:
                    log.warning("%s: pods of GPUs are not known: %s", self._socket, reason[:200])
                logged = reason
            self._stopping.wait(ASK_SECONDS)

    def _ask(self) -> Mapping[str, Pod]:
        options = [("grpc.max_receive_message_length", ANSWER_BYTES), ("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(f"unix:{self._socket}", options=options) as channel:
            stub = PodResourcesListerStub(channel)
            return pods_by_device(stub.List(ListPodResourcesRequest(), timeout=ANSWER_SECONDS))


def pods_by_device(answer: ListPodResourcesResponse) -> Mapping[str, Pod]:
    """A device that two pods have (time slicing) is left out."""
    owners: dict[str, Pod | None] = {}
    for pod in answer.pod_resources:
        owner = Pod(_checked(pod.name), _checked(pod.namespace))
        for container in pod.containers:
            for devices in container.devices:
                if not devices.resource_name.startswith(GPU_RESOURCES):
                    continue
                for identifier in devices.device_ids:
                    # A time-sliced GPU is "GPU-…::3".
                    device = _checked(identifier).partition("::")[0]
                    owners[device] = owner if owners.get(device, owner) == owner else None
    return {device: owner for device, owner in owners.items() if owner is not None and owner.name}


def _checked(name: str) -> str:
    if len(name) > NAME_CHARACTERS or not name.isprintable():
        raise MalformedAnswerError("a name is too long or not printable")
    return name
