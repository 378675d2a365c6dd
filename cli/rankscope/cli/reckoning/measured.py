"""`rankscope mfu --memory-trace`: memory as a torch-profiler trace measured it, beside what `--memory` predicts."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from rankscope.analysis.memory_measured import MeasuredMemory, measure_memory

_SPLIT = ("before_trace_bytes", "forward_bytes", "backward_bytes", "optimizer_bytes")
_WORDS = ("held before the trace began", "allocated in forward", "in backward", "in the optimizer")


def add_measured_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory-trace",
        type=Path,
        metavar="TRACE",
        help="instead: peak, fragmentation and holders of memory in a trace made with profile_memory=True",
    )


def measure(path: Path, *, as_json: bool) -> int:
    from rankscope.cli.traces.files import load_traces

    loaded = load_traces([path])
    if not loaded.traces:
        broken = loaded.broken[0]
        return _refuse(f"{broken.path}: {broken.reason}")
    told = []
    for one in loaded.traces:
        found = measure_memory(one.trace)
        # The host's few bytes beside a device are no news.
        told += [(one.path, m) for m in found if m.on_device or not any(other.on_device for other in found)]
    if not told:
        return _refuse(f"{path}: no allocator events; profile with profile_memory=True")
    if as_json:
        print(json.dumps({"memory": [{"file": str(file), **asdict(memory)} for file, memory in told]}))
    else:
        for file, memory in told:
            _print(file, memory)
    return 0


def _print(path: Path, memory: MeasuredMemory) -> None:
    console = Console(highlight=False)
    where = f"GPU {memory.device}" if memory.on_device else "host memory"
    title = f"{path.name}, {where}: peak {_mib(memory.peak_allocated_bytes)} allocated"
    console.print(title, style="bold", markup=False)
    if memory.peak_reserved_bytes is not None and memory.fragmentation_ratio is not None:
        reserved = _mib(memory.peak_reserved_bytes)
        console.print(f"{reserved} reserved, {memory.fragmentation_ratio:.1%} of it not in use (fragmentation)")
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("at the peak", "size", "share", "blocks"):
        table.add_column(name, justify="left" if name == "at the peak" else "right", no_wrap=name != "at the peak")
    peak = max(memory.peak_allocated_bytes, 1)
    for words, name in zip(_WORDS, _SPLIT, strict=True):
        size = getattr(memory, name)
        table.add_row(words, _mib(size), f"{size / peak:.1%}", "")
    table.add_section()
    for holder in memory.holders:
        name = escape(holder.name) or "(no operation)"
        table.add_row(f"  {name}", _mib(holder.size_bytes), f"{holder.size_bytes / peak:.1%}", f"{holder.blocks:,}")
    console.print(table)


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / 2**20:,.1f} MiB"


def _refuse(reason: str) -> int:
    print(f"error: rankscope mfu: {reason}; next step: rankscope mfu --help", file=sys.stderr)
    return 2
