"""Records real bytes for `seeds/`: `python -m tests.fuzz.recording`, once; they are committed.

Two ranks train for some seconds with the probe and with libkineto's client, and everything that a daemon would read of
them is copied: datagrams, ring, /proc, py-spy's output, a trace."""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.fleets import response
from rankscope.daemon.samples import GpuSample, ProcessSample, StepSample
from rankscope.daemon.stacks.pyspy import dump_command, find_py_spy, record_command
from rankscope.daemon.stacks.pyspy_output import parse_recording
from rankscope.daemon.stacks.recording import summarise
from rankscope.daemon.steps import ring_reader
from rankscope.daemon.windows.window import RankSamples, assemble
from rankscope.probe import ring_layout
from rankscope.v1.window_pb2 import Stall
from tests.fuzz import target_ring, target_windows
from tests.fuzz.packing import pack_files
from tests.fuzz.targets import SEEDS

JOB = """
import os, time, torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
torch.set_num_threads(1)
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)))
optimizer = torch.optim.AdamW(model.parameters())
def step():
    optimizer.zero_grad()
    model(torch.randn(16, 64)).sum().backward()
    optimizer.step()
end = time.time() + 45
done = torch.zeros(1)
n = 0
while True:
    step(); time.sleep(0.01); n += 1
    if n == 200:
        with torch.profiler.profile(record_shapes=True, profile_memory=True) as profiler:
            for _ in range(3):
                step(); profiler.step()
        profiler.export_chrome_trace(os.environ["TRACE"] + "/" + os.environ["RANK"] + ".json")
    done[0] = float(time.time() > end); dist.all_reduce(done)
    if done[0]: break
"""
ROOT = Path(__file__).resolve().parent.parent.parent
EVENTS = 120
SLICES = 8
_MARKS = ("ProfilerStep", "Optimizer", "nccl", "gloo", "record_param", "PyTorch Profiler", "Iteration")
RECORDS = 24
PROC_FILES = ("stat", "status", "environ", "maps", "cgroup", "schedstat")
MAPS_LINES = 40


def main() -> None:
    place = Path(tempfile.mkdtemp(prefix="rankscope-seeds-"))
    (place / "train.py").write_text(JOB)
    endpoint = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    endpoint.bind(str(place / "dynolog"))
    endpoint.settimeout(60)
    ranks = [_start(place, rank) for rank in (0, 1)]
    try:
        _keep("ipc", {"poll": endpoint.recv(65536)})
        while len(list(place.glob("*.json"))) < 2 and all(rank.poll() is None for rank in ranks):
            time.sleep(0.5)
        time.sleep(2)
        pid = ranks[1].pid
        _keep("ring", {"real": _ring(pid)})
        _keep("proc", {"rank": _proc(pid)})
        _keep("pyspy", _stacks(pid, place))
        _keep("trace", {f"gloo{rank}.json": shortened((place / f"{rank}.json").read_bytes()) for rank in (0, 1)})
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        shutil.rmtree(place)
    h200 = ROOT / "tests" / "data" / "h200"
    for name in ("nccl_world1_3steps", "gloo_2ranks_rank0", "gloo_2ranks_rank1"):
        _keep("trace", {f"h200_{name}.json": shortened(gzip.decompress((h200 / f"{name}.json.gz").read_bytes()))})
    _keep("windows", {"two_ranks": windows()})


def _start(place: Path, rank: int) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ["PATH"],
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29533",
        "TORCHELASTIC_RUN_ID": "none",
        "RANKSCOPE_PROBE": "1",
        "RANKSCOPE_MODEL": "params=7B,layers=32,width=4096,sequence=4096,batch=1024",
        "RANKSCOPE_PEAK_FLOPS": "989T",
        "RANKSCOPE_PARALLELISM": "pp=1,dp=2",
        "KINETO_USE_DAEMON": "1",
        "KINETO_IPC_SOCKET_DIR": str(place),
        "TEARDOWN_CUPTI": "1",
        "CUDA_VISIBLE_DEVICES": "0,GPU-5ae9",
        "TRACE": str(place),
    }
    return subprocess.Popen([sys.executable, "train.py"], cwd=place, env=environment)


def _ring(pid: int) -> bytes:
    """The header and the latest records, as target_ring packs them."""
    with ring_reader.opened(Path("/proc"), pid) as descriptor:
        assert descriptor is not None
        header = ring_reader.read_header(descriptor)
        whole = os.pread(descriptor, ring_layout.RING_BYTES, 0)
    start = ring_layout.HEADER_BYTES + (header.records - RECORDS) * ring_layout.RECORD_BYTES
    return whole[: ring_layout.HEADER_BYTES] + whole[start : start + RECORDS * ring_layout.RECORD_BYTES]


