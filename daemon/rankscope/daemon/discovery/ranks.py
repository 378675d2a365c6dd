"""Finds the training ranks of this node, once per window.

Fleet reports group runs by what a rank runs, and for whom: program and script, user, team. Arguments may hold secrets
and stay where they are. The process writes its command line and environment itself, so both are bounded and made
printable. The user comes from the kernel."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from typing import Final, TypeVar

from rankscope.common.text import printable
from rankscope.daemon import procfs
from rankscope.daemon.discovery.job_names import Claimant, JobNames, Place
from rankscope.daemon.discovery.process_table import MAX_COMMAND_LINE_BYTES, KnownProcess, ProcessTable
from rankscope.daemon.discovery.rank_environment import Claim, InvalidClaim, Variables, kept, lone_claim
from rankscope.daemon.samples import PodRun, Problem, Program, RankProcess

INIT_PID: Final = 1
MAX_PROBLEMS: Final = 32
MAX_OWNERS: Final = 16
MAX_GENERATIONS: Final = 64
MAX_RANKS: Final = 1024
# So many ranks of a pod or user that are watched already are not given up for newcomers: a node's GPUs.
MAX_KEPT_PER_OWNER: Final = 8
OTHER_OWNERS: Final = "others"
# Of programs and users.
NAME_CHARACTERS: Final = 64
MAX_PASSWD_BYTES: Final = 1 << 20
# Options of Python that take the next word.
_WITH_VALUE: Final = ("-W", "-X", "--check-hash-based-pycs")
_PYTHON: Final = re.compile(r"python[0-9.]*")

Result = TypeVar("Result")


@dataclass(frozen=True)
class Conflict:
    """Two processes of one place that claim one rank. The one that came first is kept."""

    job: str
    rank: int
    kept_pid: int
    ignored_pid: int
    owner: str = ""

    @property
    def text(self) -> str:
        return (
            f"rank {self.rank} of job {self.job} is claimed by pid {self.kept_pid} and pid {self.ignored_pid}; "
            f"pid {self.ignored_pid} came later and is not watched; give each launch its own MASTER_PORT or "
            "RANKSCOPE_RUN"
        )


@dataclass(frozen=True)
class Discovered:
    ranks: tuple[RankProcess, ...]  # by job, then rank
    conflicts: tuple[Conflict, ...] = ()
    problems: tuple[Problem, ...] = ()
    cut: Mapping[str, int] = field(default_factory=dict)  # ranks that are not watched, by the pod or user they are of


class RankDiscovery:
    """`scan` returns the ranks that are alive now, `max_ranks` of them at most. `run_of_pod` is the operator's name for
    the run of a pod, by the pod's uid."""

    def __init__(
        self,
        proc_root: Path = Path("/proc"),
        node_name: str = "",
        max_ranks: int = MAX_RANKS,
        monotonic: Callable[[], float] = time.monotonic,
        run_of_pod: Callable[[str], PodRun | None] = lambda uid: None,
    ) -> None:
        self._max_ranks = max_ranks
        self._table = ProcessTable(proc_root, monotonic)
        self._names = JobNames(node_name, run_of_pod)
        self._claimants: dict[int, Claimant] = {}
        # Those of the node's init, or our own where that cannot be read.
        self._home = {
            kind: procfs.namespace_inode(self._table.folder(INIT_PID), kind)
            or procfs.namespace_inode(f"{proc_root}/self", kind)
            for kind in ("net", "pid")
        }

    def scan(self) -> Discovered:
        self._table.refresh()
        watched = self._without_relatives()
        settled = self._names.settle(self._read_claimants(watched))
        kept_claimants, cut_claimants = share(settled.ranks, self._max_ranks)
        for claimant in cut_claimants:
            claimant.rank = None
        ranks = []
        for claimant in kept_claimants:
            try:
                rank = claimant.rank or self._read(claimant.process, partial(self._describe, claimant))
                assert claimant.job is not None, "only those with a job are watched"
                if (rank.job, rank.attempt) != (claimant.job.name, claimant.attempt):
                    rank = replace(rank, job=claimant.job.name, attempt=claimant.attempt)
                claimant.rank = rank
                ranks.append(rank)
            except OSError:
                self._table.forget(claimant.process.pid)  # ended meanwhile; found again if it did not
        ranks.sort(key=lambda rank: (rank.job, rank.rank))
        conflicts = [
            Conflict(holder.job.name, holder.claim.rank, holder.process.pid, other.process.pid, other.place.owner)
            for holder, other in settled.conflicts
            if holder.job is not None
        ]
        cut = _by_owner(cut_claimants)
        return Discovered(tuple(ranks), tuple(conflicts), (*self._problems(watched), *self._cut_problems(cut)), cut)

    def _without_relatives(self) -> list[KnownProcess]:
        """The candidates that are neither launchers nor helpers."""
        bearers = self._table.bearers()
        helpers, launchers = relatives(bearers, self._table.parent_of)
        watched = []
        for known in bearers:
            known.is_helper = known.is_helper or known.pid in helpers
            is_launcher = known.pid in launchers and known.ring_inode is None
            if known.is_candidate and not known.is_helper and not is_launcher:
                watched.append(known)
        return watched

    def _read_claimants(self, watched: Sequence[KnownProcess]) -> list[Claimant]:
        claimants = []
        for known in sorted(watched, key=lambda known: (known.first_seen_seconds, known.start_ticks, known.pid)):
            if isinstance(known.claim, InvalidClaim):
                continue
            claimant = self._claimants.get(known.pid)
            try:
                if claimant is None or claimant.process is not known or known.claim not in (None, claimant.claim):
                    # A ring without rank variables: a program that trains alone.
                    claim = known.claim or self._read(known, partial(self._lone_claim, known.pid))
                    claimant = Claimant(known, claim, self._read(known, partial(self._place_of, known)))
                claimants.append(claimant)
            except OSError:
                self._table.forget(known.pid)
        self._claimants = {claimant.process.pid: claimant for claimant in claimants}
        return claimants

    def _read(self, known: KnownProcess, read: Callable[[], Result]) -> Result:
        return procfs.BLOCKING.call(self._table.folder(known.pid), read)

    def _lone_claim(self, pid: int) -> Claim:
        return lone_claim(procfs.Environment(self._table.folder(pid)), pid)

    def _place_of(self, known: KnownProcess) -> Place:
        folder = self._table.folder(known.pid)
        status = procfs.read_status(folder)
        pod = procfs.pod_uid(folder)
        if pod is not None:
            return Place(pod)
        owner = procfs.user_namespace_owner(folder)
        found = {kind: procfs.namespace_inode(folder, kind) for kind in self._home}
        network, pids = (0 if inode == self._home[kind] else inode for kind, inode in found.items())
        return Place(None, status.uid if owner is None else owner, network, pids)

    def _describe(self, claimant: Claimant) -> RankProcess:
        known, claim, job = claimant.process, claimant.claim, claimant.job
        assert job is not None, "only those with a job are watched"
        folder = self._table.folder(known.pid)
        environment, place = procfs.Environment(folder), claimant.place
        return RankProcess(
            job=job.name,
            rank=claim.rank,
            local_rank=claim.local_rank,
            world_size=claim.world_size,
            pid=known.pid,
            start_ticks=known.start_ticks,
            namespace_pids=procfs.read_status(folder).namespace_pids or (known.pid,),
            environment=kept(environment),
            pod=place.pod,
            attempt=claimant.attempt,
            owner=place.owner,
            program=read_program(folder, place.uid if place.pod is None else None, environment),
        )

    def _problems(self, watched: Sequence[KnownProcess]) -> tuple[Problem, ...]:
        problems = [
            Problem("discovery", "identity", f"pid {known.pid}: {known.claim.reason}; this process is not watched")
            for known in watched
            if isinstance(known.claim, InvalidClaim)
        ]
        if len(problems) > MAX_PROBLEMS:
            rest = len(problems) - MAX_PROBLEMS
            problems[MAX_PROBLEMS:] = [Problem("discovery", "identity", f"{rest} more processes like these")]
        # Init is nobody's rank, and may hold capabilities that even root here lacks.
        denied = len([known for known in self._table if known.is_denied and known.pid != INIT_PID])
        if blocked := procfs.BLOCKING.blocked:
            text = f"{blocked} processes block those who read them, and are not read (an exec that does not end?)"
            problems.append(Problem("discovery", "blocked", text))
        if denied:
            whose = "process of another user" if denied == 1 else "processes of other users"
            text = f"{denied} {whose} cannot be read; run as root or with CAP_SYS_PTRACE"
            problems.append(Problem("discovery", "permission", text))
        return tuple(problems)

    def _cut_problems(self, cut: Mapping[str, int]) -> list[Problem]:
        reason = f"this node has more than max_ranks = {self._max_ranks} ranks; end some, or raise max_ranks"
        return [Problem("discovery", "quota", f"ranks of {owner} are not watched: {reason}") for owner in cut]


