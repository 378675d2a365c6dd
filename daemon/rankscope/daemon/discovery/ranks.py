"""The training ranks of this node. A scan is cheap enough for every window."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.common.text import printable_name
from rankscope.daemon import procfs
from rankscope.daemon.discovery.process_table import KnownProcess, ProcessTable
from rankscope.daemon.discovery.rank_environment import JOB_LENGTH_LIMIT, Claim, InvalidClaim, kept
from rankscope.daemon.samples import Problem, RankProcess

INIT_PID: Final = 1
PROBLEMS_LIMIT: Final = 32
GENERATIONS_LIMIT: Final = 64


@dataclass(frozen=True)
class Conflict:
    """Two processes that claim one rank. The one that started first is kept."""

    job: str
    rank: int
    kept_pid: int
    ignored_pid: int

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} of job {self.job} is claimed by pid {self.kept_pid} and pid {self.ignored_pid}; "
            f"pid {self.ignored_pid} started later and is not watched; give each launch its own MASTER_PORT or run id"
        )


@dataclass(frozen=True)
class Discovered:
    ranks: tuple[RankProcess, ...]  # by job, then rank
    conflicts: tuple[Conflict, ...] = ()
    problems: tuple[Problem, ...] = ()


class RankDiscovery:
    """`scan` returns the ranks that are alive now.

    A job with nothing but a loopback address for a name gets its pod added, or outside of pods `node_name`, since other
    jobs have the same address: "127.0.0.1:29500/none@gpu-17"."""

    def __init__(
        self,
        proc_root: Path = Path("/proc"),
        node_name: str = "",
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node_name = node_name
        self._table = ProcessTable(proc_root, monotonic)
        self._ranks: dict[tuple[int, int, object], RankProcess] = {}

    def scan(self) -> Discovered:
        self._table.refresh()
        watched = self._without_relatives()
        ranks: dict[tuple[int, int, object], RankProcess] = {}
        for known in watched:
            if isinstance(known.claim, InvalidClaim):
                continue
            incarnation = (known.pid, known.start_ticks, known.identity)
            try:
                ranks[incarnation] = self._ranks.get(incarnation) or self._describe(known)
            except OSError:
                self._table.forget(known.pid)  # ended meanwhile; found again if it did not
        self._ranks = ranks
        settled, conflicts = _settle(sorted(ranks.values(), key=lambda rank: (rank.start_ticks, rank.pid)))
        return Discovered(settled, conflicts, self._problems(watched))

    def _without_relatives(self) -> list[KnownProcess]:
        """The candidates that are neither launchers nor helpers."""
        bearers = self._table.bearers()
        helpers, launchers = relatives(bearers, self._table.parent_of)
        watched = []
        for known in bearers:
            known.is_helper = known.is_helper or known.pid in helpers
            if known.is_candidate and not known.is_helper and known.pid not in launchers:
                watched.append(known)
        return watched

    def _describe(self, known: KnownProcess) -> RankProcess:
        folder = self._table.folder(known.pid)
        pod = procfs.pod_uid(folder)
        # A ring without rank variables: a program that trains alone.
        claim = known.claim if isinstance(known.claim, Claim) else Claim(f"local/{known.pid}", 0, 0, 1, True)
        scope = (pod or self._node_name) if claim.is_local_name else ""
        return RankProcess(
            job=printable_name(f"{claim.job}@{scope}", JOB_LENGTH_LIMIT) if scope else claim.job,
            rank=claim.rank,
            local_rank=claim.local_rank,
            world_size=claim.world_size,
            pid=known.pid,
            start_ticks=known.start_ticks,
            namespace_pids=procfs.read_status(folder).namespace_pids or (known.pid,),
            environment=kept(known.environment),
            pod=pod,
        )

    def _problems(self, watched: Sequence[KnownProcess]) -> tuple[Problem, ...]:
        problems = [
            Problem("discovery", "identity", f"pid {known.pid}: {known.claim.reason}; this process is not watched")
            for known in watched
            if isinstance(known.claim, InvalidClaim)
        ]
        if len(problems) > PROBLEMS_LIMIT:
            rest = len(problems) - PROBLEMS_LIMIT
            problems[PROBLEMS_LIMIT:] = [Problem("discovery", "identity", f"{rest} more processes like these")]
        # Init is nobody's rank, and may hold capabilities that even root here lacks.
        denied = sum(known.is_denied for known in self._table if known.pid != INIT_PID)
        if denied:
            whose = "process of another user" if denied == 1 else "processes of other users"
            text = f"{denied} {whose} cannot be read; run as root or with CAP_SYS_PTRACE"
            problems.append(Problem("discovery", "permission", text))
        return tuple(problems)


def _settle(oldest_first: Sequence[RankProcess]) -> tuple[tuple[RankProcess, ...], tuple[Conflict, ...]]:
    holders: dict[tuple[str, int], RankProcess] = {}
    conflicts = []
    for rank in oldest_first:
        holder = holders.setdefault((rank.job, rank.rank), rank)
        if holder is not rank:
            conflicts.append(Conflict(rank.job, rank.rank, holder.pid, rank.pid))
    return tuple(holders[place] for place in sorted(holders)), tuple(conflicts)


def relatives(bearers: Collection[KnownProcess], parent_of: Callable[[int], int | None]) -> tuple[set[int], set[int]]:
    """The helpers of ranks, below a process of the same identity that loaded torch (data-loader workers, forks), and
    their launchers, above a process of another identity (torchrun under SLURM)."""
    by_pid = {bearer.pid: bearer for bearer in bearers}
    helpers: set[int] = set()
    launchers: set[int] = set()
    for bearer in bearers:
        ancestor = parent_of(bearer.pid)
        for _ in range(GENERATIONS_LIMIT):
            if not ancestor:
                break
            elder = by_pid.get(ancestor)
            if elder is not None and elder.identity != bearer.identity:
                # A child shows its identity from its first instant, long before it has loaded torch.
                launchers.add(elder.pid)
            elif elder is not None and elder.is_candidate:
                helpers.add(bearer.pid)
            ancestor = parent_of(ancestor)
    return helpers, launchers
