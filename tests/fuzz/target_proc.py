"""A process under /proc: its name, environment, command and paths are its own choice; the rest is the kernel's, or that
of a substitute for the kernel (gVisor, lxcfs)."""

from __future__ import annotations

import contextlib
import os

from rankscope.daemon.discovery.rank_environment import MAX_JOB_LENGTH, MAX_WORLD_SIZE
from rankscope.daemon.discovery.ranks import MAX_PROBLEMS, NAME_CHARACTERS, RankDiscovery
from rankscope.daemon.export.rank_metrics import RankReport, RankTotals, add_window, rank_metrics
from rankscope.daemon.gpu.attribution import claimed_gpu, visible_gpus
from rankscope.daemon.gpu.readings import GpuReading
from rankscope.daemon.process_collector import ProcessCollector
from rankscope.daemon.samples import Problem, RankProcess, Span
from rankscope.daemon.windows.window import RankSamples, assemble
from tests.fuzz.checking import check_duration, check_message, check_metrics, check_text
from tests.fuzz.mutating import Mutator
from tests.fuzz.packing import pack_files, unpack_files
from tests.fuzz.scratch import scratch_folder
from tests.fuzz.targets import recorded

_REAL = recorded("proc")
_ENVIRONMENTS = (
    b"SLURM_PROCID=3\0SLURM_LOCALID=3\0SLURM_NTASKS=8\0SLURM_JOB_ID=77\0SLURM_STEP_ID=0\0NVIDIA_VISIBLE_DEVICES=all\0",
    b"OMPI_COMM_WORLD_RANK=1\0OMPI_COMM_WORLD_SIZE=2\0PMIX_NAMESPACE=prterun-1@2\0CUDA_VISIBLE_DEVICES=GPU-1,MIG-GPU-1/2/3\0",
)
_COMMANDS = (b"/usr/bin/python3\0-u\0/home/ann/train.py\0--token\0x\0", b"python\0-X\0a\0-m\0a.b\0", b"ray::W x=y\0\0")
SEEDS = [
    *_REAL,
    *(pack_files({**unpack_files(_REAL[0]), "environ": text}) for text in _ENVIRONMENTS),
    *(pack_files({**unpack_files(_REAL[0]), "cmdline": text}) for text in _COMMANDS),
]
TOKENS = [
    *(
        b"RANK=",
        b"WORLD_SIZE=",
        b"LOCAL_RANK=",
        b"MASTER_ADDR=",
        b"MASTER_PORT=",
        b"TORCHELASTIC_RUN_ID=",
        b"SLURM_PROCID=",
    ),
    *(b"SLURM_JOB_ID=", b"SLURM_JOB_NAME=", b"SLURM_STEP_ID=", b"RAY_JOB_ID=", b"RANKSCOPE_RUN=", b"@", b"/"),
    *(b"SLURM_NTASKS=", b"RANKSCOPE_", b"KINETO_", b"CUDA_VISIBLE_DEVICES=", b"NVIDIA_VISIBLE_DEVICES=", b"libtorch"),
    *(
        b"\n%%%% stat\n",
        b"\n%%%% environ\n",
        b"\n%%%% status\n",
        b"\n%%%% cgroup\n",
        b"\n%%%% maps\n",
        b"NSpid:\t",
        b"pod",
    ),
    *(
        b"1234567890abcdef1234567890abcdef",
        b") R 1 ",
        b"(",
        b")",
        b"0::/",
        b"4:cpu,cpuacct:/",
        b"throttled_usec ",
        b"../..",
    ),
]
_PID = 23305
_FILES = ("stat", "status", "environ", "cmdline", "maps", "cgroup", "schedstat")
_GPUS = tuple(GpuReading(uuid=f"GPU-{number}", index=number, name="A100") for number in range(4))
_SPANS = (Span(10**18, 10**18 + 5 * 10**9), Span(10**18 + 5 * 10**9, 10**18 + 10**10))


