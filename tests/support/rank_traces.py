"""Made traces of data-parallel jobs, as torch.profiler would write them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any


def rank_trace(rank: int, world: int, *, slow: float = 1.0, kernel: str = "nvjet_sm90_gemm") -> dict[str, Any]:
    """Five steps of one rank of a data-parallel job whose ranks wait for rank 5 where that is slow."""
    events: list[dict[str, Any]] = []
    at, work, transfer = 1000.0, 2000.0, 200.0
    for step in range(5):
        own = work * (slow if rank == 5 else 1.0) * (1 + 0.004 * ((rank * 7 + step * 3) % 5))
        longest = work * 1.016 * slow
        note = {"Collective name": "allreduce", "Process Group Name": "0", "Group size": world, "Seq": step}
        note |= {"In msg nelems": 1 << 20, "Out msg nelems": 1 << 20, "dtype": "Float", "stream": 20, "device": 0}
        end = at + longest + transfer
        steps = {"name": f"ProfilerStep#{step}", "cat": "user_annotation", "pid": 1, "tid": 1, "ts": at}
        launch = {"name": "cudaLaunchKernel", "cat": "cuda_runtime", "pid": 1, "tid": 1, "ts": at + 1, "dur": 5}
        events += [
            steps | {"dur": longest + transfer},
            launch | {"args": {"correlation": 2 * step + 1}},
            launch | {"ts": at + 8, "args": {"correlation": 2 * step + 2}},
            {"name": kernel, "cat": "kernel", "pid": 0, "tid": 7, "ts": at + 10, "dur": own}
            | {"args": {"stream": 7, "device": 0, "correlation": 2 * step + 1}},
            {"name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL", "cat": "kernel", "pid": 0, "tid": 20}
            | {"ts": at + 10 + own, "dur": end - at - 10 - own, "args": note | {"correlation": 2 * step + 2}},
        ]
        at = end
    about = {"rank": rank, "world_size": world, "backend": "nccl"}
    return {"distributedInfo": about, "traceEvents": [{"ph": "X"} | event for event in events]}


def write_ranks(folder: Path, ranks: int, **options: Any) -> Path:
    """Traces of all ranks of a job, in a directory that may be new."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(ranks):
        text = json.dumps(rank_trace(rank, ranks, **options)).encode()
        (folder / f"rank-{rank}.json.gz").write_bytes(gzip.compress(text, 1))
    return folder
