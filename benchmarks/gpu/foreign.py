"""Is the verdict right on trainers that are not ours? Megatron-LM, nanoGPT and DeepSpeed's pipeline example as their
authors publish them, on several NCCL ranks of one GPU under `rankscope run`, healthy and with a fault that begins at a
known time; one table.

    python3 -m benchmarks.gpu.foreign --source gpu-foreign [--only 'tp2-pp2-*'] [--parallel 2] [--skip 14]

A cell is a layout and a fault. Several run at the same time and share the GPU. Results are written after each of these
batches: a run that is cut short leaves what it had. OUT/foreign has, for each cell, what was said and when (.json), a
recording of NCCL's operations on all ranks (.npz, for `rankscope analyze recording`), and the windows that the daemon
sent (.windows.gz, for `benchmarks.gpu.window_stream`)."""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from benchmarks.gpu.foreign_cells import (
    DEEPSPEED_CONFIG,
    DEEPSPEED_CPU_CONFIG,
    TRAINERS,
    Cell,
    Layout,
    Trainer,
    all_cells,
    batches,
)
from benchmarks.gpu.foreign_rows import Facts, Row, iterations, judge, table, texts
from benchmarks.gpu.lab import core_shares, lab_job, multi_process_service
from benchmarks.gpu.reporting import machine, pack
from benchmarks.gpu.unpacking import unpack
from benchmarks.gpu.verdict_rows import Said
from benchmarks.gpu.window_stream import WindowRecorder
from benchmarks.running import ROOT
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc
from tools.jobs.launcher import JobError

