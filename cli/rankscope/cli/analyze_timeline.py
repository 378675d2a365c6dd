"""`rankscope analyze timeline`: the step time without its slow rank, stage or operation."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.analysis.timelines.report import NOT_DECLARED, analyze
from rankscope.analysis.timelines.timeline import (
    MAX_ROWS,
    OPTIONAL,
    REQUIRED,
    JobSizes,
    Timeline,
    TimelineError,
    read_columns,
)
from rankscope.analysis.verdicts.thresholds import DEFAULT_POLICY
from rankscope.cli.messages import cannot_read, overwrite, refuse, to_stdout
from rankscope.cli.options import add_options
from rankscope.cli.output_file import write_output
from rankscope.cli.terminal import Terminal
from rankscope.cli.timeline_report import draw_svg, make_page, print_report, to_json
from rankscope.common.text import one_line

_EPILOG = """\
examples:
  rankscope analyze timeline trace.parquet --meta meta.yaml
  rankscope analyze timeline trace.csv --json | jq .verdict
  rankscope analyze timeline trace.parquet --heatmap ranks.svg --html report.html

A row of FILE is one operation of one rank in one step: dp_rank, stage, step, optype, start_ts, duration (seconds), and
if there are, rank, seq_id, mc or gmc (model chunk). --meta is YAML with pp_size, dp_size, tp_size; without it, the
rows tell. Columns, numbers and JSON keys: docs/analyze-timeline.md.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    parser.add_argument("file", type=Path, metavar="FILE", help="parquet or CSV, a row per operation")
    parser.add_argument("--meta", type=Path, metavar="YAML", help="sizes of the job: pp_size, dp_size, tp_size …")
    parser.add_argument("--unit", choices=tuple(UNITS), default="s", help="of start_ts and duration (default: s)")
    parser.add_argument("--min-steps", type=int, metavar="N", help="steps needed for a verdict (default: 20)")
    add_options(parser, "--json", "--html")
    parser.add_argument("--heatmap", type=Path, metavar="FILE", help="write stage × dp rank to FILE.svg, too")


def run(arguments: argparse.Namespace) -> int:
    if arguments.heatmap and arguments.heatmap.suffix.lower() != ".svg":
        return refuse(f"{arguments.heatmap}: a heat map is an SVG picture; give it the ending .svg")
    policy = DEFAULT_POLICY
    if arguments.min_steps is not None:
        if arguments.min_steps < 1:
            return refuse("--min-steps: must be 1 or more")
        policy = replace(policy, steps_needed=arguments.min_steps)
    try:
        sizes = read_sizes(arguments.meta) if arguments.meta else NOT_DECLARED
    except FileError as error:
        return refuse(f"{arguments.meta}: {error}")
    try:
        overwrite(f"reading {arguments.file.name} …")
        timeline = read_timeline(arguments.file, arguments.unit)
        overwrite(f"replaying {len(timeline):,} operations …")
        report = analyze(timeline, sizes, policy)
        overwrite("")
    except (FileError, TimelineError) as error:
        return refuse(f"{arguments.file}: {error}")
    except MemoryError:
        return refuse(f"{arguments.file}: does not fit into memory; cut it to fewer steps")
    if arguments.heatmap is not None:
        write_output("--heatmap", arguments.heatmap, draw_svg(report))
    if arguments.html is not None:
        write_output("--html", arguments.html, make_page(report, arguments.file.name))
    if arguments.json:
        to_stdout(json.dumps(to_json(report), allow_nan=False))
    else:
        print_report(report, Terminal(soft_wrap=True))
    return 0


# Files: timelines of operations from parquet or CSV, and the job's sizes from YAML.


UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_PARQUET_MAGIC = b"PAR1"
_NAMES = "optype"
_MAX_YAML_BYTES = 1 << 20
# A CSV row of a timeline has at least 40 bytes.
_MAX_CSV_BYTES = MAX_ROWS * 100
_SIZES = {
    "pp_size": "pipeline",
    "dp_size": "data",
    "tp_size": "tensor",
    "vpp_size": "chunks",
    "world_size": "world",
}


class FileError(Exception):
    """The file cannot be read: why, and what to do."""


