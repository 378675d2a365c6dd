"""`rankscope record`: keep the records of a run's steps and of NCCL's operations in a file."""

from __future__ import annotations

import argparse
import io
import math
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import grpc
import numpy as np

from rankscope.analysis.step_graph.recording import RecordedTables, RecordingError, write_recording
from rankscope.analysis.verdicts.verdict import Cause, headline
from rankscope.analysis.verdicts.verdict import ranks as ranks_text
from rankscope.cli import options
from rankscope.cli.connection import CALL_SECONDS, connected, explain
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.messages import CommandError, Exit, overwrite, to_stderr, to_stdout
from rankscope.cli.output_file import check_writable, open_output, writing
from rankscope.cli.profile_client import ProfileClient
from rankscope.common.text import printable
from rankscope.operator.correlation.job_service import verdict_of
from rankscope.v1 import recording_service_pb2 as pb
from rankscope.v1.job_service_pb2 import ListJobsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from rankscope.v1.recording_service_pb2_grpc import RecordingServiceStub

_EPILOG = """\
examples:
  rankscope record -o job.npz                             the one run on this machine, for 30 s
  rankscope record -o job.npz --seconds 120 --run llama   for a fault that shows now and then
  rankscope analyze recording job.npz

The recording begins with what the memory of each rank still holds, up to 16,384 operations. Ctrl-C ends it; the file
has what was recorded until then. Nothing is added in the training processes. Ranks need NCCL and the probe
(`rankscope run`). The file has times, sizes, numbers and the verdict, and no names, paths or stacks, so that it can
go with a report of a wrong verdict. Format: docs/analyze-recording.md.
"""
DEFAULT_SECONDS: Final = 30.0
MAX_SECONDS: Final = 600.0  # as a daemon has it
SLACK_SECONDS: Final = 15.0
MAX_BYTES: Final = 512 << 20
MAX_TABLE_HEADER_BYTES: Final = 8192
MAX_PROBLEMS: Final = 64
# A verdict needs three windows of 16 steps, and NCCL is asked in half of the steps or fewer.
FEW_STEPS: Final = 100
OPTION: Final = "-o"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = _EPILOG
    options.add_output_argument(parser, "FILE", "the recording: a NumPy archive (.npz)", required=True)
    parser.add_argument(
        "--seconds",
        type=_seconds,
        default=DEFAULT_SECONDS,
        metavar="SECONDS",
        help=f"how long, up to {MAX_SECONDS:.0f} (default: {DEFAULT_SECONDS:.0f})",
    )
    options.add_options(parser, "--run", "--ranks")
    add_connection_arguments(parser)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a number above 0 and up to {MAX_SECONDS:.0f}")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    ranks = options.selected_ranks(arguments)
    check_writable(OPTION, arguments.output)
    with connected(arguments) as (target, channel):
        named = ProfileClient(channel).run_named(arguments.run)
        request = pb.RecordRunRequest(job=named, ranks=ranks, seconds=arguments.seconds)
        recorded = _Recorded()
        recorded.follow(channel, target, request)
        verdict = _live_verdict(channel, named)
    overwrite("")
    shown = printable(str(arguments.output))
    if not recorded.tables.operations:
        reason = "; ".join(recorded.problems) or "no rank communicated meanwhile"
        raise CommandError(f"nothing was recorded, and {shown} is not written: {reason}", Exit.FAILED)
    arrays = recorded.tables.joined()
    with writing(OPTION), open_output(arguments.output) as file:
        write_recording(file, arrays, verdict)
    for problem in recorded.problems:
        to_stderr(f"warning: {problem}")
    steps = min(len(arrays[f"steps_{rank}"]) for rank in recorded.tables.ranks)
    if steps < FEW_STEPS:
        to_stderr(f"warning: {steps} steps are few; a verdict needs about {FEW_STEPS}: record longer with --seconds")
    to_stdout(f"{shown}: {recorded}, {steps:,} steps; next: rankscope analyze recording {shown}")
    return Exit.OK


