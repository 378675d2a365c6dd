"""Whether the daemons are well, what they cost, and the GPUs of their nodes."""

from __future__ import annotations

from typing import Any

from deploy.grafana.laying_out import DAEMONS, RUN_OF_ROW, Line, cluster_variable, dashboard, to_rank, variable
from deploy.grafana.panels import BAD, GOOD, NOTICE, WARN, Panel, Query, column, linked, stat, table, timeseries
from deploy.grafana.queries import CLUSTER, RATE, RUN, with_place
from rankscope.analysis.verdicts.thresholds import ALERT_THRESHOLDS

NODES = f'{CLUSTER},node=~"$node"'
DAEMON = f'rankscope_build_info{{{NODES},instance=~"$instance"}}'
GPU = f'{NODES},gpu=~"$gpu"'
SHOWN = 10


def daemons() -> dict[str, Any]:
    return dashboard(
        DAEMONS,
        "Rankscope / Daemon health",
        "The daemons themselves: do they see all ranks, stay within their budget, and measure what they should.",
        [
            cluster_variable(),
            variable("node", "Node", f"label_values(rankscope_build_info{{{CLUSTER}}}, node)", several=True),
            variable("instance", "Instance", f"label_values(rankscope_build_info{{{NODES}}}, instance)", several=True),
            variable("gpu", "GPU", f"label_values(rankscope_gpu_info{{{NODES}}}, gpu)", several=True),
        ],
        [
            Line(4, _numbers()),
            Line(7, [_processor(), _budget(), _memory()]),
            Line(7, [_collectors(), _ranks(), _windows()]),
            Line(7, [_problems(), _blind()]),
            Line(7, [_captures(), _after_captures(), _clients()], heading="Captures and clients"),
            Line(8, [_gpus(), _sources()], widths=[16, 8], heading="GPUs of the nodes"),
        ],
    )


def of_nodes(value: str) -> str:
    """`value` of the chosen nodes' daemons with the node as a label, which only `rankscope_build_info` has."""
    return f"({value}) * on (cluster, instance) group_left (node) group by (cluster, instance, node) ({DAEMON})"


def _numbers() -> list[Panel]:
    return [
        stat("Daemons", "That were scraped last time.", Query(f"count(group by (cluster, node) ({DAEMON}))"), "none"),
        stat("Ranks watched", "On the chosen nodes.", Query(f"sum({of_nodes('rankscope_daemon_ranks')})"), "none"),
        stat(
            "Over budget",
            "Daemons that use more CPU than they may; they record stacks less until they do not.",
            Query(f"count({of_nodes('rankscope_daemon_budget_ratio')} > 1) or 0 * count({DAEMON})"),
            "none",
            ((None, GOOD), (1, WARN)),
        ),
        stat(
            "Sources failing",
            "Sources that could not be read in the last window.",
            Query(f"count({of_nodes('rankscope_collector_success')} == 0) or 0 * count({DAEMON})"),
            "none",
            ((None, GOOD), (1, BAD)),
        ),
        stat(
            "Ranks not watched",
            "Found, but over the daemon's limit of ranks.",
            Query(f"sum({of_nodes('rankscope_daemon_ranks_cut')})"),
            "none",
            ((None, GOOD), (1, BAD)),
        ),
        stat(
            "Unreadable processes",
            "That may be ranks: the daemon lacks a right (docs/troubleshooting.md).",
            Query(f"sum({of_nodes('rankscope_daemon_discovery_problems')})"),
            "none",
            ((None, GOOD), (1, WARN)),
        ),
    ]


def _processor() -> Panel:
    return timeseries(
        "CPU of the daemon",
        f"Cores, of the daemon itself and of its stack samplers; the {SHOWN} largest.",
        [Query(f"topk({SHOWN}, {of_nodes(f'rate(rankscope_daemon_cpu_seconds_total{RATE})')})", "{{node}} {{part}}")],
        "short",
    )


def _budget() -> Panel:
    return timeseries(
        "CPU against the budget",
        "Above 100 % stacks are recorded less.",
        [Query(f"topk({SHOWN}, {of_nodes('rankscope_daemon_budget_ratio')})", "{{node}}")],
        "percentunit",
        thresholds=((None, GOOD), (1, WARN)),
    )


def _memory() -> Panel:
    return timeseries(
        "Memory of the daemon",
        f"The {SHOWN} largest.",
        [Query(f"topk({SHOWN}, {of_nodes('rankscope_daemon_resident_bytes')})", "{{node}}")],
        "bytes",
    )


def _collectors() -> Panel:
    return timeseries(
        "Time of the sources",
        "How long each source took for a window, slowest node.",
        [Query(f"max by (collector) ({of_nodes('rankscope_collector_duration_seconds')})", "{{collector}}")],
        "s",
    )


def _ranks() -> Panel:
    return timeseries(
        "Ranks, and how often their stacks are read",
        "Over its budget, a daemon lowers the rate to 5 Hz, and then records each rank for a part of the time only.",
        [
            Query(f"sum({of_nodes('rankscope_daemon_ranks')})", "ranks"),
            Query(f"min({of_nodes('rankscope_daemon_stack_rate_hertz')})", "stacks a second while recorded, lowest"),
            Query(f"min({of_nodes('rankscope_daemon_stack_recorded_ratio')})", "share of time recorded, lowest"),
            Query(f"sum({of_nodes('rankscope_daemon_rank_conflicts')})", "claimed by two processes"),
        ],
        "short",
    )


