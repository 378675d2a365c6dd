from __future__ import annotations

import io
import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import grpc
import msgspec
import pytest

from rankscope.cli import top
from rankscope.cli.main import main
from rankscope.cli.terminal import Terminal
from rankscope.operator.console.run_views import rank_history, run_detail
from rankscope.operator.correlation.job_service import job_status, state_of, verdict_of
from rankscope.v1 import job_service_pb2 as pb
from rankscope.v1 import job_service_pb2_grpc, rank_service_pb2_grpc
from rankscope.v1.capture_service_pb2 import ListCapturesRequest, ListCapturesResponse
from rankscope.v1.capture_service_pb2_grpc import (
    CaptureServiceServicer,
    add_CaptureServiceServicer_to_server,
)
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.rank_service_pb2 import ListRanksRequest, ListRanksResponse
from rankscope.v1.window_pb2 import GpuUsage, ProcessUsage, RankWindow, StackSummary, StepStatistics
from tests.support.breakdowns import a_breakdown
from tools.played_runs import Played

Output = pytest.CaptureFixture[str]


def window(rank: int, *, node: str = "gpu-1", step_ms: float | None = None, wait_ms: float = 10.0) -> RankWindow:
    made = RankWindow(
        identity=RankIdentity(job="llama", rank=rank, node=node, pid=4_000_000 + rank, world_size=4),
        start_unix_nanos=0,
        end_unix_nanos=2_000_000_000,
        wait_seconds=StepStatistics(mean=wait_ms / 1000),
        figures={"input_seconds": 0.0123, "mfu_ratio": 0.41, "run_ahead_seconds": 0.02},
        process=ProcessUsage(cpu_seconds=1.9, throttled_seconds=1),
        gpu=GpuUsage(gpus=1, utilization_ratio=0.97, tensor_active_ratio=0.5),
        stacks=StackSummary(samples=4, phase_shares={"forward": 0.8}),
    )
    if step_ms is not None:
        made.step_seconds.CopyFrom(StepStatistics(p50=step_ms / 1000))
    return made


def status(name: str, windows: Sequence[RankWindow], culprits: Sequence[int] = ()) -> pb.JobStatus:
    kind = pb.VERDICT_KIND_SLOW_RANK if culprits else pb.VERDICT_KIND_HEALTHY
    severity = pb.SEVERITY_ALARM if culprits else pb.SEVERITY_NONE
    verdict = pb.Verdict(kind=kind, severity=severity, confidence=pb.CONFIDENCE_HIGH, culprits=culprits, reason="r")
    return pb.JobStatus(job=name, world_size=len(windows), ranks_seen=len(windows), verdict=verdict, ranks=windows)


class Server(
    job_service_pb2_grpc.JobServiceServicer, rank_service_pb2_grpc.RankServiceServicer, CaptureServiceServicer
):
    def __init__(self) -> None:
        self.jobs: list[pb.JobStatus] = []
        self.windows: list[RankWindow] = []

    def ListJobs(self, request: pb.ListJobsRequest, context: grpc.ServicerContext) -> pb.ListJobsResponse:
        return pb.ListJobsResponse(jobs=[job for job in self.jobs if request.run in ("", job.job)])

    def WatchJobs(self, request: pb.WatchJobsRequest, context: grpc.ServicerContext) -> Iterator[pb.WatchJobsResponse]:
        for _ in range(2):
            yield pb.WatchJobsResponse(jobs=self.jobs)

    def ListRanks(self, request: ListRanksRequest, context: grpc.ServicerContext) -> ListRanksResponse:
        return ListRanksResponse(ranks=[ListRanksResponse.Rank(identity=w.identity, latest=w) for w in self.windows])

    def ListCaptures(self, request: ListCapturesRequest, context: grpc.ServicerContext) -> ListCapturesResponse:
        return ListCapturesResponse()


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture(params=["correlator"])
def address(server: Server, request: pytest.FixtureRequest) -> Iterator[str]:
    serving = grpc.server(ThreadPoolExecutor(4))
    if request.param == "correlator":
        job_service_pb2_grpc.add_JobServiceServicer_to_server(server, serving)
    rank_service_pb2_grpc.add_RankServiceServicer_to_server(server, serving)
    add_CaptureServiceServicer_to_server(server, serving)
    port = serving.add_insecure_port("127.0.0.1:0")
    serving.start()
    yield f"127.0.0.1:{port}"
    serving.stop(0).wait(5)


