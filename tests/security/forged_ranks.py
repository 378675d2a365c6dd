"""Ranks that step and answer captures as they like, seen by a real daemon, and captures of them."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc

from rankscope.v1 import capture_service_pb2 as pb
from rankscope.v1.capture_service_pb2_grpc import CaptureServiceStub
from tests.integration.daemon_process import Serving, run_of

FORGED = Path(__file__).parent / "jobs" / "forged_trace.py"
CAPTURE_SECONDS = 180.0
NOBODY = 65534
EMPTY = '{"traceEvents": []}'
NEVER = -1  # answers no capture
# The interpreter may lie where an ordinary user cannot read: all of it is loaded before.
AS_USER = """
import fcntl, mmap, os, sys, time
with open(sys.argv.pop(1), "rb") as library:  # a rank is known by the torch it has loaded
    loaded = mmap.mmap(library.fileno(), 0, prot=mmap.PROT_READ)
from rankscope.probe import capture_commands, ring, ring_layout
uid = int(sys.argv.pop(1))
program = open(sys.argv.pop(1)).read()
sys.argv[2:] = [open(path).read() for path in sys.argv[2:]]
os.setgroups([]), os.setgid(uid), os.setuid(uid)
exec(compile(program, "forged_trace.py", "exec"))
"""


@contextmanager
def forged_rank(
    run: str, size: int, text: str = "", *, uid: int = 0, enter: Sequence[str] = (), **environment: str
) -> Iterator[int]:
    """Its pid. `enter` is a command that starts another, in a namespace."""
    base = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "KINETO"))}
    base |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    base |= {"MASTER_ADDR": "10.9.8.7", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": run}
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "libtorch_cpu.so")
        library.write_bytes(b"torch")
        trace = Path(folder, "trace")
        trace.write_text(text)
        words = [str(size), str(trace)] if text else [str(size)]
        command = [*enter, sys.executable, "-c", AS_USER, str(library), str(uid), str(FORGED), *words]
        process = subprocess.Popen(command, env=base | environment, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None and process.stdout.readline() == "stepping\n"
            yield process.pid
        finally:
            process.kill()
            process.communicate()


def job_of(daemon: Serving, run: str, ranks: int = 1) -> str:
    """What the daemon calls the job, once it sees the steps of all its ranks."""
    found: set[str] = set()

    def all_step() -> bool:
        seen = [run_of(labels) for name, labels, value in daemon.scrape() if name == "rankscope_rank_steps_total"]
        found.update(job for job in seen if run in job)
        return len([job for job in seen if run in job]) == ranks

    daemon.wait_until(all_step)
    (job,) = found
    return job


def captured(daemon: Serving, job: str) -> pb.Capture:
    request = pb.StartCaptureRequest(job=job, steps=2, patience_seconds=CAPTURE_SECONDS / 2)
    with grpc.insecure_channel(daemon.grpc_target) as channel:
        *_, last = CaptureServiceStub(channel).StartCapture(request, timeout=CAPTURE_SECONDS)
    return last.capture
