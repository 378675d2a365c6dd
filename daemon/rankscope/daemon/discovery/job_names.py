"""Which process is which rank of which job. This module decides the name of a run; everything else uses it.

The operator names the runs of pods: "NAMESPACE/RUN". All other names come from processes that need not trust each
other, and have no "/". A process that is a rank stays that rank, and a job keeps its name, while it lives or until the
operator names it. Ranks that cannot be of one job (another user's, another machine's loopback address, a rank that runs
elsewhere already) are a job of their own, with their place in its name: "10.0.0.1:29500@uid1001"."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

from rankscope.common.text import printable_name
from rankscope.daemon.discovery.process_table import KnownProcess
from rankscope.daemon.discovery.rank_environment import MAX_JOB_LENGTH, Claim
from rankscope.daemon.samples import PodRun, RankProcess


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


@dataclass(slots=True, eq=False)
class Claimant:
    """A process that claims to be a rank. It is one once it has a `job`, and is watched once it has a `rank`."""

    process: KnownProcess
    claim: Claim
    place: Place
    run: PodRun | None = None  # kept when the operator forgets a pod: a pod that terminates still trains
    job: Job | None = None
    rank: RankProcess | None = None

    @property
    def attempt(self) -> int:
        return self.claim.attempt + (0 if self.run is None else self.run.attempt)


Seat = tuple[Job, int]


@dataclass(frozen=True)
class Settled:
    ranks: Sequence[Claimant]  # the first to come first
    conflicts: Sequence[tuple[Claimant, Claimant]]  # the rank, and another that claims to be it


class JobNames:
    """Outside of pods, `node_name` is added to the name of a job whose address is any machine's:
    "127.0.0.1:29500@gpu-17"."""

    def __init__(self, node_name: str, run_of_pod: Callable[[str], PodRun | None] = lambda uid: None) -> None:
        self._node_name = node_name
        self._run_of_pod = run_of_pod

    def settle(self, claimants: Sequence[Claimant]) -> Settled:
        """Which of the claimants, the first to come first, are ranks. Sets the `job` of those that become one, and
        changes it for those whose pod has another run by now."""
        for each in claimants:
            run = None if each.place.pod is None else self._run_of_pod(each.place.pod)
            if run is not None:
                if each.run is None or each.run.name != run.name:
                    each.job = None
                each.run = run
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
            # Pods of one run trust each other: of two with one rank, the later waits until the first has ended.
            is_apart = together[0].run is None and ((key, place) in jobs or _is_taken(together, jobs.get(key), seats))
            key = (key, place) if is_apart else key
            if key not in jobs:
                jobs[key] = Job(key, next(name for name in self._names(together[0], is_apart) if name not in names))
                names.add(jobs[key].name)
            for each in together:
                holder = seats.setdefault((jobs[key], each.claim.rank), each)
                if holder is each:
                    each.job = jobs[key]
                else:
                    conflicts.append((holder, each))
        return Settled([*seats.values()], conflicts)

    def _names(self, first: Claimant, is_apart: bool) -> Iterator[str]:
        """For a new job, the best first."""
        claim, place, run = first.claim, first.place, first.run
        if run is not None:  # several launches at a time in the pods of one run are numbered
            yield run.name
            yield from (f"{run.name}#{number}" for number in count(2))
        name = claim.job
        if claim.is_local_name:
            network = f"net{place.network}" if place.network else ""
            name = _joined(name, place.pod or "-".join(filter(None, (self._node_name, network))))
        yield from (_joined(name, scope) for scope in _scopes(place, is_apart))


def _job_key(claimant: Claimant) -> Hashable:
    """Equal for claimants that may be ranks of one job. Pods of one job share the master's address, and so do
    containers of one user. A loopback address is valid in one network namespace only. Several launches may have the
    same name at the same time, for example the steps of a Slurm job: the master's port or the world size differs."""
    claim, place = claimant.claim, claimant.place
    launch = (claim.job, claim.endpoint, claim.world_size, "" if claimant.run is None else claimant.run.name)
    if claim.is_loopback:
        return (*launch, place.pod, place.uid, place.network)
    return (*launch, place.pod is None, place.uid)


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
    return printable_name(f"{name}@{scope}", MAX_JOB_LENGTH) if scope else name
