"""The daemon never signals, stops or traces a training process, for any request."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rankscope.common.run_names import run_labels
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS, Serving, serving

PTRACE_SEIZE = 0x4206
# Blocked signals stay pending, so the test sees every signal that was sent. Threads inherit the mask.
JOB = """
import signal
signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
import torch
model = torch.nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
print("ready", flush=True)
while True:
    model(torch.ones(64, 64)).sum().backward()
    optimizer.step()
"""


@contextmanager
def traced_job(run: str) -> Iterator[int]:
    """Starts a rank that the test traces. A process has one tracer, so the daemon cannot attach, and the kernel reports
    every stop to the test."""
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    environment = {**os.environ, **place, "TORCHELASTIC_RUN_ID": run, "RANKSCOPE_PROBE": "1"}
    with subprocess.Popen([sys.executable, "-c", JOB], stdout=subprocess.PIPE, text=True, env=environment) as job:
        try:
            assert job.stdout is not None and job.stdout.readline() == "ready\n"
            seized = ctypes.CDLL(None, use_errno=True).ptrace(PTRACE_SEIZE, job.pid, None, None)
            assert seized == 0, os.strerror(ctypes.get_errno())
            yield job.pid
        finally:
            job.kill()


def signals_of(pid: int) -> dict[str, int]:
    """Pending ones by thread, and of the whole process."""
    found = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        for line in re.findall(r"^(?:SigPnd|ShdPnd):.*", (task / "status").read_text(), re.MULTILINE):
            name, _, mask = line.partition(":")
            found[f"{task.name} {name}"] = int(mask, 16)
    return found


def asked(daemon: Serving, *words: str) -> None:
    done = subprocess.run(
        [*MAIN, *words, "--connect", daemon.grpc_target],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{daemon.log}"


def test_a_watched_process_gets_no_signal_and_no_stop(tmp_path: Path) -> None:
    run = f"hands-off-{os.getpid()}"
    with traced_job(run) as pid, serving(tmp_path, "daemon") as daemon:
        who = {**run_labels(run), "rank": "0"}
        daemon.wait_until(lambda: sum(daemon.values("rankscope_rank_stack_samples_total", **who)) >= 10)
        daemon.wait_until(lambda: sum(daemon.values("rankscope_rank_steps_total", **who)) >= 10)
        asked(daemon, "stacks", "--run", run)
        asked(daemon, "capture", "--run", run, "--ranks", "0", "--steps", "2")
        stops = os.waitpid(pid, os.WNOHANG | os.WUNTRACED | os.WCONTINUED)
        assert stops == (0, 0), f"stopped or ended: {stops}"
        assert not any(signals_of(pid).values()), signals_of(pid)


def test_a_signal_or_a_stop_would_be_seen() -> None:
    with traced_job("hands-off") as pid:
        os.kill(pid, signal.SIGTERM)
        assert any(signals_of(pid).values())
        os.kill(pid, signal.SIGSTOP)
        assert os.waitpid(pid, os.WUNTRACED)[0] == pid
        second = f"import ctypes, sys; sys.exit(ctypes.CDLL(None).ptrace({PTRACE_SEIZE}, {pid}, None, None) != -1)"
        assert subprocess.run([sys.executable, "-c", second], check=False).returncode == 0
