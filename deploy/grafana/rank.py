"""Everything about one rank, with its cohort beside it."""

from __future__ import annotations

from typing import Any

from deploy.grafana import queries
from deploy.grafana.laying_out import RANK, THIS_RUN, Line, dashboard, run_variables, to_job, to_node, variable
from deploy.grafana.panels import BAD, GOOD, Panel, Query, linked, numbers_as_words, stat, table, timeseries
from deploy.grafana.queries import ONE_RANK, RATE, gpu_of_rank, gpus_of_job

COHORT, PEERS = "cohort, median", "GPUs of the job, median"


def rank() -> dict[str, Any]:
    return dashboard(
        RANK,
        "Rankscope / Rank",
        "One rank: its time, its process, its GPU. Dashed and grey: the median of the ranks that do the same work.",
        [
            *run_variables(),
            variable("rank", "Rank", f"label_values(rankscope_rank_info{{{queries.JOB}}}, rank)", numeric=True),
        ],
        [
            Line(4, _numbers(), widths=[4, 4, 4, 3, 3, 3, 3]),
            Line(3, [_identity()]),
            Line(7, [_self(), _causes(), _cohort_causes()]),
            Line(7, [_host(), _groups(), _device_memory()]),
            Line(7, [_phases(), _processor()]),
            Line(7, [_activity(), _clock(), _power()], heading="GPU"),
            Line(7, [_throttled(), _temperature(), _gpu_memory()]),
            Line(6, [_errors(), _traffic(), _problems()]),
        ],
    )


def _numbers() -> list[Panel]:
    ratio = queries.of_rank(queries.self_ratio())
    wait = queries.of_rank(queries.wait_ratio())
    return [
        stat(
            "Self time against its cohort",
            "100 % is like the others; a straggler is above 110 % for a while.",
            Query(f"max({ratio})"),
            "percentunit",
            queries.AGAINST_COHORT,
            decimals=0,
        ),
        stat(
            "Step",
            "Median of the last window.",
            Query(f'rankscope_rank_step_seconds{{{ONE_RANK},stat="p50"}}'),
            "s",
        ),
        stat(
            "Waiting for others", "Share of its time. The culprit waits least.", Query(wait), "percentunit", decimals=0
        ),
        stat(
            "Host is ahead by",
            "Of its device, at the furthest point of a step. A slow rank whose host is hardly ahead has a "
            "late host. CUDA only.",
            Query(f"max(rankscope_rank_run_ahead_seconds{{{ONE_RANK}}})"),
            "s",
        ),
        stat("MFU", "In the last window.", Query(f"rankscope_rank_mfu_ratio{{{ONE_RANK}}}"), "percentunit", decimals=1),
        stat(
            "Advancing",
            "Whether it has made progress of late.",
            Query(f"rankscope_rank_stalled{{{ONE_RANK}}}"),
            "none",
            mappings=[numbers_as_words(_0=("yes", GOOD), _1=("no", BAD))],
        ),
        stat(
            "Since the last step",
            "Time since its last step ended.",
            Query(f"rankscope_rank_seconds_since_step{{{ONE_RANK}}}"),
            "s",
            ((None, GOOD), (60, BAD)),
            decimals=1,
        ),
    ]


def _identity() -> Panel:
    labels = ["cluster", "run_namespace", "run", "rank", "node", "run_pod", "gpu", "pid", "pipeline", "tensor", "data"]
    labels += ["world_size"]
    return table(
        "Identity",
        "Where the rank runs, and its place in the parallel layout.",
        [(Query(f"max by ({', '.join(labels)}) (rankscope_rank_info{{{ONE_RANK}}})"), "")],
        sort_by="rank",
        order=labels,
        overrides=[linked("run", to_job(THIS_RUN)), linked("node", to_node())],
    )


def _self() -> Panel:
    own = queries.of_rank(queries.self_seconds())
    cohort = queries.cohort_of_rank(queries.self_seconds())
    return timeseries(
        "Self time",
        "Step less waiting for others. Beside it the median, fastest and slowest of its cohort.",
        [
            Query(f"max({own})", "this rank"),
            Query(f"quantile(0.5, {cohort})", COHORT),
            Query(f"max({cohort})", "cohort, slowest"),
            Query(f"min({cohort})", "cohort, fastest"),
        ],
        "s",
        beside=[COHORT],
    )


