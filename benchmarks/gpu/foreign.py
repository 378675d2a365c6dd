"""Is the verdict right on trainers that are not ours? Megatron-LM and nanoGPT as their authors publish them, on several
NCCL ranks of one GPU under `rankscope run`, healthy and with a fault that begins at a known time; one table.

    python3 -m benchmarks.gpu.foreign --source gpu-foreign [--only 'tp2-pp2-*'] [--parallel 2] [--skip 14]

A cell is a layout and a fault. Several run at the same time and share the GPU. Results are written after each of these
batches: a run that is cut short leaves what it had. OUT/foreign has, for each cell, what was said and when (.json) and
a recording of NCCL's operations on all ranks (.npz, for `rankscope analyze recording`)."""

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
import statistics
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt

from benchmarks.gpu.lab import core_shares, lab_job, multi_process_service
from benchmarks.gpu.reporting import machine
from benchmarks.gpu.unpacking import unpack
from benchmarks.gpu.verdict_rows import FOUND_FROM_RATIO, IMPACT_ERROR_RATIO, SAYS_NOTHING, Said
from benchmarks.running import ROOT
from rankscope.daemon.procfs import RingSearch
from rankscope.daemon.steps import nccl_reader, ring_reader
from rankscope.daemon.steps.ring_reader import RingError
from rankscope.probe import ring_layout
from rankscope.v1 import job_service_pb2, job_service_pb2_grpc
from tools.jobs.launcher import JobError

SHARE_RANKS = 4  # of a job that takes one share of the cores; one of eight takes two
FIRST_STEP_SECONDS, END_SECONDS = 100.0, 25.0
START_ESTIMATE_SECONDS = 32.0
SETTLING_STEPS = 15
LOG_BYTES = 60_000
SAMPLE_SECONDS = 1.0
# A recording covers so much before the fault and after it, or less if it is too large.
SECONDS_BEFORE, SECONDS_AFTER = 20.0, 25.0
MAX_OPERATIONS, MAX_RECORDING_BYTES = 60_000, 1_500_000
MAX_ARCHIVE_BYTES = 15 << 20
DATA_TOKENS, VOCABULARY, CPU_VOCABULARY = 2_000_000, 50_000, 256

Table = npt.NDArray[Any]

MEGATRON_FLAGS = """
    --num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --max-position-embeddings 512
    --micro-batch-size 4 --global-batch-size 16 --lr 1e-4 --min-lr 1e-5 --train-iters 100000 --lr-decay-iters 1000
    --bf16 --mock-data --split 100,0,0 --tokenizer-type NullTokenizer --vocab-size 4096 --transformer-impl local
    --attention-backend unfused --no-rope-fusion --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --eval-iters 0 --eval-interval 100000
    --log-interval 5 --distributed-timeout-minutes 2 --exit-duration-in-mins 60"""
NANOGPT_FLAGS = """
    --n_layer=6 --n_embd=384 --n_head=6 --gradient_accumulation_steps=8 --eval_iters=2 --compile=False
    --always_save_checkpoint=False"""
NANOGPT_CPU_FLAGS = """
    --n_layer=2 --n_embd=32 --n_head=2 --block_size=64 --batch_size=2 --eval_iters=1 --compile=False --dtype=float32
    --gradient_accumulation_steps=8 --always_save_checkpoint=False --backend=gloo"""


@dataclass(frozen=True)
class Trainer:
    script: str
    flags: str
    layer: str  # whose forward is slowed
    step: re.Pattern[str]  # a line of the log: number and milliseconds of a step
    first_number: int
    log_interval: int
    logs_on_last_rank: bool


TRAINERS = {
    "megatron": Trainer(
        "megatron-lm/pretrain_gpt.py",
        MEGATRON_FLAGS,
        "megatron.core.transformer.transformer_layer:TransformerLayer",
        re.compile(r"iteration\s+(\d+)/.*elapsed time per iteration \(ms\): ([\d.]+)"),
        1,
        5,
        logs_on_last_rank=True,
    ),
    "nanogpt": Trainer(
        "nanogpt/train.py",
        NANOGPT_FLAGS,
        "model:Block",
        re.compile(r"^iter (\d+): loss .*time ([\d.]+)ms", re.MULTILINE),
        0,
        1,
        logs_on_last_rank=False,
    ),
}


