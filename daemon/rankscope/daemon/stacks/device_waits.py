"""Recognises stacks of a host that waits for its GPU.

A Python stack ends at the line that calls into C: `loss.item()`, or `if result:` where the result is a tensor. The time
of such a line is the device's, not the host's. Only the text of the line shows that, so source files are read from the
process' own file system. A process that writes misleading text misleads only about its own lines."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

from rankscope.analysis.profiles.frames import DEVICE_WAIT, Stack
from rankscope.daemon import procfs
from rankscope.daemon.blocking_reads import BlockedError
from rankscope.daemon.process_files import FileError, read_source

MAX_FILES: Final = 256
MAX_FILE_BYTES: Final = 256 << 10
MAX_LINE_BYTES: Final = 400  # the search takes time by the square of a line's length
# Reading and searching a file takes up to 5 ms.
MAX_FILES_READ: Final = 4  # in a recording
_CUDA: Final = (b"/libcuda.so",)
_WAITS: Final = re.compile(
    rb"\.(?:item|tolist|cpu|numpy|nonzero|synchronize)\("
    rb"|\.to\(\s*[\"']cpu|\btensor\(.*\bdevice="
    rb"|\b(?:float|int|bool)\(\s*[\w.\[\]]+\s*\)"
    # The truth of a plain name takes no time, unless it is a tensor.
    rb"|^\s*(?:if|elif|while|assert)\s+(?:not\s+)?[\w.\[\]]+\s*:?\s*$"
)


class DeviceWaits:
    """Knows the lines of one process."""

    def __init__(self, pid: int, proc_root: Path) -> None:
        self._pid = pid
        self._proc_root = proc_root
        self._process = f"{proc_root}/{pid}"
        self._lines: dict[str, frozenset[int]] = {}  # at which the host may wait, by file
        self._uses_gpu = False
        self._looks, self._next_look = 0, 1

    def mark(self, stacks: Counter[Stack]) -> Counter[Stack]:
        """Put a frame of the device inside of the stacks that wait for it."""
        self._read_files(stack[0].file for stack in stacks if stack)
        waiting = {stack for stack in stacks if stack and stack[0].line in self._lines.get(stack[0].file, ())}
        if not waiting or not self._is_on_gpu():
            return stacks
        return Counter({((DEVICE_WAIT, *stack) if stack in waiting else stack): n for stack, n in stacks.items()})

    def _is_on_gpu(self) -> bool:
        """Operations on a CPU do not return before they are done. The search is repeated less and less often."""
        if not self._uses_gpu:
            self._looks += 1
            if self._looks < self._next_look:
                return False
            self._next_look *= 2
            try:
                self._uses_gpu, _ = procfs.BLOCKING.call(
                    self._process, lambda: procfs.find_mapping(self._process, _CUDA)
                )
            except (OSError, BlockedError):
                return False
        return self._uses_gpu

    def _read_files(self, files: Iterable[str]) -> None:
        unknown = [file for file in dict.fromkeys(files) if file not in self._lines and _is_source(file)]
        if len(self._lines) + len(unknown) > MAX_FILES:
            self._lines.clear()
        for file in unknown[:MAX_FILES_READ]:
            try:
                read = partial(read_source, self._pid, file, self._proc_root, MAX_FILE_BYTES)
                text = procfs.BLOCKING.call(self._process, read)
            except (FileError, OSError, BlockedError):
                text = b""
            self._lines[file] = waiting_lines(text)


def waiting_lines(source: bytes) -> frozenset[int]:
    """Return the numbers of the lines at which a host may wait for its device."""
    lines = enumerate(source.split(b"\n"), start=1)
    return frozenset(
        number for number, line in lines if len(line) <= MAX_LINE_BYTES and _WAITS.search(line.partition(b"#")[0])
    )


def _is_source(file: str) -> bool:
    return file.startswith("/") and file.endswith(".py")
