"""One job: who is slow, since when, and where the step goes."""

from __future__ import annotations

from typing import Any

from deploy.grafana import queries
from deploy.grafana.laying_out import JOB, THIS_RUN, Line, choice, dashboard, run_variables, to_node, to_rank
from deploy.grafana.panels import (
    BAD,
    GOOD,
    Panel,
    Query,
    column,
    heat_map,
    linked,
    rows_over_time,
    stat,
    table,
    timeseries,
)
from deploy.grafana.queries import RATE, RUN

THE_JOB = queries.JOB
INFO = f"rankscope_rank_info{{{THE_JOB}}}"


def job() -> dict[str, Any]:
    return dashboard(
        JOB,
        "Rankscope / Job",
        "One training job: its verdict, every rank over time, and where the step goes.",
        [
            *run_variables(),
            choice("rows", "Ranks shown", ["16", "32", "64", "512"]),
        ],
        [
            Line(4, _numbers(), widths=[6, 3, 3, 3, 3, 3, 3]),
            Line(9, [_worst_over_time(), _all_over_time()]),
            Line(7, [_causes(), _path(), _step()]),
            Line(7, [_mfu(), _exposed(), _bandwidth()]),
            Line(7, [_hosts(), _groups()]),
            Line(9, [_ranks()]),
            Line(7, [_phases(), _throttling()]),
        ],
    )


def _numbers() -> list[Panel]:
    step = f'quantile by ({RUN}) (0.5, rankscope_rank_step_seconds{{{THE_JOB},stat="p50"}})'
    mfu = f"avg by ({RUN}) (rankscope_rank_mfu_ratio{{{THE_JOB}}})"
    expected = f'max by ({RUN}) (rankscope_job_ranks{{{THE_JOB},state="expected"}})'
    return [
        stat(
            "Verdict",
            "What the correlation says. No data with daemons alone.",
            Query(f"max by (verdict, severity) (rankscope_job_verdict{{{THE_JOB}}})", "{{verdict}} ({{severity}})"),
            "none",
            show_name=True,
        ),
        stat(
            "Impact",
            "Share of the job's time that would come back without the finding. No data while there is none.",
            Query(f"max(rankscope_job_impact_ratio{{{THE_JOB}}})"),
            "percentunit",
            queries.IMPACT,
            decimals=1,
        ),
        stat(
            "GPU-hours lost",
            "Since the job was first seen.",
            Query(f"sum(max by (verdict) (rankscope_job_lost_gpu_seconds_total{{{THE_JOB}}})) / 3600"),
            "none",
            decimals=2,
        ),
        stat("Step", "Median of the ranks.", Query(queries.judged("step_seconds", step)), "s"),
        stat("MFU", "Model FLOPs utilisation.", Query(queries.judged("mfu_ratio", mfu)), "percentunit", decimals=1),
        stat(
            "Exposed comm.",
            "Share of the step spent waiting for others, mean of the ranks.",
            Query(queries.judged("exposed_communication_ratio", f"avg by ({RUN}) ({queries.wait_ratio()})")),
            "percentunit",
            queries.EXPOSED,
            decimals=1,
        ),
        stat(
            "Ranks missing",
            "Ranks of the world size that no daemon sees. No data with daemons alone.",
            Query(f"{expected} - count by ({RUN}) (group by ({RUN}, rank) ({INFO}))"),
            "none",
            ((None, GOOD), (1, BAD)),
        ),
    ]


def _worst_over_time() -> Panel:
    ratio = queries.self_ratio()
    chosen = f"topk($rows, quantile_over_time(0.9, ({ratio})[$__range:$__interval] @ end()))"
    return rows_over_time(
        "Self time against the cohort, worst ranks",
        "Self time (step less waiting) of a rank divided by the median of its cohort: its pipeline stage, or the job."
        " 100 % is like the others. The ranks that were worst in the time range; click a cell to go to the rank.",
        Query(f"({ratio}) and on ({RUN}, rank) {chosen}", "{{rank}}"),
        "percentunit",
        queries.AGAINST_COHORT,
        [to_rank(THIS_RUN, rank="${__field.labels.rank:percentencode}")],
    )