@dataclass(frozen=True)
class Layout:
    name: str
    flags: str = ""
    ranks: int = 4
    slow_rank: int = 2
    trainer: str = "megatron"
    apex_stand_in: bool = False


_TP2_PP2 = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2"
_PP4 = "--pipeline-model-parallel-size 4 --global-batch-size 32"
LAYOUTS = (
    Layout("dp4", "--use-distributed-optimizer --overlap-grad-reduce"),
    Layout("pp4", _PP4),
    Layout("tp2-pp2", _TP2_PP2),
    Layout("tp4", "--tensor-model-parallel-size 4", slow_rank=1),
    Layout("pp2-dp2", "--pipeline-model-parallel-size 2"),
    Layout("nanogpt", trainer="nanogpt"),
    Layout("tp2-pp2-dp2", _TP2_PP2, ranks=8, slow_rank=5),
    Layout("pp4-interleaved", f"{_PP4} --num-layers-per-virtual-pipeline-stage 1"),
    Layout("tp2-pp2-sp", f"{_TP2_PP2} --sequence-parallel", slow_rank=3, apex_stand_in=True),
    Layout(
        "ep2",
        "--num-experts 4 --expert-model-parallel-size 2 --moe-router-topk 2 --moe-token-dispatcher-type alltoall",
        slow_rank=1,
    ),
)


@dataclass(frozen=True)
class Fault:
    name: str
    kind: str  # as in foreign_fault.py
    milliseconds: float = 0.0  # of a layer
    every: int = 1


FAULTS = (
    Fault("none", "none"),
    Fault("host", "host", 15.0),
    Fault("gpu", "gpu", 10.0),
    Fault("host10", "host", 60.0, 10),
    Fault("gpu10", "gpu", 60.0, 10),
)


