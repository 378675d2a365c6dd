"""Asks the daemons of a run for profiles and stacks, at the same time and with one deadline, and joins their answers.

Answers are hostile input. One that is missing, unreadable or too large is a problem that the joined answer names; the
others count. A node answers for ranks that run on it and for no others."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Final, TypeVar

import grpc
import numpy as np

from rankscope.analysis.collectives.flight_recorder.tail import MAX_TAIL_BYTES
from rankscope.analysis.profiles.frames import Frame
from rankscope.analysis.profiles.pprof import PprofError, read_pprof
from rankscope.analysis.profiles.profile import Profile, merge
from rankscope.analysis.profiles.stack_groups import FRAME_CHARACTERS
from rankscope.common.rank_selection import rank_ranges
from rankscope.common.text import one_line, printable
from rankscope.operator.access.guard import RefusedError
from rankscope.operator.captures.daemon_calls import DaemonAwayError, DaemonCalls
from rankscope.operator.runs.inventory import RunNodes
from rankscope.v1 import profile_service_pb2 as pb
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub

QUERY_SECONDS: Final = 40.0
DUMP_SECONDS: Final = 20.0
# Of all users: reading profiles takes CPU time and memory that the correlation needs.
QUERIES_AT_ONCE: Final = 2
DUMPS_AT_ONCE: Final = 4
TURN_SECONDS: Final = 10.0
QUERY_CALLS_AT_ONCE: Final = 16
DUMP_CALLS_AT_ONCE: Final = 64
# A profile of eight ranks over an hour has about 150 KB, and takes about 0.1 s to read.
MAX_QUERY_NODES: Final = 64
MAX_ENDED_NODES: Final = 1024  # of a run that has ended: most have nothing to read
MAX_DUMP_NODES: Final = 1024
# Of the answer of one node.
MAX_COMPRESSED_BYTES: Final = 4 << 20
MAX_CONTENT_BYTES: Final = 8 << 20
MAX_ROWS: Final = 100_000
MAX_PARTS: Final = 1024
MAX_RANKS: Final = 1024
MAX_NODE_BYTES: Final = 16 << 20  # in memory
MAX_VALUES: Final = 1 << 56  # the sum over all nodes fits 64 bits
# Of all nodes together, in memory.
MAX_JOINED_ROWS: Final = 200_000
MAX_JOINED_BYTES: Final = 96 << 20
ROW_BYTES: Final = 48
FRAME_BYTES: Final = 256  # without its names
# Of stacks: the joined answer is one message, and clients take 4 MiB.
MAX_STACKS_BYTES: Final = 3 << 20
MAX_TAILS_BYTES: Final = 32 << 20  # of flight recorders; they are matched here, and not sent on
MAX_FRAMES: Final = 256
PHASE_CHARACTERS: Final = 64
MAX_PODS: Final = 500
PROBLEMS_PER_NODE: Final = 4
MAX_PROBLEMS: Final = 64
TEXT_CHARACTERS: Final = 300

Code = grpc.StatusCode
Answer = TypeVar("Answer")


class _UnusableError(Exception):
    """Why the answer of a node does not count."""


@dataclass
class Problems:
    """Why something is missing, by node. Bounded."""

    texts: list[str] = field(default_factory=list)
    left_out: int = 0

    def add(self, text: str) -> None:
        if len(self.texts) < MAX_PROBLEMS:
            self.texts.append(one_line(text, TEXT_CHARACTERS))
        else:
            self.left_out += 1

    def of_node(self, node: str, texts: Iterable[str]) -> None:
        for text in texts:
            self.add(f"{node}: {text}")

    def __iter__(self) -> Iterator[str]:
        yield from self.texts
        if self.left_out:
            yield f"{self.left_out} more problems"


@dataclass(frozen=True)
class JobNodes:
    """A job by the name that its daemons know, and where it runs."""

    job: str
    where: RunNodes

    def of_ranks(self, ranks: Collection[int]) -> Sequence[str]:
        """The nodes that have these ranks; all if there are none, or one that is not known."""
        nodes, owners = self.where.pods.keys(), self.where.owners
        if ranks and all(rank in owners for rank in ranks):
            return sorted(nodes & {owners[rank] for rank in ranks})
        return sorted(nodes)


class ProfileRelay:
    """For any thread. Raises RefusedError while others are served."""

    def __init__(self, calls: DaemonCalls, addresses: Callable[[], Mapping[str, str]]) -> None:
        self._calls = calls
        self._addresses = addresses
        self._queries = threading.BoundedSemaphore(QUERIES_AT_ONCE)
        self._dumps = threading.BoundedSemaphore(DUMPS_AT_ONCE)
        self._reading = threading.Lock()  # one at a time: it takes up to 25 times the content

    @contextmanager
    def reading(self) -> Iterator[None]:
        """For the calls of `query`, and what is made of the profile."""
        with _turn(self._queries):
            yield

    def query(
        self,
        target: JobNodes,
        selection: pb.ProfileSelection,
        nodes: Sequence[str],
        context: grpc.ServicerContext,
        problems: Problems,
    ) -> Profile:
        """Of `nodes`; of all if the run is on none now."""
        joined = _JoinedProfile(target.where.owners, problems)

        def ask(node: str, address: str, deadline: float) -> Sequence[str]:
            asked = pb.ProfileSelection()
            asked.CopyFrom(selection)
            asked.job = target.job
            content, said = self._fetch(address, asked, deadline, context)
            with self._reading:
                if time.monotonic() > deadline:
                    raise _UnusableError("there was no time left to read its profile; ask for fewer ranks")
                joined.add(node, content)
            return said

        if target.where.pods:
            nodes = _first(nodes, MAX_QUERY_NODES, problems)
        else:
            nodes = _first(sorted(self._addresses()), MAX_ENDED_NODES, problems)
        self._each(nodes, ask, QUERY_SECONDS, QUERY_CALLS_AT_ONCE, context, problems)
        return joined.profile().filter(selection.ranks or None, selection.threads or None, selection.phases or None)

    def dump_hang(self, target: JobNodes) -> pb.DumpStacksResponse:
        """All ranks with their flight recorders, for no caller."""
        problems = Problems()
        stacks: Sequence[pb.RankStack] = ()
        try:
            stacks = self.dump(target, (), None, problems, with_flight_recorder=True)
        except RefusedError as error:
            problems.add(str(error))
        return pb.DumpStacksResponse(ranks=stacks, problems=problems)

    def dump(
        self,
        target: JobNodes,
        ranks: Collection[int],
        context: grpc.ServicerContext | None,
        problems: Problems,
        *,
        with_flight_recorder: bool = False,
    ) -> Sequence[pb.RankStack]:
        """One for each rank, in their order; also for those that are known and missing from the answers."""
        joined = _JoinedStacks(target.where.owners, frozenset(ranks), problems)

        def ask(node: str, address: str, deadline: float) -> Sequence[str]:
            pods = sorted(target.where.pods[node])[:MAX_PODS]
            request = pb.DumpStacksRequest(
                job=target.job,
                ranks=ranks,
                pods=pods,
                with_flight_recorder=with_flight_recorder,
            )
            with self._calls.channel(address) as channel:
                call = ProfileServiceStub(channel).DumpStacks.future(request, timeout=_left(deadline))
                _follow_caller(call, context)
                response: pb.DumpStacksResponse = call.result()
            joined.add(node, response.ranks[:MAX_RANKS])
            return response.problems

        with _turn(self._dumps):
            nodes = _first(target.of_ranks(ranks), MAX_DUMP_NODES, problems)
            self._each(nodes, ask, DUMP_SECONDS, DUMP_CALLS_AT_ONCE, context, problems)
        return joined.stacks()

    def _fetch(
        self, address: str, selection: pb.ProfileSelection, deadline: float, context: grpc.ServicerContext
    ) -> tuple[bytes, Sequence[str]]:
        content, said = bytearray(), list[str]()
        with self._calls.channel(address) as channel:
            request = pb.QueryProfileRequest(selection=selection)
            parts = ProfileServiceStub(channel).QueryProfile(request, timeout=_left(deadline))
            _follow_caller(parts, context)
            for number, part in enumerate(parts):
                content += part.pprof
                said = [*said, *part.problems[:PROBLEMS_PER_NODE]][:PROBLEMS_PER_NODE]
                if len(content) > MAX_COMPRESSED_BYTES or number >= MAX_PARTS:
                    raise _UnusableError("its profile is too large; ask for fewer ranks or less time")
        return bytes(content), said

    def _each(
        self,
        nodes: Sequence[str],
        ask: Callable[[str, str, float], Sequence[str]],
        seconds: float,
        calls_at_once: int,
        context: grpc.ServicerContext | None,
        problems: Problems,
    ) -> None:
        """`ask` is called for each node with its daemon's address and the deadline, and returns its problems."""
        remaining = None if context is None else context.time_remaining()
        seconds = seconds if remaining is None else min(seconds, 0.9 * remaining)
        deadline = time.monotonic() + seconds
        addresses = self._addresses()

        def safely(node: str) -> Sequence[str]:
            if node not in addresses:
                return ["there is no daemon on this node now"]
            try:
                return ask(node, addresses[node], deadline)[:PROBLEMS_PER_NODE]
            except grpc.FutureCancelledError:
                return ["the call was cancelled"]
            except grpc.RpcError as error:
                return [_reason(error, seconds)]
            except (_UnusableError, PprofError, DaemonAwayError, OSError) as error:
                return [str(error)]

        pool = ThreadPoolExecutor(max(1, min(calls_at_once, len(nodes))), thread_name_prefix="rankscope-profiles")
        try:
            for node, said in zip(nodes, pool.map(safely, nodes), strict=True):
                problems.of_node(node, said)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