class _Recorded:
    """The answers of a server, which is not trusted: tables are checked, and their size is bounded."""

    def __init__(self) -> None:
        self.tables = RecordedTables()
        self._overwritten = 0
        self._by_rank: dict[int, str] = {}
        self._others: list[str] = []

    def follow(self, channel: grpc.Channel, target: str, request: pb.RecordRunRequest) -> None:
        """Returns when the time is over, the run or its server has ended, or the user presses Ctrl-C. Raises
        grpc.RpcError if the server refuses, and CommandError for an answer that cannot be read."""
        call = RecordingServiceStub(channel).RecordRun(request, timeout=request.seconds + SLACK_SECONDS)
        began = time.monotonic()
        try:
            for answer in call:
                self._take(answer)
                elapsed = time.monotonic() - began
                overwrite(f"{self} in {elapsed:.0f} of {request.seconds:g} s; Ctrl-C ends the recording and keeps it")
                if self.tables.size_bytes > MAX_BYTES:
                    self._note(f"the recording ends at {MAX_BYTES >> 20} MiB; name fewer --ranks or --seconds")
                    break
        except KeyboardInterrupt:
            pass
        except grpc.RpcError as error:
            if not self.tables.operations:
                raise
            self._note(f"the recording ends after {time.monotonic() - began:.0f} s: {explain(target, error)}")
        except (RecordingError, ValueError) as error:
            raise CommandError(f"{target} sent a table that cannot be read: {error}", Exit.FAILED) from error
        finally:
            call.cancel()

    def _take(self, answer: pb.RecordRunResponse) -> None:
        for problem in answer.problems:
            self._note(problem)
        for records in answer.ranks:
            steps, operations, members = map(_table, (records.steps, records.operations, records.communicators))
            self.tables.add(records.rank, steps, operations, members)
            self._overwritten += records.overwritten
            self._by_rank.pop(records.rank, None)
            if records.problem and len(self._by_rank) < MAX_PROBLEMS:
                self._by_rank[records.rank] = records.problem

    def _note(self, problem: str) -> None:
        if len(self._others) < MAX_PROBLEMS:
            self._others.append(problem)

    @property
    def problems(self) -> Iterator[str]:
        """Say what is missing, and why."""
        for reason in sorted(set(self._by_rank.values())):
            of = tuple(sorted(rank for rank, problem in self._by_rank.items() if problem == reason))
            yield f"{ranks_text(of)}: {reason}"
        yield from self._others
        if self._overwritten:
            yield f"{self._overwritten:,} operations were overwritten before they could be read"

    def __str__(self) -> str:
        count = len(self.tables.ranks)
        return f"{count} rank{'s' * (count != 1)}, {self.tables.operations:,} operations"


def _table(content: bytes) -> Any:
    """None where there are no rows. Raises ValueError for what is not a table, or has another size than it says."""
    if not content:
        return None
    file = io.BytesIO(content)
    np.lib.format.read_magic(file)
    shape, by_column, dtype = np.lib.format.read_array_header_1_0(file, max_header_size=MAX_TABLE_HEADER_BYTES)
    start = file.tell()
    if by_column or dtype.hasobject or math.prod(shape) * dtype.itemsize != len(content) - start:
        raise ValueError(f"its size is not that of {shape} rows")
    return np.frombuffer(content, dtype, offset=start).reshape(shape)


def _live_verdict(channel: grpc.Channel, named: str) -> str:
    """The verdict now, without the lines of the program; empty where nobody judges."""
    try:
        jobs = JobServiceStub(channel).ListJobs(ListJobsRequest(), timeout=CALL_SECONDS).jobs
    except grpc.RpcError:
        return ""
    verdicts = [verdict_of(job.verdict) for job in jobs if job.job == named]
    return headline(replace(verdicts[0], cause=Cause())) if verdicts else ""
