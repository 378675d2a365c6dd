"""`python -m benchmarks.fleet_operator DAEMONS RANKS`: the operator from its streams to its verdicts, without an API
server: the pods that it would be told of are made up. Reads the daemons' addresses as JSON from its input and prints,
every half second, how it fares."""

from __future__ import annotations

import json
import resource
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.fleet_layout import NAMESPACE, FleetLayout
from rankscope.analysis.verdicts.verdict import Kind, Severity
from rankscope.operator.correlation.correlator import Correlator, JobState, LostSeconds
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.operator.process import tune_garbage_collection
from rankscope.operator.runs.daemon_streams import DaemonStreams
from rankscope.operator.runs.inventory import Inventory
from rankscope.operator.runs.rank_binding import Binding

REPORT_SECONDS = 0.5


class Core:
    """What `Operator` has between a daemon's message and a verdict."""

    def __init__(self, layout: FleetLayout) -> None:
        self.layout = layout
        self.inventory = Inventory()
        for pod in layout.pods():
            self.inventory.changed(pod.uid, pod)
        self.binding = Binding(self.inventory)
        self.correlator = Correlator()
        self.streams = DaemonStreams(self._accept)
        self.windows_total = 0
        self.latencies: list[float] = []
        self._judged: dict[str, float] = {}
        self.correlator.listen(LostSeconds())
        self.correlator.listen(self._time)

    def _accept(self, messages: Sequence[DaemonMessage]) -> None:
        accepted = self.binding.bind(messages)
        self.windows_total += len(accepted.windows)
        if accepted.windows or accepted.departed:
            self.correlator.take(accepted.windows, accepted.departed)

    def _time(self, states: tuple[JobState, ...]) -> None:
        """From the end of a window to a verdict that counts it in, once for each job and window."""
        now = time.time()
        for state in states:
            if self._judged.get(state.job) != state.window_end_unix_seconds:
                self._judged[state.job] = state.window_end_unix_seconds
                self.latencies.append(now - state.window_end_unix_seconds)

    def wrong_verdicts(self) -> list[str]:
        """Rules that do not decide rightly have not been measured."""
        states = {state.job: state for state in self.correlator.states}
        wrong = []
        for job in self.layout.jobs:
            state = states.get(f"{NAMESPACE}/pytorchjob-{job.name}")
            verdict = None if state is None else state.verdict
            alarmed = verdict is not None and verdict.kind is Kind.SLOW_RANK and verdict.severity is Severity.ALARM
            culprits = verdict.culprits if verdict is not None and alarmed else ()
            if culprits != ((job.slow_rank,) if job.is_slow else ()):
                wrong.append(f"{job.name}: {verdict}")
        return wrong


def main() -> None:
    core = Core(FleetLayout(*map(int, sys.argv[1:])))
    addresses: dict[str, str] = json.loads(sys.stdin.readline())
    tune_garbage_collection()
    core.correlator.start()
    core.streams.start()
    core.streams.follow(addresses)
    ended = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), ended.set()), daemon=True).start()
    while not ended.wait(REPORT_SECONDS):
        latencies, core.latencies = core.latencies, []
        usage = resource.getrusage(resource.RUSAGE_SELF)
        report = {
            "unix_seconds": time.time(),
            "connected": len(core.streams.connected),
            "windows_total": core.windows_total,
            "cpu_seconds": usage.ru_utime + usage.ru_stime,
            "resident_bytes": resident_bytes(),
            "latencies": [round(latency, 4) for latency in latencies],
            "refused": core.binding.refusals.counts,
        }
        print(json.dumps(report), flush=True)
    print(json.dumps({"wrong": core.wrong_verdicts()[:5], "jobs": len(core.layout.jobs)}), flush=True)
    core.streams.stop()
    core.correlator.stop()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


if __name__ == "__main__":
    main()
