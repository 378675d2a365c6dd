"""Checks that a recording is a whole trace of the right process, and reads what is needed to cut it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from rankscope.analysis.traces.breakdown import break_down
from rankscope.analysis.traces.cut import Outline, WholeSteps, find_whole_steps, outline
from rankscope.analysis.traces.reader.trace_file import read_trace
from rankscope.analysis.traces.steps import find_steps, first_whole
from rankscope.analysis.traces.trace import Category, Trace, TraceError
from rankscope.daemon.captures.processing.messages import RankJob

BLOCK_BYTES: Final = 1 << 20
MAX_TEXT_BYTES: Final = 8 << 30
# What an analysis may fail on in a trace that was crafted for it.
SURPRISES: Final = (ArithmeticError, LookupError, TypeError, ValueError, RecursionError)
_HOST: Final = (Category.CPU_OP, Category.USER_ANNOTATION, Category.RUNTIME, Category.PYTHON)
_PROFILER: Final = "PyTorch Profiler"


class RefusedError(Exception):
    """Why a recording is refused."""


class EmptyTraceError(RefusedError):
    pass


@dataclass(frozen=True)
class Checked:
    """What stays in memory of a recording until those of all ranks have been read."""

    outline: Outline
    whole: WholeSteps
    start_unix_ns: int
    end_unix_ns: int
    step_seconds: float  # on the host; a lower bound if no step is whole
    notes: tuple[str, ...]


def check(job: RankJob) -> Checked:
    path = Path(job.recording)
    try:
        trace = read_trace(blocks(path), salvage=False, text_limit_bytes=MAX_TEXT_BYTES)
        _check_end(path)
        _check_process(trace, job.pid)
        steps = find_steps(trace)
        whole = find_whole_steps(trace, steps, break_down(trace))
    except TraceError as error:
        raise RefusedError(f"the process wrote no complete trace: {error}") from error
    except OSError as error:
        raise RefusedError(f"the recording cannot be read: {error.strerror}") from error
    except MemoryError:
        raise RefusedError("the trace is too large to be read; capture fewer steps, or without stacks") from None
    except SURPRISES as error:
        raise RefusedError(f"the trace cannot be understood ({type(error).__name__}); please report this") from error
    host = trace.of(*_HOST)
    notes = list(trace.repairs)
    if trace.rank not in (None, job.rank):
        notes.append(f"the process calls itself rank {trace.rank} in its trace; its environment says {job.rank}")
    # A recording that is too short for a whole step gives a lower bound.
    span = np.array([int(trace.end_ns[host].max()) - int(trace.start_ns[host].min())])
    lasted = (steps.end_ns - steps.start_ns)[first_whole(steps) :]
    step_seconds = float(np.median(lasted if len(lasted) else span)) / 1e9
    start_ns, end_ns = _recorded_ns(trace)
    return Checked(outline(trace), whole, trace.base_ns + start_ns, trace.base_ns + end_ns, step_seconds, tuple(notes))


def blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(BLOCK_BYTES):
            yield block


def _check_end(path: Path) -> None:
    """Missing text after the events does not affect the reader, but shows that writing was interrupted."""
    with path.open("rb") as file:
        is_gzip = file.read(2) == b"\x1f\x8b"  # which ends with a checksum
        file.seek(max(0, path.stat().st_size - 4096))
        if not is_gzip and not file.read().rstrip().endswith((b"}", b"]")):
            raise TraceError("its end is missing; is the disk of the container full?")


def _check_process(trace: Trace, pid: int) -> None:
    processes, counts = np.unique(trace.process[trace.of(*_HOST)], return_counts=True)
    if not len(processes):
        raise EmptyTraceError("the trace is empty: the process ran no torch operator meanwhile; is it training?")
    found = int(processes[counts.argmax()])
    if found != pid:
        raise RefusedError(f"the file is a trace of process {found}, not of {pid} as the process is called; not kept")


def _recorded_ns(trace: Trace) -> tuple[int, int]:
    """When the profiler started and ended, by its own record; not the first operator, which may come a step later."""
    begun = np.array([name.startswith(_PROFILER) for name in trace.names], dtype=bool)
    rows = np.flatnonzero(trace.of(Category.OTHER) & begun[trace.name])
    host = trace.of(*_HOST)
    first, last = int(trace.start_ns[host].min()), int(trace.end_ns[host].max())
    if not len(rows):
        return first, last
    return min(first, int(trace.start_ns[rows[0]])), max(last, int(trace.end_ns[rows[0]]))