class _JoinedProfile:
    """Not thread-safe."""

    def __init__(self, owners: Mapping[int, str], problems: Problems) -> None:
        self._owners = owners
        self._problems = problems
        self._parts: list[Profile] = []
        self._frames: dict[Frame, Frame] = {}  # one copy of each
        self._size_bytes = 0
        self._claimed: dict[int, str] = {}
        self._disputed: set[int] = set()

    def add(self, node: str, content: bytes) -> None:
        """Raises PprofError or _UnusableError."""
        part = read_pprof(content, MAX_CONTENT_BYTES, MAX_ROWS)
        if max(part.samples_total, part.nanos_total) > MAX_VALUES:
            raise _UnusableError("its numbers are impossible")
        unknown = [frame for frame in part.frames if frame not in self._frames]
        size = ROW_BYTES * len(part.rank) + 8 * (len(part.stack_frames) + len(part.stack_ends))
        size += sum(FRAME_BYTES + 4 * (len(frame.function) + len(frame.file)) for frame in unknown)
        rows = sum(len(other.rank) for other in self._parts) + len(part.rank)
        if size > MAX_NODE_BYTES or self._size_bytes + size > MAX_JOINED_BYTES or rows > MAX_JOINED_ROWS:
            raise _UnusableError("too many stacks to join; ask for fewer ranks or less time")
        ranks = np.unique(part.rank).tolist()
        own = [rank for rank in ranks if self._owners.get(rank, node) == node]
        if len(own) < len(ranks):
            foreign = rank_ranges(set(ranks) - set(own))
            self._problems.add(f"{node}: samples of ranks {foreign} are left out: they run elsewhere")
        # Where it is not known who has a rank, nobody can be believed who is contradicted.
        self._disputed |= {rank for rank in own if self._claimed.setdefault(rank, node) != node}
        self._size_bytes += size
        self._frames.update((frame, frame) for frame in unknown)
        frames = tuple(self._frames[frame] for frame in part.frames)
        self._parts.append(replace(part, frames=frames).filter(ranks=own))

    def profile(self) -> Profile:
        if not self._disputed:
            return merge(self._parts)
        self._problems.add(f"ranks {rank_ranges(self._disputed)} are left out: several nodes report them")
        return merge([part.filter(ranks=self._claimed.keys() - self._disputed) for part in self._parts])