def read_timeline(path: Path, unit: str) -> Timeline:
    """Raises FileError or TimelineError."""
    try:
        with path.open("rb") as file:
            magic = file.read(len(_PARQUET_MAGIC))
    except OSError as error:
        raise FileError(cannot_read(error)) from error
    if not magic:
        raise FileError("the file is empty; give a parquet or CSV file of operations")
    if magic == _PARQUET_MAGIC:
        columns, names = _read_parquet(path)
    elif path.suffix == ".parquet" or b"\0" in magic:
        raise FileError("not a parquet file (it does not start with PAR1); was the copy cut short?")
    else:
        columns, names = _read_csv(path)
    return read_columns(columns, names=names, seconds_per_unit=UNITS[unit])


def _read_parquet(path: Path) -> tuple[dict[str, npt.NDArray[Any]], list[str] | None]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path, read_dictionary=[_NAMES]) as file:
            rows = file.metadata.num_rows
            if rows > MAX_ROWS:
                raise FileError(f"{rows:,} rows, more than {MAX_ROWS:,}; cut it to fewer steps")
            wanted = [name for name in file.schema_arrow.names if name in (*REQUIRED, *OPTIONAL)]
            return _columns(file.read(columns=wanted), file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError) as error:
        raise FileError(f"broken parquet file ({_short(error)}); copy it again") from error


def _read_csv(path: Path) -> tuple[dict[str, npt.NDArray[Any]], list[str] | None]:
    import pyarrow
    import pyarrow.csv

    if path.stat().st_size > _MAX_CSV_BYTES:
        raise FileError(f"{path.stat().st_size / 1e9:.1f} GB of CSV; cut it to fewer steps, or make it a parquet file")
    try:
        names = pyarrow.dictionary(pyarrow.int32(), pyarrow.string())
        options = pyarrow.csv.ConvertOptions(column_types={_NAMES: names})
        table = pyarrow.csv.read_csv(path, convert_options=options)
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise FileError(f"neither parquet nor CSV ({_short(error)})") from error
    names = [name.strip().lstrip("\ufeff") for name in table.column_names]
    return _columns(table.rename_columns(names), names)


def _columns(table: Any, all_names: list[str]) -> tuple[dict[str, npt.NDArray[Any]], list[str] | None]:
    import pyarrow

    columns: dict[str, npt.NDArray[Any]] = {}
    names: list[str] | None = None
    for name in all_names:
        if name not in (*REQUIRED, *OPTIONAL) or name in columns:
            columns.setdefault(name, np.zeros(0))  # a missing column is named in the error message
            continue
        column = table.column(all_names.index(name) if len(table.column_names) == len(all_names) else name)
        if name == "optype" and (pyarrow.types.is_string(column.type) or pyarrow.types.is_large_string(column.type)):
            column = column.dictionary_encode()
        if name == "optype" and pyarrow.types.is_dictionary(column.type):
            whole = column.unify_dictionaries().combine_chunks()
            whole = whole.chunk(0) if isinstance(whole, pyarrow.ChunkedArray) and whole.num_chunks else whole
            if len(whole):
                names = [str(value) for value in whole.dictionary.to_pylist()]
                # Without pyarrow.compute (fill_null): importing it takes as long as the whole analysis.
                places = whole.indices.to_numpy(zero_copy_only=False)
                columns[name] = np.where(np.isnan(places), -1, places).astype(np.int64)
                continue
        columns[name] = column.to_numpy()
    return columns, names


def read_sizes(path: Path) -> JobSizes:
    """Raises FileError."""
    import yaml

    try:
        if path.stat().st_size > _MAX_YAML_BYTES:
            raise FileError("too large for a file of metadata; give the job's YAML")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(cannot_read(error)) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        raise FileError(f"not YAML ({_short(error)})") from error
    if not isinstance(content, dict):
        raise FileError("no mapping; it needs lines such as pp_size: 4")
    sizes: dict[str, int] = {}
    for key, field in _SIZES.items():
        value = content.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 1 << 31:
            raise FileError(f"{key} is {str(value)[:40]!r}; it needs a whole number from 1")
        sizes[field] = value
    if not sizes:
        raise FileError(f"none of {', '.join(_SIZES)}; is it the job's metadata?")
    return JobSizes(**sizes)


def _short(error: BaseException) -> str:
    return one_line(str(error), 160)
