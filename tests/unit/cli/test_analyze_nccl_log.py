from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Command

FILES = Path(__file__).parents[2] / "data" / "nccl"


@pytest.fixture
def nccl_log(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "analyze", "nccl-log")


def test_facts_of_a_log_are_printed(nccl_log: Command, tmp_path: Path) -> None:
    (tmp_path / "again.log").write_text((FILES / "sockets.log").read_text())
    out = nccl_log.answer(FILES / "sockets.log", tmp_path / "again.log")
    assert "sockets.log and 1 more that say the same" in out
    assert "Socket (lo); not InfiniBand: NCCL_IB_DISABLE=1" in out and "4 ranks on 4 nodes" in out


def test_facts_as_json(nccl_log: Command) -> None:
    (facts,) = nccl_log.json(FILES / "collectives.log")["files"]
    assert (facts["version"], facts["algorithms"]) == ("2.28.9", ["RING/LL", "RING/SIMPLE"])


def test_a_file_without_nccls_lines_is_refused(nccl_log: Command, tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\n")
    status, _, err = nccl_log(tmp_path / "job.log")
    assert status == 2 and "NCCL_DEBUG=INFO" in err
    assert "No such file" in nccl_log.complaint(tmp_path / "gone.log")
