"""The daemon and the correlation in one process: the same code as in a cluster, with this machine as the inventory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import grpc

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.common.rank_selection import Suspected
from rankscope.daemon import procfs
from rankscope.daemon.config import NONE, Config, resolve
from rankscope.daemon.discovery.ranks import Discovered, RankDiscovery
from rankscope.daemon.loop import Addresses, Daemon
from rankscope.daemon.sampler import real_collectors
from rankscope.daemon.samples import RankProcess
from rankscope.daemon.server.grpc_server import Service
from rankscope.daemon.server.sockets import ListenError
from rankscope.daemon.windows.broadcast import Tick
from rankscope.operator.alerts.alert import RefusedError, Wanted
from rankscope.operator.alerts.decision import FailedError
from rankscope.operator.correlation.correlator import Correlator, suspects
from rankscope.operator.correlation.fleet_reports import FleetReports
from rankscope.operator.correlation.hang_store import FolderFiles, HangStore
from rankscope.operator.correlation.job_service import JobServicer, verdict_message
from rankscope.operator.job_watch import AlertSettings, JobWatch
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import job_service_pb2_grpc
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from rankscope.v1.job_service_pb2 import Verdict
from rankscope.v1.profile_service_pb2 import DumpStacksRequest, DumpStacksResponse
from rankscope.v1.profile_service_pb2_grpc import ProfileServiceStub

if TYPE_CHECKING:
    from rankscope.operator.console.older_history import PrometheusHistory
    from rankscope.operator.console.server import ConsoleServer

CALL_SECONDS = 15.0
DUMP_SECONDS = 30.0
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


def start_capture(target: str, wanted: Wanted) -> str:
    """The id of the capture, which goes on when we hang up. The daemon chooses its length."""
    request = pb.StartCaptureRequest(job=wanted.job, ranks=",".join(map(str, wanted.ranks)), reason=wanted.reason)
    try:
        with grpc.insecure_channel(target) as channel:
            call = CaptureServiceStub(channel).StartCapture(request, timeout=CALL_SECONDS)
            first: pb.StartCaptureResponse = next(iter(call))
            call.cancel()
            return first.capture.id
    except grpc.RpcError as error:
        if error.code() in _REFUSALS:
            raise RefusedError(error.details()) from error
        raise FailedError(f"the daemon at {target}: {error.code().name}: {error.details()}") from error
    except StopIteration:
        raise FailedError(f"the daemon at {target} did not answer about the capture") from None


def private_config(folder: str) -> Config:
    """Addresses and files of its own: a daemon that already runs on this machine is not disturbed."""
    places = {
        "socket": str(Path(folder) / "daemon.sock"),
        "metrics_listen": "127.0.0.1:0",
        "capture_dir": str(Path(folder) / "captures"),
        "profile_dir": str(Path(folder) / "profiles"),
        "log_level": "error",
    }
    return resolve(places, {}).config


# Marks the processes of one command among all ranks of the machine: every child inherits it.
COMMAND_VARIABLE = "RANKSCOPE_COMMAND"


class CommandDiscovery(RankDiscovery):
    """Finds the ranks of one command only: other jobs of the machine are watched by others."""

    def __init__(self, config: Config, mark: str) -> None:
        super().__init__(Path(config.proc_root), config.node, config.max_ranks)
        self._mark = mark
        self._processes = Path(config.proc_root)
        self._is_own: dict[tuple[int, int], bool] = {}  # by pid and start of the process

    def scan(self) -> Discovered:
        found = super().scan()
        known = {(rank.pid, rank.start_ticks): self._has_mark(rank) for rank in found.ranks}
        self._is_own = {process: is_own for process, is_own in known.items() if is_own is not None}
        ranks = tuple(rank for rank in found.ranks if known[rank.pid, rank.start_ticks])
        jobs = {rank.job for rank in ranks}
        conflicts = tuple(conflict for conflict in found.conflicts if conflict.job in jobs)
        return replace(found, ranks=ranks, conflicts=conflicts)

    def _has_mark(self, rank: RankProcess) -> bool | None:
        """None if the process cannot be read now."""
        known = self._is_own.get((rank.pid, rank.start_ticks))
        if known is not None:
            return known
        try:
            return procfs.Environment(f"{self._processes}/{rank.pid}").get(COMMAND_VARIABLE) == self._mark
        except OSError:
            return None


@dataclass(frozen=True)
class ConsoleListen:
    """Where the console is served. The port is a wish if a free one will do."""

    host: str = "127.0.0.1"
    port: int = 9469
    or_any_port: bool = True
    prometheus_url: str = ""  # has the time before this process; empty: none


class Standalone:
    """Runs from `start` to `stop`. Raises ListenError from `start` if an address is taken.

    With `alerts`, firing alerts that ask for it cause captures. With `console`, the console is served. With
    `command_mark`, the ranks of the command that has this value in COMMAND_VARIABLE are watched, and no others."""

    def __init__(
        self,
        config: Config,
        policy: Policy = DEFAULT_POLICY,
        own_cpu_seconds: Callable[[], float] | None = None,
        alerts: AlertSettings | None = None,
        console: ConsoleListen | None = None,
        command_mark: str | None = None,
    ) -> None:
        self._alerts = alerts
        self._console_listen = console
        self._console: ConsoleServer | None = None
        self._older: PrometheusHistory | None = None
        folder = None if config.profile_dir == NONE else Path(config.profile_dir) / "hangs"
        self._jobs = JobWatch(policy, self._capture, self._dump, HangStore(FolderFiles(folder)), alerts)
        self.correlator = self._jobs.correlator
        collectors = None
        if command_mark is not None:
            collectors = replace(real_collectors(config), discovery=CommandDiscovery(config, command_mark))
        self._daemon = Daemon(
            config,
            collectors=collectors,
            services=(job_service(self.correlator, self._jobs.hangs.store, self._jobs.reports),),
            metrics=[self._jobs.exporter()],
            own_cpu_seconds=own_cpu_seconds,
        )

    @property
    def addresses(self) -> Addresses:
        return self._daemon.addresses

    @property
    def alerts_url(self) -> str | None:
        return self._jobs.alerts_url

    @property
    def console_url(self) -> str | None:
        return None if self._console is None else self._console.url

    def start(self) -> None:
        self._daemon.start()
        if self._daemon.captures is not None:
            self._daemon.captures.correlate(self._suspects, self._verdict)
        try:
            self._jobs.start()
        except OSError as error:
            self._daemon.stop()
            assert self._alerts is not None
            reason = f"cannot listen on {self._alerts.host}:{self._alerts.port}: {error.strerror or error}"
            raise ListenError(f"{reason}; pass another --alerts-listen") from error
        if self._console_listen is not None:
            self._start_console(self._console_listen)
        # Through the socket like any other correlator, so that what a laptop shows is what a cluster does.
        self._jobs.follow([self.addresses.grpc_targets[0]])

    def _start_console(self, listen: ConsoleListen) -> None:
        # A web server takes 0.2 s to import, and `rankscope run` needs none.
        from rankscope.operator.console.history import History
        from rankscope.operator.console.older_history import PrometheusHistory
        from rankscope.operator.console.server import ConsoleServer, local_channels

        history, self._older = History(self._jobs.lost), PrometheusHistory()
        self.read_older_history(listen.prometheus_url)
        try:
            self._console = ConsoleServer(
                history,
                listen.host,
                listen.port,
                or_any_port=listen.or_any_port,
                channels=local_channels(self.addresses.grpc_targets[0]),
                older=self._older,
            )
        except OSError as error:
            self.stop()
            reason = f"cannot listen on {listen.host}:{listen.port}: {error.strerror or error}"
            raise ListenError(f"{reason}; pass another --console-listen, or none") from error
        self.correlator.listen(history)
        self._console.start()

    def read_older_history(self, prometheus_url: str) -> None:
        """Of the console, and fleet reports, from now on."""
        if self._older is not None:
            self._older.use(prometheus_url)
            self._jobs.reports.use(prometheus_url)

    def _capture(self, wanted: Wanted) -> str:
        return start_capture(self.addresses.grpc_targets[0], wanted)

    def _dump(self, job: str) -> DumpStacksResponse:
        with grpc.insecure_channel(self.addresses.grpc_targets[0]) as channel:
            request = DumpStacksRequest(job=job, with_flight_recorder=True)
            answer: DumpStacksResponse = ProfileServiceStub(channel).DumpStacks(request, timeout=DUMP_SECONDS)
            return answer

    def on_tick(self, callback: Callable[[Tick], None]) -> None:
        """Call `callback` with every tick, in the daemon's own thread, so it must be quick."""
        self._daemon.publisher.subscribe(callback)

    def stop(self) -> None:
        if self._console is not None:
            self._console.stop()
            self._console = None
        self._jobs.stop()
        self._daemon.stop()

    def _suspects(self, job: str) -> Suspected | None:
        state = self._jobs.states_by_job().get(job)
        return None if state is None else suspects(state)

    def _verdict(self, job: str) -> Verdict | None:
        state = self._jobs.states_by_job().get(job)
        return None if state is None else verdict_message(state.verdict, state.since_unix_seconds)

    def __enter__(self) -> Standalone:
        self.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self.stop()


def job_service(correlator: Correlator, hangs: HangStore, reports: FleetReports) -> Service:
    add = job_service_pb2_grpc.add_JobServiceServicer_to_server
    return Service.of("JobService", add, JobServicer(correlator, hangs, reports))
