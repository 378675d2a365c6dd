"""Is the verdict right? Real jobs of several frameworks, each with a fault that begins at a known time, watched by a
real `rankscope up`; one table.

    python3 -m benchmarks.gpu.verdicts [--cells ddp:host,fsdp2:gpu] [--repeat 2] [--parallel 2] [--cpu]

See README.md beside this for what has to be on PYTHONPATH. Every evaluation is kept as it was received, in
OUT/verdicts/CELL.jsonl, so that rules can be tried on it later. The table is written after every batch of cells: a run
that is cut short leaves what it had."""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
from google.protobuf.json_format import MessageToDict

from benchmarks.gpu.lab import (
    LabJob,
    await_start,
    core_shares,
    lab_job,
    multi_process_service,
    probe_folder,
)
from benchmarks.gpu.reporting import machine, pack
from benchmarks.gpu.verdict_rows import Cell, Facts, Row, Said, judge, table
from benchmarks.gpu.window_stream import WindowRecorder
from benchmarks.running import BenchmarkError, RunningDaemon, daemon
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc

FRAMEWORKS = ("ddp", "fsdp2", "hand", "hf")
FAULTS = ("none", "host", "gpu", "input", "tenth", "hundredth", "moving", "together")
DEFAULT_CELLS = ",".join(f"{framework}:{fault}" for framework, fault in itertools.product(FRAMEWORKS, FAULTS))
SCRAPED = {
    "budget_ratio": "rankscope_daemon_budget_ratio",
    "stack_rate_hertz": "rankscope_daemon_stack_rate_hertz",
    "stack_recorded_ratio": "rankscope_daemon_stack_recorded_ratio",
    "own_cpu_seconds": 'rankscope_daemon_cpu_seconds_total{part="self"}',
    "sampling_cpu_seconds": 'rankscope_daemon_cpu_seconds_total{part="sampling"}',
}
SCRAPE_SECONDS = 2.0
END_SECONDS = 12.0  # how long ranks may take to end after their time
START_ESTIMATE_SECONDS = 15.0
WINDOWS_END_SECONDS = 5.0


@dataclass
class Recording:
    """What `rankscope up` says about all jobs, and what it costs; received by threads of its own."""

    watching: RunningDaemon
    said: list[Said] = field(default_factory=list)
    scrapes: list[dict[str, float]] = field(default_factory=list)
    problem: str = ""

    def watch(self, channel: grpc.Channel) -> None:
        stub = job_service_pb2_grpc.JobServiceStub(channel)
        try:
            for response in stub.WatchJobs(job_service_pb2.WatchJobsRequest()):
                now = time.time()
                self.said += [Said(now, status) for status in response.jobs]
        except (grpc.RpcError, ValueError) as error:
            self.problem = f"{type(error).__name__}: {error}"

    def scrape(self, stopping: threading.Event) -> None:
        while not stopping.wait(SCRAPE_SECONDS):
            with contextlib.suppress(OSError, ValueError):
                found = self.watching.metrics()
                kept = {name: found[series] for name, series in SCRAPED.items() if series in found}
                self.scrapes.append({"unix_seconds": time.time(), **kept})

    def about(self, job: LabJob) -> list[Said]:
        return [one for one in self.said if job.is_named(one.status.job)]

    def costs_between(self, start: float, end: float) -> list[dict[str, float]]:
        return [one for one in self.scrapes if start <= one["unix_seconds"] <= end]


