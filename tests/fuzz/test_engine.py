"""The engine itself: a fuzzer that finds nothing must be one that would have found something."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rankscope.daemon.captures.kineto import datagrams
from tests.fuzz import fuzzing, targets
from tests.fuzz.covering import Coverage, start_coverage
from tests.fuzz.fuzzing import Fuzzer
from tests.fuzz.targets import Target


def target(run: Any, seeds: Sequence[bytes] = (b"abcdefgh",), cpu_seconds: float = 1.0) -> Target:
    return Target("toy", run, list(seeds), lambda plain: plain, [], cpu_seconds, 4096)


def test_an_exception_is_found_told_where_and_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fuzzing, "MINIMIZE_SECONDS", 600.0)  # it is as short as it gets, however long that takes

    def run(data: bytes) -> None:
        if b"\xff" in data:
            raise KeyError("no")

    fuzzer = Fuzzer(target(run, [b"abcdefgh" * 20]), 1, None)
    fuzzer.plant([])
    fuzzer.fuzz(lambda tally: tally.executions < 2000)
    (found,) = fuzzer.tally.findings.values()
    assert found.kind == "KeyError" and found.place.startswith("run:") and found.data == b"\xff"


def test_coverage_leads_through_a_door_behind_a_door() -> None:
    """Each condition alone is one in hundreds; all at once nobody would meet by chance."""
    folder = Path(datagrams.__file__).parent
    source = """
def run(data):
    if data[:1] in (b"R", b"S", b"T", b"U"):
        if data[1:2] in (b"0", b"1", b"2", b"3"):
            if data[2:3] in (b"!", b"?", b".", b";"):
                raise ZeroDivisionError
"""
    names: dict[str, object] = {}
    exec(compile(source, str(folder / "doors.py"), "exec"), names)  # as code of ours, which is what is watched
    toy = target(names["run"], [b"abc"])

    def executions(coverage: Coverage | None) -> int | None:
        fuzzer = Fuzzer(toy, 7, coverage)
        fuzzer.plant([])
        fuzzer.fuzz(lambda tally: tally.executions < 20_000 and not tally.findings)
        return fuzzer.tally.executions if fuzzer.tally.findings else None

    coverage = start_coverage()
    try:
        assert executions(coverage) is not None
    finally:
        coverage.close()
    assert executions(None) is None


def test_a_slow_input_is_a_finding_and_fuzzing_continues() -> None:
    def run(data: bytes) -> None:
        ends_at = time.process_time() + (60.0 if data.startswith(b"slow") else 0.0)
        while time.process_time() < ends_at:
            pass

    fuzzer = Fuzzer(target(run, [b"slow", b"quick"], cpu_seconds=0.02), 1, None)
    assert (found := fuzzer.check(b"slow")) is not None and found.kind == "TooSlow"
    assert fuzzer.check(b"quick") is None


def test_the_same_seed_tries_the_same_inputs() -> None:
    def tried(seed: int) -> list[bytes]:
        seen: list[bytes] = []
        fuzzer = Fuzzer(target(seen.append), seed, None)
        fuzzer.plant([])
        fuzzer.fuzz(lambda tally: tally.executions < 300)
        return seen

    assert tried(1) == tried(1) != tried(2)


@pytest.mark.parametrize("name", targets.names())
def test_every_target_has_seeds_within_its_size_limit(name: str) -> None:
    loaded = targets.load(name)
    assert len(loaded.seeds) >= 1 and all(len(seed) <= loaded.size_limit for seed in loaded.seeds)


def test_the_command_fuzzes_its_targets_and_keeps_the_corpus(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.fuzz", "--target", "kubelet", "--seconds", "1", "--jobs", "1"]
    command += ["--state", str(tmp_path)]
    for expected in (1, 2):
        done = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=targets.HERE.parent.parent)
        assert done.returncode == 0, done.stdout + done.stderr
        row = next(line for line in done.stdout.splitlines() if line.startswith("| kubelet"))
        seconds, executions = (int(cell) for cell in row.split("|")[2:4])
        assert seconds >= expected and executions > 10
    assert list((tmp_path / "kubelet" / "corpus").iterdir())