class _Tree:
    def __init__(self) -> None:
        root = scratch_folder("proc")
        self.proc, self.cgroups = root / "proc", root / "cgroup"
        self.process = self.proc / str(_PID)
        for folder in (self.process / "fd", self.proc / "self", self.cgroups / "kubepods.slice"):
            folder.mkdir(parents=True, exist_ok=True)
        (self.proc / "self" / "cgroup").write_bytes(b"0::/\n")

    def write(self, files: dict[str, bytes]) -> None:
        for name in _FILES:
            path = self.process / name
            if name in files:
                path.write_bytes(files[name])
            else:
                path.unlink(missing_ok=True)
        (self.cgroups / "cpu.stat").write_bytes(files.get("cpu.stat", b""))
        exe = self.process / "exe"
        exe.unlink(missing_ok=True)
        # A link may hold anything but a NUL, and not more than a path.
        target = files.get("exe", b"/usr/bin/python3").split(b"\0")[0][:255]
        if target:
            with contextlib.suppress(OSError):
                exe.symlink_to(os.fsdecode(target))


_TREE: list[_Tree] = []


def run(data: bytes) -> None:
    if not _TREE:
        _TREE.append(_Tree())
    tree = _TREE[0]
    tree.write(unpack_files(data))
    discovery = RankDiscovery(tree.proc, "node", monotonic=lambda: 0.0)
    found = discovery.scan()
    assert discovery.scan() == found, "the same process was seen differently"
    assert len(found.ranks) <= 1 and len(found.problems) <= MAX_PROBLEMS + 2
    for problem in found.problems:
        check_text(problem.text, 1000)
    collector = ProcessCollector(tree.proc, tree.cgroups)
    for rank in found.ranks:
        _check_rank(rank)
    for span in _SPANS:
        collector.poll()
        taken = collector.collect(found.ranks, span)
        for rank in found.ranks:
            _check_window(rank, taken.get(rank.key), span, data)


def _check_rank(rank: RankProcess) -> None:
    check_text(rank.job, MAX_JOB_LENGTH)
    assert "/" not in rank.job
    for text in (rank.program.command, rank.program.user, rank.program.team):
        check_text(text, NAME_CHARACTERS)
    assert rank.job and 0 <= rank.rank < rank.world_size <= MAX_WORLD_SIZE
    assert 0 <= rank.local_rank < rank.world_size
    assert rank.pod is None or set(rank.pod) <= set("0123456789abcdef-")
    assert len(repr(dict(rank.environment))) < 1 << 20
    assert all(name.startswith(("RANKSCOPE_", "KINETO_", "CUDA_", "NVIDIA_", "TEARDOWN_")) for name in rank.environment)
    visible = visible_gpus(rank.environment, _GPUS)
    assert visible is None or all(gpu in _GPUS for gpu in visible)
    assert claimed_gpu(rank.environment, rank.local_rank, _GPUS) in (None, *_GPUS)


def _check_window(rank: RankProcess, sample: object, span: Span, data: bytes) -> None:
    if isinstance(sample, Problem):
        samples = RankSamples(problems=(sample,))
    else:
        samples = RankSamples(process=sample)
        for name in ("cpu_seconds", "run_delay_seconds", "throttled_seconds", "stopped_seconds"):
            check_duration(getattr(sample, name, None))
    window = assemble(rank, "node", span, 1, samples, lambda _: None)
    check_message(window)
    report = RankReport(window, add_window(RankTotals(), window), samples.problems)
    check_metrics(rank_metrics([report], full=True), series=80, data=data)


class _InFiles:
    """One file at a time, mostly the environment, there mostly one value."""

    def __init__(self, plain: Mutator) -> None:
        self._plain = plain
        self._random = plain.random

    def mutate(self, data: bytes, other: bytes) -> bytes:
        files = unpack_files(data)
        if not files or self._random.random() < 0.1:
            return self._plain.mutate(data, other)
        for _ in range(self._random.choice((1, 1, 2))):
            name = "environ" if self._random.random() < 0.5 else self._random.choice(sorted(files))
            old = files.get(name, b"")
            if name == "environ" and self._random.random() < 0.7:
                files[name] = self._with_another_value(old)
            else:
                files[name] = self._plain.mutate(old, unpack_files(other).get(name, b""))
        return pack_files(files)

    def _with_another_value(self, environment: bytes) -> bytes:
        variables = environment.split(b"\0")
        place = self._random.randrange(len(variables))
        name, _, value = variables[place].partition(b"=")
        value = self._plain.token() if self._random.random() < 0.6 else self._plain.mutate(value, b"")
        variables[place] = name + b"=" + value.replace(b"\0", b"")
        return b"\0".join(variables)


def mutator(plain: Mutator) -> _InFiles:
    return _InFiles(plain)
