"""Writes one trace of all ranks for Perfetto."""

from __future__ import annotations

import gzip
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, cast

from rankscope.analysis.traces.joins.clock_alignment import ClockShift
from rankscope.analysis.traces.joins.perfetto import merge_for_perfetto


def write_merged(target: Path, paths: Mapping[int, Path], shifts: Mapping[int, ClockShift]) -> None:
    """Ranks in order, one file open at a time. Written to a temporary file and renamed when complete: an input may
    have the target's name, and a partial trace would open without an error."""
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with _opened(partial, compressed=target.suffix == ".gz") as file:
            for piece in merge_for_perfetto(_files(paths), shifts):
                file.write(piece)
        partial.replace(target)
    except OSError as error:
        error.filename = str(target)
        raise
    finally:
        partial.unlink(missing_ok=True)


def _opened(path: Path, *, compressed: bool) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path, "wb", compresslevel=5)) if compressed else path.open("wb")


def _files(paths: Mapping[int, Path]) -> Iterator[tuple[int, bytes]]:
    for rank in sorted(paths):
        yield rank, paths[rank].read_bytes()
