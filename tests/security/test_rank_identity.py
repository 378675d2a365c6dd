"""Nobody takes over, splits, joins or hides somebody else's ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from rankscope.daemon.discovery.ranks import RankDiscovery
from rankscope.daemon.samples import RankProcess
from tests.security.rank_processes import NOBODY, PORT, RankProcesses, rank_processes, rank_variables
from tests.support.processes import stat_fields
from tests.support.waiting import wait_until

JOB = f"10.9.8.7:{PORT}"
EVALUATION = """
import os, subprocess, sys
other = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "1"}
child = subprocess.Popen([sys.argv[1], "600"], env={**os.environ, **other})
print(child.pid, flush=True)
os.execv(sys.argv[1], [sys.argv[1], "600"])
"""


@pytest.fixture
def processes() -> Iterator[RankProcesses]:
    # Other users have to reach it, and pytest's own folders are closed to them.
    with tempfile.TemporaryDirectory() as folder, rank_processes(Path(folder)) as made:
        yield made


class Watch:
    """The ranks among some processes: other tests and jobs may run here."""

    def __init__(self) -> None:
        self.discovery = RankDiscovery(node_name="node")

    def of(self, *pids: int) -> dict[int, RankProcess]:
        return {rank.pid: rank for rank in self.discovery.scan().ranks if rank.pid in pids}

    def until(self, condition: Callable[[dict[int, RankProcess]], object], *pids: int) -> dict[int, RankProcess]:
        wait_until(lambda: condition(self.of(*pids)), lambda: self.of(*pids))
        return self.of(*pids)


def test_an_older_process_with_copied_variables_evicts_no_rank(processes: RankProcesses) -> None:
    variables = [f"{name}={value}" for name, value in rank_variables(0).items()]
    command = ["sh", "-c", 'read trigger; exec env "$@"', "sh", *variables, str(processes.program), "600"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, user=NOBODY, group=NOBODY) as older:
        try:
            assert older.stdin is not None
            victim = processes.start(rank_variables(0))
            watch = Watch()
            (before,) = watch.until(lambda found: victim in found, victim).values()
            older.stdin.close()
            found = watch.until(lambda found: older.pid in found, older.pid, victim)
        finally:
            older.kill()
    assert found[victim] == before
    assert found[victim].job == JOB
    assert found[older.pid].job == f"{JOB}@uid{NOBODY}"


def test_the_first_of_one_users_processes_is_the_rank(processes: RankProcesses) -> None:
    first = processes.start(rank_variables(0))
    watch = Watch()
    watch.until(lambda found: first in found, first)
    second = processes.start(rank_variables(0))
    wait_until(lambda: {first, second} <= {pid for c in watch.discovery.scan().conflicts for pid in _pids(c)})
    assert set(watch.of(first, second)) == {first}
    processes.end(first)
    (found,) = watch.until(lambda found: second in found, second).values()
    assert found.job == JOB


def test_two_users_with_one_address_have_two_jobs(processes: RankProcesses) -> None:
    watch = Watch()
    ours = processes.start(rank_variables(0))
    watch.until(lambda found: ours in found, ours)
    theirs = processes.start(rank_variables(1), uid=NOBODY)
    found = watch.until(lambda found: theirs in found, ours, theirs)
    assert {pid: rank.job for pid, rank in found.items()} == {ours: JOB, theirs: f"{JOB}@uid{NOBODY}"}


@pytest.mark.parametrize("namespace", ["--net", "--pid"])
def test_two_namespaces_with_torchruns_default_address_are_two_jobs(processes: RankProcesses, namespace: str) -> None:
    started = []
    for _ in range(2):
        script = f'"{processes.program}" 600 & RANK=1 LOCAL_RANK=1 "{processes.program}" 600 & wait'
        flags = (namespace, "--fork", "--kill-child") if namespace == "--pid" else (namespace,)
        started.append(
            processes.start(
                rank_variables(0, address="127.0.0.1", MASTER_PORT="29500"),
                namespaces=flags,
                command=["sh", "-c", script],
            )
        )
    watch = Watch()

    def ranks() -> list[list[RankProcess]]:
        all_ranks = watch.discovery.scan().ranks
        return [[rank for rank in all_ranks if _is_below(rank.pid, shell)] for shell in started]

    wait_until(lambda: [len(each) for each in ranks()] == [2, 2], ranks)
    first, second = ranks()
    assert [rank.rank for rank in first] == [rank.rank for rank in second] == [0, 1]
    assert len({rank.job for rank in first}) == len({rank.job for rank in second}) == 1
    assert first[0].job != second[0].job


def test_two_network_namespaces_with_a_real_address_are_one_job(processes: RankProcesses) -> None:
    pids = [processes.start(rank_variables(rank), namespaces=["--net"]) for rank in (0, 1)]
    found = Watch().until(lambda found: len(found) == 2, *pids)
    assert {rank.job for rank in found.values()} == {JOB}


def test_a_job_cannot_claim_a_name_derived_for_another(processes: RankProcesses) -> None:
    watch = Watch()
    local = processes.start(rank_variables(0, address="127.0.0.1"))
    ((_, named),) = watch.until(lambda found: local in found, local).items()
    squatter = processes.start(rank_variables(1, RANKSCOPE_RUN=named.job), uid=NOBODY)
    found = watch.until(lambda found: squatter in found, local, squatter)
    assert found[local].job == named.job
    assert found[squatter].job != named.job


def test_a_rank_stays_when_its_child_carries_other_rank_variables(processes: RankProcesses) -> None:
    watch = Watch()
    with subprocess.Popen(
        [sys.executable, "-c", EVALUATION, processes.program],
        env={**rank_variables(1), "PATH": os.environ["PATH"]},
        stdout=subprocess.PIPE,
        text=True,
    ) as rank:
        assert rank.stdout is not None
        child = int(rank.stdout.readline())
        try:
            found = watch.until(lambda found: {rank.pid, child} <= found.keys(), rank.pid, child)
        finally:
            os.kill(child, 9)
            rank.kill()
    assert (found[rank.pid].job, found[rank.pid].rank) == (JOB, 1)
    assert found[child].job == "10.9.8.7:1"


def test_the_uids_of_a_user_namespace_are_its_makers(processes: RankProcesses) -> None:
    script = f'read mapped; exec setpriv --reuid=7 --regid=7 --clear-groups "{processes.program}" 600'
    command = [
        "setpriv",
        f"--reuid={NOBODY}",
        f"--regid={NOBODY}",
        "--clear-groups",
        "unshare",
        "--user",
        "--keep-caps",
    ]
    with subprocess.Popen(
        [*command, "sh", "-c", script], env={**rank_variables(0), "PATH": os.environ["PATH"]}, stdin=subprocess.PIPE
    ) as other:
        try:
            own = Path("/proc/self/ns/user").readlink()
            wait_until(lambda: Path(f"/proc/{other.pid}/ns/user").readlink() != own)
            for name in ("uid_map", "gid_map"):
                Path(f"/proc/{other.pid}/{name}").write_text("0 100000 1000\n")
            assert other.stdin is not None
            other.stdin.close()
            found = Watch().until(lambda found: other.pid in found, other.pid)
            assert Path(f"/proc/{other.pid}").stat().st_uid == 100007
        finally:
            other.kill()
    assert found[other.pid].owner == f"uid {NOBODY}"


def _pids(conflict: object) -> tuple[int, int]:
    return conflict.kept_pid, conflict.ignored_pid  # type: ignore[attr-defined]


def _is_below(pid: int, ancestor: int) -> bool:
    while pid > 1 and pid != ancestor:
        try:
            pid = int(stat_fields(pid)[1])
        except OSError:
            return False
    return pid == ancestor
