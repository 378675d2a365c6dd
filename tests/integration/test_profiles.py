"""Profiles of a real job by a real daemon: one of four ranks sleeps in a function, and `rankscope flame` names it. That
needs a minute of its samples, so the job starts first, and the store is tested until there are enough."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from rankscope.analysis.profiles.pprof import read_pprof
from rankscope.daemon.profiles.database import SET_ASIDE
from tests.integration.daemon_process import MAIN, Serving, serving
from tests.integration.small_job import slow_line, small_ddp_job
from tests.integration.test_pprof_tool import top
from tests.support.waiting import wait_until

RUN = f"flame-{os.getpid()}"  # other jobs may run on this machine
SLOW_RANK = "1"
SAMPLES_NEEDED = 600  # twelve observations of 5 s at 10 Hz; they take longer on a busy machine
PATIENCE_SECONDS = 600.0
STORE = (sys.executable, "-m", "tests.integration.profile_writers")
# In a mount namespace of its own: the disk goes with the process.
ON_SMALL_DISK = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=2m none "$0" && exec "$@"')


@pytest.fixture(scope="module", autouse=True)
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """Once there are samples of all ranks."""
    folder = tmp_path_factory.mktemp("profiles")
    flags = ("--budget-ratio", "1", "--captures", "false", "--gpu", "false")
    job = small_ddp_job(RUN, 4, RANKSCOPE_RUN=RUN, SLOW_RANK=SLOW_RANK, SLOW_SECONDS="0.2")
    with job as training, serving(folder, "daemon", *flags) as daemon:
        daemon.wait_until(lambda: sum(map(bool, daemon.values("rankscope_rank_stack_samples_total", run=RUN))) == 4)
        yield daemon
    assert training.returncode == 0


def rankscope(daemon: Serving, *words: str) -> subprocess.CompletedProcess[str]:
    command = [*MAIN, words[0], "--connect", daemon.grpc_target, *words[1:]]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)


def lines(*command: str | Path) -> list[list[str]]:
    ran = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return [line.split() for line in ran.stdout.splitlines()]


@pytest.mark.acceptance
def test_a_killed_daemon_loses_at_most_the_last_interval(tmp_path: Path) -> None:
    rounds = lines(*STORE, "killed", tmp_path, "50")
    assert len(rounds) == 50
    first = rounds[0][1]
    for stored, found, of_first, problem in rounds:
        assert int(stored) <= int(found) <= int(stored) + 1
        assert (of_first, problem) == (first, "none")
    assert not (tmp_path / SET_ASIDE).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="to mount a disk needs root")
def test_a_full_disk_loses_profiles_and_reports_it_until_freed(tmp_path: Path) -> None:
    assert lines(*ON_SMALL_DISK, tmp_path, *STORE, "full_disk", tmp_path) == [
        ["0", "1", "none"],
        ["300", "1", "disk"],
        ["300", "2", "none"],
    ]


def test_the_exported_profile_has_what_the_windows_reported(watched: Serving, tmp_path: Path) -> None:
    def sampled() -> float:
        return sum(watched.values("rankscope_rank_stack_samples_total", run=RUN))

    before = sampled()
    told = rankscope(watched, "flame", "--run", RUN, "-o", str(tmp_path / "all.pb.gz"))
    assert told.returncode == 0, told.stderr
    profile = read_pprof((tmp_path / "all.pb.gz").read_bytes())
    assert f"of {profile.samples_total} total" in top(tmp_path / "all.pb.gz", "-sample_index=samples")
    assert f"{profile.samples_total} samples" in told.stderr
    assert sorted(set(profile.rank.tolist())) == [0, 1, 2, 3]
    assert before <= profile.samples_total
    # A recording is stored as soon as it ends, and reported with the window.
    watched.wait_until(lambda: profile.samples_total <= sampled())


def test_the_stacks_of_all_ranks_are_shown(watched: Serving) -> None:
    said: list[subprocess.CompletedProcess[str]] = []

    def is_told() -> bool:
        """A daemon that gets no CPU takes all processes for blocked ones for a while, and says so."""
        said.append(rankscope(watched, "stacks", "--run", RUN, "--json"))
        return said[-1].returncode == 0

    wait_until(is_told, lambda: said[-1])
    found = json.loads(said[-1].stdout)
    shown = [rank for group in found["groups"] for rank in group["ranks"]]
    assert sorted([*shown, *map(int, found["problems"])]) == [0, 1, 2, 3], found
    assert found["run"] == RUN and all("main (" in " ".join(group["stack"]) for group in found["groups"])


def test_no_samples_are_lost_and_stored_bytes_are_exported(watched: Serving) -> None:
    assert watched.value("rankscope_profile_samples_total", result="lost") == 0
    assert watched.values("rankscope_profile_store_bytes")
    assert "profiles cannot" not in watched.log


@pytest.mark.acceptance
def test_the_slow_function_comes_first_against_the_cohort(watched: Serving) -> None:
    command = ("flame", "--run", RUN, "--ranks", SLOW_RANK, "--against", "cohort")
    samples = partial(watched.values, "rankscope_rank_stack_samples_total", run=RUN, rank=SLOW_RANK)
    wait_until(lambda: sum(samples()) >= SAMPLES_NEEDED, samples, PATIENCE_SECONDS)
    said: list[subprocess.CompletedProcess[str]] = []

    def is_told() -> bool:
        said.append(rankscope(watched, *command))
        return "spends" in said[-1].stdout

    wait_until(is_told, lambda: said[-1], PATIENCE_SECONDS)
    told = said[-1]
    assert told.returncode == 0, told.stderr
    first, _, row, *_ = told.stdout.splitlines()
    place = f"slow_augmentation (plain_ddp.py:{slow_line('one rank')})"
    assert first.startswith(f"rank {SLOW_RANK} spends ") and f"`{place}`, its peers 0 %" in first
    assert row.endswith(place)
