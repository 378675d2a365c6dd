"""Which process is which rank of which job.

Names of jobs come from processes that need not trust each other. A process that is a rank stays that rank, and a job
keeps its name, while it lives. Ranks that cannot be of one job (another user's, another machine's loopback address, a
rank that runs elsewhere already) are a job of their own, with their place in its name: "10.0.0.1:29500@uid1001"."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from rankscope.common.text import printable_name
from rankscope.daemon.discovery.process_table import KnownProcess
from rankscope.daemon.discovery.rank_environment import JOB_LENGTH_LIMIT, Claim
from rankscope.daemon.samples import RankProcess


@dataclass(frozen=True, slots=True)
class Place:
    """Where a process runs and whose it is, as the kernel says it. A pod is one place."""

    pod: str | None = None
    uid: int = 0
    network: int = 0  # inodes of its namespaces; 0 for those of the node
    pids: int = 0

    @property
    def owner(self) -> str:
        return f"uid {self.uid}" if self.pod is None else f"pod {self.pod}"

    def __str__(self) -> str:
        if self.pod is not None:
            return self.pod
        namespaces = (("net", self.network), ("pid", self.pids))
        return "-".join((f"uid{self.uid}", *(f"{kind}{inode}" for kind, inode in namespaces if inode)))


@dataclass(frozen=True, eq=False)
class Job:
    """The ranks of this node that have one name."""

    key: Hashable
    name: str
    shared_name: str  # what ranks of the job on other nodes call it


@dataclass(slots=True, eq=False)
class Claimant:
    """A process that claims to be a rank. It is one once it has a `job`, and is watched once it has a `rank`."""

    process: KnownProcess
    claim: Claim
    place: Place
    job: Job | None = None
    rank: RankProcess | None = None


Seat = tuple[Job, int]


@dataclass(frozen=True)
class Settled:
    ranks: Sequence[Claimant]  # the first to come first
    conflicts: Sequence[tuple[Claimant, Claimant]]  # the rank, and another that claims to be it


class JobNames:
    """Outside of pods, `node_name` is added to the name of a job whose address is any machine's:
    "127.0.0.1:29500/none@gpu-17"."""

    def __init__(self, node_name: str) -> None:
        self._node_name = node_name

    def settle(self, claimants: Sequence[Claimant]) -> Settled:
        """Which of the claimants, the first to come first, are ranks. Sets the `job` of those that become one."""
        seats = {(each.job, each.claim.rank): each for each in claimants if each.job is not None}
        newcomers: dict[tuple[Hashable, Place], list[Claimant]] = {}
        for each in claimants:
            if each.job is None:
                newcomers.setdefault((_job_key(each), each.place), []).append(each)
        if not newcomers:
            return Settled([*seats.values()], ())
        jobs = {job.key: job for job, _ in seats}
        names = {job.name for job in jobs.values()}
        conflicts = []
        for (key, place), together in newcomers.items():
            is_apart = (key, place) in jobs or _is_taken(together, jobs.get(key), seats)
            key = (key, place) if is_apart else key
            if key not in jobs:
                jobs[key] = self._new_job(key, together[0], is_apart, names)
                names.add(jobs[key].name)
            for each in together:
                holder = seats.setdefault((jobs[key], each.claim.rank), each)
                if holder is each:
                    each.job = jobs[key]
                else:
                    conflicts.append((holder, each))
        return Settled([*seats.values()], conflicts)

    def _new_job(self, key: Hashable, first: Claimant, is_apart: bool, taken: set[str]) -> Job:
        claim, place = first.claim, first.place
        shared = claim.job
        if claim.is_local_name:
            network = f"net{place.network}" if place.network else ""
            shared = _joined(shared, place.pod or "/".join(filter(None, (self._node_name, network))))
        names = (_joined(shared, scope) for scope in _scopes(place, is_apart))
        return Job(key, next(name for name in names if name not in taken), shared)


def _job_key(claimant: Claimant) -> Hashable:
    """Equal for claimants that may be ranks of one job: pods of one job share an address, as do the containers of one
    user. Nobody shares a loopback address with another network namespace."""
    claim, place = claimant.claim, claimant.place
    if claim.is_loopback:
        return (claim.job, place.pod, place.uid, place.network)
    return (claim.job, place.pod is None, place.uid)


def _is_taken(claimants: Sequence[Claimant], job: Job | None, seats: Mapping[Seat, Claimant]) -> bool:
    """Whether a rank that one of these claims runs in another place already."""
    if job is None:
        return False
    holders = ((seats.get((job, each.claim.rank)), each) for each in claimants)
    return any(holder is not None and holder.place != each.place for holder, each in holders)


def _scopes(place: Place, is_apart: bool) -> Iterator[str]:
    if not is_apart:
        yield ""
    yield str(place)
    yield from (f"{place}#{number}" for number in count(2))


def _joined(name: str, scope: str) -> str:
    return printable_name(f"{name}@{scope}", JOB_LENGTH_LIMIT) if scope else name
