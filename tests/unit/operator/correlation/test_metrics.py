from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from rankscope.analysis.verdicts.verdict import DEVICE, FINDINGS, Cause, Confidence, Kind, Severity, Verdict, headline
from rankscope.analysis.verdicts.windows import FrameSeen
from rankscope.common.metric_table import LABEL_CHARACTERS
from rankscope.operator import metrics
from rankscope.operator.alerts.decision import Result
from rankscope.operator.correlation.correlator import JobState, LostSeconds
from rankscope.operator.metrics import Exporter
from rankscope.v1.identity_pb2 import Program, RankIdentity
from rankscope.v1.window_pb2 import RankWindow
from tests.support.breakdowns import a_breakdown
from tests.unit.operator.correlation.test_correlator import Fleet, tick

HEALTHY = Verdict(Kind.HEALTHY, "all is well")
SLOW = Verdict(
    Kind.SLOW_RANK,
    "rank 1 is slow",
    Severity.ALARM,
    Confidence.HIGH,
    (1,),
    impact_ratio=0.3,
    lost_gpu_seconds=12.0,
    cause=Cause("forward"),
)


def state(verdict: Verdict = HEALTHY, job: str = "j", ranks: int = 4) -> JobState:
    identities = [RankIdentity(rank=rank, node="a", pod="uid", pod_name=f"j-{rank}") for rank in range(ranks)]
    windows = [RankWindow(identity=identity) for identity in identities]
    return JobState(job, ranks, verdict, 0, 0, ranks, 0.1, 0.4, 0.2, tuple(windows))


def scrape(
    *states: JobState, lost: LostSeconds | None = None, mfu_target_ratio: float | None = None, alerts: bool = False
) -> str:
    registry = CollectorRegistry(auto_describe=False)
    totals = (lambda: dict.fromkeys(Result, 1)) if alerts else None
    exporter = Exporter(lambda: states, lost or LostSeconds(), lambda job: mfu_target_ratio, lambda job: 2, totals)
    registry.register(exporter)
    return generate_latest(registry).decode()


def scrape_everything() -> str:
    """Every family there is."""
    frame = FrameSeen("normalize", "model.py", 88, 0.5, 0.5, "forward")
    slow = replace(SLOW, stage=1, cause=Cause("forward", (frame,)))
    return scrape(replace(state(slow), breakdown=a_breakdown(0.3)), mfu_target_ratio=0.4, alerts=True)


def samples(text: str, name: str) -> dict[str, float]:
    """By the labels other than those of the run, which are held against what every run here has."""
    found = {}
    for sample in (sample for family in text_string_to_metric_families(text) for sample in family.samples):
        if sample.name == name:
            labels: Mapping[str, str] = sample.labels
            found[" ".join(f"{key}={labels[key]}" for key in sorted(labels) if key not in ("run", "run_namespace"))] = (
                sample.value
            )
    return found


def test_a_finding_names_rank_place_phase_and_cost() -> None:
    lost = LostSeconds()
    states = (state(SLOW, job="team/j"),)
    lost(states)
    text = scrape(*states, lost=lost, mfu_target_ratio=0.5)
    assert samples(text, "rankscope_job_verdict") == {"confidence=high severity=alarm verdict=slow_rank": 1}
    assert samples(text, "rankscope_job_culprit") == {
        "bound= node=a phase=forward rank=1 run_pod=j-1 verdict=slow_rank": 1
    }
    assert 'rankscope_job_impact_ratio{run="j",run_namespace="team"} 0.3' in text
    lost_seconds = samples(text, "rankscope_job_lost_gpu_seconds_total")
    assert lost_seconds == {f"verdict={kind.value}": 12.0 * (kind is Kind.SLOW_RANK) for kind in FINDINGS}
    assert samples(text, "rankscope_job_ranks") == {"state=expected": 4, "state=reporting": 4}
    assert samples(text, "rankscope_job_mfu_target_ratio") == {"": 0.5}
    assert samples(text, "rankscope_job_exposed_communication_ratio") == {"": 0.2}


def test_a_job_says_what_it_runs_and_for_whom() -> None:
    program = Program(command="python train.py", user="ann", team="vision\x1b[31m", image="i" * 500)
    windows = [RankWindow(identity=RankIdentity(rank=rank)) for rank in (3, 1)]
    windows[1].identity.program.CopyFrom(program)
    (labels,) = samples(scrape(replace(state(), windows=tuple(windows))), "rankscope_job_info")
    image = "i" * (LABEL_CHARACTERS - 1) + "…"
    assert labels == f"command=python train.py image={image} team=vision\ufffd[31m user=ann world_size=4"


def test_a_healthy_job_has_a_pace_without_culprit_or_impact() -> None:
    text = scrape(state())
    assert samples(text, "rankscope_job_step_seconds") == {"": 0.1}
    for absent in ("culprit{", "impact_ratio{", "culprit_stage{", "mfu_target_ratio{"):
        assert f"rankscope_job_{absent}" not in text


def test_a_finding_that_nobody_is_warned_of_accuses_nobody() -> None:
    text = scrape(state(replace(SLOW, severity=Severity.NONE)))
    assert "rankscope_job_culprit{" not in text
    assert "rankscope_job_impact_ratio{" not in text


def test_a_job_that_hangs_has_no_pace() -> None:
    text = scrape(state(replace(SLOW, kind=Kind.HANG)))
    assert samples(text, "rankscope_job_culprit") == {"bound= node=a phase=forward rank=1 run_pod=j-1 verdict=hang": 1}
    assert "rankscope_job_step_seconds{" not in text
    assert "rankscope_job_mfu_ratio{" not in text


