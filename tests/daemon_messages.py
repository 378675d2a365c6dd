"""Windows on their way from a daemon to the rules, for tests: encoded by the daemon's code, read by the operator's."""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.fleets import response
from rankscope.analysis.verdicts.windows import JobWindow
from rankscope.operator.correlation.columns import Tick, job_windows
from rankscope.operator.correlation.daemon_windows import DaemonMessage, HeldWindow, RankSeen
from rankscope.v1.rank_service_pb2 import WatchRanksResponse
from rankscope.v1.window_pb2 import RankWindow


def sent(said: WatchRanksResponse, node: str = "a") -> DaemonMessage:
    """With the table of its windows, where it has any."""
    complete = WatchRanksResponse(departed=said.departed)
    if said.windows:
        complete.MergeFrom(response(said.node, said.windows))
    return DaemonMessage(node, complete.SerializeToString())


def hold(window: RankWindow) -> HeldWindow:
    message = sent(WatchRanksResponse(windows=[window]))
    times = message.start_unix_nanos, message.end_unix_nanos
    return HeldWindow(RankSeen(window.identity), message.windows[0], *times, message.figures(1)[0])


def job_window(windows: Sequence[RankWindow], world_size: int, departed: tuple[int, ...] = ()) -> JobWindow:
    """One tick of one job."""
    held = {window.identity.rank: hold(window) for window in windows}
    return job_windows({"": Tick(held, world_size, departed)})[""]