def _all_over_time() -> Panel:
    # Rows are in the order of their names, so ranks get leading zeros.
    padded = f'label_replace({queries.self_ratio()}, "row", "0000$1", "rank", "(.*)")'
    padded = f'label_replace({padded}, "row", "$1", "row", ".*(.{{5}})")'
    return heat_map(
        "Self time against the cohort, all ranks",
        "The same for every rank, rank 0 on top: a node, a stage or a time that is slow is seen as a block. Green is "
        "below the cohort's median, yellow at it, red half above it.",
        Query(f"max by (row) ({padded})", "{{row}}"),
        "percentunit",
        0.5,
        1.5,
    )


def _causes() -> Panel:
    return timeseries(
        "Where the step goes",
        "Seconds per step, mean of the ranks: self time by part, and waiting for others. Together they are the step."
        " Needs the probe.",
        [Query(queries.seconds_per_step(THE_JOB), "{{cause}}")],
        "s",
        stacked=True,
    )


def _path() -> Panel:
    return timeseries(
        "The critical path of a step",
        "Seconds per step: own work by pipeline stage, the excess of a slow rank over its peers, the bubble of the "
        "pipeline, and communication by kind of group. Together they are the step. Of jobs whose ranks have different "
        "roles, from NCCL's own times.",
        [
            Query(
                f"max by (part, stage, kind) (rankscope_job_step_part_seconds{{{THE_JOB}}})",
                "{{part}} {{stage}}{{kind}}",
            )
        ],
        "s",
        stacked=True,
    )


def _step() -> Panel:
    step = f"rankscope_rank_step_seconds{{{THE_JOB}"
    return timeseries(
        "Step time and self time",
        "The step is the same on every rank, as they wait for each other. Self time tells them apart.",
        [
            Query(f'quantile(0.5, {step},stat="p50"}})', "step"),
            Query(f'max({step},stat="p90"}})', "step, p90"),
            Query(f"max({queries.self_seconds()})", "self, slowest rank"),
            Query(f"quantile(0.5, {queries.self_seconds()})", "self, median"),
            Query(f"min({queries.self_seconds()})", "self, fastest rank"),
        ],
        "s",
    )


def _mfu() -> Panel:
    mfu = f"rankscope_rank_mfu_ratio{{{THE_JOB}}}"
    return timeseries(
        "MFU over time",
        "Model FLOPs utilisation, and the target where one is declared. HFU is estimated from the tensor pipes and "
        "counts recomputation.",
        [
            Query(queries.judged("mfu_ratio", f"avg by ({RUN}) ({mfu})"), "MFU"),
            Query(f"max(rankscope_job_mfu_target_ratio{{{THE_JOB}}})", "target"),
            Query(f"avg({queries.gpus_of_job('rankscope_gpu_estimated_hfu_ratio')})", "HFU, estimated"),
        ],
        "percentunit",
        beside=["target"],
    )


def _exposed() -> Panel:
    wait = queries.wait_ratio()
    return timeseries(
        "Exposed communication",
        "Share of the time that ranks wait for others. What the rank that waits least waits is what communication "
        "itself costs; the rest is waiting for a slow rank.",
        [
            Query(queries.judged("exposed_communication_ratio", f"avg by ({RUN}) ({wait})"), "mean"),
            Query(f"max({wait})", "most"),
            Query(f"min({wait})", "least"),
        ],
        "percentunit",
        thresholds=queries.EXPOSED,
    )


def _hosts() -> Panel:
    ahead = f"rankscope_rank_run_ahead_seconds{{{THE_JOB}}}"
    return timeseries(
        "Device steps, and their hosts",
        "Steps are timed on the device, and hosts enqueue work ahead of it. A slow rank that is least ahead has a late "
        "host; one that is far ahead has a slow device. CUDA only; host time needs metrics_detail = full.",
        [
            Query(f'quantile(0.5, rankscope_rank_step_seconds{{{THE_JOB},stat="p50"}})', "step, on the device"),
            Query(f"quantile(0.5, rankscope_rank_host_seconds{{{THE_JOB}}})", "step, on the host"),
            Query(f"quantile(0.5, {ahead})", "host is ahead by, median"),
            Query(f"min({ahead})", "host is ahead by, least"),
        ],
        "s",
    )