@dataclass(frozen=True)
class Cell:
    layout: Layout
    fault: Fault

    @property
    def name(self) -> str:
        return f"{self.layout.name}-{self.fault.name}"

    @property
    def is_healthy(self) -> bool:
        return self.fault.kind == "none"

    @property
    def shares(self) -> int:
        """Of the cores."""
        return -(-self.layout.ranks // SHARE_RANKS)

    def is_blamed(self, kind: str, culprits: Sequence[int], stage: int | None) -> bool:
        rank = self.layout.slow_rank
        is_stage = kind == "slow_stage" and self.layout.name.startswith("pp4") and stage in (None, rank)
        return (kind == "slow_rank" or is_stage) and list(culprits) == [rank]


def all_cells() -> list[Cell]:
    """Each layout once with one fault, then each with another: a run that is cut short has seen all layouts."""
    return [
        Cell(layout, FAULTS[(number + turn) % len(FAULTS)])
        for turn in range(len(FAULTS))
        for number, layout in enumerate(LAYOUTS)
    ]


def batches(cells: Sequence[Cell], parallel: int) -> list[list[Cell]]:
    """Cells that run at the same time. A large one takes several shares; those that do not fit go into the next."""
    made: list[list[Cell]] = []
    for cell in cells:
        room = (batch for batch in made if sum(other.shares for other in batch) + cell.shares <= parallel)
        batch = next(room, None)
        if batch is None:
            made.append(batch := [])
        batch.append(cell)
    return made


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
    # On a CPU only nanoGPT runs, which needs no package.
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


class Recorder:
    """Reads the NCCL memories and the rings of all ranks now and then, as the daemon does, and keeps what is new."""

    def __init__(self) -> None:
        self.problems: dict[int, str] = {}
        self.overwritten = 0  # before they were read
        self._processes: dict[int, str] = {}
        self._searches: dict[int, RingSearch] = {}
        self._read: dict[tuple[int, str], int] = {}
        self._records: dict[tuple[int, str], list[Table]] = {}
        self._communicators: dict[int, set[tuple[int, int, int]]] = {}

    def follow(self, pids: Sequence[int]) -> None:
        self._processes = {rank: f"/proc/{pid}" for rank, pid in enumerate(pids)}
        self._searches = {rank: RingSearch(process) for rank, process in self._processes.items()}

    @property
    def is_following(self) -> bool:
        return bool(self._processes)

    def sample(self) -> None:
        for rank in self._processes:
            try:
                self._sample(rank)
            except (OSError, RingError) as error:
                self.problems[rank] = f"{type(error).__name__}: {error}"

    def _sample(self, rank: int) -> None:
        ring = ring_reader.open_found(self._searches[rank])
        if ring is None:
            return
        try:
            descriptor = ring_reader.parse_facts(ring_reader.read_facts_text(ring) or b"{}").nccl_descriptor
            self._read_steps(rank, ring)
        finally:
            os.close(ring)
        if descriptor is None:
            return
        memory = ring_reader.open_memfd(f"{self._processes[rank]}/fd/{descriptor}")
        try:
            self._read_operations(rank, memory)
        finally:
            os.close(memory)

    def _read_steps(self, rank: int, ring: int) -> None:
        written, before = ring_reader.read_header(ring).records, self._read.get((rank, "steps"), 0)
        before = max(before, written - ring_layout.CAPACITY)
        if written > before:
            records, is_whole = ring_reader.read_records(ring, before + 1, written)
            self._keep(rank, "steps", records[is_whole], written)

    def _read_operations(self, rank: int, fd: int) -> None:
        memory, before = nccl_reader.read_memory(fd), self._read.get((rank, "nccl"), 0)
        rows = memory.communicators[["hash", "ranks", "rank"]].tolist()
        self._communicators.setdefault(rank, set()).update(rows)
        if memory.written > before:
            records = nccl_reader.read_records(fd, before, memory.written)
            self.overwritten += records.overwritten
            self._keep(rank, "nccl", records.table, memory.written)

    def _keep(self, rank: int, name: str, table: Table, written: int) -> None:
        self._records.setdefault((rank, name), []).append(table.copy())
        self._read[rank, name] = written

    def write(self, path: Path, middle_ns: int | None) -> dict[str, Any]:
        """Write what lies around a moment, or around the middle of all steps; return what it holds."""
        tables = {key: np.concatenate(parts) for key, parts in self._records.items()}
        ranks = sorted(rank for rank, name in tables if name == "nccl")
        if not ranks:
            return {"problems": self.problems, "operations": 0}
        operations, middle = MAX_OPERATIONS, middle_ns or _middle(tables)
        while True:
            arrays: dict[str, Any] = self._around(tables, ranks, middle, operations)
            np.savez_compressed(path, **arrays)
            size = path.stat().st_size
            if size <= MAX_RECORDING_BYTES:
                break
            operations = int(sum(len(arrays[f"nccl_{rank}"]) for rank in ranks) * 0.9 * MAX_RECORDING_BYTES / size)
        kept = [arrays[f"nccl_{rank}"]["issued_ns"].astype(np.int64) - middle for rank in ranks]
        return {
            "bytes": size,
            "operations": sum(map(len, kept)),
            "operations_seen": sum(len(tables[rank, "nccl"]) for rank in ranks),
            "overwritten": self.overwritten,
            "seconds": [round(float(least) / 1e9, 2) for least in _bounds(kept)],
            "problems": self.problems,
        }

    def _around(
        self, tables: dict[tuple[int, str], Table], ranks: Sequence[int], middle: int, most: int
    ) -> dict[str, Table]:
        """At most so many operations of all ranks, those nearest to a moment."""
        times = {
            key: table["issued_ns" if key[1] == "nccl" else "end_ns"].astype(np.int64) - middle
            for key, table in tables.items()
        }
        issued = np.concatenate([times[rank, "nccl"] for rank in ranks])
        # 1 is the bound on either side.
        distance = np.where(issued < 0, -issued / SECONDS_BEFORE, issued / SECONDS_AFTER) / 1e9
        reach = min(1.0, float(np.partition(distance, most)[most])) if len(distance) > most else 1.0
        first, last = -reach * SECONDS_BEFORE * 1e9, reach * SECONDS_AFTER * 1e9
        arrays: dict[str, Table] = {}
        for rank in ranks:
            for name in ("nccl", "steps"):
                if (rank, name) in tables:
                    when = times[rank, name]
                    arrays[f"{name}_{rank}"] = tables[rank, name][(when >= first) & (when < last)]
            rows = sorted(self._communicators.get(rank, ()))
            arrays[f"comms_{rank}"] = np.array(rows, dtype=np.uint64).reshape(-1, 3)
        return arrays


def _middle(tables: dict[tuple[int, str], Table]) -> int:
    first, last = _bounds([table["end_ns"] for (_, name), table in tables.items() if name == "steps"])
    return int(first + last) // 2


def _bounds(columns: Sequence[Table]) -> tuple[int, int]:
    filled = [column for column in columns if len(column)]
    return min((int(column.min()) for column in filled), default=0), max(
        (int(column.max()) for column in filled), default=0
    )


@dataclass(frozen=True)
class Change:
    """A verdict that differs from the one before it."""

    seconds: float  # since the first step
    verdict: str
    kind: str
    severity: str
    culprits: list[int]
    stage: int | None
    impact_ratio: float | None
    bound: str
    cause: str
    reason: str

    @classmethod
    def of(cls, said: Said, seconds: float) -> Change:
        verdict = said.status.verdict
        return cls(
            round(seconds, 1),
            said.gist,
            said.kind,
            said.severity,
            list(verdict.culprits),
            verdict.stage if verdict.HasField("stage") else None,
            round(verdict.impact_ratio, 4) if verdict.HasField("impact_ratio") else None,
            verdict.cause.bound,
            said.cause,
            verdict.reason,
        )


@dataclass
class Row:
    """The result of a cell. `misses` says what was wrong; `failure`, why it could not be judged."""

    name: str
    flags: str
    ranks: int
    fault: dict[str, Any]
    truth: str
    failure: str = ""
    misses: list[str] = field(default_factory=list)
    beside: list[str] = field(default_factory=list)  # cells that ran at the same time
    fault_seconds: float | None = None  # after the first step
    verdict: str = ""
    culprits: list[int] = field(default_factory=list)
    headline: str = ""
    cause: str = ""
    is_cause_right: bool | None = None
    impact_ratio: float | None = None
    true_impact_ratio: float | None = None
    alarm_after_seconds: float | None = None
    before_milliseconds: float | None = None
    after_milliseconds: float | None = None
    steps: int = 0
    start_seconds: float | None = None
    changes: list[dict[str, Any]] = field(default_factory=list)
    evaluations: list[tuple[float, str, float | None]] = field(default_factory=list)  # all: seconds, verdict, impact
    iterations: list[tuple[int, float]] = field(default_factory=list)
    recording: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)

    @property
    def is_right(self) -> bool:
        return not self.misses and not self.failure


