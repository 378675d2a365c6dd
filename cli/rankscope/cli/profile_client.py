"""What `rankscope flame` and `rankscope stacks` ask a server for: the run if none is named, profiles, stacks now."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import grpc

from rankscope.analysis.profiles.pprof import PprofError, read_pprof
from rankscope.analysis.profiles.profile import Profile
from rankscope.cli.connection import CALL_SECONDS
from rankscope.cli.messages import CommandError, Exit, to_stderr
from rankscope.daemon.captures.orders import CaptureError, UnknownError
from rankscope.daemon.captures.request import choose_run
from rankscope.v1 import profile_service_pb2 as pb
from rankscope.v1.job_service_pb2 import ListJobsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub
from rankscope.v1.rank_service_pb2 import ListRanksRequest
from rankscope.v1.rank_service_pb2_grpc import RankServiceStub

QUERY_SECONDS: Final = 60.0
MAX_PPROF_BYTES: Final = 64 << 20
PROBLEMS_SHOWN: Final = 16


def one_run(wanted: str, runs: Iterable[str]) -> str:
    """The run that is named, or the only one. Raises CommandError."""
    try:
        return choose_run(wanted, set(runs))
    except CaptureError as error:
        raise CommandError(str(error), Exit.NOT_FOUND if isinstance(error, UnknownError) else Exit.USAGE) from error


class ProfileClient:
    """Raises grpc.RpcError and CommandError. What is missing in an answer is said on stderr."""

    def __init__(self, channel: grpc.Channel) -> None:
        self._channel = channel
        self._stub = ProfileServiceStub(channel)

    def run_named(self, wanted: str) -> str:
        """The only one, if none is named. A run that has ended has profiles too, so a name is not checked."""
        return wanted or one_run("", self._runs())

    def check_seen(self, run: str) -> None:
        """Raises CommandError unless the run is seen now."""
        one_run(run, self._runs())

    def profile(self, selection: pb.ProfileSelection) -> Profile:
        parts: list[bytes] = []
        size = 0
        for part in self._stub.QueryProfile(pb.QueryProfileRequest(selection=selection), timeout=QUERY_SECONDS):
            size += len(part.pprof)
            if size > MAX_PPROF_BYTES:
                raise CommandError("the profile is too large; name fewer --ranks or a shorter --since", Exit.REFUSED)
            parts.append(part.pprof)
            warn(part.problems)
        try:
            return read_pprof(b"".join(parts))
        except PprofError as error:
            raise CommandError(f"the server sent no profile that can be read: {error}", Exit.FAILED) from error

    def compare(
        self, selection: pb.ProfileSelection, reference: pb.ProfileSelection | None
    ) -> pb.CompareProfilesResponse:
        request = pb.CompareProfilesRequest(selection=selection, reference=reference)
        answer: pb.CompareProfilesResponse = self._stub.CompareProfiles(request, timeout=QUERY_SECONDS)
        warn(answer.problems)
        return answer

    def stacks(self, run: str, ranks: Sequence[int]) -> Sequence[pb.RankStack]:
        request = pb.DumpStacksRequest(job=run, ranks=ranks)
        answer: pb.DumpStacksResponse = self._stub.DumpStacks(request, timeout=QUERY_SECONDS)
        warn(answer.problems)
        return answer.ranks

    def _runs(self) -> list[str]:
        """A daemon without correlation knows ranks only."""
        try:
            answer = JobServiceStub(self._channel).ListJobs(ListJobsRequest(), timeout=CALL_SECONDS)
            return [job.job for job in answer.jobs]
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                raise
        found = RankServiceStub(self._channel).ListRanks(ListRanksRequest(), timeout=CALL_SECONDS)
        return [rank.identity.job for rank in found.ranks]


def warn(problems: Sequence[str]) -> None:
    for problem in problems[:PROBLEMS_SHOWN]:
        to_stderr(f"warning: {problem}")
    if len(problems) > PROBLEMS_SHOWN:
        to_stderr(f"warning: and {len(problems) - PROBLEMS_SHOWN} more problems")
