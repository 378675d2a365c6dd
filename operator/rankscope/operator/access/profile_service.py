"""ProfileService for users: profiles and stacks of a run, joined over all of its nodes.

Reading profiles needs what downloading traces needs, and the stacks of now need what a capture needs. A profile is
asked for by the name of the run, which begins with its namespace: only the operator gives such names, so a caller reads
what was recorded in namespaces where it may read. That holds for runs that have ended too. Stacks of now are those of
the pods that the API server has for the run, whatever a caller says."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import Final, Protocol

import grpc

from rankscope.analysis.profiles.comparison import compare
from rankscope.analysis.profiles.phases import PHASES
from rankscope.analysis.profiles.pprof import pprof
from rankscope.analysis.profiles.profile import Profile
from rankscope.common.run_names import run_name
from rankscope.common.token_bucket import KeyedTokenBuckets
from rankscope.operator.access.guard import Call, Guard, RefusedError
from rankscope.operator.access.profile_relay import JobNodes, Problems, ProfileRelay
from rankscope.operator.access.requests import Place, audited, bad, check_ranks, no_run, place_of_run, starting
from rankscope.operator.access.token_review import Access
from rankscope.operator.captures.audit import CaptureAudit
from rankscope.operator.kube.objects import RunObject
from rankscope.operator.runs.inventory import RunNodes
from rankscope.v1 import profile_service_pb2 as pb

SERVICE: Final = pb.DESCRIPTOR.services_by_name["ProfileService"].full_name
# Of a tenant: each reads up to 64 nodes.
READS_AT_ONCE: Final = 20.0
READS_PER_SECOND: Final = 0.5
# Of a run: a dump costs each rank a moment.
DUMPS_AT_ONCE: Final = 5.0
DUMPS_PER_SECOND: Final = 0.1
MAX_SPAN_NANOS: Final = 86400 * 10**9  # as the daemons have it
MAX_NAMES: Final = 64
NAME_CHARACTERS: Final = 256
PART_BYTES: Final = 256 << 10
Code = grpc.StatusCode


class KnownRuns(Protocol):
    @property
    def is_listed(self) -> bool: ...

    def object_of(self, namespace: str, name: str) -> RunObject | None: ...

    def nodes_of(self, job: str) -> RunNodes: ...


class UserProfiles:
    def __init__(
        self,
        runs: KnownRuns,
        relay: ProfileRelay,
        audit: CaptureAudit,
        has_namespaces: bool = True,
        plain_runs: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """`has_namespaces` is False without Kubernetes: runs have plain names there, which `plain_runs` returns."""
        self._plain_runs = plain_runs
        self._runs = runs
        self._relay = relay
        self._audit = audit
        self._has_namespaces = has_namespaces
        self._reads = KeyedTokenBuckets(READS_AT_ONCE, READS_PER_SECOND)  # by tenant
        self._dumps = KeyedTokenBuckets(DUMPS_AT_ONCE, DUMPS_PER_SECOND)  # by run

    def handler(self, guard: Guard) -> grpc.GenericRpcHandler:
        methods = {
            "QueryProfile": guard.streaming("QueryProfile", pb.QueryProfileRequest, self.query),
            "CompareProfiles": guard.single("CompareProfiles", pb.CompareProfilesRequest, self.compare),
            "DumpStacks": guard.single("DumpStacks", pb.DumpStacksRequest, self.dump),
        }
        return grpc.method_handlers_generic_handler(SERVICE, methods)

    def query(self, request: pb.QueryProfileRequest, call: Call) -> Iterator[pb.QueryProfileResponse]:
        selection = self._checked(request.selection)
        place = self._readable(selection, call)
        target = self._nodes(place)
        self._count_read(call)
        self._record_read(call, place, selection.ranks)
        problems = Problems()
        start, end = selection.start_unix_nanos, selection.end_unix_nanos
        with self._relay.reading():
            profile = self._profile(place, target, selection, target.of_ranks(selection.ranks), call, problems)
            content = pprof(profile, start, end - start)
            del profile
        for offset in range(0, len(content), PART_BYTES):
            yield pb.QueryProfileResponse(pprof=content[offset : offset + PART_BYTES])
        yield pb.QueryProfileResponse(problems=problems)

    def compare(self, request: pb.CompareProfilesRequest, call: Call) -> pb.CompareProfilesResponse:
        selection = self._checked(request.selection)
        reference: pb.ProfileSelection | None = None
        place = other = self._readable(selection, call)
        if request.HasField("reference"):
            reference = self._checked(request.reference, selection)
            other = self._readable(reference, call)
        elif not selection.ranks:
            raise bad("name the ranks that are compared with the others of the run, or a reference")
        target, other_target = self._nodes(place), self._nodes(other)
        self._count_read(call)
        self._record_read(call, place, selection.ranks)
        if reference is not None:
            self._record_read(call, other, reference.ranks)
        problems = Problems()
        nodes = target.of_ranks(selection.ranks)
        with self._relay.reading():
            if reference is None:
                nodes = list(dict.fromkeys([*nodes, *target.of_ranks(())]))
                everything = pb.ProfileSelection()
                everything.CopyFrom(selection)
                everything.ClearField("ranks")
                both = self._profile(place, target, everything, nodes, call, problems)
                profile = both.filter(ranks=selection.ranks)
                usual = both.filter(ranks=set(both.rank.tolist()) - set(selection.ranks))
            else:
                profile = self._profile(place, target, selection, nodes, call, problems)
                nodes = other_target.of_ranks(reference.ranks)
                usual = self._profile(other, other_target, reference, nodes, call, problems)
            return _comparison(profile, usual, problems)

    def dump(self, request: pb.DumpStacksRequest, call: Call) -> pb.DumpStacksResponse:
        place = place_of_run(request.job, self._has_namespaces, self._plain_runs())
        call.require(Access("create", place.namespace))
        check_ranks(request.ranks)
        target = self._nodes(place)
        run = self._runs.object_of(place.namespace, place.name)
        if run is None or run.deleting:
            raise no_run(place)
        if not self._dumps.take(run_name(place.namespace, place.name)):  # not by job: a caller may number them freely
            text = f"{DUMPS_AT_ONCE:g} dumps of this run at once; one more every {1 / DUMPS_PER_SECOND:g} s"
            raise RefusedError(Code.RESOURCE_EXHAUSTED, text)
        record = call.record("asked", **audited("stacks", place, request.ranks))
        self._audit.write(record)
        problems = Problems()
        try:
            stacks = self._relay.dump(target, frozenset(request.ranks), call.context, problems)
        except RefusedError as error:
            self._audit.write(replace(record, event="refused", result=error.code.name, message=str(error)))
            raise
        delivered = sum(bool(stack.frames) for stack in stacks)
        result = "Succeeded" if delivered == len(stacks) and not problems.texts else "Failed"
        self._audit.write(
            replace(record, event="ended", result=result, message=f"{delivered}/{len(stacks)} ranks delivered")
        )
        return pb.DumpStacksResponse(ranks=stacks, problems=problems)

    def _readable(self, selection: pb.ProfileSelection, call: Call) -> Place:
        """Whether the run exists is shown only to callers that may read its profiles."""
        place = place_of_run(selection.job, self._has_namespaces, self._plain_runs())
        call.require(Access("get", place.namespace, subresource="artifacts"))
        return place

    def _nodes(self, place: Place) -> JobNodes:
        if not self._runs.is_listed:
            raise starting()
        return JobNodes(place.job, self._runs.nodes_of(place.job))

    def _profile(
        self,
        place: Place,
        target: JobNodes,
        selection: pb.ProfileSelection,
        nodes: Sequence[str],
        call: Call,
        problems: Problems,
    ) -> Profile:
        profile = self._relay.query(target, selection, nodes, call.context, problems)
        if not (profile.samples_total or target.where.pods or problems.texts):
            raise no_run(place)
        return profile

    def _count_read(self, call: Call) -> None:
        if not self._reads.take(call.caller.tenant):
            text = f"{READS_AT_ONCE:g} profiles asked for at once; one more every {1 / READS_PER_SECOND:g} s"
            raise RefusedError(Code.RESOURCE_EXHAUSTED, text)

    def _record_read(self, call: Call, place: Place, ranks: Sequence[int]) -> None:
        self._audit.write_once_a_minute(call.record("downloaded", **audited("profile", place, ranks)))

    def _checked(self, given: pb.ProfileSelection, compared: pb.ProfileSelection | None = None) -> pb.ProfileSelection:
        """A copy with an end, and without what callers may not choose. A reference has the run and the time of what is
        compared with it, unless it names others."""
        check_ranks(given.ranks)
        if len(given.threads) > MAX_NAMES or any(len(name) > NAME_CHARACTERS for name in given.threads):
            raise bad(f"threads: at most {MAX_NAMES}, of {NAME_CHARACTERS} characters")
        if not set(given.phases) <= set(PHASES):
            raise bad(f"phases: there are {', '.join(PHASES)}")
        when = given if given.start_unix_nanos or compared is None else compared
        end = when.end_unix_nanos or time.time_ns()
        if not 0 < when.start_unix_nanos < end <= when.start_unix_nanos + MAX_SPAN_NANOS:
            raise bad("name a time of up to 24 h, in nanoseconds since 1970")
        return pb.ProfileSelection(
            job=given.job or ("" if compared is None else compared.job),
            ranks=sorted(set(given.ranks)),
            start_unix_nanos=when.start_unix_nanos,
            end_unix_nanos=end,
            threads=given.threads,
            phases=given.phases,
        )


def _comparison(profile: Profile, reference: Profile, problems: Problems) -> pb.CompareProfilesResponse:
    found = compare(profile, reference)
    return pb.CompareProfilesResponse(
        excesses=[pb.FrameExcess(**one.fields()) for one in found.excesses],
        reason=found.reason,
        samples=profile.samples_total,
        reference_samples=reference.samples_total,
        problems=problems,
    )
