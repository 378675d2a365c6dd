"""Stacks of every rank: short py-spy recordings, one after the other per rank. The target is never stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from rankscope.daemon.dumping import dump_stacks
from rankscope.daemon.private_folder import PrivateFolder
from rankscope.daemon.pyspy import find_py_spy, missing
from rankscope.daemon.recording import Plan, RankRecorder
from rankscope.daemon.samples import Problem, RankKey, RankProcess, Span, StackSample, StallDump

RATE_HZ: Final = 10.0
# A recording costs its attaching (13 ms of CPU) once: longer ones are cheaper, shorter ones are sooner known.
RECORDING_SECONDS: Final = 4
MAX_CONCURRENT: Final = 8
DUMP_TIMEOUT_SECONDS: Final = 2.0
_STAGGER: Final = 0.618  # multiples of the golden ratio spread any number of ranks evenly


class StacksCollector:
    """`poll`, about five times a second, starts and reaps recordings and never blocks; `collect` returns what ended.

    A rank whose recording is still under way is absent from the result. `poll` must be called by a thread that lives as
    long as the daemon, for the children die with it. `dump` and `dump_all` may be called from any thread."""

    name = "stacks"

    def __init__(
        self,
        py_spy: Path | str | None = None,
        rate_hz: float = RATE_HZ,
        recording_seconds: int = RECORDING_SECONDS,
        max_concurrent: int = MAX_CONCURRENT,
        proc_root: Path = Path("/proc"),
        unix_nanos: Callable[[], int] = time.time_ns,
    ) -> None:
        self._py_spy = Path(py_spy) if py_spy else find_py_spy()
        self._burst_hz = max(RATE_HZ, rate_hz)
        self._recording_seconds = recording_seconds
        self._max_concurrent = max_concurrent
        self._proc_root = proc_root
        self._unix_nanos = unix_nanos
        self._recorders: dict[RankKey, RankRecorder] = {}
        self._folder: PrivateFolder | None = None
        self._unusable = missing(None) if self._py_spy is None else None
        try:
            self._folder = PrivateFolder()
        except OSError as error:
            text = f"there is no folder that py-spy could write to ({error}); make /tmp writable or set TMPDIR"
            self._unusable = Problem(self.name, "unwritable", text)
        self._cpu_lock = threading.Lock()
        self._child_cpu_seconds = 0.0
        self._plans_of: dict[RankKey, Plan | None] = {}
        self.set_rate(rate_hz)

    @property
    def child_cpu_seconds(self) -> float:
        """CPU time of all py-spy processes that have ended, since the start."""
        with self._cpu_lock:
            return self._child_cpu_seconds

    @property
    def running(self) -> int:
        """How many recordings are under way."""
        return sum(recorder.is_running for recorder in self._recorders.values())

    def set_rate(self, rate_hz: float) -> None:
        """Samples per second and rank, on average: a lower rate means fewer recordings, for attaching costs as much as
        twenty samples do. 0 pauses."""
        self._plan = self._plan_at(rate_hz)

    def set_rates_of(self, rates_hz: Mapping[RankKey, float]) -> None:
        """Ranks with a rate of their own; the others keep to `set_rate`. Holds from a rank's next recording on."""
        self._plans_of = {key: self._plan_at(rate_hz) for key, rate_hz in rates_hz.items()}

    def _plan_at(self, rate_hz: float) -> Plan | None:
        if rate_hz <= 0:
            return None
        burst_hz = max(self._burst_hz, rate_hz)
        return Plan(self._recording_seconds, round(burst_hz), self._recording_seconds * burst_hz / rate_hz)

    def poll(self, now_monotonic: float) -> None:
        for recorder in self._recorders.values():
            self._account(recorder.poll(now_monotonic))
            if recorder.due_seconds is None:  # new: somewhere in the window, each rank elsewhere
                recorder.due_seconds = now_monotonic + recorder.rank.rank * _STAGGER % 1.0 * self._recording_seconds
        if self._plan is None and not self._plans_of:
            return
        free = max(0, self._max_concurrent - self.running)
        plans = [(recorder, self._plans_of.get(key, self._plan)) for key, recorder in self._recorders.items()]
        waiting = [(recorder, plan) for recorder, plan in plans if plan is not None and recorder.is_due(now_monotonic)]
        for recorder, plan in sorted(waiting, key=lambda pair: pair[0].due_seconds or 0.0)[:free]:
            recorder.start(plan, now_monotonic)

    def collect(self, ranks: Sequence[RankProcess], span: Span) -> Mapping[RankKey, StackSample | Problem]:
        if self._py_spy is None or self._folder is None:
            assert self._unusable is not None
            return {rank.key: self._unusable for rank in ranks}
        for key in self._recorders.keys() - {rank.key for rank in ranks}:
            self._account(self._recorders.pop(key).close())
        for rank in ranks:
            if rank.key not in self._recorders:
                recorder = RankRecorder(rank, self._py_spy, self._folder.path, self._proc_root, self._unix_nanos)
                self._recorders[rank.key] = recorder
        taken = {key: recorder.take() for key, recorder in self._recorders.items()}
        return {key: sample for key, sample in taken.items() if sample is not None}

    def dump(self, rank: RankProcess) -> StallDump | Problem:
        return self.dump_all((rank,))[rank.key]

    def dump_all(self, ranks: Sequence[RankProcess]) -> Mapping[RankKey, StallDump | Problem]:
        """Takes up to two seconds."""
        if self._py_spy is None or self._folder is None:
            assert self._unusable is not None
            return {rank.key: self._unusable for rank in ranks}
        if not self._py_spy.is_file():
            return {rank.key: missing(self._py_spy) for rank in ranks}
        try:
            dumps = dump_stacks(self._py_spy, ranks, self._folder.path, self._proc_root, DUMP_TIMEOUT_SECONDS)
        except OSError as error:
            text = f"py-spy has no folder to write to ({error}); make /tmp writable or set TMPDIR"
            return {rank.key: Problem(self.name, "unwritable", text) for rank in ranks}
        self._account(dumps.cpu_seconds)
        return dumps.by_rank

    def close(self) -> None:
        """Ends all recordings that are under way and removes what they wrote."""
        for recorder in self._recorders.values():
            self._account(recorder.close())
        self._recorders.clear()
        if self._folder is not None:
            self._folder.close()

    def _account(self, cpu_seconds: float) -> None:
        with self._cpu_lock:
            self._child_cpu_seconds += cpu_seconds
