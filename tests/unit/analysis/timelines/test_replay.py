"""The replay, worked out by hand on steps of a few operations."""

from __future__ import annotations

import numpy as np
import pytest

from rankscope.analysis.timelines.layout import lay_out
from rankscope.analysis.timelines.replay import Model, build_model, replay_recorded
from rankscope.analysis.timelines.timeline import JobSizes, read_columns

Row = tuple[int, int, str, float, float]  # stage, dp rank, operation, start, end


def model(*rows: Row, chunks: dict[int, int] | None = None) -> Model:
    stage, data, names, start, end = zip(*rows, strict=True)
    columns = {
        "stage": np.array(stage),
        "dp_rank": np.array(data),
        "step": np.zeros(len(rows), dtype=int),
        "optype": np.array(names),
        "start_ts": np.array(start, dtype=float),
        "duration": np.array(end, dtype=float) - np.array(start, dtype=float),
        "mc": np.array([(chunks or {}).get(row, -1) for row in range(len(rows))]),
    }
    return build_model(lay_out(read_columns(columns), JobSizes()))


def seconds(made: Model) -> float:
    (step,) = replay_recorded(made).tolist()
    return float(step)


def test_a_receive_is_posted_after_the_compute_before_it() -> None:
    made = model(
        (0, 0, "forward-compute", 0, 1),
        (0, 0, "forward-compute", 1, 2),
        (0, 0, "forward-send", 1, 2),
        (0, 0, "forward-send", 2, 13),
        (1, 0, "forward-recv", 0, 2),
        (1, 0, "forward-compute", 2, 12),
        (1, 0, "forward-recv", 12, 13),
        (1, 0, "forward-compute", 13, 14),
    )
    # 1 + transfer 1 + compute 10 + transfer 1 + compute 1: the second input is not fetched during the long compute.
    assert seconds(made) == 14


def test_the_replay_omits_delays_before_operations() -> None:
    made = model((0, 0, "forward-compute", 5, 6), (0, 0, "optimizer", 9, 10), (0, 1, "forward-compute", 0, 1),
                 (0, 1, "optimizer", 1, 2))  # fmt: skip
    assert seconds(made) == 2


def test_a_collective_of_replicas_ends_after_the_last_has_come() -> None:
    made = model(
        (0, 0, "backward-compute", 0, 1),
        (0, 1, "backward-compute", 0, 4),
        (0, 0, "grads-reduce-scatter", 1, 6),
        (0, 1, "grads-reduce-scatter", 4, 6.5),
        (0, 0, "optimizer", 6, 7),
        (0, 1, "optimizer", 6.5, 7.5),
    )
    assert made.parts[0].net_seconds.reshape(-1, 2).tolist() == [[1, 4], [2, 2.5], [1, 1]]
    assert seconds(made) == 7.5


def test_a_transfer_ending_before_its_peer_arrives_takes_no_time() -> None:
    """Clocks of two nodes differ a little."""
    made = model((0, 0, "backward-compute", 0, 1), (0, 1, "backward-compute", 0, 1),
                 (0, 0, "grads-reduce-scatter", 1, 1.5), (0, 1, "grads-reduce-scatter", 1.6, 1.7))  # fmt: skip
    assert made.parts[0].net_seconds[1].ravel().tolist() == pytest.approx([0.0, 0.1])


def test_with_a_separate_all_reduce_the_scatters_overlap_backward() -> None:
    def rows(data: int) -> list[Row]:
        return [
            (0, data, "backward-compute", 0, 4),
            (0, data, "backward-compute", 4, 8),
            (0, data, "grads-reduce-scatter", 4, 7),
            (0, data, "grads-reduce-scatter", 8, 9),
            (0, data, "separate-grads-all-reduce", 9, 10),
            (0, data, "optimizer", 10, 11),
        ]

    chunk = {0: 1, 1: 0, 2: 1, 3: 0, 6: 1, 7: 0, 8: 1, 9: 0}
    # The first scatter hangs on the backward of its chunk, so its 3 s are hidden.
    assert seconds(model(*rows(0), *rows(1), chunks=chunk)) == 11
    plain = [row for row in (*rows(0), *rows(1)) if "separate" not in row[2]]
    assert seconds(model(*plain)) == 8 + 3 + 1 + 1


def test_parameters_are_gathered_before_the_first_forward_of_their_chunk() -> None:
    def rows(data: int) -> list[Row]:
        return [
            (0, data, "params-all-gather", 0, 1),
            (0, data, "params-all-gather", 1, 5),
            (0, data, "forward-compute", 1, 3),
            (0, data, "forward-compute", 5, 6),
        ]

    chunk = {row: row % 2 for row in range(8)}
    assert seconds(model(*rows(0), *rows(1), chunks=chunk)) == 6


def test_clip_waits_for_all_ranks_and_embedding_for_both_ends() -> None:
    made = model(
        *((stage, data, "backward-compute", 0, 1 + stage) for stage in range(3) for data in range(2)),
        *((stage, data, "embedding-grads-all-reduce", 1 + stage, 4) for stage in (0, 2) for data in range(2)),
        *(
            (stage, data, "optimizer-clip-main-grad", 4 if stage != 1 else 2, 5)
            for stage in range(3)
            for data in range(2)
        ),
        *((stage, data, "optimizer", 5, 6) for stage in range(3) for data in range(2)),
    )
    by_name = {
        (n.name, n.stage): took for n, took in zip(made.parts[0].table.nodes, made.parts[0].net_seconds, strict=True)
    }
    assert by_name["embedding-grads-all-reduce", 0].ravel().tolist() == [1, 1]  # since stage 2 came, at 3
    assert by_name["optimizer-clip-main-grad", 1].ravel().tolist() == [1, 1]  # since the ends came, at 4
    # Backward goes from the last stage to the first, also where no sends were written.
    assert seconds(made) == (3 + 2 + 1) + 1 + 1 + 1
