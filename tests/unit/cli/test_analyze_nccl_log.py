from __future__ import annotations

import json
from pathlib import Path

import pytest

from rankscope.cli.main import main

FILES = Path(__file__).parents[2] / "data" / "nccl"


def test_facts_of_a_log_are_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "again.log").write_text((FILES / "sockets.log").read_text())
    assert main(["analyze", "nccl-log", str(FILES / "sockets.log"), str(tmp_path / "again.log")]) == 0
    out = capsys.readouterr().out
    assert "sockets.log and 1 more that say the same" in out
    assert "Socket (lo); not InfiniBand: NCCL_IB_DISABLE=1" in out and "4 ranks on 4 nodes" in out


def test_facts_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["analyze", "nccl-log", "--json", str(FILES / "collectives.log")]) == 0
    (facts,) = json.loads(capsys.readouterr().out)["files"]
    assert (facts["version"], facts["algorithms"]) == ("2.28.9", ["RING/LL", "RING/SIMPLE"])


def test_a_file_without_nccls_lines_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "job.log").write_text("step 1\n")
    assert main(["analyze", "nccl-log", str(tmp_path / "job.log")]) == 2
    assert main(["analyze", "nccl-log", str(tmp_path / "gone.log")]) == 2
    assert "NCCL_DEBUG=INFO" in capsys.readouterr().err
