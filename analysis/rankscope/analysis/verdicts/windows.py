"""The input of the rules: one window of many ranks as columns, and what else is known of a rank that is suspected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.analysis.step_graph.window_operations import RankOperations
from rankscope.analysis.verdicts.figures import OF_RULES, RuleFigures
from rankscope.analysis.verdicts.network import NodeNetwork

# Phases of self time, in the order in which a step goes through them.
WORK_PHASES = ("input", "forward", "backward", "optimizer", "checkpoint", "other")
# Where a rank that is known not to wait in backward may be waiting for others; see `phases.WAITING_PHASES`.
HOST_WAITING_PHASES = frozenset({"communication", "device_sync"})
BACKWARD_CODE = "backward_code"
# PAST stands in place of the number of a rank: what the only rank of a run did earlier (own_past.py).
PAST = -1
# Slow by nature and not a fault.
EXCUSED_PHASES = frozenset({"checkpoint", "compile"})


def step_phase(stack_phase: str) -> str:
    """The part of a step that a phase of stacks belongs to."""
    return "backward" if stack_phase == BACKWARD_CODE else stack_phase


@dataclass(frozen=True)
class RankColumns(RuleFigures):
    """A row per rank; seconds are per step. NaN means that it was not measured."""

    job: Ints
    rank: Ints
    stage: Ints  # −1 where not known
    place: Ints  # a number per node (or pod): equal numbers share their fate

    def __len__(self) -> int:
        return len(self.rank)

    @property
    def usual_step_seconds(self) -> Floats:
        return self.step_seconds - np.nan_to_num(self.long_seconds)

    def phase_seconds(self, phase: str) -> Floats:
        values: Floats = getattr(self, f"{phase}_seconds")
        return values


def columns_of(rows: Sequence[Mapping[str, float]]) -> RankColumns:
    """Columns from one mapping per rank; what a row does not name was not measured."""
    keys = {"job": 0, "rank": 0, "stage": -1, "place": 0}
    made: dict[str, Any] = {name: np.array([row.get(name, np.nan) for row in rows], np.float64) for name in OF_RULES}
    made |= {name: np.array([int(row.get(name, key)) for row in rows], np.int64) for name, key in keys.items()}
    return RankColumns(**made)


class FrameSeen(NamedTuple):
    """A tuple, as a slow job is looked at with the stacks of dozens of ranks."""

    function: str
    file: str
    line: int
    share: float
    own_share: float  # as the innermost frame, or for the user's code as its innermost
    phase: str


@dataclass(frozen=True)
class StackProfile:
    samples: int
    phase_shares: Mapping[str, float]
    frames: tuple[FrameSeen, ...]
    seconds: float = 0.0  # that the samples stand for; 0: not known
    end_unix_seconds: float = 0.0  # of the latest recording


# Of a rank that has stalled.
MAX_COMMUNICATORS = 8


class NcclOperation(NamedTuple):
    function: str
    sequence: int  # of its function, in its communicator; 0 for messages


@dataclass(frozen=True)
class Communicator:
    """A communicator of NCCL, as one of its members counts it."""

    number: int  # the same on all members
    size: int
    position: int  # of this member
    issued: int
    started: int  # on the GPU; more than were issued where a CUDA graph plays them again
    finished: int
    last_issued: NcclOperation | None = None
    last_started: NcclOperation | None = None
    last_finished: NcclOperation | None = None
    unchanged_seconds: float = 0.0  # for which no operation was seen to start or finish

    @property
    def is_busy(self) -> bool:
        """The GPU is in an operation."""
        return self.started > self.finished


# The phase of a stall in a process whose interpreter cannot be read: it has ended, or has not begun.
UNREADABLE = "unreadable"


@dataclass(frozen=True)
class Stall:
    seconds_since_step: float
    phase: str | None = None
    stack: tuple[str, ...] = ()
    collectives_enqueued: int | None = None
    collectives_completed: int | None = None
    same_stack_looks: int | None = None
    is_working: bool | None = None  # uses CPU, reads or writes, or goes from place to place
    is_stopped: bool = False  # by a signal
    communicators: tuple[Communicator, ...] = ()


@dataclass(frozen=True)
class GpuEvidence:
    """A rank's GPU over some windows."""

    sm_clock_hertz: float | None = None
    sm_clock_max_hertz: float | None = None
    utilization_ratio: float | None = None
    throttled_shares: Mapping[str, float] = field(default_factory=dict)  # of the time, by reason
    temperature_celsius: float | None = None
    shared: bool = False  # other ranks use it too
    seconds: float = 0.0  # that the errors were counted in
    ecc_uncorrected_errors: int | None = None
    ecc_corrected_errors: int | None = None
    xids: int | None = None
    row_remap_pending: bool | None = None

    def share(self, reason: str) -> float:
        return self.throttled_shares.get(reason, 0.0)

    @property
    def ecc_errors(self) -> int | None:
        known = [n for n in (self.ecc_corrected_errors, self.ecc_uncorrected_errors) if n is not None]
        return sum(known) if known else None


@dataclass(frozen=True)
class RankEvidence:
    """What is looked at only when the columns raise a question, or when there are none (level 0)."""

    stacks: StackProfile | None = None
    # Over the whole window; for ranks whose steps are not known.
    starved_share: float | None = None
    window_seconds: float = 0.0
    gpu: GpuEvidence | None = None  # where it uses exactly one
    ranges: Mapping[str, float] = field(default_factory=dict)  # host seconds of a step by NVTX range


@dataclass(frozen=True)
class AsynchronousRun:
    """Beside the columns of the workers, in a window of an asynchronous run."""

    servers: RankColumns
    unknown_ranks: tuple[int, ...]  # that have no steps


@dataclass(frozen=True, slots=True)
class JobWindow:
    """One window of one job. Rows of `columns` are in the order of `rank`."""

    end_unix_seconds: float
    window_seconds: float
    world_size: int
    columns: RankColumns
    # Ranks that reported before and whose process has ended.
    departed: tuple[int, ...] = ()
    clock_skew_seconds: float | None = None
    evidence: Callable[[], Mapping[int, RankEvidence]] = field(default=dict)
    # Every rank that reports; None for one that is moving.
    stalls: Callable[[], Mapping[int, Stall | None]] = field(default=dict)
    place_names: Mapping[int, str] = field(default_factory=dict)
    # By place; one that is missing is not known.
    network: Callable[[], Mapping[int, NodeNetwork]] = field(default=dict)
    # Steps are known only now and then, from captures: most windows have none, and stacks go on counting.
    is_captured: bool = False
    # Whether ranks meet in collectives, as far as is known.
    has_collectives: bool = True
    # Self time and waiting of most ranks follow from the quickest steps of their hosts: estimates (host_pace.py).
    is_host_paced: bool = False
    # Operations of whole steps: of all ranks, or of one, which shows whether the others have some.
    operations: Callable[[bool], Sequence[RankOperations]] = lambda is_sample: ()
    # The rest of a window of which `columns` has the workers only (asynchronous.py).
    asynchronous: AsynchronousRun | None = None