@contextlib.contextmanager
def recording(windows: Path) -> Iterator[Recording]:
    """Watch all jobs, and keep what the daemon sends in a file."""
    stopping = threading.Event()
    with daemon(command="up") as watching, grpc.insecure_channel(watching.grpc_target) as channel:
        made, recorder = Recording(watching), WindowRecorder(watching.grpc_target, windows)
        threads = [
            threading.Thread(target=made.watch, args=(channel,), daemon=True),
            threading.Thread(target=made.scrape, args=(stopping,), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield made
        finally:
            stopping.set()
            channel.close()
            for thread in threads:
                thread.join(5)
    recorder.wait(WINDOWS_END_SECONDS)


class Matrix:
    """Runs cells in batches: those of a batch side by side, before one daemon, each on its own share of the cores."""

    def __init__(self, asked: argparse.Namespace, probe: Path, environment: dict[str, str]) -> None:
        self._asked = asked
        self._probe = probe
        self._environment = environment
        self._rows: list[Row] = []
        self._cores = core_shares(asked.parallel)
        self._machine = machine()
        self._ends_at = time.monotonic() + asked.budget
        (asked.out / "verdicts").mkdir(parents=True, exist_ok=True)

    def run(self, cells: Sequence[Cell]) -> None:
        for start in range(0, len(cells), self._asked.parallel):
            batch = cells[start : start + self._asked.parallel]
            left = self._ends_at - time.monotonic()
            needed = START_ESTIMATE_SECONDS + self._asked.seconds
            print(f"## {', '.join(cell.name for cell in batch)} ({left:.0f} s left)", flush=True)
            if left < needed:
                rows = [_failed(cell, f"left out: {left:.0f} s left, it takes about {needed:.0f}") for cell in batch]
            else:
                rows = self._run_batch(batch)
            self._rows += rows
            self.save()
            for row in rows:
                print(
                    "  " + "; ".join(filter(None, row.cells())) + (f"\n{row.failure}" if row.failure else ""),
                    flush=True,
                )

    def _run_batch(self, batch: Sequence[Cell]) -> list[Row]:
        try:
            with contextlib.ExitStack() as stack:
                jobs = [stack.enter_context(self._start(cell, place)) for place, cell in enumerate(batch)]
                windows = self._asked.out / "verdicts" / f"{'+'.join(cell.name for cell in batch)}.windows.gz"
                heard = stack.enter_context(recording(windows))
                await_start(jobs, self._asked.cpu)
                give_up_at = time.monotonic() + self._asked.seconds + END_SECONDS
                while any(job.running for job in jobs) and time.monotonic() < give_up_at:
                    if heard.watching.process.poll() is not None:
                        raise BenchmarkError(f"`rankscope up` ended with {heard.watching.process.returncode}")
                    time.sleep(0.2)
                return [self._judge(cell, job, heard) for cell, job in zip(batch, jobs, strict=True)]
        except Exception as error:  # noqa: BLE001  the other batches have their turn, whatever it was
            traceback.print_exc(limit=-3, file=sys.stdout)
            return [_failed(cell, f"{type(error).__name__}: {error}") for cell in batch]

    def _start(self, cell: Cell, place: int) -> contextlib.AbstractContextManager[LabJob]:
        asked = self._asked
        words = {
            "--framework": cell.framework,
            "--fault": cell.kind,
            "--rank": cell.rank,
            "--milliseconds": asked.milliseconds,
            "--seconds": asked.seconds,
            "--start-after": asked.start_after,
            "--width": asked.width,
            "--workers": asked.workers,
            **({"--slow-ratio": cell.slow_ratio} if cell.slow_ratio is not None else {}),
            **({"--alternate-after": asked.alternate_after} if asked.alternate_after else {}),
        }
        return lab_job(
            "framework_job.py",
            [str(word) for pair in words.items() for word in pair],
            cpu=asked.cpu,
            ranks=asked.ranks,
            environment=self._environment,
            probe=self._probe,
            cores=self._cores[place],
            label=cell.name,
        )

    def _judge(self, cell: Cell, job: LabJob, heard: Recording) -> Row:
        said = heard.about(job)
        self._keep(cell, said)
        try:
            job.check(may_end=True)
            if job.running:
                raise BenchmarkError(f"ranks did not end in time: {job.log_tail(0)}")
            if not said:
                raise BenchmarkError(
                    f"`rankscope up` said nothing about this job; {heard.problem or 'it does not know it'}"
                )
            steps = [job.steps(rank) for rank in range(self._asked.ranks)]
            fault = job.fact("fault.json") or {}
            if cell.kind != "none" and not fault:
                raise BenchmarkError("the fault never began")
            last = min(one.device_end[-1] for one in steps)
            said = [one for one in said if one.unix_seconds <= last]
            costs = heard.costs_between(steps[0].device_end[0] + 5, last)
            turns = job.fact("blocks.json") or {}
            facts = Facts(
                steps,
                fault.get("unix_seconds"),
                fault.get("milliseconds"),
                costs,
                turns.get("unix_seconds"),
                turns.get("first_steps", ()),
            )
            return judge(cell, said, facts)
        except Exception as error:  # noqa: BLE001  a cell that cannot be judged does not spoil its neighbour
            traceback.print_exc(limit=-3, file=sys.stdout)
            return _failed(cell, f"{type(error).__name__}: {error}")

    def _keep(self, cell: Cell, said: Sequence[Said]) -> None:
        with (self._asked.out / "verdicts" / f"{cell.name}.jsonl").open("w") as file:
            for one in said:
                status = MessageToDict(one.status, preserving_proto_field_name=True)
                file.write(json.dumps({"unix_seconds": one.unix_seconds, "status": status}) + "\n")

    @property
    def text(self) -> str:
        title = "Verdicts" + (" (dry run without a GPU: only shows that the script works)" if self._asked.cpu else "")
        asked = self._asked
        settings = f"{asked.ranks} ranks, {asked.parallel} jobs at a time, faults of {asked.milliseconds:g} ms"
        met = sum(not row.misses for row in self._rows)
        head = (
            f"### {title}\n\n{self._machine['text']}; {settings}. {met} of {len(self._rows)} cells meet every target."
        )
        return f"{head}\n\n{table(self._rows)}\n"

    def save(self) -> None:
        results: dict[str, Any] = {"machine": self._machine, "rows": [row.as_dict() for row in self._rows]}
        (self._asked.out / "verdicts.json").write_text(json.dumps(results, indent=1, default=str))
        (self._asked.out / "verdicts.md").write_text(self.text)
        pack(self._asked.out, self._asked.pack or self._asked.out, "verdicts")

    @property
    def has_missed(self) -> bool:
        return any(row.misses for row in self._rows)


def _failed(cell: Cell, why: str) -> Row:
    return Row(cell.framework, cell.fault, cell.repeat, failure=why)


def chosen(cells: str, repeat: int, rank: int) -> list[Cell]:
    """All cells once, then all of them again: a run that is cut short has seen each one."""
    pairs = [name.partition(":")[::2] for name in cells.split(",")]
    return [Cell(framework, fault, number, rank) for number in range(1, repeat + 1) for framework, fault in pairs]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", default=DEFAULT_CELLS, help="FRAMEWORK:FAULT,…; gpu10 is 10 per cent of a step")
    parser.add_argument("--pack", type=Path, help="where the archives of all results go (default: OUT)")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--parallel", type=int, default=1, help="cells at the same time, each on a share of the cores")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rank", type=int, default=2, help="the slow one")
    parser.add_argument("--milliseconds", type=float, default=60.0, help="of the faults")
    parser.add_argument("--start-after", type=float, default=11.0, help="seconds from the first step to the fault")
    parser.add_argument("--alternate-after", type=float, help="seconds from the fault to turns with it and without")
    parser.add_argument("--seconds", type=float, default=30.0, help="from the first step to the last")
    parser.add_argument("--width", type=int, help="of the model (default: 512, 64 with --cpu)")
    parser.add_argument("--workers", type=int, default=0, help="of the data loaders")
    parser.add_argument("--budget", type=float, default=1500.0, help="seconds; cells that would not fit are left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--cpu", action="store_true", help="small models over gloo: to try the script itself")
    asked = parser.parse_args()
    asked.width = asked.width or (64 if asked.cpu else 512)
    # Ended by `timeout`: nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with contextlib.ExitStack() as stack:
        probe = probe_folder(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rankscope-probe-"))))
        environment = {} if asked.cpu else stack.enter_context(multi_process_service())
        matrix = Matrix(asked, probe, environment)
        try:
            matrix.run(chosen(asked.cells, asked.repeat, asked.rank))
        finally:
            matrix.save()
            print(f"\n{matrix.text}", flush=True)
    return int(matrix.has_missed)


if __name__ == "__main__":
    sys.exit(main())
