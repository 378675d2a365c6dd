"""Processes made to fill the daemon's places and its memory, beside a job that must not notice."""

from __future__ import annotations

import shutil
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.security.bystander import Bystander
from tests.security.rank_processes import NOBODY, RankProcesses, rank_processes, rank_variables
from tests.support.waiting import wait_until

FLOOD = """
number=0
while [ $number -lt $COUNT ]; do
    RANK=$number "$PROGRAM" 600 &
    number=$((number + 1))
done
wait
"""


@pytest.fixture
def processes(bystander: Bystander) -> Iterator[RankProcesses]:
    # In the node's folder, which other users can reach.
    with rank_processes(Path(tempfile.mkdtemp(dir=bystander.folder.parent))) as made:
        yield made


def page(bystander: Bystander) -> str:
    with urllib.request.urlopen(bystander.metrics_url, timeout=30) as answer:
        return str(answer.read().decode())


def ranks(bystander: Bystander) -> float:
    return float(page(bystander).partition("\nrankscope_daemon_ranks ")[2].partition("\n")[0])


def test_process_names_take_no_place_of_another_users_ranks(bystander: Bystander, processes: RankProcesses) -> None:
    count = 1100
    variables = rank_variables(
        0, 2 * count, address="!", LOCAL_RANK="0", COUNT=str(count), PROGRAM=str(processes.program)
    )
    with bystander.under_attack() as watch:
        with bystander.node():
            processes.start(variables, uid=NOBODY, command=["sh", "-c", FLOOD])
        wait_until(lambda: ranks(bystander) > count, lambda: bystander.log)
        watch.observe()
        assert f'rankscope_daemon_ranks_cut{{owner="uid {NOBODY}"}}' in page(bystander)
        assert f"ranks of uid {NOBODY} are not watched" in bystander.log


def test_environments_of_any_size_take_no_memory_of_the_daemon(bystander: Bystander, processes: RankProcesses) -> None:
    large = {f"RANKSCOPE_{number}": "x" for number in range(14_000)}
    with bystander.under_attack() as watch:
        with bystander.node():
            processes.start_many([large] * 200)
        watch.observe()


def test_impostors_and_processes_that_never_load_torch_change_nothing(
    bystander: Bystander, processes: RankProcesses
) -> None:
    job = Path(f"/proc/{bystander.ranks[0]}/environ").read_bytes().decode().split("\0")
    real = dict(variable.split("=", 1) for variable in job if variable.startswith(("MASTER", "TORCHELASTIC", "WORLD")))
    count = 1500
    with bystander.under_attack() as watch:
        with bystander.node():
            for rank in (0, 1):
                processes.start({**rank_variables(rank), **real})
            claims = {**rank_variables(0, 2 * count), "COUNT": str(count), "PROGRAM": str(shutil.which("sleep"))}
            processes.start(claims, uid=NOBODY, command=["sh", "-c", FLOOD])
        wait_until(lambda: "\nrankscope_daemon_rank_conflicts 2.0\n" in page(bystander), lambda: bystander.log)
        watch.observe()
    assert ranks(bystander) == 2
