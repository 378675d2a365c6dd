"""The stacks collector: short py-spy recordings of every rank. Ranks of a job are recorded at the same time, because
they are compared with each other. The target is never stopped."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rankscope.daemon.collector import Collector
from rankscope.daemon.config import Config
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Recording, Span, StackSample, StallDump
from rankscope.daemon.stacks.dump import dump_stacks
from rankscope.daemon.stacks.pyspy import KilledChildren, find_py_spy, missing
from rankscope.daemon.stacks.recording import RankRecorder
from rankscope.daemon.stacks.sampling_budget import Plan, plan_at

RATE_HZ: Final = 10.0
MAX_CONCURRENT: Final = 16
DUMP_TIMEOUT_SECONDS: Final = 2.0
CLOSING_SECONDS: Final = 0.5
# A recording that does not end delays those of the other ranks for at most this long.
HOLD_UP_SECONDS: Final = 3.0
RECORDED_OVER_SECONDS: Final = 60.0
# What a recording costs above this, more than one of a process with 200 threads, is charged to the budget over minutes.
# It says nothing about recordings at another rate, and one rank must not end the stacks of all.
USUAL_CPU_SECONDS: Final = 0.25
CHARGED_OVER_SECONDS: Final = 300.0
# A recording out of turn costs as much as any other, so there is at most one in this time.
HURRY_SECONDS: Final = 20.0


@dataclass(frozen=True)
class _Turn:
    """Ranks that are recorded at the same time: those of one job that share a plan, as many as may run at once."""

    plan: Plan
    recorders: Sequence[RankRecorder]

    @property
    def due_seconds(self) -> float:
        return max(recorder.due_seconds for recorder in self.recorders)

    @property
    def owners(self) -> set[str]:
        return {recorder.rank.owner for recorder in self.recorders}

    def served_seconds(self, by_owner: Mapping[str, float]) -> float:
        """When a recording of one of their owners was last started."""
        return max(by_owner.get(owner, -math.inf) for owner in self.owners)

    def ready(self, now_seconds: float) -> list[RankRecorder]:
        """The ranks to record now; none if it is too early, or if some are still being recorded."""
        is_held_up = any(recorder.is_running for recorder in self.recorders)
        if now_seconds < self.due_seconds + (HOLD_UP_SECONDS if is_held_up else 0.0):
            return []
        return [recorder for recorder in self.recorders if recorder.is_ready(now_seconds)]


class StacksCollector(Collector[StackSample]):
    """`poll` starts and reaps recordings and never blocks; `collect` returns those that ended. A rank with a recording
    in progress is absent from the result.

    `poll` must be called by a thread that lives as long as the daemon: the children die with it. `dump_all` may be
    called from any thread."""

    name = "stacks"

    def __init__(
        self,
        py_spy: Path | str | None = None,
        rate_hz: float = RATE_HZ,
        max_concurrent: int = MAX_CONCURRENT,
        proc_root: Path = Path("/proc"),
        unix_nanos: Callable[[], int] = time.time_ns,
    ) -> None:
        self._max_concurrent = max_concurrent
        self._proc_root = proc_root
        self._unix_nanos = unix_nanos
        self._recorders: dict[RankKey, RankRecorder] = {}
        self._killed = KilledChildren()
        self._py_spy = Path(py_spy) if py_spy else find_py_spy()
        self._cpu_lock = threading.Lock()
        self._child_cpu_seconds = 0.0
        self._uncharged_cpu_seconds = 0.0
        self._polled_seconds = math.inf
        self._plan = plan_at(rate_hz)
        self._plans_of: dict[RankKey, Plan | None] = {}
        self._turns: list[_Turn] | None = None  # None: not arranged yet
        self._occupied_until: dict[RankKey, float] = {}
        self._served: dict[str, float] = {}  # when a recording was last started, by owner
        self._hurried: dict[str, float] = {}  # when each job was last recorded out of turn
        # Time, rank-seconds recorded, and rank-seconds that could have been.
        self._recorded: deque[tuple[float, float, float]] = deque()
        self._keep: Callable[[Recording], None] | None = None

    @classmethod
    def from_config(cls, config: Config) -> StacksCollector:
        return cls(config.py_spy or None, config.stack_rate_hertz, proc_root=Path(config.proc_root))

    @property
    def child_cpu_seconds(self) -> float:
        """CPU time of all py-spy processes since the start. Call it from the thread that polls."""
        with self._cpu_lock:
            ended_seconds = self._child_cpu_seconds
        return ended_seconds + sum(recorder.running_cpu_seconds for recorder in self._recorders.values())

    @property
    def charged_cpu_seconds(self) -> float:
        """The same as far as the budget is to know of it, as of the last `poll`."""
        with self._cpu_lock:
            ended_seconds = self._child_cpu_seconds - self._uncharged_cpu_seconds
        running = (recorder.running_cpu_seconds for recorder in self._recorders.values())
        return ended_seconds + sum(min(cpu_seconds, USUAL_CPU_SECONDS) for cpu_seconds in running)

    @property
    def running(self) -> int:
        """How many recordings are in progress."""
        return sum(recorder.is_running for recorder in self._recorders.values())

    @property
    def stuck(self) -> int:
        """py-spy processes that were killed and do not end."""
        return self._killed.stuck

    @property
    def recorded_ratio(self) -> float | None:
        """Share of the last minute in which a rank was recorded, mean of the ranks."""
        if len(self._recorded) < 2 or self._recorded[-1][2] <= self._recorded[0][2]:
            return None
        (_, recorded_before, possible_before), (_, recorded, possible) = self._recorded[0], self._recorded[-1]
        return min(1.0, (recorded - recorded_before) / (possible - possible_before))

    def keep_recordings(self, keep: Callable[[Recording], None]) -> None:
        """Hand over every recording from now on. `keep` must not block, and must not change what it gets."""
        self._keep = keep

    def set_rate(self, rate_hz: float) -> None:
        """Average samples per second and rank. A low rate means pauses between recordings; 0 means none."""
        if plan_at(rate_hz) != self._plan:
            self._plan, self._turns = plan_at(rate_hz), None

    def set_rates_of(self, rates_hz: Mapping[RankKey, float]) -> None:
        """Rates of single ranks, from their next recording on; the others follow `set_rate`."""
        plans_of = {key: plan_at(rate_hz) for key, rate_hz in rates_hz.items()}
        if plans_of != self._plans_of:
            self._plans_of, self._turns = plans_of, None

    def hurry(self, job: str, now_monotonic: float) -> None:
        """Record the ranks of a job now, if they are recorded only part of the time: something has changed."""
        if now_monotonic < self._hurried.get(job, -HURRY_SECONDS) + HURRY_SECONDS:
            return
        recorders = [recorder for recorder in self._recorders.values() if recorder.rank.job == job]
        self._hurried = {name: at for name, at in self._hurried.items() if now_monotonic < at + HURRY_SECONDS}
        self._hurried[job] = now_monotonic
        for recorder in recorders:
            recorder.due_seconds = min(recorder.due_seconds, now_monotonic)

    def poll(self, now_monotonic: float) -> None:
        elapsed_seconds = max(0.0, now_monotonic - self._polled_seconds)
        self._polled_seconds = now_monotonic
        with self._cpu_lock:
            self._uncharged_cpu_seconds *= math.exp(-elapsed_seconds / CHARGED_OVER_SECONDS)
        for recorder in self._recorders.values():
            self._account(recorder.poll(now_monotonic))
        self._account(*self._killed.reap())
        self._note_recorded(now_monotonic)
        if self._turns is None:
            self._turns = self._arrange(now_monotonic)
        # A recording that failed holds its place until its time is over: failing costs more than recording.
        occupied = Counter(
            recorder.rank.owner
            for key, recorder in self._recorders.items()
            if recorder.is_running or now_monotonic < self._occupied_until.get(key, -math.inf)
        )
        waiting: set[str] = set()
        # Pods and users take turns, however many ranks they have: one of whom nothing is recorded need not wait.
        for turn in sorted(self._turns, key=lambda turn: (turn.served_seconds(self._served), turn.due_seconds)):
            if not turn.owners.isdisjoint(waiting):
                continue
            ready = turn.ready(now_monotonic)
            places = self._max_concurrent * (1 if any(occupied[owner] for owner in turn.owners) else 2)
            if len(ready) > places - occupied.total():
                waiting |= turn.owners  # its turn comes first, even if a later one of the same owners would fit
                continue
            due_seconds = now_monotonic + self._seconds_to_next(turn.plan)
            for recorder in ready:
                recorder.start(turn.plan, now_monotonic, due_seconds)
                self._occupied_until[recorder.rank.key] = now_monotonic + turn.plan.seconds
                self._served[recorder.rank.owner] = now_monotonic
                occupied[recorder.rank.owner] += 1

    def _arrange(self, now_seconds: float) -> list[_Turn]:
        owners = {recorder.rank.owner for recorder in self._recorders.values()}
        self._served = {owner: at for owner, at in self._served.items() if owner in owners}
        by_plan: dict[tuple[str, Plan], list[RankRecorder]] = {}
        for key, recorder in sorted(self._recorders.items()):
            plan = self._plans_of.get(key, self._plan)
            if plan is not None:
                recorder.due_seconds = min(recorder.due_seconds, now_seconds + plan.period_seconds)
                by_plan.setdefault((recorder.rank.job, plan), []).append(recorder)
        return [
            _Turn(plan, recorders[start : start + self._max_concurrent])
            for (_, plan), recorders in by_plan.items()
            for start in range(0, len(recorders), self._max_concurrent)
        ]

    def _seconds_to_next(self, plan: Plan) -> float:
        if not plan.has_pause:
            return plan.period_seconds
        # At multiples of the period since 1970, so that ranks of a job on several nodes are recorded at the same time.
        to_border = plan.period_seconds - self._unix_nanos() / 1e9 % plan.period_seconds
        return to_border if to_border >= plan.seconds else to_border + plan.period_seconds

    def _note_recorded(self, now_seconds: float) -> None:
        if self._recorded and now_seconds - self._recorded[-1][0] < 1.0:
            return
        last_seconds, recorded, possible = self._recorded[-1] if self._recorded else (now_seconds, 0.0, 0.0)
        elapsed_seconds = now_seconds - last_seconds
        recorded += elapsed_seconds * self.running
        possible += elapsed_seconds * len(self._recorders)
        self._recorded.append((now_seconds, recorded, possible))
        while self._recorded[0][0] < now_seconds - RECORDED_OVER_SECONDS:
            self._recorded.popleft()

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, StackSample | Problem]:
        if self._py_spy is None:
            return dict.fromkeys((rank.key for rank in ranks), missing(None))
        for key in self._recorders.keys() - {rank.key for rank in ranks}:
            self._recorders.pop(key).close()
            self._occupied_until.pop(key, None)
            self._turns = None
        for rank in ranks:
            if rank.key not in self._recorders:
                self._recorders[rank.key] = RankRecorder(
                    rank, self._py_spy, self._killed, self._proc_root, self._unix_nanos, self._hand_over
                )
                self._turns = None
        taken = {key: recorder.take() for key, recorder in self._recorders.items()}
        return {key: sample for key, sample in taken.items() if sample is not None}

    def dump_all(self, ranks: Sequence[RankProcess]) -> Mapping[RankKey, StallDump | Problem]:
        """Takes up to two seconds."""
        keys = [rank.key for rank in ranks]
        if self._py_spy is None or not self._py_spy.is_file():
            return dict.fromkeys(keys, missing(self._py_spy))
        dumps = dump_stacks(self._py_spy, ranks, self._killed, self._proc_root, DUMP_TIMEOUT_SECONDS)
        self._account(dumps.cpu_seconds)
        return dumps.by_rank

    def close(self) -> None:
        """Kills all recordings."""
        for recorder in self._recorders.values():
            recorder.close()
        self._recorders.clear()
        self._account(*self._killed.reap(CLOSING_SECONDS))

    def _hand_over(self, recording: Recording) -> None:
        if self._keep is not None:
            self._keep(recording)

    def _account(self, *cpu_seconds: float) -> None:
        """Of a recording each, or of a dump."""
        with self._cpu_lock:
            self._child_cpu_seconds += sum(cpu_seconds)
            self._uncharged_cpu_seconds += sum(max(0.0, each - USUAL_CPU_SECONDS) for each in cpu_seconds)
