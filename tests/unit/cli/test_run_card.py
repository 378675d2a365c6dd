"""What is summed up over a job's life, and what the card says about it."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest

from rankscope.analysis.verdicts.verdict import DEVICE, Cause, Kind, Severity, Verdict
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.cli.job_summary import JobSummary
from rankscope.cli.process_ends import ProcessEnd
from rankscope.cli.run_card import advice, card, to_json
from rankscope.cli.run_end import CommandEnd
from rankscope.cli.terminal import Terminal
from rankscope.daemon.windows.window import INSPECTOR, OTHER_PLUGIN
from rankscope.operator.correlation.correlator import JobState
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import CollectiveRate, RankWindow, StepStatistics
from tests.support.breakdowns import a_breakdown

HEALTHY = Verdict(Kind.HEALTHY, "all is well")
FRAME = FrameSeen("load", "/app/dataset.py", 88, 0.4, 0.4, "forward")


NO_CAUSE = Cause()


def slow(rank: int, lost: float, cause: Cause = NO_CAUSE) -> Verdict:
    return Verdict(Kind.SLOW_RANK, "slow", Severity.ALARM, culprits=(rank,), lost_gpu_seconds=lost, cause=cause)


def state(verdict: Verdict, at: float, job: str = "job", step_seconds: float | None = 0.1) -> JobState:
    windows = []
    for rank in range(2):
        window = RankWindow(identity=RankIdentity(rank=rank), steps_total=int(10 * at))
        if step_seconds is not None:
            window.step_seconds.CopyFrom(StepStatistics(mean=step_seconds))
            window.self_seconds.CopyFrom(StepStatistics(mean=step_seconds * (0.9 if rank else 0.5)))
        windows.append(window)
    return JobState(job, 2, verdict, 0, at, 2, step_seconds, None, 0.3, tuple(windows))


FINISHED = CommandEnd(9, 0, 0.0, 60.0)


def shown(*jobs: JobSummary, end: CommandEnd = FINISHED, terminal: bool = True) -> str:
    console = Terminal(file=io.StringIO(), width=200, force_terminal=terminal)
    console.print(card(jobs, end, probe=True))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_costliest_finding_of_the_whole_run_is_the_verdict() -> None:
    job = JobSummary("job")
    for at, verdict in enumerate((HEALTHY, slow(1, 10.0), slow(1, 90.0), slow(0, 20.0), HEALTHY), start=1):
        assert job.add(state(verdict, at))
    assert job.verdict == slow(1, 90.0)
    assert job.steps == 50
    text = shown(job)
    assert "from 0:02 to 0:03 of 1:00, for 1 s in all" in text
    assert "also" in text and "rank 0 is slow; at 0:04 of 1:00" in text
    assert job.self_seconds.value == pytest.approx(0.07)


def test_parts_of_a_step_are_those_while_the_finding_stood() -> None:
    job = JobSummary("job")
    moments = ((HEALTHY, 0.0), (slow(1, 10.0), 0.2), (slow(1, 20.0), 0.3), (slow(1, 30.0), 0.0), (HEALTHY, 0.0))
    for at, (verdict, excess) in enumerate(moments, start=1):
        job.add(replace(state(verdict, at), breakdown=a_breakdown(excess)))
    assert job.breakdown == a_breakdown(0.3)
    lines = shown(job, terminal=False).splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("where a step goes"))
    assert [" ".join(line.split()) for line in lines[first + 1 : first + 8]] == [
        "own work of stage 0 20.0 ms 5%",
        "own work of stage 1 30.0 ms 8%",
        "excess of rank 1 300.0 ms 75%",
        "pipeline bubble 10.0 ms 2%",
        "tensor communication 39.9 ms 10% 4 groups of 2 ranks, 64 MiB at 80 GB/s",
        "other 0.1 ms 0%",
        "step 400.0 ms 100%",
    ]
    (told,) = to_json([job], ["train"], FINISHED)["jobs"]
    assert told["breakdown"]["parts"][2]["text"] == "excess of rank 1"
    assert sum(part["seconds"] for part in told["breakdown"]["parts"]) == pytest.approx(0.4)


def test_a_healthy_job_shows_where_its_last_steps_went() -> None:
    job = JobSummary("job")
    for at in range(1, 4):
        job.add(replace(state(HEALTHY, at), breakdown=a_breakdown()))
    assert "excess" not in shown(job) and "pipeline bubble" in shown(job)


def test_a_job_judged_by_sums_has_no_parts_table() -> None:
    job = JobSummary("job")
    job.add(state(HEALTHY, 1.0))
    assert "where a step goes" not in shown(job)
    assert to_json([job], ["train"], FINISHED)["jobs"][0]["breakdown"] is None


def test_what_groups_transfer_is_left_out_of_a_narrow_terminal() -> None:
    job = JobSummary("job")
    job.add(replace(state(HEALTHY, 1.0), breakdown=a_breakdown()))
    console = Terminal(file=io.StringIO(), width=60)
    console.print(card([job], FINISHED, probe=True, columns=60))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "tensor communication" in text and "GB/s" not in text and "…" not in text


def test_repeated_evaluations_count_once_and_stepless_windows_add_no_step() -> None:
    job = JobSummary("job")
    assert job.add(state(HEALTHY, 1.0))
    assert not job.add(state(HEALTHY, 1.0))
    assert job.add(state(Verdict(Kind.INSUFFICIENT_DATA, "it ends"), 2.0, step_seconds=None))
    assert job.self_seconds.count == 2
    assert job.verdict == HEALTHY


def warning(rank: int) -> Verdict:
    return replace(slow(rank, 1.0), severity=Severity.WARNING)


def test_a_brief_warning_leaves_a_run_healthy() -> None:
    job = JobSummary("job")
    for at in range(1, 31):
        job.add(state(warning(0) if at in (12, 13) else HEALTHY, at))
    assert job.verdict == HEALTHY
    text = " ".join(shown(job).split())
    assert "brief warning" in text and "rank 0 is slow; from 0:12 to 0:13" in text
    (told,) = to_json([job], ["train"], FINISHED)["jobs"]
    assert (told["verdict"], told["severity"]) == ("healthy", "none")
    assert [finding["seconds"] for finding in told["findings"]] == [1.0]


def test_a_warning_of_most_of_a_run_is_its_verdict() -> None:
    job = JobSummary("job")
    for at in range(1, 31):
        job.add(state(warning(0) if at > 10 else HEALTHY, at))
    assert job.verdict.severity is Severity.WARNING
    assert "warning: rank 0 is slow" in shown(job)


def test_the_loss_of_a_finding_is_of_all_stretches() -> None:
    job = JobSummary("job")
    verdicts = (slow(1, 10.0), slow(1, 30.0), HEALTHY, slow(1, 5.0), slow(1, 20.0))
    for at, verdict in enumerate(verdicts, start=1):
        job.add(state(verdict, at))
    assert job.verdict.lost_gpu_seconds == 50.0
    assert job.findings[0].seconds == 2.0  # it did not stand in between


def failed(pid: int, status: int) -> CommandEnd:
    return CommandEnd(9, 1, 0.0, 60.0, ends={pid: ProcessEnd(pid, 40.0, status)})


def test_a_run_that_failed_is_not_healthy() -> None:
    job = JobSummary("job")
    told = state(HEALTHY, 1.0)
    for rank, window in enumerate(told.windows):
        window.identity.pid = 100 + rank
    job.meet(told)
    job.add(told)
    text = " ".join(shown(job, end=failed(101, -9), terminal=False).split())
    assert "verdict failed: rank 1 was ended by SIGKILL" in text
    assert "0:40" in text and "healthy" in text.partition("before")[2]
    (written,) = to_json([job], ["train"], failed(101, -9))["jobs"]
    assert (written["verdict"], written["severity"], written["failure"]["rank"]) == ("failed", "alarm", 1)


def test_a_job_whose_ranks_all_ended_well_did_not_fail() -> None:
    job = JobSummary("job")
    told = state(HEALTHY, 1.0)
    for rank, window in enumerate(told.windows):
        window.identity.pid = 100 + rank
    job.meet(told)
    job.add(told)
    ends = {pid: ProcessEnd(pid, 40.0, 0) for pid in (100, 101)}
    (written,) = to_json([job], ["train"], CommandEnd(9, 2, 0.0, 60.0, ends=ends))["jobs"]
    assert (written["verdict"], written["failure"]) == ("healthy", None)


def test_the_summary_has_every_step_and_their_median() -> None:
    job = JobSummary("job")
    assert to_json([job], ["train"], FINISHED)["step_seconds"] == []
    assert "not measured" in shown(job)
    job.step_times.add(np.array([0.1, 0.4, 0.2, np.nan]))
    written = to_json([job], ["train"], FINISHED)
    assert written["step_seconds"] == [0.1, 0.4, 0.2]
    assert written["jobs"][0]["median_step_seconds"] == 0.2
    assert "200.0 ms (median of steps)" in shown(job)


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause("forward", (FRAME,)), "look at dataset.py:88"),
        (Cause("input", (FRAME,)), "load the data of rank 1 faster: look at dataset.py:88"),
        (Cause("starved"), "CPU limits"),
        (Cause("throttled"), "nvidia-smi"),
        (Cause(bound=DEVICE), "nvidia-smi"),
        (Cause(), "--capture-when-slow"),
    ],
)
def test_the_advice_follows_the_cause(cause: Cause, expected: str) -> None:
    assert expected in advice(slow(1, 1.0, cause))


def test_a_network_that_explains_slow_communication_has_its_own_advice() -> None:
    cause = Cause("network", (), "node-1: mlx5_0 port 1: 412 symbol errors a minute, usually none")
    assert "its cable" in advice(Verdict(Kind.SLOW_COMMUNICATION, "", cause=cause))


def test_every_finding_has_advice_and_a_healthy_job_none() -> None:
    assert all(bool(advice(Verdict(kind, "", culprits=(0,)))) is kind.is_finding for kind in Kind)


def test_names_of_the_job_cannot_steer_the_terminal() -> None:
    frame = FrameSeen("[link=https://evil.example]f[/b]\x1b]0;owned\x07", "/x/[red]a.py", 1, 0.5, 0.5, "forward")
    job = JobSummary("[bold]job\x1b[2J")
    job.add(state(slow(1, 5.0, Cause("forward", (frame,))), 1.0))
    text = shown(job)
    assert "\x1b]0;" not in text and "\x1b[2J" not in text and "\x1b]8;" not in text
    assert "[link=https://evil.example]f[/b]" in text


def test_the_card_shows_the_pace_of_an_asynchronous_run() -> None:
    job = JobSummary("job")
    job.add(state(replace(slow(1, 5.0), asynchronous="asynchronous: 2 workers, 40 updates/s", impact_ratio=0.2), 1.0))
    text = shown(job)
    assert "asynchronous: 2 workers, 40 updates/s" in text
    assert "costs 20% of the run's updates" in text and "of the job," not in text


def test_the_card_shows_the_link_by_its_fastest_member() -> None:
    told = state(HEALTHY, 1.0)
    for window, gigabytes in zip(told.windows, (120, 485.1), strict=True):
        rate = CollectiveRate(number=7, size=8, function="all_reduce", algorithm="ring", protocol="simple")
        rate.bus_bytes_per_second = gigabytes * 1e9
        window.collectives.extend([rate, CollectiveRate(number=8, function="send")])
    job = JobSummary("job")
    assert "bus bandwidth" not in shown(job)
    job.add(told)
    assert "bus bandwidth of all_reduce 485 GB/s (8 ranks, ring, simple)" in shown(job)


def test_the_card_says_whose_plugin_timed_nccl() -> None:
    told = state(HEALTHY, 1.0)
    told.windows[1].wait_source = INSPECTOR
    rate = CollectiveRate(number=7, size=8, function="all_reduce", algorithm="other", protocol="other")
    rate.bus_bytes_per_second = 5e9
    told.windows[1].collectives.append(rate)
    job = JobSummary("job")
    job.add(told)
    assert "read from NCCL Inspector's files" in shown(job)
    assert "all_reduce 5 GB/s (8 ranks)" in shown(job)  # Inspector knows no algorithm


def test_the_card_says_that_nccl_was_not_timed() -> None:
    told = state(HEALTHY, 1.0)
    for window in told.windows:
        window.problems.extend(["stacks: py-spy could not read memory", OTHER_PLUGIN])
    job = JobSummary("job")
    job.add(told)
    assert " ".join(shown(job).split()).count("NCCL's own times are not measured") == 1


@pytest.mark.parametrize("width", [None, 60])
def test_numbers_are_whole_without_a_terminal_and_on_narrow_ones(width: int | None) -> None:
    job = JobSummary("job")
    cause = Cause("forward", (FRAME,), "46731.4 ms a step more forward than its peers, " + 20 * "and so on ")
    long = state(slow(1, 5.0, cause), 1.0, step_seconds=1234567.8910)
    for window in long.windows:
        window.identity.pid = 4194303
        window.wait_seconds.mean, window.gpu.gpus = 987654.3, 1
        window.figures.update({"input_seconds": 1000.5, "run_ahead_seconds": 2000.5, "mfu_ratio": 0.5})
    job.add(long)
    job.step_times.add(np.array([1234567.8910]))
    console = Terminal(file=io.StringIO(), width=width)
    console.print(card([job], FINISHED, probe=True, columns=console.columns))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    text = " ".join(" ".join(lines).split())
    assert "…" not in text and "1234567891.0 ms" in text and "46731.4 ms a step more forward" in text
    header = next(line.split() for line in lines if line.split()[:1] == ["rank"])
    if width is None:
        shown = ["rank", "pid", "step", "self", "wait", "input", "ahead", "MFU", "CPU", "GPU", "tensor"]
        assert header == shown and "987654300.0 ms" in text
        assert not any(line.endswith(" ") for line in lines)
    else:
        assert {"rank", "step", "self"} <= set(header) and max(map(len, lines)) <= width


def test_evidence_in_the_headline_is_not_repeated() -> None:
    job = JobSummary("job")
    job.add(state(slow(1, 5.0, Cause("device", (), "58.1 ms a step more on its device", DEVICE)), 1.0))
    text = shown(job)
    assert text.count("58.1 ms a step more on its device") == 1


def test_without_a_rank_the_card_says_why() -> None:
    assert "no rank was seen" in shown()
