"""The figures of a tick's windows as the table that an operator reads. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope.analysis.verdicts.window_columns import GROUP_FIGURES, GROUPS, pack
from rankscope.daemon.samples import Span
from rankscope.daemon.windows.window import measured, step_means
from rankscope.v1.rank_service_pb2 import WindowColumns
from rankscope.v1.window_pb2 import SOURCE_CAPTURE, RankWindow


def window_columns(windows: Sequence[RankWindow], span: Span) -> WindowColumns:
    names, values = pack([_row(window) for window in windows])
    return WindowColumns(
        start_unix_nanos=span.start_unix_nanos,
        end_unix_nanos=span.end_unix_nanos,
        ranks=[window.identity for window in windows],
        names=names,
        values=values,
    )


def _row(window: RankWindow) -> dict[str, float]:
    row = step_means(window) | measured(window, ("steps", "steps_total", "mfu_ratio"))
    if window.HasField("wait_seconds"):
        row["transfer_seconds"] = window.wait_seconds.p10
    if window.self_seconds.p10 > 0:
        row["self_spread_ratio"] = window.self_seconds.p90 / window.self_seconds.p10
    if window.HasField("last_step_unix_nanos"):
        row["last_step_unix_seconds"] = window.last_step_unix_nanos / 1e9
    is_captured = window.sources.get("steps") == SOURCE_CAPTURE
    row["is_captured"] = float(is_captured)
    steps = float(window.steps)
    if is_captured and window.step_seconds.mean > 0:
        # Not the steps of the window: the time queued for a CPU is distributed over as many as fit into it.
        steps = (window.end_unix_nanos - window.start_unix_nanos) / 1e9 / window.step_seconds.mean
    if window.process.HasField("starved_seconds") and steps > 0:
        row["starved_seconds"] = window.process.starved_seconds / steps
    for number, group in enumerate(window.groups[:GROUPS]):
        row |= {f"group{number}_{name}": float(getattr(group, name)) for name in GROUP_FIGURES}
    return row