def _causes() -> Panel:
    return timeseries(
        "Where its step goes",
        "Seconds per step. Compare with the panel beside: the part that is larger here is the cause. Needs the probe.",
        [Query(queries.seconds_per_step(ONE_RANK), "{{cause}}")],
        "s",
        stacked=True,
    )


def _cohort_causes() -> Panel:
    rate = f'rate(rankscope_rank_cause_seconds_total{{{queries.JOB},cause="%s"}}{RATE})'
    steps = f"rate(rankscope_rank_steps_total{{{queries.JOB}}}{RATE})"

    def median(cause: str) -> str:
        per_step = f"{rate % cause} / ignoring (cause) ({steps} > 0)"
        return f"quantile(0.5, {queries.cohort_of_rank(per_step)})"

    return timeseries(
        "Where its cohort's step goes",
        "The same, median of its cohort.",
        [Query(median(cause), cause) for cause in queries.PARTS.split("|")],
        "s",
        stacked=True,
    )


def _host() -> Panel:
    ahead = queries.cohort_of_rank(f"rankscope_rank_run_ahead_seconds{{{queries.JOB}}}")
    return timeseries(
        "Device step, and its host",
        "Slow and far ahead: the device is slow. Slow and not ahead: the host gives it work too late, so look at the "
        "stacks. Ranks that wait for a slow one are ahead as well. CUDA only; host time needs metrics_detail = full.",
        [
            Query(f'max(rankscope_rank_step_seconds{{{ONE_RANK},stat="p50"}})', "step, on the device"),
            Query(f"max(rankscope_rank_host_seconds{{{ONE_RANK}}})", "step, on the host"),
            Query(f"max(rankscope_rank_run_ahead_seconds{{{ONE_RANK}}})", "host is ahead by"),
            Query(f"quantile(0.5, {ahead})", COHORT),
        ],
        "s",
        beside=[COHORT],
    )


def _groups() -> Panel:
    members = f"rankscope_rank_group_seconds{{{queries.JOB}}}"
    own = f"rankscope_rank_group_seconds{{{ONE_RANK}}}"
    return timeseries(
        "Time in collectives, by process group",
        "Per step, on the device. The rank that comes last has the least; what others have beyond that is waiting, but "
        "for point_to_point, which is not compared. CUDA only, of ranks without a self time of their own.",
        [
            Query(f"max by (group, kind) ({own})", "{{kind}}, group {{group}}"),
            Query(f"min by (group, kind) ({members} and on (group, kind) {own})", "{{kind}}, group {{group}}, least"),
        ],
        "s",
    )


def _phases() -> Panel:
    return timeseries(
        "Where its stacks are",
        "Share of stack samples by phase. There without the probe, too.",
        [Query(f"avg_over_time(rankscope_rank_phase_ratio{{{ONE_RANK}}}[1m])", "{{phase}}")],
        "percentunit",
        stacked=True,
        top=1,
    )


def _processor() -> Panel:
    return timeseries(
        "Processor",
        "Cores used; and the share of the time that it could run but did not, was out of quota, or was stopped.",
        [
            Query(f"rate(rankscope_rank_cpu_seconds_total{{{ONE_RANK}}}{RATE})", "cores used"),
            Query(f"rate(rankscope_rank_run_delay_seconds_total{{{ONE_RANK}}}{RATE})", "waiting for a core"),
            Query(f"rate(rankscope_rank_throttled_seconds_total{{{ONE_RANK}}}{RATE})", "out of quota"),
            Query(f"rate(rankscope_rank_stopped_seconds_total{{{ONE_RANK}}}{RATE})", "stopped"),
        ],
        "short",
    )


def _device_memory() -> Panel:
    return timeseries(
        "Memory of torch's allocator, and of the process",
        "Reserved far above the peak allocated is fragmentation. Device memory: CUDA and the probe only.",
        [
            Query(f"rankscope_rank_device_memory_bytes{{{ONE_RANK}}}", "{{kind}}"),
            Query(f"rankscope_rank_resident_bytes{{{ONE_RANK}}}", "process, resident"),
        ],
        "bytes",
    )