class _JoinedStacks:
    """Thread-safe."""

    def __init__(self, owners: Mapping[int, str], wanted: Collection[int], problems: Problems) -> None:
        self._owners = owners
        self._wanted = wanted
        self._problems = problems
        self._lock = threading.Lock()
        self._stacks: dict[int, pb.RankStack] = {}
        self._size_bytes = 0
        self._tails_bytes = 0
        self._left_out = 0

    def add(self, node: str, stacks: Iterable[pb.RankStack]) -> None:
        for said in stacks:
            owner = self._owners.get(said.rank)
            if (self._wanted and said.rank not in self._wanted) or owner not in (node, None):
                continue
            stack = pb.RankStack(
                rank=said.rank,
                node=node,
                phase=printable(said.phase, PHASE_CHARACTERS),
                frames=[printable(frame, FRAME_CHARACTERS) for frame in said.frames[:MAX_FRAMES]],
                problem=one_line(said.problem, TEXT_CHARACTERS),
            )
            size = stack.ByteSize()
            if said.HasField("flight_recorder"):
                stack.flight_recorder.CopyFrom(self._tail(said.flight_recorder))
            with self._lock:
                known = self._stacks.get(said.rank)
                if known is not None and known.node != node:
                    known.ClearField("frames")
                    known.problem = f"both {known.node} and {node} report this rank"
                elif known is None and self._size_bytes + size <= MAX_STACKS_BYTES:
                    self._stacks[said.rank] = stack
                    self._size_bytes += size
                elif known is None:
                    self._left_out += 1

    def _tail(self, said: pb.FlightRecorderTail) -> pb.FlightRecorderTail:
        tail = pb.FlightRecorderTail(
            source=printable(said.source, TEXT_CHARACTERS), problem=one_line(said.problem, TEXT_CHARACTERS)
        )
        size = len(said.records)
        with self._lock:
            if size <= MAX_TAIL_BYTES and self._tails_bytes + size <= MAX_TAILS_BYTES:
                self._tails_bytes += size
                tail.records = said.records
            else:
                tail.problem = "its records are too large, or those of all ranks together"
        return tail

    def stacks(self) -> Sequence[pb.RankStack]:
        if self._left_out:
            self._problems.add(f"{self._left_out} ranks are left out: the answer is too large; name some ranks")
        else:
            for rank in (self._wanted or self._owners.keys()) - self._stacks.keys():
                node = self._owners.get(rank, "")
                problem = "its node did not answer for it" if node else "the rank does not report: has it ended?"
                self._stacks[rank] = pb.RankStack(rank=rank, node=node, problem=problem)
        return [self._stacks[rank] for rank in sorted(self._stacks)]