def drawn(jobs: Sequence[pb.JobStatus], view: top.View, width: int, height: int | None = None) -> list[str]:
    console = Terminal(width=width, record=True, file=io.StringIO())
    if height is None:
        console.print(top._screen(jobs, view, width))
    else:
        console.print(top._live_screen(jobs, view, width, height))
    return console.export_text().splitlines()


def ranks_of(lines: Sequence[str]) -> list[int]:
    return [int(line.split()[0]) for line in lines if line.strip() and line.split()[0].isdigit()]


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 200])
def test_a_narrow_terminal_gets_fewer_columns_and_whole_numbers(width: int) -> None:
    windows = [window(rank, node=f"ip-10-0-12-{rank}.eu-west-1.compute.internal", step_ms=1234.5) for rank in range(3)]
    lines = drawn([status("llama", windows, [1])], top.View(), width)
    assert max(map(len, lines)) <= width
    header = next(line.split() for line in lines if line.split()[:1] == ["rank"])
    assert {"step", "self"} <= set(header)
    assert all("1234.5 ms" in line for line in lines if line.split() and line.split()[0].isdigit())
    if width >= 80:
        assert {"node", "wait", "MFU", "CPU"} <= set(header)
        assert "eu-west-1.compute.internal"[-20:] in "\n".join(lines)
    if width >= 120:
        assert "pid" in header
    if width >= 200:
        assert {"phase", "hottest"} <= set(header)


def test_ranks_are_sorted_filtered_and_cut_with_the_culprits_kept() -> None:
    steps = [50.0, None, 80.0, 60.0]
    windows = [window(rank, node=f"gpu-{3 - rank}", step_ms=step, wait_ms=rank) for rank, step in enumerate(steps)]
    jobs = [status("llama", windows, [1])]

    def shown(view: top.View) -> list[int]:
        return ranks_of(drawn(jobs, view, 200))

    assert shown(top.View()) == [0, 1, 2, 3]
    assert shown(top.View(sort="step")) == [2, 3, 0, 1]  # what was not measured is last
    assert shown(top.View(sort="wait")) == [3, 2, 1, 0]
    assert shown(top.View(sort="node")) == [3, 2, 1, 0]
    assert shown(top.View(ranks=frozenset({0, 3}))) == [0, 3]
    assert shown(top.View(sort="step", rows=2)) == [2, 1]
    assert "… and 2 more ranks (--rows N shows more)" in "\n".join(drawn(jobs, top.View(rows=2), 200))


def test_the_live_screen_fits_and_shows_the_chosen_runs_ranks() -> None:
    jobs = [status(f"run-{number}", [window(rank, step_ms=9) for rank in range(40)], [39]) for number in range(30)]
    view = top.View()
    for key, chosen in (("", 0), ("j", 1), ("\x1b[B", 2), ("k", 1), ("\x1b[A", 0), ("k", 0)):
        view = top._pressed(key, jobs, view)
        lines = drawn(jobs, view, 80, 24)
        assert len(lines) <= 24
        assert f"> run-{chosen} " in "\n".join(lines)
        assert ranks_of(lines)[-1] == 39
    assert "sorted by node" in drawn(jobs, top._pressed("s", jobs, view), 80, 24)[-1]
    assert "choose a run" in drawn(jobs, top._pressed("?", jobs, view), 80, 24)[-1]
    assert top._pressed("x", jobs, view) == view
    gone = top.View(chosen="gone")
    assert top._pressed("j", (), gone) == gone
    assert "no training rank is seen yet" in drawn((), gone, 80, 24)[0]


def test_names_of_a_container_do_not_steer_the_terminal() -> None:
    hostile = "a\x1b[2J\x1b]0;owned\x07\nb [red]x[/]"
    windows = [window(0, node=hostile)]
    windows[0].stacks.phase_shares[hostile] = 1.0
    for height in (None, 24):
        lines = drawn([status(hostile, windows), status("b", windows)], top.View(), 200, height)
        assert not any(character in "".join(lines) for character in "\x1b\x07")
        assert any("[red]x[/]" in line for line in lines)


