"""The identity that a process' environment claims: rank, world size, and the name and attempt of its run.

The name of a run comes from the first of: RANKSCOPE_RUN, Slurm's job, a launcher's id that a restart keeps, the address
and port of the master. In Kubernetes the operator's name replaces it (`job_names`). The environment belongs to the
training process, so every value is checked before it becomes a name or a number here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Protocol

from rankscope.common.text import printable, printable_name
from rankscope.daemon.samples import ProbeFacts

MAX_JOB_LENGTH: Final = 128
MAX_WORLD_SIZE: Final = 10_000_000
MAX_KEPT_LENGTH: Final = 4096  # of all values together

# The only variables that leave this module with a RankProcess: an environment holds secrets, and has no bounds.
KEPT_NAMES: Final = (
    *("KINETO_USE_DAEMON", "TEARDOWN_CUPTI", "CUDA_DEVICE_ORDER"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "KINETO_ONDEMAND_TRACE_DIR"),
    *("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE", "XDG_CACHE_HOME", "HOME"),
    *("RANKSCOPE_FLOPS_PER_STEP", "RANKSCOPE_PEAK_FLOPS", "RANKSCOPE_MODEL"),
)
_NO_MASTER: Final = "unnamed"
_LOCAL_STORES: Final = ("file", "pid")  # in place of an address: a folder may be this machine's own
_ATTEMPTS: Final = ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT")
# Steps of these numbers and above are Slurm's own: the batch script, an interactive shell.
_SLURM_OWN_STEPS: Final = 0xFFFF_0000
# A UUID or hash: hexadecimal, and either long or with digits and letters mixed. A token: long, with digits and letters
# of both cases and no separator.
_HEXADECIMAL: Final = re.compile(r"[0-9a-f]{16,}|(?=[0-9a-f]*[0-9])(?=[0-9a-f]*[a-f])[0-9a-f]{8,15}", re.IGNORECASE)
_TOKEN: Final = re.compile(r"(?=.*[0-9])(?=.*[a-z])(?=.*[A-Z])[0-9A-Za-z]{16,}")


class Variables(Protocol):
    """An environment: a process', or a dict."""

    def get(self, name: str, /) -> str | None: ...


@dataclass(frozen=True)
class Scheme:
    """The variables of one launcher."""

    rank: str
    local_rank: str
    world_size: str