@contextmanager
def _turn(turns: threading.BoundedSemaphore) -> Iterator[None]:
    if not turns.acquire(timeout=TURN_SECONDS):
        raise RefusedError(Code.RESOURCE_EXHAUSTED, "others are served now; try again in a moment")
    try:
        yield
    finally:
        turns.release()


def _first(nodes: Sequence[str], limit: int, problems: Problems) -> Sequence[str]:
    if not nodes:
        problems.add("there is no node to ask: the run has no pods now, or there are no daemons")
    if len(nodes) > limit:
        problems.add(f"{limit} of {len(nodes)} nodes were asked, which is the most at a time; name some ranks")
    return nodes[:limit]


def _left(deadline: float) -> float:
    return max(0.001, deadline - time.monotonic())


def _follow_caller(call: grpc.Future, context: grpc.ServicerContext | None) -> None:
    """Ends the call to a daemon when the user leaves."""
    if context is not None and not context.add_callback(call.cancel):
        call.cancel()


def _reason(error: grpc.RpcError, seconds: float) -> str:
    code = error.code()
    if code is Code.DEADLINE_EXCEEDED:
        return f"no answer within {seconds:.0f} s"
    if code is Code.UNIMPLEMENTED:
        return "its daemon does not record profiles; is it older?"
    if code is Code.INTERNAL:
        return "its answer cannot be read"
    return one_line(error.details() or code.name, TEXT_CHARACTERS)
