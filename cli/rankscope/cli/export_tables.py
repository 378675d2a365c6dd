"""The tables of `rankscope export`. A table is one declaration: the queries, the Parquet schema, schema.json and the
tables of docs/export.md follow from it.

A table has a row for each series of `rows` and each step of time. Columns are labels of these series, their value, or
the values of other queries with the same `key`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from rankscope.analysis.fleet.facts import RUN_LABELS
from rankscope.operator.fleet_history import RATE_SECONDS

# Of tables and columns. A column that is added does not change it; one that is removed or means something else does.
VERSION: Final = 1


class Type(Enum):
    """As docs/export.md names them."""

    TIMESTAMP = "timestamp"
    STRING = "string"
    INTEGER = "int32"
    NUMBER = "double"
    BOOLEAN = "boolean"


class Source(Enum):
    """Where the values of a column are from; `given` of the column says which."""

    TIME = "the time of the row"
    LABEL = "a label of the row's series"
    VALUE = "the value of the row's series"
    QUERY = "the value of another query"
    # Of a table with a row per series and day:
    FIRST = "the first time of the day"
    LAST = "the last time of the day"
    SEEN = "steps of the day, as seconds"


@dataclass(frozen=True)
class Column:
    name: str
    type: Type
    source: Source
    help: str
    given: str = ""  # the label, or the PromQL; of series that differ in other labels than the key, the largest counts
    unit: str = ""


@dataclass(frozen=True)
class Table:
    name: str
    help: str
    rows: str  # PromQL. $range is a time for rates, $step the length of a step, both in seconds
    key: tuple[str, ...]  # labels that the series of QUERY columns have, too
    columns: tuple[Column, ...]
    is_daily: bool = False  # a row per series and day

    def of(self, *sources: Source) -> list[Column]:
        return [column for column in self.columns if column.source in sources]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(column.given for column in self.of(Source.LABEL))

    def query(self, column: Column | None, step_seconds: int) -> str:
        """PromQL of the rows, or of a QUERY column."""
        promql = self.rows if column is None else f"max by ({', '.join(self.key)}) ({column.given})"
        span = max(RATE_SECONDS, 3 * step_seconds)
        return promql.replace("$range", f"{span}s").replace("$step", str(step_seconds))


def description(tables: Sequence[Table], step_seconds: int) -> dict[str, Any]:
    """What schema.json holds."""
    return {
        "format": "rankscope export",
        "version": VERSION,
        "step_seconds": step_seconds,
        "tables": {
            table.name: {
                "help": table.help,
                "columns": [
                    {"name": one.name, "type": one.type.value, "unit": one.unit, "help": one.help}
                    for one in table.columns
                ],
            }
            for table in tables
        },
    }


_TIME: Final = Column("time", Type.TIMESTAMP, Source.TIME, "Time of the sample.", unit="UTC")


def _label(name: str, text: str, label: str = "") -> Column:
    return Column(name, Type.STRING, Source.LABEL, text, label or name)


def _value(name: str, unit: str, promql: str, text: str) -> Column:
    return Column(name, Type.NUMBER, Source.QUERY, text, promql, unit)


def _flag(name: str, promql: str, text: str) -> Column:
    return Column(name, Type.BOOLEAN, Source.QUERY, text, promql)


_RUN: Final = (
    _label("cluster", "Label that Prometheus gives a cluster; empty if there is one."),
    _label("namespace", "Kubernetes namespace of the run; empty outside Kubernetes.", "run_namespace"),
    _label("run", "Name of the run."),
)
_VERDICT: Final = _label("verdict", "Kind of verdict, as in docs/concepts.md.")
_RANK: Final = Column("rank", Type.INTEGER, Source.LABEL, "Rank in the run.", "rank")
_BY_RUN: Final = ", ".join(RUN_LABELS)
_RANK_LABELS: Final = (*RUN_LABELS, "rank")
_BY_RANK: Final = ", ".join(_RANK_LABELS)
_GPU_LABELS: Final = ("cluster", "node", "gpu")


def _places(selected: str) -> str:
    """Node and GPU of ranks; for a moment, a rank that was restarted has two series."""
    return f"topk by ({_BY_RANK}) (1, group by ({_BY_RANK}, node, gpu) ({selected}))"


_SHORTEST: Final = f"{RATE_SECONDS // 60} minutes"


def _cause(name: str, cause: str, text: str) -> Column:
    total = 'rate(rankscope_rank_cause_seconds_total{cause=~"self|wait"}[$range])'
    share = f'rate(rankscope_rank_cause_seconds_total{{cause="{cause}"}}[$range])'
    return _value(name, "ratio", f"sum by ({_BY_RANK}) ({share}) / sum by ({_BY_RANK}) ({total})", text)


def _throttled(name: str, reasons: str, text: str) -> Column:
    return _value(name, "ratio", f'rate(rankscope_gpu_throttled_seconds_total{{reason=~"{reasons}"}}[$range])', text)


_PROGRAM_LABELS: Final = (*RUN_LABELS, "world_size", "team", "user", "image", "command")
RUNS: Final = Table(
    "runs",
    "A row per run and day; two if the run was restarted with another program or size.",
    f"group by ({', '.join(_PROGRAM_LABELS)}) (rankscope_job_info)",
    RUN_LABELS,
    (
        *_RUN,
        _label("team", "Who the run is for."),
        _label("user", "Who started it."),
        _label("image", "Container image."),
        _label("command", "Program and script of the lowest rank, without arguments."),
        Column("world_size", Type.INTEGER, Source.LABEL, "Ranks of the run.", "world_size", "ranks"),
        Column("first_seen", Type.TIMESTAMP, Source.FIRST, "First sample of the day.", unit="UTC"),
        Column("last_seen", Type.TIMESTAMP, Source.LAST, "Last sample of the day.", unit="UTC"),
        Column("seen_seconds", Type.NUMBER, Source.SEEN, "Samples of the day times their distance.", unit="s"),
    ),
    is_daily=True,
)
VERDICTS: Final = Table(
    "verdicts",
    "The verdict on each run and its figures, healthy runs included.",
    f"group by ({_BY_RUN}, verdict, severity, confidence) (rankscope_job_verdict)",
    RUN_LABELS,
    (
        _TIME,
        *_RUN,
        _VERDICT,
        _label("severity", "none, warning or alarm."),
        _label("confidence", "low or high."),
        _value(
            "impact_ratio", "ratio", "rankscope_job_impact_ratio", "Share of the run's time that the finding costs."
        ),
        _value("step_seconds", "s", "rankscope_job_step_seconds", "Step time, median of the ranks."),
        _value("mfu_ratio", "ratio", "rankscope_job_mfu_ratio", "MFU, median of the ranks."),
        _value("mfu_target_ratio", "ratio", "rankscope_job_mfu_target_ratio", "MFU below which low_mfu is raised."),
        _value(
            "exposed_communication_ratio",
            "ratio",
            "rankscope_job_exposed_communication_ratio",
            "Share of the step spent waiting on others, mean of the ranks.",
        ),
        _value("ranks_expected", "ranks", 'rankscope_job_ranks{state="expected"}', "Ranks of the run."),
        _value("ranks_reporting", "ranks", 'rankscope_job_ranks{state="reporting"}', "Ranks that report."),
    ),
)
_CULPRIT_LABELS: Final = (*_RANK_LABELS, "verdict", "node", "phase", "bound")
_CULPRITS: Final = f"group by ({', '.join(_CULPRIT_LABELS)}) (rankscope_job_culprit)"
CULPRITS: Final = Table(
    "culprits",
    "The ranks that verdicts name, at most 16 of a run at a time.",
    f"{_CULPRITS} * on ({_BY_RANK}) group_left (gpu)"
    f" {_places(f'rankscope_rank_info and on ({_BY_RANK}) rankscope_job_culprit')} or on ({_BY_RANK}) {_CULPRITS}",
    _CULPRIT_LABELS,
    (
        _TIME,
        *_RUN,
        _VERDICT,
        _RANK,
        _label("node", "Node of the rank."),
        _label("gpu", "UUID of its GPU; empty if it is not known, or if there are several."),
        _label("phase", "Phase of the step that is slow."),
        _label("bound", "host or device, where steps are timed on a GPU."),
    ),
)
LOSSES: Final = Table(
    "losses",
    f"What findings cost. A row is a step that ends at its time; rates are taken over {_SHORTEST}, or three steps if"
    " that is longer. Without rows that are 0.",
    f"max by ({_BY_RUN}, verdict) (rate(rankscope_job_lost_gpu_seconds_total[$range])) * $step > 0",
    (*RUN_LABELS, "verdict"),
    (
        _TIME,
        *_RUN,
        _VERDICT,
        Column("lost_gpu_seconds", Type.NUMBER, Source.VALUE, "GPU time lost in the step.", unit="GPU-s"),
    ),
)
RANKS: Final = Table(
    "ranks",
    "Each rank. Null where it was not measured.",
    _places("rankscope_rank_info"),
    _RANK_LABELS,
    (
        _TIME,
        *_RUN,
        _RANK,
        _label("node", "Node of the rank."),
        _label("gpu", "UUID of its GPU; empty if it is not known, or if there are several."),
        _value("step_seconds", "s", 'rankscope_rank_step_seconds{stat="p50"}', "Median step time."),
        _value(
            "self_seconds", "s", 'rankscope_rank_self_seconds{stat="p50"}', "The same less waiting: the one to compare."
        ),
        _value("mfu_ratio", "ratio", "rankscope_rank_mfu_ratio", "Model FLOPs utilization."),
        _cause("wait_ratio", "wait", f"Share of the time spent waiting on others, over {_SHORTEST}."),
        _cause("input_ratio", "input", f"Share of the time spent waiting for input, over {_SHORTEST}."),
        _value(
            "run_ahead_seconds", "s", "rankscope_rank_run_ahead_seconds", "How far the host is ahead of the device."
        ),
        _flag("stalled", "rankscope_rank_stalled", "Whether it makes no progress."),
        _value("cpu_ratio", "cores", "rate(rankscope_rank_cpu_seconds_total[$range])", f"CPU use, over {_SHORTEST}."),
        _value("resident_bytes", "B", "rankscope_rank_resident_bytes", "Memory of the process."),
        _value(
            "device_peak_bytes",
            "B",
            'rankscope_rank_device_memory_bytes{kind="peak_allocated"}',
            "Peak that torch's allocator had.",
        ),
    ),
)
GPUS: Final = Table(
    "gpus",
    "Each GPU or MIG instance, used or not. Null where it was not measured.",
    f"topk by ({', '.join(_GPU_LABELS)}) (1, group by ({', '.join(_GPU_LABELS)}, index, name) (rankscope_gpu_info))",
    _GPU_LABELS,
    (
        _TIME,
        _RUN[0],
        _label("node", "Node of the GPU."),
        _label("gpu", "Its UUID."),
        Column("index", Type.INTEGER, Source.LABEL, "Its number on the node.", "index"),
        _label("name", "Product name."),
        _value("utilization_ratio", "ratio", "rankscope_gpu_utilization_ratio", "Share of the time with any kernel."),
        _value("memory_used_bytes", "B", 'rankscope_gpu_memory_bytes{kind="used"}', "Memory that processes use."),
        _value("memory_total_bytes", "B", 'rankscope_gpu_memory_bytes{kind="total"}', "Memory of the GPU."),
        _value("power_watts", "W", "rankscope_gpu_power_watts", "Power that it draws."),
        _value("temperature_celsius", "°C", "rankscope_gpu_temperature_celsius", "Temperature."),
        _value("sm_clock_hertz", "Hz", 'rankscope_gpu_clock_hertz{clock="sm"}', "Clock of the multiprocessors."),
        _value("sm_active_ratio", "ratio", "rankscope_gpu_sm_active_ratio", "Multiprocessors with a resident warp."),
        _value(
            "tensor_active_ratio",
            "ratio",
            'rankscope_gpu_tensor_active_ratio{pipe="any"}',
            "Cycles of a busy tensor pipe.",
        ),
        _throttled("power_throttled_ratio", "power_cap|hw_power_brake", f"Time throttled by power, over {_SHORTEST}."),
        _throttled("thermal_throttled_ratio", "sw_thermal|hw_thermal", f"Time throttled by heat, over {_SHORTEST}."),
        _value(
            "xid_errors", "errors", "sum without (xid) (rankscope_gpu_xid_errors_total)", "XIDs since the daemon began."
        ),
        _flag("shared", "rankscope_gpu_shared", "Whether several ranks use it."),
    ),
)
TABLES: Final = (RUNS, VERDICTS, CULPRITS, LOSSES, RANKS, GPUS)
