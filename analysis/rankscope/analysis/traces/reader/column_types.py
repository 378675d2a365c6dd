"""Conversion of event fields to columns: integers, times, names and categories, whatever type the profiler wrote."""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal, InvalidOperation
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.analysis.stats.robust import Bools, Ints
from rankscope.analysis.traces.trace import ABSENT, Category
from rankscope.common.text import printable

# Below this, a float of microseconds distinguishes nanoseconds: half its spacing is less than half of 0.001.
_MAX_FLOAT_US = float(1 << 43)
# Two of these can be added within 64 bits.
_MAX_TIME_US = float(1 << 62) / 1000
_UNSIGNED_MINUS_ONE = (1 << 32) - 1
_MAX_VALUE = (1 << 63) - 1
# A call of a communication library, as annotated by torch: nccl:all_reduce, gloo:broadcast.
COMMUNICATION_CALL = re.compile(r"(?:[a-z]*ccl|gloo|mpi):([A-Za-z_]\w*)")

_CATEGORY_NAMES = {
    Category.CPU_OP: ("cpu_op", "operator", "cpu_operator"),
    Category.KERNEL: ("kernel", "concurrent_kernel", "gpu_kernel"),
    Category.MEMCPY: ("gpu_memcpy", "memcpy", "gpu_memcpy2"),
    Category.MEMSET: ("gpu_memset", "memset"),
    Category.RUNTIME: (
        "cuda_runtime",
        "runtime",
        "hip_runtime",
        "roctracer",
        "xpu_runtime",
        "privateuse1_runtime",
        "mtia_runtime",
    ),
    Category.DRIVER: ("cuda_driver", "driver", "hip_driver", "xpu_driver", "privateuse1_driver"),
    Category.SYNC: ("cuda_sync", "sync", "hip_sync", "xpu_sync"),
    Category.USER_ANNOTATION: ("user_annotation", "annotation"),
    Category.GPU_ANNOTATION: ("gpu_user_annotation", "gpu_annotation"),
    Category.PYTHON: ("python_function", "python"),
    Category.OVERHEAD: ("overhead",),
    Category.DEVICE_EVENT: ("mtia_ccp_events",),
}
_BY_WORD = {word: category for category, words in _CATEGORY_NAMES.items() for word in words}
# Profilers before torch 1.13 labelled all host events as operators.
_ANNOTATION = re.compile(r"ProfilerStep#|Optimizer\.(step|zero_grad)#|[a-z]+ccl:|gloo:|mpi:|enumerate\(DataLoader\)#")
_RUNTIME_CALL = re.compile(r"(cuda|hip)[A-Z]\w*$")
_DRIVER_CALL = re.compile(r"cu[A-Z]\w*$")
# MTIA uses one category for all events of its control processor. Jobs and packets enclose their kernels; the other
# events are kernels, named `pe_exe` if the launch, which has the name, precedes the recording.
_MTIA_COPY = re.compile(r"dma")
_MTIA_WAIT = re.compile(r"event_(wait|record)$")
_MTIA_ENVELOPE = re.compile(r"job_exe|packet|cpum_exe_subgraph")