@dataclass(frozen=True)
class Facts:
    """What the job recorded about itself."""

    started_unix_seconds: float
    fault: dict[str, Any] | None
    iterations: list[tuple[int, float]]  # the number of steps done, and milliseconds of the last ones


def iterations(trainer: Trainer, log: str) -> list[tuple[int, float]]:
    steps = ((int(number), float(millis)) for number, millis in trainer.step.findall(log))
    return [(number + 1 - trainer.first_number, millis) for number, millis in steps]


def judge(cell: Cell, row: Row, said: Sequence[Said], summary: dict[str, Any], facts: Facts) -> None:
    """Fill in what was said, what was true, and whether they agree."""
    everything = [Change.of(response, response.unix_seconds - facts.started_unix_seconds) for response in said]
    pairs = zip([None, *everything], everything, strict=False)
    changes = [change for before, change in pairs if before is None or before.verdict != change.verdict]
    row.changes = [asdict(change) for change in changes]
    row.evaluations = [(change.seconds, change.verdict, change.impact_ratio) for change in everything]
    row.iterations, row.summary = facts.iterations, summary
    jobs = summary.get("jobs") or []
    if not jobs:
        raise JobError("`rankscope run` saw no job")
    final = jobs[0]
    row.steps, row.verdict, row.culprits = final["steps"], final["verdict"], final["culprits"]
    row.headline, row.impact_ratio = final["headline"], final["impact_ratio"]
    findings = [change for change in changes if change.kind not in SAYS_NOTHING]
    if cell.is_healthy:
        row.misses += [f"{change.verdict} at {change.seconds:.0f} s" for change in findings]
        if row.verdict != "healthy":
            row.misses.append(f"ends as {row.verdict}")
        times = [millis for steps, millis in facts.iterations if steps > SETTLING_STEPS]
        row.before_milliseconds = statistics.median(times) if times else None
        return
    if facts.fault is None:
        raise JobError("the fault never began")
    row.fault_seconds = round(facts.fault["unix_seconds"] - facts.started_unix_seconds, 1)
    _measure_truth(cell, row, facts)
    early = [change for change in findings if change.seconds < row.fault_seconds]
    late = [change for change in findings if change.seconds >= row.fault_seconds]
    blames = [change for change in late if cell.is_blamed(change.kind, change.culprits, change.stage)]
    row.misses += [f"before the fault: {change.verdict} at {change.seconds:.0f} s" for change in early]
    wrong = [change for change in late if change.severity == "alarm" and change not in blames]
    row.misses += [f"also {change.verdict} at {change.seconds:.0f} s" for change in wrong]
    alarms = [change for change in blames if change.severity == "alarm"]
    is_small = row.true_impact_ratio is not None and row.true_impact_ratio < FOUND_FROM_RATIO
    if alarms:
        row.alarm_after_seconds = round(alarms[0].seconds - row.fault_seconds, 1)
    if blames:
        last = next(response for response in reversed(said) if response.gist == blames[-1].verdict)
        row.cause = last.cause
        row.is_cause_right = _is_cause_right(cell.fault.kind, last)
    if is_small and not late:
        return
    if not cell.is_blamed(row.verdict, row.culprits, None):
        row.misses.append(f"names {row.verdict} {row.culprits or ''}".strip())
    elif final["severity"] != "alarm":
        row.misses.append(f"a {final['severity']} only")
    elif row.impact_ratio is None or row.true_impact_ratio is None:
        row.misses.append("the impact is not known")
    elif abs(row.impact_ratio - row.true_impact_ratio) > IMPACT_ERROR_RATIO:
        row.misses.append("the impact is wrong")


