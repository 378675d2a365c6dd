"""`rankscope report fleet` on a made-up fleet in a real Prometheus, and what it must find there."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.alerts.prometheus_running import Prometheus, running_prometheus
from tools.fleet_week import HOUR, LOW_TEAMS, SWEEP, Fleet, Scale, gpu_name, node_name, write_blocks

_COMMAND = (sys.executable, "-c", "from rankscope.cli.main import main; import sys; sys.exit(main())")


@dataclass(frozen=True)
class Reported:
    status: int
    output: str
    errors: str
    seconds: float
    megabytes: float  # of memory, the most

    @property
    def document(self) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self.output)
        return document


def report(url: str, *options: str) -> Reported:
    return ran("report", "fleet", "--prometheus", url, *options)


def ran(*words: str) -> Reported:
    """A command. Its memory is the kernel's count for the process."""
    began = time.monotonic()
    with subprocess.Popen(
        [*_COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        most = Path(f"/proc/{process.pid}/status")
        kilobytes = 0
        while process.poll() is None:
            try:
                lines = [line for line in most.read_text().splitlines() if line.startswith("VmHWM:")]
                kilobytes = int(lines[0].split()[1]) if lines else kilobytes
            except OSError:
                break
            try:
                output, errors = process.communicate(timeout=0.1)
            except subprocess.TimeoutExpired:
                continue
        output, errors = process.communicate()
    return Reported(process.returncode, output, errors, time.monotonic() - began, kilobytes / 1024)


@contextmanager
def fleet_in_prometheus(folder: Path, scale: Scale) -> Iterator[tuple[Fleet, Prometheus]]:
    fleet = Fleet(scale, int(time.time()) // 600 * 600)
    write_blocks(fleet, folder)
    with running_prometheus(folder, {}) as prometheus:
        yield fleet, prometheus


def check(fleet: Fleet, found: dict[str, Any]) -> None:
    """The report finds what is planted in the fleet, and nothing else."""
    assert found["complete"] and not found["problems"]
    scale = fleet.scale
    assert found["runs"] == len(fleet.runs)
    # A series without a marker of its end stays for five minutes after its last scrape.
    used = sum(run.gpu_hours for run in fleet.runs)
    ends = sum(len(run.gpus) for run in fleet.runs) * 300 / HOUR
    assert found["used_gpu_hours"] == pytest.approx(used + ends / 2, abs=ends)
    hours = {row["name"]: row["used_gpu_hours"] for row in found["by_run"]}
    for name in ("science/pair-0", "science/pair-1"):
        truth = next(run.gpu_hours for run in fleet.runs if f"{run.team}/{run.name}" == name)
        assert hours[name] == pytest.approx(truth, abs=0.2), "a GPU counts once, however many runs share it"
    lost = {loss["verdict"]: loss["lost_gpu_hours"] for loss in found["verdicts"]}
    for kind, cost in lost.items():
        truth = sum(run.lost_gpu_seconds(kind, fleet.end) for run in fleet.runs) / HOUR
        assert cost == pytest.approx(truth, rel=0.05, abs=2.0), kind
    assert {one["node"] for one in found["hardware"]} == {node_name(node) for node in scale.bad_nodes}
    gpus = {one["node"]: one["gpu"] for one in found["hardware"]}
    assert gpus[node_name(scale.bad_nodes[0])] == gpu_name(scale.bad_nodes[0], 3)
    assert all(evidence["bound"] == "device" for one in found["hardware"] for evidence in one["evidence"])
    low = {f"{run.team}/{run.name}" for run in fleet.runs if run.team in LOW_TEAMS}
    assert {one["name"] for one in found["low_teams"]} == set(LOW_TEAMS)
    assert {one["name"] for one in found["low_runs"]} == low
    (group,) = found["packing"]
    team, user, image, command = SWEEP
    assert (group["team"], group["user"], group["image"], group["command"]) == (team, user, image, command)
    assert group["runs"] == scale.sweep_runs
    assert {option["way"] for option in group["options"]} == {"MPS", "fuse", "MIG", "smaller GPU"}
