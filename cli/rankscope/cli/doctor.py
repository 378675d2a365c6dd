"""`rankscope doctor`: what does not work on this machine or behind a server, why, and the next step."""

from __future__ import annotations

import argparse
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from rankscope.analysis.quantities import count
from rankscope.cli.contexts import add_connection_arguments
from rankscope.cli.daemon import add_setting_arguments, read_settings
from rankscope.cli.messages import Exit, to_stdout
from rankscope.cli.options import add_options
from rankscope.common.text import one_line
from rankscope.daemon.doctor_checks import Finding, Level

if TYPE_CHECKING:
    from rankscope.v1.job_service_pb2 import JobStatus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Reports what does not work on this machine, with the daemon's settings, and why. With --cluster, --connect or "
        "--context: what a daemon, a correlator or an operator answers you, and what its ranks report. Exit status 1 "
        "if there is a problem, 0 if there are warnings at most."
    )
    parser.add_argument("--cluster", action="store_true", help="examine the server of the context in use")
    add_options(parser, "--json")
    add_connection_arguments(parser)
    add_setting_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if arguments.cluster or arguments.connect is not None or arguments.context is not None:
        return _report(_examine_server(arguments), arguments)
    config = read_settings(arguments).config
    from rankscope.daemon.doctor import examine

    return _report(examine(config), arguments)


def _report(found: Iterable[Finding], arguments: argparse.Namespace) -> int:
    findings = []
    for finding in found:
        findings.append(finding)
        if not arguments.json:
            to_stdout(f"{finding.level.value:<8} {finding.check}: {finding.text}")
            if finding.next_step:
                to_stdout(f"{'':<8} → {finding.next_step}")
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    healthy = counts[Level.PROBLEM] == 0
    if arguments.json:
        rows = [{**vars(finding), "level": finding.level.value} for finding in findings]
        to_stdout(json.dumps({"healthy": healthy, "findings": rows}))
    else:
        to_stdout(f"\n{count(counts[Level.PROBLEM], 'problem')}, {count(counts[Level.WARNING], 'warning')}")
    return Exit.OK if healthy else Exit.FAILED


def _examine_server(arguments: argparse.Namespace) -> Iterator[Finding]:
    """Through the calls that other commands make: what works here works there."""
    # Imported here: what it needs may be what is missing on this machine.
    import grpc

    from rankscope.cli.connection import CALL_SECONDS, connected, explain
    from rankscope.v1.capture_service_pb2 import ListCapturesRequest
    from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
    from rankscope.v1.job_service_pb2 import ListJobsRequest
    from rankscope.v1.job_service_pb2_grpc import JobServiceStub

    with connected(arguments) as (target, channel):
        runs: Sequence[JobStatus] = ()
        try:
            runs = JobServiceStub(channel).ListJobs(ListJobsRequest(), timeout=CALL_SECONDS).jobs
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                text = f"{target} answers, and is a daemon without correlation: there are no verdicts"
                yield Finding("server", Level.OK, text)
            elif error.code() is grpc.StatusCode.PERMISSION_DENIED:
                yield Finding(
                    "runs", Level.WARNING, explain(target, error), "or name a namespace: rankscope top --run NS/"
                )
            else:
                raise  # nothing can be examined
        else:
            yield Finding("server", Level.OK, f"{target} answers; it knows {count(len(runs), 'run')}")
        try:
            CaptureServiceStub(channel).ListCaptures(ListCapturesRequest(), timeout=CALL_SECONDS)
            yield Finding("captures", Level.OK, "you may list them")
        except grpc.RpcError as error:
            yield Finding("captures", Level.WARNING, explain(target, error))
        for job in runs:
            yield from _examine_run(job)


def _examine_run(job: JobStatus) -> Iterator[Finding]:
    from rankscope.analysis.verdicts.verdict import ranks
    from rankscope.cli.job_tables import stale_nodes

    name = f"run {one_line(job.job, 200)}"
    if job.ranks_seen < job.world_size:
        text = f"{job.ranks_seen} of {count(job.world_size, 'rank')} report"
        yield Finding(name, Level.WARNING, text, "is there a daemon on every node of the run? docs/troubleshooting.md")
    silent_nodes = stale_nodes(job)
    for text in silent_nodes:
        yield Finding(name, Level.WARNING, text, "is the daemon of that node running, and reachable from the server?")
    by_problem: defaultdict[str, list[int]] = defaultdict(list)
    for window in job.ranks:
        for problem in window.problems:
            by_problem[one_line(problem, 500)].append(window.identity.rank)
    for problem, numbers in sorted(by_problem.items()):
        yield Finding(name, Level.WARNING, f"{ranks(numbers)}: {problem}")
    if job.ranks_seen >= job.world_size and not by_problem and not silent_nodes:
        yield Finding(name, Level.OK, f"all ranks report ({job.world_size})")
