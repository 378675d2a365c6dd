"""A timeline as columns, one row per operation of a rank in a step; the checks of an input table; and the known
operations of a pipeline-parallel step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Floats, Ints
from rankscope.analysis.stats.robust import number_groups as number_by_sorting

REQUIRED = ("dp_rank", "stage", "step", "optype", "start_ts", "duration")
OPTIONAL = ("rank", "seq_id", "mc", "gmc", "mb_id")
MAX_ROWS = 8_000_000
_MAX_VALUE = 2**53
# Timestamps may count from 1970.
_MAX_SECONDS = 1e10
_MAX_KEY = 2**62
# Maximum size of the table of flags, as a multiple of the number of rows.
_MAX_TABLE_FACTOR = 8
_MIN_TABLE = 1 << 20
FORWARD = "forward-compute"
BACKWARD = "backward-compute"
GC = "gc"
LAYERNORM = "layernorm-grads-all-reduce"
EMBEDDING = "embedding-grads-all-reduce"
PARAMS = "params-all-gather"
GRADS = "grads-reduce-scatter"
SEPARATE = "separate-grads-all-reduce"
CLIP = "optimizer-clip-main-grad"
OPTIMIZER = "optimizer"
COMPUTES = (FORWARD, BACKWARD)
# After the last backward, in this order.
TAIL = (GC, LAYERNORM, EMBEDDING, GRADS, SEPARATE, CLIP, OPTIMIZER)


class TimelineError(ValueError):
    """The timeline cannot be analysed. The message gives the reason and the remedy."""


@dataclass(frozen=True)
class JobSizes:
    """Sizes from the job's metadata; None if not given."""

    pipeline: int | None = None
    data: int | None = None
    tensor: int | None = None
    chunks: int | None = None
    world: int | None = None


@dataclass(frozen=True)
class Timeline:
    data_rank: Ints
    stage: Ints
    rank: Ints
    step: Ints
    operation: Ints  # index into `names`
    names: tuple[str, ...]
    start_seconds: Floats
    duration_seconds: Floats
    order: Ints  # as recorded; -1 if the file has none
    chunk: Ints  # local model chunk; -1 if the file has none

    def __len__(self) -> int:
        return len(self.step)


def read_columns(
    table: Mapping[str, npt.NDArray[Any]], *, names: Sequence[str] | None = None, seconds_per_unit: float = 1.0
) -> Timeline:
    """Check the columns of a table and convert them to a timeline. Raises TimelineError with the first problem.

    With `names`, the optype column contains indices into it (-1 if empty)."""
    missing = [name for name in REQUIRED if name not in table]
    if missing:
        found = ", ".join(sorted(map(str, table))[:12]) or "none"
        raise TimelineError(f"no column {', '.join(missing)} (found: {found}); it needs {', '.join(REQUIRED)}")
    rows = len(table["step"])
    if rows == 0:
        raise TimelineError("no rows; record at least a few steps of two ranks")
    if rows > MAX_ROWS:
        raise TimelineError(f"{rows:,} rows, more than {MAX_ROWS:,}; cut it to fewer steps")
    stage = _integers(table, "stage")
    data_rank = _integers(table, "dp_rank")
    _reject(stage < 0, "stage", "is negative")
    _reject(data_rank < 0, "dp_rank", "is negative")
    start = _numbers(table, "start_ts", from_first=True) * seconds_per_unit
    duration = _numbers(table, "duration") * seconds_per_unit
    _reject(duration < 0, "duration", "is negative")
    for name, seconds in (("start_ts", start), ("duration", duration)):
        _reject(np.abs(seconds) > _MAX_SECONDS, name, "is too large for seconds (see --unit)")
    operation, kinds = _operations(np.asarray(table["optype"]), names)
    if "rank" in table:
        rank = _integers(table, "rank")
    else:
        replicas, number = np.unique(data_rank, return_inverse=True)
        rank = stage * len(replicas) + number
    return Timeline(
        data_rank=data_rank,
        stage=stage,
        rank=rank,
        step=_integers(table, "step"),
        operation=operation,
        names=kinds,
        start_seconds=start,
        duration_seconds=duration,
        order=_integers(table, "seq_id", rows),
        chunk=_chunks(table, stage, rows),
    )


def _operations(column: npt.NDArray[Any], names: Sequence[str] | None) -> tuple[Ints, tuple[str, ...]]:
    if names is None:
        if column.dtype.kind not in "OUT":
            raise TimelineError("column optype holds numbers; it needs names such as forward-compute")
        found, column = np.unique(column.astype(str), return_inverse=True)
        names = [str(name) for name in found]
    blank = [number for number, name in enumerate(names) if not name.strip()]
    _reject((column < 0) | np.isin(column, blank), "optype", "is empty")
    # With surrounding blanks, one operation would become two.
    used = np.unique(column).tolist()
    kinds = sorted({names[number].strip() for number in used})
    renumbered = np.zeros(len(names), dtype=np.int64)
    renumbered[used] = [kinds.index(names[number].strip()) for number in used]
    return renumbered[column], tuple(kinds)


