"""Captures of real training on a GPU, against what the job itself records: steps, skew, collectives, MFU, and what a
capture leaves behind.

    python3 -m benchmarks.gpu.captures [--cpu] [--out FOLDER] [--budget SECONDS] [--only NAME,…]

See README.md beside this for what has to be on PYTHONPATH. `--cpu` tries the same without a GPU, on tiny models: what
only a GPU can show is then left out and said so."""

from __future__ import annotations

import argparse
import shutil
import signal
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.gpu.capture_rows import (
    AFTER_AT_MOST,
    Rig,
    advice,
    aftermath,
    collectives,
    control,
    heard,
    told,
    utilisation,
)
from benchmarks.gpu.jobs import training
from benchmarks.gpu.reporting import Report
from benchmarks.running import daemon
from rankscope.probe import injection

POLL_SECONDS = 5.0
OURS_SECONDS = 2.0
ARTIFACTS_LIMIT_BYTES = 14 << 20

KINETO = {"KINETO_USE_DAEMON": "1", "KINETO_LOG_LEVEL": "0"}
EVERYTHING = ("--shapes", "--stacks", "--memory", "--flops", "--modules")
TEARDOWN = {"TEARDOWN_CUPTI": "1"}
PROBE = {"RANKSCOPE_PROBE": "1", "PYTHONPATH": injection.inject_folder()}