def _groups() -> Panel:
    spans = f'rankscope_rank_group_seconds{{{THE_JOB},kind!="point_to_point"}}'
    return timeseries(
        "Waiting in collectives, by process group",
        "Per step, the most that a member has beyond the least, which is that of the rank that comes last. The eight "
        "groups that wait longest. CUDA only, of ranks without a self time of their own.",
        [
            Query(
                f"topk(8, max by (group, kind) ({spans}) - min by (group, kind) ({spans}))", "{{kind}}, group {{group}}"
            )
        ],
        "s",
    )


def _bandwidth() -> Panel:
    bandwidth = f"rankscope_rank_collective_bus_bandwidth_bytes_per_second{{{THE_JOB}}}"
    return timeseries(
        "Bus bandwidth, by process group",
        "As nccl-tests define it, of the usual collectives of the member that waits least. The eight fastest groups. "
        "From NCCL's own times; groups with fewer bytes need metrics_detail = full.",
        [
            Query(
                f"topk(8, max by (group, function) (quantile_over_time(0.5, {bandwidth}[2m])))",
                "{{function}}, group {{group}}",
            )
        ],
        "Bps",
    )


def _ranks() -> Panel:
    worst = f"topk($rows, {queries.self_ratio()})"
    among = f"and on ({RUN}, rank) {worst}"

    def of_worst(value: str) -> str:
        return f"max by (rank) (max by ({RUN}, rank) ({value}) {among})"

    columns = [
        (Query(f"max by (rank) ({worst})"), "Against cohort"),
        (Query(of_worst(queries.self_seconds())), "Self"),
        (Query(of_worst(queries.wait_ratio())), "Waiting"),
        (Query(of_worst(f"rankscope_rank_mfu_ratio{{{THE_JOB}}}")), "MFU"),
        (Query(of_worst(f"rankscope_rank_seconds_since_step{{{THE_JOB}}}")), "Since step"),
        (Query(of_worst(f"rate(rankscope_rank_run_delay_seconds_total{{{THE_JOB}}}{RATE})")), "Starved"),
        (Query(f"max by (rank, node, run_pod, gpu, pipeline) ({INFO} {among})"), ""),
    ]
    return table(
        "Ranks",
        "Slowest first. Waiting: share of the time it waits for others; the culprit waits least. Starved: share of "
        "the time it could run and got no processor.",
        columns,
        sort_by="Against cohort",
        order=["rank", "node", "run_pod", "gpu", "pipeline", *(name for _, name in columns if name)],
        overrides=[
            linked("rank", to_rank(THIS_RUN), width=80),
            linked("node", to_node()),
            column("Against cohort", "percentunit", queries.AGAINST_COHORT),
            column("Self", "s"),
            column("Waiting", "percentunit"),
            column("MFU", "percentunit"),
            column("Since step", "s", ((None, GOOD), (60, BAD))),
            column("Starved", "percentunit", ((None, GOOD), (0.1, BAD))),
        ],
    )


def _phases() -> Panel:
    return timeseries(
        "Where the stacks are",
        "Share of stack samples by phase, mean of the ranks. There without the probe, too.",
        [Query(f"avg by (phase) (avg_over_time(rankscope_rank_phase_ratio{{{THE_JOB}}}[1m]))", "{{phase}}")],
        "percentunit",
        stacked=True,
        top=1,
    )


def _throttling() -> Panel:
    rate = queries.gpus_of_job(f"rate(rankscope_gpu_throttled_seconds_total{RATE})")
    return timeseries(
        "GPUs held down, by reason",
        "How many of the job's GPUs had their clocks held down. A power cap is usual under full load; heat and "
        "hardware slowdowns are not.",
        [Query(f"sum by (reason) ({rate})", "{{reason}}")],
        "short",
        stacked=True,
    )
