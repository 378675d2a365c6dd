"""What kind of work an event is, by the category that profilers of all ages and makers wrote, else by its name."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import numpy.typing as npt

from rankscope.analysis.robust import Ints
from rankscope.analysis.traces.columns import Category

_WRITTEN = {
    Category.CPU_OP: ("cpu_op", "operator", "cpu_operator"),
    Category.KERNEL: ("kernel", "concurrent_kernel", "gpu_kernel"),
    Category.MEMCPY: ("gpu_memcpy", "memcpy", "gpu_memcpy2"),
    Category.MEMSET: ("gpu_memset", "memset"),
    Category.RUNTIME: ("cuda_runtime", "runtime", "hip_runtime", "roctracer", "xpu_runtime", "privateuse1_runtime"),
    Category.DRIVER: ("cuda_driver", "driver", "hip_driver", "xpu_driver", "privateuse1_driver"),
    Category.SYNC: ("cuda_sync", "sync", "hip_sync", "xpu_sync"),
    Category.USER_ANNOTATION: ("user_annotation", "annotation"),
    Category.GPU_ANNOTATION: ("gpu_user_annotation", "gpu_annotation"),
    Category.PYTHON: ("python_function", "python"),
    Category.OVERHEAD: ("overhead",),
}
_BY_WORD = {word: category for category, words in _WRITTEN.items() for word in words}

# Profilers before torch 1.13 called everything on the host an operator.
_ANNOTATION = re.compile(r"ProfilerStep#|Optimizer\.(step|zero_grad)#|[a-z]+ccl:|gloo:|mpi:|enumerate\(DataLoader\)#")
_RUNTIME_CALL = re.compile(r"(cuda|hip)[A-Z]\w*$")
_DRIVER_CALL = re.compile(r"cu[A-Z]\w*$")


class CategoryTable(dict[Any, int]):
    def __missing__(self, written: Any) -> int:
        words = written.lower() if isinstance(written, str) else ""
        self[written] = found = int(_BY_WORD.get(words, Category.OTHER))
        return found


def correct_by_name(category: npt.NDArray[np.int8], name: Ints, names: list[str]) -> None:
    """Annotations that an old profiler called operators, and runtime calls that have no known category. In place."""
    annotation = np.array([_ANNOTATION.match(text) is not None for text in names], dtype=bool)
    runtime = np.array([_RUNTIME_CALL.match(text) is not None for text in names], dtype=bool)
    driver = np.array([_DRIVER_CALL.match(text) is not None for text in names], dtype=bool)
    if not len(names):
        return
    category[(category == Category.CPU_OP) & annotation[name]] = Category.USER_ANNOTATION
    other = category == Category.OTHER
    category[other & runtime[name]] = Category.RUNTIME
    category[other & driver[name]] = Category.DRIVER
