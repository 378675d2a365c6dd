"""Two jobs of tests/hangs: one hangs in a worker of its data loader, one evaluates for long."""

from __future__ import annotations

from pathlib import Path

import pytest

from rankscope.analysis.collectives.flight_recorder.tail import match_tails
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from tests.hangs.hanging_job import SCRIPT, hanging_job

pytestmark = pytest.mark.acceptance


def test_a_hung_data_loader_is_named_by_its_workers_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with hanging_job("data loader", tmp_path) as job:
        verdict = job.wait_for_hang(places=2)
        report = job.wait_for_report()
        tails = job.recorders()
        assert main(["hangs", report.id, "--connect", job.target]) == Exit.OK
    assert (verdict.kind, verdict.culprits, verdict.cause.phase) == (Kind.HANG, (1,), "input"), job.told
    frame = verdict.cause.frames[0]
    assert (frame.function, frame.file) == ("read_shard", str(SCRIPT)), job.told
    assert f"rank 1 in read_shard (hanging.py:{frame.line}), rank 0 in backward (hanging.py:" in verdict.cause.evidence
    assert [tail.source for tail in tails.values()] == ["probe", "probe"], tails
    matched = match_tails({rank: tail.records for rank, tail in tails.items()})
    assert matched.culprits == (1,) and matched.headline.startswith("rank 0 in all_reduce seq "), matched.findings
    assert report.headline.startswith("rank 0 in all_reduce seq "), report
    assert report.headline.endswith(f", rank 1 in read_shard (hanging.py:{frame.line})"), report
    assert [row.finding for row in report.collectives[:2]] == ["waits", "never entered"], report
    assert [place.ranks for place in report.places] == ["1", "0"], "the odd one first"
    assert f"rank 1 in read_shard (hanging.py:{frame.line}) [input]" in capsys.readouterr().out
    assert (tmp_path / "profiles" / "hangs" / f"{report.id}.json").exists()


def test_an_evaluation_that_others_wait_for_is_no_hang(tmp_path: Path) -> None:
    with hanging_job("long evaluation", tmp_path) as job:
        job.wait_until_it_proceeds()
    assert not job.hangs
    assert job.longest_stall_seconds > 8.0, "long enough to be a hang"
