"""What a capture requests of one rank, what a back end returns, and how tenants share limited places: nobody loses a
place to a tenant that has more of them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Protocol, TypeAlias, TypeVar

from rankscope.daemon import procfs
from rankscope.daemon.samples import RankProcess
from rankscope.probe import ring_layout

MAX_STEPS = 100
MAX_WAIT_STEPS = 1000
MAX_WARMUP_STEPS = 100
MAX_REPEAT = ring_layout.MAX_WINDOWS
MAX_RECORDING_SECONDS = 60.0
DEFAULT_PATIENCE_SECONDS = 60.0
MAX_PATIENCE_SECONDS = 600.0

Item = TypeVar("Item", bound=Hashable)


@dataclass(frozen=True)
class Options:
    shapes: bool = False
    stacks: bool = False
    memory: bool = False
    flops: bool = False
    modules: bool = False
    allow_slowdown: bool = False
    wait_steps: int = 0
    warmup_steps: int | None = None  # None: the back end decides
    repeat: int = 1

    @property
    def is_scheduled(self) -> bool:
        return self.wait_steps > 0 or self.warmup_steps is not None or self.repeat > 1


@dataclass(frozen=True)
class Order:
    """One rank's part of a capture. Either `steps` or `seconds` is set, both within bounds. All ranks of a capture
    have the same start."""

    capture_id: str
    rank: RankProcess
    steps: int | None
    seconds: float | None
    start_unix_millis: int
    give_up_unix_seconds: float  # a rank that is not available by then is reported with the reason
    options: Options = field(default_factory=Options)
    step_seconds: float | None = None  # recent, if known

    @property
    def record_seconds(self) -> float | None:
        """The expected recording time, if known."""
        if self.seconds is not None:
            return self.seconds
        return None if self.step_seconds is None or self.steps is None else self.steps * self.step_seconds


class Stage(Enum):
    ARMED = "armed"
    RUNNING = "running"


# Makes room for a file of the workspace and what is made of it; raises CaptureError if there is none.
Reserve: TypeAlias = Callable[[Path, int], object]


@dataclass(frozen=True)
class Workspace:
    """Where a capture's recordings lie until they are processed. Nothing is written there without a reservation."""

    folder: Path
    reserve: Reserve = lambda path, size_bytes: None


@dataclass(frozen=True)
class Recording:
    """A recording: a file of the daemon (never one that the training process can still reach), not yet compressed."""

    path: Path
    is_trace: bool  # a Kineto trace; else folded stacks of py-spy
    start_unix_millis: int | None = None
    steps: int | None = None
    notes: tuple[str, ...] = ()
    more_windows: tuple[Path, ...] = ()  # files like the first; `steps` counts all windows together


class CaptureError(Exception):
    """Why a rank delivers nothing: the subject, the reason and the next step, for the user."""


class BadRequestError(CaptureError):
    """The caller has to ask for something else."""


class UnknownError(CaptureError):
    """There is no such run, or the run has no such rank."""


class CancelledError(CaptureError):
    pass


class NoStepsError(CaptureError):
    """The process makes no steps, so that there is nothing but stacks to record."""


class Backend(Protocol):
    """A way to record. `record` blocks, in one thread per rank. It watches `cancelled` and always leaves the
    training process as it was."""

    name: str
    keeps_schedules: bool  # waits, warms up and repeats as the options request
    needs_steps: bool  # records nothing of a process that makes none

    def objection(self, rank: RankProcess) -> str | None:
        """Why this back end cannot record this rank; None if it can."""
        ...

    def record(
        self, order: Order, workspace: Workspace, report: Callable[[Stage], None], cancelled: threading.Event
    ) -> Recording: ...


def tenant_of(rank: RankProcess, proc_root: Path = Path("/proc")) -> str:
    """Its pod, else its user. The job's name is the process' own choice: it counts only for a process that has just
    ended."""
    if rank.pod is not None:
        return f"pod {rank.pod}"
    uid = procfs.real_uid(f"{proc_root}/{rank.pid}")
    return f"job {rank.job}" if uid is None else f"uid {uid}"


def surplus(oldest_first: Sequence[Item], tenant: Callable[[Item], str], limit: int) -> list[Item]:
    """What goes so that no more than `limit` stay: each time the oldest of the tenant that has the most."""
    of_tenant: dict[str, deque[Item]] = {}
    for item in oldest_first:
        of_tenant.setdefault(tenant(item), deque()).append(item)
    return [max(of_tenant.values(), key=len).popleft() for _ in range(len(oldest_first) - max(0, limit))]


def fair_choice(items: Mapping[Item, str], limit: int, incumbents: Collection[object]) -> set[Item]:
    """At most `limit` of the items, which have tenants: the first of each tenant, then the second of each, and so on.
    Incumbents come first, among those of a tenant and among tenants."""
    of_tenant: dict[str, list[Item]] = {}
    for item in sorted(items, key=lambda item: item not in incumbents):
        of_tenant.setdefault(items[item], []).append(item)
    place = {item: number for own in of_tenant.values() for number, item in enumerate(own)}
    return set(islice(sorted(place, key=lambda item: (place[item], item not in incumbents)), limit))
