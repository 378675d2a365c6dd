"""The identity that a process' environment claims: rank, world size and job from the variables that launchers set.

The environment belongs to the training process, so every value is checked before it becomes a name or a number here."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol

from rankscope.common.text import printable, printable_name

JOB_LENGTH_LIMIT: Final = 128
WORLD_SIZE_LIMIT: Final = 10_000_000
KEPT_LENGTH_LIMIT: Final = 4096  # of all values together

# The only variables that leave this module with a RankProcess: an environment holds secrets, and has no bounds.
KEPT_NAMES: Final = (
    *("KINETO_USE_DAEMON", "TEARDOWN_CUPTI", "CUDA_DEVICE_ORDER"),
    *("CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "KINETO_ONDEMAND_TRACE_DIR"),
)
_NO_MASTER: Final = "unnamed"


class Variables(Protocol):
    """An environment: a process', or a dict."""

    def get(self, name: str, /) -> str | None: ...


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


@dataclass(frozen=True)
class Claim:
    """The identity that a process' environment states. Two processes with equal claims are the same rank."""

    job: str
    rank: int
    local_rank: int
    world_size: int
    is_loopback: bool  # the master's address is this machine's own, or there is none
    has_run_id: bool = False
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
    left = KEPT_LENGTH_LIMIT
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
        return _invalid(scheme.world_size, world_text, f"not a number from 1 to {WORLD_SIZE_LIMIT}")
    rank = _number(rank_text)
    if rank is None or rank >= world_size:
        return _invalid(scheme.rank, rank_text, f"not a number from 0 to {world_size - 1} ({scheme.world_size} - 1)")
    # One process per container comes without a local rank.
    local_text = environment.get(scheme.local_rank)
    local_rank = 0 if local_text is None else _number(local_text)
    if local_rank is None or local_rank >= world_size:
        return _invalid(scheme.local_rank, local_text or "", f"not a number from 0 to {world_size - 1}")
    job, is_loopback, has_run_id = _job(scheme, environment)
    return Claim(
        printable_name(job, JOB_LENGTH_LIMIT),
        rank,
        local_rank,
        world_size,
        is_loopback,
        has_run_id,
        launch_depth=2 * (len(SCHEMES) - SCHEMES.index(scheme)) + (local_text is not None),
    )


def _number(text: str) -> int | None:
    text = text.strip()
    # str.isdigit alone takes superscripts, int() takes underscores and signs.
    if not (text.isascii() and text.isdigit() and len(text) <= len(str(WORLD_SIZE_LIMIT))):
        return None
    number = int(text)
    return number if number <= WORLD_SIZE_LIMIT else None


def _invalid(name: str, text: str, reason: str) -> InvalidClaim:
    return InvalidClaim(f"{name}={printable(text, 40)!r} is {reason}")


def _job(scheme: Scheme, environment: Variables) -> tuple[str, bool, bool]:
    """Name, whether its address is this machine's or missing, and whether the launch has a name of its own."""

    def text(name: str) -> str:
        return environment.get(name) or ""

    if scheme.name == "slurm" and (slurm_job := text("SLURM_JOB_ID")):
        step = text("SLURM_STEP_ID")
        return (f"slurm-{slurm_job}.{step}" if step else f"slurm-{slurm_job}"), False, True
    address = text("MASTER_ADDR").strip()
    if scheme.name == "ompi" and not address:
        launch = text("PMIX_NAMESPACE") or text("OMPI_MCA_ess_base_jobid")
        return f"ompi-{launch or _NO_MASTER}", not launch, bool(launch)
    job = address or _NO_MASTER
    if port := text("MASTER_PORT"):
        job += f":{port}"
    run_id = text("TORCHELASTIC_RUN_ID")
    if run_id:
        job += f"/{run_id}"
    # "none" is torchrun's default.
    return job, not address or _is_loopback(address), run_id not in ("", "none")


def _is_loopback(address: str) -> bool:
    return address.startswith("127.") or address in ("localhost", "::1", "[::1]", "0.0.0.0", "::")