FIRST_STEP_SECONDS, END_SECONDS = 100.0, 25.0
START_ESTIMATE_SECONDS = 32.0
LOG_BYTES = 60_000
# A recording begins so long before the fault, and ends so long after it.
RECORDED_BEFORE_SECONDS, RECORDED_AFTER_SECONDS = 12.0, 24.0
RECORDER_ENDS_SECONDS = 20.0
SCRIPT = Path(__file__).with_name("foreign_fault.py")
SCRIPT_ENVIRONMENT = {"TEARDOWN_CUPTI": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
DATA_TOKENS, VOCABULARY, CPU_VOCABULARY = 2_000_000, 50_000, 256


@dataclass(frozen=True)
class Source:
    """Programs and packages, unpacked."""

    folder: Path
    modules: Path
    dataset: Path

    def script(self, trainer: Trainer) -> Path:
        return self.folder / trainer.script


def unpacked(source: Path, target: Path, cpu: bool) -> Source:
    for archive in sorted(source.glob("*.tar.gz")):
        with tarfile.open(archive) as file:
            file.extractall(target, filter="data")
    # nanoGPT needs no package on a CPU; `JOB_PYTHONPATH` names the packages of the other trainers.
    modules = target / "modules" if cpu else unpack(source / "wheels", target)[0]
    dataset = target / "random-tokens"
    dataset.mkdir()
    vocabulary = CPU_VOCABULARY if cpu else VOCABULARY
    for name in ("train.bin", "val.bin"):
        np.random.default_rng(0).integers(vocabulary, size=DATA_TOKENS, dtype=np.uint16).tofile(dataset / name)
    if cpu:
        (dataset / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": vocabulary}))
    made = Source(target, modules, dataset)
    if not cpu:
        _build_helpers(source, made)
    return made


def _build_helpers(source: Path, made: Source) -> None:
    """Megatron-LM's helpers in C++; without a compiler, those that were built elsewhere for this Python."""
    folder = made.script(TRAINERS["megatron"]).parent / "megatron/core/datasets"
    library = folder / f"helpers_cpp{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = ["-I", sysconfig.get_path("include"), "-I", str(made.modules / "pybind11/include")]
    command = ["g++", "-O2", "-shared", "-std=c++17", "-fPIC", *includes, str(folder / "helpers.cpp"), "-o"]
    try:
        subprocess.run([*command, str(library)], check=True, capture_output=True, text=True, timeout=180)
    except (OSError, subprocess.SubprocessError) as error:
        ready = source / library.name
        print(f"g++ failed ({error}); {ready} is used: {ready.exists()}", flush=True)
        if ready.exists():
            shutil.copy(ready, library)


def script_arguments(layout: Layout, source: Source, folder: Path, cpu: bool) -> list[str]:
    """Return the arguments of foreign_fault.py that name the script and what it needs."""
    trainer = TRAINERS[layout.trainer]
    flags = f"{(trainer.cpu_flags if cpu else None) or trainer.flags} {layout.flags}".split()
    if layout.trainer == "nanogpt":
        flags += [f"--dataset={source.dataset}", f"--out_dir={folder}"]
    if layout.trainer == "deepspeed":
        config = folder / "deepspeed.json"
        config.write_text(json.dumps(DEEPSPEED_CPU_CONFIG if cpu else DEEPSPEED_CONFIG))
        flags.append(f"--deepspeed_config={config}")
    words = ["--trainer", layout.trainer, "--script", str(source.script(trainer)), "--layer", trainer.layer]
    stand_in = ["--stand-in", layout.stand_in] if layout.stand_in else []
    return [*words, "--arguments", json.dumps(flags), *stand_in]


class Watch:
    """A thread that receives what `rankscope run` says about its job."""

    def __init__(self, target: str) -> None:
        self.said: list[Said] = []
        threading.Thread(target=self._follow, args=(target,), daemon=True).start()

    def _follow(self, target: str) -> None:
        with contextlib.suppress(grpc.RpcError, ValueError), grpc.insecure_channel(target) as channel:
            stub = job_service_pb2_grpc.JobServiceStub(channel)
            for response in stub.WatchJobs(job_service_pb2.WatchJobsRequest()):
                now = time.time()
                self.said += [Said(now, status) for status in response.jobs]


class CellRun:
    """A cell under `rankscope run`, from its start to its result."""

    def __init__(
        self, cell: Cell, folder: Path, after: float, command: Sequence[str], environment: dict[str, str]
    ) -> None:
        """`after`: seconds from the first step to the fault."""
        self.cell = cell
        self._folder = folder
        self._after = after
        self._began = time.monotonic()
        self._target: str | None = None  # where `rankscope run` answers
        self._watch: Watch | None = None
        self._windows: WindowRecorder | None = None
        self._recorder: subprocess.Popen[bytes] | None = None
        self._started_after: float | None = None
        words = [sys.executable, "-m", "rankscope.cli.main", "run", "--summary", str(folder / "summary.json"), "--"]
        with (folder / "terminal.log").open("wb") as log:
            self._process = subprocess.Popen(
                [*words, *command],
                cwd=ROOT,
                env=os.environ | environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def poll(self, seconds: float) -> None:
        """Do what is due; kill what takes longer than `seconds` from the first step on."""
        if self._target is None and (target := re.search(r"--connect (\S+)", self.terminal)):
            self._target = target[1]
            self._watch = Watch(self._target)
            self._windows = WindowRecorder(self._target, self._folder / "windows.gz")
        since = time.monotonic() - self._began
        if self._started_after is None and (self._folder / "started.json").exists():
            self._started_after = since
        begins_at = (self._started_after or FIRST_STEP_SECONDS) + self._after - RECORDED_BEFORE_SECONDS
        if self._recorder is None and self._target is not None and since >= begins_at:
            self._recorder = self._record(self._target)
        limit = FIRST_STEP_SECONDS if self._started_after is None else self._started_after + seconds + END_SECONDS
        if since > limit and self.is_running:
            print(f"{self.cell.name}: ended after {since:.0f} s, it takes too long", flush=True)
            self.end()

    def _record(self, target: str) -> subprocess.Popen[bytes]:
        seconds = RECORDED_BEFORE_SECONDS + RECORDED_AFTER_SECONDS + self.cell.fault.more_seconds
        words = [sys.executable, "-m", "rankscope.cli.main", "record", "--connect", target]
        words += ["-o", str(self._recording), "--seconds", f"{seconds:g}"]
        with (self._folder / "record.log").open("wb") as log:
            return subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)

    @property
    def _recording(self) -> Path:
        return self._folder / "recording.npz"

    def _keep_recording(self, target: Path) -> dict[str, Any]:
        if self._recorder is None:
            return {}
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._recorder.wait(RECORDER_ENDS_SECONDS)
        self._recorder.kill()
        output = (self._folder / "record.log").read_text(errors="replace")
        if not self._recording.exists():
            return {"output": output}
        shutil.copy(self._recording, target)
        with np.load(target, allow_pickle=False) as arrays:
            operations = sum(len(arrays[name]) for name in arrays.files if name.startswith("nccl_"))
        return {"output": output, "operations": operations, "bytes": target.stat().st_size}

    def end(self) -> None:
        if self.is_running:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(15)
            self._process.kill()
            self._process.wait()

    @property
    def terminal(self) -> str:
        return (self._folder / "terminal.log").read_text(errors="replace")

    def result(self, out: Path, beside: list[str]) -> Row:
        cell, fault = self.cell, self.cell.fault
        what = f"{fault.kind}, {fault.milliseconds:g} ms a layer" + (" in every 10th step" if fault.every > 1 else "")
        truth = "healthy" if cell.is_healthy else f"rank {cell.layout.slow_rank} ({what})"
        row = Row(cell.name, cell.layout.flags, cell.layout.ranks, asdict(fault), truth, beside=beside)
        row.start_seconds = None if self._started_after is None else round(self._started_after, 1)
        facts = self._fact("fault.json")
        try:
            row.recording = self._keep_recording(out / f"{cell.name}.npz")
            self._judge(row, facts)
        except (JobError, OSError, ValueError, KeyError) as error:
            # The other cells of the batch are judged all the same.
            traceback.print_exc(limit=-3, file=sys.stdout)
            row.failure = f"{type(error).__name__}: {error}"
        (out / f"{cell.name}.json").write_text(json.dumps(asdict(row), indent=1, default=str))
        if self._windows is not None:
            self._windows.wait(RECORDER_ENDS_SECONDS)
            shutil.copy(self._folder / "windows.gz", out / f"{cell.name}.windows.gz")
        for log in sorted(self._folder.glob("*.log")):
            with log.open("rb") as file:
                file.seek(max(0, log.stat().st_size - LOG_BYTES))
                (out / f"{cell.name}-{log.name}").write_bytes(file.read())
        return row

    def _judge(self, row: Row, fault: dict[str, Any] | None) -> None:
        started = self._fact("started.json")
        if self._process.returncode or started is None:
            raise JobError(f"ended with {self._process.returncode}: {self.terminal[-1500:]}")
        trainer = TRAINERS[self.cell.layout.trainer]
        rank = self.cell.layout.ranks - 1 if trainer.logs_on_last_rank else 0
        times = iterations(trainer, (self._folder / f"rank-{rank}.log").read_text(errors="replace"))
        said = [] if self._watch is None else list(self._watch.said)
        summary = json.loads((self._folder / "summary.json").read_text())
        judge(self.cell, row, said, summary, Facts(started["unix_seconds"], fault, times))

    def _fact(self, name: str) -> dict[str, Any] | None:
        path = self._folder / name
        fact: dict[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
        return fact


class Matrix:
    def __init__(self, asked: argparse.Namespace, source: Source, scratch: Path) -> None:
        self._asked = asked
        self._source = source
        self._scratch = scratch
        self._out: Path = asked.out / "foreign"
        self._out.mkdir(parents=True, exist_ok=True)
        self._shares = core_shares(asked.parallel)
        self._machine = machine()
        self._ends_at = asked.ends_at
        self._longest_overhead = START_ESTIMATE_SECONDS  # of a batch, beside the seconds of its cells
        self._left_out: list[str] = []
        self.rows: list[Row] = []

    def run(self, cells: Sequence[Cell]) -> None:
        for batch in batches(cells, self._asked.parallel):
            left = self._ends_at - time.monotonic()
            seconds = self._seconds(batch[0])
            if left < self._longest_overhead + seconds + 3:
                self._left_out += [cell.name for cell in batch]
                continue
            print(f"## {', '.join(cell.name for cell in batch)} ({left:.0f} s left)", flush=True)
            began = time.monotonic()
            self.rows += self._run(batch)
            self._longest_overhead = max(self._longest_overhead, time.monotonic() - began - seconds)
            for row in self.rows[-len(batch) :]:
                print("  " + "; ".join(filter(None, texts(row))), flush=True)
            self.save()

    def _seconds(self, cell: Cell) -> float:
        """Return the time from the first step to the last."""
        return float(self._asked.seconds + cell.fault.more_seconds)

    def _run(self, batch: Sequence[Cell]) -> list[Row]:
        """Each batch has a multi-process service of its own, which does not survive a rank that is killed."""
        with contextlib.ExitStack() as stack:
            environment = {} if self._asked.cpu else stack.enter_context(multi_process_service())
            runs: list[CellRun] = []
            for cell in batch:
                first = sum(run.cell.shares for run in runs)
                cores = [core for share in self._shares[first : first + cell.shares] for core in share]
                runs.append(self._start(cell, cores, environment))
                stack.callback(runs[-1].end)
            while any(run.is_running for run in runs):
                for run in runs:
                    run.poll(self._seconds(run.cell))
                time.sleep(0.2)
        names = [cell.name for cell in batch]
        return [run.result(self._out, [name for name in names if name != run.cell.name]) for run in runs]

    def _start(self, cell: Cell, cores: list[int], environment: dict[str, str]) -> CellRun:
        folder = Path(tempfile.mkdtemp(prefix=f"{cell.name}-", dir=self._scratch))
        asked, layout, fault = self._asked, cell.layout, cell.fault
        words = {
            "--fault": fault.kind,
            "--rank": layout.slow_rank,
            "--milliseconds": fault.milliseconds,
            "--every": fault.every,
            "--after": asked.after,
            "--seconds": self._seconds(cell),
        }
        spec = Spec(
            [
                *script_arguments(layout, self._source, folder, asked.cpu),
                *(str(w) for pair in words.items() for w in pair),
            ],
            layout.ranks,
            cores,
            str(self._source.modules),
            environment | SCRIPT_ENVIRONMENT,
            FIRST_STEP_SECONDS + self._seconds(cell) + END_SECONDS,
            asked.cpu,
        )
        (folder / "spec.json").write_text(json.dumps(asdict(spec)))
        command = [sys.executable, "-m", "benchmarks.gpu.foreign", "--launch", str(folder)]
        return CellRun(cell, folder, asked.after, command, environment)

    def save(self) -> None:
        (self._asked.out / "foreign.md").write_text(self.text)
        keys = ("changes", "evaluations", "iterations", "summary")
        rows = [{name: value for name, value in asdict(row).items() if name not in keys} for row in self.rows]
        results = {"machine": self._machine, "parallel": self._asked.parallel, "rows": rows}
        (self._asked.out / "foreign.json").write_text(json.dumps(results, indent=1, default=str))
        pack(self._asked.out, self._asked.pack or self._asked.out, "foreign")

    @property
    def text(self) -> str:
        asked, right = self._asked, sum(row.is_right for row in self.rows)
        dry = " (dry run without a GPU: only shows that the script works)" if asked.cpu else ""
        shared = f"up to {asked.parallel} jobs of four ranks at a time share the GPU" if asked.parallel > 1 else "alone"
        left_out = f" There was no time for {', '.join(self._left_out)}." if self._left_out else ""
        head = f"{self._machine['text']}; {shared}. {right} of {len(self.rows)} cells are right.{left_out}"
        return f"### Foreign trainers{dry}\n\n{head}\n\n{table(self.rows)}\n"


@dataclass(frozen=True)
class Spec:
    """The command of `rankscope run`, which `--launch` starts."""

    arguments: list[str]
    ranks: int
    cores: list[int]
    modules: str
    environment: dict[str, str]
    seconds: float
    cpu: bool


def launch(folder: Path) -> int:
    """Start the ranks, keep what they wrote in `folder`, and return when all have ended."""
    spec = Spec(**json.loads((folder / "spec.json").read_text()))
    os.environ["JOB_PYTHONPATH"] = os.pathsep.join(filter(None, (spec.modules, os.environ.get("JOB_PYTHONPATH"))))
    # The first folder is the probe's. The job does not need the others.
    probe = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    # `rankscope run` knows its ranks by these, which `start_ranks` drops.
    marks = {name: value for name, value in os.environ.items() if name.startswith("RANKSCOPE_")}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with lab_job(
        str(SCRIPT),
        spec.arguments,
        cpu=spec.cpu,
        ranks=spec.ranks,
        environment=spec.environment | marks,
        probe=probe,
        cores=spec.cores,
        label="foreign",
    ) as job:
        try:
            job.wait_for(lambda: job.started, "the first step", FIRST_STEP_SECONDS)
            shutil.copy(job.folder / "info-0.json", folder / "started.json")
            job.wait_until_ended(spec.seconds)
        except JobError as error:
            print(error, file=sys.stderr)
            return 1
        finally:
            for rank in range(spec.ranks):
                shutil.copy(job.folder / f"log-{rank}", folder / f"rank-{rank}.log")
            if (job.folder / "fault.json").exists():
                shutil.copy(job.folder / "fault.json", folder / "fault.json")
    return 0


def chosen(asked: argparse.Namespace) -> list[Cell]:
    cells = all_cells()
    if asked.only:
        # The order is that of the patterns.
        by_name = {cell.name: cell for cell in cells}
        names = [name for pattern in asked.only for name in fnmatch.filter(by_name, pattern)]
        cells = [by_name[name] for name in dict.fromkeys(names)]
    elif asked.cpu:
        cells = [cell for cell in cells if cell.layout.trainer == "nanogpt"]
    return cells[asked.skip :]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, default=Path("gpu-foreign"), help="archives of the trainers, and wheels")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="cells, or patterns of them: 'pp4-*' '*-none'")
    parser.add_argument("--skip", type=int, default=0, help="so many cells, which an earlier run had")
    parser.add_argument("--parallel", type=int, default=2, help="jobs of four ranks at the same time")
    parser.add_argument("--after", type=float, default=22.0, help="seconds from the first step to the fault")
    parser.add_argument("--seconds", type=float, default=50.0, help="from first step to last; some faults add to it")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds; cells that would not fit are left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--pack", type=Path, help="where the archives of all results go (default: OUT)")
    parser.add_argument("--list", action="store_true", help="print the cells that would run at the same time")
    parser.add_argument("--cpu", action="store_true", help="tiny models over gloo; nanoGPT, or what --only names")
    parser.add_argument("--launch", type=Path, metavar="FOLDER", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.ends_at = time.monotonic() + asked.budget
    if asked.launch is not None:
        return launch(asked.launch)
    asked.parallel = max(asked.parallel, max(cell.shares for cell in chosen(asked)))
    if asked.list:
        print("\n".join(", ".join(cell.name for cell in batch) for batch in batches(chosen(asked), asked.parallel)))
        return 0
    asked.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with tempfile.TemporaryDirectory(prefix="rankscope-foreign-") as folder:
        matrix = Matrix(asked, unpacked(asked.source, Path(folder), asked.cpu), Path(folder))
        try:
            matrix.run(chosen(asked))
        finally:
            matrix.save()
            print(f"\n{matrix.text}", flush=True)
    return int(not all(row.is_right for row in matrix.rows))


if __name__ == "__main__":
    sys.exit(main())