def test_a_hang_shows_where_its_ranks_stand() -> None:
    hung = status("llama", [window(0)], [0])
    hung.verdict.kind = pb.VERDICT_KIND_HANG
    hung.verdict.cause.evidence = "rank 0 in save_checkpoint (ckpt.py:51), 63 ranks in barrier (train.py:8)\x1b[2J"
    lines = drawn([hung], top.View(), 200, None)
    (place,) = [line for line in lines if "63 ranks in barrier (train.py:8)" in line]
    assert "\x1b" not in place


def test_a_slow_rank_shows_what_proves_its_cause() -> None:
    slow = status("llama", [window(0), window(1)], [1])
    slow.verdict.cause.evidence = "rank 1 spends 41 % of its time in `load_image (dataset.py:88)`, its peers 2 %"
    assert slow.verdict.cause.evidence in drawn([slow], top.View(), 200)
    slow.verdict.cause.bound = "device"  # the headline has it
    (line,) = [line for line in drawn([slow], top.View(), 200) if "41 %" in line]
    assert line.startswith("✗ rank 1 is slow because its GPU is slow (rank 1 spends 41 %")


@pytest.fixture
def played() -> Played:
    played = Played()
    played.tick(ranks=2, window=window(0, step_ms=100))
    return played


def test_where_a_step_goes_is_a_line_largest_first(played: Played) -> None:
    state = replace(played.view().state, verdict=verdict_of(status("llama", [], [1]).verdict))
    lines = drawn([job_status(replace(state, breakdown=a_breakdown(0.3)))], top.View(), 200)
    assert (
        "a step goes to excess of rank 1 75%, tensor communication 10%, own work of stage 1 8%, "
        "own work of stage 0 5%, pipeline bubble 2%"
    ) in lines
    assert "a step goes to" not in "\n".join(drawn([job_status(state)], top.View(), 200))


def test_where_a_step_goes_survives_its_message(played: Played) -> None:
    breakdown = a_breakdown(0.3)
    received = state_of(job_status(replace(played.view().state, breakdown=breakdown))).breakdown
    assert received == replace(breakdown, totals={}), "counters are exported where they are counted"
    assert state_of(job_status(played.view().state)).breakdown is None