def _is_cause_right(kind: str, said: Said) -> bool | None:
    """None where neither host nor GPU was blamed."""
    bound = said.status.verdict.cause.bound
    if kind == "host":
        is_right = bound == "host" or "hold_up_host" in said.cause
        return is_right if is_right or bound else None
    return bound == "device" if bound else None


def _measure_truth(cell: Cell, row: Row, facts: Facts) -> None:
    """From the job's own iteration times. Of a fault in few steps, the mean counts."""
    assert facts.fault is not None
    step, interval = facts.fault["step"], TRAINERS[cell.layout.trainer].log_interval
    before = [millis for steps, millis in facts.iterations if SETTLING_STEPS < steps <= step]
    after = [millis for steps, millis in facts.iterations if steps - interval >= step]
    if not before or not after:
        raise JobError(f"{len(before)} intervals before the fault and {len(after)} after it")
    row.before_milliseconds = statistics.median(before)
    row.after_milliseconds = statistics.mean(after) if cell.fault.every > 1 else statistics.median(after)
    row.true_impact_ratio = 1 - row.before_milliseconds / row.after_milliseconds


HEADINGS = ("job", "fault", "said", "alarm after", "cause", "impact said / true", "step", "recording", "right")


def table(rows: Sequence[Row]) -> str:
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for row in rows:
        cells = (" ".join(text.split()).replace("|", "\\|") for text in _texts(row))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _texts(row: Row) -> tuple[str, ...]:
    if row.failure:
        return (row.name, row.truth, row.failure[-300:], *[""] * (len(HEADINGS) - 4), "not judged")
    cause = {None: "", True: " (right)", False: " (WRONG)"}[row.is_cause_right]
    impacts = [row.impact_ratio, row.true_impact_ratio]
    impact = " / ".join("–" if ratio is None else f"{ratio:.0%}" for ratio in impacts)
    times = [millis for millis in (row.before_milliseconds, row.after_milliseconds) if millis is not None]
    operations = row.recording.get("operations", 0)
    return (
        row.name,
        row.truth,
        row.headline,
        "" if row.alarm_after_seconds is None else f"{row.alarm_after_seconds:.0f} s",
        f"{row.cause[:160]}{cause}",
        "" if row.fault["kind"] == "none" else impact,
        " → ".join(f"{millis:.0f}" for millis in times) + " ms" if times else "",
        f"{operations:,}",
        "yes" if row.is_right else f"NO: {'; '.join(row.misses)}",
    )


