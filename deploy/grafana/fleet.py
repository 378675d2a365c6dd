"""Which jobs lose the most, and to what."""

from __future__ import annotations

from typing import Any

from deploy.grafana import queries
from deploy.grafana.laying_out import (
    FLEET,
    RUN_OF_LINE,
    RUN_OF_ROW,
    Line,
    cluster_variable,
    dashboard,
    namespace_variable,
    to_job,
    to_node,
    to_rank,
)
from deploy.grafana.panels import BAD, GOOD, NOTICE, WARN, Panel, Query, column, linked, stat, table, timeseries, words
from deploy.grafana.queries import JOBS, RUN

SHOWN = 10


def fleet() -> dict[str, Any]:
    return dashboard(
        FLEET,
        "Rankscope / Fleet",
        "Jobs by what they lose. Lost GPU-hours, verdicts and culprits need the correlation (rankscope up, or the "
        "operator); the rest is there with daemons alone.",
        [cluster_variable(), namespace_variable()],
        [
            Line(4, _numbers()),
            Line(9, [_jobs()]),
            Line(7, [_lost(), _verdicts()]),
            Line(7, [_mfu(), _exposed()]),
            Line(7, [_culprits()]),
        ],
        since="now-6h",
    )


def _numbers() -> list[Panel]:
    verdicts = f"rankscope_job_verdict{{{JOBS}}}"
    info = f"rankscope_rank_info{{{JOBS}}}"
    return [
        stat("Jobs", "Training jobs that a daemon sees.", Query(f"count(group by ({RUN}) ({info}))"), "none"),
        stat("Ranks", "Ranks that a daemon sees.", Query(f"count(group by ({RUN}, rank) ({info}))"), "none"),
        stat(
            "Jobs with a finding",
            "Jobs whose verdict warns or alarms. No data without the correlation.",
            Query(f'count(rankscope_job_verdict{{{JOBS},severity!="none"}}) or 0 * count({verdicts})'),
            "none",
            ((None, GOOD), (1, WARN)),
        ),
        stat(
            "GPU-hours lost",
            "In the time range chosen, over all jobs: impact of the findings × ranks × time.",
            Query(f"sum(increase(rankscope_job_lost_gpu_seconds_total{{{JOBS}}}[$__range])) / 3600", instant=True),
            "none",
            ((None, GOOD), (1, NOTICE), (100, WARN)),
            decimals=2,
        ),
        stat(
            "MFU",
            "Mean over all ranks whose FLOPs and peak are known.",
            Query(f"avg(rankscope_rank_mfu_ratio{{{JOBS}}})"),
            "percentunit",
            decimals=1,
        ),
        stat(
            "Ranks not advancing",
            "Ranks that have made no progress for a while: a hang, or a very long step.",
            Query(f"sum(rankscope_rank_stalled{{{JOBS}}})"),
            "none",
            ((None, GOOD), (1, BAD)),
        ),
    ]


