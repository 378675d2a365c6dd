"""The daemon and the correlation in one process: the same code as in a cluster, with this machine as the inventory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import TracebackType

import grpc

from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY, Policy
from rankscope.common.rank_selection import Suspected
from rankscope.common.tls import FollowedTls
from rankscope.daemon.config import Config
from rankscope.daemon.loop import Addresses, Daemon
from rankscope.daemon.server.grpc_server import Service
from rankscope.daemon.server.sockets import ListenError
from rankscope.operator.alerts.alert import RefusedError, Wanted
from rankscope.operator.alerts.alertmanager_webhook import AlertReceiver
from rankscope.operator.alerts.decision import AlertDecisions, FailedError
from rankscope.operator.correlation.correlator import Correlator, LostSeconds, suspects
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.correlation.job_service import JobServicer
from rankscope.operator.metrics import Exporter
from rankscope.operator.runs.daemon_streams import DaemonStreams
from rankscope.operator.runs.rank_binding import Binding
from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub

# Requests from a daemon the captures that alerts cause.

STEPS = 3
# For ranks whose steps are not measured.
SECONDS = 2.0
CALL_SECONDS = 15.0
_REFUSALS = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


def start_capture(target: str, wanted: Wanted) -> str:
    """The id of the capture, which goes on when we hang up."""
    request = pb.StartCaptureRequest(job=wanted.job, ranks=",".join(map(str, wanted.ranks)), reason=wanted.reason)
    if wanted.steps_are_known:
        request.steps = STEPS
    else:
        request.seconds = SECONDS
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


@dataclass(frozen=True)
class AlertSettings:
    """Where Alertmanager's notifications are taken, and the token they must show."""

    host: str
    port: int
    token: bytes
    tls: FollowedTls | None = None  # needed where others can reach the address


class Standalone:
    """Runs from `start` to `stop`. Raises ListenError from `start` if an address is taken.

    With `alerts`, firing alerts that ask for it cause captures."""

    def __init__(
        self,
        config: Config,
        policy: Policy = DEFAULT_POLICY,
        own_cpu_seconds: Callable[[], float] | None = None,
        alerts: AlertSettings | None = None,
    ) -> None:
        self.correlator = Correlator(policy)
        services = (job_service(self.correlator),)
        lost = LostSeconds()
        self.correlator.listen(lost)
        self._alerts = alerts
        self._alert_desk = AlertDecisions(lambda: self.correlator.states, self._capture)
        self._receiver: AlertReceiver | None = None
        exporter = Exporter(
            lambda: self.correlator.states,
            lost,
            mfu_target_of=lambda job: policy.mfu_target_ratio,
            alert_totals=None if alerts is None else self._alert_desk.totals,
        )
        self._daemon = Daemon(config, services=services, metrics=[exporter], own_cpu_seconds=own_cpu_seconds)
        self._node = config.node
        self._binding = Binding()
        self._streams: DaemonStreams | None = None

    @property
    def addresses(self) -> Addresses:
        return self._daemon.addresses

    @property
    def alerts_url(self) -> str | None:
        return None if self._receiver is None else self._receiver.url

    def start(self) -> None:
        self._daemon.start()
        if self._alerts is not None:
            self._listen_for_alerts(self._alerts)
        if self._daemon.captures is not None:
            self._daemon.captures.suspect(self._suspects)
        self.correlator.start()
        # Through the socket like any other operator, so that what a laptop shows is what a cluster does.
        self._streams = DaemonStreams(self._accept)
        self._streams.start()
        self._streams.follow({self._node: self.addresses.grpc_targets[0]})

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        heard = self._binding.bind(messages)
        self.correlator.take(heard.windows, heard.departed)

    def _listen_for_alerts(self, alerts: AlertSettings) -> None:
        try:
            self._receiver = AlertReceiver(alerts.host, alerts.port, self._alert_desk, alerts.token, alerts.tls)
            self._receiver.start()
        except OSError as error:
            self._daemon.stop()
            reason = f"cannot listen on {alerts.host}:{alerts.port}: {error.strerror or error}"
            raise ListenError(f"{reason}; pass another --alerts-listen") from error

    def _capture(self, wanted: Wanted) -> str:
        return start_capture(self.addresses.grpc_targets[0], wanted)

    def stop(self) -> None:
        if self._receiver is not None:
            self._receiver.stop()
            self._receiver = None
        if self._streams is not None:
            self._streams.stop()
        self.correlator.stop()
        self._daemon.stop()

    def _suspects(self, job: str) -> Suspected | None:
        for state in self.correlator.states:
            if state.job == job:
                found = suspects(state)
                return Suspected(found.culprits, found.peers, found.reason)
        return None

    def __enter__(self) -> Standalone:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()


def job_service(correlator: Correlator) -> Service:
    name = job_service_pb2.DESCRIPTOR.services_by_name["JobService"].full_name
    servicer = JobServicer(correlator)
    return Service(name, lambda server: job_service_pb2_grpc.add_JobServiceServicer_to_server(servicer, server))
