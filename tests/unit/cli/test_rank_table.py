from __future__ import annotations

import io

from rankscope.cli.job_tables import rank_table
from rankscope.cli.terminal import Terminal
from rankscope.v1.identity_pb2 import RankIdentity
from rankscope.v1.window_pb2 import GpuUsage, RankWindow


def printed(*gpus: GpuUsage | None, stacks: bool = False) -> list[list[str]]:
    windows = [RankWindow(identity=RankIdentity(rank=rank, pid=7), gpu=gpu) for rank, gpu in enumerate(gpus)]
    console = Terminal(width=200, record=True, file=io.StringIO())
    console.print(rank_table(windows, (), stacks=stacks))
    return [line.split("  ") for line in console.export_text().splitlines()]


def test_gpus_have_columns_where_a_rank_has_one() -> None:
    used = GpuUsage(gpus=1, utilization_ratio=0.97, tensor_active_ratio=0.574)
    lines = [
        [cell.strip() for cell in line if cell.strip()] for line in printed(used, None, GpuUsage(gpus=2), stacks=True)
    ]
    assert lines[0][8:10] == ["GPU", "tensor"]
    assert [line[8:10] for line in lines[1:]] == [["97%", "57%"], ["–", "–"], ["2 GPUs", "–"]]
    assert {len(line) for line in lines} == {12}


def test_without_gpus_the_table_is_as_narrow_as_before() -> None:
    assert not any("GPU" in cell for line in printed(None, None) for cell in line)