def share(ranks: Sequence[Claimant], limit: int) -> tuple[Sequence[Claimant], Sequence[Claimant]]:
    """The ranks that are watched, and those over the limit. Pods and users take turns, so that nobody's ranks take the
    place of everybody else's. Ranks that are watched already stay, as far as this leaves room."""
    if len(ranks) <= limit:
        return ranks, ()
    taken: Counter[str] = Counter()
    order = []
    for number, claimant in enumerate(sorted(ranks, key=lambda each: each.rank is None)):
        is_new, turn = claimant.rank is None, taken[claimant.place.owner]
        taken[claimant.place.owner] += 1
        order.append(((is_new or turn >= MAX_KEPT_PER_OWNER, turn, is_new, number), claimant))
    order.sort(key=lambda entry: entry[0])
    claimants = [claimant for _, claimant in order]
    return claimants[:limit], claimants[limit:]


def _by_owner(claimants: Sequence[Claimant]) -> Mapping[str, int]:
    counts = Counter(claimant.place.owner for claimant in claimants).most_common()
    by_owner = dict(counts[:MAX_OWNERS])
    if rest := sum(number for _, number in counts[MAX_OWNERS:]):
        by_owner[OTHER_OWNERS] = rest
    return by_owner


def relatives(bearers: Collection[KnownProcess], parent_of: Callable[[int], int | None]) -> tuple[set[int], set[int]]:
    """The helpers of ranks, below a process of the same identity that loaded torch (data-loader workers, forks), and
    their launchers, above a process that has more of a launcher's variables (torchrun under SLURM). A rank may start
    another job: that does not make it a launcher."""
    by_pid = {bearer.pid: bearer for bearer in bearers}
    elders_above: dict[int | None, list[KnownProcess]] = {}  # by parent: thousands of processes may share one
    helpers: set[int] = set()
    launchers: set[int] = set()
    for bearer in bearers:
        parent = parent_of(bearer.pid)
        if (elders := elders_above.get(parent)) is None:
            elders = elders_above[parent] = [by_pid[pid] for pid in _lineage(parent, parent_of) if pid in by_pid]
        for elder in elders:
            if bearer.is_computing and elder.is_candidate:
                helpers.add(bearer.pid)  # it may have made an exec
            elif elder.identity != bearer.identity:
                # A child shows its identity from its first instant, long before it has loaded torch.
                if elder.launch_depth < bearer.launch_depth:
                    launchers.add(elder.pid)
            elif elder.is_candidate:
                helpers.add(bearer.pid)
    return helpers, launchers


