"""`rankscope analyze recording`: the critical path of recorded steps, and the rank that holds the others up."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
from rich.text import Text

from rankscope.analysis.step_graph.path_windows import PathWindow, PathWindows, find_windows
from rankscope.analysis.step_graph.recording import RecordingError, read_recording
from rankscope.analysis.verdicts.critical_path import judge_path
from rankscope.analysis.verdicts.verdict import Verdict, headline
from rankscope.cli.messages import Exit, cannot_read, refuse, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.terminal import Terminal
from rankscope.common.text import printable

_EPILOG = """\
examples:
  rankscope analyze recording job.npz
  rankscope analyze recording job.npz --json | jq '.verdict, .culprits'

Ranks, stages and peers come from the operations; nothing has to be declared. The exit status is 0 whatever the verdict.
Format, method and JSON keys: docs/analyze-recording.md.
"""
# Ranks with the largest part of the path come first.
MAX_RANKS_SHOWN = 4
MAX_WINDOWS_SHOWN = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="a recording: a NumPy archive (.npz)")
    add_options(parser, "--json")


def run(arguments: argparse.Namespace) -> int:
    try:
        path = find_windows(read_recording(arguments.file))
    except RecordingError as error:
        return refuse(f"{arguments.file}: {error}; see docs/analyze-recording.md for the format")
    except OSError as error:
        return refuse(f"{arguments.file}: {cannot_read(error)}")
    except MemoryError:
        return refuse(f"{arguments.file}: does not fit into memory; record fewer steps")
    verdict = judge_path(path.windows)
    if arguments.json:
        to_stdout(json.dumps(_to_json(path, verdict), allow_nan=False))
        return Exit.OK
    _print(path, verdict, arguments.file)
    return Exit.OK


def _print(path: PathWindows, verdict: Verdict, file: Path) -> None:
    terminal = Terminal(soft_wrap=True)
    stages = len(set(path.stages))
    shape = f"{len(path.ranks)} ranks" + (f" in {stages} pipeline stages" if stages > 1 else "")
    steps = sum(len(window.steps) for window in path.windows)
    terminal.print(Text(f"{printable(str(file))}: {shape}, {path.operations:,} operations, {steps:,} whole steps"))
    if path.lonely:
        terminal.print(Text(f"{path.lonely:,} operations were recorded by one rank only; they are left out"))
    if path.windows:
        terminal.print()
        headings = ("steps", "step", "communication", "own work on the critical path", "would come back")
        rows = [headings, *(_row(path, window) for window in path.windows)]
        terminal.print_rows(rows, ("steps", "own work on the critical path", "would come back"), MAX_WINDOWS_SHOWN)
    terminal.print(Text.assemble("verdict  ", (headline(verdict), "bold")))
    if verdict.reason:
        terminal.print(Text(f"why      {verdict.reason}"))


def _row(path: PathWindows, window: PathWindow) -> tuple[str, ...]:
    order = np.argsort(-window.own, kind="stable")[:MAX_RANKS_SHOWN]
    own = ", ".join(f"rank {path.ranks[rank]} {window.own[rank]:.0%}" for rank in order.tolist())
    worst = int(window.returns.argmax())
    returns = f"{window.returns[worst]:.0%} with rank {path.ranks[worst]}" if window.returns[worst] >= 0.01 else "-"
    steps = f"{window.steps[0]:,}-{window.steps[-1]:,}"
    return steps, f"{1000 * window.step_seconds:.1f} ms", f"{window.communication:.0%}", own, returns


def _to_json(path: PathWindows, verdict: Verdict) -> dict[str, Any]:
    return {
        "verdict": verdict.kind.value,
        "culprits": list(verdict.culprits),
        "impact_ratio": verdict.impact_ratio,
        "reason": verdict.reason,
        "operations": path.operations,
        "unmatched_operations": path.lonely,
        "ranks": [{"rank": rank, "stage": stage} for rank, stage in zip(path.ranks, path.stages, strict=True)],
        "windows": [_window_to_json(window) for window in path.windows],
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