def integers(values: list[Any]) -> Ints:
    """Integers; ABSENT for values that are not."""
    try:
        column = np.array(values, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        column = _one_by_one(values)
    return column if column.ndim == 1 else _one_by_one(values)


def _one_by_one(values: list[Any]) -> Ints:
    # Typically one or two strings among thousands of numbers ("Spans" as a process).
    few = [value if type(value) is int and -_MAX_VALUE <= value <= _MAX_VALUE else _integer(value) for value in values]
    return np.array(few, dtype=np.int64)


def identifiers(values: list[Any]) -> Ints:
    """Integers for which some profilers write -1 as an unsigned number."""
    column = integers(values)
    column[column == _UNSIGNED_MINUS_ONE] = ABSENT
    return column


def _integer(value: Any) -> int:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return ABSENT
    return number if -(1 << 63) <= number < 1 << 63 else ABSENT


def times_ns(values: list[Any], written: Callable[[], list[bytes]]) -> tuple[Ints, Bools]:
    """Microseconds as nanoseconds, and a mask of the valid ones. `written` returns the values as they are in the
    file; it is called only if a float cannot hold all digits."""
    try:
        microseconds = np.array(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        microseconds = np.array([_float(value) for value in values], dtype=np.float64)
    if microseconds.ndim != 1:
        microseconds = np.array([_float(value) for value in values], dtype=np.float64)
    known = np.abs(microseconds) < _MAX_TIME_US  # False for NaN
    usable = np.where(known, microseconds, 0.0)
    whole = np.floor(usable)
    nanoseconds = whole.astype(np.int64) * 1000 + np.rint((usable - whole) * 1000).astype(np.int64)
    coarse = known & (np.abs(microseconds) >= _MAX_FLOAT_US)
    if coarse.any() and not all(type(values[index]) is int for index in np.flatnonzero(coarse).tolist()):
        nanoseconds = np.where(coarse, _exact_ns(written(), coarse), nanoseconds)
    return nanoseconds, known


def _exact_ns(texts: list[bytes], wanted: Bools) -> Ints:
    """Decimal texts as nanoseconds. Converted at once if all have three decimal places, as torch writes them."""
    joined = b",".join(texts)
    letters = np.frombuffer(joined, dtype=np.uint8)
    points, commas = np.flatnonzero(letters == ord(".")), np.flatnonzero(letters == ord(","))
    ends = np.append(commas, len(joined))
    if len(points) == len(ends) and np.array_equal(ends - points, np.full(len(ends), 4)) and _only_digits(letters):
        return np.array(joined.replace(b".", b"").split(b","), dtype=np.int64)
    return np.array(
        [_decimal_ns(text) if want else 0 for text, want in zip(texts, wanted.tolist(), strict=True)], dtype=np.int64
    )


def _only_digits(letters: np.ndarray[Any, np.dtype[np.uint8]]) -> bool:
    allowed = (letters >= ord("0")) & (letters <= ord("9")) | (letters == ord(".")) | (letters == ord(","))
    return bool(allowed.all())


def _decimal_ns(text: bytes) -> int:
    try:
        return round(Decimal(text.decode().strip('" ')) * 1000)
    except (InvalidOperation, ValueError, OverflowError):
        return 0


def _float(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


class NameTable(dict[Any, int]):
    """Numbers strings in order of appearance, so that each name is stored and matched once. Texts are printable; other
    values are converted to strings."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._calls = np.zeros(0, dtype=bool)  # grows by doubling
        self._matched = 0

    def __missing__(self, name: Any) -> int:
        if isinstance(name, str):
            number = len(self.texts)
            self.texts.append(printable(name))
        else:
            number = self["" if name is None else str(name)]
        self[name] = number
        return number

    def communication_calls(self) -> Bools:
        """Per string, whether it is a call of a communication library."""
        count = len(self.texts)
        if count > len(self._calls):
            self._calls = np.concatenate((self._calls, np.zeros(count, dtype=bool)))
        fresh = [COMMUNICATION_CALL.match(text) is not None for text in self.texts[self._matched :]]
        self._calls[self._matched : count] = fresh
        self._matched = count
        return self._calls[:count]


class CategoryTable(dict[Any, int]):
    def __missing__(self, written: Any) -> int:
        words = written.lower() if isinstance(written, str) else ""
        self[written] = found = int(_BY_WORD.get(words, Category.OTHER))
        return found


def correct_by_name(category: npt.NDArray[np.int8], name: Ints, names: list[str]) -> None:
    """Correct categories in place: annotations that old profilers labelled as operators, runtime calls without a
    known category, and MTIA's device events."""
    if not len(names):
        return

    def named(pattern: re.Pattern[str]) -> Bools:
        return np.array([pattern.match(text) is not None for text in names], dtype=bool)[name]

    category[(category == Category.CPU_OP) & named(_ANNOTATION)] = Category.USER_ANNOTATION
    other = category == Category.OTHER
    category[other & named(_RUNTIME_CALL)] = Category.RUNTIME
    category[other & named(_DRIVER_CALL)] = Category.DRIVER
    device = category == Category.DEVICE_EVENT
    if device.any():
        category[device] = Category.KERNEL
        category[device & named(_MTIA_COPY)] = Category.MEMCPY
        category[device & named(_MTIA_WAIT)] = Category.SYNC
        category[device & named(_MTIA_ENVELOPE)] = Category.OTHER
