"""Runs the job that hangs, with the daemon and the correlation in this process, and returns what they find."""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import msgspec

from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.cli.standalone import Standalone
from rankscope.daemon.config import resolve
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.job_service_pb2 import GetHangRequest, ListHangsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.profile_service_pb2 import DumpStacksRequest, FlightRecorderTail
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub
from tests.integration.probe_running import PROBE_PATH
from tests.support.waiting import wait_until
from tools.jobs.launcher import SCRIPTS, Ranks, start_ranks

SCRIPT = SCRIPTS / "hanging.py"
PATIENCE_SECONDS = 150.0
WINDOW_SECONDS = 0.5


class HangingJob:
    """Use it as `with hanging_job(...)`. `verdicts` are all that were given, oldest first."""

    def __init__(self, standalone: Standalone, run: str, ranks: Ranks) -> None:
        self.verdicts: list[Verdict] = []
        self.longest_stall_seconds = 0.0
        self.hangs: list[str] = []  # why, with the stalls behind it
        self._stalls_seconds: list[float] = []  # since any of the ranks ended a step, by tick
        self._run = run
        self._ranks = ranks
        self.target = standalone.addresses.grpc_targets[0]
        standalone.correlator.listen(self._note)

    @property
    def told(self) -> list[str]:
        """What a failed assertion has to show."""
        return [*dict.fromkeys(f"{verdict.kind.value}: {verdict.reason}" for verdict in self.verdicts), *self.logs()]

    def logs(self) -> list[str]:
        return [self._ranks.log(rank) for rank in range(len(self._ranks.processes))]

    def _note(self, states: tuple[JobState, ...]) -> None:
        for state in states:
            if state.job == self._run:
                self.verdicts.append(state.verdict)
                if state.verdict.kind is Kind.HANG:
                    self.hangs += [state.verdict.reason, *(str(window.stall) for window in state.windows)]
                stalls = [window.stall.seconds_since_step for window in state.windows]
                self.longest_stall_seconds = max(self.longest_stall_seconds, *stalls, 0.0)
                self._stalls_seconds.append(min(stalls, default=0.0))

    def wait_for_hang(self, places: int = 1) -> Verdict:
        """With so many places of ranks: without the probe, a hang is known before their stacks are dumped, and a busy
        machine may be too late with the stack of a rank."""
        found: list[Verdict] = []

        def is_placed() -> bool:
            found.extend(verdict for verdict in self.verdicts[-1:] if _places(verdict) >= places)
            return bool(found)

        self._wait(is_placed)
        return found[-1]

    def wait_until_no_step_ends(self) -> None:
        """For longer than the probe waits until it hands the flight recorder over. A pause of the machine before what
        goes wrong does not count."""
        self.wait_for_files("changing-")
        before = len(self._stalls_seconds) + 1  # the next one may be about a window from before
        self._wait(lambda: any(seconds > 4.0 for seconds in self._stalls_seconds[before:]))

    def recorders(self) -> dict[int, FlightRecorderTail]:
        """By rank, as the daemon reads them now. Asked again where a probe did not answer in time: the machine may have
        stood still."""
        found: dict[int, FlightRecorderTail] = {}

        def are_answered() -> bool:
            with grpc.insecure_channel(f"unix:{self._ranks.folder / 'd.sock'}") as channel:
                request = DumpStacksRequest(job=self._run, with_flight_recorder=True)
                answer = ProfileServiceStub(channel).DumpStacks(request, timeout=PATIENCE_SECONDS)
            found.update({one.rank: one.flight_recorder for one in answer.ranks})
            return not any("the probe did not answer" in tail.problem for tail in found.values())

        self._wait(are_answered)
        return found

    def wait_for_report(self) -> HangReport:
        """As a user gets it."""
        with grpc.insecure_channel(self.target) as channel:
            stub = JobServiceStub(channel)
            self._wait(lambda: stub.ListHangs(ListHangsRequest(run=self._run)).hangs)
            (listed,) = stub.ListHangs(ListHangsRequest(run=self._run)).hangs
            return msgspec.json.decode(stub.GetHang(GetHangRequest(id=listed.id)).report, type=HangReport)

    def wait_until_it_proceeds(self) -> None:
        """From what takes long, once that was longer than a hang."""
        self._wait(lambda: self.longest_stall_seconds > 8.0)
        (self._ranks.folder / "long enough").touch()
        self.wait_for_files("proceeded-")
        proceeded = len(self.verdicts)
        self._wait(lambda: len(self.verdicts) > proceeded + 2)

    def wait_for_files(self, prefix: str) -> None:
        """One of each rank."""
        self._wait(lambda: self._ranks.have_written(f"{prefix}{{}}"))

    def end(self, rank: int) -> Verdict:
        """Kill a rank; return the last verdict, once its peers have ended as well or have had more than the time for
        it."""
        self._ranks.processes[rank].kill()
        known = len(self.verdicts) + round(2 * DEFAULT_POLICY.hang_seconds / WINDOW_SECONDS)
        self._wait(lambda: len(self.verdicts) > known or not self._ranks.running)
        return self.verdicts[-1]

    def wait_until_it_ends(self) -> None:
        self._wait(lambda: not self._ranks.running)

    def _wait(self, condition: Callable[[], object]) -> None:
        wait_until(condition, lambda: self.told, PATIENCE_SECONDS)


def _places(verdict: Verdict) -> int:
    return verdict.cause.evidence.count(f"({SCRIPT.name}:") if verdict.kind is Kind.HANG else 0


@contextmanager
def hanging_job(
    cause: str,
    folder: Path,
    ranks: int = 2,
    *,
    probe: bool = True,
    kineto: bool = False,
    dump_prefix: Path | None = None,
) -> Iterator[HangingJob]:
    """The job, and the daemon that watches it. A checkpoint has to be stuck no longer than anything else, to keep tests
    short."""
    for fifo in ("shard", "stuck.pt"):
        os.mkfifo(folder / fifo)
    run = f"hang-{uuid.uuid4().hex[:12]}"
    environment = {"RANKSCOPE_RUN": run, "OMP_NUM_THREADS": "1"}
    if dump_prefix is not None:
        environment["TORCH_FR_DUMP_TEMP_FILE"] = str(dump_prefix)
    if kineto:
        environment["KINETO_USE_DAEMON"] = "1"
    if probe:
        environment["PYTHONPATH"] = PROBE_PATH
    places = {"socket": str(folder / "d.sock"), "metrics_listen": "127.0.0.1:0"}
    places |= {"capture_dir": str(folder / "captures"), "profile_dir": str(folder / "profiles")}
    policy = replace(DEFAULT_POLICY, hang_checkpoint_seconds=DEFAULT_POLICY.hang_seconds)
    config = replace(resolve(places, {}).config, window_seconds=WINDOW_SECONDS)
    with ExitStack() as stack:
        standalone = stack.enter_context(Standalone(config, policy, own_cpu_seconds=time.thread_time))
        words = ["--cause", cause, "--folder", str(folder), "--cpu"]
        started = stack.enter_context(start_ranks("hanging.py", words, folder, ranks, environment))
        yield HangingJob(standalone, run, started)
