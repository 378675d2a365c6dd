"""The daemon's captures as the duty cycle uses them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rankscope.daemon.captures.conducting import Conductor
from rankscope.daemon.captures.cuda_care import slowdown_objection
from rankscope.daemon.captures.duty_cycle import PROFILER, SLOWDOWN, UNABLE
from rankscope.daemon.captures.endpoint import Endpoint
from rankscope.daemon.captures.kineto_backend import KinetoBackend
from rankscope.daemon.captures.orders import Options
from rankscope.daemon.captures.probe_backend import ProbeBackend
from rankscope.daemon.captures.records import DUTY_CYCLE
from rankscope.daemon.captures.store import Store
from rankscope.daemon.samples import RankProcess
from rankscope.v1 import capture_service_pb2 as pb


class DutyCaptures:
    """By libkineto, and else by a probe that cannot tell what its steps wait for. Stacks have no breakdown."""

    def __init__(
        self,
        conductor: Conductor,
        store: Store,
        kineto: KinetoBackend,
        probe: ProbeBackend,
        endpoint: Endpoint,
        proc_root: Path,
    ) -> None:
        self._conductor = conductor
        self._store = store
        self._kineto = kineto
        self._probe = probe
        self._endpoint = endpoint
        self._proc_root = proc_root

    def start(self, request: pb.StartCaptureRequest, requested_by: str, step_seconds: float | None) -> str:
        return self._conductor.start(request, requested_by, step_seconds)

    def find(self, capture_id: str) -> pb.Capture | None:
        return self._conductor.records.get(capture_id)

    def is_busy(self, job: str) -> bool:
        return self._conductor.is_busy(job)

    def is_able(self, rank: RankProcess) -> bool:
        return self._kineto.objection(rank) is None or self._probe.objection(rank) is None

    def objection(self, rank: RankProcess) -> str | None:
        if self._kineto.objection(rank) is None:
            client = self._endpoint.client(rank.pid)
            if client is None:
                return UNABLE
            if not client.is_ready:
                return PROFILER
        elif self._probe.objection(rank) is not None:
            return UNABLE
        return None if slowdown_objection(rank, Options(), self._proc_root) is None else SLOWDOWN

    def kept(self) -> Sequence[tuple[str, str]]:
        return self._conductor.records.finished(DUTY_CYCLE)

    def forget(self, capture_id: str) -> None:
        self._conductor.records.forget(capture_id)
        self._store.remove(capture_id)
