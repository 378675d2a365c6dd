"""Dumps of a flight recorder as torch writes them, layout by layout."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankscope.analysis.collectives.flight_recorder.catalog import Catalog
from rankscope.analysis.collectives.flight_recorder.dump import read_dump
from rankscope.analysis.collectives.flight_recorder.matching import Analysis, analyze_dumps

# Of torch 2.4, 2.5, …; the newest is that of 2.13.
LAYOUTS = ("2.2", "2.3", "2.4", "2.5", "2.6", "2.7", "2.8", "2.9", "2.10")
_TORCH = "/opt/venv/lib/python3.12/site-packages/torch/distributed"

Record = dict[str, Any]


def frames(function: str, file: str, line: int) -> list[Record]:
    """The most recent frame first, as torch has it."""
    return [
        {"name": "all_reduce", "filename": f"{_TORCH}/distributed_c10d.py", "line": 2810},
        {"name": "wrapper", "filename": f"{_TORCH}/c10d_logger.py", "line": 81},
        {"name": function, "filename": file, "line": line},
        {"name": "main", "filename": "/app/main.py", "line": 7},
    ]


def record(
    sequence: int,
    operation: str = "nccl:all_reduce",
    *,
    group: str = "0",
    description: str = "default_pg",
    sizes: Sequence[Sequence[int]] = ((4,),),
    outputs: Sequence[Sequence[int]] | None = None,
    dtype: str = "Float",
    state: str = "completed",
    retired: bool | None = None,
    is_p2p: bool = False,
    at: tuple[str, str, int] | None = ("train_step", "/app/train.py", 88),
) -> Record:
    written = sizes if outputs is None else outputs
    return {
        **({"frames": frames(*at)} if at else {}),
        "pg_id": 0,
        "process_group": (group, description),
        "thread_name": "python",
        "thread_id": "281473487257632",
        "collective_seq_id": 0 if is_p2p else sequence,
        "p2p_seq_id": sequence if is_p2p else 0,
        "op_id": sequence,
        "profiling_name": operation,
        "time_created_ns": 1794813351374132478,
        "duration_ms": 1.5,
        "input_sizes": [list(shape) for shape in sizes],
        "input_dtypes": [dtype for _ in sizes],
        "output_sizes": [list(shape) for shape in written],
        "output_dtypes": [dtype for _ in written],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": 1794813351374132500 if state == "completed" else None,
        "retired": state == "completed" if retired is None else retired,
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
    }


def content(
    records: Iterable[Record],
    groups: Mapping[str, Iterable[int]],
    *,
    layout: str = "2.10",
    first_record: int = 0,
    record_ids: Sequence[int] | None = None,
) -> dict[str, Any]:
    minor = int(layout.split(".")[1])
    entries = []
    for number, one in enumerate(records):
        entry = {"record_id": record_ids[number] if record_ids else first_record + number, **one}
        left_out = ["thread_name", "thread_id"] if minor < 10 else []
        left_out += ["timeout_ms"] if minor < 3 else []
        if minor < 3:
            entry |= {"input_dtypes": ["float" for _ in entry["input_sizes"]]}
            entry |= {"output_dtypes": ["float" for _ in entry["output_sizes"]]}
        entries.append({key: value for key, value in entry.items() if key not in left_out})
    names = {entry["process_group"][0]: entry["process_group"][1] for entry in entries}
    dump: dict[str, Any] = {
        "version": layout,
        "pg_config": {
            name: {"name": name, "desc": names.get(name, "undefined"), "ranks": str(list(ranks))}
            for name, ranks in groups.items()
        },
        "entries": entries,
    }
    if minor >= 3:
        status = {"last_enqueued_collective": 7, "last_started_collective": -1, "last_completed_collective": 6}
        dump["pg_status"] = {"0": status} if entries else {}
    if minor >= 7:
        dump["comm_lib_version" if minor >= 10 else "nccl_version"] = "2.27.5"
    return dump


def as_pickle(dump: Any, protocol: int = 2) -> bytes:
    return pickle.dumps(dump, protocol=protocol)


def as_json(dump: dict[str, Any]) -> bytes:
    """Without stacks, with texts for the numbers of the status, and without an empty list of records."""
    entries = [{key: value for key, value in one.items() if key != "frames"} for one in dump["entries"]]
    status = {
        group: {key: str(value) for key, value in numbers.items()}
        for group, numbers in dump.get("pg_status", {}).items()
    }
    kept = {key: value for key, value in dump.items() if key != "entries"} | {"pg_status": status}
    return json.dumps(kept | ({"entries": entries} if entries else {})).encode()


def analyze(dumps: Mapping[int, dict[str, Any]]) -> Analysis:
    catalog = Catalog()
    return analyze_dumps({rank: read_dump(as_pickle(dump), catalog) for rank, dump in dumps.items()}, catalog)


def hung_job(ranks: int = 64, missing: int = 17) -> dict[int, bytes]:
    """A rank saves a checkpoint while the others reduce. Their rings have dropped older records."""
    size: dict[str, Any] = {"sizes": [[1024, 1024]], "dtype": "BFloat16"}
    barrier: dict[str, Any] = {
        "group": "1",
        "description": "ckpt",
        "sizes": [[1]],
        "at": ("save_checkpoint", "/app/ckpt.py", 51),
    }
    groups = {"0": range(ranks), "1": range(ranks)}
    dumps = {}
    for rank in range(ranks):
        records = [record(1039, **size), record(1040, **size), record(3, "nccl:barrier", **barrier)]
        if rank != missing:
            records.append(record(1041, state="scheduled", **size))
        dumps[rank] = as_pickle(content(records, groups, first_record=4000))
    return dumps
