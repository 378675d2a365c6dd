"""Windows read many at a time must be what protobuf makes of them one by one, whatever else a daemon sends."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from rankscope.operator.correlation import measuring, reading_windows
from rankscope.operator.correlation.batch_reading import read_batch
from rankscope.operator.correlation.measuring import GROUP_ROW, GROUPS_READ, ROW, measure
from rankscope.operator.correlation.reading_windows import ReadWindows, read_windows
from rankscope.operator.correlation.wire_shapes import read_figures
from rankscope.v1 import window_pb2
from rankscope.v1.identity_pb2 import RankIdentity


class Maker:
    """Windows of all shapes: anything may be missing, zero or huge."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def some(self, made: Any) -> Any:
        return made if self.random.random() < 0.7 else None

    def seconds(self) -> float:
        return self.random.choice((0.0, self.random.random(), 1e300))

    def count(self) -> int:
        return self.random.choice((0, 127, 128, self.random.getrandbits(63), (1 << 64) - 2))

    def nanos(self) -> int:
        return self.random.choice((0, -1, 1_794_744_006_000_000_000, (1 << 62) + 5))

    def numbers_of_groups(self) -> int:
        """Mostly whole groups, of which a probe tells of up to twelve."""
        stray = self.random.choice((0, 0, 0, 1, 6))
        return self.random.choice((0, 0, *range(13))) * len(GROUP_ROW) + stray

    def statistics(self) -> window_pb2.StepStatistics:
        names = ("mean_seconds", "p10_seconds", "p50_seconds", "p90_seconds", "max_seconds")
        return window_pb2.StepStatistics(**{name: self.seconds() for name in names})

    def window(self) -> bytes:
        causes = [field.name for field in window_pb2.CauseSeconds.DESCRIPTOR.fields]
        usage = ("cpu_seconds", "run_delay_seconds", "throttled_seconds", "stopped_seconds")
        window = window_pb2.RankWindow(
            identity=RankIdentity(job="j" * self.random.choice((1, 200)), rank=self.random.randrange(-1, 300)),
            sequence=self.count(),
            start_unix_nanos=self.nanos(),
            end_unix_nanos=self.nanos(),
            steps=self.some(self.count()),
            steps_total=self.some(self.count()),
            last_step_unix_nanos=self.some(self.nanos()),
            step=self.some(self.statistics()),
            wait=self.some(self.statistics()),
            causes=self.some(window_pb2.CauseSeconds(**{name: self.some(self.seconds()) for name in causes})),
            mfu_ratio=self.some(self.seconds()),
            host_seconds=self.some(self.seconds()),
            run_ahead_seconds=self.some(self.seconds()),
            groups=[self.seconds() for _ in range(self.numbers_of_groups())],
            wait_source=self.random.choice(("", "collective spans")),
            process=self.some(
                window_pb2.ProcessUsage(
                    **{name: self.some(self.seconds()) for name in usage},
                    resident_bytes=self.some(self.count()),
                    threads=self.some(7),
                )
            ),
            stacks=self.some(window_pb2.StackSummary(samples=3, phase_shares={"forward": 0.5})),
            problems=["x" * self.random.choice((0, 5, 300, 20_000)) for _ in range(self.random.randrange(3))],
        )
        for name in ("steps", "stall", "gpu"):
            if self.random.random() < 0.5:
                window.sources[name] = self.random.choice(window_pb2.Source.values())
        if self.random.random() < 0.7:
            window.self.CopyFrom(self.statistics())
        return window.SerializeToString()

    def changed(self, window: bytes) -> bytes:
        at, cut = self.random.randrange(len(window) + 1), self.random.randrange(4)
        return window[:at] + self.random.randbytes(self.random.randrange(5)) + window[at + cut :]


def one_by_one(sent: list[bytes]) -> ReadWindows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_windows, "BATCH_LEAST", 1 << 30)
        return read_windows(sent)


def together(sent: list[bytes]) -> ReadWindows:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reading_windows, "BATCH_LEAST", 1)
        return read_windows(sent)


def test_windows_of_all_shapes_are_read_together_as_each_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading_windows, "BATCH_MOST", 50)  # the last one has fewer
    make = Maker(seed=1)
    sent = [make.window() for _ in range(320)]
    assert _rows(together(sent)) == _rows(one_by_one(sent))
    # Or it would be together in name only; real windows differ far less.
    assert read_batch(sent).is_read.mean() > 0.5
    assert read_batch(sent[:1] * 300).is_read.all()


@pytest.mark.parametrize("count", range(13))
def test_groups_are_read_in_the_order_they_are_told_and_as_many_as_a_row_holds(count: int) -> None:
    told = [float(number) for number in range(count * len(GROUP_ROW))]
    window = window_pb2.RankWindow(
        identity=RankIdentity(rank=3), host_seconds=0.5, run_ahead_seconds=0.25, groups=told
    ).SerializeToString()
    assert read_batch([window]).is_read.all()
    for read in (one_by_one, together):
        row = dict(zip(ROW, np.frombuffer(read([window]).measured[0]).tolist(), strict=True))
        assert (row["host_seconds"], row["run_ahead_seconds"]) == (0.5, 0.25)
        found = [row[f"group{number}_{name}"] for number in range(GROUPS_READ) for name in GROUP_ROW]
        known = told[: GROUPS_READ * len(GROUP_ROW)]
        assert found[: len(known)] == known
        assert np.isnan(found[len(known) :]).all()


def test_shapes_that_are_not_remembered_are_read_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = [Maker(seed).window() for seed in range(40)]
    expected = _rows(one_by_one(sent))
    monkeypatch.setattr(measuring, "SHAPES_KEPT", 0)
    monkeypatch.setattr(measuring, "_readers", {})
    assert _rows(one_by_one(sent)) == expected


def test_what_somebody_has_changed_is_no_danger_and_changes_nothing_about_its_neighbours() -> None:
    make = Maker(seed=2)
    honest = [make.window() for _ in range(4)]
    expected = _rows(one_by_one(honest))
    for _ in range(150):
        garbage = [make.changed(window) for window in honest]
        sent = [window for pair in zip(honest, garbage, strict=True) for window in pair]
        assert _rows(together(sent))[::2] == expected


def test_garbage_is_told_from_windows() -> None:
    good = window_pb2.RankWindow(identity=RankIdentity(rank=3), end_unix_nanos=7).SerializeToString()
    garbage = (b"\x0a\xff\xff\xff\xff\x0f", b"\x0a\x05x", b"\x42\x09\x08", b"\xff" * 30, b"\x00\x01")
    for read in (one_by_one, together):
        found = read([good, *garbage, good])
        assert [identity is not None for identity in found.identities] == [True, *[False] * len(garbage), True]
        assert found.ends_unix_nanos[0] == found.ends_unix_nanos[-1] == 7


def test_what_is_not_there_is_not_zero() -> None:
    window = window_pb2.RankWindow(steps=0, step=window_pb2.StepStatistics())
    row = dict(zip(ROW, np.frombuffer(measure(read_figures(window.SerializeToString()))).tolist(), strict=True))
    assert (row["steps"], row["step_mean"]) == (0.0, 0.0)
    absent = ("self_p10", "wait_p10", "self", "steps_total", "last_step_unix_nanos", "run_delay", "mfu_ratio")
    assert all(np.isnan(row[name]) for name in absent)


def _rows(read: ReadWindows) -> list[tuple[object, ...]]:
    return [*zip(read.identities, read.starts_unix_nanos, read.ends_unix_nanos, read.measured, strict=True)]