def _proc(pid: int) -> bytes:
    files = {name: Path(f"/proc/{pid}/{name}").read_bytes() for name in PROC_FILES}
    maps = files["maps"].splitlines(keepends=True)
    torch = [line for line in maps if b"libtorch" in line]
    files["maps"] = b"".join([*maps[:MAPS_LINES], *torch[:2]])
    files["cgroup"] = b"0::/kubepods.slice/kubepods-pod0a1b2c3d_1111_2222_3333_444455556666.slice/cri-x.scope\n"
    files["cpu.stat"] = b"usage_usec 5\nnr_throttled 2\nthrottled_usec 1500\n"
    return pack_files(files)


def _stacks(pid: int, place: Path) -> dict[str, bytes]:
    py_spy = find_py_spy()
    assert py_spy is not None
    raw, log = place / "raw", place / "log"
    with log.open("wb") as output:
        subprocess.run(record_command(py_spy, pid, 2, 20, raw), check=True, stdout=output, stderr=output)
    dumped = subprocess.run(dump_command(py_spy, pid), check=True, capture_output=True).stdout
    return {"record.raw": raw.read_bytes(), "record.log": log.read_bytes(), "dump.json": dumped}


def shortened(text: bytes) -> bytes:
    """The trace with few events: steps, collectives and optimizers, and some of everything else."""
    trace: dict[str, Any] = json.loads(text)
    events = sorted(trace["traceEvents"], key=lambda event: event.get("ts", 0))
    timed = [event["ts"] for event in events if event.get("ph") == "X"]
    slice_us = (timed[-1] - timed[0]) / SLICES + 1
    marks: list[dict[str, Any]] = []
    others: list[dict[str, Any]] = []
    counts: Counter[object] = Counter()
    correlations: set[object] = set()
    for event in events:
        name = str(event.get("name"))
        moment = int((event.get("ts", timed[0]) - timed[0]) / slice_us)
        kind = (event.get("ph"), event.get("cat"), name[:6], moment)
        counts[kind] += 1
        correlation = (event.get("args") or {}).get("correlation")
        if name.startswith(_MARKS) and event.get("ph") == "X":
            marks.append(event)
        elif (counts[kind] <= 1 and event.get("cat") != "python_function") or correlation in correlations:
            others.append(event)
            correlations |= {correlation} - {None, 0}
    marks = marks[:: len(marks) // (EVENTS // 2) + 1]
    others = others[:: len(others) // (EVENTS - len(marks)) + 1]
    trace["traceEvents"] = sorted([*marks, *others], key=lambda event: event.get("ts", 0))
    return json.dumps(trace, separators=(",", ":")).encode()


def windows() -> bytes:
    """What a daemon sends of the job whose bytes are in `seeds`: two ranks, every source."""
    collector, span = target_ring.made_collector(), target_ring._span()
    shared = target_ring._Shared()
    windows = []
    try:
        shared.write(target_ring.SEEDS[0])
        steps = next(iter(collector.collect([target_ring._RANK], span).values()))
        assert isinstance(steps, StepSample)
    finally:
        shared.close()
    text = (SEEDS / "pyspy" / "record.raw").read_text()
    stacks = summarise(parse_recording(text, {23305}).stacks, 1, span)
    process = ProcessSample(4.5, 0.2, 0.1, 0.0, 1 << 28, 8, 12, 300)
    for number in (0, 1):
        rank = replace(target_ring._RANK, job="127.0.0.1:29533", rank=number, pod=target_windows.UIDS[0])
        stall = Stall(seconds_since_step=9.5, phase="forward", stack=["f (a.py:1)"], collectives_enqueued=5)
        samples = RankSamples(steps, process, stacks, gpu=GpuSample(gpus=1, uuid="GPU-1", sm_clock_hertz=1.2e9))
        made = assemble(rank, target_windows.NODE, span, 1, samples, lambda _: 989e12, stall if number else None)
        windows.append(made)
    message = response(target_windows.NODE, windows)
    message.departed.append(message.windows[0].identity)
    message.departed[0].rank = 1
    return message.SerializeToString()


def _keep(name: str, files: dict[str, bytes]) -> None:
    folder = SEEDS / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, data in files.items():
        (folder / file).write_bytes(nameless(data))
        print(f"{folder / file}: {len(data)} bytes")


def nameless(data: bytes) -> bytes:
    """Without where on whose machine it was recorded."""
    root = str(ROOT).encode()
    data = data.replace(root + b"/.venv", b"/opt/venv").replace(root, b"/opt/app")
    return re.sub(rb"/tmp/rankscope-seeds-\w+", b"/job", data.replace(str(Path.home()).encode(), b"/home/user"))


if __name__ == "__main__":
    main()