def _chunks(table: Mapping[str, npt.NDArray[Any]], stage: Ints, rows: int) -> Ints:
    """The local chunk, derived from the global one if only that is given."""
    if "mc" in table or "gmc" not in table:
        return _integers(table, "mc", rows)
    whole = _integers(table, "gmc", rows)
    return np.where(whole < 0, -1, whole // (int(stage.max()) + 1))


def _integers(table: Mapping[str, npt.NDArray[Any]], name: str, rows: int = 0) -> Ints:
    """A column of integers. An optional column (`rows` given) is -1 where absent or empty."""
    if name not in table:
        return np.full(rows, -1, dtype=np.int64)
    column = np.asarray(table[name])
    if column.dtype.kind in "iub":
        return column.astype(np.int64)
    values = _floats(column, name)
    if rows:
        values = np.where(np.isnan(values), -1.0, values)
    _reject(~np.isfinite(values) | (np.abs(values) > _MAX_VALUE), name, "is not a number")
    _reject(values != np.floor(values), name, "is not a whole number")
    return values.astype(np.int64)


def _numbers(table: Mapping[str, npt.NDArray[Any]], name: str, *, from_first: bool = False) -> Floats:
    column = np.asarray(table[name])
    if from_first and column.dtype.kind in "iu":
        column = column - column.min()  # nanoseconds since 1970 do not fit a float
    values = _floats(column, name)
    _reject(~np.isfinite(values), name, "is not a number")
    return values


def _floats(column: npt.NDArray[Any], name: str) -> Floats:
    try:
        return column.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise TimelineError(f"column {name} holds text where a number is needed ({_first_text(column)})") from error


def _first_text(column: npt.NDArray[Any]) -> str:
    for row, value in enumerate(column.tolist()):
        try:
            float(value)
        except (TypeError, ValueError):
            return f"row {row + 1}: {str(value)[:40]!r}"
    return "somewhere"


def _reject(wrong: npt.NDArray[np.bool_], name: str, what: str) -> None:
    rows = np.flatnonzero(wrong)
    if len(rows):
        more = f", and in {len(rows) - 1:,} more rows" if len(rows) > 1 else ""
        raise TimelineError(f"column {name} {what} in row {rows[0] + 1}{more}; drop or repair those rows")


def pack(*keys: Ints) -> tuple[Ints, int] | None:
    """One number per row that sorts like the keys, and the number of possible values; None if it would overflow."""
    packed = np.zeros(len(keys[0]), dtype=np.int64)
    count = 1
    for key in keys:
        low, high = int(key.min()), int(key.max())
        count *= high - low + 1
        if count > _MAX_KEY:
            return None
        packed *= high - low + 1
        packed += key - low
    return packed, count


def number_groups(*keys: Ints) -> tuple[Ints, int]:
    """Per row, the number of its combination, from 0 in the order of the keys; and the number of combinations.
    Faster than sorting, because a timeline has few combinations."""
    packed = pack(*keys) if len(keys[0]) else None
    if packed is None or packed[1] > max(_MAX_TABLE_FACTOR * len(packed[0]), _MIN_TABLE):
        return number_by_sorting(*keys)
    seen = np.zeros(packed[1], dtype=bool)
    seen[packed[0]] = True
    numbers = np.cumsum(seen) - 1
    return numbers[packed[0]], int(numbers[-1]) + 1


class Waits(Enum):
    """Which operations start together."""

    NONE = "nobody"
    PEER = "the other end of a send"
    REPLICAS = "the same stage of all data-parallel ranks"
    ENDS = "first and last stage"
    ALL = "everybody"


@dataclass(frozen=True)
class Operation:
    waits: Waits
    # Work of the rank itself. Its typical duration is a mean; that of communication is a median, so that one stuck
    # transfer does not become the norm.
    own_work: bool
    family: str


_KNOWN = {
    FORWARD: Operation(Waits.NONE, True, FORWARD),
    BACKWARD: Operation(Waits.NONE, True, BACKWARD),
    GC: Operation(Waits.NONE, True, GC),
    OPTIMIZER: Operation(Waits.NONE, True, OPTIMIZER),
    # Runs inside a tensor-parallel group, which the timeline shows as one rank.
    LAYERNORM: Operation(Waits.NONE, False, LAYERNORM),
    EMBEDDING: Operation(Waits.ENDS, False, EMBEDDING),
    PARAMS: Operation(Waits.REPLICAS, False, PARAMS),
    GRADS: Operation(Waits.REPLICAS, False, GRADS),
    SEPARATE: Operation(Waits.REPLICAS, False, SEPARATE),
    CLIP: Operation(Waits.ALL, False, CLIP),
    "forward-send": Operation(Waits.PEER, False, "forward-pp-comm"),
    "forward-recv": Operation(Waits.PEER, False, "forward-pp-comm"),
    "backward-send": Operation(Waits.PEER, False, "backward-pp-comm"),
    "backward-recv": Operation(Waits.PEER, False, "backward-pp-comm"),
}


def is_known(name: str) -> bool:
    return name in _KNOWN


def describe(name: str) -> Operation:
    """Unknown operations count as the rank's self time."""
    return _KNOWN.get(name) or Operation(Waits.NONE, True, name)


def peer_of(name: str) -> str:
    """`forward-send` for `forward-recv` and vice versa."""
    return name.replace("send", "recv") if "send" in name else name.replace("recv", "send")
