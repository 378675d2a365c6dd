"""The recordings of all ranks as one trace, merged by a process of its own at the lowest priority: events are rewritten
one by one, and neither the console nor the daemon beside it may wait for that. What the ranks recorded comes on its
stdin, the trace leaves on its stdout, and nothing is written to a disk."""

from __future__ import annotations

import gzip
import logging
import os
import resource
import struct
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from subprocess import DEVNULL, PIPE
from typing import IO

import grpc

from rankscope.analysis.traces.joins.perfetto import merge_for_perfetto

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 << 10
MAX_MEMORY_BYTES = 4 << 30
MAX_CPU_SECONDS = 600
COMPRESSION = 1  # the fastest
_COUNT = struct.Struct("<q")  # of recordings: one that is missing is noticed
_HEAD = struct.Struct("<qq")  # a rank, and the bytes of its file

Recording = tuple[int, int, Iterable[bytes]]  # a rank, the bytes of its file, and its parts


class MergeError(Exception):
    """The trace is not complete."""


class Merge:
    """Recordings in the order in which the ranks are shown. Every rank keeps its clock."""

    def __init__(self, count: int, recordings: Iterable[Recording]) -> None:
        self._count = count
        self._recordings = recordings
        command = [sys.executable, "-m", "rankscope.operator.console.merged_trace"]
        self._process = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        self._feeder = threading.Thread(target=self._feed, name="rankscope-merge", daemon=True)
        self._feeder.start()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            with self._process.stdin as into:
                into.write(_COUNT.pack(self._count))
                for rank, size, parts in self._recordings:
                    into.write(_HEAD.pack(rank, size))
                    for part in parts:
                        into.write(part)
        except (OSError, grpc.RpcError) as error:  # the process sees the end of its input, and fails
            log.info("a merged trace is not complete: %s", type(error).__name__)

    def chunks(self) -> Iterator[bytes]:
        """Raises MergeError if the trace breaks off."""
        assert self._process.stdout is not None
        try:
            while chunk := self._process.stdout.read(CHUNK_BYTES):
                yield chunk
        except ValueError as error:  # closed by `end`
            raise MergeError from error
        if self._process.wait() != 0:
            log.info(
                "a merged trace breaks off: a recording cannot be read, or the merge takes too much memory or time"
            )
            raise MergeError

    def end(self) -> None:
        """At any time. The recordings may be cancelled before, so that the feeder does not wait for them."""
        self._process.kill()
        self._process.wait()
        self._feeder.join()
        assert self._process.stdout is not None
        self._process.stdout.close()


# In the process of its own.


def _files(source: IO[bytes]) -> Iterator[tuple[int, bytes]]:
    for _ in range(_COUNT.unpack(source.read(_COUNT.size))[0]):
        rank, size = _HEAD.unpack(source.read(_HEAD.size))
        content = source.read(size)
        if len(content) != size:
            raise ValueError(f"the recording of rank {rank} breaks off")
        yield rank, content


def main() -> None:
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY_BYTES, MAX_MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MAX_CPU_SECONDS, MAX_CPU_SECONDS))
    with gzip.GzipFile("", "wb", COMPRESSION, sys.stdout.buffer) as out:
        for piece in merge_for_perfetto(_files(sys.stdin.buffer), {}):
            out.write(piece)


if __name__ == "__main__":
    main()
