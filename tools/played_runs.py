"""Runs made up for the console: a history that is played tick by tick, with a clock of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from rankscope.analysis.step_graph.step_picture import StepPicture
from rankscope.analysis.verdicts.verdict import Kind, Verdict
from rankscope.analysis.verdicts.window_columns import pack, unpack
from rankscope.operator.console.history import MAX_BYTES, History, RunView
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import HeldWindow, HeldWindows, RankSeen
from rankscope.operator.correlation.fleet_usage import FleetUsage
from rankscope.v1.identity_pb2 import ParallelCoordinates, RankIdentity
from rankscope.v1.window_pb2 import RankWindow

RUN = "team/llama"
HEALTHY = Verdict(Kind.HEALTHY, "all is well")
MORNING = 1_800_000_000.0 - 1_800_000_000.0 % 86_400 + 3600  # of some day
TICK_SECONDS = 2.0
Figures = Callable[[int], Mapping[str, float]]
Identities = Callable[[str, int, int], RankIdentity]  # of a run, rank and world size


def usual(rank: int) -> Mapping[str, float]:
    return {
        "steps": 20.0,
        "step_seconds": 0.1,
        "self_seconds": 0.09 + rank / 1e3,
        "wait_seconds": 0.01,
        "mfu_ratio": 0.4,
    }


def identity_of(run: str, rank: int, size: int) -> RankIdentity:
    place = ParallelCoordinates(pipeline=rank % 2, data=rank // 2)
    return RankIdentity(job=run, rank=rank, world_size=size, node=f"n{rank // 4}", pid=rank + 1, coordinates=place)


class Played:
    def __init__(
        self,
        limit_bytes: int = MAX_BYTES,
        begin: float = MORNING,
        identities: Identities = identity_of,
        keeps: Callable[[str], bool] = lambda run: True,
    ) -> None:
        self.now = begin
        self.lost = LostSeconds()
        self.usage = FleetUsage(self.lost, clock=lambda: self.now)
        self.history = History(self.lost, limit_bytes, clock=lambda: self.now, keeps=keeps)
        self.history_cpu_seconds = 0.0  # of the history, without what plays here
        self._states: dict[str, JobState] = {}
        self._since: dict[str, tuple[Verdict, float]] = {}
        self._identities = identities
        self._seen: dict[tuple[str, int], tuple[RankSeen, bytes]] = {}  # and a window with nothing but the identity
        self._rows: dict[tuple[Figures, tuple[int, ...]], list[bytes]] = {}
        self._held: dict[str, dict[int, HeldWindow]] = {}

    def _rank(self, run: str, rank: int, size: int) -> tuple[RankSeen, bytes]:
        if (run, rank) not in self._seen:
            identity = self._identities(run, rank, size)
            self._seen[run, rank] = RankSeen(identity), RankWindow(identity=identity).SerializeToString()
        return self._seen[run, rank]

    def tick(
        self,
        figures: Figures = usual,
        run: str = RUN,
        ranks: int | Iterable[int] = 4,
        verdict: Verdict = HEALTHY,
        restarts: int = 0,
        window: RankWindow | None = None,
        pace: tuple[float, float, float] = (0.1, 0.4, 0.1),
        seconds: float = TICK_SECONDS,
        picture: StepPicture | None = None,
    ) -> None:
        """One evaluation of one run, so long after the last one of any run, beside those that are still there. A
        function of figures that comes again is not called again."""
        self.now += seconds
        present = tuple(range(ranks) if isinstance(ranks, int) else ranks)
        if (figures, present) not in self._rows:
            names, values = pack([figures(rank) for rank in present])
            self._rows[figures, present] = unpack(names, values, len(present))
        rows = self._rows[figures, present]
        encoded = (window or RankWindow()).SerializeToString()
        held = self._held.setdefault(run, {})
        nanos = round(self.now * 1e9)
        for rank, row in zip(present, rows, strict=True):
            who, identity = self._rank(run, rank, len(present))
            held[rank] = HeldWindow(who, identity + encoded, nanos - round(TICK_SECONDS * 1e9), nanos, row)
            held[rank].heard_monotonic = self.now
        finding = replace(verdict, lost_gpu_seconds=None)
        if self._since.get(run, (None,))[0] != finding:
            self._since[run] = (finding, self.now)
        size, since = len(present), self._since[run][1]
        state = JobState(run, size, verdict, since, self.now, size, *pace, HeldWindows(held.copy()), restarts=restarts)
        self.evaluate(replace(state, picture=picture))

    def evaluate(self, *states: JobState) -> None:
        self._states |= {state.job: state for state in states}
        self._tell()

    def compare(self, self_and_wait_seconds: Mapping[int, tuple[float, float]], run: str = RUN) -> None:
        """The last evaluation again, now, with what only the comparison of ranks shows."""
        windows = HeldWindows(self._held[run].copy(), self_and_wait_seconds)
        self.evaluate(replace(self._states[run], windows=windows, evaluated_unix_seconds=self.now))

    def held(self, run: str = RUN) -> Iterable[HeldWindow]:
        return self._held[run].values()

    def end(self, run: str = RUN) -> None:
        self.now += TICK_SECONDS
        del self._states[run]
        self._held.pop(run, None)
        self._tell()

    def _tell(self) -> None:
        states = tuple(self._states.values())
        self.usage(states)
        self.lost(states)
        started = time.thread_time()
        self.history(states)
        self.history_cpu_seconds += time.thread_time() - started

    def view(self, run: str = RUN) -> RunView:
        found = self.history.run(run)
        assert found is not None
        return found