def _activity() -> Panel:
    tensor = 'rankscope_gpu_tensor_active_ratio{pipe="any"}'
    return timeseries(
        "Activity",
        "Utilisation is the time any kernel ran, however small: look at the tensor pipes. They need Hopper or "
        "dcgm-exporter.",
        [
            Query(f"max({gpu_of_rank('rankscope_gpu_utilization_ratio')})", "utilisation"),
            Query(f"max({gpu_of_rank('rankscope_gpu_sm_active_ratio')})", "SM"),
            Query(f"max({gpu_of_rank(tensor)})", "tensor pipes"),
            Query(f"max({gpu_of_rank('rankscope_gpu_dram_active_ratio')})", "memory interface"),
            Query(f"quantile(0.5, {gpus_of_job(tensor)})", f"tensor pipes, {PEERS}"),
        ],
        "percentunit",
        top=1,
        beside=[f"tensor pipes, {PEERS}"],
    )


def _clock() -> Panel:
    clock, limit = 'rankscope_gpu_clock_hertz{clock="sm"}', 'rankscope_gpu_clock_max_hertz{clock="sm"}'
    return _beside_peers("SM clock", "What it runs at, and what it could.", clock, "hertz", ("highest", limit))


def _power() -> Panel:
    limit = "rankscope_gpu_power_limit_watts"
    return _beside_peers(
        "Power", "At its limit the clock falls.", "rankscope_gpu_power_watts", "watt", ("limit", limit)
    )


def _throttled() -> Panel:
    rate = gpu_of_rank(f"rate(rankscope_gpu_throttled_seconds_total{RATE})")
    return timeseries(
        "Clocks held down, by reason",
        "Share of the time. Several reasons may hold at once.",
        [Query(f"max by (reason) ({rate})", "{{reason}}")],
        "percentunit",
    )


def _temperature() -> Panel:
    return _beside_peers(
        "Temperature", "Beside the other GPUs of the job.", "rankscope_gpu_temperature_celsius", "celsius"
    )


def _gpu_memory() -> Panel:
    return timeseries(
        "Memory of the GPU",
        "Used by all processes on it.",
        [Query(f"max by (kind) ({gpu_of_rank('rankscope_gpu_memory_bytes')})", "{{kind}}")],
        "bytes",
    )


def _errors() -> Panel:
    ecc = gpu_of_rank('rankscope_gpu_ecc_errors_total{counter="volatile",kind="uncorrected"}')
    return timeseries(
        "Errors of the GPU",
        "XID errors since the daemon started, uncorrected ECC errors since the driver was loaded, rows of memory "
        "remapped. XIDs have a line once one came.",
        [
            Query(f"max by (xid) ({gpu_of_rank('rankscope_gpu_xid_errors_total')})", "XID {{xid}}"),
            Query(f"max({ecc})", "ECC, uncorrected"),
            Query(f"max by (kind) ({gpu_of_rank('rankscope_gpu_remapped_rows')})", "rows remapped, {{kind}}"),
        ],
        "none",
    )


def _traffic() -> Panel:
    return timeseries(
        "PCIe and NVLink",
        "Traffic at present. Only where the daemon exports GPUs in full detail.",
        [
            Query(f"max by (direction) ({gpu_of_rank('rankscope_gpu_pcie_bytes_per_second')})", "PCIe {{direction}}"),
            Query(
                f"max by (direction) ({gpu_of_rank('rankscope_gpu_nvlink_bytes_per_second')})", "NVLink {{direction}}"
            ),
        ],
        "Bps",
    )


def _problems() -> Panel:
    return table(
        "What could not be measured",
        "Problems that sources have with this rank; docs/troubleshooting.md says what to do. Empty when all is well.",
        [(Query(f"max by (source, kind) (rankscope_rank_problem{{{ONE_RANK}}})"), "")],
        sort_by="source",
        order=["source", "kind"],
    )


def _beside_peers(title: str, description: str, metric: str, unit: str, limit: tuple[str, str] | None = None) -> Panel:
    more = [Query(f"max({gpu_of_rank(limit[1])})", limit[0])] if limit is not None else []
    own, peers = gpu_of_rank(metric), gpus_of_job(metric)
    return timeseries(
        title,
        description,
        [Query(f"max({own})", "this rank"), Query(f"quantile(0.5, {peers})", PEERS), *more],
        unit,
        beside=[PEERS],
    )