def test_the_parts_of_a_step_add_up_to_it() -> None:
    text = scrape(replace(state(SLOW), breakdown=a_breakdown(0.3)))
    parts = samples(text, "rankscope_job_step_part_seconds")
    assert parts == {
        "kind= part=own stage=0": 0.02,
        "kind= part=own stage=1": 0.03,
        "kind= part=excess stage=": 0.3,
        "kind= part=bubble stage=": 0.01,
        "kind=tensor part=communication stage=": 0.0399,
        "kind=global part=communication stage=": 0.0001,
    }
    assert sum(parts.values()) == pytest.approx(a_breakdown(0.3).step_seconds)


def test_communication_is_counted_by_kind_of_group() -> None:
    text = scrape(replace(state(), breakdown=a_breakdown()))
    name = "rankscope_job_communication_"
    assert samples(text, f"{name}bytes_total") == {"kind=tensor": 2.0**36}
    assert samples(text, f"{name}transfer_seconds_total") == {"kind=tensor": 51.2}
    assert samples(text, f"{name}exposed_seconds_total") == {"kind=tensor": 40.9}
    assert samples(text, f"{name}bus_bandwidth_bytes_per_second") == {"kind=tensor": 80e9}


def test_a_job_judged_by_sums_or_hanging_has_no_parts() -> None:
    hanging = replace(state(replace(SLOW, kind=Kind.HANG)), breakdown=a_breakdown())
    assert "rankscope_job_step_part_seconds{" not in scrape(state()) + scrape(hanging)
    assert "rankscope_job_communication_" not in scrape(state())


def test_a_culprit_that_stopped_reporting_is_still_named() -> None:
    text = scrape(state(replace(SLOW, culprits=(7,))))
    assert samples(text, "rankscope_job_culprit") == {"bound= node= phase=forward rank=7 run_pod= verdict=slow_rank": 1}


def test_the_line_of_a_finding_is_exported_bounded_and_printable() -> None:
    def lines(verdict: Verdict) -> dict[str, float]:
        return samples(scrape(state(verdict)), "rankscope_job_source_line")

    def at(function: str, **cause: str) -> Verdict:
        frames = tuple(
            FrameSeen(name, "/home/ann/secret/model.py", 88, 0.5, 0.5, "forward") for name in (function, "g")
        )
        return replace(SLOW, cause=replace(Cause("forward", frames), **cause))

    assert lines(at("normalize")) == {"line=model.py:88 (normalize)": 1}
    assert "model.py:88 (normalize" in headline(at("normalize"))
    (hostile,) = lines(at("\x1b[31m\n" + "f" * 500))
    assert hostile.startswith("line=model.py:88 (\ufffd[31m ") and len(hostile) == len("line=") + LABEL_CHARACTERS
    # There the stack shows where the host waits.
    for elsewhere in ({"bound": DEVICE}, {"phase": "starved"}, {"phase": "throttled"}):
        assert lines(at("normalize", **elsewhere)) == {}
    assert lines(replace(at("normalize"), severity=Severity.NONE)) == lines(SLOW) == lines(HEALTHY) == {}


def test_culprits_and_jobs_are_bounded_with_findings_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "JOBS_SHOWN", 64)
    many = replace(SLOW, culprits=tuple(range(100)))
    assert len(samples(scrape(state(many, ranks=100)), "rankscope_job_culprit")) == metrics.CULPRITS_SHOWN
    healthy = [state(job=f"job-{number}") for number in range(metrics.JOBS_SHOWN + 10)]
    text = scrape(*healthy, state(SLOW, job="slow"))
    assert samples(text, "rankscope_jobs") == {"": metrics.JOBS_SHOWN + 11}
    assert samples(text, "rankscope_jobs_cut") == {"": 11}
    assert 'run="slow"' in next(line for line in text.splitlines() if line.startswith("rankscope_job_culprit"))


def test_names_are_bounded_and_printable_and_lookalikes_share_a_series() -> None:
    text = scrape(state(job="x\n\x1b[31m" + "y" * 500), state(job="x\n\x1b[31m" + "y" * 501))
    runs = {s.labels["run"] for f in text_string_to_metric_families(text) for s in f.samples if "run" in s.labels}
    assert len(runs) == 1
    run = runs.pop()
    assert len(run) == LABEL_CHARACTERS
    assert run.isprintable()
    assert samples(text, "rankscope_jobs_cut") == {"": 1}


def test_lost_seconds_survive_the_findings_end_and_a_job_restart() -> None:
    fleet, lost = Fleet(), LostSeconds()
    fleet.correlator.listen(lost)
    totals = []
    for number in range(30):
        slow_rank = 1 if number % 12 > 4 else None
        fleet.play(tick(number, slow_rank, incarnation=1 if number < 20 else 2))
        totals.append(lost.of("j"))
    assert totals == sorted(totals)
    # Six windows or so of 2 s with four ranks, half of whose time is lost, each time.
    assert totals[-1] > totals[12] > 10


def test_a_loss_counts_for_the_finding_that_caused_it() -> None:
    lost = LostSeconds()
    for kind, seconds in ((Kind.SLOW_RANK, 5.0), (Kind.SLOW_RANK, 8.0), (Kind.LOW_MFU, 10.0), (Kind.LOW_MFU, 1.0)):
        lost((state(replace(SLOW, kind=kind, lost_gpu_seconds=seconds)),))
    lost((state(HEALTHY),))
    totals = lost.by_verdict("j")
    assert {kind: seconds for kind, seconds in totals.items() if seconds} == {Kind.SLOW_RANK: 8.0, Kind.LOW_MFU: 3.0}
    assert set(totals) == set(FINDINGS)
    assert lost.of("j") == 11.0


def test_a_job_that_ended_is_forgotten() -> None:
    lost = LostSeconds()
    lost((state(SLOW),))
    lost(())
    assert lost.of("j") == 0
