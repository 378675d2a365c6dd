"""The debug file of NCCL, of a rank that was started with NCCL_DEBUG and NCCL_DEBUG_FILE. Neither is ever set here.

The file is hostile input. It is opened by the descriptor through which the process writes it: no path is resolved. Its
beginning is read, then what is added: communicators may be made at any time. Of a file that grows faster than it is
read, a part in the middle is left out."""

from __future__ import annotations

import os
import re
import stat
from typing import Final

from rankscope.analysis.collectives.nccl_log import NcclLog
from rankscope.analysis.verdicts.network import NcclFacts
from rankscope.daemon import procfs

MAX_READ_BYTES: Final = 256 << 10  # at once
MAX_BEHIND_BYTES: Final = 4 << 20
LOOKS_LEFT_OUT: Final = 8
LEVELS: Final = frozenset({"VERSION", "WARN", "INFO", "ABORT", "TRACE"})
DELETED: Final = " (deleted)"


class NcclDebugFile:
    """Of one process. `pid` is what the process calls itself."""

    def __init__(self, process: str, pid: int) -> None:
        self._process = process
        self._pid = pid
        self._search: procfs.DescriptorSearch | None = None
        self._is_asked = False
        self._inode = self._position = 0
        self._rest = b""  # of a line that is not written to its end
        self._log = NcclLog()

    def read(self) -> NcclFacts | None:
        """What the file says so far; None where there is none. Raises OSError if the process may not be read."""
        if not self._is_asked:
            self._search = self._searched()
            self._is_asked = True
        link = None if self._search is None else self._search.look()
        fd = None if link is None else procfs.open_own_file(link, self._process)
        if fd is not None:
            try:
                self._read(fd)
            finally:
                os.close(fd)
        return self._log.facts if self._log.lines else None

    def _searched(self) -> procfs.DescriptorSearch | None:
        environment = procfs.Environment(self._process)
        level = (environment.get("NCCL_DEBUG") or "").strip().upper()
        pattern = name_pattern(environment.get("NCCL_DEBUG_FILE") or "", self._pid)
        if level not in LEVELS or pattern is None:
            return None
        return procfs.DescriptorSearch(
            self._process,
            lambda target: pattern.fullmatch(target.removesuffix(DELETED).rpartition("/")[2]) is not None,
            stat.S_IWUSR,
            LOOKS_LEFT_OUT,
        )

    def _read(self, fd: int) -> None:
        status = os.fstat(fd)
        if status.st_ino != self._inode or status.st_size < self._position:
            self._inode, self._position, self._rest, self._log = status.st_ino, 0, b"", NcclLog()
        is_behind = status.st_size - self._position > MAX_BEHIND_BYTES
        if is_behind and self._position:
            self._position, self._rest = status.st_size - MAX_READ_BYTES, b""
        data = self._rest + os.pread(fd, MAX_READ_BYTES, self._position)
        self._position += len(data) - len(self._rest)
        whole, _, rest = data.rpartition(b"\n")
        self._rest = rest[-MAX_READ_BYTES:] if len(rest) < MAX_READ_BYTES else b""
        self._log.add(whole.decode("utf-8", "replace").split("\n"))


def name_pattern(template: str, pid: int) -> re.Pattern[str] | None:
    """What the last part of the path may be: NCCL puts the host's name for %h and the process id for %p."""
    name = template.rpartition("/")[2]
    if not name:
        return None
    parts = {"%h": r"[^/]{1,255}", "%p": str(pid), "%%": "%"}
    return re.compile("".join(parts.get(part, re.escape(part)) for part in re.split("(%[hp%])", name)))
