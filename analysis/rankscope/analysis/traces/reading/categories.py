"""What kind of work an event is, by the category that profilers of all ages and makers wrote, else by its name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.analysis.robust import Bools, Ints
from rankscope.analysis.traces.columns import Category

_WRITTEN = {
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
_BY_WORD = {word: category for category, words in _WRITTEN.items() for word in words}

# Profilers before torch 1.13 called everything on the host an operator.
_ANNOTATION = re.compile(r"ProfilerStep#|Optimizer\.(step|zero_grad)#|[a-z]+ccl:|gloo:|mpi:|enumerate\(DataLoader\)#")
_RUNTIME_CALL = re.compile(r"(cuda|hip)[A-Z]\w*$")
_DRIVER_CALL = re.compile(r"cu[A-Z]\w*$")
# MTIA has one category for all that its control processor saw. A job and its packets stand around the kernels that they
# ran; kernels are the rest, `pe_exe` where the launch and with it the name was before the recording.
_MTIA_COPY = re.compile(r"dma")
_MTIA_WAIT = re.compile(r"event_(wait|record)$")
_MTIA_ENVELOPE = re.compile(r"job_exe|packet|cpum_exe_subgraph")


class CategoryTable(dict[Any, int]):
    def __missing__(self, written: Any) -> int:
        words = written.lower() if isinstance(written, str) else ""
        self[written] = found = int(_BY_WORD.get(words, Category.OTHER))
        return found


def correct_by_name(category: npt.NDArray[np.int8], name: Ints, names: list[str]) -> None:
    """What a category alone does not tell: annotations that an old profiler called operators, runtime calls that have
    no known category, and what an event of MTIA's device is. In place."""
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
