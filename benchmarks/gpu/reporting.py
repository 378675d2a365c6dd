"""Rows of measurements as Markdown and JSON, written after every part: a run that is cut short leaves what it had."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

MAX_ARCHIVE_BYTES = 15 << 20


@dataclass(frozen=True)
class Row:
    what: str
    measured: str
    target: str = ""
    met: bool | None = None


class Report:
    def __init__(self, title: str, folder: Path, name: str, budget_seconds: float, judged: bool = True) -> None:
        """`judged`: whether targets mean anything here."""
        self.title = title
        self._judged = judged
        self.folder = folder
        self.raw: dict[str, Any] = {"machine": machine(), "began_unix_seconds": time.time()}
        self._path = folder / f"{name}.json"
        self._rows: list[Row] = []
        self._ends_at = time.monotonic() + budget_seconds
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def seconds_left(self) -> float:
        return self._ends_at - time.monotonic()

    def add(self, what: str, measured: str, target: str = "", met: bool | None = None) -> None:
        met = met if self._judged else None
        self._rows.append(Row(what, measured, target, met))
        mark = {None: " ", True: "+", False: "!"}[met]
        print(f"  {mark} {what}: {measured}{f' (target {target})' if target else ''}", flush=True)

    def fail(self, what: str, why: str) -> None:
        self._rows.append(Row(what, why, "", False))
        print(f"  ! {what}: {why}", flush=True)

    def part(self, name: str, measure: Callable[[], None], needs_seconds: float = 0.0) -> None:
        """Whatever goes wrong in it is a row, and the next part gets its turn."""
        began = time.monotonic()
        print(f"## {name} ({self.seconds_left:.0f} s left)", flush=True)
        if self.seconds_left < needs_seconds:
            self.fail(name, f"left out: {self.seconds_left:.0f} s left, it takes about {needs_seconds:.0f}")
            return
        try:
            measure()
        except Exception as error:  # noqa: BLE001  the other parts have their turn, whatever it was
            self.raw.setdefault("failures", {})[name] = traceback.format_exc()
            self.fail(name, f"failed: {type(error).__name__}: {str(error)[-600:]}")
            traceback.print_exc(limit=-3, file=sys.stdout)
        self.raw.setdefault("seconds", {})[name] = round(time.monotonic() - began, 1)
        self.save()

    def save(self) -> None:
        self.raw["rows"] = [asdict(row) for row in self._rows]
        self._path.write_text(json.dumps(self.raw, indent=1, default=str))

    def markdown(self) -> str:
        lines = [f"### {self.title}", "", self.raw["machine"]["text"], "", "| what | measured | target | met |"]
        lines.append("|---|---|---|---|")
        for row in self._rows:
            met = {None: "", True: "yes", False: "NO"}[row.met]
            lines.append("| " + " | ".join(_cell(text) for text in (row.what, row.measured, row.target, met)) + " |")
        return "\n".join(lines)

    def finish(self) -> bool:
        """Print and keep the table; whether a target was missed."""
        self.save()
        text = self.markdown()
        self._path.with_suffix(".md").write_text(text + "\n")
        print(f"\n{text}\n", flush=True)
        return self.has_missed

    @property
    def has_missed(self) -> bool:
        return any(row.met is False for row in self._rows)


def machine() -> dict[str, Any]:
    said = output_of(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"])
    gpu = said.splitlines()[0] if said else None
    found = {
        "date": time.strftime("%-d %B %Y", time.gmtime()),
        "gpu": gpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "architecture": platform.machine(),
    }
    found["text"] = (
        f"{found['date']}, {gpu or 'no GPU'}, {found['cores']} {found['architecture']} cores, "
        f"Python {found['python']}, Linux {found['kernel']}"
    )
    return found


def output_of(command: list[str]) -> str | None:
    """None where the program is not there or fails."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def pack(folder: Path, target: Path, part: str) -> None:
    """Pack the results of a part into archives that are small enough to travel: results.tar.gz, results-2.tar.gz."""
    files = [path for path in (*folder.glob(f"{part}*"), *folder.glob(f"{part}/*")) if path.is_file()]
    number = size = 0
    with contextlib.ExitStack() as stack:
        archive: tarfile.TarFile | None = None
        for path in sorted(files):
            if archive is None or size + path.stat().st_size > MAX_ARCHIVE_BYTES:
                number, size = number + 1, 0
                name = "results.tar.gz" if number == 1 else f"results-{number}.tar.gz"
                archive = stack.enter_context(tarfile.open(target / name, "w:gz", compresslevel=3))
            archive.add(path, str(path.relative_to(folder)))
            size += path.stat().st_size
