"""Real jobs that hang, each for one reason, and jobs that only take long: the right rank and line are named, or
none."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from rankscope.analysis.collectives.flight_recorder.tail import match_tails
from rankscope.analysis.verdicts.verdict import Kind
from rankscope.cli.main import main
from rankscope.cli.messages import Exit
from tests.hangs.hanging_job import SCRIPT, hanging_job

pytestmark = pytest.mark.acceptance


@pytest.mark.parametrize(
    ("cause", "ranks", "phase", "function"),
    [
        ("collective never entered", 3, "other", "wait_for_schedule"),
        ("lock", 3, "other", "update_cache"),
        ("stuck checkpoint", 3, "checkpoint", "save_checkpoint"),
        ("stopped", 2, "stopped", "change"),
    ],
)
def test_a_hang_names_the_awaited_rank_and_its_line(
    cause: str, ranks: int, phase: str, function: str, tmp_path: Path
) -> None:
    with hanging_job(cause, tmp_path, ranks) as job:
        verdict = job.wait_for_hang(places=2)
    assert (verdict.kind, verdict.culprits) == (Kind.HANG, (ranks - 1,)), job.told
    assert (verdict.cause.phase, verdict.cause.frames[0].function) == (phase, function), job.told
    assert verdict.cause.frames[0].file == str(SCRIPT)
    others = "rank 0" if ranks == 2 else "ranks 0-1"
    assert f"rank {ranks - 1} in {function} (hanging.py:" in verdict.cause.evidence
    assert f"{others} in backward (hanging.py:" in verdict.cause.evidence, job.told


def test_a_killed_rank_is_named_with_the_waiting_ranks_location(tmp_path: Path) -> None:
    with hanging_job("killed", tmp_path, ranks=3) as job:
        verdict = job.wait_for_hang()
    assert (verdict.kind, verdict.culprits, verdict.cause.phase) == (Kind.HANG, (2,), "ended"), job.told
    assert "ranks 0-1 in backward (hanging.py:" in verdict.cause.evidence


def test_ranks_that_are_killed_leave_the_cause_of_the_hang(tmp_path: Path) -> None:
    with hanging_job("lock", tmp_path, ranks=3) as job:
        before = job.wait_for_hang(places=2)
        after = job.end(rank=2)
    assert (after.kind, after.culprits) == (Kind.HANG, (2,)), job.told
    assert after.cause == before.cause, job.told


@pytest.mark.parametrize(("probe", "kineto"), [(True, False), (True, True), (False, True)])
def test_a_capture_of_a_hang_records_stacks_of_all_ranks(
    probe: bool, kineto: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with hanging_job("lock", tmp_path, probe=probe, kineto=kineto) as job:
        job.wait_for_hang()
        words = ["--ranks", "all", "--seconds", "2", "--output", str(tmp_path / "stacks"), "--connect", job.target]
        assert main(["capture", *words]) == Exit.OK, capsys.readouterr()
    stacks = [gzip.decompress(path.read_bytes()).decode() for path in sorted(tmp_path.glob("stacks/**/*.folded.gz"))]
    assert len(stacks) == 2, capsys.readouterr()
    assert "backward" in stacks[0] and "update_cache" in stacks[1], stacks


@pytest.mark.parametrize("cause", ["long checkpoint", "long compile"])
def test_what_only_takes_long_is_no_hang(cause: str, tmp_path: Path) -> None:
    with hanging_job(cause, tmp_path) as job:
        job.wait_until_it_proceeds()
    assert not job.hangs
    assert (0,) not in {verdict.culprits for verdict in job.verdicts}, "it only waits"
    assert job.longest_stall_seconds > 8.0, "long enough to be a hang"


def test_a_collective_of_another_size_ends_a_job_over_gloo(tmp_path: Path) -> None:
    """gloo notices and aborts, so nothing hangs; NCCL would wait."""
    with hanging_job("collective of another size", tmp_path) as job:
        job.wait_until_it_ends()
    assert not job.hangs
    assert "Received data size doesn't match expected size" in "".join(job.logs())


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        (
            "collective never entered",
            r"ranks 0-1 in all_reduce seq \d+ of group 0 \(default_pg\), rank 2 last in all_reduce seq \d+ .*",
        ),
        (
            "another collective",
            r"different operations in seq \d+ of group 0 \(default_pg\): ranks 0-1 in all_reduce; rank 2 in barrier",
        ),
        # gloo aborts the rank that receives more than it has room for. The others keep what they have recorded.
        ("error after another size", r"different sizes in seq \d+ .* \[16\] Float; .* \[4096\] Float"),
    ],
)
def test_the_recorders_that_probes_hand_over_are_matched(cause: str, sentence: str, tmp_path: Path) -> None:
    with hanging_job(cause, tmp_path, 3) as job:
        job.wait_until_no_step_ends()
        tails = job.recorders()
    assert {tail.source for tail in tails.values()} == {"probe"}, (tails, job.told)
    report = match_tails({rank: tail.records for rank, tail in tails.items()})
    assert re.fullmatch(sentence, report.headline), report.headline
    assert report.culprits == (2,) or len(tails) < 3


def test_the_files_that_torch_wrote_are_matched_without_the_probe(tmp_path: Path) -> None:
    with hanging_job("collective never entered", tmp_path, probe=False, dump_prefix=tmp_path / "fr_") as job:
        job.wait_for_files("fr_")
        tails = job.recorders()
    assert [tail.source for tail in tails.values()] == [f"{tmp_path}/fr_0", f"{tmp_path}/fr_1"], tails
    assert match_tails({rank: tail.records for rank, tail in tails.items()}).culprits == (1,)


def test_without_the_probe_a_lock_is_a_low_confidence_hang(tmp_path: Path) -> None:
    with hanging_job("lock", tmp_path, probe=False) as job:
        verdict = job.wait_for_hang(places=2)
    assert (verdict.kind, verdict.culprits, verdict.cause.frames[0].function) == (Kind.HANG, (1,), "update_cache")
    assert verdict.confidence.value == "low"
