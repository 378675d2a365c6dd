"""Jobs and ranks as rich tables, from the messages that the services send."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from rankscope.v1 import window_pb2

STARVED_SHOWN = 0.05


def rank_table(windows: Sequence[window_pb2.RankWindow], culprits: Sequence[int], *, stacks: bool) -> Table:
    """`stacks` adds where each rank was seen: right for a wide, live table."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    places = ("phase", "hottest own line") if stacks else ()
    devices = ("GPU", "tensor") if any(window.HasField("gpu") for window in windows) else ()
    ahead = ("ahead",) if any(window.HasField("run_ahead_seconds") for window in windows) else ()
    for name in ("rank", "pid", "step", "self", "wait", "input", *ahead, "MFU", "CPU", *devices, *places):
        table.add_column(name, justify="left" if name in places else "right", no_wrap=True)
    for window in windows:
        culprit = window.identity.rank in culprits
        mark = Text(f"{window.identity.rank}", style="bold red" if culprit else "")
        cells = [*_cells(window, bool(ahead)), *(_gpu(window) if devices else ()), *(_places(window) if stacks else ())]
        table.add_row(mark, *cells, style="red" if culprit else "")
    return table


def _cells(window: window_pb2.RankWindow, ahead: bool) -> list[str]:
    steps = window.steps if window.HasField("steps") else 0
    causes = window.causes
    return [
        str(window.identity.pid),
        milliseconds(window.step.p50_seconds) if window.HasField("step") else "–",
        milliseconds(causes.self / steps) if steps and causes.HasField("self") else "–",
        milliseconds(causes.wait / steps) if steps and causes.HasField("wait") else "–",
        milliseconds(causes.input / steps) if steps and causes.HasField("input") else "–",
        *([_ahead(window)] if ahead else []),
        f"{window.mfu_ratio:.0%}" if window.HasField("mfu_ratio") else "–",
        _cpu(window),
    ]


def _places(window: window_pb2.RankWindow) -> list[str]:
    return [_phase(window), _hottest(window)]


def _gpu(window: window_pb2.RankWindow) -> list[str]:
    gpu = window.gpu
    if gpu.gpus > 1:
        return [f"{gpu.gpus} GPUs", "–"]
    busy = f"{gpu.utilization_ratio:.0%}" if gpu.HasField("utilization_ratio") else "–"
    tensor = f"{gpu.tensor_active_ratio:.0%}" if gpu.HasField("tensor_active_ratio") else "–"
    return [f"{busy} shared" if gpu.shared else busy, tensor]


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"


def _ahead(window: window_pb2.RankWindow) -> str:
    """How far the host is ahead of the device: nothing to speak of means that the device waits for its host."""
    return milliseconds(window.run_ahead_seconds) if window.HasField("run_ahead_seconds") else "–"


def _cpu(window: window_pb2.RankWindow) -> str:
    seconds = (window.end_unix_nanos - window.start_unix_nanos) / 1e9
    process = window.process
    if not process.HasField("cpu_seconds") or seconds <= 0:
        return "–"
    throttled = process.throttled_seconds if process.HasField("throttled_seconds") else 0.0
    starved = " starved" if throttled / seconds > STARVED_SHOWN else ""
    return f"{process.cpu_seconds / seconds:.0%}{starved}"


def _phase(window: window_pb2.RankWindow) -> str:
    if window.HasField("stall"):
        return f"stands still {window.stall.seconds_since_step:.0f} s"
    shares = window.stacks.phase_shares
    if not shares:
        return "–"
    phase = max(shares, key=lambda name: shares[name])
    return f"{phase} {shares[phase]:.0%}"


def _hottest(window: window_pb2.RankWindow) -> str:
    own = [frame for frame in window.stacks.frames if "site-packages" not in frame.file and frame.leaf_share > 0]
    if not own:
        return "–"
    frame = max(own, key=lambda f: f.leaf_share)
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"
