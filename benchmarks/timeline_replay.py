"""Wall time of `rankscope analyze timeline`, a process of its own each time, from start to exit."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.reporting import Row, between
from benchmarks.statistics import spread_of

ROUNDS = 7
WIDER = 16  # the larger job has so many times the data-parallel ranks
TARGET_SECONDS = 1.0


def measure() -> list[Row]:
    data = Path(os.environ.get("RANKSCOPE_TEST_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")
    trace, meta = data / "stage_imbalance" / "trace-ST.parquet", data / "stage_imbalance" / "meta-ST.yaml"
    if not trace.exists():
        print(f"no {trace}: name the folder of the borrowed data in RANKSCOPE_TEST_DATA", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory() as folder:
        wide = Path(folder) / "wide.parquet"
        rows = _widen(trace, wide)
        return [
            _time("timeline: public trace, pp4 dp2", [str(trace), "--meta", str(meta)], TARGET_SECONDS),
            _time(f"timeline: pp4 dp{2 * WIDER}, {rows:,} rows", [str(wide)], None),
        ]


def _time(name: str, words: list[str], target: float | None) -> Row:
    command = [sys.executable, "-m", "rankscope.cli.main", "analyze", "timeline", *words, "--json"]
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds.append(time.perf_counter() - started)
    spread = spread_of(seconds)
    return Row(name, spread.median, "s", between(spread.low, spread.high), target, raw={"seconds": seconds})


def _widen(source: Path, target: Path) -> int:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.parquet.read_table(source).drop_columns(["rank"])
    at = table.column_names.index("dp_rank")
    ranks = table.column("dp_rank").to_numpy().astype("int32")
    parts = [table.set_column(at, "dp_rank", pyarrow.array(ranks + 2 * copy)) for copy in range(WIDER)]
    wide = pyarrow.concat_tables(parts)
    pyarrow.parquet.write_table(wide, target)
    return int(wide.num_rows)