def test_json_agrees_with_the_console_api_on_runs_and_ranks(
    server: Server, address: str, capsys: Output, played: Played
) -> None:
    played.now += 2
    played.compare({1: (0.07, 0.03)})
    played.evaluate(replace(played.view().state, breakdown=a_breakdown()))
    server.jobs = [job_status(played.view().state)]
    assert main(["top", "--once", "--json", "--connect", address]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    told = run.pop("ranks")
    summary = msgspec.to_builtins(run_detail(played.view()))
    assert run == {name: summary[name] for name in run}
    for rank, found in enumerate(told):
        assert found.pop("stale_seconds") is None
        history = rank_history(played.view(), rank)
        assert history is not None
        latest = msgspec.to_builtins(history.latest)
        assert found == {name: latest[name] for name in found}
    assert told[1]["self_seconds"] == 0.07


def test_json_is_one_object_with_null_for_unmeasured_values(server: Server, address: str, capsys: Output) -> None:
    server.jobs = [status("llama", [window(0, step_ms=80), window(1)], [0]), status("bert", [])]
    assert main(["top", "--once", "--ranks", "all", "--connect", address]) == 0
    assert len(ranks_of(capsys.readouterr().out.splitlines())) == 2
    assert main(["top", "--once", "--json", "--run", "llama", "--ranks", "0-1", "--connect", address]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert (told["run"], told["ranks_seen"], told["step_seconds"]) == ("llama", 2, None)
    assert (told["verdict"]["kind"], told["verdict"]["culprits"]) == ("slow_rank", [0])
    assert told["verdict"]["headline"].startswith("rank 0 is slow")
    first, second = told["ranks"]
    assert (first["rank"], first["node"], first["step_seconds"]) == (0, "gpu-1", 0.08)
    assert (second["step_seconds"], second["wait_seconds"], second["cpu_ratio"]) == (None, 0.01, 0.95)


def test_figures_of_a_silent_node_are_marked_as_old(server: Server, address: str, capsys: Output) -> None:
    stale = status("llama", [window(rank, node=f"gpu-{rank // 2}", step_ms=80) for rank in range(4)])
    fresh = drawn([stale], top.View(), 200)
    assert "age" not in " ".join(fresh) and "nothing from" not in " ".join(fresh)
    stale.stale_seconds.update({2: 31.6, 3: 32.2})
    for height in (None, 24):
        lines = [line.strip() for line in drawn([stale], top.View(), 80, height)]
        assert "nothing from node gpu-1 for 32 s: the figures of ranks 2 and 3 are old" in lines
        assert [line.endswith(" 32 s") for line in lines if line[:1].isdigit()] == [False, False, True, True]
    stale.stale_seconds[0] = 40.0
    (line,) = [line for line in drawn([stale], top.View(), 200) if "nothing from" in line]
    assert line.strip().endswith("rank 0 are old; silent, too: 1 more node")
    assert len(drawn([stale] * 3, top.View(), 60, 12)) <= 12

    server.jobs = [stale]
    assert main(["top", "--once", "--json", "--connect", address]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert [rank["stale_seconds"] for rank in told["ranks"]] == [40.0, None, 31.6, 32.2]
    assert main(["doctor", "--connect", address]) == 0
    shown = capsys.readouterr().out
    assert "run llama: nothing from node gpu-1 for 32 s" in shown and "all ranks report" not in shown
    assert "is the daemon of that node running" in shown


def test_without_a_terminal_every_refresh_is_printed(server: Server, address: str, capsys: Output) -> None:
    server.jobs = [status("llama", [window(0, step_ms=80)])]
    assert main(["top", "--connect", address]) == 0
    shown = capsys.readouterr().out
    assert shown.count("llama  1/1 rank") == 2
    assert "\x1b" not in shown
    assert main(["top", "--json", "--connect", address]) == 0
    assert [json.loads(line)["runs"][0]["run"] for line in capsys.readouterr().out.splitlines()] == ["llama"] * 2


@pytest.mark.parametrize("address", ["daemon"], indirect=True)
def test_a_daemon_without_correlation_shows_its_ranks_without_a_verdict(
    server: Server, address: str, capsys: Output
) -> None:
    server.windows = [window(rank, step_ms=50 + rank) for rank in range(3)]
    assert main(["top", "--once", "--json", "--connect", address]) == 0
    (told,) = json.loads(capsys.readouterr().out)["runs"]
    assert (told["run"], told["world_size"], told["ranks_seen"], told["step_seconds"]) == ("llama", 4, 3, 0.051)
    assert told["verdict"]["kind"] == "insufficient_data"
    for words in (["--run", "other"], ["--run", "other/", "--json"]):
        capsys.readouterr()
        assert main(["top", "--once", "--connect", address, *words]) == 6
        said = capsys.readouterr()
        assert said.out == "" and f"error: no run {words[1]} is seen yet" in said.err
    assert main(["top", "--once", "--json", "--connect", address, "--ranks", "7"]) == 0
    assert main(["doctor", "--connect", address]) == 0
    assert "a daemon without correlation" in capsys.readouterr().out


@pytest.mark.parametrize("flags", [["--ranks", "x"], ["--ranks", "3-1"], ["--rows", "0"]])
def test_a_wrong_filter_is_a_usage_error(flags: list[str], capsys: Output) -> None:
    assert main(["top", "--once", *flags]) == 2
    assert "error: " in capsys.readouterr().err


def test_doctor_reports_what_a_server_and_its_ranks_say(server: Server, address: str, capsys: Output) -> None:
    silent = status("llama", [window(rank) for rank in range(3)])
    silent.world_size = 8
    for reporting in silent.ranks[:2]:
        reporting.problems.append("stacks: py-spy could not read memory: EPERM")
    server.jobs = [silent, status("bert", [window(0)])]
    assert main(["doctor", "--connect", address, "--json"]) == 0
    told = [(one["check"], one["level"], one["text"]) for one in json.loads(capsys.readouterr().out)["findings"]]
    assert told == [
        ("server", "ok", f"{address} answers; it knows 2 runs"),
        ("captures", "ok", "you may list them"),
        ("run llama", "warning", "3 of 8 ranks report"),
        ("run llama", "warning", "ranks 0 and 1: stacks: py-spy could not read memory: EPERM"),
        ("run bert", "ok", "all ranks report (1)"),
    ]
