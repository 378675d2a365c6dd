"""Facts of a fleet report from memory: on played runs, with a clock that the test owns."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rankscope.analysis.fleet.facts import FleetFacts
from rankscope.analysis.fleet.report import make_report
from rankscope.analysis.fleet.tables import headline, notes, tables
from rankscope.analysis.verdicts.verdict import DEVICE, Cause, Kind, Severity, Verdict
from rankscope.operator.correlation import fleet_usage
from rankscope.operator.correlation.fleet_usage import EARLIER, OTHER_NODES, FleetUsage
from rankscope.v1.identity_pb2 import Program, RankIdentity
from rankscope.v1.window_pb2 import GpuUsage, RankWindow
from tools.played_runs import Figures, Played

HOUR = 3600.0
STEP = 15.0  # seconds between ticks here
SLOW = Verdict(
    Kind.SLOW_RANK, "rank 1", Severity.ALARM, culprits=(1,), impact_ratio=0.5, cause=Cause("throttled", (), "", DEVICE)
)


def identity(run: str, rank: int, size: int) -> RankIdentity:
    """Two GPUs a node; the nodes of a run are its own."""
    team, _, name = run.partition("/")
    program = Program(team=team, user="kim", image="sweep:3", command="python sweep.py")
    who = RankIdentity(job=run, rank=rank, world_size=size, node=f"{name}-{rank // 2}", pid=rank + 1, program=program)
    who.gpu_uuid, who.gpu_model = f"GPU-{name}-{rank}", "NVIDIA H100 80GB HBM3"
    return who


def on_one_gpu(run: str, rank: int, size: int) -> RankIdentity:
    who = identity(run, rank, size)
    who.node, who.gpu_uuid = "shared", "GPU-shared"
    return who


def without_gpu(run: str, rank: int, size: int) -> RankIdentity:
    who = identity(run, rank, size)
    who.ClearField("gpu_uuid")
    return who


def busy(ratio: float) -> Figures:
    def figures(rank: int) -> dict[str, float]:
        return {"gpu_utilization_ratio": ratio, "gpu_memory_used_bytes": 8 * 2.0**30}

    return figures


def play(played: Played, hours: float, verdict: Verdict | None = None, run: str = "lab/llama", ranks: int = 4) -> None:
    """A finding costs its impact times ranks and time."""
    begin = played.now
    figures = busy(0.75)
    while played.now < begin + hours * HOUR:
        if verdict is None:
            played.tick(figures, run=run, ranks=ranks, seconds=STEP)
        else:
            lost = (played.now + STEP - begin) * ranks * (verdict.impact_ratio or 0.0)
            played.tick(figures, run=run, ranks=ranks, seconds=STEP, verdict=replace(verdict, lost_gpu_seconds=lost))


def used(facts: FleetFacts, *by: str) -> dict[tuple[str, ...], float]:
    return facts.used.sums(*by)


def test_a_run_uses_its_gpus_while_it_is_seen() -> None:
    played = Played(identities=identity)
    play(played, 2.0)
    facts = played.usage.facts()
    assert used(facts, "run_namespace", "run") == {("lab", "llama"): pytest.approx(8.0, rel=0.01)}
    assert used(facts, "node") == {(f"llama-{node}",): pytest.approx(4.0, rel=0.01) for node in range(2)}
    report = make_report(facts)
    assert report.utilization_gpu_hours[7] == pytest.approx(8.0, rel=0.01) and sum(report.utilization_gpu_hours) < 8.1
    assert (report.runs, report.nodes, report.teams[0].name) == (1, 2, "lab")
    run = facts.runs["", "lab", "llama"]
    assert run.mfu_ratio == pytest.approx(0.4) and run.hours == pytest.approx(2.0, rel=0.01)
    assert "only since" in facts.remarks[0] and not facts.problems


def test_a_loss_belongs_to_the_node_that_the_verdict_names() -> None:
    played = Played(identities=identity)
    play(played, 1.0)
    play(played, 1.0, SLOW)
    played.end("lab/llama")
    facts = played.usage.facts()
    assert facts.lost.sums("verdict", "node") == {("slow_rank", "llama-0"): pytest.approx(2.0, rel=0.01)}
    ((key, hours),) = facts.culprits.sums("node", "gpu", "phase", "bound", "verdict").items()
    assert key == ("llama-0", "GPU-llama-1", "throttled", "device", "slow_rank")
    assert hours == pytest.approx(1.0, rel=0.01)


def test_the_last_loss_of_a_run_that_ends_is_counted() -> None:
    played = Played(identities=identity)
    play(played, 0.5, SLOW)
    played.tick(busy(0.75), run="lab/llama", seconds=2.0, verdict=replace(SLOW, lost_gpu_seconds=HOUR * 10))
    played.end("lab/llama")
    assert played.usage.facts().lost.total == pytest.approx(10.0)
    play(played, 1.0)  # it is here again, and LostSeconds begins at 0
    played.end("lab/llama")
    facts = played.usage.facts()
    assert facts.lost.total == pytest.approx(10.0)
    assert used(facts, "run") == {("llama",): pytest.approx(6.0, rel=0.02)}


def test_a_gpu_of_two_runs_counts_once() -> None:
    played = Played(identities=on_one_gpu)
    for _ in range(int(2 * HOUR / STEP)):
        for run in ("lab/a", "lab/b"):
            played.tick(busy(0.3), run=run, ranks=2, seconds=STEP / 2)
    facts = played.usage.facts()
    assert facts.used.total == pytest.approx(2.0, rel=0.02)
    assert used(facts, "run")["a",] == pytest.approx(1.0, rel=0.02)
    assert facts.utilization.total == pytest.approx(2.0, rel=0.02)


def test_ranks_without_a_known_gpu_are_counted_apart() -> None:
    played = Played(identities=without_gpu)
    play(played, 1.0)
    facts = played.usage.facts()
    assert facts.used.total == 0 and facts.rank_hours_without_gpu == pytest.approx(4.0, rel=0.01)
    report = make_report(facts)
    assert headline(report) == "no rank has exactly one known GPU: there are no GPU-hours to report on"
    assert "4.0 rank-hours have no known GPU" in notes(report)[-1]
    assert next(iter(tables(report))).empty == "No GPU-hours are known."


def test_repetitive_runs_on_one_gpu_can_be_packed() -> None:
    played = Played(identities=identity)
    window = RankWindow(gpu=GpuUsage(gpus=1, memory_total_bytes=80 << 30))
    figures = busy(0.15)
    for _ in range(int(3 * HOUR / STEP)):
        for number in range(6):
            played.tick(figures, run=f"lab/sweep-{number}", ranks=1, window=window, seconds=STEP / 6)
    (group,) = make_report(played.usage.facts()).packing
    assert (group.user, group.image, group.command, group.runs) == ("kim", "sweep:3", "python sweep.py", 6)
    assert group.utilization_ratio == pytest.approx(0.15) and group.memory_total_bytes == 80 << 30


def test_a_clock_that_jumps_adds_no_hours() -> None:
    played = Played(identities=identity)
    play(played, 0.1)
    before = played.usage.facts().used.total
    played.tick(busy(0.75), run="lab/llama", seconds=48 * HOUR)
    assert played.usage.facts().used.total <= before + 4 * fleet_usage.MAX_SAMPLE_SECONDS / HOUR
    played.tick(busy(0.75), run="lab/llama", seconds=-47 * HOUR)
    play(played, 0.1)
    assert played.usage.facts().used.total < 2 * before + 5 * fleet_usage.MAX_SAMPLE_SECONDS / HOUR


def test_runs_that_ended_first_become_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_usage, "MAX_RUNS", 3)
    played = Played(identities=identity)
    for number in range(10):
        play(played, 0.2, SLOW, run=f"lab/run-{number}")
        played.end(f"lab/run-{number}")
    facts = played.usage.facts()
    assert used(facts, "run").keys() == {(EARLIER,), ("run-7",), ("run-8",), ("run-9",)}
    assert facts.used.total == pytest.approx(8.0, rel=0.05)
    assert facts.lost.total == pytest.approx(4.0, rel=0.05)
    (problem,) = facts.problems
    assert problem.startswith("7 runs that ended until ")


def test_runs_without_room_are_counted_as_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_usage, "MAX_RUNS", 3)
    played = Played(identities=identity)
    for _ in range(10):
        for number in range(5):
            played.tick(run=f"lab/run-{number}", ranks=1, seconds=STEP)
    facts = played.usage.facts()
    assert len(facts.runs) == 3 and facts.problems == ("without 2 runs: there is room for 3",)


def test_rows_are_bounded_and_hours_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fleet_usage, "MAX_ROWS", 20)
    played = Played(identities=identity)
    play(played, 0.2, ranks=200)
    facts = played.usage.facts()
    assert len(used(facts, "node")) == 21 and (OTHER_NODES,) in used(facts, "node")
    assert facts.used.total == pytest.approx(40.0, rel=0.05)
    assert "room for 20 rows" in facts.problems[0]


def test_runs_of_other_replicas_are_mentioned() -> None:
    usage = FleetUsage(Played().lost, elsewhere=lambda: {"lab/far": "operator-1"})
    (problem,) = usage.facts().problems
    assert problem.startswith("without 1 run that other replicas")