# Innermost launcher first: torchrun under mpirun under SLURM sets all three, and the trainer obeys torchrun.
SCHEMES: Final = (
    Scheme("RANK", "LOCAL_RANK", "WORLD_SIZE"),
    Scheme("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    Scheme("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)
# Deeper than any launcher's.
GROUP_DEPTH: Final = 2 * len(SCHEMES) + 2


@dataclass(frozen=True)
class Claim:
    """The identity that a process' environment states. Two processes with equal claims are the same rank."""

    job: str  # the run's name; without "/"
    rank: int
    local_rank: int
    world_size: int
    is_loopback: bool  # the master's address is this machine's own, or nothing names the launch
    has_run_id: bool = False
    endpoint: str = ""  # address and port of the master: launches with one name at a time differ in it
    attempt: int = field(default=0, compare=False)  # restarts, as Slurm and torchrun count them
    # A launcher has fewer of the variables than the ranks it starts: torchrun is started with RANK by a pod or with
    # SLURM_PROCID by SLURM, and adds LOCAL_RANK.
    launch_depth: int = field(default=0, compare=False)

    @property
    def is_local_name(self) -> bool:
        """The job's name may be another job's on another machine or in another pod."""
        return self.is_loopback and not self.has_run_id


@dataclass(frozen=True)
class InvalidClaim:
    reason: str


def kept(environment: Variables) -> dict[str, str]:
    """A value that is too long is left out rather than cut: half a path is another path."""
    found: dict[str, str] = {}
    left = MAX_KEPT_LENGTH
    for name in KEPT_NAMES:
        value = environment.get(name)
        if value is not None and len(value) <= left:
            found[name] = value
            left -= len(value)
    return found


def read_claim(environment: Variables) -> Claim | InvalidClaim | None:
    for scheme in SCHEMES:
        rank, world_size = environment.get(scheme.rank), environment.get(scheme.world_size)
        # One of the two alone is somebody else's variable; env:// needs both.
        if rank is not None and world_size is not None:
            return _claim(scheme, rank, world_size, environment)
    return None


def _claim(scheme: Scheme, rank_text: str, world_text: str, environment: Variables) -> Claim | InvalidClaim:
    world_size = _number(world_text)
    if world_size is None or world_size < 1:
        return _invalid(scheme.world_size, world_text, f"not a number from 1 to {MAX_WORLD_SIZE}")
    rank = _number(rank_text)
    if rank is None or rank >= world_size:
        return _invalid(scheme.rank, rank_text, f"not a number from 0 to {world_size - 1} ({scheme.world_size} - 1)")
    # One process per container comes without a local rank.
    local_text = environment.get(scheme.local_rank)
    local_rank = 0 if local_text is None else _number(local_text)
    if local_rank is None or local_rank >= world_size:
        return _invalid(scheme.local_rank, local_text or "", f"not a number from 0 to {world_size - 1}")
    named = _run_name(environment)
    return Claim(
        printable_name(named.name, MAX_JOB_LENGTH),
        rank,
        local_rank,
        world_size,
        named.is_loopback,
        named.has_run_id,
        _endpoint(environment),
        _attempt(environment),
        launch_depth=2 * (len(SCHEMES) - SCHEMES.index(scheme)) + (local_text is not None),
    )


def lone_claim(environment: Variables, pid: int) -> Claim:
    """Of a process that trains without a launcher's variables: the only rank of a launch of its own."""
    named = _run_name(environment)
    name = f"local-{pid}" if named.name == _endpoint(environment) else named.name
    return Claim(
        printable_name(name, MAX_JOB_LENGTH),
        *(0, 0, 1),
        is_loopback=True,
        has_run_id=named.has_run_id,
        endpoint=f"pid {pid}",
        attempt=_attempt(environment),
    )


class _Replaced(NamedTuple):
    """An environment in which some variables have other values."""

    environment: Variables
    values: Mapping[str, str | None]

    def get(self, name: str) -> str | None:
        return self.values[name] if name in self.values else self.environment.get(name)


def group_claim(facts: ProbeFacts, environment: Variables) -> Claim | InvalidClaim | None:
    """The identity that the script gave its default process group. None before there is a group."""
    if facts.store is None:
        return None
    address, _, port = facts.store.rpartition(":")
    is_valid_local = facts.local_rank is not None and facts.local_rank < (facts.world_size or 0)
    values = {
        "RANK": str(facts.rank),
        "LOCAL_RANK": str(facts.local_rank) if is_valid_local else None,
        "WORLD_SIZE": str(facts.world_size),
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }
    claim = read_claim(_Replaced(environment, values))
    return replace(claim, launch_depth=GROUP_DEPTH) if isinstance(claim, Claim) else claim


def expects_probe(environment: Variables) -> bool:
    """Whether the process was started with the probe, which says when it trains."""
    return _text(environment, "RANKSCOPE_PROBE") == "1" or "rankscope" in _text(environment, "PYTHONPATH")


def _number(text: str) -> int | None:
    text = text.strip()
    # str.isdigit alone takes superscripts, int() takes underscores and signs.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(MAX_WORLD_SIZE))):
        return None
    number = int(text)
    return number if number <= MAX_WORLD_SIZE else None


def _invalid(name: str, text: str, reason: str) -> InvalidClaim:
    return InvalidClaim(f"{name}={printable(text, 40)!r} is {reason}")


class _NamedRun(NamedTuple):
    name: str
    has_run_id: bool  # restarts keep the name, and no other launch has it
    is_loopback: bool


def _run_name(environment: Variables) -> _NamedRun:
    address = _text(environment, "MASTER_ADDR")
    is_local = _is_loopback(address)
    if name := _text(environment, "RANKSCOPE_RUN"):
        return _NamedRun(name, True, is_local)
    if name := _slurm_name(environment):
        return _NamedRun(name, True, False)
    run_id = _text(environment, "TORCHELASTIC_RUN_ID")
    if is_stable(run_id):
        return _NamedRun(run_id, True, is_local)
    if ray_job := _text(environment, "RAY_JOB_ID"):
        # Ray numbers the jobs of a cluster from one: only with an address is it a name.
        is_local = is_local or not address
        return _NamedRun(f"ray-{ray_job}" + (f"@{address}" if address else ""), not is_local, is_local)
    launch = _text(environment, "PMIX_NAMESPACE") or _text(environment, "OMPI_MCA_ess_base_jobid")
    if launch and not address:
        return _NamedRun(f"ompi-{launch}", True, False)
    return _NamedRun(_endpoint(environment), False, is_local or not address)


def _slurm_name(environment: Variables) -> str:
    """`llama-77`, `llama-70_3` for task 3 of an array, `llama-77+1` for a component of a heterogeneous job, and
    `llama-77.2` for a step that is not the first: steps of one job may run at the same time."""
    job = _text(environment, "SLURM_HET_JOB_ID") or _text(environment, "SLURM_JOB_ID")
    if not job:
        return ""
    array, task = (_text(environment, f"SLURM_ARRAY_{part}") for part in ("JOB_ID", "TASK_ID"))
    name = f"{_text(environment, 'SLURM_JOB_NAME') or 'slurm'}-" + (f"{array}_{task}" if array and task else job)
    group = _text(environment, "SLURM_HET_GROUP") or _text(environment, "SLURM_HET_JOB_OFFSET")
    if group:
        name += f"+{group}"
    step = _text(environment, "SLURM_STEP_ID")
    return f"{name}.{step}" if step.isdecimal() and 0 < int(step[:12]) < _SLURM_OWN_STEPS else name


def is_stable(run_id: str) -> bool:
    """Whether the user chose a run id. "none" is torchrun's default, and --standalone makes a UUID for each start."""
    joined = re.sub("[-_]", "", run_id)
    return run_id not in ("", "none") and not _HEXADECIMAL.fullmatch(joined) and not _TOKEN.fullmatch(run_id)


def _endpoint(environment: Variables) -> str:
    port = _text(environment, "MASTER_PORT")
    return (_text(environment, "MASTER_ADDR") or _NO_MASTER) + (f":{port}" if port else "")


def _attempt(environment: Variables) -> int:
    return sum(_number(_text(environment, name)) or 0 for name in _ATTEMPTS)


def _text(environment: Variables, name: str) -> str:
    return (environment.get(name) or "").strip()


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1", "[::1]", "0.0.0.0", "::", *_LOCAL_STORES)
