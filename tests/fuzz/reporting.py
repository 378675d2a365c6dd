"""What a run prints: a line now and then, and a table at the end. `python -m tests.fuzz.reporting FIGURES.json` prints
the table of a run again."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_HEADS = ("target", "seconds", "executions", "per second", "places", "corpus", "slowest CPU s", "grown MiB", "findings")


def print_progress(told: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    parts = [
        f"{name} {one['executions']} ({one['executions'] / max(one['seconds'], 1):.0f}/s, {one['places']} places, "
        f"corpus {one['corpus']}" + (f", {len(one['findings'])} FOUND" if one["findings"] else "") + ")"
        for name, one in told
        if one
    ]
    print("; ".join(parts) or "starting", flush=True)


def print_table(rows: Mapping[str, Mapping[str, Any]], state: Path) -> None:
    lines = [_HEADS]
    for name, row in rows.items():
        if row["not_here"]:
            lines.append((name, f"not here: {row['not_here']}", *[""] * (len(_HEADS) - 2)))
            continue
        rate = row["executions"] / max(row["seconds"], 1)
        figures = (
            f"{row['seconds']:.0f}",
            str(row["executions"]),
            f"{rate:.0f}",
            str(row["places"]),
            str(row["corpus"]),
        )
        lines.append(
            (
                name,
                *figures,
                f"{row['slowest_cpu_seconds']:.3f}",
                f"{row['grown_mebibytes']:.0f}",
                str(len(row["findings"])),
            )
        )
    for line in lines:
        print("| " + " | ".join(line) + " |")
        if line is _HEADS:
            print("|---" * len(_HEADS) + "|")
    for name, row in rows.items():
        for found in row["findings"]:
            print(f"{name}: python -m tests.fuzz --target {name} --reproduce {state / name / 'findings' / found}")
    print(f"corpus, findings and figures: {state}")


if __name__ == "__main__":
    figures = json.loads(Path(sys.argv[1]).read_text())
    print(f"Python {figures['python']}, {figures['machine']}, {figures['jobs']} processes")
    print_table(figures["targets"], Path(sys.argv[1]).parent)
