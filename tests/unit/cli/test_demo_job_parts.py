from __future__ import annotations

import importlib
import socket
from pathlib import Path

import pytest

from rankscope.cli import demo_job
from rankscope.cli.demo_job import environment
from rankscope.cli.demo_job.board import RECENT_STEPS, Board
from rankscope.cli.demo_job.faults import parse_fault
from rankscope.cli.demo_job.model_size import ModelSize, flops_per_step


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts' folder on the path, as a rank has it."""
    monkeypatch.syspath_prepend(str(Path(demo_job.__file__).parent))


def test_the_board_keeps_the_latest_step_times_in_order(tmp_path: Path) -> None:
    launcher = Board.create(tmp_path / "board", ranks=3)
    rank = Board(tmp_path / "board")
    for step in range(RECENT_STEPS + 5):
        rank.record_step(1, float(step))

    assert [launcher.steps_done(each) for each in range(3)] == [0, RECENT_STEPS + 5, 0]
    assert launcher.recent_step_seconds(1) == [float(step) for step in range(5, RECENT_STEPS + 5)]
    assert launcher.recent_step_seconds(2) == []


@pytest.mark.usefixtures("scripts")
@pytest.mark.parametrize(("rank", "expected"), [(1, [None, None, "slow-rank", "slow-rank"]), (0, [None] * 4)])
def test_the_fault_begins_at_its_step_on_its_rank_only(tmp_path: Path, rank: int, expected: list[str | None]) -> None:
    launcher = Board.create(tmp_path / "board", ranks=2)
    switch = importlib.import_module("fault_switch").FaultSwitch(rank, "slow-rank:rank=1", Board(tmp_path / "board"))
    seen = []
    for _ in range(4):
        seen.append(switch.active)
        launcher.fault_step = 2
        switch.next_step()

    assert seen == expected


@pytest.mark.usefixtures("scripts")
def test_a_switched_off_fault_ends_even_within_a_step(tmp_path: Path) -> None:
    launcher = Board.create(tmp_path / "board", ranks=2)
    switch = importlib.import_module("fault_switch").FaultSwitch(1, "hang:rank=1", Board(tmp_path / "board"))
    launcher.fault_step = 1
    switch.next_step()
    assert switch.active == "hang"
    launcher.fault_step = None
    switch.look()
    assert switch.active is None


@pytest.mark.usefixtures("scripts")
def test_declared_size_and_work_match_the_real_model() -> None:
    size = ModelSize(device_forward_seconds=0, device_backward_seconds=0)
    faults = importlib.import_module("fault_switch").FaultSwitch(0, "none", None)
    model = importlib.import_module("model").LanguageModel(size, faults)
    torch = importlib.import_module("torch")  # two seconds, and no other unit test needs it
    tokens = torch.zeros(size.batch, size.sequence, dtype=torch.long)

    assert sum(parameter.numel() for parameter in model.parameters()) == size.parameters
    with importlib.import_module("torch.utils.flop_counter").FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == size.matmul_flops_per_batch


def test_a_job_of_twice_the_ranks_does_twice_the_work() -> None:
    for pipeline in (False, True):
        assert flops_per_step(8, pipeline=pipeline) == 2 * flops_per_step(4, pipeline=pipeline)


def test_a_rank_gets_the_probe_only_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "measure_peak_flops_per_second", lambda: 5e9)
    monkeypatch.setenv("RANKSCOPE_PROBE", "1")
    monkeypatch.setenv("PYTHONPATH", "/theirs")
    fault = parse_fault("stage-imbalance")

    without = environment.rank_environment(3, 4, 29500, "demo-1", fault, tmp_path / "board", probe=False)
    with_probe = environment.rank_environment(3, 4, 29500, "demo-1", fault, tmp_path / "board", probe=True)

    assert "RANKSCOPE_PROBE" not in without
    assert without["PYTHONPATH"] == "/theirs"
    assert with_probe["RANKSCOPE_PROBE"] == "1"
    assert with_probe["PYTHONPATH"].split(":")[0].endswith("probe/inject")
    assert with_probe["PYTHONPATH"].split(":")[1:] == ["/theirs"]
    assert with_probe["RANKSCOPE_PARALLELISM"] == "pp=2,dp=2"
    assert float(with_probe["RANKSCOPE_FLOPS_PER_STEP"]) == flops_per_step(4, pipeline=True)
    assert with_probe["RANKSCOPE_PEAK_FLOPS"] == "5000000000"
    assert {name: without[name] for name in ("RANK", "WORLD_SIZE", "MASTER_PORT", "TORCHELASTIC_RUN_ID")} == {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_PORT": "29500",
        "TORCHELASTIC_RUN_ID": "demo-1",
    }


def test_passes_over_ports_that_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setattr(environment, "_PORTS", range(port, port + 1))
        monkeypatch.setattr(environment, "_PORT_TRIES", 1)
        with pytest.raises(OSError, match="no free port"):
            environment.choose_port()
