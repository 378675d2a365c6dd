"""Is a hang found? Real jobs over NCCL that hang, each for one reason, watched by a real `rankscope up`; one table.

    python3 -m benchmarks.gpu.hangs [--cases 'data loader,collective never entered'] [--parallel 2] [--cpu]

The job is tools/jobs/hanging.py, in which the last rank hangs. A case meets its targets when a report names that
rank and no other, its function, and what the collectives say. Each report is kept in OUT/hangs."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import grpc
import msgspec

from benchmarks.gpu.lab import RANKS, LabJob, lab_job, multi_process_service, probe_folder
from benchmarks.gpu.reporting import Report, output_of
from benchmarks.running import BenchmarkError, RunningDaemon, child_pids, daemon, wait_until
from rankscope.analysis.collectives.hang_report import HangReport
from rankscope.v1.job_service_pb2 import GetHangRequest, ListHangsRequest, ListJobsRequest
from rankscope.v1.job_service_pb2_grpc import JobServiceStub
from tools.jobs.launcher import JobError

REPORT_SECONDS = 75.0


@dataclass(frozen=True)
class Case:
    cause: str
    function: str  # in which the last rank hangs, or that called what hangs
    finding: str  # about it, in the table of collectives
    reads_loss: bool = False
    number: int = 1

    @property
    def name(self) -> str:
        return f"{self.cause}{', loss read in each step' if self.reads_loss else ''} ({self.number})"

    @property
    def slug(self) -> str:
        return re.sub(r"\W+", "-", self.name).strip("-")


CASES = (
    Case("data loader", "read_shard", "never entered"),
    Case("collective never entered", "wait_for_schedule", "never entered"),
    Case("collective never entered", "wait_for_schedule", "never entered", reads_loss=True),
    Case("collective of another size", "reduce_metrics", "different sizes", reads_loss=True),
)


class Hangs:
    def __init__(self, asked: argparse.Namespace, report: Report, probe: Path) -> None:
        self._asked = asked
        self._report = report
        self._probe = probe
        self._folder = asked.out / "hangs"
        self._folder.mkdir(parents=True, exist_ok=True)

    def run(self, cases: list[Case]) -> None:
        """So many at a time, each with a multi-process service of its own: one does not survive a killed rank."""
        with (
            daemon("--console-listen", "none", command="up") as watching,
            ThreadPoolExecutor(self._asked.parallel) as pool,
        ):
            for case, outcome in zip(cases, pool.map(lambda case: self._try(case, watching), cases), strict=True):
                self._judge(case, *outcome)

    def _try(self, case: Case, watching: RunningDaemon) -> tuple[HangReport | None, float, str]:
        try:
            with self._job(case) as job, grpc.insecure_channel(watching.grpc_target) as channel:
                return *self._await_report(case, job, channel), ""
        except (JobError, BenchmarkError, grpc.RpcError, OSError) as error:  # the other cases have their turn
            return None, 0.0, f"{type(error).__name__}: {error}"

    @contextlib.contextmanager
    def _job(self, case: Case) -> Iterator[LabJob]:
        arguments = ["--cause", case.cause, *(["--read-loss"] if case.reads_loss else [])]
        with contextlib.ExitStack() as stack:
            environment = {} if self._asked.cpu else stack.enter_context(multi_process_service())
            fifos = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-hang-")))
            os.mkfifo(fifos / "shard")
            # The last --folder counts.
            arguments += ["--folder", str(fifos)]
            yield stack.enter_context(
                lab_job(
                    "hanging.py",
                    arguments,
                    cpu=self._asked.cpu,
                    environment=environment,
                    probe=self._probe,
                    label="hang",
                )
            )

    def _await_report(self, case: Case, job: LabJob, channel: grpc.Channel) -> tuple[HangReport, float]:
        jobs = JobServiceStub(channel)

        def listed() -> list[str]:
            return [hang.id for hang in jobs.ListHangs(ListHangsRequest()).hangs if job.is_named(hang.run)]

        try:
            wait_until(lambda: bool(listed()), "a hang was reported", REPORT_SECONDS)
        except BenchmarkError as error:
            (self._folder / f"{case.slug}-stacks.txt").write_text("\n".join(map(_stacks, job.processes)))
            seen = (status for status in jobs.ListJobs(ListJobsRequest()).jobs if job.is_named(status.job))
            (self._folder / f"{case.slug}-status.txt").write_text("\n".join(map(str, seen)))
            tails = (f"rank {rank}: {job.log_tail(rank)[-300:]}" for rank in range(RANKS))
            raise BenchmarkError("; ".join((str(error), *tails))) from None
        after = time.time()
        content = jobs.GetHang(GetHangRequest(id=listed()[0])).report
        report = msgspec.json.decode(content, type=HangReport)
        (self._folder / f"{case.slug}.json").write_bytes(content)
        return report, after - report.began_unix_seconds

    def _judge(self, case: Case, report: HangReport | None, seconds: float, problem: str) -> None:
        if report is None:
            self._report.fail(case.name, problem)
            return
        last = RANKS - 1
        rows = [row for row in report.collectives if row.finding == case.finding]
        met = report.culprits == str(last) and f" in {case.function} (" in report.headline and bool(rows)
        findings = "; ".join(f"{row.collective} {row.ranks}: {row.finding}" for row in report.collectives[:3])
        target = f"rank {last} in {case.function}, {case.finding}"
        self._report.add(case.name, f"after {seconds:.0f} s: {report.headline} [{findings}]", target, met)


def _stacks(process: subprocess.Popen[bytes]) -> str:
    """Of a rank and its workers, to see what kept it from hanging as it should."""
    pids = [process.pid, *child_pids(process.pid)]
    dumps = (output_of(["py-spy", "dump", "--nonblocking", "--pid", str(pid)]) for pid in pids)
    return "\n".join(dump or "no stack\n" for dump in dumps)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="causes, separated by commas (default: all)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=2, help="jobs at the same time")
    parser.add_argument("--budget", type=float, default=300.0, help="seconds")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cpu", action="store_true", help="over gloo: to try the script itself")
    asked = parser.parse_args()
    # Ended by `timeout`: nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    chosen = [case for case in CASES if asked.cases is None or case.cause in asked.cases.split(",")]
    cases = [replace(case, number=number) for number in range(1, asked.repeat + 1) for case in chosen]
    report = Report("Hangs", asked.out, "hangs", asked.budget, judged=not asked.cpu)
    with tempfile.TemporaryDirectory(prefix="rankscope-probe-") as folder:
        hangs = Hangs(asked, report, probe_folder(Path(folder)))
        report.part("hangs", lambda: hangs.run(cases))
    return int(report.finish())


if __name__ == "__main__":
    sys.exit(main())
