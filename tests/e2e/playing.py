"""Plays `rankscope demo` as a user does, once per fault, and keeps what it printed."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RANKSCOPE = Path(sys.executable).parent / "rankscope"
PLAY_SECONDS = 600.0
STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Played:
    command: str
    status: int
    lines: tuple[str, ...]
    errors: str

    @property
    def report(self) -> dict[str, Any]:
        assert self.lines, self
        report = json.loads(self.lines[-1])
        assert isinstance(report, dict), self
        return report

    @property
    def ranks(self) -> list[dict[str, Any]]:
        ranks: list[dict[str, Any]] = self.report["ranks"]
        return ranks

    def __str__(self) -> str:
        """What a failed assertion has to show."""
        try:
            report = json.dumps(json.loads(self.lines[-1]), indent=1)
        except (IndexError, ValueError):
            report = "\n".join(self.lines)
        load = Path("/proc/loadavg").read_text().strip()
        return f"{self.command}\nexit status {self.status}, load {load}\n{report}\nstderr:\n{self.errors}"


@functools.cache
def play(fault: str, *flags: str) -> Played:
    """The same call is played once: several tests may look at one run from different sides."""
    command = [str(RANKSCOPE), "demo", "--fault", fault, "--json", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=PLAY_SECONDS)
    except subprocess.TimeoutExpired:
        process.terminate()  # not kill: it has ranks to end
        try:
            output, errors = process.communicate(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            output, errors = process.communicate()
        errors += f"\n(ended by the test after {PLAY_SECONDS:g} s)"
    return Played(" ".join(command), process.returncode, tuple(output.splitlines()), errors)
