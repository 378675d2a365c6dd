"""A frame of a stack, and whether its line belongs to the user's own program."""

from __future__ import annotations

from functools import lru_cache
from typing import Final, NamedTuple, TypeAlias

PYTHON: Final = "python"
NATIVE: Final = "native"
KERNEL: Final = "kernel"  # on a GPU
KINDS: Final = (PYTHON, NATIVE, KERNEL)

_LIBRARY_FOLDERS: Final = ("/site-packages/", "/dist-packages/", "/lib/python3", "/rankscope/probe/", "/torchinductor_")
_DEMO_FOLDER: Final = "/rankscope/cli/demo_job/"  # the demo is a program, also in site-packages


class Frame(NamedTuple):
    """A tuple: a profile hashes millions of them."""

    function: str
    file: str
    line: int  # 0: not known
    kind: str = PYTHON

    def __str__(self) -> str:
        """As in `load_image (dataset.py:88)`."""
        if not self.file:
            return self.function
        place = self.file.rpartition("/")[2]
        return f"{self.function} ({place}:{self.line})" if self.line else f"{self.function} ({place})"


DEVICE_WAIT: Final = Frame("synchronize", "<device>", 0)  # inside of a frame that waits for the GPU
Stack: TypeAlias = tuple[Frame, ...]  # innermost first


def is_user_code(frame: Frame) -> bool:
    """The program's own source, which its author can change: not a library, not the standard library, not the probe."""
    return frame.kind == PYTHON and not is_library(frame.file)


@lru_cache(maxsize=8192)
def is_library(file: str) -> bool:
    path = "/" + file
    is_in_library = any(folder in path for folder in _LIBRARY_FOLDERS) and _DEMO_FOLDER not in path
    return file.startswith("<") or is_in_library
