"""ProfileService of the daemon: what its store has recorded, compared if asked, and the stacks of its ranks now. Every
request is bounded before anything is read."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final

import grpc

from rankscope.analysis.profiles.comparison import compare
from rankscope.analysis.profiles.phases import PHASES
from rankscope.analysis.profiles.pprof import pprof
from rankscope.analysis.profiles.profile import Profile
from rankscope.analysis.profiles.stack_groups import frame_text
from rankscope.common.text import printable
from rankscope.common.token_bucket import TokenBucket
from rankscope.daemon.profiles.store import ProfileStore, Query
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span, StallDump
from rankscope.daemon.server.grpc_server import Service
from rankscope.daemon.server.rank_requests import RequestError, check_names, ranks_of, refusing, turn
from rankscope.v1 import profile_service_pb2 as pb
from rankscope.v1 import profile_service_pb2_grpc

CHUNK_BYTES: Final = 256 * 1024
MAX_SPAN_SECONDS: Final = 86400.0
# Of an answer: what readers of profiles take.
MAX_ROWS: Final = 1 << 18
MAX_FRAMES: Final = 128  # of one stack
TEXT_CHARACTERS: Final = 512
# Reading costs the daemon CPU time.
QUERIES_AT_ONCE: Final = 2
SEND_SECONDS: Final = 30.0
# One dump is a py-spy process per rank.
DUMPS_BURST: Final = 4.0
DUMPS_PER_SECOND: Final = 0.2
DUMPED_AT_ONCE: Final = 16
DUMP_SECONDS: Final = 8.0
OFF: Final = "profiles are not kept on this node (profile_dir = none); pass --profile-dir to its daemon"

Dump = Callable[[Sequence[RankProcess]], Mapping[RankKey, StallDump | Problem]]
ReadRecorders = Callable[[Sequence[RankProcess]], Mapping[RankKey, pb.FlightRecorderTail]]


class ProfileServicer(profile_service_pb2_grpc.ProfileServiceServicer):
    """`store` is None where profiles are off; `ranks` are those that are known now."""

    def __init__(
        self,
        node: str,
        store: ProfileStore | None,
        ranks: Callable[[], Sequence[RankProcess]],
        dump: Dump,
        read_recorders: ReadRecorders,
        monotonic_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._node = node
        self._store = store
        self._ranks = ranks
        self._dump = dump
        self._read_recorders = read_recorders
        self._monotonic_seconds = monotonic_seconds
        self._querying = threading.Semaphore(QUERIES_AT_ONCE)
        self._dumping = threading.Semaphore(1)
        self._dumps = TokenBucket(DUMPS_BURST, DUMPS_PER_SECOND)  # used by the one that dumps

    def QueryProfile(
        self, request: pb.QueryProfileRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.QueryProfileResponse]:
        with refusing(context):
            store = self._open_store()
            query = self._query_of(request.selection)
            with turn(self._querying, "others are reading profiles of this node"):
                content = self._encode(store, query)
        # A caller that does not read must not keep a thread of the server.
        too_late = threading.Timer(SEND_SECONDS, context.cancel)
        too_late.daemon = True
        too_late.start()
        chunks = [content[start : start + CHUNK_BYTES] for start in range(0, len(content), CHUNK_BYTES)]
        try:
            for chunk in chunks[:-1]:
                yield pb.QueryProfileResponse(pprof=chunk)
            yield pb.QueryProfileResponse(pprof=chunks[-1], problems=_problems(store))
        finally:
            too_late.cancel()

    def CompareProfiles(
        self, request: pb.CompareProfilesRequest, context: grpc.ServicerContext
    ) -> pb.CompareProfilesResponse:
        with refusing(context):
            store = self._open_store()
            selection = request.selection
            if not selection.ranks and not request.HasField("reference"):
                raise RequestError(
                    grpc.StatusCode.INVALID_ARGUMENT, "name the ranks to compare with the others, or a reference"
                )
            query = self._query_of(selection)
            reference_query = self._reference_query(request)
            with turn(self._querying, "others are reading profiles of this node"):
                profile, reference = store.query(query), store.query(reference_query)
                if not request.HasField("reference"):
                    reference = reference.filter(ranks=set(reference.rank.tolist()) - set(selection.ranks))
                _check_size(profile)
                _check_size(reference)
                found = compare(profile, reference)
        return pb.CompareProfilesResponse(
            excesses=[pb.FrameExcess(**one.fields()) for one in found.excesses],
            reason=found.reason,
            samples=profile.samples_total,
            reference_samples=reference.samples_total,
            problems=_problems(store),
        )

    def DumpStacks(self, request: pb.DumpStacksRequest, context: grpc.ServicerContext) -> pb.DumpStacksResponse:
        with refusing(context):
            check_names(request.job, request.ranks, request.pods)
            chosen = ranks_of(request, self._ranks())
            with turn(self._dumping, "the stacks of this node are being dumped for another caller"):
                now_seconds = self._monotonic_seconds()
                if chosen and not self._dumps.take(now_seconds):
                    wait_seconds = self._dumps.wait_seconds(now_seconds)
                    raise RequestError(
                        grpc.StatusCode.RESOURCE_EXHAUSTED,
                        f"stacks of this node were dumped several times just now; try again in {wait_seconds:.0f} s",
                    )
                dumped = self._dump_in_turns(chosen)
                tails = self._read_recorders(chosen) if request.with_flight_recorder else {}
        stacks = [self._stack(rank, dumped.get(rank.key)) for rank in chosen]
        for rank, stack in zip(chosen, stacks, strict=True):
            if rank.key in tails:
                stack.flight_recorder.CopyFrom(tails[rank.key])
        return pb.DumpStacksResponse(ranks=stacks)

    def _open_store(self) -> ProfileStore:
        if self._store is None:
            raise RequestError(grpc.StatusCode.FAILED_PRECONDITION, OFF)
        return self._store

    def _query_of(self, selection: pb.ProfileSelection) -> Query:
        check_names(selection.job, selection.ranks, selection.threads, selection.phases)
        unknown = [phase for phase in selection.phases if phase not in PHASES]
        if unknown:
            text = f"no phase {printable(unknown[0], 64)!r}; there are {', '.join(PHASES)}"
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, text)
        span = Span(selection.start_unix_nanos, selection.end_unix_nanos or time.time_ns())
        if not 0.0 < span.seconds <= MAX_SPAN_SECONDS or span.start_unix_nanos < 0:
            text = f"a time of {span.seconds:.0f} s; say one of up to {MAX_SPAN_SECONDS / 3600:.0f} h"
            raise RequestError(grpc.StatusCode.INVALID_ARGUMENT, text)
        return Query(
            selection.job,
            span,
            frozenset(selection.ranks) or None,
            frozenset(selection.threads) or None,
            frozenset(selection.phases) or None,
        )

    def _reference_query(self, request: pb.CompareProfilesRequest) -> Query:
        """Run and time that it leaves open are those of the selection."""
        reference = pb.ProfileSelection()
        reference.CopyFrom(request.selection)
        if not request.HasField("reference"):
            reference.ClearField("ranks")
            return self._query_of(reference)
        given = request.reference
        if given.start_unix_nanos:
            reference.start_unix_nanos, reference.end_unix_nanos = given.start_unix_nanos, given.end_unix_nanos
        reference.job = given.job or reference.job
        for name in ("ranks", "threads", "phases"):
            reference.ClearField(name)
            getattr(reference, name).extend(getattr(given, name))
        return self._query_of(reference)

    def _encode(self, store: ProfileStore, query: Query) -> bytes:
        profile = store.query(query)
        _check_size(profile)
        span = query.span
        return pprof(profile, span.start_unix_nanos, span.end_unix_nanos - span.start_unix_nanos)

    def _dump_in_turns(self, ranks: Sequence[RankProcess]) -> dict[RankKey, StallDump | Problem]:
        dumped: dict[RankKey, StallDump | Problem] = {}
        give_up_at = self._monotonic_seconds() + DUMP_SECONDS
        for start in range(0, len(ranks), DUMPED_AT_ONCE):
            if self._monotonic_seconds() >= give_up_at:
                break
            dumped.update(self._dump(ranks[start : start + DUMPED_AT_ONCE]))
        return dumped

    def _stack(self, rank: RankProcess, found: StallDump | Problem | None) -> pb.RankStack:
        stack = pb.RankStack(rank=rank.rank, node=self._node)
        if isinstance(found, StallDump):
            stack.phase = found.phase
            stack.frames.extend(frame_text(frame) for frame in found.stack[:MAX_FRAMES])
        else:
            problem = "there was no time left for it; name fewer ranks" if found is None else found.text
            stack.problem = printable(problem, TEXT_CHARACTERS)
        return stack


def profile_service(servicer: ProfileServicer) -> Service:
    return Service.of("ProfileService", profile_service_pb2_grpc.add_ProfileServiceServicer_to_server, servicer)


def _check_size(profile: Profile) -> None:
    if len(profile.stack) > MAX_ROWS:
        text = f"{len(profile.stack)} distinct stacks by rank; name fewer ranks or a shorter time"
        raise RequestError(grpc.StatusCode.RESOURCE_EXHAUSTED, text)


def _problems(store: ProfileStore) -> list[str]:
    status = store.status()
    return [] if status.problem is None else [printable(status.problem.text, TEXT_CHARACTERS)]
