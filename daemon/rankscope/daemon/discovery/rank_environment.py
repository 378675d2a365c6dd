"""The identity that a process' environment claims: rank, world size and job from the variables that launchers set.

The environment belongs to the training process, so every value is checked before it becomes a name or a number here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from rankscope.common.text import printable, printable_name

JOB_LENGTH_LIMIT: Final = 128
WORLD_SIZE_LIMIT: Final = 10_000_000
VALUE_LENGTH_LIMIT: Final = 4096

# The only variables that leave this module with a RankProcess: an environment holds secrets.
_KEPT_NAMES: Final = ("TEARDOWN_CUPTI", "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES")
_KEPT_PREFIXES: Final = ("RANKSCOPE_", "KINETO_")
_NO_MASTER: Final = "unnamed"


@dataclass(frozen=True)
class Scheme:
    """The variables of one launcher."""

    name: str
    rank: str
    local_rank: str
    world_size: str


# Innermost launcher first: torchrun under mpirun under SLURM sets all three, and the trainer obeys torchrun.
SCHEMES: Final = (
    Scheme("torch", "RANK", "LOCAL_RANK", "WORLD_SIZE"),
    Scheme("ompi", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE"),
    Scheme("slurm", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS"),
)

_JOB_NAMES: Final = (
    *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_READ_NAMES: Final = frozenset(
    (*_JOB_NAMES, *(name for scheme in SCHEMES for name in (scheme.rank, scheme.local_rank, scheme.world_size)))
)


@dataclass(frozen=True)
class Claim:
    """The identity that a process' environment states. Two processes with equal claims are the same rank."""

    job: str
    rank: int
    local_rank: int
    world_size: int
    # The job's name may be another job's on another machine or in another pod: a loopback address and no run id.
    is_local_name: bool


@dataclass(frozen=True)
class InvalidClaim:
    reason: str


def select(variables: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The few variables that matter, out of a whole environment. The first of a name counts, as with getenv."""
    selected: dict[str, str] = {}
    for name, value in variables:
        if name in _READ_NAMES or _is_kept(name):
            selected.setdefault(name, value[:VALUE_LENGTH_LIMIT])
    return selected


def kept(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if _is_kept(name)}


def _is_kept(name: str) -> bool:
    return name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)


def read_claim(environment: Mapping[str, str]) -> Claim | InvalidClaim | None:
    for scheme in SCHEMES:
        # One of the two alone is somebody else's variable; env:// needs both.
        if scheme.rank in environment and scheme.world_size in environment:
            return _claim(scheme, environment)
    return None


def _claim(scheme: Scheme, environment: Mapping[str, str]) -> Claim | InvalidClaim:
    world_size = _number(environment[scheme.world_size])
    if world_size is None or world_size < 1:
        return _invalid(scheme.world_size, environment, f"not a number from 1 to {WORLD_SIZE_LIMIT}")
    rank = _number(environment[scheme.rank])
    if rank is None or rank >= world_size:
        return _invalid(scheme.rank, environment, f"not a number from 0 to {world_size - 1} ({scheme.world_size} - 1)")
    # One process per container comes without a local rank.
    local_rank = _number(environment.get(scheme.local_rank, "0"))
    if local_rank is None or local_rank >= world_size:
        return _invalid(scheme.local_rank, environment, f"not a number from 0 to {world_size - 1}")
    job, is_local_name = _job(scheme, environment)
    return Claim(printable_name(job, JOB_LENGTH_LIMIT), rank, local_rank, world_size, is_local_name)


def _number(text: str) -> int | None:
    text = text.strip()
    # str.isdigit alone takes superscripts, int() takes underscores and signs.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(WORLD_SIZE_LIMIT))):
        return None
    number = int(text)
    return number if number <= WORLD_SIZE_LIMIT else None


def _invalid(name: str, environment: Mapping[str, str], reason: str) -> InvalidClaim:
    return InvalidClaim(f"{name}={printable(environment[name], 40)!r} is {reason}")


def _job(scheme: Scheme, environment: Mapping[str, str]) -> tuple[str, bool]:
    if scheme.name == "slurm" and (slurm_job := environment.get("SLURM_JOB_ID")):
        step = environment.get("SLURM_STEP_ID")
        return (f"slurm-{slurm_job}.{step}" if step else f"slurm-{slurm_job}"), False
    address = environment.get("MASTER_ADDR", "").strip()
    if scheme.name == "ompi" and not address:
        launch = environment.get("PMIX_NAMESPACE") or environment.get("OMPI_MCA_ess_base_jobid")
        return (f"ompi-{launch}", False) if launch else (f"ompi-{_NO_MASTER}", True)
    job = address or _NO_MASTER
    if port := environment.get("MASTER_PORT"):
        job += f":{port}"
    run_id = environment.get("TORCHELASTIC_RUN_ID", "")
    if run_id:
        job += f"/{run_id}"
    # "none" is torchrun's default.
    return job, run_id in ("", "none") and (not address or _is_loopback(address))


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1", "[::1]", "0.0.0.0", "::")
