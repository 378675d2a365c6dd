"""NCCL's debug file of a rank: found by its descriptor, read in parts, and never trusted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rankscope.analysis.verdicts.network import NcclFacts, NodeNetwork
from rankscope.daemon.network import nccl_debug
from rankscope.daemon.network.collector import NetworkCollector
from rankscope.daemon.network.nccl_debug import NcclDebugFile, name_pattern
from rankscope.daemon.samples import RankProcess, Span
from tests.unit.daemon.inspector_writer import PID, make_process

FILES = Path(__file__).parents[2] / "data" / "nccl"
LINE = b"trainer:1:2 [0] NCCL INFO Using network %s\n"


class Job:
    """A process whose descriptors are ours, with NCCL's file open as NCCL opens it."""

    def __init__(self, folder: Path, mode: str = "wb", **environment: str) -> None:
        self.path = folder / f"nccl.trainer.{PID}.log"
        self.file = self.path.open(mode, buffering=0)
        chosen = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": f"{folder}/nccl.%h.%p.log", **environment}
        self.debug = NcclDebugFile(make_process(folder / "proc", chosen), PID)

    def read_after(self, data: bytes) -> NcclFacts | None:
        self.file.write(data)
        return self.debug.read()


@contextmanager
def job(folder: Path, mode: str = "wb", **environment: str) -> Iterator[Job]:
    made = Job(folder, mode, **environment)
    try:
        yield made
    finally:
        made.file.close()


@pytest.mark.parametrize(
    ("template", "name", "is_it"),
    [
        ("/tmp/nccl.%h.%p.log", "nccl.gpu-17.42.log", True),
        ("/tmp/nccl.%h.%p.log", "nccl.gpu-17.43.log", False),
        ("debug", "debug", True),
        ("/logs/100%%.(x)+", "100%.(x)+", True),
        ("/logs/100%%.(x)+", "100%.xx", False),
    ],
)
def test_the_name_of_the_file(template: str, name: str, is_it: bool) -> None:
    pattern = name_pattern(template, 42)
    assert pattern is not None and (pattern.fullmatch(name) is not None) is is_it


def test_a_folder_is_no_name() -> None:
    assert name_pattern("/tmp/", 42) is None and name_pattern("", 42) is None


def test_facts_grow_with_the_file(tmp_path: Path) -> None:
    with job(tmp_path) as made:
        assert made.read_after(b"") is None
        assert made.read_after(LINE % b"IB" + b"trainer:1:2 [0] NCCL INFO NCCL ver") == NcclFacts(network="IB")
        assert made.read_after(b"sion 2.28.9+cuda13.0\n") == NcclFacts(network="IB", version="2.28.9")


def test_a_file_that_begins_again_is_read_again(tmp_path: Path) -> None:
    with job(tmp_path) as made:
        made.read_after(LINE % b"IB" * 3)
        os.truncate(made.path, 0)
        made.file.seek(0)
        assert made.read_after(LINE % b"Socket") == NcclFacts(network="Socket")


def test_the_middle_of_a_large_file_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nccl_debug, "MAX_READ_BYTES", 1 << 10)
    monkeypatch.setattr(nccl_debug, "MAX_BEHIND_BYTES", 8 << 10)
    with job(tmp_path) as made:
        made.file.write(b"trainer:1:2 [0] NCCL INFO NCCL version 2.28.9\n" + LINE % b"Middle" * 1000 + LINE % b"Last")
        facts = [made.debug.read() for _ in range(3)][-1]
    assert facts is not None and (facts.version, facts.network) == ("2.28.9", "Last")


@pytest.mark.parametrize(
    "environment", [{"NCCL_DEBUG": "nothing"}, {"NCCL_DEBUG_FILE": ""}, {"NCCL_DEBUG_FILE": "/x/"}]
)
def test_a_job_without_the_setting_is_not_searched(tmp_path: Path, environment: dict[str, str]) -> None:
    with job(tmp_path, **environment) as made:
        assert made.read_after(LINE % b"IB") is None


def test_a_file_that_is_only_read_is_not_nccls(tmp_path: Path) -> None:
    (tmp_path / f"nccl.trainer.{PID}.log").write_bytes(LINE % b"IB")
    with job(tmp_path, "rb") as made:
        assert made.debug.read() is None


def test_a_sparse_debug_file_is_read_within_bounds(tmp_path: Path) -> None:
    with job(tmp_path) as made:
        made.read_after(LINE % b"IB")
        os.truncate(made.path, 1 << 40)
        made.file.seek(0, os.SEEK_END)
        facts = [made.read_after(b"\n" + LINE % b"Socket") for _ in range(3)]
    assert facts[-1] == NcclFacts(network="Socket") and len(made.debug._rest) < nccl_debug.MAX_READ_BYTES


def test_a_fifo_in_place_of_the_file_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / f"nccl.trainer.{PID}.log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with job(tmp_path) as made:
            assert made.read_after(LINE % b"IB") is None
    finally:
        os.close(reader)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
def test_a_file_that_the_rank_may_not_read_stays_unread(tmp_path: Path) -> None:
    with job(tmp_path) as made:
        os.chown(made.path, 12345, 12345)
        made.path.chmod(0o600)
        assert made.read_after(LINE % b"IB") is None
        made.path.chmod(0o604)
        assert made.debug.read() == NcclFacts(network="IB")


def test_facts_of_a_real_process_are_in_its_window(tmp_path: Path) -> None:
    program = (
        "import sys\nfile = open(sys.argv[1], 'w')\nfile.write(open(sys.argv[2]).read())\nfile.flush()\n"
        "print()\nsys.stdin.read()"
    )
    environment = {**os.environ, "NCCL_DEBUG": "info", "NCCL_DEBUG_FILE": str(tmp_path / "nccl.%h.log")}
    command = [sys.executable, "-c", program, str(tmp_path / "nccl.trainer.log"), str(FILES / "sockets.log")]
    with subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        rank = RankProcess("train", 0, 0, 1, process.pid, 77, (process.pid,))
        collector = NetworkCollector(tmp_path / "sys")
        collector.collect([rank], Span(0, 1))
        collector.read()
        sample = collector.collect([rank], Span(0, 1))[rank.key]
        process.communicate("")
    assert isinstance(sample, NodeNetwork) and sample.nccl is not None
    assert (sample.nccl.network, sample.nccl.no_infiniband, sample.nccl.nodes) == ("Socket", "NCCL_IB_DISABLE=1", 4)
