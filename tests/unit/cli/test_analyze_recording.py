from __future__ import annotations

import re
from pathlib import Path

import pytest

from rankscope.analysis.step_graph.group_kinds import GroupKind
from rankscope.analysis.step_graph.recording import Recording
from rankscope.cli import analyze_recording
from tests.support.commands import Command
from tests.unit.analysis.step_graph.planted_steps import Recorded

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
    assert (report["stage"], report["group"], report["links"]) == (None, "", [])
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


def test_a_slow_group_and_a_slow_stage_are_reported(recording: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Recorded.read("pp2_dp2_healthy", first_step=60, last_step=140)
    slow = job.slow_group(GroupKind.DATA, 3.0, (0, 1))
    monkeypatch.setattr(analyze_recording, "read_recording", lambda file: Recording(slow, ""))
    out = recording.answer("job.npz")
    assert "communication is slow in the data group of ranks 0 and 1; no rank is to blame" in out
    assert re.search(r"takes \d+\.\d ms instead of \d+\.\d ms of a step, at [\d.]+ GB/s instead of [\d.]+ GB/s", out)
    report = recording.json("job.npz")
    assert (report["verdict"], report["culprits"], report["links"]) == ("slow_communication", [], [[0, 1]])
    assert report["group"] == "the data group of ranks 0 and 1"
    slow = job.slow_stage(1, 2.0)
    report = recording.json("job.npz")
    assert (report["verdict"], report["culprits"], report["stage"]) == ("slow_stage", [2, 3], 1)


def test_a_file_that_is_no_recording_is_refused(recording: Command, tmp_path: Path) -> None:
    (tmp_path / "job.npz").write_text("steps")
    assert "is not a recording" in recording.complaint(tmp_path / "job.npz")
    assert "No such file" in recording.complaint(tmp_path / "gone.npz")
    assert "directory" in recording.complaint(tmp_path).lower()
