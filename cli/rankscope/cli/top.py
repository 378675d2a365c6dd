"""`rankscope top`: jobs and ranks of a running daemon as a live table, with the verdict on top."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Iterable

import grpc
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from rankscope.cli.capture_client.connection import EndpointError, target_of
from rankscope.cli.job_tables import MARKS, headline, loss, milliseconds, rank_table
from rankscope.cli.messages import to_stderr
from rankscope.cli.terminal import Terminal
from rankscope.common.text import one_line
from rankscope.operator.correlation.job_service import verdict_of
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc

NAME = "top"
HELP = "show jobs and ranks as a live table"
# Locations of ranks need a wide terminal; a narrower one gets the numbers alone.
WIDE_COLUMNS = 110


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = "Needs a running `rankscope up`. Red is the culprit; '–' was not measured. Ctrl-C ends it."
    parser.add_argument("--endpoint", metavar="TARGET", help="gRPC target, such as unix:/run/rankscope/daemon.sock")
    parser.add_argument("--once", action="store_true", help="print the table once and exit")
    parser.add_argument("--ranks", type=int, default=32, metavar="N", help="most ranks shown of a job (default: 32)")


def run(arguments: argparse.Namespace) -> int:
    # A shell starts background programs with SIGINT ignored; Ctrl-C must still end the table.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        endpoint = arguments.endpoint or target_of(None)
    except EndpointError as error:
        to_stderr(f"error: {error}")
        return 1
    console = Terminal()
    try:
        with grpc.insecure_channel(endpoint) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            if arguments.once:
                jobs = stub.ListJobs(job_service_pb2.ListJobsRequest()).jobs
                console.print(_screen(jobs, arguments.ranks, console.width))
                return 0
            with Live(
                _screen((), arguments.ranks, console.width), console=console, screen=True, auto_refresh=False
            ) as live:
                for response in stub.WatchJobs(job_service_pb2.WatchJobsRequest()):
                    live.update(_screen(response.jobs, arguments.ranks, console.width), refresh=True)
    except grpc.RpcError as error:
        to_stderr(f"error: {_explain(endpoint, error)}")
        return 1
    return 0


def _explain(endpoint: str, error: grpc.RpcError) -> str:
    name = error.code().name
    if name == "UNAVAILABLE":
        return f"nobody answers at {endpoint}; start `rankscope up` there, or name another --endpoint"
    if name == "UNIMPLEMENTED":
        return f"{endpoint} is a daemon without correlation; start `rankscope up` in place of `rankscope daemon`"
    return f"{endpoint}: {name}: {one_line(error.details() or '', 500)}"


def _screen(jobs: Iterable[job_service_pb2.JobStatus], most_ranks: int, width: int) -> RenderableType:
    parts: list[RenderableType] = []
    for job in jobs:
        verdict = verdict_of(job.verdict)
        style = {"alarm": "bold red", "warning": "yellow"}.get(verdict.severity.value, "green")
        facts = [f"{job.ranks_seen}/{job.world_size} ranks"]
        if job.HasField("step_seconds"):
            facts.append(f"step {milliseconds(job.step_seconds)}")
        if job.HasField("mfu_ratio"):
            facts.append(f"MFU {job.mfu_ratio:.0%}")
        if job.HasField("exposed_communication_ratio"):
            facts.append(f"exposed communication {job.exposed_communication_ratio:.0%}")
        sources = sorted({window.wait_source for window in job.ranks} - {""})
        if sources:
            facts.append(f"wait by {', '.join(sources)}")
        lost = loss(verdict)
        parts.append(Text(f"{job.job}  {'  '.join(facts)}", style="bold"))
        parts.append(Text(f"{MARKS[verdict.severity]} {headline(verdict)}{'; ' + lost if lost else ''}", style=style))
        # Culprits first if a large job is cut.
        ordered = sorted(job.ranks, key=lambda w: (w.identity.rank not in verdict.culprits, w.identity.rank))
        shown = sorted(ordered[:most_ranks], key=lambda w: w.identity.rank)
        parts.append(rank_table(shown, verdict.culprits, stacks=width >= WIDE_COLUMNS))
        if len(ordered) > len(shown):
            parts.append(Text(f"… and {len(ordered) - len(shown)} more ranks (--ranks N shows more)", style="dim"))
        parts.append(Text(""))
    if not parts:
        parts.append(Text("no training rank on this machine yet; `rankscope doctor` shows what can be seen", "dim"))
    return Group(*parts)
