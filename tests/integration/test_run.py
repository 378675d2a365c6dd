"""`rankscope run` as a user runs it: around torchrun, and around commands that end in every way."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.doc_commands import ROOT
from tests.integration.daemon_process import MAIN, PATIENCE_SECONDS
from tests.integration.small_job import SCRIPT, marked_line, slow_line
from tests.support.waiting import wait_until

RUN = (*MAIN, "run")


def shapes(text: str) -> set[str]:
    """Lines without what differs from run to run."""
    text = re.sub(r"\S+@\S+:", "JOB:", re.sub(r"\w+\.py:\d+", "LINE", text))
    return {re.sub(r"[\d.]+", "#", " ".join(line.split())) for line in text.splitlines()}


def test_a_torchrun_command_ends_with_the_slow_rank_and_advice(tmp_path: Path) -> None:
    end, summary, page = tmp_path / "STOP", tmp_path / "summary.json", tmp_path / "card.html"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT))
    with (tmp_path / "stdout").open("w") as stdout, (tmp_path / "stderr").open("w") as stderr:
        command = [*RUN, "--summary", str(summary), "--html", str(page)]
        command += ["--capture-when-slow", "--output", str(tmp_path / "traces"), "--", *torchrun]
        variables = {"JOB_FOLDER": str(tmp_path), "SLOW_RANK": "1"}
        running = subprocess.Popen(command, env=os.environ | variables, stdout=stdout, stderr=stderr)

    def told() -> str:
        return (tmp_path / "stderr").read_text()

    try:
        line = f"plain_ddp.py:{slow_line('one rank')} (slow_augmentation"
        wait_until(lambda: f"rank 1 is slow because of {line}" in told(), told)
        wait_until((tmp_path / "traces" / "summary.json").exists, told)
        end.touch()
        assert running.wait(PATIENCE_SECONDS) == 0, told()
    finally:
        end.touch()  # the job outlives what is killed here
        running.kill()
        running.wait()
    assert (tmp_path / "stdout").read_text() == "trained\n"
    assert told().splitlines()[-1].startswith(f"capture  {tmp_path}/traces: the recording ")
    captured = json.loads((tmp_path / "traces" / "summary.json").read_text())
    assert f"rank 1 is slow because of {line}" in captured["summary"]["verdict"]
    assert {rank["backend"] for rank in captured["ranks"]} == {"probe"}
    assert captured["summary"]["judgement"] in told()
    card = " ".join(told().split())
    shown = re.search(r"```text\n(job .*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    assert shown is not None and shapes(shown[1]) <= shapes(told()), told()
    assert f"verdict rank 1 is slow because of {line}" in card
    assert f"look at plain_ddp.py:{slow_line('one rank')}" in card
    assert "slow_augmentation" in page.read_text()
    written = json.loads(summary.read_text())
    (job,) = written["jobs"]
    assert (job["verdict"], job["culprits"], job["world_size"]) == ("slow_rank", [1], 2)
    assert written["exit_status"] == 0
    # A summary is a run for `rankscope compare`, step by step.
    assert job["steps"] / 2 < len(written["step_seconds"]) <= job["steps"]
    compared = subprocess.run(
        [*MAIN, "compare", str(summary), str(summary), "--json"], capture_output=True, text=True, check=False
    )
    assert compared.returncode == 0, compared.stderr


def test_a_failed_job_ends_with_the_rank_that_failed_first(tmp_path: Path) -> None:
    summary, page, log = tmp_path / "summary.json", tmp_path / "card.html", tmp_path / "log"
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(SCRIPT))
    command = [*RUN, "--summary", str(summary), "--html", str(page), "--", *torchrun]
    with log.open("w") as output:
        running = subprocess.Popen(
            command, env=os.environ | {"JOB_FOLDER": str(tmp_path)}, stdout=output, stderr=output
        )
    try:
        wait_until((tmp_path / "READY").exists, log.read_text)
        (tmp_path / "FAIL").touch()
        assert running.wait(PATIENCE_SECONDS) == 1, log.read_text()
    finally:
        running.kill()
        running.wait()
    card, line = " ".join(log.read_text().split()), marked_line("# FAILING LINE")
    failure = f"failed: rank 1 raised ValueError: bad sample, at plain_ddp.py:{line} (check_batch)"
    assert f"verdict {failure}" in card and f"try look at plain_ddp.py:{line}" in card
    assert "verdict healthy" not in card and "bad sample" in page.read_text()
    written = json.loads(summary.read_text())
    assert written["exit_status"] == 1 and not written["interrupted"]
    assert (written["failure"]["rank"], written["failure"]["frame"]["line"]) == (1, line)
    assert all(job["verdict"] == "failed" for job in written["jobs"])


@pytest.mark.parametrize(
    ("command", "status"),
    [
        (("sh", "-c", "cat; exit 3"), 3),
        (("sh", "-c", "cat; kill -KILL $$"), -signal.SIGKILL),
        (("sh", "-c", "cat; kill -SEGV $$"), -signal.SIGSEGV),
        (("/no/such/program",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_input_output_and_exit_status_are_those_of_the_command(command: tuple[str, ...], status: int) -> None:
    done = subprocess.run([*RUN, "--", *command], input="through\n", capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert done.stdout == ("through\n" if command[0] == "sh" else "")


def test_signals_are_forwarded_and_missing_ranks_are_explained(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    script = f'trap "echo terminated; exit 9" TERM; touch {ready}; while :; do sleep 0.1; done'
    running = subprocess.Popen(
        [*RUN, "--", "sh", "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    wait_until(ready.exists, lambda: "the command did not start")
    running.send_signal(signal.SIGTERM)
    stdout, stderr = running.communicate(timeout=PATIENCE_SECONDS)
    assert (running.returncode, stdout) == (9, "terminated\n")
    assert "no rank was seen" in stderr and "interrupted by SIGTERM" in stderr and "failed" not in stderr


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What precedes a command that finds runs of this test only, while other tests have runs of the same user. Runs of
    root are known by a folder in /run, whatever the environment says."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    if os.geteuid() != 0:
        return []
    (tmp_path / "rankscope").mkdir()
    mount = 'mkdir -p /run/rankscope && mount --bind "$0" /run/rankscope && exec "$@"'
    return ["unshare", "--mount", "sh", "-c", mount, str(tmp_path / "rankscope")]


def top(alone: list[str], *words: str) -> subprocess.CompletedProcess[str]:
    command = [*alone, *MAIN, "top", "--once", "--json", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)


def test_another_terminal_finds_the_run_with_its_own_ranks_only(tmp_path: Path, alone: list[str]) -> None:
    end = tmp_path / "STOP"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0"]
    variables = os.environ | {"JOB_FOLDER": str(tmp_path), "OMP_NUM_THREADS": "1"}

    def start(run_id: str) -> subprocess.Popen[str]:
        command = [*alone, *RUN, "--", "env", f"NAME={run_id}", *torchrun, "--rdzv-id", run_id, str(SCRIPT)]
        return subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)

    def runs(*words: str) -> list[str]:
        shown = top(alone, *words)
        return [entry["run"] for entry in json.loads(shown.stdout)["runs"]] if shown.returncode == 0 else []

    def await_run(target: str, run_id: str) -> None:
        wait_until(lambda: runs("--connect", target) == [run_id], lambda: str(top(alone, "--connect", target)))

    first, second = start("first"), None
    try:
        wait_until(lambda: runs() == ["first"], lambda: str(top(alone)))
        second = start("second")
        wait_until(lambda: "2 servers of yours run on this machine" in top(alone).stderr, lambda: str(top(alone)))
        listed = dict(re.findall(r"--connect (\S+) \(env NAME=(\w+)", top(alone).stderr))
        assert set(listed.values()) == {"first", "second"}
        for target, run_id in listed.items():
            await_run(target, run_id)
    finally:
        end.touch()
        for running in filter(None, (first, second)):
            running.communicate(timeout=PATIENCE_SECONDS)
    assert "no daemon at" in top(alone).stderr
    assert list(tmp_path.glob("rankscope/servers/*")) == []


TRAIN = """
import pathlib
import torch
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while not pathlib.Path("STOP").exists():
    model(torch.randn(512, 8)).sum().backward()
    optimizer.step()
"""


def test_a_python_script_without_a_launcher_is_one_rank(tmp_path: Path, alone: list[str]) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    variables = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [*alone, *RUN, "--summary", "summary.json", "--", sys.executable, "train.py"]
    running = subprocess.Popen(command, env=variables, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: re.search(r'"step_seconds":0\.', top(alone).stdout), lambda: str(top(alone)))
        (tmp_path / "STOP").touch()
        assert running.wait(PATIENCE_SECONDS) == 0
    finally:
        (tmp_path / "STOP").touch()
        card = running.communicate(timeout=PATIENCE_SECONDS)[1]
    assert re.search(r"job +\S+: 1 rank, [\d,]+ steps in", card), card
    (job,) = json.loads((tmp_path / "summary.json").read_text())["jobs"]
    assert job["world_size"] == 1 and job["steps"] > 0 and job["verdict"] in ("healthy", "insufficient_data")


def test_without_a_command_the_next_step_is_shown() -> None:
    done = subprocess.run(RUN, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "rankscope run -- torchrun" in done.stderr
