"""Dumps of real flight recorders: gloo processes that hang on purpose, read by the command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rankscope.cli.main import main

FAULTS = ("never entered", "size", "dtype", "operation")
# Importing torch takes longer than all the rest, so one process does it and forks the ranks.
JOB = """
import os, sys
import torch, torch.distributed as dist
import torch._inductor.codecache  # which the first dump of a process imports
from torch._C import _distributed_c10d as c10d

RANKS = range(3)

def train_step(count=4, dtype=torch.float32, **options):
    return dist.all_reduce(torch.ones(count, dtype=dtype), **options)

def save_checkpoint():
    dist.barrier()

def run(fault, rank):
    store = dist.FileStore(f"{fault}/store", len(RANKS))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=len(RANKS))
    for _ in range(3):
        train_step()
    pending = None
    if fault == "never entered":
        save_checkpoint()
        if rank != 1:
            pending = train_step(5, async_op=True)
    elif rank == 2:
        pass  # it stays away, so that the others wait
    elif fault == "size":
        pending = dist.gather(torch.ones(8 if rank else 4), dst=2, async_op=True)
    elif fault == "dtype":
        pending = train_step(dtype=torch.int32 if rank else torch.float32, async_op=True)
    elif fault == "operation":
        pending = dist.barrier(async_op=True) if rank else train_step(async_op=True)
    for name, dump in ("trace_rank_%d", c10d._dump_fr_trace), ("json_%d.json", c10d._dump_fr_trace_json):
        with open(f"{fault}/{name % rank}", "wb") as file:
            file.write(dump())
    store.set(f"dumped {rank}", "1")
    store.wait([f"dumped {each}" for each in RANKS])
    os._exit(0)

for fault in sys.argv[1:]:
    os.mkdir(fault)
    for rank in RANKS:
        if os.fork() == 0:
            run(fault, rank)
    assert all(os.wait()[1] == 0 for _ in RANKS), fault
"""


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for each fault."""
    pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("dumps")
    (folder / "job.py").write_text(JOB)
    environment = {**os.environ, "TORCH_FR_BUFFER_SIZE": "100", "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "job.py", *FAULTS], cwd=folder, env=environment, timeout=400, check=True)
    return folder


def analyze(capsys: pytest.CaptureFixture[str], *paths: object) -> dict[str, Any]:
    code = main(["analyze", "flight-recorder", *map(str, paths), "--json"])
    said = capsys.readouterr()
    assert (code, said.err) == (0, "")
    found: dict[str, Any] = json.loads(said.out)
    return found


def test_the_rank_that_never_entered_is_named_with_its_line(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = 1 + next(number for number, text in enumerate(JOB.splitlines()) if text == "    dist.barrier()")
    found = analyze(capsys, dumps / "never entered" / "trace_rank_*")
    assert (found["verdict"], found["culprits"], found["ranks"]) == ("hang", [1], [0, 1, 2])
    assert found["reason"] == (
        f"ranks 0,2 in all_reduce seq 5 of group 0 (default_pg), rank 1 last in save_checkpoint (job.py:{line})"
    )
    (stall,) = found["stalls"]
    (waiting,) = stall["waiting"]
    assert waiting["line"].startswith("train_step (job.py:") and waiting["shapes"] == "[5] Float"
    assert stall["never_entered"][0]["last_finished"]["operation"] == "barrier"


def test_the_json_variant_tells_the_same_without_lines(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyze(capsys, dumps / "never entered" / "json_*.json")
    assert (found["verdict"], found["culprits"]) == ("hang", [1])
    assert found["stalls"][0]["waiting"][0]["line"] is None


def test_the_missing_rank_is_named_without_the_dump_of_another(dumps: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = analyze(capsys, dumps / "never entered" / "trace_rank_1", dumps / "never entered" / "trace_rank_2")
    assert (found["verdict"], found["culprits"], found["no_dump"]) == ("hang", [1], [0])


@pytest.mark.parametrize(
    ("fault", "operations"),
    [("size", ["gather", "gather"]), ("dtype", ["all_reduce", "all_reduce"]), ("operation", ["all_reduce", "barrier"])],
)
def test_ranks_that_disagree_are_named(
    dumps: Path, fault: str, operations: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = analyze(capsys, dumps / fault / "trace_rank_*")
    (mismatch,) = found["mismatches"]
    assert (found["verdict"], mismatch["difference"], mismatch["sequence"]) == ("hang", fault, 4)
    assert sorted(at["operation"] for at in mismatch["positions"]) == operations
    assert [stall["never_entered"][0]["ranks"] for stall in found["stalls"]] == [[2]]