def _lineage(pid: int | None, parent_of: Callable[[int], int | None]) -> Iterator[int]:
    for _ in range(MAX_GENERATIONS):
        if not pid:
            return
        yield pid
        pid = parent_of(pid)


def read_program(process: str, uid: int | None, environment: Variables, passwd: Path = Path("/etc/passwd")) -> Program:
    """`uid` is None in a pod: its users are not those of this machine, and the operator knows its team."""
    command = ""
    with suppress(OSError):
        command = command_of(procfs.read_bounded(f"{process}/cmdline", MAX_COMMAND_LINE_BYTES))
    if uid is None:
        return Program(command)
    # Directory services may block, so only the file is asked. A name from Slurm is the process' own claim.
    user = _users(passwd).get(uid) or _name(environment, "SLURM_JOB_USER") or f"uid{uid}"
    return Program(command, user, _name(environment, "SLURM_JOB_ACCOUNT") or user)


def command_of(line: bytes) -> str:
    """`python train.py`, `python -m package.train`: without paths and arguments."""
    # A process that renames itself may leave one long word with anything in it.
    words = [word.decode("utf-8", "replace") for word in line.split(b"\0")]
    program = _base((words[0].split() or [""])[0])
    if not _PYTHON.fullmatch(program):
        return printable(program, NAME_CHARACTERS)
    rest = iter(words[1:])
    for word in rest:
        if word in _WITH_VALUE:
            next(rest, "")
        elif word == "-m":
            return printable(f"python -m {(next(rest, '').split() or [''])[0]}", NAME_CHARACTERS)
        elif word == "-c":
            return "python -c"
        elif word and not word.startswith("-"):
            return printable(f"python {_base(word)}", NAME_CHARACTERS)
    return "python"


def _base(path: str) -> str:
    return PurePosixPath(path).name


def _name(environment: Variables, name: str) -> str:
    return printable((environment.get(name) or "").strip(), NAME_CHARACTERS)


@lru_cache(maxsize=1)
def _users(passwd: Path) -> dict[int, str]:
    """Read once per user ID. A machine has few users, and they rarely change."""
    try:
        text = procfs.read_bounded(str(passwd), MAX_PASSWD_BYTES).decode("utf-8", "replace")
    except OSError:
        return {}
    rows = (line.split(":") for line in text.splitlines())
    return {int(row[2]): printable(row[0], NAME_CHARACTERS) for row in rows if len(row) > 2 and row[2].isdecimal()}
