"""What a node may throw at the daemon: each time there are words for it, the daemon lives, the training process is
untouched and the other ranks keep reporting. A second daemon on port and socket is in test_daemon.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from rankscope.cli.demo_job.faults import Fault
from rankscope.cli.demo_job.launcher import DemoJob
from rankscope.common.run_names import run_labels
from rankscope.common.text import printable_name
from rankscope.daemon.stacks.pyspy import find_py_spy
from rankscope.probe import ring_layout
from tests.integration.daemon_process import PATIENCE_SECONDS, Serving, run_of, serving

KEEPER = Path(__file__).parent / "jobs" / "ring_keeper.py"
# What a label, a log line and a terminal could stumble over.
EVIL_ADDRESS = 'e"v\\i}\n# HELP l\x1b[2J'
EVIL_JOB = printable_name(f"{EVIL_ADDRESS}:1", 128)


@pytest.fixture(scope="module")
def job() -> Iterator[DemoJob]:
    """Two real ranks of PyTorch with the probe, which must not notice anything of what goes on around them."""
    with DemoJob(2, Fault(), probe=True) as job:
        job.start()
        job.wait_until_training(timeout=180)
        yield job
        assert job.poll() == []


@pytest.fixture(scope="module")
def daemon(job: DemoJob, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with serving(tmp_path_factory.mktemp("daemon"), "daemon") as daemon:
        daemon.wait_until(lambda: all(daemon.steps(job.job_name, rank) > 0 for rank in range(2)))
        yield daemon


def claims(
    rank: str, world_size: int = 8, address: str = EVIL_ADDRESS, port: str = "1", run_id: str = "none"
) -> dict[str, str]:
    names = {"RANK": rank, "LOCAL_RANK": "0", "WORLD_SIZE": str(world_size)}
    return names | {"MASTER_ADDR": address, "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": run_id}


@contextmanager
def keeper(mode: str, claim: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that steps beside a ring of that kind; it must end well unless the test killed it."""
    with subprocess.Popen(
        [sys.executable, str(KEEPER), mode],
        env={**os.environ, **claim},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
            if process.poll() is None:
                process.communicate(timeout=PATIENCE_SECONDS)
                assert process.returncode == 0, f"{mode} ended with {process.returncode}"
        finally:
            process.kill()


def assert_the_others_go_on(daemon: Serving, job: DemoJob) -> None:
    """The real ranks train, and this daemon sees them train, step by step."""
    trained, seen = job.steps_done(), [daemon.steps(job.job_name, rank) for rank in range(2)]
    daemon.wait_until(lambda: all(now > then + 5 for now, then in zip(job.steps_done(), trained, strict=True)))
    daemon.wait_until(lambda: all(daemon.steps(job.job_name, rank) > seen[rank] + 5 for rank in range(2)))
    assert job.poll() == []
    assert daemon.is_healthy(), daemon.log
    assert set(daemon.values("rankscope_collector_success")) == {1.0}, daemon.log
    assert "a window was lost" not in daemon.log


def pids_under_py_spy(daemon: Serving) -> set[int]:
    """Whom the daemon's py-spy processes are reading at this moment."""
    children: list[str] = []
    for path in Path(f"/proc/{daemon.process.pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that served a scrape has ended
            children += path.read_text().split()
    read = set()
    for child in children:
        try:
            words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        # Before its exec the child is still setpriv, with py-spy's words behind its own.
        if words[0].endswith(b"py-spy"):
            read.add(int(words[words.index(b"--pid") + 1]))
    return read


def test_every_kind_of_bad_ring_is_named_and_contained(daemon: Serving, job: DemoJob) -> None:
    version = ring_layout.VERSION
    sizes = f"{ring_layout.HEADER_BYTES}, {ring_layout.RECORD_BYTES}, {ring_layout.CAPACITY}"
    expected = {
        "garbage": ("corrupt", "the ring begins with"),
        "future-version": ("version", f"ring version {version + 1} is newer than this daemon's {version}; upgrade"),
        "endless-counters": ("corrupt", f"the ring claims {2**60} records of {2**60} steps"),
        "enormous": ("corrupt", f"the ring's sizes are ({sizes}, {1 << 40}); version {version} has"),
        "shrinking": ("unsealed", "not sealed against resizing; it was not made by the probe; ignored"),
    }
    with ExitStack() as stack:
        honest = stack.enter_context(keeper("honest", claims("0")))
        bad = {mode: stack.enter_context(keeper(mode, claims(str(1 + n)))) for n, mode in enumerate(expected)}
        stack.enter_context(keeper("scribbling", claims("7")))
        daemon.wait_until(lambda: daemon.kinds(EVIL_JOB, 7, "steps"))  # whatever its noise looks like at the moment
        daemon.wait_until(
            lambda: all(kind in daemon.kinds(EVIL_JOB, 1 + n, "steps") for n, (kind, _) in enumerate(expected.values()))
        )
        daemon.wait_until(lambda: daemon.steps(EVIL_JOB, 0) > 10)
        assert daemon.kinds(EVIL_JOB, 0, "steps") == set()
        for n, (mode, (_, words)) in enumerate(expected.items()):
            daemon.wait_for_words(f"steps: rank {1 + n} (pid {bad[mode].pid}): ", words)
            assert daemon.steps(EVIL_JOB, 1 + n) == 0
        # The processes themselves are still measured: only their rings are not believed.
        daemon.wait_until(
            lambda: len(daemon.values("rankscope_rank_resident_bytes", **run_labels(EVIL_JOB))) == 2 + len(expected)
        )
        assert "\x1b" not in daemon.log
        resident_bytes = daemon.value("rankscope_daemon_resident_bytes")
        assert resident_bytes is not None
        assert resident_bytes < 400e6
        assert_the_others_go_on(daemon, job)
        assert honest.poll() is None
    daemon.wait_until(lambda: daemon.values("rankscope_rank_up", **run_labels(EVIL_JOB)) == [])


def test_a_rank_killed_while_recorded_disturbs_no_other_rank(daemon: Serving, job: DemoJob) -> None:
    where = {"address": "10.0.0.9", "port": "7", "run_id": "killed"}
    name = "killed"
    with keeper("honest", claims("0", 2, **where)), keeper("honest", claims("1", 2, **where)) as doomed:
        daemon.wait_until(lambda: doomed.pid in pids_under_py_spy(daemon))
        doomed.kill()
        daemon.wait_until(lambda: daemon.values("rankscope_rank_up", **run_labels(name)) == [1.0])
        daemon.wait_for_words(f"rank 1 of job '{name}' (pid {doomed.pid}) ended")
        steps, samples = (
            daemon.steps(name, 0),
            daemon.value("rankscope_rank_stack_samples_total", **run_labels(name)) or 0.0,
        )
        daemon.wait_until(lambda: daemon.steps(name, 0) > steps + 5)
        daemon.wait_until(
            lambda: (daemon.value("rankscope_rank_stack_samples_total", **run_labels(name)) or 0.0) > samples
        )
        daemon.wait_until(lambda: doomed.pid not in pids_under_py_spy(daemon))
        assert_the_others_go_on(daemon, job)


def test_a_ranks_older_claimant_is_watched_until_it_ends(daemon: Serving, job: DemoJob) -> None:
    def watched_pid(name: str, rank: int) -> int | None:
        infos = [labels for found, labels, _ in daemon.scrape() if found == "rankscope_rank_info"]
        pids = [int(labels["pid"]) for labels in infos if (run_of(labels), labels["rank"]) == (name, str(rank))]
        assert len(pids) <= 1
        return pids[0] if pids else None

    where = {"address": "10.0.0.9", "port": "8", "run_id": "twins"}
    name = "twins"
    with ExitStack() as stack:
        older = stack.enter_context(keeper("honest", claims("0", 1, **where)))
        daemon.wait_until(lambda: watched_pid(name, 0) == older.pid)
        younger = stack.enter_context(keeper("honest", claims("0", 1, **where)))
        # This one poses as a rank of the real job.
        assert job.port is not None
        real = {"address": "127.0.0.1", "port": str(job.port), "run_id": job.run_id}
        impostor = stack.enter_context(keeper("endless-counters", claims("1", 2, **real)))
        daemon.wait_until(lambda: (daemon.value("rankscope_daemon_rank_conflicts") or 0) >= 2)
        daemon.wait_for_words(
            f"rank 0 of job {name} is claimed by pid {older.pid} and pid {younger.pid}; "
            f"pid {younger.pid} came later and is not watched; give each launch its own MASTER_PORT or RANKSCOPE_RUN",
            f"pid {impostor.pid} came later and is not watched",
        )
        assert [watched_pid(job.job_name, rank) for rank in range(2)] == job.pids
        assert_the_others_go_on(daemon, job)
        older.kill()
        daemon.wait_until(lambda: watched_pid(name, 0) == younger.pid)


def test_ranks_that_are_no_numbers_are_named_and_not_watched(daemon: Serving, job: DemoJob) -> None:
    with keeper("honest", claims("banana")) as banana, keeper("honest", claims("8")) as beyond:
        daemon.wait_for_words(
            f"pid {banana.pid}: RANK='banana' is not a number from 0 to 7",
            f"pid {beyond.pid}: RANK='8' is not a number from 0 to 7",
        )
        daemon.wait_until(lambda: (daemon.value("rankscope_daemon_discovery_problems") or 0) >= 2)
        assert daemon.values("rankscope_rank_up", **run_labels(EVIL_JOB)) == []
        assert_the_others_go_on(daemon, job)


# py-spy itself, but as a user who may not read the ranks' memory; where the tests are not root and cannot become such a
# user, its words.
PY_SPY_AS_NOBODY = """#!/bin/sh
[ "$(id -u)" = 0 ] && exec setpriv --reuid=65534 --regid=65534 --clear-groups {py_spy} "$@"
echo "Permission Denied: Try running again with elevated permissions" >&2; exit 1
"""

# Everything is loaded before the change of user, who may not be let into this checkout.
DAEMON_AS_NOBODY = """
import ctypes, os, sys
import rankscope.cli.foreground, rankscope.cli.daemon, rankscope.daemon.loop, rankscope.daemon.discovery.ranks
import rankscope.daemon.process_collector, rankscope.daemon.stacks.collector, rankscope.daemon.steps.collector
from rankscope.cli.main import main
if os.getuid() == 0:
    os.setgroups([]), os.setgid(65534), os.setuid(65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # as after an exec: /proc/self is readable
sys.exit(main())
"""


@pytest.fixture
def open_folder() -> Iterator[Path]:
    """Unlike tmp_path, one that every user can enter."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def wait_for_kind(daemon: Serving, job: DemoJob, rank: int, kind: str) -> None:
    daemon.wait_until(lambda: daemon.kinds(job.job_name, rank, "stacks") == {kind})


def test_without_a_usable_py_spy_steps_continue_with_a_reason(job: DemoJob, tmp_path: Path, open_folder: Path) -> None:
    real = find_py_spy()
    assert real is not None
    powerless = open_folder / "py-spy-as-nobody"
    powerless.write_text(PY_SPY_AS_NOBODY.format(py_spy=shutil.copy(real, open_folder)))
    powerless.chmod(0o755)
    with (
        serving(tmp_path / "denied", "daemon", "--py-spy", str(powerless)) as denied,
        serving(tmp_path / "missing", "daemon", "--py-spy", "/nonexistent/py-spy") as missing,
    ):
        for rank, pid in enumerate(job.pids):
            wait_for_kind(denied, job, rank, "permission")
            denied.wait_for_words(
                f"stacks: rank {rank} (pid {pid}): py-spy could not read memory: EPERM; "
                "the daemon needs CAP_SYS_PTRACE (see docs/troubleshooting.md)"
            )
            wait_for_kind(missing, job, rank, "missing")
        missing.wait_for_words("no py-spy at /nonexistent/py-spy, so there are no stacks; pip install py-spy")
        for daemon in (denied, missing):
            assert_the_others_go_on(daemon, job)


def test_a_daemon_denied_other_users_processes_reports_it_and_continues(job: DemoJob, open_folder: Path) -> None:
    with serving(open_folder, "daemon", launcher=(sys.executable, "-c", DAEMON_AS_NOBODY)) as daemon:
        daemon.wait_until(lambda: daemon.value("rankscope_daemon_discovery_problems"))
        daemon.wait_for_words("of other users cannot be read; run as root or with CAP_SYS_PTRACE")
        if os.getuid() == 0:
            assert daemon.value("rankscope_daemon_ranks") == 0
        assert daemon.is_healthy(), daemon.log
        trained = job.steps_done()
        daemon.wait_until(lambda: min(job.steps_done()) > min(trained) + 5)
        assert job.poll() == []