class Watch:
    """What `rankscope run` says about its job, received by a thread."""

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

    def __init__(self, cell: Cell, folder: Path, command: Sequence[str], environment: dict[str, str]) -> None:
        self.cell = cell
        self._folder = folder
        self._began = time.monotonic()
        self._watch: Watch | None = None
        self._recorder = Recorder()
        self._sampled = 0.0
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
        if self._watch is None and (target := re.search(r"--connect (\S+)", self.terminal)):
            self._watch = Watch(target[1])
        pids, since = self._folder / "pids.json", time.monotonic() - self._began
        if self._started_after is None and (self._folder / "started.json").exists():
            self._started_after = since
        if since - self._sampled >= SAMPLE_SECONDS and pids.exists():
            self._sampled = since
            if not self._recorder.is_following:
                self._recorder.follow(json.loads(pids.read_text()))
            self._recorder.sample()
        limit = FIRST_STEP_SECONDS if self._started_after is None else self._started_after + seconds + END_SECONDS
        if since > limit and self.is_running:
            print(f"{self.cell.name}: ended after {since:.0f} s, it takes too long", flush=True)
            self.end()

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
            middle = None if facts is None else facts["monotonic_ns"]
            row.recording = self._recorder.write(out / f"{cell.name}.npz", middle)
            self._judge(row, facts)
        except Exception as error:  # noqa: BLE001  a cell that cannot be judged does not spoil its neighbours
            traceback.print_exc(limit=-3, file=sys.stdout)
            row.failure = f"{type(error).__name__}: {error}"
        (out / f"{cell.name}.json").write_text(json.dumps(asdict(row), indent=1, default=str))
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
        self._longest = START_ESTIMATE_SECONDS + asked.seconds
        self._left_out = 0
        self.rows: list[Row] = []

    def run(self, cells: Sequence[Cell]) -> None:
        for batch in batches(cells, self._asked.parallel):
            left = self._ends_at - time.monotonic()
            if left < self._longest + 3:
                self._left_out += len(batch)
                continue
            print(f"## {', '.join(cell.name for cell in batch)} ({left:.0f} s left)", flush=True)
            began = time.monotonic()
            self.rows += self._run(batch)
            self._longest = max(self._longest, time.monotonic() - began)
            for row in self.rows[-len(batch) :]:
                print("  " + "; ".join(filter(None, _texts(row))), flush=True)
            self.save()

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
                    run.poll(self._asked.seconds)
                time.sleep(0.2)
        names = [cell.name for cell in batch]
        return [run.result(self._out, [name for name in names if name != run.cell.name]) for run in runs]

    def _start(self, cell: Cell, cores: list[int], environment: dict[str, str]) -> CellRun:
        folder = Path(tempfile.mkdtemp(prefix=f"{cell.name}-", dir=self._scratch))
        asked, layout, fault, trainer = self._asked, cell.layout, cell.fault, TRAINERS[cell.layout.trainer]
        flags = (NANOGPT_CPU_FLAGS if asked.cpu else trainer.flags).split() + layout.flags.split()
        if layout.trainer == "nanogpt":
            flags += [f"--dataset={self._source.dataset}", f"--out_dir={folder}"]
        words = {
            "--trainer": layout.trainer,
            "--script": self._source.script(trainer),
            "--arguments": json.dumps(flags),
            "--layer": trainer.layer,
            "--fault": fault.kind,
            "--rank": layout.slow_rank,
            "--milliseconds": fault.milliseconds,
            "--every": fault.every,
            "--after": asked.after,
            "--seconds": asked.seconds,
        }
        spec = Spec(
            [str(word) for pair in words.items() for word in pair] + ["--apex-stand-in"] * layout.apex_stand_in,
            layout.ranks,
            cores,
            str(self._source.modules),
            environment | {"TEARDOWN_CUPTI": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
            FIRST_STEP_SECONDS + asked.seconds + END_SECONDS,
            asked.cpu,
        )
        (folder / "spec.json").write_text(json.dumps(asdict(spec)))
        command = [sys.executable, "-m", "benchmarks.gpu.foreign", "--launch", str(folder)]
        return CellRun(cell, folder, command, environment)

    def save(self) -> None:
        (self._asked.out / "foreign.md").write_text(self.text)
        keys = ("changes", "evaluations", "iterations", "summary")
        rows = [{name: value for name, value in asdict(row).items() if name not in keys} for row in self.rows]
        results = {"machine": self._machine, "parallel": self._asked.parallel, "rows": rows}
        (self._asked.out / "foreign.json").write_text(json.dumps(results, indent=1, default=str))
        pack(self._asked.out, self._asked.pack or self._asked.out)

    @property
    def text(self) -> str:
        asked, right = self._asked, sum(row.is_right for row in self.rows)
        dry = " (dry run without a GPU: only shows that the script works)" if asked.cpu else ""
        shared = f"up to {asked.parallel} jobs of four ranks at a time share the GPU" if asked.parallel > 1 else "alone"
        left_out = f" {self._left_out} cells were left out: there was no time." if self._left_out else ""
        head = f"{self._machine['text']}; {shared}. {right} of {len(self.rows)} cells are right.{left_out}"
        return f"### Foreign trainers{dry}\n\n{head}\n\n{table(self.rows)}\n"


def pack(folder: Path, target: Path) -> None:
    """Everything into archives that are small enough to travel: results.tar.gz, results-2.tar.gz and so on."""
    files = [path for path in (*folder.glob("foreign*"), *folder.glob("foreign/*")) if path.is_file()]
    number = size = 0
    with contextlib.ExitStack() as stack:
        archive: tarfile.TarFile | None = None
        for path in sorted(files):
            if archive is None or size + path.stat().st_size > MAX_ARCHIVE_BYTES:
                number, size = number + 1, 0
                name = "results.tar.gz" if number == 1 else f"results-{number}.tar.gz"
                archive = stack.enter_context(tarfile.open(target / name, "w:gz", compresslevel=3))
            archive.add(path, str(path.relative_to(folder)))
            size += path.stat().st_size


@dataclass(frozen=True)
class Spec:
    """What `--launch` starts: the command of `rankscope run`."""

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
    # The first is the probe's; the others are ours, and none of the job's business.
    probe = Path(os.environ["PYTHONPATH"].split(os.pathsep)[0])
    # `rankscope run` knows its ranks by these, which `start_ranks` drops.
    marks = {name: value for name, value in os.environ.items() if name.startswith("RANKSCOPE_")}
    script = str(Path(__file__).with_name("foreign_fault.py"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with lab_job(
        script,
        spec.arguments,
        cpu=spec.cpu,
        ranks=spec.ranks,
        environment=spec.environment | marks,
        probe=probe,
        cores=spec.cores,
        label="foreign",
    ) as job:
        pids = folder / "pids.new"
        pids.write_text(json.dumps([process.pid for process in job.processes]))
        pids.rename(folder / "pids.json")
        try:
            job.wait_for(lambda: job.have_written("started-{}.json"), "the first step", FIRST_STEP_SECONDS)
            shutil.copy(job.folder / "started-0.json", folder / "started.json")
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
        # In the order of the patterns.
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
    parser.add_argument("--seconds", type=float, default=50.0, help="from the first step to the last")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds; cells that would not fit are left out")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--pack", type=Path, help="where the archives of all results go (default: OUT)")
    parser.add_argument("--list", action="store_true", help="print the cells that would run at the same time")
    parser.add_argument("--cpu", action="store_true", help="a tiny nanoGPT over gloo: to try the script itself")
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
