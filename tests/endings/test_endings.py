"""The card of `rankscope run` on scripts like PyTorch's tutorials: each way to start, and each way to end."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.demo_job.environment import choose_port
from tests.integration.daemon_process import MAIN
from tools.jobs.launcher import SCRIPTS

pytestmark = pytest.mark.acceptance

SCRIPT = SCRIPTS / "tutorial.py"
KINDS = ("one", "ddp", "fsdp2", "spawn")
SECONDS = 30.0
PATIENCE_SECONDS = 300.0
HANG_SECONDS = 12.0
MEMORY_BYTES = 2 << 30


@dataclass(frozen=True)
class Ended:
    """A run that has ended, by its summary and its output."""

    status: int
    summary: dict[str, Any]
    output: str

    @property
    def job(self) -> dict[str, Any]:
        """The only job."""
        (job,) = self.summary["jobs"]
        return dict(job)

    @property
    def told(self) -> str:
        return self.output[-6000:]


def run(kind: str, fault: str, folder: Path, seconds: float = SECONDS, interrupt: bool = False) -> Ended:
    """Presses Ctrl-C once the run hangs, or has trained for some time."""
    words = [kind, fault, str(seconds), str(choose_port())]
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2") if kind in ("ddp", "fsdp2") else ()
    summary, log = folder / "summary.json", folder / "log"
    command = [*MAIN, "run", "--summary", str(summary), "--", sys.executable, *launcher, str(SCRIPT), *words]
    ours, theirs = pty.openpty()
    with log.open("w") as output, os.fdopen(ours, "wb", buffering=0) as keyboard:
        with os.fdopen(theirs, "rb") as terminal:
            running = subprocess.Popen(
                command,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdin=terminal,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=_take_terminal,
            )
        try:
            if interrupt:
                if fault == "hang":
                    _wait_for("the job hangs", log, running)
                time.sleep(HANG_SECONDS if fault == "hang" else SECONDS)
                keyboard.write(b"\x03")
            status = running.wait(PATIENCE_SECONDS)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
            running.wait()
    return Ended(status, json.loads(summary.read_text()), log.read_text())


def _take_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts background commands without it


def _wait_for(text: str, log: Path, running: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while text not in log.read_text():
        assert time.monotonic() < deadline and running.poll() is None, log.read_text()
        time.sleep(0.2)


def line_of(mark: str) -> int:
    lines = SCRIPT.read_text().splitlines()
    return 1 + next(number for number, line in enumerate(lines) if line.endswith(f"# {mark}"))


def last_rank(kind: str) -> int:
    return 0 if kind == "one" else 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_is_healthy(kind: str, tmp_path: Path) -> None:
    ended = run(kind, "healthy", tmp_path)
    job = ended.job
    assert ended.status == 0 and job["failure"] is None, ended.told
    assert job["world_size"] == last_rank(kind) + 1, ended.told
    assert (job["verdict"], job["severity"]) == ("healthy", "none"), ended.told


@pytest.mark.parametrize("kind", KINDS)
def test_a_short_run_names_nobody(kind: str, tmp_path: Path) -> None:
    job = run(kind, "healthy", tmp_path, seconds=10.0).job
    assert job["verdict"] in ("healthy", "insufficient_data") and job["failure"] is None


@pytest.mark.parametrize(("fault", "mark"), [("slow", "SLOW LINE"), ("loader", "SLOW LINE of the loader")])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_slow_rank_has_its_line(kind: str, fault: str, mark: str, tmp_path: Path) -> None:
    ended = run(kind, fault, tmp_path, seconds=1.5 * SECONDS)
    job = ended.job
    assert (job["verdict"], job["culprits"]) == ("slow_rank", [1]), ended.told
    assert job["frames"] and (job["frames"][0]["line"]) == line_of(mark), ended.told


def test_the_slow_input_of_one_process_is_the_verdict(tmp_path: Path) -> None:
    ended = run("one", "loader", tmp_path)
    assert ended.job["verdict"] == "input_bound", ended.told


@pytest.mark.parametrize(("fault", "mark"), [("raise", "FAILING LINE"), ("worker", "FAILING LINE of the worker")])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exception_is_named_with_its_line(kind: str, fault: str, mark: str, tmp_path: Path) -> None:
    ended = run(kind, fault, tmp_path)
    job = ended.job
    assert ended.status == 1 and job["verdict"] == "failed", ended.told
    assert job["failure"]["rank"] == last_rank(kind), ended.told
    assert job["failure"]["exception"].startswith("ValueError: "), ended.told
    assert job["failure"]["frame"]["line"] == line_of(mark), ended.told
    assert all(finding["verdict"] != "slow_rank" for finding in job["findings"]), ended.told


@pytest.mark.parametrize(("fault", "signalled"), [("kill", "SIGKILL"), ("term", "SIGTERM"), ("segfault", "SIGSEGV")])
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_that_ends_a_rank_is_named(kind: str, fault: str, signalled: str, tmp_path: Path) -> None:
    ended = run(kind, fault, tmp_path)
    failure = ended.job["failure"]
    assert ended.job["verdict"] == "failed" and failure["rank"] == last_rank(kind), ended.told
    assert failure["exit_status"] == -signal.Signals[signalled] and signalled in failure["text"], ended.told


@contextlib.contextmanager
def limited_memory() -> Iterator[None]:
    """This process and its children in a cgroup with a limit."""
    root = Path("/sys/fs/cgroup")
    folder, limit = (root / "memory", "memory.limit_in_bytes") if (root / "memory").is_dir() else (root, "memory.max")
    group = folder / f"rankscope-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(MEMORY_BYTES))
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError as error:
        pytest.skip(f"no cgroup with a memory limit can be made here: {error}")
    try:
        yield
    finally:
        (folder / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_rank_that_runs_out_of_memory_is_named(kind: str, tmp_path: Path) -> None:
    with limited_memory():
        ended = run(kind, "memory", tmp_path)
    failure = ended.job["failure"]
    assert failure["rank"] == last_rank(kind) and "out of memory" in failure["text"], ended.told
    assert "2 GiB" in failure["text"], ended.told


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_hang_that_is_interrupted_stays_the_verdict(kind: str, tmp_path: Path) -> None:
    ended = run(kind, "hang", tmp_path, interrupt=True)
    job = ended.job
    assert ended.summary["interrupted"] and job["failure"] is None, ended.told
    assert (job["verdict"], job["culprits"]) == ("hang", [1]), ended.told
    assert job["frames"][0]["line"] == line_of("HANGING LINE"), ended.told


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupted_run_keeps_its_verdict(kind: str, tmp_path: Path) -> None:
    ended = run(kind, "healthy", tmp_path, seconds=PATIENCE_SECONDS, interrupt=True)
    assert ended.summary["interrupted"] and "interrupted by Ctrl-C" in ended.output, ended.told
    assert (ended.job["verdict"], ended.job["failure"]) == ("healthy", None), ended.told