def _windows() -> Panel:
    return timeseries(
        "Windows",
        "Windows a second, and borders that were passed over because a daemon was late.",
        [
            Query(f"sum({of_nodes(f'rate(rankscope_daemon_windows_total{RATE})')})", "assembled"),
            Query(f"sum({of_nodes(f'rate(rankscope_daemon_windows_skipped_total{RATE})')})", "skipped"),
        ],
        "short",
    )


def _problems() -> Panel:
    problems = f"count by ({RUN}, node, source, kind) ({of_nodes('rankscope_rank_problem')})"
    return table(
        "What could not be measured",
        "Ranks by source and kind of problem; docs/troubleshooting.md says what to do. Empty when all is well.",
        [(Query(problems), "Ranks")],
        sort_by="Ranks",
        order=["cluster", "node", "run_namespace", "run", "source", "kind", "Ranks"],
    )


def _blind() -> Panel:
    blind = f"max by ({RUN}, node, rank) ({of_nodes('rankscope_rank_up == 0')})"
    return table(
        "Ranks nobody could measure",
        "Seen, but no source says anything about them. Empty when all is well.",
        [(Query(with_place(blind)), "")],
        sort_by="node",
        order=["cluster", "node", "run_namespace", "run", "rank"],
        overrides=[linked("rank", to_rank(RUN_OF_ROW))],
    )


def _captures() -> Panel:
    return timeseries(
        "Ranks captured",
        "By what came of it, over ten minutes.",
        [Query(f"sum by (result) ({of_nodes('increase(rankscope_captured_ranks_total[10m])')})", "{{result}}")],
        "short",
    )


def _after_captures() -> Panel:
    return timeseries(
        "Step time after a capture against before",
        "Of the rank that it slowed most. Above 105 % the capture did harm: see TEARDOWN_CUPTI in docs/captures.md. No "
        "data before the first capture.",
        [Query(f"max by ({RUN}) ({of_nodes('rankscope_capture_step_ratio')})", "{{run_namespace}} {{run}}")],
        "percentunit",
        thresholds=((None, GOOD), (ALERT_THRESHOLDS.capture_slowdown_ratio, WARN)),
    )


def _clients() -> Panel:
    return timeseries(
        "Clients",
        "Processes whose libkineto polls, readers of windows, and what was refused or dropped a second.",
        [
            Query(f"sum({of_nodes('rankscope_capture_clients')})", "libkineto"),
            Query(f"sum({of_nodes('rankscope_daemon_watch_readers')})", "readers"),
            Query(f"sum({of_nodes(f'rate(rankscope_daemon_watch_dropped_total{RATE})')})", "dropped"),
            Query(f"sum({of_nodes(f'rate(rankscope_capture_datagrams_refused_total{RATE})')})", "refused"),
        ],
        "short",
    )


def _gpus() -> Panel:
    ecc = f'rankscope_gpu_ecc_errors_total{{{GPU},counter="volatile",kind="uncorrected"}}'
    columns = [
        (Query(f"max by (cluster, node, gpu) (rankscope_gpu_up{{{GPU}}})"), "Up"),
        (Query(f"max by (cluster, node, gpu) (rankscope_gpu_utilization_ratio{{{GPU}}})"), "Utilisation"),
        (Query(f"max by (cluster, node, gpu) (rankscope_gpu_temperature_celsius{{{GPU}}})"), "Temperature"),
        (Query(f"max by (cluster, node, gpu) (rankscope_gpu_power_watts{{{GPU}}})"), "Power"),
        (Query(f"sum by (cluster, node, gpu) (rankscope_gpu_xid_errors_total{{{GPU}}})"), "XIDs"),
        (Query(f"max by (cluster, node, gpu) ({ecc})"), "ECC, uncorrected"),
        (Query(f"max by (cluster, node, gpu) (rankscope_gpu_remapping_pending{{{GPU}}})"), "Needs a reset"),
        (Query(f"max by (cluster, node, gpu, name) (rankscope_gpu_info{{{GPU}}})"), ""),
    ]
    bad = ((None, GOOD), (1, BAD))
    return table(
        "GPUs",
        "With errors first. Up 0: lost, or its source fails. XIDs since the daemon started; the Rank dashboard "
        "tells which.",
        columns,
        sort_by="XIDs",
        order=["cluster", "node", "gpu", "name", *(name for _, name in columns if name)],
        overrides=[
            column("Up", "none", ((None, BAD), (1, GOOD)), width=60),
            column("Utilisation", "percentunit"),
            column("Temperature", "celsius", ((None, GOOD), (80, NOTICE), (87, WARN))),
            column("Power", "watt"),
            column("XIDs", "none", bad),
            column("ECC, uncorrected", "none", bad),
            column("Needs a reset", "none", ((None, GOOD), (1, WARN))),
        ],
    )


def _sources() -> Panel:
    return table(
        "Sources of GPU counters",
        "Nodes by the state of each source.",
        [(Query(f"count by (source, state) ({of_nodes('rankscope_gpu_source_state')})"), "Nodes")],
        sort_by="Nodes",
        order=["source", "state", "Nodes"],
    )