def compute_bound(rig: Rig) -> None:
    """One rank over NCCL, nothing of Rankscope's in it: by steps, by time, and with everything recorded."""
    shape, backend = ("cpu-large", "gloo") if rig.cpu else ("large", "nccl")
    with training(shape, backend, 1, rig.job_flags(shape, 1, KINETO, TEARDOWN), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, {backend}"
        one = rig.capture(job, name, "--steps", "10")
        told(rig, f"{label}, 10 steps", one, "kineto", 10)
        if one.delivered:
            collectives(rig, label, one)
            utilisation(rig, label, job, one)
            advice(rig, label, one)
        aftermath(rig, label, job, one, None if rig.cpu else AFTER_AT_MOST)
        control(rig, label, job)
        told(rig, f"{label}, 0.5 s", rig.capture(job, name, "--seconds", "0.5"), "kineto", None)
        full = rig.capture(job, name, "--seconds", "0.3", *EVERYTHING)
        told(rig, f"{label}, 0.3 s with all options", full, "kineto", None)
        aftermath(rig, f"{label}, all options", job, full, None if rig.cpu else AFTER_AT_MOST)
        heard(rig, label, job)


def launch_bound(rig: Rig) -> None:
    """The kind of job that suffers; the probe knows its step time, so recordings are short."""
    shape, backend = ("cpu-small", "gloo") if rig.cpu else ("small", "nccl")
    captures = 1 if rig.cpu else 2
    with training(shape, backend, 1, rig.job_flags(shape, 1, KINETO, TEARDOWN, PROBE), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, {backend}, with the probe"
        control(rig, label, job)
        for number in range(1, captures + 1):
            one = rig.capture(job, name, "--steps", "5")
            told(rig, f"{label}, capture {number}", one, "kineto", 5)
            if number == 1 and one.delivered:
                utilisation(rig, label, job, one)
                advice(rig, label, one)
            aftermath(rig, f"{label}, capture {number}", job, one, None if rig.cpu else AFTER_AT_MOST)
        full = rig.capture(job, name, "--steps", "3", *EVERYTHING)
        told(rig, f"{label}, 3 steps with all options", full, "kineto", 3)
        aftermath(rig, f"{label}, all options", job, full, None if rig.cpu else AFTER_AT_MOST)
        heard(rig, label, job)


def without_teardown(rig: Rig) -> None:
    if rig.cpu:
        rig.report.add("without TEARDOWN_CUPTI", "not tried: only CUDA processes are refused")
        return
    with training("small", "nccl", 1, rig.job_flags("small", 1, KINETO), cpu=False) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = "small, 1 rank, without TEARDOWN_CUPTI"
        refused = rig.capture(job, name, "--seconds", "0.3")
        was = refused.status == 1 and "TEARDOWN_CUPTI" in refused.why_not
        rig.report.add(f"{label}: refused", refused.why_not[:160], "exit status 1, says why", was)
        control(rig, label, job)
        one = rig.capture(job, name, "--seconds", "0.3", "--allow-slowdown")
        told(rig, f"{label}, --allow-slowdown", one, "kineto", None)
        aftermath(rig, label, job, one, None)
        heard(rig, label, job)


def two_ranks(rig: Rig) -> None:
    shape = "cpu-small" if rig.cpu else "medium"
    with training(shape, "gloo", 2, rig.job_flags(shape, 2, KINETO, TEARDOWN), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 2 ranks on one device, gloo"
        one = rig.capture(job, name, "--steps", "5")
        told(rig, f"{label}, 5 steps", one, "kineto", 5)
        if one.delivered:
            collectives(rig, label, one)
            join = (one.report.get("summary") or {}).get("join") or {}
            rig.report.add(
                f"{label}: joined",
                f"{join.get('verdict')}: {join.get('collectives_matched')} collectives matched, last arrivals "
                f"{join.get('last_arrivals')}, {join.get('confidence')} confidence",
                "collectives match",
                bool(join.get("collectives_matched")),
            )
        aftermath(rig, label, job, one, None)
        told(rig, f"{label}, 0.3 s", rig.capture(job, name, "--seconds", "0.3"), "kineto", None)
        heard(rig, label, job)


def by_probe(rig: Rig) -> None:
    shape, backend = ("cpu-large", "gloo") if rig.cpu else ("large", "nccl")
    with training(shape, backend, 1, rig.job_flags(shape, 1, TEARDOWN, PROBE), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, {backend}, by the probe"
        one = rig.capture(job, name, "--steps", "5")
        told(rig, f"{label}, 5 steps", one, "probe", 5)
        if one.delivered:
            collectives(rig, label, one)
            utilisation(rig, label, job, one)
            advice(rig, label, one)
        aftermath(rig, label, job, one, None if rig.cpu else AFTER_AT_MOST)
        told(rig, f"{label}, 0.3 s", rig.capture(job, name, "--seconds", "0.3"), "probe", None)


def by_stacks(rig: Rig) -> None:
    shape, backend = ("cpu-small", "gloo") if rig.cpu else ("small", "nccl")
    with training(shape, backend, 1, rig.job_flags(shape, 1), cpu=rig.cpu) as job:
        name = job.name(rig.watching)
        rig.settle()
        label = f"{shape}, 1 rank, nothing set"
        one = rig.capture(job, name, "--seconds", "2")
        told(rig, f"{label}, 2 s", one, "stacks", None)
        aftermath(rig, label, job, one, None if rig.cpu else AFTER_AT_MOST)


# In the order of what must not be missing when time runs out; seconds on a machine with a GPU.
PARTS: dict[str, tuple[Callable[[Rig], None], float]] = {
    "compute-bound": (compute_bound, 65),
    "launch-bound": (launch_bound, 65),
    "two-ranks": (two_ranks, 40),
    "without-teardown": (without_teardown, 35),
    "probe": (by_probe, 40),
    "stacks": (by_stacks, 20),
}


def latency(rig: Rig) -> None:
    if not rig.latencies:
        rig.report.add("from asking to the first recorded step", "no capture by kineto", "some", False)
        return
    rig.report.add(
        f"from asking to the first recorded step, {len(rig.latencies)} captures by kineto",
        f"median {statistics.median(rig.latencies):.2f} s, {min(rig.latencies):.2f} – {max(rig.latencies):.2f} s",
        f"≤ {POLL_SECONDS + OURS_SECONDS:g} s",
        max(rig.latencies) <= POLL_SECONDS + OURS_SECONDS,
    )


def measure(report: Report, artifacts: Path, cpu: bool, parts: Sequence[str]) -> None:
    with daemon() as watching:
        rig = Rig(report, watching, artifacts, cpu, [], 2.0 if cpu else 4.0)
        for name in parts:
            function, seconds = PARTS[name]
            report.part(name, partial(function, rig), seconds)
        latency(rig)


def keep_artifacts(folder: Path, target: Path) -> None:
    """As many as come in under the limit, small ones first."""
    left = ARTIFACTS_LIMIT_BYTES
    with tarfile.open(target, "w") as archive:
        for path in sorted(folder.rglob("*.gz"), key=lambda one: one.stat().st_size):
            left -= path.stat().st_size + 1024
            if left < 0:
                break
            archive.add(path, path.relative_to(folder))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU: to try the script itself")
    parser.add_argument("--out", type=Path, default=Path("gpu-results"))
    parser.add_argument("--budget", type=float, default=330.0, help="seconds; parts that would not fit are left out")
    parser.add_argument("--only", default=",".join(PARTS), help=f"of {', '.join(PARTS)}")
    asked = parser.parse_args()
    title = "Captures (dry run without a GPU: only shows that the script works)" if asked.cpu else "Captures"
    report = Report(title, asked.out, "captures", asked.budget)
    artifacts = Path(tempfile.mkdtemp(prefix="rankscope-artifacts-"))
    # Ended by `timeout`: what there is by then is told, and nothing is left running.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        report.part("all of it", lambda: measure(report, artifacts, asked.cpu, asked.only.split(",")))
    finally:
        keep_artifacts(artifacts, asked.out / "artifacts.tar")
        shutil.rmtree(artifacts, ignore_errors=True)
        missed = report.finish()
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
