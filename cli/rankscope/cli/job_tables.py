"""Jobs, ranks and verdicts as tables and sentences, from the services' messages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from rich.table import Table
from rich.text import Text

from rankscope.analysis.verdicts.verdict import DEVICE, HOST, Confidence, Kind, Severity, Verdict, ranks
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.v1 import window_pb2

STARVED_SHOWN = 0.05
_LATE = {False: "its host is late", True: "its input is late"}
MARKS = {Severity.NONE: "·", Severity.WARNING: "!", Severity.ALARM: "✗"}


def rank_table(windows: Sequence[window_pb2.RankWindow], culprits: Sequence[int], *, stacks: bool) -> Table:
    """`stacks` adds the location of each rank, for a wide live table."""
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
    return [
        str(window.identity.pid),
        milliseconds(window.step_seconds.p50) if window.HasField("step_seconds") else "–",
        milliseconds(window.self_seconds.mean) if window.HasField("self_seconds") else "–",
        milliseconds(window.wait_seconds.mean) if window.HasField("wait_seconds") else "–",
        milliseconds(window.input_seconds) if window.HasField("input_seconds") else "–",
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
    """How far the host is ahead of the device: near zero means that the device waits for its host."""
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


# Verdicts as sentences.


def headline(verdict: Verdict) -> str:
    """`rank 2 is slow because of model.py:88 (normalize_features, forward)`"""
    who = verdict.group or (ranks(verdict.culprits) if verdict.culprits else "")
    plural = "are" if len(verdict.culprits) > 1 and not verdict.group else "is"
    what = verdict.kind.headline.format(who=who, are=plural, stage=verdict.stage, reason=verdict.reason)
    if verdict.kind is Kind.HANG and who:
        what += f": {who} never entered the collective"
    if verdict.kind in (Kind.SLOW_RANK, Kind.HANG) and verdict.culprits:
        what += because(verdict)
    if verdict.kind.is_finding and verdict.confidence is Confidence.LOW:
        what += " (low confidence)"
    return what


def because(verdict: Verdict) -> str:
    cause = verdict.cause
    place = source_line(cause.frames[0]) if cause.frames else ""
    if cause.phase == "starved":
        return " because it is starved of CPU"
    if cause.phase == "throttled":
        return f" because its GPU is throttled ({cause.evidence})"
    if cause.bound == DEVICE:
        return f" because its GPU is slow ({cause.evidence})"
    if place:
        phase = f", {cause.phase}" if cause.phase not in ("unknown", "other") else ""
        who = _LATE[cause.phase == "input"] + ", at " if cause.bound == HOST else "of "
        return f" because {who}{place} ({cause.frames[0].function}{phase})"
    if cause.bound == HOST:
        where = f" in its {cause.phase} phase" if cause.phase not in ("unknown", "input") else ""
        return f" because {_LATE[cause.phase == 'input']}{where}"
    return f" in its {cause.phase} phase" if cause.phase != "unknown" else ""


def source_line(frame: FrameSeen) -> str:
    return f"{PurePath(frame.file).name}:{frame.line}"


def loss(verdict: Verdict) -> str:
    """`costs 41 % of the job, 0.02 GPU-hours so far`; empty if nothing is lost."""
    if verdict.impact_ratio is None or not verdict.kind.is_finding:
        return ""
    lost = f", {verdict.lost_gpu_seconds / 3600:.3f} GPU-hours so far" if verdict.lost_gpu_seconds else ""
    return f"costs {verdict.impact_ratio:.0%} of the job{lost}"
