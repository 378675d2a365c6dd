"""Tables of ranks, from the services' messages."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType

from rich.cells import cell_len
from rich.table import Table
from rich.text import Text

from rankscope.analysis.profiles.frames import is_library
from rankscope.analysis.step_graph.step_breakdown import EXCESS
from rankscope.analysis.verdicts.verdict import Severity, milliseconds, ranks
from rankscope.cli.terminal import make_table
from rankscope.common.text import one_line
from rankscope.operator.console.answers import BreakdownAnswer, cpu_ratio, measured
from rankscope.operator.correlation.columns import range_seconds
from rankscope.v1.job_service_pb2 import JobStatus
from rankscope.v1.window_pb2 import RankWindow

STARVED_SHOWN = 0.05
NODE_CHARACTERS = 24
CELL_CHARACTERS = 60
MIN_PART_RATIO = 0.005
MARKS = {Severity.NONE: "·", Severity.WARNING: "!", Severity.ALARM: "✗"}


def rank_table(
    windows: Sequence[RankWindow],
    culprits: Collection[int],
    *,
    stacks: bool,
    nodes: bool = False,
    columns: int | None = None,
    stale_seconds: Mapping[int, float] = MappingProxyType({}),
) -> Table:
    """`stacks` adds the location of each rank, `nodes` its machine. `stale_seconds` is the age of windows that are too
    old, by rank. What does not fit into `columns` is left out, the least important first: a number that is cut is
    wrong."""
    optional = {
        "node": nodes,
        "ahead": any("run_ahead_seconds" in window.figures for window in windows),
        "GPU": any(window.HasField("gpu") for window in windows),
        "tensor": any(window.HasField("gpu") for window in windows),
        "longest range": any(window.ranges for window in windows),
        "phase": stacks,
        "hottest own line": stacks,
    }
    cells = {
        name: [one_line(cell(window), CELL_CHARACTERS) for window in windows]
        for name, cell in _CELLS.items()
        if optional.get(name, True)
    }
    if stale_seconds:
        ages = [stale_seconds.get(window.identity.rank) for window in windows]
        cells["age"] = ["" if age is None else f"{age:.0f} s" for age in ages]
    if columns is not None:
        for name in _LEAST_IMPORTANT:
            if _width(cells) <= columns:
                break
            cells.pop(name, None)
    table = make_table(cells, _WORDS)
    for window, row in zip(windows, zip(*cells.values(), strict=True), strict=True):
        culprit = window.identity.rank in culprits
        mark = Text(row[0], style="bold red" if culprit else "")
        style = "dim" if window.identity.rank in stale_seconds else "red" if culprit else ""
        table.add_row(mark, *row[1:], style=style)
    return table


def breakdown_table(breakdown: BreakdownAnswer, columns: int | None = None) -> Table:
    """Where a step goes. The parts add up to the step; the smallest are one row. What groups transfer is left out if it
    does not fit into `columns`."""
    total = breakdown.step_seconds
    listed = [part for part in breakdown.parts if part.ratio >= MIN_PART_RATIO]
    lines = [(part.text, part.seconds, part.details, "red" if part.part == EXCESS else "") for part in listed]
    if len(listed) < len(breakdown.parts):
        lines.append(("other", total - sum(part.seconds for part in listed), "", ""))
    lines.append(("step", total, "", "bold"))
    cells = {
        "where a step goes": [name for name, *_ in lines],
        "time": [milliseconds(seconds) for _, seconds, *_ in lines],
        "share": [f"{seconds / total:.0%}" if total > 0 else "" for _, seconds, *_ in lines],
        "groups": [one_line(details, CELL_CHARACTERS) for *_, details, _ in lines],
    }
    if columns is not None and _width(cells) > columns:
        del cells["groups"]
    table = make_table(cells, ("where a step goes", "groups"))
    for (*_, style), texts in zip(lines, zip(*cells.values(), strict=True), strict=True):
        table.add_row(*texts, style=style)
    return table


def _width(cells: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(cell_len, (name, *texts))) + 2 for name, texts in cells.items()) - 2


def stale_nodes(job: JobStatus) -> list[str]:
    """A sentence for each node whose daemon has been silent for too long."""
    by_node: defaultdict[str, list[int]] = defaultdict(list)
    for window in job.ranks:
        if window.identity.rank in job.stale_seconds:
            by_node[window.identity.node].append(window.identity.rank)
    return [
        f"nothing from node {one_line(node, NODE_CHARACTERS * 4)} for "
        f"{max(job.stale_seconds[rank] for rank in numbers):.0f} s: the figures of {ranks(numbers)} are old"
        for node, numbers in sorted(by_node.items())
    ]


def _node(window: RankWindow) -> str:
    """The end of the name: that is where the names of a cluster differ."""
    name = window.identity.node or "–"
    return name if len(name) <= NODE_CHARACTERS else f"…{name[1 - NODE_CHARACTERS :]}"


def _gpu(window: RankWindow) -> str:
    gpu = window.gpu
    if gpu.gpus > 1:
        return f"{gpu.gpus} GPUs"
    busy = f"{gpu.utilization_ratio:.0%}" if gpu.HasField("utilization_ratio") else "–"
    return f"{busy} shared" if gpu.shared else busy


def _tensor(window: RankWindow) -> str:
    gpu = window.gpu
    return f"{gpu.tensor_active_ratio:.0%}" if gpu.gpus <= 1 and gpu.HasField("tensor_active_ratio") else "–"


def _time(name: str) -> Callable[[RankWindow], str]:
    return lambda window: "–" if (seconds := measured(window, name)) is None else milliseconds(seconds)


def _mfu(window: RankWindow) -> str:
    ratio = measured(window, "mfu_ratio")
    return "–" if ratio is None else f"{ratio:.0%}"


def _cpu(window: RankWindow) -> str:
    ratio = cpu_ratio(window)
    if ratio is None:
        return "–"
    throttled_nanos = window.process.throttled_seconds * 1e9
    is_starved = throttled_nanos > STARVED_SHOWN * (window.end_unix_nanos - window.start_unix_nanos)
    return f"{ratio:.0%}{' starved' if is_starved else ''}"


def _phase(window: RankWindow) -> str:
    if window.HasField("stall"):
        return f"stands still {window.stall.seconds_since_step:.0f} s"
    shares = window.stacks.phase_shares
    if not shares:
        return "–"
    phase = max(shares, key=lambda name: shares[name])
    return f"{phase} {shares[phase]:.0%}"


def _range(window: RankWindow) -> str:
    found = range_seconds(window)
    if not found:
        return "–"
    name = max(found, key=lambda name: found[name])
    return f"{name} {milliseconds(found[name])}"


def _hottest(window: RankWindow) -> str:
    own = [frame for frame in window.stacks.frames if not is_library(frame.file) and frame.own_share > 0]
    if not own:
        return "–"
    frame = max(own, key=lambda f: f.own_share)
    return f"{frame.file.rpartition('/')[2]}:{frame.line} {frame.function}"


# In the order of the table.
_CELLS: dict[str, Callable[[RankWindow], str]] = {
    "rank": lambda window: str(window.identity.rank),
    "node": _node,
    "pid": lambda window: str(window.identity.pid),
    "step": _time("step_seconds"),
    "self": _time("self_seconds"),
    "wait": _time("wait_seconds"),
    "input": _time("input_seconds"),
    "ahead": _time("run_ahead_seconds"),  # of the host over the device: near zero, the device waits for its host
    "MFU": _mfu,
    "CPU": _cpu,
    "GPU": _gpu,
    "tensor": _tensor,
    "longest range": _range,
    "phase": _phase,
    "hottest own line": _hottest,
}
_WORDS = ("node", "longest range", "phase", "hottest own line")
_LEAST_IMPORTANT = (
    "hottest own line",
    "phase",
    "longest range",
    "pid",
    "tensor",
    "ahead",
    "input",
    "GPU",
    "CPU",
    "MFU",
    "node",
    "wait",
)