def _jobs() -> Panel:
    step = f'quantile by ({RUN}) (0.5, rankscope_rank_step_seconds{{{JOBS},stat="p50"}})'
    mfu = f"avg by ({RUN}) (rankscope_rank_mfu_ratio{{{JOBS}}})"
    exposed = f"avg by ({RUN}) ({queries.wait_ratio(JOBS)})"
    worst = f"max by ({RUN}) ({queries.self_ratio(JOBS)})"
    lost = f"max by ({RUN}, verdict) (rankscope_job_lost_gpu_seconds_total{{{JOBS}}})"
    columns = [
        (f"sum by ({RUN}) ({lost}) / 3600", "Lost GPU-hours"),
        (f"max by ({RUN}, verdict, severity) (rankscope_job_verdict{{{JOBS}}})", ""),
        (f"max by ({RUN}) (rankscope_job_impact_ratio{{{JOBS}}})", "Impact"),
        (queries.judged("mfu_ratio", mfu, JOBS), "MFU"),
        (queries.judged("exposed_communication_ratio", exposed, JOBS), "Exposed comm."),
        (queries.judged("step_seconds", step, JOBS), "Step"),
        (worst, "Worst rank"),
        (f"count by ({RUN}) (group by ({RUN}, rank) (rankscope_rank_info{{{JOBS}}}))", "Ranks"),
    ]
    return table(
        "Jobs, by what they lost",
        "Most expensive first. Lost GPU-hours: since the job was first seen. Impact: share of the time that would come "
        "back now. Worst rank: self time of the slowest rank against the median of its cohort. A job leads to its "
        "dashboard.",
        [(Query(queries.with_place(value)), name) for value, name in columns],
        sort_by="Lost GPU-hours",
        order=["cluster", "run_namespace", "run", "verdict", "severity", *(name for _, name in columns if name)],
        overrides=[
            linked("run", to_job(RUN_OF_ROW), width=300),
            words("severity", queries.SEVERITIES),
            column("Lost GPU-hours", "none", ((None, GOOD), (1, NOTICE), (10, WARN), (100, BAD))),
            column("Impact", "percentunit", queries.IMPACT),
            column("MFU", "percentunit"),
            column("Exposed comm.", "percentunit", queries.EXPOSED),
            column("Step", "s"),
            column("Worst rank", "percentunit", queries.AGAINST_COHORT),
            column("Ranks", "none"),
        ],
    )


def _lost() -> Panel:
    lost = f"max by ({RUN}, verdict) (rate(rankscope_job_lost_gpu_seconds_total{{{JOBS}}}{queries.RATE}))"
    return timeseries(
        "GPUs lost, by job",
        f"How many GPUs' worth of time findings cost at each moment; the {SHOWN} largest.",
        [Query(f"topk({SHOWN}, sum by ({RUN}) ({lost}))", "{{run_namespace}} {{run}}")],
        "short",
        links=[to_job(RUN_OF_LINE)],
    )


def _verdicts() -> Panel:
    return timeseries(
        "Jobs by verdict",
        "How many jobs stand under each verdict.",
        [Query(f"count by (verdict) (rankscope_job_verdict{{{JOBS}}})", "{{verdict}}")],
        "none",
        stacked=True,
    )


def _mfu() -> Panel:
    alone = f"avg by ({RUN}) (rankscope_rank_mfu_ratio{{{JOBS}}})"
    return timeseries(
        "MFU by job, lowest",
        f"The {SHOWN} lowest. Only jobs whose FLOPs and peak are known.",
        [Query(f"bottomk({SHOWN}, {queries.judged('mfu_ratio', alone, JOBS)})", "{{run_namespace}} {{run}}")],
        "percentunit",
        links=[to_job(RUN_OF_LINE)],
    )


def _exposed() -> Panel:
    alone = f"avg by ({RUN}) ({queries.wait_ratio(JOBS)})"
    return timeseries(
        "Exposed communication by job, highest",
        f"Share of the step spent waiting for others, mean of the ranks; the {SHOWN} highest.",
        [
            Query(
                f"topk({SHOWN}, {queries.judged('exposed_communication_ratio', alone, JOBS)})",
                "{{run_namespace}} {{run}}",
            )
        ],
        "percentunit",
        thresholds=queries.EXPOSED,
        links=[to_job(RUN_OF_LINE)],
    )


def _culprits() -> Panel:
    culprits = f"max by ({RUN}, rank, node, run_pod, phase, verdict) (rankscope_job_culprit{{{JOBS}}})"
    return table(
        "Ranks that verdicts name",
        "At most 16 of a job, while a warning or an alarm stands. Empty when nobody is to blame. A rank leads to its "
        "dashboard, a node to its daemon's.",
        [(Query(queries.with_place(culprits)), "")],
        sort_by="run",
        order=["cluster", "run_namespace", "run", "rank", "node", "run_pod", "phase", "verdict"],
        overrides=[
            linked("run", to_job(RUN_OF_ROW), width=300),
            linked("rank", to_rank(RUN_OF_ROW), width=80),
            linked("node", to_node()),
        ],
    )
