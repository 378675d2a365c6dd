"""The cases of tests/verdict_cases.py as the daemons would export them, for promtool."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rankscope.analysis.verdicts.verdict import Kind
from tests.verdict_cases import CASES, Case, Phase, Rank

SCRAPE_SECONDS = 15
# What Prometheus adds to every series of a target, and what it adds to recorded ones where it enforces a namespace.
TARGET = 'job="rankscope/daemon",namespace="monitoring",pod="daemon-x",instance="10.0.0.1:9464"'
ENFORCED = {"namespace": "monitoring"}
# The past of ten minutes, and what lasts longer than any of these alerts waits.
PHASES_SCRAPES = (40, 72)
ALERTS = {
    Kind.SLOW_RANK: "RankscopeStragglerRank",
    Kind.SLOW_STAGE: "RankscopeSlowStage",
    Kind.SLOW_COMMUNICATION: "RankscopeSlowCommunication",
    Kind.INPUT_BOUND: "RankscopeInputBound",
    Kind.LOW_MFU: "RankscopeLowMfu",
}


def promtool_test() -> dict[str, Any]:
    """All jobs at once: one test of a promtool file."""
    series = [{"series": name, "values": values} for case in CASES for name, values in _series(case)]
    found = f'ALERTS{{alertstate="firing", alertname=~"{"|".join(ALERTS.values())}"}}'
    expected = [{"labels": labels, "value": 1} for case in CASES for labels in _alerts(case)]
    check = {
        "expr": f"group by (run_namespace, run, alertname, rank, pipeline) ({found})",
        "eval_time": f"{(sum(PHASES_SCRAPES) - 1) * SCRAPE_SECONDS}s",
        "exp_samples": expected,
    }
    return {"name": "cases", "interval": f"{SCRAPE_SECONDS}s", "input_series": series, "promql_expr_test": [check]}


def _alerts(case: Case) -> Iterator[str]:
    if case.finding is None:
        return
    run = f'run_namespace="cases", run="{case.name}", alertname="{ALERTS[case.finding]}"'
    if case.finding is Kind.SLOW_RANK:
        yield from (f'{{{run}, rank="{rank}"}}' for rank in case.culprits)
    else:
        yield f'{{{run}, pipeline="{case.stage}"}}' if case.stage is not None else f"{{{run}}}"


def _series(case: Case) -> Iterator[tuple[str, str]]:
    """Every job has its past: the same, where the case gives no other."""
    phases = (case.before or case.now, case.now)
    for rank in range(len(case.now.ranks)):
        yield from _rank_series(case, rank, phases)
    if case.mfu_target is not None:
        target = (case.mfu_target, case.mfu_target)
        yield f'rankscope_job_mfu_target_ratio{{run_namespace="cases",run="{case.name}",{TARGET}}}', _gauge(target)


def _rank_series(case: Case, rank: int, phases: tuple[Phase, Phase]) -> Iterator[tuple[str, str]]:
    now = case.now.ranks[rank]
    who = f'run_namespace="cases",run="{case.name}",rank="{rank}",{TARGET}'
    pipeline = "" if now.stage < 0 else f',pipeline="{now.stage}"'
    yield f'rankscope_rank_info{{{who},world_size="{len(case.now.ranks)}"{pipeline}}}', _gauge((1, 1))

    def each(of: str) -> tuple[float, float]:
        first, second = (_measured(phase, phase.ranks[rank])[of] for phase in phases)
        return first, second

    yield f'rankscope_rank_self_seconds{{{who},stat="p50"}}', _gauge(each("self"))
    yield f'rankscope_rank_step_seconds{{{who},stat="p50"}}', _gauge(each("step"))
    if now.on_device:
        yield f"rankscope_rank_run_ahead_seconds{{{who}}}", _gauge(each("run_ahead"))
    if now.mfu is not None:
        yield f"rankscope_rank_mfu_ratio{{{who}}}", _gauge((now.mfu, now.mfu))
    steps = tuple(1 / step for step in each("step"))
    yield f"rankscope_rank_steps_total{{{who}}}", _counter((steps[0], steps[1]))
    for name, of in (("run_delay", "starved"), ("throttled", "nothing"), ("stopped", "nothing")):
        yield f"rankscope_rank_{name}_seconds_total{{{who}}}", _counter(_per_second(each(of), each("step")))
    for cause in ("self", "wait", "communication", "input"):
        seconds = _per_second(each("wait" if cause == "communication" else cause), each("step"))
        yield f'rankscope_rank_cause_seconds_total{{{who},cause="{cause}"}}', _counter(seconds)


def _measured(phase: Phase, rank: Rank) -> dict[str, float]:
    step = phase.step_seconds
    return {
        "step": step,
        "self": rank.self_seconds,
        "wait": step - rank.self_seconds,
        "run_ahead": 0.1 * step,
        "starved": rank.starved,
        "input": rank.input,
        "nothing": 0.0,
    }


def _per_second(seconds: tuple[float, float], step: tuple[float, float]) -> tuple[float, float]:
    return seconds[0] / step[0], seconds[1] / step[1]


def _gauge(values: tuple[float, float]) -> str:
    return " ".join(f"{value:.9g}+0x{count - 1}" for value, count in zip(values, PHASES_SCRAPES, strict=True))


def _counter(per_second: tuple[float, float]) -> str:
    first, second = (SCRAPE_SECONDS * rate for rate in per_second)
    before, now = PHASES_SCRAPES
    return f"0+{first:.9g}x{before - 1} {first * before:.9g}+{second:.9g}x{now - 1}"
