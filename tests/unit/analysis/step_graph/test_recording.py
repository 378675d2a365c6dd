"""Recordings as files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rankscope.analysis.collective_kinds import CollectiveKind
from rankscope.analysis.step_graph import recording
from rankscope.analysis.step_graph.path_windows import PathFinder
from rankscope.analysis.step_graph.recording import RecordingError, read_recording
from rankscope.analysis.verdicts.critical_path import judge_path
from rankscope.analysis.verdicts.verdict import Kind

RECORDINGS = Path(__file__).parents[3] / "data" / "nccl"
OPERATION = np.dtype(
    [
        *((name, "<u8") for name in ("start_ns", "stop_ns", "issued_ns", "bytes")),
        *((name, "<u4") for name in ("communicator", "sequence")),
        ("peer", "<i4"),
        ("function", "u1"),
    ]
)
STEP = np.dtype([("sequence", "<u8"), ("end_ns", "<i8")])
Arrays = dict[str, Any]


def arrays() -> Arrays:
    """Two ranks: a step with an all-reduce, and one in which rank 0 sends."""
    reduce, send, receive = (10, 20, 12, 8, 7, 0, -1, 1), (30, 40, 32, 8, 7, 0, 1, 10), (25, 40, 27, 8, 7, 0, 0, 11)
    steps = np.array([(1, 22), (2, 50)], dtype=STEP)
    groups = np.array([[(5 << 32) + 7, 2, 0], [9, 1, 0]], dtype=np.uint64)
    return {
        "nccl_0": np.array([send, reduce], dtype=OPERATION),
        "nccl_1": np.array([reduce, receive], dtype=OPERATION),
        "comms_0": groups,
        "comms_1": np.array([[(5 << 32) + 7, 2, 1]], dtype=np.uint64),
        "steps_0": steps,
        "steps_1": steps,
    }


def write(path: Path, contents: Arrays) -> Path:
    with path.open("wb") as file:
        np.savez_compressed(file, **contents)
    return path


def test_records_become_operations_in_the_order_of_issue(tmp_path: Path) -> None:
    operations = read_recording(write(tmp_path / "job.npz", arrays())).operations
    assert operations.rank.tolist() == [0, 0, 1, 1] and operations.step.tolist() == [1, 2, 1, 2]
    assert operations.kind.tolist()[:2] == [CollectiveKind.ALL_REDUCE, CollectiveKind.SEND]
    assert operations.peer.tolist() == [-1, 1, -1, 0]
    assert [operations.groups[number].ranks for number in operations.group.tolist()] == [(0, 1)] * 4


def test_a_host_ahead_of_its_device_issues_later_steps(tmp_path: Path) -> None:
    contents = arrays()
    ends = np.array([(1, 5000, 22), (2, 6000, 50)], dtype=[*STEP.descr, ("host_end_ns", "<i8")])
    operations = read_recording(write(tmp_path / "job.npz", contents | {"steps_0": ends, "steps_1": ends})).operations
    assert operations.step.tolist() == [1, 2, 1, 2]


def test_operations_of_unknown_communicators_are_left_out(tmp_path: Path) -> None:
    contents = arrays()
    contents["nccl_0"]["communicator"][0] = 12345
    assert len(read_recording(write(tmp_path / "job.npz", contents)).operations) == 3


def _without(name: str) -> Arrays:
    return {key: array for key, array in arrays().items() if key != name}


@pytest.mark.parametrize(
    ("contents", "says"),
    [
        ({"other": np.zeros(3)}, "no array `nccl_R`"),
        (_without("comms_1"), "no communicators of rank 1"),
        (_without("steps_0"), "lacks sequence, end_ns in `steps_0`"),
        (arrays() | {"nccl_0": np.zeros(4)}, "lacks start_ns"),
        (arrays() | {"steps_1": np.zeros(2, dtype=[("sequence", "f8"), ("end_ns", "f8")])}, "integers in `steps_1`"),
        (arrays() | {"comms_0": np.zeros((2, 2), dtype=np.int64)}, "three columns"),
        (arrays() | {"comms_0": np.array([[7, 2, 9]]), "comms_1": np.array([[7, 1, 1]])}, "no communicator"),
        (arrays() | {"comms_0": np.ones((5000, 3), dtype=np.int64)}, "5,000 communicators of rank 0, more than 4,096"),
        (arrays() | {"nccl_0": np.array([None, {}], dtype=object)}, "is not a recording"),
    ],
    ids=[
        "other arrays",
        "no groups",
        "no steps",
        "no fields",
        "no integers",
        "no columns",
        "wild groups",
        "many groups",
        "pickles",
    ],
)
def test_what_is_no_recording_is_refused(tmp_path: Path, contents: Arrays, says: str) -> None:
    with pytest.raises(RecordingError, match=says):
        read_recording(write(tmp_path / "job.npz", contents))


def test_broken_files_are_refused(tmp_path: Path) -> None:
    whole = (RECORDINGS / "pp2_dp2_healthy.npz").read_bytes()
    path = tmp_path / "job.npz"
    for broken in (b"", b"steps", whole[:1000], whole[: len(whole) // 2], whole[1000:]):
        path.write_bytes(broken)
        with pytest.raises(RecordingError, match="is not a recording"):
            read_recording(path)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_BYTES", 1 << 20)
    path = write(tmp_path / "job.npz", arrays() | {"steps_0": np.zeros(1 << 20, dtype=STEP)})
    with pytest.raises(RecordingError, match="holds 16 MiB, more than 1"):
        read_recording(path)


def test_a_recording_without_operations_is_not_called_healthy(tmp_path: Path) -> None:
    contents = {name: table[:0] if name.startswith("nccl") else table for name, table in arrays().items()}
    verdict = judge_path(list(PathFinder().find_all(read_recording(write(tmp_path / "job.npz", contents)).operations)))
    assert verdict.kind is Kind.INSUFFICIENT_DATA


@pytest.mark.parametrize("seed", range(25))
def test_wild_numbers_in_a_recording_are_judged_or_refused(tmp_path: Path, seed: int) -> None:
    random = np.random.default_rng(seed)
    with np.load(RECORDINGS / "pp2_dp2_late_host.npz") as archive:
        contents: Arrays = {name: archive[name][:300] for name in archive.files}
    for _ in range(4):
        table = contents[random.choice(list(contents))]
        column = table[random.choice(table.dtype.names)] if table.dtype.names else table[:, random.integers(3)]
        if column.dtype.kind in "iu":
            limits = np.iinfo(column.dtype)
            column[random.random(len(column)) < 0.5] = (limits.min, 0, 1, limits.max)[random.integers(4)]
    try:
        verdict = judge_path(
            list(PathFinder().find_all(read_recording(write(tmp_path / "job.npz", contents)).operations))
        )
    except RecordingError:
        return
    assert not verdict.is_alarm
