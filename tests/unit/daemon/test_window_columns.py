"""The table beside the windows of a message, from the daemon that makes it to the operator that reads it."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.verdicts.figures import MAX_STEP_SECONDS
from rankscope.analysis.verdicts.window_columns import FIGURES, columns, pack, plausible_seconds, unpack
from rankscope.daemon.windows.window import window_columns
from rankscope.operator.correlation.daemon_windows import DaemonMessage
from rankscope.v1.rank_service_pb2 import EncodedColumns, EncodedRanks, WatchRanksResponse, WindowColumns
from rankscope.v1.window_pb2 import GpuUsage, GroupSpan, ProcessUsage, RankWindow, StepStatistics
from tests.unit.daemon import window_makers as make


def row_of(table: WindowColumns, row: int = 0) -> dict[str, float]:
    read = columns(unpack(table.names, table.values, row + 1))[:, row]
    return {name: value for name, value in zip(FIGURES, read.tolist(), strict=True) if not np.isnan(value)}


def test_unmeasured_figures_are_not_sent_but_zeros_are() -> None:
    first = RankWindow(
        steps=2, step_seconds=StepStatistics(mean=0.1), figures={"input_seconds": 0.0}, model_flops_per_step=0.5
    )
    table = window_columns([first, RankWindow(steps=0)], make.span())
    assert set(table.names.split()) == {"steps", "step_seconds", "input_seconds", "is_captured"}
    assert row_of(table) == {"steps": 2, "step_seconds": 0.1, "input_seconds": 0.0, "is_captured": 0.0}
    assert row_of(table, 1) == {"steps": 0, "is_captured": 0.0}
    assert (table.start_unix_nanos, table.end_unix_nanos) == (make.span().start_unix_nanos, make.span().end_unix_nanos)


def test_gpu_figures_are_sent_for_a_rank_with_one_gpu() -> None:
    gpu = GpuUsage(
        gpus=1, sm_clock_hertz=1.98e9, memory_used_bytes=141 << 30, throttled_seconds={"power": 0.5, "hw": 9}
    )
    window = RankWindow(gpu=gpu, process=ProcessUsage(cpu_seconds=3.0), end_unix_nanos=2_000_000_000)
    row = row_of(window_columns([window], make.span()))
    assert (row["gpu_sm_clock_hertz"], row["gpu_memory_used_bytes"]) == (1.98e9, 141 << 30)
    assert (row["gpu_throttled_ratio"], row["cpu_ratio"]) == (1.0, 1.5)
    window.gpu.gpus = 2
    assert not any(name.startswith("gpu_") for name in row_of(window_columns([window], make.span())))


def test_only_so_many_groups_are_sent() -> None:
    groups = [GroupSpan(number=n, size=4, kind=2, seconds=0.01 * n, step_seconds=0.1) for n in range(12)]
    row = row_of(window_columns([RankWindow(groups=groups)], make.span()))
    assert [row[f"group{n}_number"] for n in range(8)] == list(range(8)) and "group8_number" not in row
    assert (row["group3_kind"], row["group3_seconds"], row["group3_step_seconds"]) == (2, pytest.approx(0.03), 0.1)


def test_columns_of_older_and_newer_daemons_are_found_by_name() -> None:
    values = np.array([[7.0, 0.1, 3.0], [8.0, 0.2, 4.0]]).tobytes()
    for names in ("of_tomorrow step_seconds steps", "of_tomorrow  step_seconds\tsteps "):
        first, second = columns(unpack(names, values, 2)).T
        assert (first[FIGURES.index("steps")], second[FIGURES.index("step_seconds")]) == (3.0, 0.2)
        assert np.isnan(first[FIGURES.index("self_seconds")])
    assert np.isnan(columns(unpack("", b"", 2))).all()
    assert unpack("steps", b"", 0) == [] and pack([]) == ("", b"")


@pytest.mark.parametrize("seconds", [-1.0, np.inf, -np.inf, 1e300, MAX_STEP_SECONDS * 1.01])
def test_what_cannot_be_is_not_measured_wherever_it_comes_from(seconds: float) -> None:
    assert np.isnan(plausible_seconds(np.array([seconds, np.nan]))).all()
    names, values = pack([{"steps": 3.0, "step_seconds": 0.1, "self_seconds": seconds, "steps_total": seconds * 1e12}])
    (row,) = columns(unpack(names, values, 1)).T
    assert np.isnan(row[FIGURES.index("self_seconds")]) and np.isnan(row[FIGURES.index("steps_total")])
    assert row[FIGURES.index("step_seconds")] == 0.1


def test_the_operators_encoded_messages_have_the_same_field_numbers() -> None:
    for encoded, plain in ((EncodedRanks, WatchRanksResponse), (EncodedColumns, WindowColumns)):
        numbers = {field.name: field.number for field in plain.DESCRIPTOR.fields}
        assert all(numbers[field.name] == field.number for field in encoded.DESCRIPTOR.fields)


@pytest.mark.parametrize(
    ("ranks", "names", "values"),
    [
        (1, "steps", bytes(16)),  # an identity is missing
        (2, "steps", bytes(15)),
        (2, "steps step_seconds", bytes(16)),
        (2, "steps " * 100_000, bytes(1_600_000)),
        (3, "steps", bytes(24)),
    ],
)
def test_a_table_that_does_not_match_the_windows_is_refused(ranks: int, names: str, values: bytes) -> None:
    table = EncodedColumns(ranks=[b""] * ranks, names=names, values=values)
    with pytest.raises(ValueError, match="do not belong together"):
        DaemonMessage("a", EncodedRanks(windows=[b"", b""], columns=table).SerializeToString())


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="no message"):
        DaemonMessage("a", b"\xff\xff")
