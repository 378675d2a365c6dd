"""The daemon's captures as one thing: it is told which ranks there are, and offers CaptureService."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from rankscope.daemon.captures.auditing import CaptureAudit
from rankscope.daemon.captures.conducting import Conductor
from rankscope.daemon.captures.delivering import LocalArchive
from rankscope.daemon.captures.duty_budget import DutySettings
from rankscope.daemon.captures.duty_cycle import DutyCycle
from rankscope.daemon.captures.duty_desk import DutyCaptures
from rankscope.daemon.captures.endpoint import Endpoint
from rankscope.daemon.captures.exporting import CaptureStatus
from rankscope.daemon.captures.kineto_backend import KinetoBackend
from rankscope.daemon.captures.making_room import Quota
from rankscope.daemon.captures.namespaces import network_namespace
from rankscope.daemon.captures.orders import Backend
from rankscope.daemon.captures.probe_backend import ProbeBackend
from rankscope.daemon.captures.recent_steps import RecentSteps
from rankscope.daemon.captures.selecting import SuspectsOf
from rankscope.daemon.captures.serving import capture_service
from rankscope.daemon.captures.stacks_backend import StacksBackend
from rankscope.daemon.captures.store import Store
from rankscope.daemon.config import NONE, Config
from rankscope.daemon.policies.holding import DutyWish
from rankscope.daemon.samples import RankKey, RankProcess
from rankscope.daemon.serving import Service
from rankscope.v1.window_pb2 import RankWindow

log = logging.getLogger(__name__)

# Between the last rank's poll and the start: libkineto refuses a start that is too near.
START_MARGIN_SECONDS = 1.5

# How often captures that are too old are looked for.
SWEEP_SECONDS = 3600.0


class CaptureDesk:
    """Raises CaptureError if captures cannot be kept where the configuration says. `duty_wish` tells what a policy asks
    for the ranks of a job, None where the configuration holds."""

    def __init__(
        self, config: Config, duty_wish: Callable[[Sequence[RankProcess]], DutyWish | None] = lambda ranks: None
    ) -> None:
        proc_root = Path(config.proc_root)
        self._proc_root = proc_root
        self._ranks: Sequence[RankProcess] = ()
        self._steps = RecentSteps()
        self._sweep_at = time.monotonic() + SWEEP_SECONDS
        audit = CaptureAudit(config.node, has_tls=config.tls_certificate != NONE)
        quota = Quota(config.capture_quota_bytes, config.capture_quota_seconds)
        self._store = Store(Path(config.capture_dir), quota, on_lost=audit.ended)
        socket_dir = None if config.kineto_socket_dir == NONE else config.kineto_socket_dir
        self._endpoint = Endpoint(socket_directory=socket_dir, proc_root=proc_root)
        self._kineto = kineto = KinetoBackend(self._endpoint, proc_root)
        self._met: set[RankKey] = set()  # ranks whose leftovers of an earlier daemon were looked after
        # The best one that suits a rank is used.
        probe = ProbeBackend(proc_root)
        backends: list[Backend] = [kineto, probe, StacksBackend(config.py_spy or None, proc_root)]
        upload_url = "" if config.capture_upload_url == NONE else config.capture_upload_url
        self._conductor = Conductor(
            config.node,
            backends,
            LocalArchive(self._store, config.node, upload_url, proc_root),
            lambda: self._ranks,
            earliest_start=partial(_earliest_start, kineto),
            step_seconds=self._steps,
            audit=audit,
        )
        self._earlier = self._conductor.records.all()
        settings = DutySettings(config.duty_cycle_steps, config.duty_cycle_seconds, config.duty_cycle_budget_ratio)
        captures = DutyCaptures(self._conductor, self._store, kineto, probe, self._endpoint, proc_root)

        def duty_settings_of(ranks: Sequence[RankProcess]) -> DutySettings:
            wish = duty_wish(ranks)
            return settings if wish is None else replace(settings, steps=wish.steps, period_seconds=wish.period_seconds)

        self._duty = DutyCycle(settings, captures, config.window_seconds, settings_of=duty_settings_of)

    @property
    def service(self) -> Service:
        return capture_service(self._conductor, self._store)

    def suspect(self, suspects_of: SuspectsOf) -> None:
        """Who is slow is for the correlation to say."""
        self._conductor.suspects_of = suspects_of

    def start(self) -> None:
        self._endpoint.start()

    def stop(self) -> None:
        self._conductor.close()
        self._endpoint.stop()
        self._store.close()

    def fill(self, key: RankKey, window: RankWindow) -> None:
        """Before a window is counted and told: what a capture of the duty cycle found since the last one."""
        self._duty.fill(key, window)

    def shown(self, key: RankKey, window: RankWindow) -> RankWindow:
        """The window as /metrics shows it."""
        return self._duty.shown(key, window)

    def observe(self, ranks: Sequence[RankProcess], windows: Mapping[RankKey, RankWindow]) -> None:
        """After every tick, in the daemon's thread: quick."""
        self._ranks = ranks
        strangers = [rank for rank in ranks if rank.key not in self._met]
        if strangers:
            self._met = {rank.key for rank in ranks}
            self._kineto.remove_leftovers(self._earlier, strangers)
        self._steps.add(windows)
        namespaces: dict[int, int] = {}
        for rank in ranks:
            if "KINETO_USE_DAEMON" in rank.environment:
                try:
                    namespaces.setdefault(network_namespace(rank.pid, self._proc_root), rank.pid)
                except OSError:
                    continue  # it has just ended
        self._endpoint.watch(namespaces)
        self._duty.observe(ranks, windows)
        if time.monotonic() >= self._sweep_at:
            self._sweep_at = time.monotonic() + SWEEP_SECONDS
            self._store.sweep()

    @property
    def status(self) -> CaptureStatus:
        tallies = self._endpoint.tallies
        return CaptureStatus(
            results=self._conductor.tally.results,
            slowdowns=self._conductor.tally.slowdowns,
            clients=self._endpoint.client_count(),
            malformed_total=tallies.malformed,
            unvouched_total=tallies.unvouched,
            unanswered={"late": tallies.late, "hushed": tallies.hushed, "unsent": tallies.unsent},
            duty_results=self._duty.results if self._duty.was_ever_on else None,
            duty_skips=self._duty.skips if self._duty.was_ever_on else None,
        )


def _earliest_start(kineto: KinetoBackend, ranks: Sequence[RankProcess], now_unix_seconds: float) -> float:
    """The first moment at which all ranks can begin: those of libkineto once they have polled."""
    polling = [rank for rank in ranks if kineto.objection(rank) is None]
    earliest = now_unix_seconds + START_MARGIN_SECONDS
    if not polling:
        return earliest
    return kineto.common_start(polling, earliest + max(map(kineto.poll_seconds, polling)))
