"""`rankscope analyze recording`: the critical path of recorded steps, and what holds the ranks up."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from rich.text import Text

from rankscope.analysis.step_graph.path_windows import PathFinder, PathWindow
from rankscope.analysis.step_graph.recording import Recording, RecordingError, read_recording
from rankscope.analysis.step_graph.step_breakdown import StepBreakdown
from rankscope.analysis.verdicts.critical_path import judge_path, where_steps_go
from rankscope.analysis.verdicts.verdict import Verdict, headline
from rankscope.cli.job_tables import breakdown_table
from rankscope.cli.messages import Exit, cannot_read, refuse, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.terminal import Terminal
from rankscope.common.text import printable
from rankscope.operator.console.answers import breakdown_answer

_EPILOG = """\
examples:
  rankscope record -o job.npz
  rankscope analyze recording job.npz
  rankscope analyze recording job.npz --json | jq '.verdict, .culprits'

Ranks, stages and peers come from the operations; nothing has to be declared. The exit status is 0 whatever the verdict.
Format, method and JSON keys: docs/analyze-recording.md.
"""
# Ranks with the largest part of the path come first.
MAX_RANKS_SHOWN = 4
MAX_WINDOWS_SHOWN = 40
# Some operations at the ends of a recording are always alone.
UNUSUAL_SHARE = 0.005


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording: a NumPy archive (.npz)")
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    try:
        recording = read_recording(arguments.file)
        path = PathFinder()
        windows = list(path.find_all(recording.operations))
    except RecordingError as error:
        return refuse(f"{arguments.file}: {error}; see docs/analyze-recording.md for the format")
    except OSError as error:
        return refuse(f"{arguments.file}: {cannot_read(error)}")
    except MemoryError:
        return refuse(f"{arguments.file}: does not fit into memory; record fewer steps")
    verdict = judge_path(windows)
    judged = _Judged(recording, path, windows, verdict, where_steps_go(windows, verdict.culprits))
    if arguments.json:
        to_stdout(json.dumps(_to_json(judged), allow_nan=False))
        return Exit.OK
    _print(judged, arguments.file)
    return Exit.OK


class _Judged(NamedTuple):
    recording: Recording
    path: PathFinder
    windows: Sequence[PathWindow]
    verdict: Verdict
    breakdown: StepBreakdown | None


def _print(judged: _Judged, file: Path) -> None:
    terminal = Terminal(soft_wrap=True)
    operations, path, verdict = judged.recording.operations, judged.path, judged.verdict
    stages = len(set(path.stages.values()))
    shape = f"{len(operations.ranks)} ranks" + (f" in {stages} pipeline stages" if stages > 1 else "")
    steps = sum(len(window.steps) for window in judged.windows)
    terminal.print(Text(f"{printable(str(file))}: {shape}, {len(operations):,} operations, {steps:,} whole steps"))
    if path.lonely > UNUSUAL_SHARE * len(operations):
        terminal.print(Text(f"{path.lonely:,} operations were recorded by one rank only; they are left out"))
    if judged.windows:
        terminal.print()
        headings = ("steps", "step", "communication", "own work on the critical path", "would come back")
        rows = [headings, *(_row(window) for window in judged.windows)]
        terminal.print_rows(rows, ("steps", "own work on the critical path", "would come back"), MAX_WINDOWS_SHOWN)
    if (breakdown := breakdown_answer(judged.breakdown, verdict)) is not None:
        terminal.print(breakdown_table(breakdown), Text())
    terminal.print(Text.assemble("verdict  ", (headline(verdict), "bold")))
    if verdict.reason:
        terminal.print(Text(f"why      {verdict.reason}"))
    if judged.recording.live_verdict:
        terminal.print(Text(f"live     {printable(judged.recording.live_verdict)} (when the recording ended)"))


def _row(window: PathWindow) -> tuple[str, ...]:
    order = np.argsort(-window.own, kind="stable")[:MAX_RANKS_SHOWN]
    own = ", ".join(f"rank {window.ranks[rank]} {window.own[rank]:.0%}" for rank in order.tolist())
    worst = int(window.returns.argmax())
    returns = f"{window.returns[worst]:.0%} with rank {window.ranks[worst]}" if window.returns[worst] >= 0.01 else "-"
    steps = f"{window.steps[0]:,}-{window.steps[-1]:,}"
    return steps, f"{1000 * window.step_seconds:.1f} ms", f"{window.communication:.0%}", own, returns


def _to_json(judged: _Judged) -> dict[str, Any]:
    verdict = judged.verdict
    return {
        "verdict": verdict.kind.value,
        "culprits": list(verdict.culprits),
        "stage": verdict.stage,
        "group": verdict.group,
        "links": [list(ranks) for ranks in verdict.links],
        "impact_ratio": verdict.impact_ratio,
        "reason": verdict.reason,
        "live_verdict": judged.recording.live_verdict,
        "operations": len(judged.recording.operations),
        "unmatched_operations": judged.path.lonely,
        "ranks": [{"rank": rank, "stage": stage} for rank, stage in judged.path.stages.items()],
        "breakdown": msgspec.to_builtins(breakdown_answer(judged.breakdown, verdict)),
        "windows": [_window_to_json(window) for window in judged.windows],
    }


def _window_to_json(window: PathWindow) -> dict[str, Any]:
    by_rank = zip(window.ranks.tolist(), window.own.tolist(), window.returns.tolist(), strict=True)
    return {
        "first_step": int(window.steps[0]),
        "last_step": int(window.steps[-1]),
        "step_seconds": window.step_seconds,
        "communication": window.communication,
        "compared": window.compared,
        "ranks": [{"rank": rank, "own": share, "returns": back} for rank, share, back in by_rank],
    }
