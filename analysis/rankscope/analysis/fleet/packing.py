"""Runs that could share a GPU or use a smaller one.

Shared clusters are full of repetitive runs on one GPU each that use it little: sweeps of hyperparameters, tests of one
script. Runs of the same image, command and user are grouped, and each group gets the ways to pack it with what they
would save. Nothing is said about runs whose utilization or memory is not known."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rankscope.analysis.fleet.facts import RUN_LABELS, FleetFacts, RunFacts, RunKey, run_title, team_of
from rankscope.analysis.models.device_peaks import DeviceSpec, PeakError, find_device, known_devices
from rankscope.analysis.verdicts.thresholds import FleetThresholds

# MIG by device: its compute and memory slices, and of each instance both, with how many fit on a device.
_SEVENTHS = ((1, 1, 7), (2, 2, 3), (3, 4, 2))
_FOURTHS = ((1, 1, 4), (2, 2, 2))
_MIG = {"A100": (7, 8, _SEVENTHS), "A30": (4, 4, _FOURTHS)}
_MIG |= dict.fromkeys(("H100", "H200", "GH200", "B200", "GB200", "B300", "GB300"), (7, 8, _SEVENTHS))
MAX_SHARING = 48  # clients of MPS on a device
MAX_RUNS_NAMED = 5


@dataclass(frozen=True)
class Option:
    way: str  # fuse, MPS, MIG or smaller GPU
    detail: str
    runs_per_gpu: int
    saved_gpu_hours: float
    assumption: str


@dataclass(frozen=True)
class PackingGroup:
    """Repetitive runs on one GPU each, and how they could be packed: the largest saving first."""

    team: str
    user: str
    image: str
    command: str
    device: str
    runs: int
    run_names: tuple[str, ...]  # some of them
    gpu_hours: float
    utilization_ratio: float  # median of the runs
    memory_bytes: float  # of the run that needs most
    memory_total_bytes: float
    options: tuple[Option, ...]

    @property
    def saved_gpu_hours(self) -> float:
        return self.options[0].saved_gpu_hours


def find_groups(facts: FleetFacts, thresholds: FleetThresholds) -> tuple[PackingGroup, ...]:
    """The largest saving first."""
    hours = {_key(key): value for key, value in facts.used.sums(*RUN_LABELS).items()}
    groups: dict[tuple[str, ...], list[RunKey]] = {}
    for key, run in facts.runs.items():
        program = run.program
        is_known = program.command and run.utilization_ratio is not None and run.memory_bytes and run.memory_total_bytes
        if program.world_size == 1 and is_known and hours.get(key, 0.0) > 0:
            who = (key[0], team_of(key, run), program.user, program.image, program.command, run.device)
            groups.setdefault(who, []).append(key)
    found = [
        group
        for who, keys in groups.items()
        if len(keys) >= thresholds.packed_runs
        and (group := _group(who, sorted(keys), facts.runs, hours, thresholds)) is not None
    ]
    return tuple(sorted(found, key=lambda group: (-group.saved_gpu_hours, group.command, group.user)))


def _key(labels: tuple[str, ...]) -> RunKey:
    cluster, namespace, run = labels
    return cluster, namespace, run


def _group(
    who: tuple[str, ...],
    keys: Sequence[RunKey],
    runs: Mapping[RunKey, RunFacts],
    hours: Mapping[RunKey, float],
    thresholds: FleetThresholds,
) -> PackingGroup | None:
    """None if the group is busy or small, or nothing would be saved."""
    facts = [runs[key] for key in keys]
    utilization = float(np.median([run.utilization_ratio for run in facts if run.utilization_ratio is not None]))
    used = sum(hours[key] for key in keys)
    if used < thresholds.packed_gpu_hours or utilization >= thresholds.packed_utilization_ratio:
        return None
    memory = max(run.memory_bytes or 0.0 for run in facts)
    total = min(run.memory_total_bytes or 0.0 for run in facts)
    need = _Need(len(keys), used, utilization, memory, total, who[-1])
    options = sorted(_options(need, thresholds), key=lambda option: -option.saved_gpu_hours)
    if not options:
        return None
    _, team, user, image, command, device = who
    names = tuple(run_title(key) for key in keys[:MAX_RUNS_NAMED])
    return PackingGroup(
        team, user, image, command, device, len(keys), names, used, utilization, memory, total, tuple(options)
    )


@dataclass(frozen=True)
class _Need:
    runs: int
    gpu_hours: float
    utilization_ratio: float
    memory_bytes: float
    memory_total_bytes: float
    device: str

    def saving(self, runs_per_gpu: int) -> float:
        return self.gpu_hours * (1.0 - 1.0 / runs_per_gpu)


def _options(need: _Need, thresholds: FleetThresholds) -> Iterator[Option]:
    """In order of preference where they save the same."""
    busy, full = thresholds.shared_utilization_ratio, thresholds.shared_memory_ratio
    together = int(min(busy / max(need.utilization_ratio, 1e-3), full * need.memory_total_bytes / need.memory_bytes))
    together = min(together, need.runs, MAX_SHARING)
    limits = f"utilization adds up to at most {100 * busy:.0f} %, memory to at most {100 * full:.0f} % of the device"
    if together >= 2:
        said = f"{limits}; {together} runs are there at the same time; nothing isolates them from each other"
        yield Option("MPS", f"{together} runs on a GPU", together, need.saving(together), said)
        said = f"{limits}; runs differ in hyperparameters only, so that one process trains {together} models at once"
        yield Option("fuse", f"{together} models in one process", together, need.saving(together), said)
    device = _device(need.device)
    if device is None:
        return
    instances = _mig(need, device, busy, full)
    if instances is not None:
        slices, count = instances
        kept = min(count, need.runs)
        said = f"a run keeps its speed on {slices} of the GPU's slices; {kept} runs are there at the same time"
        yield Option("MIG", f"{count} instances of {slices}g", kept, need.saving(kept), said)
    smaller = _smaller(need, device, busy, full)
    if smaller is not None:
        other, ratio = smaller
        said = (
            f"a run needs at most {100 * busy:.0f} % of a {other.name}, which has {100 * ratio:.0f} % of the "
            f"{device.name}'s FLOP/s or bandwidth, whichever is less; its hour counts as that share of an hour"
        )
        yield Option("smaller GPU", other.name, 1, need.gpu_hours * (1.0 - ratio), said)


def _device(name: str) -> DeviceSpec | None:
    try:
        return find_device(name)
    except PeakError:
        return None


def _mig(need: _Need, device: DeviceSpec, busy: float, full: float) -> tuple[int, int] | None:
    """Compute slices of the smallest instance that holds a run, and how many instances a device has."""
    compute, memory, sizes = _MIG.get(device.name.split()[0], (1, 1, ()))
    for slices, parts, count in sizes:
        has_speed = need.utilization_ratio <= busy * slices / compute
        if has_speed and need.memory_bytes <= full * need.memory_total_bytes * parts / memory:
            return slices, count
    return None


def _smaller(need: _Need, device: DeviceSpec, busy: float, full: float) -> tuple[DeviceSpec, float] | None:
    """The slowest device that is fast and large enough, and its share of the speed of this one."""
    found = []
    for name in known_devices():
        other = find_device(name)
        mine, its = _peak(device), _peak(other)
        if mine is None or its is None or _is_amd(other) != _is_amd(device):
            continue  # a program for one vendor does not run on the other's
        ratio = min(its / mine, other.gb_per_second / device.gb_per_second)
        fits = need.memory_bytes <= full * other.memory_gb * 1e9
        if ratio < 1.0 and fits and need.utilization_ratio / ratio <= busy:
            found.append((ratio, other))
    if not found:
        return None
    ratio, other = min(found, key=lambda pair: (pair[0], pair[1].name))
    return other, ratio


def _is_amd(device: DeviceSpec) -> bool:
    return device.name.startswith("MI")


def _peak(device: DeviceSpec) -> float | None:
    return device.tflops.get("bf16") or device.tflops.get("fp16")
