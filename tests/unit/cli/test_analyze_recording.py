from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.commands import Command

RECORDINGS = Path(__file__).parents[2] / "data" / "nccl"


@pytest.fixture
def recording(capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(capsys, "analyze", "recording")


def test_the_slow_rank_and_its_windows_are_printed(recording: Command) -> None:
    out = recording.answer(RECORDINGS / "pp2_dp2_late_host.npz")
    assert "4 ranks in 2 pipeline stages, 9,056 operations, 130 whole steps" in out
    assert "72% with rank 2" in out and "verdict  rank 2 is slow\n" in out
    assert "of the time of steps 121 to 199 would come back if rank 2 worked as the peers" in out


def test_the_verdict_as_json(recording: Command) -> None:
    report = recording.json(RECORDINGS / "pp2_dp2_healthy.npz")
    assert (report["verdict"], report["culprits"], report["operations"]) == ("healthy", [], 18_844)
    assert report["unmatched_operations"] < 10
    assert [rank["stage"] for rank in report["ranks"]] == [0, 0, 1, 1]
    assert report["live_verdict"] == ""
    window = next(window for window in report["windows"] if window["first_step"] == 89)
    assert window["last_step"] == 96
    assert window["step_seconds"] == pytest.approx(0.084, abs=0.002) and 0.15 < window["communication"] < 0.25
    assert all(0.0 < rank["own"] < 0.5 and abs(rank["returns"]) < 0.05 for rank in window["ranks"])


def test_where_a_step_goes_is_printed_and_adds_up(recording: Command) -> None:
    out = recording.answer(RECORDINGS / "pp2_dp2_late_host.npz")
    table = [line.split() for line in out.partition("where a step goes")[2].splitlines()[1:]]
    table = table[: table.index([])]
    milliseconds = {" ".join(line[: line.index("ms") - 1]): float(line[line.index("ms") - 1]) for line in table}
    assert {"own work of stage 0", "excess of rank 2", "pipeline bubble", "data communication"} < milliseconds.keys()
    total = milliseconds.pop("step")
    assert sum(milliseconds.values()) == pytest.approx(total, abs=0.05 * len(milliseconds))
    assert "2 groups of 2 ranks, 56.6 MiB at 4.05 GB/s" in out


def test_where_a_step_goes_as_json(recording: Command) -> None:
    breakdown = recording.json(RECORDINGS / "tp2_pp2_slow_gpu.npz")["breakdown"]
    assert sum(part["seconds"] for part in breakdown["parts"]) == pytest.approx(breakdown["step_seconds"])
    assert [part["stage"] for part in breakdown["parts"] if part["part"] == "own"] == [0, 1]
    assert {part["group_kind"] for part in breakdown["parts"]} > {"tensor", "pipeline", "embedding"}
    traffic = {each["group_kind"]: each for each in breakdown["traffic"]}
    assert traffic["tensor"]["groups"] == 2 and traffic["tensor"]["bus_bytes_per_second"] > 1e9


def test_a_file_that_is_no_recording_is_refused(recording: Command, tmp_path: Path) -> None:
    (tmp_path / "job.npz").write_text("steps")
    assert "is not a recording" in recording.complaint(tmp_path / "job.npz")
    assert "No such file" in recording.complaint(tmp_path / "gone.npz")
    assert "directory" in recording.complaint(tmp_path).lower()
